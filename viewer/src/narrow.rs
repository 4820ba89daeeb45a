//! Narrows a folder to some ranks, some threads, or the stacks that hold a text.

use crate::dump::{Thread, Threads};
use crate::folder::DumpFile;
use xpu_timer_analysis::rank_set::RankSet;

/// What is looked at: everything, unless something is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Narrow (the summary then shows stacks; no file is written unless it is chosen)")]
pub struct Narrow {
    /// Only these ranks, such as 6 or 0-3,7
    #[arg(long, value_name = "RANKS", value_parser = ranks)]
    pub rank: Option<RankSet>,
    /// Only threads with this id, or whose name holds this text
    #[arg(long, value_name = "TID|NAME")]
    pub thread: Option<String>,
    /// Only stacks with a function or file that holds this text
    #[arg(long, value_name = "TEXT")]
    pub grep: Option<String>,
}

impl Narrow {
    /// True when nothing is left out.
    pub fn is_all(&self) -> bool {
        *self == Narrow::default()
    }

    /// True when this rank is looked at.
    pub fn takes(&self, file: &DumpFile) -> bool {
        self.rank.as_ref().is_none_or(|ranks| ranks.contains(file.rank))
    }

    /// Leaves the threads out that nobody asked for.
    pub fn apply(&self, threads: &mut Threads<'_>) {
        if self.thread.is_none() && self.grep.is_none() {
            return;
        }
        let Threads { native, python, frames } = threads;
        let wanted = |thread: &Thread<'_>| {
            let named = |text: &String| {
                text.parse().is_ok_and(|tid: u32| tid != 0 && tid == thread.tid) || holds(thread.name, text)
            };
            let greps = |text: &String| {
                frames[thread.frames.clone()].iter().any(|frame| holds(frame.func, text) || holds(frame.file, text))
            };
            self.thread.as_ref().is_none_or(named) && self.grep.as_ref().is_none_or(greps)
        };
        native.retain(wanted);
        python.retain(wanted);
    }
}

fn holds(bytes: &[u8], text: &str) -> bool {
    text.is_empty() || bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Ranks as people write them: `6`, `0-3,7`, or as labels do: `0-3/7`.
fn ranks(text: &str) -> Result<RankSet, String> {
    let mut ranks = RankSet::new();
    for run in text.split([',', '/']).map(str::trim) {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("{run:?} is no rank and no range"));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("{run:?} ends before it begins"));
        }
        ranks.insert_run(first, last);
    }
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::Frame;

    #[test]
    fn ranks_as_people_write_them() {
        assert_eq!(ranks("6").unwrap().to_string(), "6");
        assert_eq!(ranks("7, 0-3").unwrap().to_string(), "0-3/7");
        assert_eq!(ranks("0-3/7").unwrap().to_string(), "0-3/7");
        for bad in ["", "x", "3-", "-3", "3-1", "1,,2", "4294967296"] {
            assert!(ranks(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn threads_by_id_name_and_frames() {
        let thread =
            |tid, name: &'static str, at| Thread { tid, name: name.as_bytes(), frames: at, ..Thread::default() };
        let all = || Threads {
            native: vec![thread(7, "main", 0..1), thread(8, "pool7", 1..2)],
            python: vec![thread(7, "MainThread", 2..3)],
            frames: vec![Frame::new("poll", "libc.so"), Frame::new("futex", "libc.so"), Frame::new("step", "t.py:1")],
        };
        let left = |thread: Option<&str>, grep: Option<&str>| {
            let mut threads = all();
            let narrow = Narrow { thread: thread.map(Into::into), grep: grep.map(Into::into), ..Narrow::default() };
            narrow.apply(&mut threads);
            (threads.native.len(), threads.python.len())
        };
        assert_eq!(left(None, None), (2, 1));
        assert_eq!(left(Some("7"), None), (2, 1), "two by their id, one by its name");
        assert_eq!(left(Some("8"), None), (1, 0));
        assert_eq!(left(Some("Main"), None), (0, 1));
        assert_eq!(left(None, Some("libc")), (2, 0));
        assert_eq!(left(Some("7"), Some("futex")), (1, 0));
        assert_eq!(left(None, Some("nowhere")), (0, 0));
    }
}
