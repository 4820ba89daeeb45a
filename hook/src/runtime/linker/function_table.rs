//! The table of all hooked functions. Each row is a static in one section of the library, so this
//! file depends on none of the tables.

use std::ffi::c_void;

use crate::runtime::linker::function::Function;

/// All hooked functions, in the order of the coverage table.
///
/// The macros of the tables place each row in the section `xpu_timer_functions`. The static linker
/// defines the symbols of its two ends. They are hidden, so the library does not export them.
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
    // SAFETY: the section contains rows only. Every static in it has this type, whose size is a
    // multiple of its alignment, so the linker leaves no gap between them.
    unsafe { std::slice::from_raw_parts(start, stop.offset_from_unsigned(start)) }.iter()
}

/// Whether an address is a wrapper of the hook.
pub fn is_wrapper(address: *mut c_void) -> bool {
    functions().any(|function| function.wrappers.iter().any(|wrapper| wrapper.0 == address.cast_const().cast()))
}

/// The row with this name.
pub fn find(name: &[u8]) -> Option<&'static Function> {
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

    use super::functions;

    #[test]
    fn every_function_is_one_row_and_fits_into_the_coverage_table() {
        let names: Vec<_> = functions().map(|function| function.name).collect();
        assert!((1000..=coverage::SLOTS).contains(&names.len()), "{}", names.len());
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    }
}
