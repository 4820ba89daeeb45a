//! What a capture takes, and how long it may take.

use std::time::Duration;

/// More time for threads that are not held by the kernel: so many times the deadline, and no more than this.
const MORE_TIMES: u32 = 2;
const MOST_MORE: Duration = Duration::from_secs(5);

/// What to capture, and how long it may take.
#[derive(Debug, Clone)]
pub struct Options {
    /// For the whole capture, all processes together. On a busy machine it may take longer, up to [`Options::longest`].
    pub deadline: Duration,
    /// Also capture all descendants of the given processes.
    pub children: bool,
    /// Take native stacks.
    pub native: bool,
    /// Take Python stacks.
    pub python: bool,
    /// How long the search for source lines may take in all. Names are always looked up.
    pub lines_budget: Duration,
    /// Stop every thread while its stack is copied. This may cut short system calls of the target.
    pub force_ptrace: bool,
}

impl Options {
    /// The time after which there is an answer, however busy the machine is, as long as it answers at all.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.deadline + extension(self.deadline) + self.deadline / 4
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(5),
            children: false,
            native: true,
            python: true,
            lines_budget: Duration::from_secs(1),
            force_ptrace: false,
        }
    }
}

/// The time that a capture may take beyond its deadline when the machine is busy.
pub(crate) fn extension(deadline: Duration) -> Duration {
    (deadline * MORE_TIMES).min(MOST_MORE)
}
