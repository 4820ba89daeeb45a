//! Compares the capture with other tools, on targets that do not change.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Result, ensure};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use xpu_timer_capture::ProcessCapture;
use xpu_timer_proto::{
    procfs,
    server::{PstackStacktrace, PySpyStacktrace},
};

use xpu_timer_tests::Process;

use crate::{
    other_tools::{self, NativeStack, PythonStack, Tools},
    report::Report,
};

/// The number of agreements, of comparisons, and one example of a difference.
#[derive(Debug, Default)]
pub struct Score {
    pub same: usize,
    pub of: usize,
    /// Threads whose stack the other tool could not complete; they do not count.
    pub gave_up: usize,
    pub example: Option<String>,
}

impl Score {
    pub fn percent(&self) -> f64 {
        if self.of == 0 { 0.0 } else { 100.0 * self.same as f64 / self.of as f64 }
    }

    pub fn add(&mut self, other: Score) {
        self.same += other.same;
        self.of += other.of;
        self.gave_up += other.gave_up;
        self.example = self.example.take().or(other.example);
    }

    fn differs(&mut self, example: impl FnOnce() -> String) {
        self.example.get_or_insert_with(example);
    }
}

/// Compares lists of program counters with eu-stack.
pub fn native(tools: &Tools, captured: &ProcessCapture) -> Result<Score> {
    let text = other_tools::eu_stack_output(tools, captured.pid)?;
    let theirs = other_tools::parse_eu_stack(&text);
    ensure!(!theirs.is_empty(), "eu-stack saw no thread of {}", captured.pid);
    Ok(compare_native(&captured.sample.stacktrace, &theirs))
}

fn compare_native(ours: &[PstackStacktrace], theirs: &HashMap<i32, NativeStack>) -> Score {
    let ours: HashMap<i32, Vec<u64>> = ours
        .iter()
        .map(|thread| {
            let frames = thread.frames.iter().filter(|frame| !frame.inlined);
            (thread.pid as i32, frames.map(|frame| frame.pc).collect())
        })
        .collect();
    let mut score = Score::default();
    for (tid, their) in theirs {
        if their.gave_up {
            score.gave_up += 1;
            continue;
        }
        score.of += 1;
        match ours.get(tid) {
            Some(our) if *our == their.pcs => score.same += 1,
            our => score.differs(|| {
                let at = our.map(|our| our.iter().zip(&their.pcs).take_while(|(our, their)| our == their).count());
                let lengths = (our.map_or(0, Vec::len), their.pcs.len());
                format!("thread {tid}: {} frames against {}, differing from frame {at:?}", lengths.0, lengths.1)
            }),
        }
    }
    score
}

/// Compares Python frames (function, path and line) and the GIL holder with py-spy.
pub fn python(tools: &Tools, captured: &ProcessCapture) -> Result<Score> {
    let theirs = other_tools::parse_py_spy(&other_tools::output(&mut other_tools::py_spy(tools, captured.pid))?)?;
    ensure!(!theirs.is_empty(), "py-spy saw no thread of {}", captured.pid);
    Ok(compare_python(&captured.sample.py_stacktrace, &theirs, own_tid))
}

/// The id of a thread in its own PID namespace, which py-spy reports; the id itself if the thread
/// is gone.
fn own_tid(tid: u32) -> u32 {
    let status = procfs::status_text(tid).unwrap_or_default();
    let ids = procfs::field(&status, "NSpid:");
    ids.and_then(|ids| ids.split_whitespace().next_back()?.parse().ok()).unwrap_or(tid)
}

fn compare_python(ours: &[PySpyStacktrace], theirs: &[PythonStack], own_tid: impl Fn(u32) -> u32) -> Score {
    let mut score = Score { of: theirs.len().max(ours.len()), ..Score::default() };
    for their in theirs {
        let our = ours.iter().find(|thread| thread.thread_id == their.thread_id);
        let frames = our.map(frames);
        let same_tid = our.is_some_and(|our| their.os_thread_id.is_none_or(|tid| tid == own_tid(our.os_thread_id)));
        if frames.as_ref() == Some(&their.frames) && same_tid && our.is_some_and(|our| our.owns_gil == their.owns_gil) {
            score.same += 1;
        } else {
            score.differs(|| {
                let (our, their) = (frames.unwrap_or_default(), &their.frames);
                let at = our.iter().zip(their).take_while(|(our, their)| our == their).count();
                format!(
                    "{} frames against {}, from frame {at} {:?} against {:?}, equal thread ids: {same_tid}",
                    our.len(),
                    their.len(),
                    our.get(at),
                    their.get(at)
                )
            });
        }
    }
    score
}

