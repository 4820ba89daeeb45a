//! Layer E: collectives that the host itself runs, MPI and gloo. They need no device; a call that does not return is the hang.
//!
//! [`open`] keeps the operations that a host thread is inside of, [`posted`] those that nobody waits for yet; what a library's
//! calls mean is in the modules beside them.

pub mod gloo;
pub mod mpi;
pub mod open;
mod posted;

use std::ffi::{CStr, CString, c_void};

use xpu_timer_proto::family::Library;

use crate::{
    original::{self, Function},
    watcher,
};

/// The tables of hooked functions.
pub const TABLES: [&[&Function]; 8] = [
    mpi::FUNCTIONS,
    mpi::transfers::FUNCTIONS,
    mpi::creation::FUNCTIONS,
    mpi::windows::FUNCTIONS,
    mpi::persistent::FUNCTIONS,
    mpi::large::FUNCTIONS,
    mpi::others::FUNCTIONS,
    gloo::FUNCTIONS,
];

/// The loaded libraries of a kind that belongs to no device family.
pub fn loaded(library: Library) -> Vec<*mut c_void> {
    let files = library.host_files();
    if files.is_empty() {
        return Vec::new();
    }
    let of_kind =
        |path: &String| path.rsplit('/').next().is_some_and(|name| files.iter().any(|file| name.starts_with(file)));
    let paths = watcher::libraries().into_iter().filter(of_kind);
    paths.filter_map(|path| original::loaded(&CString::new(path).ok()?)).collect()
}

/// A function's name for people: `c10d::ProcessGroupGloo::barrier` of `_ZN4c10d16ProcessGroupGloo7barrierERKNS_14…`; a name
/// of C is itself.
pub fn shown(name: &CStr) -> Vec<u8> {
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

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn names_for_people() {
        assert_eq!(shown(c"MPI_Barrier"), b"MPI_Barrier");
        assert_eq!(
            shown(c"_ZN4c10d16ProcessGroupGloo7barrierERKNS_14BarrierOptionsE"),
            b"c10d::ProcessGroupGloo::barrier"
        );
        assert_eq!(shown(c"_ZN4c10d8TCPStoreC1ERKi"), b"c10d::TCPStore::TCPStore");
        assert_eq!(shown(c"_ZN99x"), b"");
    }
}
