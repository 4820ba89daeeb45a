//! The table of kernel and function names.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::ring::{header, name, offset};

use crate::runtime::{
    device::device,
    lock_free::hash_slot::home_slot,
    os::thread_state::{self, IN_RUNTIME},
    recorder::{Recorder, SEEN, store_text},
};

impl Recorder {
    /// Makes sure that the table contains a kernel's name. It is requested on the launching thread,
    /// while the handle is certainly valid: the module may be unloaded before the watcher runs.
    /// Returns whether this is the kernel's first launch.
    pub fn see_function(&self, function: u64) -> bool {
        let is_new = self.is_new(function);
        if is_new && let Some(name) = name_of(function) {
            self.add_name(function, name.as_bytes());
        }
        is_new
    }

    /// Whether the name of this key has never been requested. True once per key.
    #[inline(never)]
    fn is_new(&self, key: u64) -> bool {
        let mut index = home_slot::<SEEN>(key);
        for _ in 0..SEEN {
            match self.seen[index].load(Ordering::Relaxed) {
                0 if self.seen[index].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed).is_ok() => {
                    return true;
                }
                0 => {}
                found if found == key => return false,
                _ => index = (index + 1) % SEEN,
            }
        }
        false
    }

    /// Adds the name of a key. Called once per key.
    pub fn add_name(&self, function: u64, text: &[u8]) {
        let index = self.shared.names.fetch_add(1, Ordering::Relaxed);
        if index >= name::SLOTS {
            self.shared.names.store(name::SLOTS, Ordering::Relaxed);
            self.count(header::OVERFLOWS);
            return;
        }
        let entry = self.ring.entry(offset::NAMES, index, name::WORDS);
        store_text(&entry[name::TEXT..], &text[..text.len().min(crate::runtime::recorder::NAME_BYTES)]);
        entry[name::FUNCTION].store(function, Ordering::Release);
    }

    /// The key of a function of the host's API, which is the address of its static name.
    pub fn name_key(&self, text: &'static str) -> u64 {
        let key = text.as_ptr() as u64;
        if self.is_new(key) {
            self.add_name(key, text.as_bytes());
        }
        key
    }

    pub fn names(&self) -> impl Iterator<Item = &'static [AtomicU64]> {
        let entries = 0..self.shared.names.load(Ordering::Relaxed).min(name::SLOTS);
        entries.map(|index| self.ring.entry(offset::NAMES, index, name::WORDS))
    }

    /// Whether the table contains a matching name.
    pub fn any_name(&self, is_it: impl Fn(&str) -> bool) -> bool {
        self.names().any(|entry| is_it(&name_in(entry)))
    }
}

/// The text of an entry.
pub fn name_in(entry: &[AtomicU64]) -> String {
    let words = entry[name::TEXT..].iter().map(|word| word.load(Ordering::Relaxed));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The name of a kernel, from the driver, on the thread that is launching it.
pub(super) fn name_of(function: u64) -> Option<&'static str> {
    let by_runtime = thread_state::with(|thread| thread.inside.get() & IN_RUNTIME != 0);
    // SAFETY: a function that is being launched is valid, also while its name is used.
    let name = device().and_then(|device| unsafe { device.name_of(function as *mut c_void, by_runtime) })?;
    name.to_str().ok()
}
