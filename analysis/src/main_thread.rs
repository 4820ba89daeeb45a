//! Which thread of a dump is the main thread, for all who group ranks by it.

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

/// Place of the main thread among the threads of one language: by its name, its id, the module at its root, else the first
/// one; always one with a stack.
pub fn of<'a>(threads: impl Iterator<Item = Candidate<'a>> + Clone, pid: i32) -> Option<usize> {
    let pid = u32::try_from(pid).unwrap_or(0);
    let by = |is_main: &dyn Fn(&Candidate<'_>) -> bool| {
        threads.clone().position(|thread| thread.root.is_some() && is_main(&thread))
    };
    by(&|thread| thread.name == b"MainThread")
        .or_else(|| by(&|thread| pid != 0 && thread.tid == pid))
        .or_else(|| by(&|thread| thread.root == Some(b"<module>")))
        .or_else(|| by(&|_| true))
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
        let mut threads = vec![
            thread(0, "MainThread", None),
            thread(9, "pool", Some("run")),
            thread(8, "x", Some("<module>")),
            thread(7, "y", Some("start")),
            thread(6, "MainThread", Some("start")),
        ];
        let main = |threads: &[Candidate<'static>], pid| of(threads.iter().copied(), pid);
        assert_eq!(main(&threads, 7), Some(4));
        threads.pop();
        assert_eq!(main(&threads, 7), Some(3));
        assert_eq!(main(&threads, 5), Some(2));
        assert_eq!(main(&threads, 0), Some(2), "an unknown process id is the id of no thread");
        assert_eq!(main(&threads[..2], 5), Some(1));
        assert_eq!(main(&threads[..1], 5), None);
    }
}
