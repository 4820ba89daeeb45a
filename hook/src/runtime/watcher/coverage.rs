//! The coverage table: which functions are hooked, and why the others are not.

use std::sync::atomic::Ordering;

use xpu_timer_proto::{
    family::{FAMILIES, Library},
    ring::{coverage, offset},
};

use crate::runtime::{
    linker::{dynamic::libraries, function::Function},
    recorder::Recorder,
};

const HOOKED: u8 = 0;

/// The library is not loaded.
pub(crate) const NOT_LOADED: u8 = 1;

const NOT_THERE: u8 = 2;
const NOT_ASKED: u8 = 3;
const HIDDEN_COPY: u8 = 4;
const UNSEEN: u8 = 5;
const DEAF: u8 = 6;

/// Parts of the mangled names of collective kernels: of NCCL and RCCL, and of versions before 2.19.
const COLLECTIVE_KERNELS: [&str; 2] = ["ncclDevKernel", "ncclKernel"];

/// Intervals at which the table is refreshed after the start. The last one repeats. A hang
/// refreshes it too.
const SCHEDULE_NS: [u64; 4] = [100_000_000, 1_000_000_000, 10_000_000_000, 60_000_000_000];

/// Keeps the coverage table up to date.
pub(crate) struct CoverageUpdater {
    next_ns: u64,
    turns: usize,
}

impl CoverageUpdater {
    /// Due immediately.
    pub(crate) fn new() -> Self {
        CoverageUpdater { next_ns: 0, turns: 0 }
    }

    /// Whether a refresh is due.
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns
    }

    /// Refreshes the table. Takes locks of the linker.
    pub(crate) fn refresh(&mut self, recorder: &Recorder, now_ns: u64) {
        self.next_ns = now_ns + SCHEDULE_NS[self.turns.min(SCHEDULE_NS.len() - 1)];
        self.turns += 1;
        let libraries = libraries();
        let is_collective = |name: &str| COLLECTIVE_KERNELS.iter().any(|part| name.contains(part));
        let rows = || crate::runtime::linker::function::functions().take(coverage::SLOTS).enumerate();
        // A program that looked up the communicator functions may still call the collectives past
        // the hook.
        let unseen = recorder.any_name(is_collective)
            && !rows().any(|(index, function)| runs_collectives(function) && recorder.calls(index) > 0);
        let listens = crate::runtime::linker::dynamic::listens_for_libraries();
        for (index, function) in rows() {
            let calls = recorder.calls(index);
            let status = match status(function, calls, &libraries) {
                HOOKED | NOT_LOADED if unseen && calls == 0 && function.library == Library::Collectives => UNSEEN,
                NOT_LOADED if !listens && matches!(function.library, Library::Collectives | Library::Blas) => DEAF,
                status => status,
            };
            publish_coverage(recorder, function, index, status);
        }
    }
}

/// Whether a call of it is a collective, rather than the creation of a communicator or group.
fn runs_collectives(function: &Function) -> bool {
    function.library == Library::Collectives && !["Comm", "Group"].iter().any(|part| function.text().contains(part))
}

fn status(function: &Function, calls: u64, libraries: &[String]) -> u8 {
    if function.has_hidden_copy() {
        return HIDDEN_COPY;
    }
    if calls > 0 || function.is_known() {
        return HOOKED;
    }
    let of_families = FAMILIES.iter().flat_map(|family| family.sonames(function.library));
    let of_families = of_families.filter_map(|soname| soname.to_str().ok());
    let loaded = of_families.chain(function.library.host_files().iter().copied()).any(|file| {
        // The library may have been opened by soname or by a name with more digits, such as
        // libnccl.so.2.29.7.
        libraries.iter().any(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(file)))
    });
    match function.library {
        _ if !loaded => NOT_LOADED,
        Library::Collectives if function.resolve().is_null() => NOT_THERE,
        Library::Collectives => HOOKED,
        // A driver function is returned by a lookup. The functions of the other libraries are bound
        // by name. Neither has happened.
        _ => NOT_ASKED,
    }
}

/// Writes the layer and status of one entry.
pub(crate) fn publish_coverage(recorder: &Recorder, function: &Function, index: usize, status: u8) {
    // A process without such a library does not list these functions.
    if status == NOT_LOADED && !function.library.host_files().is_empty() {
        return;
    }
    let entry = recorder.ring.entry(offset::COVERAGE, index, coverage::WORDS);
    entry[coverage::STATUS].store(u64::from(u16::from_le_bytes([function.library.layer(), status])), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::linker::function::{SLOTS, Wrapper};

    #[test]
    fn loaded_objects_are_listed() {
        assert!(libraries().iter().any(|path| path.contains("libc.so")), "{:?}", libraries());
    }

    #[test]
    fn creating_a_communicator_does_not_count_as_a_collective() {
        let row = |name| Function::new(name, Library::Collectives, [Wrapper(std::ptr::null()); SLOTS]);
        let collectives = [c"ncclAllReduce", c"ncclSend", c"HcclReduceScatter", c"cnclBroadcast", c"ncclAlltoAll"];
        assert!(collectives.iter().all(|name| runs_collectives(&row(name))));
        let others = [c"ncclCommInitRank", c"HcclCommInitRootInfo", c"ncclGroupEnd", c"ncclCommWindowRegister"];
        assert!(!others.iter().any(|name| runs_collectives(&row(name))));
    }

    #[test]
    fn the_reason_is_the_first_missing_condition() {
        let row = |library| Function::new(c"ncclNothing", library, [Wrapper(std::ptr::null()); SLOTS]);
        let libraries = |path: &str| [path.to_string()];
        let driver = libraries("/usr/lib/libcuda.so.1");
        assert_eq!(status(&row(Library::Collectives), 0, &driver), NOT_LOADED);
        assert_eq!(status(&row(Library::Driver), 0, &driver), NOT_ASKED);
        assert_eq!(status(&row(Library::Driver), 1, &[]), HOOKED);
        assert_eq!(status(&row(Library::Collectives), 0, &libraries("/x/libnccl.so.2.29.7")), NOT_THERE);
        let hidden = row(Library::Collectives);
        hidden.mark_hidden_copy();
        assert_eq!(status(&hidden, 7, &[]), HIDDEN_COPY, "also when other calls of it were seen");
        let all = [HOOKED, NOT_LOADED, NOT_THERE, NOT_ASKED, HIDDEN_COPY, UNSEEN, DEAF];
        assert!(all.iter().all(|status| usize::from(*status) < coverage::STATUSES.len()));
    }
}
