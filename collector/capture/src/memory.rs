//! Copies of the memory of other processes.

pub(crate) mod snapshot;

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

use xpu_timer_proto::procfs::Mapping;

use crate::error::Error;

/// Copies memory of a process. `tid` may be any of its live threads. Returns the number of copied
/// bytes, which is less than requested if the rest is not mapped.
pub(crate) fn read(tid: i32, address: u64, bytes: &mut [u8]) -> Result<usize, Error> {
    let remote = [RemoteIoVec { base: address as usize, len: bytes.len() }];
    match process_vm_readv(Pid::from_raw(tid), &mut [IoSliceMut::new(bytes)], &remote) {
        Ok(read) => Ok(read),
        // Seccomp filters of containers forbid the system call more often than the file.
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

/// Bytes below the stack pointer that a function may use without moving the stack pointer.
pub(crate) const RED_ZONE: u64 = 128;

/// A copy of a range of the target's memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Region {
    pub start: u64,
    pub bytes: Vec<u8>,
}

impl Region {
    /// Copies as many bytes as `buffer` has, or fewer if the mapped memory ends before.
    pub fn read_into(tid: i32, start: u64, mut buffer: Vec<u8>) -> Result<Self, Error> {
        let read = read(tid, start, &mut buffer)?;
        buffer.truncate(read);
        Ok(Region { start, bytes: buffer })
    }

    /// Copies a stack from `sp` upwards, including the red zone below `sp`. The copy stays within
    /// the mapping of the stack, if that is known.
    pub fn read_stack(tid: i32, sp: u64, mapping: Option<&Mapping>, mut buffer: Vec<u8>) -> Result<Self, Error> {
        let start = sp.saturating_sub(RED_ZONE);
        let Some(mapping) = mapping else { return Region::read_into(tid, start, buffer) };
        // The main thread's stack may have grown since its mapping was looked up. Then the kernel
        // ends the read.
        let start = start.max(mapping.start);
        buffer.truncate(usize::try_from(mapping.end.saturating_sub(start)).unwrap_or(usize::MAX));
        Region::read_into(tid, start, buffer)
    }

    pub fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let offset = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.bytes.get(offset..offset.checked_add(size)?)
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
}