fn frames(thread: &PySpyStacktrace) -> Vec<(String, String)> {
    thread.frames.iter().map(|frame| (frame.func_name.clone(), frame.file_name.clone())).collect()
}

/// 24 threads wait, and the main thread repeats three phases. Prints their shares of the time, and
/// the calls of the third one in each second of processor time.
const SCHEDULE: &str = "\
import resource, sys, threading, time
def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return 0
def sleeps(seconds):
    time.sleep(seconds)
    return 0
def tiny(number):
    return number + 1
def calls(seconds):
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        for _ in range(200):
            number = tiny(number)
    return number
for index in range(24):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print('ready', flush=True)
phases = (busy, .0013), (sleeps, .031), (calls, .0017)
spent, done, turn = [0, 0, 0], 0, 0
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for index, (phase, least) in enumerate(phases):
        begin = time.monotonic()
        done += phase(least * (1 + turn % 3 * .5))
        spent[index] += time.monotonic() - begin
    turn += 1
used = resource.getrusage(resource.RUSAGE_SELF)
print('shares', *(one / sum(spent) for one in spent), done / (used.ru_utime + used.ru_stime), flush=True)
";
const PHASES: [&str; 3] = ["busy", "sleeps", "calls"];
const RANKS: usize = 8;
const SECONDS: u32 = 30;

/// The results of one recorder on eight ranks.
struct Recorded {
    /// Percent of a core that it takes.
    cost: f64,
    /// Calls of a rank in a second of its processor time.
    calls: f64,
    /// The largest difference between a sampled share and the true one, in percentage points, over
    /// all ranks.
    error: f64,
}

/// Records eight ranks of 25 threads at 50 samples a second, with xpu_timer_dump and with py-spy.
pub fn record(report: &mut Report, tools: &Tools, python: &Path) -> Result<()> {
    let none = recorded(python, |_, _| Vec::new())?;
    let ours = recorded(python, |pids, folder| {
        let mut command = Command::new(&tools.dump);
        command
            .args(["record", "--rate", "50", "--seconds", &SECONDS.to_string(), "--output"])
            .arg(folder.join("ours"));
        pids.iter().for_each(|pid| _ = command.arg("--pid").arg(pid.to_string()));
        vec![command]
    })?;
    let theirs = recorded(python, |pids, folder| {
        let of_rank = |(rank, pid): (usize, &i32)| {
            let mut command = Command::new(&tools.py_spy);
            command.args(["record", "--idle", "--threads", "--function", "--format", "raw", "--rate", "50"]);
            command.args(["--duration", &SECONDS.to_string(), "--pid", &pid.to_string(), "--output"]);
            command.arg(folder.join(format!("theirs.{rank}")));
            command
        };
        pids.iter().enumerate().map(of_rank).collect()
    })?;
    report.check(
        "cost of xpu_timer_dump record",
        format!("{:.2} % of a core", ours.cost),
        "below 5 %",
        ours.cost < 5.0,
    );
    report.note("cost of py-spy record", format!("{:.1} % of a core", theirs.cost));
    report.check(
        "largest error of a share: xpu_timer_dump",
        format!("{:.2} points", ours.error),
        "below 1",
        ours.error < 1.0,
    );
    report.note("largest error of a share: py-spy", format!("{:.2} points", theirs.error));
    let slower = |one: &Recorded| format!("{:+.2} %", 100.0 * (none.calls / one.calls - 1.0));
    report.note("calls of the ranks take longer: xpu_timer_dump", slower(&ours));
    report.note("calls of the ranks take longer: py-spy", slower(&theirs));
    Ok(())
}

