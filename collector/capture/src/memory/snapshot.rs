//! The pages of a process that the reader of its interpreter has looked at, each of them copied once.
//!
//! The interpreter is read by following pointers, tens of thousands of them in a rank with deep stacks. Pages make that few
//! system calls, and they are what can be fetched at once during a stop, when it is known which ones matter.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    io::IoSliceMut,
};

use nix::{
    errno::Errno,
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};

use super::remote;

pub(crate) const PAGE: u64 = 4096;
const PAGE_BYTES: usize = PAGE as usize;
/// Pages kept at most: 128 MB. A stack of 100,000 frames needs about half of that on the CPythons with the largest frames.
const MOST_PAGES: usize = 32 << 10;
/// Pieces that the kernel takes in one call.
const BATCH: usize = 1024;
/// Bytes of room for pages that turn out to be wanted during a stop.
const SPARE: usize = 64;

/// Something that could not be read or followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Torn {
    pub what: &'static str,
    pub address: u64,
}

impl std::fmt::Display for Torn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {:#x} cannot be read", self.what, self.address)
    }
}

/// Copied pages of one process.
pub(crate) struct Snapshot {
    /// Any live thread of it.
    tid: i32,
    /// Where in `bytes` a page lies.
    known: HashMap<u64, usize, BuildHasherDefault<PageHasher>>,
    bytes: Vec<u8>,
    last: (u64, usize),
    /// How many more pages may be fetched one by one.
    fetches: usize,
    /// Pages that were asked for when no more could be fetched.
    missed: Vec<u64>,
    /// The pages that there was room made for, and how many more may be fetched after them.
    prepared: (Vec<u64>, usize),
    filled: bool,
}

impl Snapshot {
    /// Nothing yet; pages are copied when they are first looked at.
    pub fn new(tid: i32) -> Self {
        Snapshot {
            tid,
            known: HashMap::default(),
            bytes: Vec::new(),
            last: (u64::MAX, 0),
            fetches: MOST_PAGES,
            missed: Vec::new(),
            prepared: (Vec::new(), MOST_PAGES),
            filled: false,
        }
    }

    /// Room for pages that are known to be wanted and some more, made before a stop so that during it there is nothing to do
    /// but to copy. [`Snapshot::fill`] copies them; after that `fetches` more can be fetched one by one.
    pub fn with_room(tid: i32, mut pages: Vec<u64>, fetches: usize) -> Self {
        pages.truncate(MOST_PAGES);
        let mut bytes = vec![0; (pages.len() + SPARE) * PAGE_BYTES];
        // Fresh memory costs a fault a page when it is first written, which would be during the stop.
        for page in bytes.chunks_mut(PAGE_BYTES) {
            page[0] = std::hint::black_box(1);
        }
        let known = HashMap::with_capacity_and_hasher(pages.len() + SPARE, BuildHasherDefault::default());
        let prepared = (pages, fetches);
        let mut room =
            Snapshot { tid, known, bytes, last: (u64::MAX, 0), fetches, missed: Vec::new(), prepared, filled: false };
        room.reset();
        room
    }

    /// Copies the pages that there is room for, with as few system calls as possible, and forgets those that cannot be read.
    /// Whatever was fetched after an earlier time is of that time, so it is forgotten as well.
    pub fn fill(&mut self) {
        if std::mem::replace(&mut self.filled, true) {
            self.reset();
        }
        let known = &mut self.known;
        copy(self.tid, &self.prepared.0, &mut self.bytes, |page| {
            known.remove(&page);
        });
    }

    fn reset(&mut self) {
        self.last = (u64::MAX, 0);
        let (pages, fetches) = &self.prepared;
        self.fetches = *fetches;
        self.bytes.truncate(pages.len() * PAGE_BYTES);
        self.known.clear();
        self.known.extend(pages.iter().enumerate().map(|(index, page)| (*page, index * PAGE_BYTES)));
    }

    /// Nothing is read from the process from now on.
    pub fn freeze(&mut self) {
        self.fetches = 0;
    }

