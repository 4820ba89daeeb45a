//! The scheduling of an OS thread that stops other threads: its priority, and the precision of its
//! sleeps.

/// Raises the priority of this OS thread until dropped. Whatever takes the CPU from this thread
/// while it holds another thread also extends that thread's stop. So nothing slow may happen under
/// the raised priority, and every wait must sleep.
pub(crate) struct RaisedPriority {
    before: Option<Priority>,
}

/// The original value of what was changed.
enum Priority {
    Policy(i32, libc::sched_param),
    Niceness(i32),
}

impl RaisedPriority {
    /// Without the privilege to change it, the priority stays as it is.
    #[allow(unsafe_code)]
    pub fn new() -> Self {
        let first = libc::sched_param { sched_priority: 1 };
        let mut usual = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameters are valid for reading and writing. 0 is the calling thread, also
        // below.
        unsafe {
            let policy = libc::sched_getscheduler(0);
            if libc::sched_getparam(0, &raw mut usual) == 0
                && libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) == 0
            {
                return RaisedPriority { before: Some(Priority::Policy(policy, usual)) };
            }
        }
        // A control group may forbid the policy to everybody.
        // SAFETY: these calls take and return numbers.
        let (niceness, changed) = unsafe {
            let niceness = libc::getpriority(libc::PRIO_PROCESS, 0);
            (niceness, libc::setpriority(libc::PRIO_PROCESS, 0, -20) == 0)
        };
        RaisedPriority { before: changed.then_some(Priority::Niceness(niceness)) }
    }
}

impl Drop for RaisedPriority {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // Restoring the priority is always permitted.
        match &self.before {
            // SAFETY: as above.
            Some(Priority::Policy(policy, usual)) => unsafe {
                libc::sched_setscheduler(0, *policy, usual);
            },
            // SAFETY: as above.
            Some(Priority::Niceness(niceness)) => unsafe {
                libc::setpriority(libc::PRIO_PROCESS, 0, *niceness);
            },
            None => {}
        }
    }
}

/// Makes sleeps of this OS thread end on time instead of the usual 50 us later.
pub(crate) fn use_precise_sleep() {
    // This only affects timing, so it may fail.
    let _ = nix::sys::prctl::set_timerslack(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)]
    fn raised_priority_is_restored() {
        // SAFETY: the call takes and returns a number.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        let priority = RaisedPriority::new();
        if nix::unistd::geteuid().is_root() {
            assert!(priority.before.is_some(), "root may");
        }
        drop(priority);
        assert_eq!(policy(), before);
    }
}
