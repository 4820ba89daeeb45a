//! Reading the memory of another process, and the copies of it that are unwound.

use std::{
    fs::File,
    io::{self, IoSliceMut},
    os::unix::fs::FileExt,
};

use nix::{
    errno::Errno,
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};

use crate::Error;

/// Copies memory of a process; `tid` may be any of its live threads. Fewer bytes than asked for come back when the rest is
/// not mapped.
pub(crate) fn read(tid: i32, address: u64, bytes: &mut [u8]) -> Result<usize, Error> {
    let remote = [RemoteIoVec { base: address as usize, len: bytes.len() }];
    match process_vm_readv(Pid::from_raw(tid), &mut [IoSliceMut::new(bytes)], &remote) {
        Ok(read) => Ok(read),
        // Seccomp filters of containers forbid the call more often than the file.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            let read = File::open(format!("/proc/{tid}/mem")).and_then(|file| file.read_at(bytes, address));
            read.map_err(|source| Error::Memory { pid: tid, address, source })
        }
        Err(errno) => Err(Error::Memory { pid: tid, address, source: errno.into() }),
    }
}

/// Copies exactly `length` bytes.
pub(crate) fn read_exact(tid: i32, address: u64, length: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; length];
    let read = read(tid, address, &mut bytes)?;
    if read == length {
        Ok(bytes)
    } else {
        let source = io::Error::new(io::ErrorKind::UnexpectedEof, format!("{read} of {length} bytes"));
        Err(Error::Memory { pid: tid, address, source })
    }
}

/// A copy of a piece of the target's memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Region {
    pub start: u64,
    pub bytes: Vec<u8>,
}

impl Region {
    /// Copies at most `length` bytes.
    pub fn read(tid: i32, start: u64, length: usize) -> Result<Self, Error> {
        let mut bytes = vec![0; length];
        let read = read(tid, start, &mut bytes)?;
        bytes.truncate(read);
        Ok(Region { start, bytes })
    }

    fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let offset = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.bytes.get(offset..offset.checked_add(size)?)
    }
}

/// The copied pieces of one thread: its stack, and whatever else its unwinding turned out to need.
#[derive(Debug, Clone, Default)]
pub(crate) struct Regions(pub Vec<Region>);

impl Regions {
    /// An unsigned number of `size` bytes, at most 8.
    pub fn number(&self, address: u64, size: usize) -> Option<u64> {
        let bytes = self.0.iter().find_map(|region| region.get(address, size))?;
        let mut number = [0; 8];
        number.get_mut(..size)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_itself_and_stops_at_the_end_of_a_mapping() {
        let text = b"a text in this very process".to_vec();
        let pid = std::process::id() as i32;
        assert_eq!(read_exact(pid, text.as_ptr() as u64, text.len()).unwrap(), text);
        assert!(read_exact(pid, 8, 8).is_err());
    }

    #[test]
    fn numbers_lie_within_one_region() {
        let regions = Regions(vec![Region { start: 100, bytes: vec![1, 0, 0, 0, 0, 0, 0, 0, 2] }]);
        assert_eq!(regions.number(100, 8), Some(1));
        assert_eq!(regions.number(108, 1), Some(2));
        assert_eq!(regions.number(104, 8), None);
        assert_eq!(regions.number(99, 1), None);
        assert_eq!(regions.number(u64::MAX, 8), None);
    }
}