    /// Pages that were wanted after the last one that could be fetched.
    pub fn missed(&self) -> &[u64] {
        &self.missed
    }

    /// Addresses of all pages, ascending.
    pub fn pages(&self) -> Vec<u64> {
        let mut pages: Vec<u64> = self.known.keys().copied().collect();
        pages.sort_unstable();
        pages
    }

    /// Copies all pages of these pieces of memory that are not there yet at once. What cannot be read is left out.
    pub fn fetch(&mut self, pieces: impl Iterator<Item = (u64, u64)>) {
        if self.fetches == 0 {
            return;
        }
        let mut wanted = Vec::new();
        for (start, length) in pieces {
            let (first, end) = (start / PAGE, start.saturating_add(length).div_ceil(PAGE));
            let pages = (first..end).map(|number| number * PAGE).take(MOST_PAGES.saturating_sub(wanted.len()));
            wanted.extend(pages.filter(|page| !self.known.contains_key(page)));
        }
        wanted.sort_unstable();
        wanted.dedup();
        wanted.truncate(self.fetches.min(MOST_PAGES.saturating_sub(self.known.len())));
        if wanted.is_empty() {
            return;
        }
        self.fetches -= wanted.len();
        let from = self.bytes.len();
        self.bytes.resize(from + wanted.len() * PAGE_BYTES, 0);
        self.known.extend(wanted.iter().enumerate().map(|(index, page)| (*page, from + index * PAGE_BYTES)));
        let known = &mut self.known;
        copy(self.tid, &wanted, &mut self.bytes[from..], |page| {
            known.remove(&page);
        });
    }

    /// Where a page lies in `bytes`.
    fn page(&mut self, page: u64) -> Option<usize> {
        if self.last.0 == page {
            return Some(self.last.1);
        }
        let at = match self.known.get(&page) {
            Some(at) => *at,
            None => self.fetch_one(page)?,
        };
        self.last = (page, at);
        Some(at)
    }

    fn fetch_one(&mut self, page: u64) -> Option<usize> {
        if self.fetches == 0 || self.known.len() >= MOST_PAGES {
            if self.missed.len() < MOST_PAGES {
                self.missed.push(page);
            }
            return None;
        }
        self.fetches -= 1;
        let at = self.bytes.len();
        self.bytes.resize(at + PAGE_BYTES, 0);
        match remote::read(self.tid, page, &mut self.bytes[at..]) {
            Ok(PAGE_BYTES) => {
                self.known.insert(page, at);
                Some(at)
            }
            _ => {
                self.bytes.truncate(at);
                None
            }
        }
    }

    /// Fills `bytes` with what lies at `address`; false when not all of it can be read.
    pub fn copy(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        while done < bytes.len() {
            let Some(at) = address.checked_add(done as u64) else { return false };
            let offset = (at & (PAGE - 1)) as usize;
            let length = (PAGE_BYTES - offset).min(bytes.len() - done);
            let Some(page) = self.page(at & !(PAGE - 1)) else { return false };
            bytes[done..done + length].copy_from_slice(&self.bytes[page + offset..page + offset + length]);
            done += length;
        }
        true
    }

    /// A piece of memory.
    pub fn bytes(&mut self, what: &'static str, address: u64, length: usize) -> Result<Vec<u8>, Torn> {
        let mut bytes = vec![0; length];
        if self.copy(address, &mut bytes) { Ok(bytes) } else { Err(Torn { what, address }) }
    }

    /// The pointer or number of eight bytes at an address.
    pub fn word(&mut self, what: &'static str, address: u64) -> Result<u64, Torn> {
        let mut bytes = [0; 8];
        if self.copy(address, &mut bytes) { Ok(u64::from_le_bytes(bytes)) } else { Err(Torn { what, address }) }
    }

    /// The number of four bytes at an address.
    pub fn half(&mut self, what: &'static str, address: u64) -> Result<u32, Torn> {
        let mut bytes = [0; 4];
        if self.copy(address, &mut bytes) { Ok(u32::from_le_bytes(bytes)) } else { Err(Torn { what, address }) }
    }

