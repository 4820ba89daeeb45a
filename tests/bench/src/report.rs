//! Figures: repetitions and medians, the resources that a process uses, and the table with one line
//! per figure, its limit and whether it holds.

use std::{
    fmt::Write,
    fs,
    hint::black_box,
    iter,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{sys::utsname::uname, time::ClockId, unistd::Pid};
use xpu_timer_proto::procfs;

/// One measured figure.
struct Line {
    what: String,
    figure: String,
    limit: String,
    verdict: &'static str,
}

/// All figures of a run, in sections.
#[derive(Default)]
pub struct Report {
    sections: Vec<(String, Vec<Line>)>,
    all_hold: bool,
}

/// The lines around the generated part of the document, after the heading of its chapter.
const MARKS: [&str; 2] = ["<!-- begin: written by the command above -->", "<!-- end -->"];

impl Report {
    /// An empty report, in which every limit holds.
    fn new() -> Self {
        Report { sections: Vec::new(), all_hold: true }
    }

    /// A report that begins with the machine and its speed, so that the figures of two reports can
    /// be compared.
    pub fn of_this_machine() -> Result<Self> {
        let mut report = Report::new();
        report.section("Machine");
        let (cores, kernel) = (thread::available_parallelism()?, uname()?);
        report.note("cores, kernel", format!("{cores}, {}", kernel.release().to_string_lossy()));
        report.note("load average", fs::read_to_string("/proc/loadavg")?.trim());
        report.note("time to sort a million numbers", ms(reference_time()));
        Ok(report)
    }

    /// Starts a section and prints its title.
    pub fn section(&mut self, title: &str) {
        println!("\n{title}");
        self.sections.push((title.to_string(), Vec::new()));
    }

    /// A figure without a limit.
    pub fn note(&mut self, what: &str, figure: impl Into<String>) {
        self.line(what, figure.into(), String::new(), "");
    }

    /// A figure with a limit.
    pub fn check(&mut self, what: &str, figure: impl Into<String>, limit: &str, holds: bool) {
        self.all_hold &= holds;
        self.line(what, figure.into(), limit.to_string(), if holds { "met" } else { "NOT met" });
    }

    /// Something that could not be measured: it counts as a limit that does not hold.
    pub fn failed(&mut self, what: &str, error: &anyhow::Error) {
        self.check(what, format!("not measured: {error:#}"), "", false);
    }

    fn line(&mut self, what: &str, figure: String, limit: String, verdict: &'static str) {
        println!("  {what:<66} {figure:>22}  {limit:<16} {verdict}");
        if let Some((_, lines)) = self.sections.last_mut() {
            lines.push(Line { what: what.to_string(), figure, limit, verdict });
        }
    }

    /// Whether every limit holds.
    pub fn all_hold(&self) -> bool {
        self.all_hold
    }

    fn markdown(&self) -> String {
        let mut text = String::new();
        for (title, lines) in &self.sections {
            let _ = writeln!(text, "\n### {title}\n\n| figure | measured | limit | |\n|---|---:|---|---|");
            for line in lines {
                let _ = writeln!(text, "| {} | {} | {} | {} |", line.what, line.figure, line.limit, line.verdict);
            }
        }
        text
    }

    /// Replaces the generated part of a document's chapter.
    pub fn write(&self, path: &Path, chapter: &str) -> Result<()> {
        let old = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
        let new = replace(&old, chapter, &self.markdown());
        let new = new.with_context(|| format!("{}: no marks behind {chapter:?}", path.display()))?;
        let temporary = path.with_extension("md.new");
        fs::write(&temporary, new)?;
        fs::rename(&temporary, path).with_context(|| format!("{}", path.display()))
    }
}

fn replace(document: &str, chapter: &str, generated: &str) -> Option<String> {
    let (before, rest) = document.split_at_checked(document.find(chapter)?)?;
    let (head, rest) = rest.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some(format!("{before}{head}{}\n{generated}\n{}{after}", MARKS[0], MARKS[1]))
}

/// One of the compared programs or variants.
pub type Contender<'a> = (&'a str, Box<dyn FnMut() -> Result<Duration> + 'a>);

/// Runs all contenders in turn for `repetitions` rounds. Returns the median of each in the given
/// order. Taking turns spreads a busy moment of the machine over all of them.
pub fn alternate(repetitions: usize, contenders: &mut [Contender<'_>]) -> Result<Vec<Duration>> {
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); contenders.len()];
    for _ in 0..repetitions {
        for ((_, run), times) in contenders.iter_mut().zip(&mut times) {
            times.push(run()?);
        }
    }
    Ok(times.into_iter().map(median).collect())
}

