//! PyTorch jobs on the CPU, on real gloo: Debian's 1.13, a current one in a Debian forky root, and
//! that of PyPI. A missing rank is named with its line; torchrun restarts a hung job.

use std::{ffi::OsString, fs, path::PathBuf, process::Command, sync::MutexGuard};

use serde_json::json;
use xpu_timer_proto::{
    Message,
    server::Stacktrace,
    v1::{DataType, FlightRecord, Op, OpStatus, Operation},
};
use xpu_timer_tests::{
    DEBIAN_PYTHON, Incident, Job, PATIENCE, Process, artifacts, forky_with_torch, lacks, skip, tree, wait_until,
};

use crate::torch::pypi;

const RANKS: u32 = 4;
/// Steps before the fault.
const STEPS: u64 = 20;
/// Collectives of the whole job before the fault: six in each step, and ten before the first one.
const BEFORE: u64 = 6 * STEPS + 10;

/// A Python with PyTorch.
struct Torch {
    python: PathBuf,
    /// Where it sees its files, when that is not our root.
    root: Option<PathBuf>,
    /// Where it finds the libraries that it is linked with, when the linker does not know.
    library_path: Option<OsString>,
}

fn debian() -> Option<Torch> {
    if let Some(reason) = lacks("python3-torch") {
        skip(&reason);
        return None;
    }
    Some(Torch { python: DEBIAN_PYTHON.into(), root: None, library_path: None })
}

fn forky() -> Option<Torch> {
    match forky_with_torch() {
        Ok(root) => Some(Torch { python: "/usr/bin/python3".into(), root: Some(root), library_path: None }),
        Err(error) => {
            skip(&format!("{error:#}"));
            None
        }
    }
}

/// PyPI's torch, which is linked with the libraries of a device; no test here needs a device.
fn on_cpu() -> Option<(Torch, MutexGuard<'static, ()>)> {
    let (torch, turn) = pypi()?;
    let library_path = torch.library_path().expect("the libraries of stubs");
    Some((Torch { python: torch.python(), root: None, library_path: Some(library_path) }, turn))
}

