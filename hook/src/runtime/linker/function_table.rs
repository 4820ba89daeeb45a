//! The table of all hooked functions.

use std::ffi::c_void;

use crate::runtime::linker::function::Function;

/// Every hooked function. The order is that of the coverage table.
///
/// The rows lie in one section of the library, where the macros of the tables put them. The static linker defines the symbols of its
/// two ends. They are hidden, so that the library does not export them.
pub fn functions() -> impl Iterator<Item = &'static Function> {
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
    // SAFETY: the section holds rows and nothing else: every static in it has this type, whose size is a multiple of its alignment,
    // so the linker puts no gap between them.
    unsafe { std::slice::from_raw_parts(start, stop.offset_from_unsigned(start)) }.iter()
}

/// Whether an address is one of the hook's wrappers.
pub fn is_ours(address: *mut c_void) -> bool {
    functions().any(|function| function.wrappers.iter().any(|wrapper| wrapper.0 == address.cast_const().cast()))
}

/// The row of a name.
pub fn find(name: &[u8]) -> Option<&'static Function> {
    // Nearly all look-ups of a process end at the first letters.
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

    use super::functions;

    #[test]
    fn every_function_is_one_row_and_fits_into_the_coverage_table() {
        let names: Vec<_> = functions().map(|function| function.name).collect();
        assert!((1000..=coverage::SLOTS).contains(&names.len()), "{}", names.len());
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    }
}
