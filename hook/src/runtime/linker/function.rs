//! A hooked function: one row of a table, with up to four originals, each with a wrapper of its
//! own.
//!
//! Slot 0 belongs to the exported symbol. Its original is the function to which the caller's
//! reference would have been bound without the hook. The other slots belong to pointers that dlsym
//! or cuGetProcAddress returned, such as those of a second library, or of another form of the
//! function. So no caller reaches an original other than its own.

use std::{
    ffi::{CStr, c_void},
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering},
};

use xpu_timer_proto::family::Library;

use crate::runtime::os::thread_state;

/// Originals per row.
pub(crate) const SLOTS: usize = 4;

const _: () = assert!(SLOTS <= align_of::<Function>(), "a slot fits into the low bits of a row's address");

/// Number of further functions in an original's object that a row may call.
pub(crate) const COMPANIONS: usize = 3;

/// Address of a wrapper.
#[derive(Clone, Copy)]
pub(crate) struct Wrapper(pub *const ());

// SAFETY: the address of code.
unsafe impl Sync for Wrapper {}

// SAFETY: the address of code, which every thread may use.
unsafe impl Send for Wrapper {}

/// One hooked function.
pub(crate) struct Function {
    /// Its C name.
    pub name: &'static CStr,
    /// The kind of library that has the original.
    pub library: Library,
    /// Index of its entry in the coverage table. Set before anything is recorded.
    pub coverage: AtomicU32,
    pub reals: [AtomicPtr<c_void>; SLOTS],
    pub companions: [[AtomicPtr<c_void>; COMPANIONS]; SLOTS],
    has_hidden_copy: AtomicBool,
    pub wrappers: [Wrapper; SLOTS],
}

