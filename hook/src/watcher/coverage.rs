//! The coverage table: which functions are hooked, and why the others are not.
//!
//! Which libraries are loaded is read from /proc/self/maps: asking the dynamic linker could block behind a library's constructor.

use std::sync::atomic::Ordering;

use xpu_timer_proto::ring::{coverage, offset};

use crate::{
    family::{FAMILIES, Library},
    original::Function,
    recorder::Recorder,
};

const HOOKED: u8 = 0;
/// The library is not loaded.
pub const NOT_LOADED: u8 = 1;
const NOT_THERE: u8 = 2;
const NOT_ASKED: u8 = 3;

/// When the table is made anew after the start; then every minute, and at a hang.
const SCHEDULE_NS: [u64; 4] = [100_000_000, 1_000_000_000, 10_000_000_000, 60_000_000_000];

/// Keeps the coverage table true.
pub struct Survey {
    next_ns: u64,
    turns: usize,
}

impl Survey {
    /// Due at once.
    pub fn new() -> Self {
        Survey { next_ns: 0, turns: 0 }
    }

    /// Refreshes the table when it is time.
    pub fn turn(&mut self, recorder: &Recorder, now_ns: u64) {
        if now_ns >= self.next_ns {
            self.refresh(recorder, now_ns);
        }
    }

    /// Refreshes the table.
    pub fn refresh(&mut self, recorder: &Recorder, now_ns: u64) {
        self.next_ns = now_ns + SCHEDULE_NS[self.turns.min(SCHEDULE_NS.len() - 1)];
        self.turns += 1;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        for (index, function) in crate::functions().take(coverage::SLOTS).enumerate() {
            let entry = recorder.ring.entry(offset::COVERAGE, index, coverage::WORDS);
            let calls = entry[coverage::CALLS].load(Ordering::Relaxed);
            publish_coverage(recorder, function, index, status(function, calls, &maps));
        }
    }
}

fn status(function: &Function, calls: u64, maps: &str) -> u8 {
    if calls > 0 || function.is_known() {
        return HOOKED;
    }
    let loaded = FAMILIES.iter().flat_map(|family| family.sonames(function.library)).any(|soname| {
        // A file is called by more digits than its soname has: libnccl.so.2.29.7.
        soname.to_str().is_ok_and(|soname| maps.contains(&format!("/{soname}")))
    });
    match function.library {
        _ if !loaded => NOT_LOADED,
        // A driver function is handed out when it is asked for. The other libraries' are bound by name: nobody did.
        Library::Driver | Library::Runtime => NOT_ASKED,
        Library::Collectives if function.resolve().is_null() => NOT_THERE,
        Library::Collectives => HOOKED,
    }
}

/// Writes one entry's layer and status.
pub fn publish_coverage(recorder: &Recorder, function: &Function, index: usize, status: u8) {
    let layer = match function.library {
        Library::Collectives => 1,
        Library::Driver => 2,
        Library::Runtime => 3,
    };
    let entry = recorder.ring.entry(offset::COVERAGE, index, coverage::WORDS);
    entry[coverage::STATUS].store(u64::from(u16::from_le_bytes([layer, status])), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::original::{SLOTS, Wrapper};

    #[test]
    fn the_reason_is_the_first_thing_that_is_missing() {
        let row = |library| Function::new(c"ncclNothing", library, [Wrapper(std::ptr::null()); SLOTS]);
        let maps = "7f00-7f01 r-xp 0 00:00 0   /usr/lib/libcuda.so.1\n";
        assert_eq!(status(&row(Library::Collectives), 0, maps), NOT_LOADED);
        assert_eq!(status(&row(Library::Driver), 0, maps), NOT_ASKED);
        assert_eq!(status(&row(Library::Driver), 1, ""), HOOKED);
        assert_eq!(status(&row(Library::Collectives), 0, "/x/libnccl.so.2.29.7\n"), NOT_THERE);
        let names: Vec<u8> = [HOOKED, NOT_LOADED, NOT_THERE, NOT_ASKED].to_vec();
        assert!(names.iter().all(|status| usize::from(*status) < coverage::STATUSES.len()));
    }
}