impl Torch {
    /// A command of this Python under `xpu_timer_launch`. In another root the tree and the job's
    /// folders lie where they lie here.
    fn launch(&self, job: &Job, arguments: &[&str]) -> Command {
        let launcher = artifacts().bin("xpu_timer_launch");
        let Some(root) = &self.root else {
            let mut command = job.launch(&self.python);
            command.args(arguments);
            if let Some(path) = &self.library_path {
                command.env("LD_LIBRARY_PATH", path);
            }
            return command;
        };
        let mut command = job.command("unshare");
        let script = "root=$1; shift; for folder in /proc /dev /tmp \"$TREE\"; do \
                      mkdir -p \"$root$folder\" && mount --rbind \"$folder\" \"$root$folder\" || exit 99; done; \
                      cd / && exec chroot \"$root\" \"$@\"";
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(root).arg(launcher).arg(&self.python).args(arguments);
        command.env("TREE", tree()).env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Four ranks of the example.
    fn ranks(&self, job: &Job, arguments: &[&str]) -> Process {
        let examples = tree().join("tests/examples");
        let [runner, script] = ["run_ranks.py", "torch_gloo.py"].map(|name| examples.join(name).display().to_string());
        let mut words = vec![runner.as_str(), "--nproc", "4", script.as_str()];
        words.extend(arguments);
        Process::spawn(&mut self.launch(job, &words))
    }
}

/// A job whose ranks hang soon and find each other at a port of their own.
fn job() -> Job {
    let job = Job::new();
    let port = job.spare_port();
    job.with("XPU_TIMER_HANG_TIMEOUT", "4")
        .with("XPU_TIMER_SAMPLE_INTERVAL", "1")
        .with("XPU_TIMER_LINGER", "60")
        .with("MASTER_ADDR", "127.0.0.1")
        .with("MASTER_PORT", &port.to_string())
        .with("OMP_NUM_THREADS", "1")
        // Debian builds PyTorch without it.
        .with("USE_LIBUV", "0")
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

#[track_caller]
fn check(incident: &Incident, culprit: u32, cause: &str, parts: &[&str]) {
    let source = fs::read_to_string(tree().join("tests/examples/torch_gloo.py")).expect("the example");
    let line = source.lines().position(|line| line.contains("signal.pause()")).expect("where a rank stays") + 1;
    let text = text(incident);
    assert_eq!(incident.verdict["cause"], cause, "{text}");
    assert_eq!(incident.verdict["culprits"], json!([culprit]), "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    let place = format!("torch_gloo.py:{line} in evaluate_forever");
    for part in parts.iter().copied().chain([place.as_str()]) {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
}

/// The first incident that is a hang: on a machine that others use, too, PyTorch's start takes its
/// time.
fn wait_hang(job: &Job) -> Incident {
    (1..)
        .map(|count| job.wait_incident(count, PATIENCE * 2))
        .find(|incident| incident.verdict["cause"] != "not_a_hang")
        .expect("another one each time")
}

#[track_caller]
fn expect(torch: &Torch, fault: &str, cause: &str, parts: &[&str]) -> (Job, Incident) {
    expect_of(torch, 2, fault, cause, parts)
}

#[track_caller]
fn expect_of(torch: &Torch, culprit: u32, fault: &str, cause: &str, parts: &[&str]) -> (Job, Incident) {
    let job = job();
    let ranks = torch.ranks(&job, &["--fault", fault, "--fault-rank", &culprit.to_string()]);
    let incident = wait_hang(&job);
    drop(ranks);
    check(&incident, culprit, cause, parts);
    (job, incident)
}

fn flight(incident: &Incident, rank: u32) -> FlightRecord {
    let file = incident.path.join(format!("{rank:05}-{RANKS:05}.stacktrace"));
    let bytes = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    Stacktrace::decode(&bytes[..]).expect("a dump").flight_record.expect("a flight record")
}

/// Checks one step of the example in each rank's record, and that all ranks of a group agree on it.
fn check_records(incident: &Incident) {
    let record = flight(incident, 0);
    let health = record.health.as_ref().expect("health");
    assert_eq!((health.dropped, health.panics, health.overflows), (0, 0, 0));
    let groups = |rank: u32| -> Vec<(u32, u64)> {
        flight(incident, rank).communicators.iter().map(|group| (group.size, group.id)).collect()
    };
    let [zero, one, two, three] = [0, 1, 2, 3].map(groups);
    assert!(zero == two && one == three, "{zero:?} {one:?} {two:?} {three:?}");
    assert_eq!(zero.iter().map(|(size, _)| *size).collect::<Vec<_>>(), [4, 2]);
    assert!(zero[0] == one[0] && zero[1] != one[1], "one world, two halves");

    // In a step: all_reduce, broadcast, all_gather, two in all_gather_object, barrier; then the
    // half's own. Before, rank 0 receives from any of the others.
    let [world, half] = [0, 1].map(|index| &record.communicators[index]);
    assert_eq!((world.launched, world.completed), (BEFORE + 1, BEFORE));
    assert_eq!((half.launched, half.completed, world.point_to_point), (STEPS, STEPS, 2 * STEPS + 3));
    let pending: Vec<_> =
        record.operations.iter().filter(|operation| operation.status() == OpStatus::Pending).collect();
    let [only] = pending[..] else { panic!("one operation is pending: {pending:?}") };
    assert_eq!((only.op(), only.seq, only.started_ns != 0), (Op::AllReduce, BEFORE + 1, true));
    assert!(record.operations.iter().all(|operation| operation.status() != OpStatus::Failed));
    assert_eq!((only.count, only.dtype()), (4096, DataType::Float32));
    // gloo numbers the collectives of a group from 0.
    assert_eq!(only.tag, Some(BEFORE as i32));
    let rare = |op: Op| {
        let mut found = record.operations.iter().filter(|operation| operation.op() == op);
        found.next().map(|operation| (operation.count, operation.dtype(), operation.peer))
    };
    assert_eq!(rare(Op::Gather), Some((2, DataType::Float32, 1)));
    assert_eq!(rare(Op::Scatter), Some((3, DataType::Float32, 2)));
    assert_eq!(rare(Op::Reduce), Some((5, DataType::Float32, 3)));
    assert_eq!(rare(Op::AllToAll), Some((4, DataType::Float32, -1)));
    // The largest of 7 numbers, and the sums.
    let reductions = |count: u64| {
        let own = record.operations.iter().filter(move |operation| operation.op() == Op::AllReduce);
        own.filter(move |operation| operation.count == count).map(|operation| operation.reduce_op).collect::<Vec<_>>()
    };
    assert_eq!(reductions(7), [2, 0]);
    assert!(reductions(1024).iter().all(|reduction| *reduction == 0));
    let calls =
        |name: &str| record.coverage.iter().filter(|row| row.name.contains(name)).map(|row| row.calls).sum::<u64>();
    assert_eq!(calls("ProcessGroupGloo::allreduce"), 2 * STEPS + 2 + 1);
    assert_eq!(calls("ProcessGroupGloo::barrier"), STEPS + 2);
    for (op, times) in [(Op::Gather, 1), (Op::Scatter, 1), (Op::Reduce, 1), (Op::AllToAll, 1)] {
        assert_eq!(record.operations.iter().filter(|operation| operation.op() == op).count(), times, "{op:?}");
    }
    assert_eq!(calls("ProcessGroupGloo::recvAnysource"), 3);
    let tag = |op: Op| record.operations.iter().find(|operation| operation.op() == op).and_then(|found| found.tag);
    assert_eq!((tag(Op::Recv), tag(Op::Send)), (Some(0), Some(0)));
}

#[test]
fn debian_ranks_missing_from_a_collective() {
    let Some(torch) = debian() else { return };
    let (_job, incident) =
        expect(&torch, "all_reduce", "missing_rank", &["has not entered all_reduce", "ranks 0-1, 3 wait"]);
    assert_eq!(incident.verdict["confidence"], "high", "{}", text(&incident));
    check_records(&incident);
    expect(&torch, "broadcast", "missing_rank", &["has not entered broadcast"]);
    expect(&torch, "barrier", "missing_rank", &["has not entered barrier", "ranks 0-1, 3 wait"]);
}

#[test]
fn debian_ranks_missing_from_composite_collectives_and_transfers() {
    let Some(torch) = debian() else { return };
    expect(&torch, "all_gather_object", "missing_rank", &["has not entered all_gather", "ranks 0-1, 3 wait"]);
    expect(&torch, "monitored_barrier", "missing_rank", &["has not entered barrier"]);
    for fault in ["recv", "recv_any", "send"] {
        expect(&torch, fault, "missing_rank", &["ranks 0, 3 wait for it there"]);
    }
}

#[test]
fn debian_ranks_missing_from_their_group() {
    let Some(torch) = debian() else { return };
    expect(&torch, "group", "missing_rank", &["has not entered"]);
    expect(&torch, "init", "comm_init", &["has not joined the communicator"]);
    expect(&torch, "new_group", "comm_init", &["has not joined the communicator", "ranks 0-1, 3 wait for it"]);
}

#[test]
fn debian_ranks_without_a_store_host() {
    let Some(torch) = debian() else { return };
    expect_of(&torch, 0, "init", "comm_init", &["has not joined the communicator", "ranks 1-3 wait in"]);
}

#[test]
fn debian_ranks_wait_for_a_key_that_one_of_them_has_to_set() {
    let Some(torch) = debian() else { return };
    let expect_wait = |fault: &str, part: &str| {
        let (_job, incident) = expect(&torch, fault, "missing_rank", &[part, "ranks 0-1, 3 wait"]);
        assert!(!text(&incident).contains("creation of"), "{}", text(&incident));
        flight(&incident, 3)
    };
    expect_wait("store", "has not set the key \"default_pg/from 2\" that the others wait for in the store");
    let record =
        expect_wait("store_barrier", "has not set the key \"default_pg/done.2\" that the others wait for in the store");
    let is_pending = |operation: &&Operation| operation.status() == OpStatus::Pending;
    let wait = record.operations.iter().find(is_pending).expect("the wait is pending");
    let keys: Vec<String> = (0..RANKS).map(|rank| format!("default_pg/done.{rank}")).collect();
    assert_eq!((&wait.store_keys, wait.store_key_count), (&keys, RANKS));
    assert_eq!(wait.function, "c10d::TCPStore::wait");
}

#[test]
fn a_debian_rank_waits_for_the_key_of_another_step() {
    let Some(torch) = debian() else { return };
    let (_job, incident) = verdict_of(&torch, "store_step");
    assert_eq!(incident.verdict["cause"], "missing_rank", "{}", text(&incident));
    assert_eq!(incident.verdict["culprits"], json!([2]), "{}", text(&incident));
    for key in ["step/17", "step/18"] {
        assert!(text(&incident).contains(key), "{}", text(&incident));
    }
}

#[test]
fn a_debian_rank_that_gloo_ends_is_not_to_blame_for_the_size_of_another() {
    let Some(torch) = debian() else { return };
    for (fault, cause) in [("size", "size_mismatch"), ("dtype", "dtype_mismatch")] {
        let (_job, incident) = verdict_of(&torch, fault);
        assert_eq!(incident.verdict["cause"], cause, "{}", text(&incident));
        assert_eq!(incident.verdict["culprits"], json!([2]), "{}", text(&incident));
    }
}

/// The verdict on a fault of rank 2.
fn verdict_of(torch: &Torch, fault: &str) -> (Job, Incident) {
    let job = job();
    let ranks = torch.ranks(&job, &["--fault", fault, "--fault-rank", "2"]);
    let incident = wait_hang(&job);
    drop(ranks);
    (job, incident)
}

#[test]
fn a_healthy_debian_job_has_no_incident() {
    let Some(torch) = debian() else { return };
    healthy(&torch);
}

fn healthy(torch: &Torch) {
    let job = job();
    let output = torch.ranks(&job, &["--steps", "40"]).wait(PATIENCE * 2);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    let mut done: Vec<&str> = output.stdout.lines().collect();
    done.sort_unstable();
    assert_eq!(done, ["rank 0 done", "rank 1 done", "rank 2 done", "rank 3 done"], "{}", output.stderr);
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
}

#[test]
fn forky_ranks_missing_from_a_collective() {
    let Some(torch) = forky() else { return };
    let (_job, incident) =
        expect(&torch, "all_reduce", "missing_rank", &["has not entered all_reduce", "ranks 0-1, 3 wait"]);
    check_records(&incident);
    stay_away_from_the_others(&torch);
    expect_of(&torch, 0, "init", "comm_init", &["has not joined the communicator", "ranks 1-3 wait in"]);
}

fn stay_away_from_the_others(torch: &Torch) {
    for (fault, part) in [
        ("broadcast", "has not entered broadcast"),
        ("barrier", "has not entered barrier"),
        ("all_gather_object", "has not entered all_gather"),
        ("monitored_barrier", "has not entered barrier"),
    ] {
        expect(torch, fault, "missing_rank", &[part]);
    }
}

#[test]
fn torchrun_restarts_a_job_that_hung_and_was_ended() {
    let Some(torch) = forky() else { return };
    restarts(&torch, &LOCAL);
}

#[test]
fn torchrun_of_debian_restarts_a_job_that_hung_and_was_ended() {
    let Some(torch) = debian() else { return };
    // On Python 3.11 that torchrun knows no other value of the two: it looks for theirs in an
    // enumeration which no longer goes through 0.
    restarts(&torch, &["--redirects=1", "--tee=1"]);
}

#[test]
fn torchrun_of_pypi_restarts_a_job_that_hung_and_was_ended() {
    let Some((torch, _turn)) = on_cpu() else { return };
    restarts(&torch, &LOCAL);
}

/// This keeps the agent from looking up the host's name, which a container may not know.
const LOCAL: [&str; 1] = ["--local-addr=127.0.0.1"];

fn restarts(torch: &Torch, options: &[&str]) {
    let job = job().with("XPU_TIMER_HANG_KILL", "1").with("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
    let script = tree().join("tests/examples/torch_gloo.py").display().to_string();
    // Debian's torchrun cannot make the store that it prefers, because that needs libuv; a file
    // does as well.
    let endpoint = format!("--rdzv_endpoint={}", job.dir.join("rendezvous/torchrun").display());
    let mut words = vec!["-m", "torch.distributed.run", "--nproc_per_node=4", "--max_restarts=1"];
    words.extend(["--rdzv_backend=c10d", "--rdzv_conf=store_type=file", &endpoint]);
    words.extend(options);
    words.extend([script.as_str(), "--fault", "once"]);
    let agent = Process::spawn(&mut torch.launch(&job, &words));
    let incident = job.wait_incident(1, PATIENCE * 2);
    check(&incident, 2, "missing_rank", &["has not entered all_reduce"]);
    assert_eq!(incident.verdict["attempt"], 0, "{}", text(&incident));
    let output = agent.wait(PATIENCE * 2);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    for rank in 0..RANKS {
        assert!(output.stdout.contains(&format!("rank {rank} done")), "{}{}", output.stdout, output.stderr);
    }
    wait_until(PATIENCE, "the incident is closed", || job.incidents()[0].verdict["status"] != "open");
    assert_eq!(job.incidents().len(), 1, "the ranks of the second attempt are not to blame: {}", job.logs());
}

#[test]
fn torch_of_pypi_on_gloo() {
    let Some((torch, _turn)) = on_cpu() else { return };
    let (_job, incident) =
        expect(&torch, "all_reduce", "missing_rank", &["has not entered all_reduce", "ranks 0-1, 3 wait"]);
    check_records(&incident);
    stay_away_from_the_others(&torch);
    healthy(&torch);
}