impl Function {
    /// A row of the table.
    pub(crate) const fn new(name: &'static CStr, library: Library, wrappers: [Wrapper; SLOTS]) -> Self {
        Function {
            name,
            library,
            coverage: AtomicU32::new(0),
            reals: [const { AtomicPtr::new(std::ptr::null_mut()) }; SLOTS],
            companions: [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; COMPANIONS] }; SLOTS],
            has_hidden_copy: AtomicBool::new(false),
            wrappers,
        }
    }

    /// Name as text. All names are ASCII.
    pub(crate) fn text(&self) -> &'static str {
        self.name.to_str().unwrap_or("?")
    }

    /// Records that a call enters through a slot other than 0. All slots of a row share one body,
    /// and the caller's arguments leave no room for the number. Row and slot are one word, so a
    /// signal handler sees both or none.
    #[inline]
    pub(crate) fn set_entry_slot(&self, slot: usize) {
        thread_state::current().entry.set(std::ptr::from_ref(self) as usize | slot);
    }

    /// The slot of the call that begins now. A signal handler may call another row between the
    /// entry and this; that row uses its own slot 0 and does not change the entry.
    #[inline]
    pub(crate) fn take_entry_slot(&self) -> usize {
        let entry = &thread_state::current().entry;
        let slot = entry.get() ^ std::ptr::from_ref(self) as usize;
        if slot < SLOTS {
            entry.set(0);
            slot
        } else {
            0
        }
    }

    /// An empty slot and its wrapper, for a function whose code is about to be replaced. Never slot
    /// 0.
    pub(crate) fn spare_slot(&self) -> Option<(usize, *const ())> {
        let slot = (1..SLOTS).rev().find(|slot| self.reals[*slot].load(Ordering::Relaxed).is_null())?;
        Some((slot, self.wrappers[slot].0))
    }

    /// Sets the original of a slot.
    pub(crate) fn fill_slot(&self, slot: usize, real: *mut c_void) {
        self.reals[slot].store(real, Ordering::Release);
    }

    /// Empties a slot whose library was unloaded.
    pub(crate) fn free_slot(&self, slot: usize) {
        self.reals[slot].store(std::ptr::null_mut(), Ordering::Release);
        for companion in &self.companions[slot] {
            companion.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// Records that there is a copy of this function whose callers the hook cannot see.
    pub(crate) fn mark_hidden_copy(&self) {
        self.has_hidden_copy.store(true, Ordering::Relaxed);
    }

    /// Whether there is such a copy.
    pub(crate) fn has_hidden_copy(&self) -> bool {
        self.has_hidden_copy.load(Ordering::Relaxed)
    }

    /// Whether any original is known.
    pub(crate) fn is_known(&self) -> bool {
        self.reals.iter().any(|real| !real.load(Ordering::Relaxed).is_null())
    }
}

/// A function's name for people: `c10d::ProcessGroupGloo::barrier` for
/// `_ZN4c10d16ProcessGroupGloo7barrierERKNS_14…`. The name of a C function does not change.
pub(crate) fn display_name(name: &CStr) -> Vec<u8> {
    let Some(mut rest) = name.to_bytes().strip_prefix(b"_ZN") else { return name.to_bytes().to_vec() };
    let mut parts: Vec<&[u8]> = Vec::new();
    while let digits @ 1.. = rest.iter().take_while(|byte| byte.is_ascii_digit()).count() {
        let length = rest[..digits].iter().fold(0usize, |length, digit| length * 10 + usize::from(digit - b'0'));
        let Some(part) = rest.get(digits..digits + length) else { break };
        parts.push(part);
        rest = &rest[digits + length..];
    }
    // A constructor has the name of its class.
    if rest.starts_with(b"C") {
        parts.extend(parts.last().copied());
    }
    parts.join(&b"::"[..])
}

/// All hooked functions, in the order of the coverage table. Each row is a static in one section of
/// the library, so this file depends on none of the tables.
///
/// The macros of the tables place each row in the section `xpu_timer_functions`. The static linker
/// defines the symbols of its two ends. They are hidden, so the library does not export them.
pub(crate) fn functions() -> impl Iterator<Item = &'static Function> {
    let (start, stop): (*const Function, *const Function);
    // SAFETY: computes two addresses and changes nothing.
    unsafe {
        core::arch::asm!(
            ".hidden __start_xpu_timer_functions",
            ".hidden __stop_xpu_timer_functions",
            "lea {start}, [rip + __start_xpu_timer_functions]",
            "lea {stop}, [rip + __stop_xpu_timer_functions]",
            start = out(reg) start,
            stop = out(reg) stop,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    // SAFETY: the section contains rows only. Every static in it has this type, whose size is a
    // multiple of its alignment, so the linker leaves no gap between them.
    unsafe { std::slice::from_raw_parts(start, stop.offset_from_unsigned(start)) }.iter()
}

/// Whether an address is a wrapper of the hook.
pub(crate) fn is_wrapper(address: *mut c_void) -> bool {
    functions().any(|function| function.wrappers.iter().any(|wrapper| wrapper.0 == address.cast_const().cast()))
}

/// The row with this name.
pub(crate) fn find(name: &[u8]) -> Option<&'static Function> {
    // Most lookups of a process end at the first letters.
    if ![&b"nccl"[..], b"cu", b"__cu", b"hip", b"mc", b"MPI_", b"Hccl", b"cncl", b"PMPI_", b"MPIX_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
    {
        return None;
    }
    functions().find(|row| row.name.to_bytes() == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use xpu_timer_proto::ring::coverage;

    use super::{display_name, functions};

    #[test]
    fn display_names() {
        assert_eq!(display_name(c"MPI_Barrier"), b"MPI_Barrier");
        assert_eq!(
            display_name(c"_ZN4c10d16ProcessGroupGloo7barrierERKNS_14BarrierOptionsE"),
            b"c10d::ProcessGroupGloo::barrier"
        );
        assert_eq!(display_name(c"_ZN4c10d8TCPStoreC1ERKi"), b"c10d::TCPStore::TCPStore");
        assert_eq!(display_name(c"_ZN99x"), b"");
    }

    #[test]
    fn every_function_is_one_row_and_fits_into_the_coverage_table() {
        let names: Vec<_> = functions().map(|function| function.name).collect();
        assert!((1000..=coverage::SLOTS).contains(&names.len()), "{}", names.len());
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    }
}
