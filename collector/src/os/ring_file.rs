//! A ring that a hook handed over. It is read with `pread` alone: a peer that shrinks or rewrites
//! it can only spoil its own flight record.

use std::{fs::File, io, os::fd::OwnedFd, os::unix::fs::FileExt};

use rustix::fs::{FileType, fcntl_get_seals, fstat};
use xpu_timer_proto::{
    ring::{self, header},
    v1::{FlightRecord, RankInfo},
};

use crate::{error::Error, job::partition::CommunicatorRank, os::clock::Now};

/// The memfd of one rank.
#[derive(Debug)]
pub struct RingFile {
    file: File,
}

impl RingFile {
    /// Takes a descriptor after checking what it is.
    ///
    /// Only a memfd (or another shared memory file) has seals. Reading one cannot block, unlike
    /// reading a pipe, a device or a file of a FUSE file system.
    ///
    /// # Errors
    /// If it is not a memfd of the size of a ring.
    pub fn new(fd: OwnedFd, pid: i32) -> Result<RingFile, Error> {
        let error = |problem: String| Error::Ring { pid, problem };
        fcntl_get_seals(&fd).map_err(|_| error("not a memfd".into()))?;
        let status = fstat(&fd).map_err(|errno| error(errno.to_string()))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(error("not a regular file".into()));
        }
        if status.st_size != ring::offset::END as i64 {
            return Err(error(format!("{} bytes long, not {}", status.st_size, ring::offset::END)));
        }
        let ring = RingFile { file: fd.into() };
        ring.header().map_err(|source| error(source.to_string()))?;
        Ok(ring)
    }

    /// Fills a buffer from an offset, as the readers of [`ring`] need it.
    ///
    /// # Errors
    /// If the file ends earlier or cannot be read.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    /// Writes one of the two header words that belong to the collector.
    ///
    /// # Errors
    /// If the write fails, or if the file ends earlier: the write must not extend it.
    pub fn write(&self, word: usize, value: u64) -> io::Result<()> {
        if self.file.metadata()?.len() != ring::offset::END as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.write_all_at(&value.to_le_bytes(), word as u64 * 8)
    }

    /// The counters and times of the header.
    ///
    /// # Errors
    /// As [`ring::read_header`].
    pub fn header(&self) -> io::Result<[u64; header::WORDS]> {
        ring::read_header(|offset, buffer| self.read_at(offset, buffer))
    }

    /// When the process last launched, called or completed an operation.
    ///
    /// # Errors
    /// As [`ring::read_progress`].
    pub fn progress(&self) -> io::Result<ring::Progress> {
        ring::read_progress(|offset, buffer| self.read_at(offset, buffer))
    }

    /// The place of the process in each of its communicators with a globally unique identity.
    ///
    /// # Errors
    /// As [`RingFile::read_at`].
    pub fn communicator_ranks(&self) -> io::Result<Vec<CommunicatorRank>> {
        let all = ring::read_communicators(|offset, buffer| self.read_at(offset, buffer))?;
        let shared = all.into_iter().filter(|one| one.unique && one.size > 1 && one.rank >= 0);
        Ok(shared.map(|one| CommunicatorRank { id: one.id, size: one.size, rank: one.rank }).collect())
    }

    /// The whole flight record.
    ///
    /// # Errors
    /// As [`ring::read`].
    pub fn read(&self, rank: RankInfo) -> io::Result<FlightRecord> {
        ring::read(|offset, buffer| self.read_at(offset, buffer), rank, Now::get().mono_ns)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memfd(bytes: u64) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    #[test]
    fn a_truncated_ring_is_an_error() {
        let fd = memfd(ring::offset::END as u64);
        let file = File::from(fd.try_clone().unwrap());
        file.write_all_at(&ring::MAGIC.to_le_bytes(), 0).unwrap();
        file.write_all_at(&u64::from(ring::VERSION).to_le_bytes(), 8).unwrap();
        let ring = RingFile::new(fd, 1).unwrap();
        assert_eq!(ring.header().unwrap()[header::MAGIC], ring::MAGIC);
        ring.write(header::FILTERED, 2).unwrap();
        assert_eq!(ring.header().unwrap()[header::FILTERED], 2);
        ftruncate(&file, 0).unwrap();
        assert!(ring.write(header::FILTERED, 1).is_err() && file.metadata().unwrap().len() == 0);
        assert_eq!(ring.read(RankInfo::default()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn descriptors_that_are_not_rings_are_refused() {
        let refused = |fd: OwnedFd| RingFile::new(fd, 7).unwrap_err().to_string();
        assert!(refused(memfd(8)).contains("8 bytes long"));
        assert!(refused(memfd(ring::offset::END as u64)).contains("not a flight ring"));
        assert!(refused(File::open("/dev/zero").unwrap().into()).contains("pid 7 sent is not a ring: not a memfd"));
        let (reader, _writer) = io::pipe().unwrap();
        assert!(refused(reader.into()).contains("not a memfd"));
    }
}
