//! Two jobs of one name on one node, whose environments do not differ. One hangs: it alone is
//! judged, dumped and ended, and the other one trains on.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;
use xpu_timer_proto::{Message as _, procfs, server::Stacktrace};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, python, tree, wait_until};

const RANKS: usize = 2;

/// A job of `jobs.py`.
struct Training {
    folder: PathBuf,
    hangs: bool,
}

impl Training {
    fn new(job: &Job, name: &str, hangs: bool) -> Self {
        let folder = job.dir.join(name);
        fs::create_dir(&folder).expect("the job's folder");
        Training { folder, hangs }
    }

    fn argument(&self) -> String {
        format!("{}:{RANKS}:{}", self.folder.display(), u32::from(self.hangs))
    }

    fn read(&self, name: &str) -> Option<i32> {
        fs::read_to_string(self.folder.join(name)).ok()?.parse().ok()
    }

    fn pids(&self) -> BTreeSet<i32> {
        (0..RANKS).filter_map(|rank| self.read(&format!("pid-{rank}"))).collect()
    }

    fn wait_for_steps(&self, steps: i32) {
        let before = self.read("step-0").unwrap_or(0);
        wait_until(PATIENCE, "the job trains on", || {
            self.read("step-0").is_some_and(|step| step > before.saturating_add(steps))
        });
    }

    fn wait_for_end(&self) {
        wait_until(PATIENCE, "its ranks are ended", || self.pids().iter().all(|pid| !runs(*pid)));
    }
}

fn runs(pid: i32) -> bool {
    procfs::stat(pid).is_ok_and(|stat| !stat.is_dead())
}

fn quick() -> Job {
    let settings = [("XPU_TIMER_HANG_TIMEOUT", "2"), ("XPU_TIMER_SAMPLE_INTERVAL", "0.5"), ("XPU_TIMER_JOB", "twin")];
    settings.into_iter().fold(Job::new(), |job, (name, value)| job.with(name, value))
}

fn launch(job: &Job, mode: &str, trainings: &[&Training]) -> Process {
    let mut command = job.launch(python());
    // A rank that ends must not take its siblings with it before the collector does.
    command.arg(tree().join("tests/tests/it/jobs.py")).arg(mode).args(trainings.iter().map(|one| one.argument()));
    for name in ["MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "SLURM_STEP_ID"] {
        command.env_remove(name);
    }
    Process::spawn(&mut command)
}

fn dumped(folder: &Path) -> BTreeSet<i32> {
    let files = fs::read_dir(folder).expect("an incident folder").flatten().map(|entry| entry.path());
    let dumps = files.filter(|path| path.extension().is_some_and(|extension| extension == "stacktrace"));
    dumps.map(|path| Stacktrace::decode(&fs::read(path).expect("a dump")[..]).expect("a Stacktrace").pid).collect()
}

fn check(job: &Job, incident: &Incident, training: &Training) {
    assert_eq!(incident.verdict["culprits"], json!([RANKS - 1]), "{}\n{}", incident.verdict, job.logs());
    assert_eq!(incident.verdict["world_size"], json!(RANKS), "{}", incident.verdict);
    assert!(
        incident.verdict["sentence"].as_str().is_some_and(|text| text.contains("stay_away")),
        "{}",
        incident.verdict
    );
    assert_eq!(dumped(&incident.path), training.pids(), "{}\n{}", incident.verdict, job.logs());
}

/// One of two jobs that were started alike hangs, and is ended.
fn one_hangs(mode: &str, together: bool) {
    one_of_hangs([mode; 2], together);
}

/// One of two jobs hangs, and is ended.
fn one_of_hangs(modes: [&str; 2], together: bool) {
    let mode = modes[0];
    for hangs_first in [true, false] {
        let job = quick().with("XPU_TIMER_HANG_KILL", "1");
        let trainings = [Training::new(&job, "a", hangs_first), Training::new(&job, "b", !hangs_first)];
        let _processes: Vec<Process> = match together {
            true => vec![launch(&job, mode, &[&trainings[0], &trainings[1]])],
            false => trainings
                .iter()
                .zip(modes)
                .map(|(training, mode)| {
                    let process = launch(&job, mode, &[training]);
                    // The second one starts when the first one trains.
                    wait_until(PATIENCE, "its ranks run", || training.read("step-0").is_some());
                    process
                })
                .collect(),
        };
        let [hanging, healthy] = if hangs_first { [0, 1] } else { [1, 0] }.map(|index| &trainings[index]);
        let incident = job.wait_incident(1, PATIENCE);
        check(&job, &incident, hanging);
        hanging.wait_for_end();
        healthy.wait_for_steps(100);
        assert!(healthy.pids().iter().all(|pid| runs(*pid)), "{}", job.logs());
        assert_eq!(job.incidents().len(), 1, "{mode}: {}", job.logs());
        let status = job.status().expect("/status");
        let hang = |pid: i32| {
            status["ranks"].as_array().into_iter().flatten().any(|rank| rank["pid"] == pid && rank["hang"] == true)
        };
        assert!(!healthy.pids().into_iter().any(hang), "{status:#}");
    }
}

