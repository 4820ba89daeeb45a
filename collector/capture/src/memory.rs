//! Copies of the memory of other processes: single ranges, and the pages that the reader of an
//! interpreter copies only once each.
//!
//! The reader follows pointers, tens of thousands of them in a rank with deep stacks. Copying whole
//! pages needs few system calls. When the pages are known in advance, all of them can be copied at
//! once during a stop.

use std::{
    collections::HashMap,
    fs::File,
    hash::{BuildHasherDefault, Hasher},
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

/// Copies ranges (start, length) one after the other into `bytes`, in their order. Returns the
/// number of copied bytes: the copy ends at the first range that is not mapped.
pub(crate) fn read_scattered(tid: i32, ranges: &[(u64, usize)], bytes: &mut Vec<u8>) -> Result<usize, Error> {
    bytes.clear();
    bytes.resize(ranges.iter().map(|(_, length)| length).sum(), 0);
    let (mut done, mut remote) = (0, Vec::with_capacity(ranges.len().min(BATCH_PAGES)));
    for batch in ranges.chunks(BATCH_PAGES) {
        remote.clear();
        remote.extend(batch.iter().map(|(start, length)| RemoteIoVec { base: *start as usize, len: *length }));
        let length: usize = batch.iter().map(|(_, length)| length).sum();
        let local = &mut bytes[done..done + length];
        let read = match process_vm_readv(Pid::from_raw(tid), &mut [IoSliceMut::new(local)], &remote) {
            Ok(read) => read,
            Err(Errno::EFAULT) => 0,
            Err(Errno::ENOSYS | Errno::EPERM) => read_each(tid, batch, local)?,
            Err(errno) => {
                let address = batch.first().map_or(0, |(start, _)| *start);
                return Err(Error::Memory { pid: tid, address, source: errno.into() });
            }
        };
        done += read;
        if read < length {
            break;
        }
    }
    Ok(done)
}

/// Copies ranges one by one, where a filter forbids to copy them at once.
fn read_each(tid: i32, ranges: &[(u64, usize)], bytes: &mut [u8]) -> Result<usize, Error> {
    let mut done = 0;
    for (start, length) in ranges {
        match read(tid, *start, &mut bytes[done..done + length]) {
            Ok(read) if read == *length => done += read,
            // The first range shows whether the process can be read at all.
            Err(error) if done == 0 => return Err(error),
            Ok(_) | Err(_) => break,
        }
    }
    Ok(done)
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
    pub(crate) fn read_into(tid: i32, start: u64, mut buffer: Vec<u8>) -> Result<Self, Error> {
        let read = read(tid, start, &mut buffer)?;
        buffer.truncate(read);
        Ok(Region { start, bytes: buffer })
    }

    /// Copies a stack from `sp` upwards, including the red zone below `sp`. The copy stays within
    /// the mapping of the stack, if that is known.
    pub(crate) fn read_stack(tid: i32, sp: u64, mapping: Option<&Mapping>, mut buffer: Vec<u8>) -> Result<Self, Error> {
        let start = sp.saturating_sub(RED_ZONE);
        let Some(mapping) = mapping else { return Region::read_into(tid, start, buffer) };
        // The main thread's stack may have grown since its mapping was looked up. Then the kernel
        // ends the read.
        let start = start.max(mapping.start);
        buffer.truncate(usize::try_from(mapping.end.saturating_sub(start)).unwrap_or(usize::MAX));
        Region::read_into(tid, start, buffer)
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(crate) fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let offset = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.bytes.get(offset..offset.checked_add(size)?)
    }
}

pub(crate) const PAGE: u64 = 4096;
const PAGE_BYTES: usize = PAGE as usize;
/// Maximum number of pages: 128 MB. A stack of 100,000 frames needs about half of that on the
/// CPython versions with the largest frames.
const MAX_PAGES: usize = 32 << 10;
/// Number of ranges that the kernel accepts in one call.
const BATCH_PAGES: usize = 1024;
/// Number of spare pages in the buffer, for pages that turn out to be needed during a stop.
const SPARE_PAGES: usize = 64;

/// A structure that could not be read or followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} at {address:#x} cannot be read")]
pub(crate) struct ReadError {
    pub what: &'static str,
    pub address: u64,
}

/// Where the copy of a page is: the index of the block, and the offset in it.
type Place = (usize, usize);
/// No address of a page.
const NO_PAGE: u64 = u64::MAX;
/// Maximum number of bytes of a block for pages that are fetched later.
const MAX_SPARE_BYTES: usize = 64 * PAGE_BYTES;

/// Copied pages of one process.
pub(crate) struct Snapshot {
    /// Any live thread of the process.
    tid: i32,
    /// Where each page is, by its address.
    places: HashMap<u64, Place, BuildHasherDefault<PageHasher>>,
    /// The copies. A block that is full is never enlarged, because its pages would be copied again.
    blocks: Vec<Vec<u8>>,
    last: (u64, Place),
    /// How many more pages may be fetched one by one.
    fetches: usize,
    /// Pages that were requested when no more could be fetched.
    missing: Vec<u64>,
    /// The pages that the buffer was prepared for, and how many more may be fetched after them.
    prepared: (Vec<u64>, usize),
    filled: bool,
}

impl Snapshot {
    /// Creates an empty snapshot. Pages are copied when they are first read.
    pub(crate) fn new(tid: i32) -> Self {
        Snapshot {
            tid,
            places: HashMap::default(),
            blocks: Vec::new(),
            last: (NO_PAGE, (0, 0)),
            fetches: MAX_PAGES,
            missing: Vec::new(),
            prepared: (Vec::new(), MAX_PAGES),
            filled: false,
        }
    }

    /// Prepares the buffer for these pages and some more. This happens before a stop, so that
    /// copying is all that is left to do during the stop. [`Snapshot::fill`] copies the pages;
    /// after that, `fetches` more can be fetched one by one.
    pub(crate) fn with_buffer(tid: i32, mut pages: Vec<u64>, fetches: usize) -> Self {
        pages.truncate(MAX_PAGES);
        let mut bytes = vec![0; (pages.len() + SPARE_PAGES) * PAGE_BYTES];
        // The first write to fresh memory costs a page fault, which would otherwise happen during
        // the stop.
        for page in bytes.chunks_mut(PAGE_BYTES) {
            page[0] = std::hint::black_box(1);
        }
        let places = HashMap::with_capacity_and_hasher(pages.len() + SPARE_PAGES, BuildHasherDefault::default());
        let prepared = (pages, fetches);
        let mut prepared_snapshot = Snapshot {
            tid,
            places,
            blocks: vec![bytes],
            last: (NO_PAGE, (0, 0)),
            fetches,
            missing: Vec::new(),
            prepared,
            filled: false,
        };
        prepared_snapshot.reset();
        prepared_snapshot
    }

    /// Copies the prepared pages with as few system calls as possible, and forgets those that
    /// cannot be read. It also forgets pages that were fetched after an earlier call, because they
    /// are from that earlier moment.
    pub(crate) fn fill(&mut self) {
        if std::mem::replace(&mut self.filled, true) {
            self.reset();
        }
        let Snapshot { places, blocks, prepared: (pages, _), .. } = self;
        if let Some(block) = blocks.first_mut() {
            copy(self.tid, pages, block, |page| {
                places.remove(&page);
            });
        }
    }

    fn reset(&mut self) {
        self.last = (NO_PAGE, (0, 0));
        let (pages, fetches) = &self.prepared;
        self.fetches = *fetches;
        self.blocks.truncate(1);
        self.blocks.iter_mut().for_each(|block| block.truncate(pages.len() * PAGE_BYTES));
        self.places.clear();
        self.places.extend(pages.iter().enumerate().map(|(index, page)| (*page, (0, index * PAGE_BYTES))));
    }

    /// Stops reading from the process.
    pub(crate) fn freeze(&mut self) {
        self.fetches = 0;
    }

    /// Pages that were requested when no more could be fetched.
    pub(crate) fn missing(&self) -> &[u64] {
        &self.missing
    }

    /// Addresses of all pages, ascending.
    pub(crate) fn pages(&self) -> Vec<u64> {
        let mut pages: Vec<u64> = self.places.keys().copied().collect();
        pages.sort_unstable();
        pages
    }

    /// Copies all pages of these ranges (start, length) at once, except those that are present
    /// already. Unreadable pages are left out.
    pub(crate) fn fetch(&mut self, ranges: impl Iterator<Item = (u64, u64)>) {
        if self.fetches == 0 {
            return;
        }
        let mut wanted = Vec::new();
        for (start, length) in ranges {
            let (first, end) = (start / PAGE, start.saturating_add(length).div_ceil(PAGE));
            let pages = (first..end).map(|number| number * PAGE).take(MAX_PAGES.saturating_sub(wanted.len()));
            wanted.extend(pages.filter(|page| !self.places.contains_key(page)));
        }
        wanted.sort_unstable();
        wanted.dedup();
        wanted.truncate(self.fetches.min(MAX_PAGES.saturating_sub(self.places.len())));
        if wanted.is_empty() {
            return;
        }
        self.fetches -= wanted.len();
        let (block, from) = self.reserve(wanted.len());
        let places = &mut self.places;
        places.extend(wanted.iter().enumerate().map(|(index, page)| (*page, (block, from + index * PAGE_BYTES))));
        copy(self.tid, &wanted, &mut self.blocks[block][from..], |page| {
            places.remove(&page);
        });
    }

    /// Adds room for pages at the end of the last block, or in a new one.
    fn reserve(&mut self, pages: usize) -> Place {
        let length = pages * PAGE_BYTES;
        let has_room = |block: &Vec<u8>| block.capacity() - block.len() >= length;
        if !self.blocks.last().is_some_and(has_room) {
            // As much as all blocks before, so that there are few.
            let spare = self.blocks.iter().map(Vec::len).sum::<usize>().min(MAX_SPARE_BYTES);
            self.blocks.push(Vec::with_capacity(length.max(spare)));
        }
        let last = self.blocks.len() - 1;
        let from = self.blocks[last].len();
        self.blocks[last].resize(from + length, 0);
        (last, from)
    }

    /// Copies numbers of eight bytes without the pages around them: of many objects, one field
    /// often decides which of them to read. `None` for those that were not read.
    pub(crate) fn words(&self, addresses: &[u64]) -> Vec<Option<u64>> {
        let mut words = vec![None; addresses.len()];
        if self.fetches == 0 {
            return words;
        }
        let ranges: Vec<(u64, usize)> = addresses.iter().map(|address| (*address, 8)).collect();
        let mut bytes = Vec::new();
        let read = read_scattered(self.tid, &ranges, &mut bytes).unwrap_or(0);
        let numbers = bytes[..read].chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        words.iter_mut().zip(numbers).for_each(|(word, number)| *word = Some(number));
        words
    }

    fn page(&mut self, page: u64) -> Option<Place> {
        if self.last.0 == page {
            return Some(self.last.1);
        }
        let at = match self.places.get(&page) {
            Some(at) => *at,
            None => self.fetch_one(page)?,
        };
        self.last = (page, at);
        Some(at)
    }

    fn fetch_one(&mut self, page: u64) -> Option<Place> {
        if self.fetches == 0 || self.places.len() >= MAX_PAGES {
            if self.missing.len() < MAX_PAGES {
                self.missing.push(page);
            }
            return None;
        }
        self.fetches -= 1;
        let (block, from) = self.reserve(1);
        match read(self.tid, page, &mut self.blocks[block][from..]) {
            Ok(PAGE_BYTES) => {
                self.places.insert(page, (block, from));
                Some((block, from))
            }
            _ => {
                self.blocks[block].truncate(from);
                None
            }
        }
    }

    /// Fills `bytes` with the memory at `address`. Returns false if not all of it can be read.
    pub(crate) fn copy(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        while done < bytes.len() {
            let Some(at) = address.checked_add(done as u64) else { return false };
            let offset = (at & (PAGE - 1)) as usize;
            let length = (PAGE_BYTES - offset).min(bytes.len() - done);
            let Some((block, page)) = self.page(at & !(PAGE - 1)) else { return false };
            let copied = &self.blocks[block][page + offset..page + offset + length];
            bytes[done..done + length].copy_from_slice(copied);
            done += length;
        }
        true
    }

    /// Reads `length` bytes.
    pub(crate) fn bytes(&mut self, what: &'static str, address: u64, length: usize) -> Result<Vec<u8>, ReadError> {
        let mut bytes = vec![0; length];
        if self.copy(address, &mut bytes) { Ok(bytes) } else { Err(ReadError { what, address }) }
    }

    /// Reads a pointer or a number of eight bytes.
    pub(crate) fn read_u64(&mut self, what: &'static str, address: u64) -> Result<u64, ReadError> {
        let mut bytes = [0; 8];
        if self.copy(address, &mut bytes) { Ok(u64::from_le_bytes(bytes)) } else { Err(ReadError { what, address }) }
    }

    /// Reads a number of four bytes.
    pub(crate) fn read_u32(&mut self, what: &'static str, address: u64) -> Result<u32, ReadError> {
        let mut bytes = [0; 4];
        if self.copy(address, &mut bytes) { Ok(u32::from_le_bytes(bytes)) } else { Err(ReadError { what, address }) }
    }

    /// Reads one byte.
    pub(crate) fn read_u8(&mut self, what: &'static str, address: u64) -> Result<u8, ReadError> {
        let mut bytes = [0];
        if self.copy(address, &mut bytes) { Ok(bytes[0]) } else { Err(ReadError { what, address }) }
    }
}

/// Copies pages into `bytes`, one after the other, and passes the unreadable ones to `unreadable`.
fn copy(tid: i32, pages: &[u64], bytes: &mut [u8], mut unreadable: impl FnMut(u64)) {
    let mut done = 0;
    while done < pages.len() {
        let batch = &pages[done..pages.len().min(done + BATCH_PAGES)];
        let remote: Vec<RemoteIoVec> =
            batch.iter().map(|page| RemoteIoVec { base: *page as usize, len: PAGE_BYTES }).collect();
        let local = &mut bytes[done * PAGE_BYTES..(done + batch.len()) * PAGE_BYTES];
        let copied_pages = match process_vm_readv(Pid::from_raw(tid), &mut [IoSliceMut::new(local)], &remote) {
            Ok(read) => read / PAGE_BYTES,
            // Seccomp filters of containers forbid the call. Then read each page from
            // `/proc/TID/mem`.
            Err(Errno::ENOSYS | Errno::EPERM) => {
                usize::from(read(tid, batch[0], &mut local[..PAGE_BYTES]).is_ok_and(|read| read == PAGE_BYTES))
            }
            Err(_) => 0,
        };
        done += copied_pages;
        // The call ends at the first page that cannot be read.
        if copied_pages == 0 {
            unreadable(pages[done]);
            done += 1;
        }
    }
}

/// Hashes page addresses. It need not resist attacks.
#[derive(Default)]
pub(crate) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // The table takes bits from both ends of the hash, so fold the product.
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15_u128;
        self.0 = product as u64 ^ (product >> 64) as u64;
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

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn a_page_is_copied_once() {
        let mut text: Vec<u8> = (0..20_000).map(|index| index as u8).collect();
        let before = text.clone();
        let address = text.as_ptr() as u64;
        let mut snapshot = Snapshot::new(own());
        assert_eq!(snapshot.bytes("text", address, text.len()).unwrap(), text);
        assert!((5..=6).contains(&snapshot.pages().len()), "one for each page: {}", snapshot.pages().len());
        text.fill(7);
        assert_eq!(snapshot.bytes("text", address + 5000, 10).unwrap(), before[5000..5010], "copied once");
        assert_eq!(snapshot.read_u64("text", 16), Err(ReadError { what: "text", address: 16 }));
        assert!(snapshot.missing().is_empty());
    }

    #[test]
    fn fills_prepared_pages_and_freezes() {
        let text = vec![1u8; 4 * PAGE_BYTES];
        let page = (text.as_ptr() as u64 + PAGE - 1) & !(PAGE - 1);
        let pages = [0, page, page + PAGE];
        let mut snapshot = Snapshot::with_buffer(own(), pages.to_vec(), 1);
        snapshot.fill();
        assert_eq!(snapshot.pages(), [page, page + PAGE], "what cannot be read is left out");
        assert_eq!(snapshot.read_u8("text", page + 2 * PAGE), Ok(1), "one may be fetched");
        snapshot.freeze();
        assert!(snapshot.read_u64("another page", page + 3 * PAGE).is_err());
        assert_eq!(snapshot.missing(), [page + 3 * PAGE]);
        assert_eq!(snapshot.read_u32("text", page + 10), Ok(0x0101_0101));
    }

    #[test]
    fn refilling_drops_all_earlier_pages() {
        let mut text = vec![1u8; 3 * PAGE_BYTES];
        let page = (text.as_ptr() as u64 + PAGE - 1) & !(PAGE - 1);
        let mut snapshot = Snapshot::with_buffer(own(), vec![page], 1);
        snapshot.fill();
        assert_eq!((snapshot.read_u8("text", page), snapshot.read_u8("text", page + PAGE)), (Ok(1), Ok(1)));
        std::hint::black_box(&mut text).fill(2);
        snapshot.fill();
        assert_eq!((snapshot.read_u8("text", page), snapshot.read_u8("text", page + PAGE)), (Ok(2), Ok(2)));
    }

    #[test]
    fn words_are_read_up_to_the_first_that_cannot_be_read() {
        let numbers = [7u64, 8, 9];
        let at = |index: usize| &raw const numbers[index] as u64;
        let mut snapshot = Snapshot::new(own());
        assert_eq!(snapshot.words(&[at(2), at(0), 16, at(1)]), [Some(9), Some(7), None, None]);
        assert!(snapshot.pages().is_empty(), "no page is kept");
        snapshot.freeze();
        assert_eq!(snapshot.words(&[at(0)]), [None]);
    }

    #[test]
    fn fetching_takes_many_pages_and_skips_holes() {
        let text = vec![1u8; 3 * PAGE_BYTES];
        let page = (text.as_ptr() as u64 + PAGE - 1) & !(PAGE - 1);
        let mut snapshot = Snapshot::new(own());
        snapshot.fetch([(16, 8), (page + 8, PAGE), (page, 1)].into_iter());
        assert_eq!(snapshot.pages(), [page, page + PAGE]);
    }
}
