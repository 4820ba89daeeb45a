//! Options of a capture, and its time limits.

use std::time::Duration;

/// Extra time for threads that the kernel does not hold: this many times the deadline, but at most
/// `MAX_EXTENSION`.
const EXTENSION_FACTOR: u32 = 2;
const MAX_EXTENSION: Duration = Duration::from_secs(5);

/// What to capture, and how long it may take.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time limit of the whole capture, for all processes together. On a busy machine the capture
    /// may take longer, up to [`Options::longest`].
    pub deadline: Duration,
    /// Also capture all descendants of the given processes.
    pub children: bool,
    /// Capture native stacks.
    pub native: bool,
    /// Capture Python stacks.
    pub python: bool,
    /// Total time limit of the search for source lines. Names are always looked up.
    pub lines_budget: Duration,
    /// Stop every thread while its stack is copied. This may cut short system calls of the target.
    pub force_ptrace: bool,
}

impl Options {
    /// The time after which the capture returns, however busy the machine is, as long as the
    /// machine makes progress at all.
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
    (deadline * EXTENSION_FACTOR).min(MAX_EXTENSION)
}
