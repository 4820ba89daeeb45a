//! A scenario: the job, its true cause, and its incident folder with the evidence that the
//! collector had.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use xpu_timer_proto::{lenient, server::Stacktrace, v1::Evidence};
use xpu_timer_tests::{Incident, Job};

use crate::program::{Need, Program};

/// A job and the expected verdict.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Unique; words joined by `-`.
    pub name: String,
    /// The program of its ranks.
    pub program: Program,
    /// Number of ranks.
    pub world: u32,
    /// Arguments of the program.
    pub arguments: Vec<String>,
    /// Environment besides that of every job.
    pub environment: Vec<(&'static str, String)>,
    /// The feature that the machine must support.
    pub need: Option<Need>,
    /// The expected verdict.
    pub truth: Truth,
}

/// The truth about a scenario, known from its construction.
#[derive(Debug, Clone)]
pub enum Truth {
    /// It hangs because of these ranks.
    Hang {
        /// Causes that a person who knows the program would accept, best first.
        causes: &'static [&'static str],
        /// Ascending; empty if no rank is to blame.
        culprits: Vec<u32>,
    },
    /// It is slower than the timeout because of these ranks. Its incident resolves by itself, and
    /// it runs to its end.
    Passes {
        /// Accepted causes.
        causes: &'static [&'static str],
        /// Ascending.
        culprits: Vec<u32>,
        /// Until then the culprits do not move, so that with `XPU_TIMER_HANG_KILL` the job is
        /// ended.
        stands_still: bool,
    },
    /// It never ends by itself, and these ranks, ascending, slow it down without a hang; none in an
    /// even run.
    Slow(Vec<u32>),
    /// It runs to its end, and nothing should be reported.
    Healthy,
    /// The program writes the truth when it runs.
    Written(Expected),
}

/// The expected behaviour of a program that writes the truth itself, known before it runs.
#[derive(Debug, Clone, Copy)]
pub enum Expected {
    /// It hangs.
    Hang,
    /// It may be slower than the timeout, and continues. It is watched for this time.
    Passes(Duration),
    /// An operation is pending for longer than the timeout, which is a hang by definition, although
    /// it completes. It is watched for this time.
    Overdue(Duration),
    /// It is idle or healthy, and gives no alarm for this time.
    Quiet(Duration),
}

/// The option of `hybrid.py` with the time for which it trains.
const SECONDS: &str = "--seconds=";

/// Used in place of a cause for ranks that slow a job down.
pub const SLOW: &str = "slow";

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:34} {:3} ranks  {} {}", self.name, self.world, self.program, self.arguments.join(" "))?;
        self.environment.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

/// A job that runs a program.
pub fn job(name: &str, program: Program, world: u32, arguments: &[&str]) -> Scenario {
    Scenario {
        name: name.into(),
        program,
        world,
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        environment: Vec::new(),
        need: None,
        truth: Truth::Healthy,
    }
}

/// A job with tensor, pipeline and data parallelism of these sizes.
pub fn hybrid(name: &str, tp: u32, pp: u32, dp: u32) -> Scenario {
    let sizes = [("--tp", tp), ("--pp", pp), ("--dp", dp)];
    let arguments = sizes.iter().map(|(option, size)| format!("{option}={size}")).collect();
    Scenario { arguments, ..job(name, Program::Script("hybrid.py"), tp * pp * dp, &[]) }
}

impl Scenario {
    /// The same program for this time, if it is healthy or idle and can run that long.
    pub fn lasting(mut self, time: Duration) -> Option<Self> {
        match self.truth {
            Truth::Written(Expected::Quiet(_)) => self.truth = Truth::Written(Expected::Quiet(time)),
            Truth::Healthy => {
                let option = self.arguments.iter_mut().find(|argument| argument.starts_with(SECONDS))?;
                *option = format!("{SECONDS}{}", time.as_secs());
            }
            _ => return None,
        }
        Some(self)
    }

    /// Whether it hangs forever.
    pub fn hangs(&self) -> bool {
        matches!(self.truth, Truth::Hang { .. })
    }

