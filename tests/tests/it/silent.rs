//! Ranks that never make a device call, in jobs whose other ranks wait for them: under a launcher
//! for all of them, as with torchrun, and under one for each, as with mpirun.

use std::{fs, path::PathBuf};

use serde_json::json;
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, python, tree};

const RANKS: u32 = 4;

/// Trains, except for rank 2.
fn script(job: &Job, rank_2: &str) -> PathBuf {
    let examples = tree().join("tests/examples").display().to_string();
    let script = job.dir.join("silent.py");
    let text = format!(
        "import os, runpy, sys, time\n\
         def import_slowly():\n    {rank_2}\n\
         if os.environ['RANK'] == '2':\n    import_slowly()\n\
         sys.path.insert(0, {examples:?})\n\
         runpy.run_path({examples:?} + '/train.py', run_name='__main__')\n"
    );
    fs::write(&script, text).expect("the job's folder");
    script
}

fn of_one_launcher(job: &Job, rank_2: &str) -> Vec<Process> {
    let mut command = job.launch(python());
    command.arg(tree().join("tests/examples/run_ranks.py")).arg(format!("--nproc={RANKS}")).arg(script(job, rank_2));
    vec![Process::spawn(&mut command)]
}

fn of_a_launcher_each(job: &Job, rank_2: &str) -> Vec<Process> {
    let script = script(job, rank_2);
    let rank = |rank: u32| {
        let mut command = job.launch(python());
        let variables = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_WORLD_SIZE", RANKS)];
        Process::spawn(command.arg(&script).envs(variables.map(|(name, value)| (name, value.to_string()))))
    };
    (0..RANKS).map(rank).collect()
}

fn verdict(incident: &Incident) -> String {
    assert_eq!(incident.verdict["culprits"], json!([2]), "{}", incident.verdict);
    incident.verdict["sentence"].as_str().expect("a sentence").to_string()
}

#[test]
fn a_rank_that_stands_before_its_first_device_call_is_named_with_its_place() {
    for start in [of_one_launcher, of_a_launcher_each] {
        let job = Job::new();
        let _ranks = start(&job, "time.sleep(600)");
        let incident = job.wait_incident(1, PATIENCE);
        let sentence = verdict(&incident);
        assert!(sentence.contains("silent.py:3 in import_slowly"), "{sentence}");
    }
}

#[test]
fn a_rank_that_ended_before_its_first_device_call_is_dead() {
    for start in [of_one_launcher, of_a_launcher_each] {
        let job = Job::new();
        // As long as a large import takes.
        let _ranks = start(&job, "time.sleep(3); sys.exit(3)");
        let incident = job.wait_incident(1, PATIENCE);
        let sentence = verdict(&incident);
        assert_eq!(incident.verdict["cause"], "process_dead", "{sentence}");
        assert!(sentence.contains("before its first device call"), "{sentence}");
    }
}
