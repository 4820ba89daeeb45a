//! Contexts that the host destroys.
//!
//! The driver frees the events of a context with it, and may give the address of the context to the
//! next one. To use such an event afterwards is undefined: on a real driver it may crash. So the
//! hook represents a context as its address and a generation, which changes when the context is
//! destroyed, and uses no event of an earlier generation. While a host thread is destroying a
//! context, the watcher makes no call of the driver.

use std::{
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
    time::Duration,
};

use xpu_timer_proto::ring::header;

use crate::runtime::{lock_free::atomic::home_slot, os::clock, recorder::Recorder};

/// Addresses of programs have 47 bits.
const ADDRESS_BITS: u32 = 48;
const ADDRESS: usize = (1 << ADDRESS_BITS) - 1;

const SLOTS: usize = 64;

/// The generations of contexts, by the hash of their address. Contexts that share an entry end
/// together, so that the operations of the other one are lost and nothing worse happens.
static GENERATIONS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

fn generation(address: usize) -> &'static AtomicUsize {
    &GENERATIONS[home_slot::<SLOTS>(address as u64)]
}

/// A context of the driver with its current generation; 0 for none.
pub(crate) fn current_generation(address: usize) -> usize {
    if address == 0 { 0 } else { address | generation(address).load(Ordering::SeqCst) << ADDRESS_BITS }
}

/// The driver's address of a context.
pub(crate) fn address_of(context: usize) -> usize {
    context & ADDRESS
}

/// Whether a context has not been destroyed.
pub(crate) fn exists(context: usize) -> bool {
    context == current_generation(address_of(context))
}

/// The context at this address no longer exists.
pub(crate) fn end(address: usize) {
    generation(address).fetch_add(1, Ordering::SeqCst);
}

/// No earlier context exists.
pub(crate) fn end_all() {
    GENERATIONS.iter().for_each(|generation| {
        generation.fetch_add(1, Ordering::SeqCst);
    });
}

/// How long a host thread waits for the watcher to leave the driver: normally microseconds. If the
/// watcher is blocked there, so is the host's call, or the job hangs already.
const PATIENCE: Duration = Duration::from_secs(1);

/// Keeps the watcher out of the driver while it exists.
pub(crate) struct WatcherOutside(&'static AtomicU32);

impl WatcherOutside {
    /// Waits until the watcher is not in the driver, for a bounded time.
    pub(crate) fn wait(recorder: &'static Recorder) -> Self {
        recorder.destroying.fetch_add(1, Ordering::SeqCst);
        let deadline_ns = clock::now_ns() + PATIENCE.as_nanos() as u64;
        while recorder.ring.header(header::WATCHER_CALL).load(Ordering::SeqCst) != 0 && clock::now_ns() < deadline_ns {
            std::thread::yield_now();
        }
        WatcherOutside(&recorder.destroying)
    }
}

impl Drop for WatcherOutside {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_at_the_address_of_a_destroyed_one_is_another() {
        let address = 0x7f12_3456_7890;
        let first = current_generation(address);
        assert!(exists(first) && exists(0));
        end(address);
        let second = current_generation(address);
        assert!(!exists(first) && exists(second) && first != second);
        assert_eq!([first, second].map(address_of), [address; 2]);
        end_all();
        assert!(!exists(second) && exists(current_generation(address)));
    }

    #[test]
    fn a_host_thread_waits_for_the_watcher() {
        let recorder = Recorder::for_test();
        let call = recorder.ring.header(header::WATCHER_CALL);
        call.store(2, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let host = scope.spawn(|| WatcherOutside::wait(recorder));
            while recorder.destroying.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            assert!(!host.is_finished());
            call.store(0, Ordering::SeqCst);
            drop(host.join().unwrap());
        });
        assert_eq!(recorder.destroying.load(Ordering::SeqCst), 0);
    }
}