    /// Accepted causes and culprits, if a verdict is expected.
    pub fn right(&self) -> Option<(&'static [&'static str], &[u32])> {
        match &self.truth {
            Truth::Hang { causes, culprits } | Truth::Passes { causes, culprits, .. } => Some((causes, culprits)),
            Truth::Slow(ranks) if !ranks.is_empty() => Some((&[SLOW], ranks)),
            Truth::Slow(_) | Truth::Healthy | Truth::Written(_) => None,
        }
    }

    /// Adds an option of its program.
    pub fn option(mut self, option: &str) -> Self {
        self.arguments.push(option.into());
        self
    }

    /// Adds a fault of `hybrid.py`.
    pub fn fault(self, fault: &str) -> Self {
        self.option(&format!("--fault={fault}"))
    }

    /// Adds a fault of the simulated device.
    pub fn device(mut self, fault: &str) -> Self {
        self.environment.push(("XPU_SIM_FAULT", fault.into()));
        self
    }

    /// The job is reported even if it may be idle.
    pub fn reported_if_idle(mut self) -> Self {
        self.environment.push(("XPU_TIMER_IDLE_TIMEOUT", "10".into()));
        self
    }

    /// It hangs because of these ranks.
    pub fn is(mut self, causes: &'static [&'static str], culprits: &[u32]) -> Self {
        self.truth = Truth::Hang { causes, culprits: culprits.to_vec() };
        self
    }

    /// It is slow because of these ranks, and continues.
    pub fn passes(mut self, causes: &'static [&'static str], culprits: &[u32]) -> Self {
        self.truth = Truth::Passes { causes, culprits: culprits.to_vec(), stands_still: false };
        self
    }

    /// Its culprits sleep until the job continues, and none of their threads runs.
    pub fn standing_still(mut self) -> Self {
        if let Truth::Passes { stands_still, .. } = &mut self.truth {
            *stands_still = true;
        }
        self
    }

    /// These ranks slow it down.
    pub fn slowed_by(mut self, ranks: &[u32]) -> Self {
        self.truth = Truth::Slow(ranks.to_vec());
        self
    }

    /// It runs for this many seconds without anything to report.
    pub fn healthy(self, seconds: u32) -> Self {
        self.option(&format!("{SECONDS}{seconds}"))
    }

    /// Its incident folder below `output`, or the newest mild capture if there is no incident.
    pub fn incident(&self, output: &Path) -> PathBuf {
        let timeline = output.join(&self.name).join("timeline");
        let latest = timeline.join("latest");
        if latest.exists() {
            return latest;
        }
        let captures = fs::read_dir(timeline.join("mild")).into_iter().flatten().flatten().map(|entry| entry.path());
        captures.max().unwrap_or(latest)
    }
}

/// Joins `evidence.bin` with the `.stacktrace` files beside it.
pub fn evidence(folder: &Path) -> Result<Evidence> {
    let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
    let path = folder.join("evidence.bin");
    let mut evidence = lenient::decode::<Evidence>(&read(&path)?).with_context(|| path.display().to_string())?;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "stacktrace") {
            continue;
        }
        let dump = lenient::decode::<Stacktrace>(&read(&path)?).with_context(|| path.display().to_string())?;
        let rank = evidence.ranks.iter_mut().find(|rank| i64::from(rank.rank) == i64::from(dump.rank));
        // A file without a sample means that no dump of the rank could be taken.
        if let Some(rank) = rank.filter(|_| dump.last_sample.is_some() || dump.first_sample.is_some()) {
            rank.dump = Some(Box::new(dump));
        }
    }
    Ok(evidence)
}

/// Waits until an incident is resolved, if it is not a mild capture.
pub fn resolved(job: &Job, incident: &Incident) -> Result<()> {
    if incident.verdict["status"] == "mild" {
        return Ok(());
    }
    // The collector waits a quiet second before it considers a hang resolved.
    let start = Instant::now();
    let status = || {
        let found = job.incidents().into_iter().find(|found| found.path == incident.path);
        found.and_then(|found| found.verdict["status"].as_str().map(str::to_owned)).unwrap_or_default()
    };
    while status() != "resolved" {
        ensure!(start.elapsed() < Duration::from_secs(20), "its incident is not resolved but {}", status());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use xpu_timer_analysis::{Verdict, judge};
    use xpu_timer_tests::{read_archive, tree};

    use super::*;

    #[test]
    fn the_recorded_folder_of_the_demo_gives_the_same_verdict() {
        let folder = tempfile::tempdir().unwrap();
        let files = read_archive(&tree().join("tests/fixtures/demo.zip")).unwrap();
        for (name, bytes) in &files {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let recorded: Verdict = serde_json::from_slice(&files["verdict.json"]).unwrap();
        let verdict = judge(&evidence(folder.path()).unwrap());
        assert_eq!((&*recorded.culprits, recorded.cause.name()), (&[2][..], "data_loader"));
        assert_eq!(verdict.sentence, recorded.sentence);
        assert_eq!(
            (verdict.cause, verdict.confidence, verdict.culprits, verdict.victims, verdict.hang),
            (recorded.cause, recorded.confidence, recorded.culprits, recorded.victims, recorded.hang)
        );
    }
}