fn recorded(python: &Path, commands: impl Fn(&[i32], &Path) -> Vec<Command>) -> Result<Recorded> {
    let folder = tempfile::tempdir()?;
    let time = (SECONDS + 4).to_string();
    let mut ranks: Vec<Process> =
        (0..RANKS).map(|_| Process::spawn(Command::new(python).args(["-c", SCHEDULE, &time]))).collect();
    ranks.iter_mut().for_each(|rank| rank.wait_for("ready", Duration::from_secs(60)));
    let pids: Vec<i32> = ranks.iter().map(Process::pid).collect();
    let before = children_time()?;
    let mut running = Vec::new();
    for (index, mut command) in commands(&pids, folder.path()).into_iter().enumerate() {
        let errors = folder.path().join(format!("errors.{index}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&errors)?);
        running.push((command.spawn()?, command, errors));
    }
    for (tool, command, errors) in &mut running {
        let status = tool.wait()?;
        ensure!(status.success(), "{command:?}: {status}: {}", fs::read_to_string(errors)?.trim());
    }
    let cost = 100.0 * (children_time()? - before).as_secs_f64() / f64::from(SECONDS);
    let mut truth = [0.0; 3];
    let mut calls = 0.0;
    for rank in &mut ranks {
        rank.wait_for("shares", Duration::from_secs(60));
        let stdout = rank.stdout();
        let shares = stdout.lines().find_map(|line| line.strip_prefix("shares ")).unwrap_or_default();
        let numbers: Vec<f64> = shares.split(' ').filter_map(|number| number.parse().ok()).collect();
        ensure!(numbers.len() == 4, "a rank printed {shares:?}");
        truth.iter_mut().zip(&numbers).for_each(|(sum, share)| *sum += share / RANKS as f64);
        calls += numbers[3] / RANKS as f64;
    }
    let found = sampled_shares(folder.path());
    let errors = found.iter().zip(truth).map(|(sampled, share)| 100.0 * (sampled - share).abs());
    Ok(Recorded { cost, calls, error: errors.fold(0.0, f64::max) })
}

/// Processor time of the processes that were waited for.
fn children_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let time = |value: nix::sys::time::TimeVal| Duration::from_micros(value.num_microseconds() as u64);
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

/// The shares of the phases in the folded stacks of a folder.
fn sampled_shares(folder: &Path) -> [f64; 3] {
    let files = (0..RANKS).map(|rank| folder.join(format!("theirs.{rank}"))).chain([folder.join("ours/all.folded")]);
    let text: String = files.filter_map(|file| fs::read_to_string(file).ok()).collect();
    let mut counts = [0_u64; 3];
    for (stack, count) in text.lines().filter_map(|line| line.rsplit_once(' ')) {
        let frames = stack.split(';').map(|frame| frame.split(['@', ' ']).next().unwrap_or_default());
        let phase = frames.filter_map(|name| PHASES.iter().position(|phase| *phase == name)).next();
        phase.into_iter().for_each(|phase| counts[phase] += count.parse().unwrap_or(0));
    }
    let total: u64 = counts.iter().sum::<u64>().max(1);
    counts.map(|count| count as f64 / total as f64)
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::server::{PstackFrame, PySpyFrame};

    use super::*;

    fn thread(tid: u32, frames: &[(u64, bool)]) -> PstackStacktrace {
        let frame = |(pc, inlined): &(u64, bool)| PstackFrame { pc: *pc, inlined: *inlined, ..Default::default() };
        PstackStacktrace { pid: tid, frames: frames.iter().map(frame).collect(), ..Default::default() }
    }

    #[test]
    fn native_threads() {
        let ours = [thread(1, &[(10, true), (10, false), (20, false)]), thread(2, &[(10, false)])];
        let stack = |pcs: &[u64], gave_up| NativeStack { pcs: pcs.to_vec(), gave_up };
        let theirs = HashMap::from([
            (1, stack(&[10, 20], false)),
            (2, stack(&[10, 21], false)),
            (3, stack(&[10], false)),
            (4, stack(&[10], true)),
        ]);
        let score = compare_native(&ours, &theirs);
        assert_eq!((score.same, score.of, score.gave_up), (1, 3, 1));
        assert!(score.example.is_some());
    }

    #[test]
    fn python_threads() {
        let frame = PySpyFrame { func_name: "wait".into(), file_name: "/t.py:3".into(), ..Default::default() };
        let ours = PySpyStacktrace { thread_id: 7, os_thread_id: 70, frames: vec![frame], ..Default::default() };
        let mut their = PythonStack {
            thread_id: 7,
            os_thread_id: Some(70),
            owns_gil: false,
            frames: vec![("wait".into(), "/t.py:3".into())],
        };
        assert_eq!(compare_python(std::slice::from_ref(&ours), &[their.clone()], |tid| tid).same, 1);
        their.owns_gil = true;
        assert_eq!(
            compare_python(std::slice::from_ref(&ours), &[their.clone()], |tid| tid).same,
            0,
            "another GIL holder"
        );
        their.owns_gil = false;
        assert_eq!(compare_python(std::slice::from_ref(&ours), &[their.clone()], |_| 1).same, 0, "another thread id");
        their.frames[0].1 = "/t.py:4".into();
        assert_eq!(compare_python(std::slice::from_ref(&ours), &[their.clone()], |tid| tid).same, 0, "another line");
        let score = compare_python(&[ours.clone(), ours], &[], |tid| tid);
        assert_eq!((score.same, score.of), (0, 2), "threads that only we see count as different");
    }
}
