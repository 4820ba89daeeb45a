//! `cuGetProcAddress`, which finds exported functions by name and version.

use sim_abi::{
    cuda::CuError,
    ffi::{Out, Text},
};

use super::{Entry, device, driver_api, launch, memory, stream};

driver_api! { call_any_time:
    since 11030 fn cuGetProcAddress(symbol: Text, function: Out<*const ()>, version: i32, flags: u64) {
        let found = find(&symbol.get()?, version, flags & PER_THREAD != 0);
        function.set(found.unwrap_or(std::ptr::null()))?;
        found.map(drop).map_err(|_| CuError::NOT_FOUND)
    }

    since 12000 fn cuGetProcAddress_v2(symbol: Text, function: Out<*const ()>, version: i32, flags: u64, status: Out<i32>) {
        let found = find(&symbol.get()?, version, flags & PER_THREAD != 0);
        function.set(found.unwrap_or(std::ptr::null()))?;
        status.set_if_wanted(found.map_or_else(|missing: Missing| missing as i32, |_| 0));
        // If the caller passed a status, a missing function is a result and not an error.
        if found.is_err() && status.is_null() { Err(CuError::NOT_FOUND) } else { Ok(()) }
    }
}

/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
const PER_THREAD: u64 = 2;

/// All exported functions.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    let all = [device::ENTRIES, device::ANY_TIME, ENTRIES, stream::ENTRIES, launch::ENTRIES, memory::ENTRIES];
    all.into_iter().flatten()
}

/// CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND and _VERSION_NOT_SUFFICIENT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    Symbol = 1,
    Version = 2,
}

/// The function that `cuGetProcAddress` finds: the newest one with this base name that `version`
/// has.
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
        // With a shared address, a hook could not distinguish the two functions.
        let mut seen = std::collections::HashMap::new();
        for entry in entries() {
            assert_eq!(seen.insert(entry.address, entry.symbol), None, "{} has the address of another", entry.symbol);
        }
    }
}
