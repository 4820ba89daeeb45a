//! Which thread of a dump is the main thread: one rule for the judge, for the groups of ranks, and for all who show stacks.

use xpu_timer_proto::server::{PstackStacktrace, PySpyStacktrace};

/// The name of Python's main thread.
pub const NAME: &str = "MainThread";

/// Functions at the root of a main thread: those of a Python program, then those by which any program starts. Every other
/// thread begins in a function of a threading library.
const ROOTS: [&[u8]; 5] = [b"<module>", b"_start", b"__libc_start_main", b"__libc_start_call_main", b"main"];

/// What is known of one thread.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Kernel thread id; 0 when unknown.
    pub tid: u32,
    /// Name.
    pub name: &'a [u8],
    /// Function at the root of its stack; none when it has no stack.
    pub root: Option<&'a [u8]>,
}

impl<'a> From<&'a PstackStacktrace> for Candidate<'a> {
    fn from(thread: &'a PstackStacktrace) -> Self {
        let root = thread.frames.last().map(|frame| frame.func_name.as_bytes());
        Candidate { tid: thread.pid, name: thread.thread_name.as_bytes(), root }
    }
}

impl<'a> From<&'a PySpyStacktrace> for Candidate<'a> {
    fn from(thread: &'a PySpyStacktrace) -> Self {
        let root = thread.frames.last().map(|frame| frame.func_name.as_bytes());
        Candidate { tid: thread.os_thread_id, name: thread.thread_name.as_bytes(), root }
    }
}

/// Place of the main thread among the threads of one language; none when it is not among them.
///
/// It is the one whose root only a main thread has. Where its stack does not reach that far, it is the thread whose id is
/// that of the process; where ids are unknown, or of another pid namespace than the process id, the one with the name of
/// Python's main thread. Where ids are known and none of this tells it, the dump does not hold it, and another one must not
/// pass for it; else it is the first. Of several that one sign tells, it is the first that has a stack: the main thread of a
/// process in D state may have none.
pub fn of<'a>(threads: impl Iterator<Item = Candidate<'a>> + Clone, pid: i32) -> Option<usize> {
    let pid = u32::try_from(pid).unwrap_or(0);
    let by = |is_main: &dyn Fn(&Candidate<'_>) -> bool| {
        let with_stack = threads.clone().position(|thread| thread.root.is_some() && is_main(&thread));
        with_stack.or_else(|| threads.clone().position(|thread| is_main(&thread)))
    };
    let ids_are_known = pid != 0 && threads.clone().any(|thread| thread.tid != 0);
    by(&|thread| thread.root.is_some_and(|root| ROOTS.contains(&root)))
        .or_else(|| by(&|thread| pid != 0 && thread.tid == pid))
        .or_else(|| by(&|thread| thread.name == NAME.as_bytes()))
        .or_else(|| by(&|_| !ids_are_known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_surest_sign_decides() {
        let thread = |tid, name: &'static str, root: Option<&'static str>| Candidate {
            tid,
            name: name.as_bytes(),
            root: root.map(str::as_bytes),
        };
        let threads = [
            thread(0, "x", None),
            thread(9, "pool", Some("run")),
            thread(7, "MainThread", None),
            thread(5, "MainThread", Some("start")),
            thread(6, "y", None),
            thread(8, "x", Some("<module>")),
        ];
        let main = |threads: &[Candidate<'static>], pid| of(threads.iter().copied(), pid);
        assert_eq!(main(&threads, 9), Some(5), "the root before anything else");
        assert_eq!(main(&threads[..5], 9), Some(1), "the id of the process before any name");
        assert_eq!(main(&threads[..5], 6), Some(4), "also without a stack");
        assert_eq!(main(&threads[..5], 4), Some(3), "of two with the name, the one with a stack");
        assert_eq!(main(&threads[..3], 4), Some(2), "also without a stack");
        assert_eq!(main(&threads[..2], 5), None, "the pool is not the main thread");
        assert_eq!(
            main(&threads[..2], 0),
            Some(1),
            "an unknown process id is the id of no thread; a stack before none"
        );
        assert_eq!(main(&threads[..1], 5), Some(0), "nothing is known of its id");
        assert_eq!(main(&[], 5), None);
    }
}
