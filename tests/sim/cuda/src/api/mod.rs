//! The exported functions, and the table from which `cuGetProcAddress` answers.

#![allow(unsafe_code, non_snake_case)]

mod device;
mod graph;
mod green;
mod launch;
mod memory;
mod stream;

/// One exported symbol.
pub struct Entry {
    /// With its suffixes: `_v2`, `_ptsz`, `_ptds`.
    pub symbol: &'static str,
    pub address: *const (),
    /// The CUDA version that brought it, where a caller may ask for less.
    pub since: i32,
}

/// Defines exported functions whose bodies are `Result<(), CuError>`, and their table.
///
/// `ptsz name_ptsz(stream)` also defines the form to which a NULL `stream` means the thread's own default stream; it is a
/// function of its own, as in the real library. `since 11060` is the CUDA version of the function.
macro_rules! driver_api {
    ($call:ident: $(
        $(#[$meta:meta])* $(since $since:literal)? $(ptsz $ptsz:ident($stream:ident))? fn $name:ident $arguments:tt $body:block
    )*) => {
        $(
            driver_api!(@define $call, $(#[$meta])* $name $arguments, {}, $body);
            $(driver_api!(@define $call, $ptsz $arguments, { let $stream = crate::stream::per_thread($stream); }, $body);)?
        )*

        /// What this module exports.
        pub const ENTRIES: &[crate::api::Entry] = &[$(
            crate::api::Entry { symbol: stringify!($name), address: $name as *const (), since: 0 $(+ $since)? },
            $(crate::api::Entry { symbol: stringify!($ptsz), address: $ptsz as *const (), since: 7000 },)?
        )*];
    };
    (@define $call:ident, $(#[$meta:meta])* $name:ident ($($argument:ident: $type:ty),* $(,)?), { $($before:tt)* }, $body:block) => {
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> i32 {
            $($before)*
            crate::process::$call(stringify!($name), || $body)
        }
    };
}
pub(crate) use driver_api;

/// Everything that is exported.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    let others = [graph::ENTRIES, green::ENTRIES, launch::ENTRIES, memory::ENTRIES];
    [device::ENTRIES, device::ANY_TIME, stream::ENTRIES].into_iter().chain(others).flatten()
}

/// CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND and _VERSION_NOT_SUFFICIENT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    Symbol = 1,
    Version = 2,
}

/// What `cuGetProcAddress` finds: of the functions with this base name, the newest that `version` knows.
pub fn find(base: &str, version: i32, per_thread: bool) -> Result<*const (), Missing> {
    let mut named = entries().filter_map(|entry| {
        let (symbol, is_per_thread) = match entry.symbol.rsplit_once("_pt") {
            Some((symbol, "sz" | "ds")) => (symbol, true),
            _ => (entry.symbol, false),
        };
        let suffix = symbol.strip_prefix(base)?;
        let number = if suffix.is_empty() { 1 } else { suffix.strip_prefix("_v")?.parse().ok()? };
        (per_thread || !is_per_thread).then_some((is_per_thread, number, entry))
    });
    let first = named.next().ok_or(Missing::Symbol)?;
    std::iter::once(first)
        .chain(named)
        .filter(|(.., entry)| entry.since <= version)
        .max_by_key(|(is_per_thread, number, _): &(bool, u32, &Entry)| (*is_per_thread, *number))
        .map(|(.., entry)| entry.address)
        .ok_or(Missing::Version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(found: Result<*const (), Missing>) -> &'static str {
        let address = found.unwrap();
        entries().find(|entry| std::ptr::eq(entry.address, address)).unwrap().symbol
    }

    #[test]
    fn versions_and_flags_select_the_function() {
        assert_eq!(name_of(find("cuMemAlloc", 13020, false)), "cuMemAlloc_v2");
        assert_eq!(name_of(find("cuLaunchKernel", 4000, false)), "cuLaunchKernel");
        assert_eq!(name_of(find("cuLaunchKernel", 7000, true)), "cuLaunchKernel_ptsz");
        assert_eq!(name_of(find("cuEventCreate", 13020, true)), "cuEventCreate");
        assert_eq!(name_of(find("cuGetProcAddress", 13020, false)), "cuGetProcAddress_v2");
        assert_eq!(name_of(find("cuGetProcAddress", 11030, false)), "cuGetProcAddress");
        assert_eq!(name_of(find("cuMemcpyHtoD", 13020, true)), "cuMemcpyHtoD_v2_ptds");
        assert_eq!(find("cuLaunchKernelEx", 11000, false), Err(Missing::Version));
        assert_eq!(find("cuNothing", 13020, false), Err(Missing::Symbol));
    }

    #[test]
    fn no_two_exports_share_an_address() {
        // A shared address would let a hook see one function as the other.
        let mut seen = std::collections::HashMap::new();
        for entry in entries() {
            assert_eq!(seen.insert(entry.address, entry.symbol), None, "{} has the address of another", entry.symbol);
        }
    }
}