/// The median; for an even number, the upper of the two middle values.
pub fn median<T: Ord + Copy>(mut values: Vec<T>) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

/// How long something takes.
pub fn time<T>(run: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = run();
    (start.elapsed(), result)
}

/// The time of a computation that is the same on every machine.
fn reference_time() -> Duration {
    const REPETITIONS: usize = 5;
    let numbers =
        || iter::successors(Some(1_u64), |number| Some(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1)));
    let sort = |_| {
        let mut numbers: Vec<u64> = numbers().take(1_000_000).collect();
        time(|| black_box(&mut numbers).sort_unstable()).0
    };
    median((0..REPETITIONS).map(sort).collect())
}

/// Peak of the resident memory of a process.
pub fn peak_bytes(pid: i32) -> Result<f64> {
    let status = procfs::status_text(pid)?;
    let peak = procfs::field(&status, "VmHWM:").context("VmHWM")?;
    let kib: f64 = peak.trim_end_matches(" kB").parse()?;
    Ok(kib * 1024.0)
}

/// Processor time that a process has used so far.
pub fn processor_time(pid: i32) -> Result<Duration> {
    Ok(ClockId::pid_cpu_clock_id(Pid::from_raw(pid))?.now()?.into())
}

/// Milliseconds for a table.
pub fn ms(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1e3;
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
}

/// How many times longer theirs takes.
pub fn ratio(theirs: Duration, ours: Duration) -> f64 {
    theirs.as_secs_f64() / ours.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_broken_limit_is_enough() {
        let mut report = Report::new();
        report.section("s");
        report.note("n", "1");
        report.check("a", "1", "below 2", true);
        assert!(report.all_hold());
        report.check("b", "3", "below 2", false);
        report.check("c", "1", "below 2", true);
        assert!(!report.all_hold());
        assert!(report.markdown().contains("| b | 3 | below 2 | NOT met |"));
    }

    #[test]
    fn only_the_generated_part_is_replaced() {
        let chapter = |name: &str| format!("## {name}\n{}\nold of {name}\n{}\ntail\n", MARKS[0], MARKS[1]);
        let document = chapter("One") + &chapter("Two");
        let once = replace(&document, "## Two", "new").unwrap();
        assert!(once.starts_with(&chapter("One")) && once.ends_with("tail\n") && !once.contains("old of Two"));
        assert_eq!(replace(&once, "## Two", "new").unwrap(), once);
        assert!(replace("## One", "## One", "new").is_none() && replace(&document, "## Three", "new").is_none());
    }

    #[test]
    fn turns_and_medians() {
        let mut order = std::cell::RefCell::new(Vec::new());
        let mut slow = [9, 1, 5].into_iter();
        let mut contenders: [Contender<'_>; 2] = [
            (
                "a",
                Box::new(|| {
                    order.borrow_mut().push('a');
                    Ok(Duration::from_millis(slow.next().unwrap()))
                }),
            ),
            (
                "b",
                Box::new(|| {
                    order.borrow_mut().push('b');
                    Ok(Duration::from_millis(2))
                }),
            ),
        ];
        let medians = alternate(3, &mut contenders).unwrap();
        drop(contenders);
        assert_eq!(medians, [Duration::from_millis(5), Duration::from_millis(2)]);
        assert_eq!(order.get_mut().iter().collect::<String>(), "ababab");
    }
}