    /// The byte at an address.
    pub fn byte(&mut self, what: &'static str, address: u64) -> Result<u8, Torn> {
        let mut bytes = [0];
        if self.copy(address, &mut bytes) { Ok(bytes[0]) } else { Err(Torn { what, address }) }
    }
}

/// Copies pages next to each other into `bytes`, and tells which ones cannot be read.
fn copy(tid: i32, pages: &[u64], bytes: &mut [u8], mut unreadable: impl FnMut(u64)) {
    let mut done = 0;
    while done < pages.len() {
        let batch = &pages[done..pages.len().min(done + BATCH)];
        let remote: Vec<RemoteIoVec> =
            batch.iter().map(|page| RemoteIoVec { base: *page as usize, len: PAGE_BYTES }).collect();
        let local = &mut bytes[done * PAGE_BYTES..(done + batch.len()) * PAGE_BYTES];
        let whole = match process_vm_readv(Pid::from_raw(tid), &mut [IoSliceMut::new(local)], &remote) {
            Ok(read) => read / PAGE_BYTES,
            // Seccomp filters of containers forbid the call; then each page is read from the file that stands for the memory.
            Err(Errno::ENOSYS | Errno::EPERM) => {
                usize::from(remote::read(tid, batch[0], &mut local[..PAGE_BYTES]).is_ok_and(|read| read == PAGE_BYTES))
            }
            Err(_) => 0,
        };
        done += whole;
        // The call ends at the first page that cannot be read.
        if whole == 0 {
            unreadable(pages[done]);
            done += 1;
        }
    }
}

/// Spreads page addresses; there is nothing to defend against.
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
        // The table takes its bits from both ends, so the product is folded.
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15_u128;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn pages_keep_what_was_read() {
        let mut text: Vec<u8> = (0..20_000).map(|index| index as u8).collect();
        let before = text.clone();
        let address = text.as_ptr() as u64;
        let mut snapshot = Snapshot::new(own());
        assert_eq!(snapshot.bytes("text", address, text.len()).unwrap(), text);
        assert!((5..=6).contains(&snapshot.pages().len()), "one for each page: {}", snapshot.pages().len());
        text.fill(7);
        assert_eq!(snapshot.bytes("text", address + 5000, 10).unwrap(), before[5000..5010], "copied once");
        assert_eq!(snapshot.word("text", 16), Err(Torn { what: "text", address: 16 }));
        assert!(snapshot.missed().is_empty());
    }

    #[test]
    fn room_is_filled_at_once_and_then_frozen() {
        let text = vec![1u8; 4 * PAGE_BYTES];
        let page = (text.as_ptr() as u64 + PAGE - 1) & !(PAGE - 1);
        let pages = [0, page, page + PAGE];
        let mut snapshot = Snapshot::with_room(own(), pages.to_vec(), 1);
        snapshot.fill();
        assert_eq!(snapshot.pages(), [page, page + PAGE], "what cannot be read is left out");
        assert_eq!(snapshot.byte("text", page + 2 * PAGE), Ok(1), "one may be fetched");
        snapshot.freeze();
        assert!(snapshot.word("another page", page + 3 * PAGE).is_err());
        assert_eq!(snapshot.missed(), [page + 3 * PAGE]);
        assert_eq!(snapshot.half("text", page + 10), Ok(0x0101_0101));
    }

    #[test]
    fn nothing_of_an_earlier_time_is_left_when_it_is_filled_again() {
        let mut text = vec![1u8; 3 * PAGE_BYTES];
        let page = (text.as_ptr() as u64 + PAGE - 1) & !(PAGE - 1);
        let mut snapshot = Snapshot::with_room(own(), vec![page], 1);
        snapshot.fill();
        assert_eq!((snapshot.byte("text", page), snapshot.byte("text", page + PAGE)), (Ok(1), Ok(1)));
        std::hint::black_box(&mut text).fill(2);
        snapshot.fill();
        assert_eq!((snapshot.byte("text", page), snapshot.byte("text", page + PAGE)), (Ok(2), Ok(2)));
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