#[test]
fn under_two_launchers() {
    one_hangs("agent", false);
}

#[test]
fn under_one_launcher_in_turn() {
    one_hangs("shell", true);
}

#[test]
fn spawned_by_one_program_without_a_rank_in_the_environment() {
    one_hangs("spawn", true);
}

#[test]
fn whose_ranks_are_arguments_under_one_launcher_and_under_two() {
    one_hangs("arguments", true);
    one_hangs("arguments", false);
}

#[test]
fn one_with_and_one_without_ranks_in_the_environment() {
    one_of_hangs(["agent", "spawn"], false);
    one_of_hangs(["spawn", "agent"], false);
}

#[test]
fn whose_launchers_are_rank_0_and_set_the_port_at_run_time() {
    one_hangs("lightning", false);
}

#[test]
fn whose_ranks_have_lost_their_parents() {
    one_hangs("daemons", true);
}

#[test]
fn both_hang_in_two_incidents() {
    let job = quick();
    let trainings = [Training::new(&job, "a", true), Training::new(&job, "b", true)];
    let _process = launch(&job, "shell", &[&trainings[0], &trainings[1]]);
    let _ = job.wait_incident(2, PATIENCE);
    let incidents = job.finished_incidents();
    let of = |training: &Training| {
        let found = incidents.iter().find(|incident| dumped(&incident.path) == training.pids());
        found.unwrap_or_else(|| panic!("no incident of {:?}: {incidents:?}\n{}", training.pids(), job.logs()))
    };
    trainings.iter().for_each(|training| check(&job, of(training), training));
    assert_eq!(incidents.len(), 2, "{}", job.logs());
}

fn status_kib(pid: i64, name: &str) -> u64 {
    let status = procfs::status_text(pid).expect("it runs");
    let line = procfs::field(&status, name).expect("the line is there");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("kB")
}

#[test]
fn a_large_claimed_world_size_allocates_nothing() {
    let peak_kib = |claim: &str, world_size: u32| {
        let job = quick().with("JOBS_CLAIM", claim);
        let training = Training::new(&job, "a", true);
        let _process = launch(&job, "shell", &[&training]);
        let incident = job.wait_incident(1, PATIENCE);
        assert_eq!(incident.verdict["culprits"], json!([RANKS - 1]), "{claim}: {}", incident.verdict);
        assert_eq!(incident.verdict["world_size"], json!(world_size), "{}", incident.verdict);
        assert_eq!(dumped(&incident.path), training.pids());
        let files = fs::read_dir(&incident.path).expect("a folder").flatten();
        let bytes: u64 = files.map(|file| file.metadata().map_or(0, |data| data.len())).sum();
        assert!(bytes < 20_000_000, "{claim}: the folder has {bytes} bytes");
        assert!(!job.logs().contains("panicked"), "{claim}: {}", job.logs());
        status_kib(job.status().expect("/status")["pid"].as_i64().expect("a pid"), "VmHWM")
    };
    let plain = peak_kib("", RANKS as u32);
    for (claim, world_size) in [
        ("WORLD_SIZE=4000000000", 4_000_000_000),
        ("WORLD_SIZE=4294967295 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4294967295 GROUP_RANK=-1 NNODES=x", u32::MAX),
        ("WORLD_SIZE=-4 LOCAL_RANK=-9 LOCAL_WORLD_SIZE=many", RANKS as u32),
    ] {
        let peak = peak_kib(claim, world_size);
        assert!(peak < plain + 50_000, "{claim}: {peak} kB, and {plain} kB without it");
    }
}

#[test]
fn long_job_names_register_and_stay_distinct() {
    let job = quick();
    let trainings = [Training::new(&job, "a", false), Training::new(&job, "b", false)];
    let name = |end: &str| format!("{}{end}", "näme".repeat(20_000));
    let _processes: Vec<Process> = trainings
        .iter()
        .zip(["a", "b"])
        .map(|(training, end)| {
            let mut command = job.launch(python());
            command.arg(tree().join("tests/tests/it/jobs.py")).args(["shell", &training.argument()]);
            Process::spawn(command.env("XPU_TIMER_JOB", name(end)).env("POD_NAME", name(end)))
        })
        .collect();
    let mut names = BTreeSet::new();
    wait_until(PATIENCE, "the ranks of both jobs are registered", || {
        let status = job.status().unwrap_or_default();
        let ranks = status["ranks"].as_array().cloned().unwrap_or_default();
        names = ranks.iter().filter_map(|rank| rank["job"].as_str().map(str::to_string)).collect();
        ranks.len() == 2 * RANKS
    });
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names.iter().all(|name| name.starts_with("näme") && name.len() < 300 && name.contains('…')), "{names:?}");
    wait_until(PATIENCE, "each rank says once that its name was cut", || {
        job.logs().matches("XPU_TIMER_JOB=").count() == 2 * RANKS
    });
}
