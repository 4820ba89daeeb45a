//! Copies memory of another process.

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
