//! A ring that a hook handed over. It is read with `pread` alone: a peer that shrinks or rewrites
//! it can only spoil its own flight record.

use std::{collections::HashMap, fs::File, io, os::fd::OwnedFd, os::unix::fs::FileExt};

use nix::fcntl::{FcntlArg, fcntl};
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
        fcntl(&fd, FcntlArg::F_GET_SEALS).map_err(|_| error("not a memfd".into()))?;
        let file = File::from(fd);
        let status = file.metadata().map_err(|source| error(source.to_string()))?;
        if !status.is_file() {
            return Err(error("not a regular file".into()));
        }
        if status.len() != ring::offset::END as u64 {
            return Err(error(format!("{} bytes long, not {}", status.len(), ring::offset::END)));
        }
        let ring = RingFile { file };
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

    /// Writes one of the words that belong to the collector, by its index in the ring.
    ///
    /// # Errors
    /// If the write fails, or if the file ends earlier: the write must not extend it.
    pub fn write(&self, word: usize, value: u64) -> io::Result<()> {
        if self.file.metadata()?.len() != ring::offset::END as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.write_all_at(&value.to_le_bytes(), word as u64 * 8)
    }

    /// One word of the header, without those of the lanes.
    ///
    /// # Errors
    /// As [`RingFile::read_at`].
    pub fn word(&self, word: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read_at(word as u64 * 8, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
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

    /// The place of the process in each of its communicators of several ranks.
    ///
    /// # Errors
    /// As [`RingFile::read_at`].
    pub fn communicator_ranks(&self) -> io::Result<Vec<CommunicatorRank>> {
        let all = ring::read_communicators(|offset, buffer| self.read_at(offset, buffer))?;
        let shared = all.into_iter().filter(|one| one.size > 1 && one.rank >= 0);
        Ok(shared
            .map(|one| CommunicatorRank { id: one.id, size: one.size, rank: one.rank, unique: one.unique })
            .collect())
    }

    /// The whole flight record, with readable names of kernels.
    ///
    /// # Errors
    /// As [`ring::read`].
    pub fn read(&self, rank: RankInfo) -> io::Result<FlightRecord> {
        let mut record = ring::read(|offset, buffer| self.read_at(offset, buffer), rank, Now::get().mono_ns)?;
        name_kernels(&mut record);
        Ok(record)
    }
}

/// Maximum number of bytes of a kernel's name. Templates make names of thousands of bytes.
const MAX_KERNEL_NAME: usize = 200;

/// Demangles the names of kernels, and cuts long ones.
fn name_kernels(record: &mut FlightRecord) {
    let mut known: HashMap<String, String> = HashMap::new();
    let of_operations = record.operations.iter_mut().map(|operation| &mut operation.function);
    let of_streams = record.streams.iter_mut().map(|stream| &mut stream.last_kernel);
    let of_launches = record.kernels.iter_mut().map(|kernel| &mut kernel.name);
    for name in of_operations.chain(of_streams).chain(of_launches).filter(|name| name.starts_with('_')) {
        *name = known.entry(std::mem::take(name)).or_insert_with_key(|name| readable(name)).clone();
    }
}

/// The name of a kernel, demangled and cut if it is long.
#[must_use]
pub(crate) fn kernel_name(name: &str) -> String {
    if name.starts_with('_') { readable(name) } else { name.to_owned() }
}

fn readable(mangled: &str) -> String {
    let mut name = xpu_timer_capture::demangle(mangled.as_bytes());
    if name == mangled
        && let Some(scope) = scope(mangled)
    {
        return scope;
    }
    if name.len() > MAX_KERNEL_NAME {
        name.truncate(name.floor_char_boundary(MAX_KERNEL_NAME));
        name.push('…');
    }
    name
}

/// The name of a C++ function without its template arguments, for a mangled name that the hook has
/// cut: `at::native::reduce_kernel<…>`. `None` if it begins in another way.
fn scope(mangled: &str) -> Option<String> {
    let rest = mangled.strip_prefix("_Z")?;
    // A name in a scope may begin with qualifiers; a name outside of one has a single part.
    let (mut rest, most) = match rest.strip_prefix('N') {
        Some(rest) => (rest.trim_start_matches(['r', 'V', 'K']), usize::MAX),
        None => (rest, 1),
    };
    let mut parts = Vec::new();
    if let Some(after) = rest.strip_prefix("St") {
        parts.push("std");
        rest = after;
    }
    let most = most.saturating_add(parts.len());
    while parts.len() < most {
        // The standard also allows `L` before a name with internal linkage.
        let digits = rest.trim_start_matches('L');
        let Some(length) = digits.find(|other: char| !other.is_ascii_digit()) else { break };
        let Ok(bytes) = digits[..length].parse::<usize>() else { break };
        let Some((name, after)) = digits[length..].split_at_checked(bytes) else { break };
        parts.push(if name.starts_with("_GLOBAL__N") { "(anonymous namespace)" } else { name });
        rest = after;
    }
    let arguments = if rest.starts_with('I') { "<…>" } else { "" };
    (!parts.is_empty()).then(|| format!("{}{arguments}", parts.join("::")))
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use xpu_timer_proto::v1::{Operation, Stream};

    use super::*;

    fn memfd(bytes: u64) -> OwnedFd {
        let file = File::from(memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file.into()
    }

    #[test]
    fn kernels_have_readable_names() {
        let named = |name: &str| Operation { function: name.into(), ..Default::default() };
        let stream = Stream { last_kernel: "_Z13wait_for_flagPVi".into(), ..Default::default() };
        let mut record = FlightRecord {
            operations: vec![
                named("_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE"),
                named("triton_poi_fused_add_0"),
                named(""),
                named("_Z1fI1aIiiES0_IS0_IS0_S0_ES0_IS0_"),
            ],
            streams: vec![stream],
            ..Default::default()
        };
        name_kernels(&mut record);
        let names: Vec<&str> = record.operations.iter().map(|operation| operation.function.as_str()).collect();
        assert_eq!(names, ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "triton_poi_fused_add_0", "", "f<…>"]);
        assert_eq!(record.streams[0].last_kernel, "wait_for_flag");
        let long = format!("_Z1fI{}Evv", "i".repeat(400));
        assert_eq!(kernel_name("_Z13wait_for_flagPVi"), "wait_for_flag");
        assert!(readable(&long).len() <= MAX_KERNEL_NAME + '…'.len_utf8());
    }

    #[test]
    fn a_cut_name_keeps_its_scope() {
        let names = [
            (
                "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIfZNS0_",
                "at::native::reduce_kernel<…>",
            ),
            (
                "_ZN2at6native12_GLOBAL__N_125CatArrayBatchedCopy_alignINS1_10OpaqueTypeILj",
                "at::native::(anonymous namespace)::CatArrayBatchedCopy_align<…>",
            ),
            (
                "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEE",
                "cutlass::device_kernel<…>",
            ),
            ("_ZNSt6vectorIiSaIiEE9push_ba", "std::vector<…>"),
            ("_ZN2at6native13reduce_ker", "at::native"),
            ("_Z6kernelIfLi4EZ", "kernel<…>"),
            ("_Z99x", "_Z99x"),
            ("_ZN", "_ZN"),
            ("_Z5k\u{e9}", "_Z5k\u{e9}"),
            ("_R3", "_R3"),
        ];
        for (mangled, name) in names {
            assert_eq!(kernel_name(mangled), name);
        }
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
        file.set_len(0).unwrap();
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
