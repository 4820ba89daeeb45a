//! Scores how often the verdict was right.

use std::{fmt, fs, path::Path, time::Duration};

use anyhow::{Context, Result};
use serde_json::Value;
use xpu_timer_analysis::judge;

use crate::scenario::{self, SLOW, Scenario, Truth};

/// Shares that the corpus must achieve.
const CULPRITS_RIGHT: f64 = 0.95;
const CAUSES_RIGHT: f64 = 0.90;
const CULPRITS_RIGHT_WITH_GAPS: f64 = 0.85;
/// Maximum time from the timeout to the verdict: two seconds between the samples here, and three
/// more.
const LATEST_SECONDS: f64 = 5.0;
/// One of this many dumps is removed.
const ONE_MISSING_OF: u32 = 8;

/// The contents of a verdict.
#[derive(Debug, Clone)]
pub struct Reported {
    /// Its cause.
    pub cause: String,
    /// Ascending.
    pub culprits: Vec<u32>,
    /// `high`, `medium` or `low`.
    pub confidence: String,
    /// The sentence.
    pub sentence: String,
    /// Seconds from the timeout to the finished folder; `None` if it was judged again, also by the
    /// collector: an earlier verdict showed no hang.
    seconds: Option<f64>,
}

impl Reported {
    /// Whether it accuses a rank that is not to blame with high confidence. For a job that recovers
    /// by itself, every rank counts as not to blame.
    pub fn accuses_wrongly(&self, truth: &Truth) -> bool {
        let culprits = match truth {
            Truth::Hang { culprits, .. } => culprits.as_slice(),
            Truth::Slow(ranks) => ranks,
            Truth::Passes { .. } | Truth::Healthy | Truth::Written(_) => &[],
        };
        self.confidence == "high" && self.culprits.iter().any(|rank| !culprits.contains(rank))
    }

    /// A verdict about ranks that slow a job down; `None` if there are none.
    pub fn slow(culprits: Vec<u32>) -> Option<Self> {
        let sentence = format!("{culprits:?} slow the job down");
        let (cause, confidence) = (SLOW.into(), "high".into());
        (!culprits.is_empty()).then_some(Reported { cause, culprits, confidence, sentence, seconds: None })
    }

    /// From a `verdict.json`, with the pids of the culprits in place of their ranks.
    pub fn of_processes(verdict: &Value) -> Result<Self> {
        let processes = verdict["culprit_processes"].as_array().context("no culprit_processes")?;
        let pid = |process: &Value| u32::try_from(process["pid"].as_u64()?).ok();
        let mut culprits: Vec<u32> = processes.iter().filter_map(pid).collect();
        culprits.sort_unstable();
        Ok(Reported { culprits, ..Self::of(verdict)? })
    }

    /// From a `verdict.json`.
    pub fn of(verdict: &Value) -> Result<Self> {
        let text = |name: &str| verdict[name].as_str().map(str::to_owned).with_context(|| format!("no {name}"));
        let culprits = verdict["culprits"].as_array().context("no culprits")?;
        let is_first = verdict["earlier"].as_array().is_none_or(Vec::is_empty);
        Ok(Reported {
            cause: text("cause")?,
            culprits: culprits.iter().filter_map(|rank| u32::try_from(rank.as_u64()?).ok()).collect(),
            confidence: text("confidence")?,
            sentence: text("sentence")?,
            seconds: verdict["seconds_from_timeout"].as_f64().filter(|seconds| is_first && *seconds > 0.0),
        })
    }
}

/// The result of a scenario.
pub struct Outcome {
    /// The scenario.
    pub scenario: Scenario,
    /// The verdict, if any; an error if the scenario could not be run.
    pub reported: Result<Option<Reported>>,
    /// Its run time.
    pub wall: Duration,
}

impl Outcome {
    fn culprits_right(&self) -> bool {
        match (self.scenario.right(), &self.reported) {
            (Some((_, culprits)), Ok(Some(reported))) => *culprits == reported.culprits,
            (None, Ok(None)) => true,
            _ => false,
        }
    }

    fn cause_right(&self) -> bool {
        match (self.scenario.right(), &self.reported) {
            (Some((causes, _)), Ok(Some(reported))) => causes.contains(&reported.cause.as_str()),
            (None, Ok(None)) => true,
            _ => false,
        }
    }

    fn confident_mistake(&self) -> bool {
        matches!(&self.reported, Ok(Some(reported)) if reported.accuses_wrongly(&self.scenario.truth))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match (self.culprits_right(), self.cause_right()) {
            (true, true) => "ok    ",
            (true, false) => "CAUSE ",
            (false, _) => "WRONG ",
        };
        let name = &self.scenario.name;
        let wall = self.wall.as_secs_f64();
        match &self.reported {
            Err(error) => return write!(f, "{mark} {name:24} {wall:5.1} s  {error:#}"),
            Ok(None) => write!(f, "{mark} {name:24} {wall:5.1} s  no incident")?,
            Ok(Some(reported)) => write!(
                f,
                "{mark} {name:24} {wall:5.1} s  {} {:?}, {}{}",
                reported.cause,
                reported.culprits,
                reported.confidence,
                reported.seconds.map_or(String::new(), |seconds| format!(", {seconds:.1} s after the timeout"))
            )?,
        }
        if self.culprits_right() && self.cause_right() {
            return Ok(());
        }
        if let Some((causes, culprits)) = self.scenario.right() {
            write!(f, "\n        truth: {} {culprits:?}", causes.join(" or "))?;
        }
        if let Ok(Some(reported)) = &self.reported {
            write!(f, "\n        said: {}", reported.sentence)?;
        }
        Ok(())
    }
}

