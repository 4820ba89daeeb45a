//! A value that is made once.

use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that is made once and kept for ever. Threads that need it at the same time make it each, and one is kept: nobody waits for
/// another thread, which a forked child may not have.
pub struct LeakedOnce<T: 'static>(AtomicPtr<T>);

impl<T: Sync> LeakedOnce<T> {
    /// Not made yet.
    pub const fn new() -> Self {
        LeakedOnce(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The value, if it is made.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or a value that is never freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The value, made if need be.
    #[inline]
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &'static T {
        self.get().unwrap_or_else(|| self.init(make()))
    }

    #[cold]
    fn init(&self, made: T) -> &'static T {
        let made = Box::into_raw(Box::new(made));
        match self.0.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just made, and never freed.
            Ok(_) => unsafe { &*made },
            Err(first) => {
                // SAFETY: nobody else has seen it; the other one is never freed.
                unsafe {
                    drop(Box::from_raw(made));
                    &*first
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_and_nobody_waits_for_who_makes_it() {
        static MADE: LeakedOnce<u32> = LeakedOnce::new();
        assert_eq!(MADE.get(), None);
        // As a thread that never comes back from making it.
        let first = MADE.get_or_init(|| {
            assert_eq!(MADE.get_or_init(|| 1), &1);
            2
        });
        assert_eq!((first, MADE.get()), (&1, Some(&1)));
    }
}
