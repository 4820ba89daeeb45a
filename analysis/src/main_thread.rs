//! The rule that selects the main thread of a dump. The judge, the groups of ranks and everything
//! that shows stacks use it.

use xpu_timer_proto::server::{PstackStacktrace, PySpyStacktrace};

/// The name of Python's main thread.
pub const NAME: &str = "MainThread";

/// Functions at the root of a main thread: first that of a Python program, then those of any
/// program. Every other thread starts in a function of a threading library.
const ROOTS: [&[u8]; 5] = [b"<module>", b"_start", b"__libc_start_main", b"__libc_start_call_main", b"main"];

/// The properties of one thread that identify a main thread.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Kernel thread id; 0 if unknown.
    pub tid: u32,
    /// Name of the thread.
    pub name: &'a [u8],
    /// Function at the root of its stack. `None` without a stack.
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

/// Index of the main thread among the threads of one language. `None` if it is not among them.
///
/// The rules, in this order:
///
/// - The thread whose root function only a main thread has.
/// - The thread whose id equals the process id, for a stack that does not reach its root.
/// - The thread with the name of Python's main thread, if ids are unknown or belong to another pid
///   namespace than the process id.
/// - The first thread, unless ids are known. If they are, the dump does not contain the main
///   thread, and another thread must not replace it.
///
/// If a rule fits several threads, the first with a stack counts: the main thread of a process in D
/// state may have none.
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
    fn the_strongest_evidence_decides() {
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