/// Prints the totals. Returns whether they are good enough.
pub fn report(outcomes: &[Outcome], output: &Path) -> bool {
    let of = |keep: fn(&Truth) -> bool| -> Vec<&Outcome> {
        outcomes.iter().filter(|outcome| keep(&outcome.scenario.truth)).collect()
    };
    let hangs = of(|truth| matches!(truth, Truth::Hang { .. }));
    let slow = of(|truth| matches!(truth, Truth::Passes { .. }));
    let stragglers = of(|truth| matches!(truth, Truth::Slow(_)));
    let healthy = of(|truth| matches!(truth, Truth::Healthy));
    let count = |outcomes: &[&Outcome], right: fn(&Outcome) -> bool| outcomes.iter().filter(|one| right(one)).count();
    let share = |part: usize, all: usize| if all == 0 { 1.0 } else { part as f64 / all as f64 };
    let culprits = count(&hangs, Outcome::culprits_right);
    let causes = count(&hangs, Outcome::cause_right);
    let mistakes = count(&hangs, Outcome::confident_mistake) + count(&slow, Outcome::confident_mistake);
    let passed = count(&slow, |outcome| outcome.culprits_right() && outcome.cause_right());
    let false_alarms = healthy.len() - count(&healthy, Outcome::culprits_right);
    let gaps = with_gaps(&hangs, output);
    let mut good = true;
    let mut line = |met: bool, text: String| {
        good &= met;
        println!("{:8} {text}", if met { "met" } else { "NOT met" });
    };
    println!();
    let all = hangs.len();
    let limit = CULPRITS_RIGHT * 100.0;
    let met = share(culprits, all) >= CULPRITS_RIGHT;
    line(met, format!("culprits right in {culprits} of {all} hangs (at least {limit} %)"));
    let limit = CAUSES_RIGHT * 100.0;
    line(share(causes, all) >= CAUSES_RIGHT, format!("cause right in {causes} of {all} hangs (at least {limit} %)"));
    line(mistakes == 0, format!("{mistakes} wrong culprits with high confidence"));
    let hours = healthy.iter().map(|outcome| outcome.wall).sum::<Duration>().as_secs_f64() / 3600.0;
    let of_healthy = format!("healthy runs with an incident or a failure, in {hours:.1} hours of real time");
    line(false_alarms == 0, format!("{false_alarms} of {} {of_healthy}", healthy.len()));
    let of_slow = "slow runs judged right, resolved by themselves and run to their end";
    line(passed == slow.len(), format!("{passed} of {} {of_slow}", slow.len()));
    let named = count(&stragglers, Outcome::culprits_right);
    let of_stragglers = "runs without a hang that name exactly the stragglers, or no rank";
    line(named == stragglers.len(), format!("{named} of {} {of_stragglers}", stragglers.len()));
    if let Some((seconds, of)) = latest(&hangs) {
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or("?");
        let met = seconds <= LATEST_SECONDS;
        let limit = format!("at most {LATEST_SECONDS} s; the load of this machine is {load}");
        line(met, format!("verdict {seconds:.1} s after the timeout at the latest, in {of} ({limit})"));
    }
    let limit = CULPRITS_RIGHT_WITH_GAPS * 100.0;
    let met = share(gaps.right, gaps.all) >= CULPRITS_RIGHT_WITH_GAPS;
    line(
        met,
        format!(
            "one dump in {ONE_MISSING_OF} missing: culprits right in {} of {} (at least {limit} %)",
            gaps.right, gaps.all
        ),
    );
    line(
        gaps.mistakes == 0,
        format!("one dump in {ONE_MISSING_OF} missing: {} wrong with high confidence", gaps.mistakes),
    );
    good
}

/// The longest time from a timeout to its verdict, and its scenario. A death has two seconds of
/// grace in place of a timeout, so it counts like the others.
fn latest(hangs: &[&Outcome]) -> Option<(f64, String)> {
    let reported =
        hangs.iter().filter_map(|outcome| Some((outcome.reported.as_ref().ok()?.as_ref()?.seconds?, outcome)));
    let (seconds, outcome) = reported.max_by(|one, other| one.0.total_cmp(&other.0))?;
    Some((seconds, format!("{} of {} ranks", outcome.scenario.name, outcome.scenario.world)))
}

#[derive(Default)]
struct Gaps {
    all: usize,
    right: usize,
    mistakes: usize,
}

/// Judges every hang again, eight times, each time without the dumps of a different eighth of the
/// ranks.
fn with_gaps(hangs: &[&Outcome], output: &Path) -> Gaps {
    let mut gaps = Gaps::default();
    // Pids are not ranks of the evidence.
    for outcome in hangs.iter().filter(|outcome| outcome.scenario.world > 0) {
        let Ok(evidence) = scenario::evidence(&outcome.scenario.incident(output)) else { continue };
        for missing in 0..ONE_MISSING_OF {
            let mut evidence = evidence.clone();
            for rank in evidence.ranks.iter_mut().filter(|rank| rank.rank % ONE_MISSING_OF == missing) {
                rank.dump = None;
            }
            let reported =
                serde_json::to_value(judge(&evidence)).context("a verdict").and_then(|value| Reported::of(&value));
            let again =
                Outcome { scenario: outcome.scenario.clone(), reported: reported.map(Some), wall: Duration::ZERO };
            gaps.all += 1;
            gaps.right += usize::from(again.culprits_right());
            gaps.mistakes += usize::from(again.confident_mistake());
            if again.confident_mistake() {
                println!("without ranks {missing} + {ONE_MISSING_OF}n:\n{again}");
            }
        }
    }
    gaps
}
