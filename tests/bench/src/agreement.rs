//! Compares the capture with other tools, on targets that do not change.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use xpu_timer_capture::ProcessCapture;
use xpu_timer_proto::{
    procfs,
    server::{PstackStacktrace, PySpyStacktrace},
};

use crate::rivals::{self, NativeStack, PythonStack, Tools};

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
    let text = rivals::eu_stack_output(tools, captured.pid)?;
    let theirs = rivals::parse_eu_stack(&text);
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
    let theirs = rivals::parse_py_spy(&rivals::output(&mut rivals::py_spy(tools, captured.pid))?)?;
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
                    "{} frames against {}, from frame {at} {:?} against {:?}, thread id the same: {same_tid}",
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
