//! A value that is created once and never freed.

use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that is created once and never freed. When several threads need it at the same time,
/// each creates one and the first is kept. No thread waits for another, because a forked child may
/// not have the other thread.
pub(crate) struct LeakedOnce<T: 'static>(AtomicPtr<T>);

impl<T: Sync> LeakedOnce<T> {
    /// Without a value.
    pub(crate) const fn new() -> Self {
        LeakedOnce(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The value, if it has been created.
    #[inline]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or a value that is never freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The value, which is created if necessary.
    #[inline]
    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &'static T {
        self.get().unwrap_or_else(|| self.init(make()))
    }

    #[cold]
    fn init(&self, made: T) -> &'static T {
        let made = Box::into_raw(Box::new(made));
        match self.0.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: created just now, and never freed.
            Ok(_) => unsafe { &*made },
            Err(first) => {
                // SAFETY: no other thread has seen this value; the other one is never freed.
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
    fn a_value_is_created_once_without_waiting() {
        static MADE: LeakedOnce<u32> = LeakedOnce::new();
        assert_eq!(MADE.get(), None);
        // Like a thread that never returns from the creation.
        let first = MADE.get_or_init(|| {
            assert_eq!(MADE.get_or_init(|| 1), &1);
            2
        });
        assert_eq!((first, MADE.get()), (&1, Some(&1)));
    }
}
