//! The lane of a thread: counters that only this thread writes. So a launch needs no atomic
//! read-modify-write, and writes no cache line that another thread writes.
//!
//! A thread takes a lane at its first launch and never returns it, because the thread-local memory
//! has no destructor. When no free lane is left, the kernel is asked which owners have ended.
//! Further threads share the words of the header.

use std::sync::atomic::{AtomicU64, Ordering};

use xpu_timer_proto::{
    kernels::communicates,
    ring::{coverage, header, kernel, lane, offset, stream},
};

use crate::runtime::{
    lock_free::{
        atomic::home_slot,
        handoff::{self, add},
    },
    os::{
        clock, signals, sys,
        thread_state::{self, ThreadState},
    },
    recorder::{Recorder, names::name_of},
};

/// Value of [`ThreadState::lane`] when no lane was left.
const NONE: u32 = u32::MAX;

/// Number of allocations that are known at a time. Caching allocators make few large ones.
const ALLOCATION_SLOTS: usize = 8192;
/// Maximum number of entries that a search looks at.
const ALLOCATION_PROBES: usize = 64;

/// The sizes of allocations by their addresses.
pub(crate) struct Allocations {
    addresses: [AtomicU64; ALLOCATION_SLOTS],
    sizes: [AtomicU64; ALLOCATION_SLOTS],
}

/// The allocations of this process.
pub(crate) static ALLOCATIONS: Allocations = Allocations {
    addresses: [const { AtomicU64::new(0) }; ALLOCATION_SLOTS],
    sizes: [const { AtomicU64::new(0) }; ALLOCATION_SLOTS],
};

impl Allocations {
    /// The place of an allocation that was taken. No allocation has this address.
    const TAKEN: u64 = 1;

    fn places(address: u64) -> impl Iterator<Item = usize> {
        let home = home_slot::<ALLOCATION_SLOTS>(address);
        (0..ALLOCATION_PROBES).map(move |step| (home + step) % ALLOCATION_SLOTS)
    }

    /// Adds an allocation. False if there is no place for it.
    fn put(&self, address: u64, bytes: u64) -> bool {
        let is_free = |found: u64| found == 0 || found == Self::TAKEN;
        let claim = |place: &usize| {
            let entry = &self.addresses[*place];
            let found = entry.load(Ordering::Relaxed);
            is_free(found) && entry.compare_exchange(found, address, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let place = Self::places(address).find(claim);
        // Nobody frees it before the call that allocates it has returned.
        place.inspect(|place| self.sizes[*place].store(bytes, Ordering::Relaxed)).is_some()
    }

    /// Takes out an allocation that is about to be freed. Returns its size, if it is known.
    pub(crate) fn take(&self, address: u64) -> Option<u64> {
        let mut places = Self::places(address).take_while(|place| self.addresses[*place].load(Ordering::Relaxed) != 0);
        let place = places.find(|place| self.addresses[*place].load(Ordering::Relaxed) == address)?;
        let bytes = self.sizes[place].load(Ordering::Relaxed);
        let taken =
            self.addresses[place].compare_exchange(address, Self::TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        taken.then_some(bytes)
    }
}

impl Recorder {
    /// Index of the calling thread's lane.
    #[inline(always)]
    pub(crate) fn lane_of(&self, thread: &ThreadState) -> Option<usize> {
        match thread.lane.get() {
            0 => self.take_lane(thread),
            NONE => None,
            lane => Some(lane as usize - 1),
        }
    }

    /// The words of a lane.
    #[inline]
    pub(crate) fn lane_words(&self, lane: usize) -> &'static [AtomicU64] {
        self.ring.entry(offset::LANES, lane, lane::WORDS)
    }

    /// Records that a lane is in use.
    fn use_lane(&self, lane: usize) {
        self.shared.lanes.fetch_max(lane + 1, Ordering::AcqRel);
    }

    #[cold]
    fn take_lane(&self, thread: &ThreadState) -> Option<usize> {
        let me = u64::from(thread.tid());
        if me == 0 {
            return None;
        }
        let claim = |index: &usize, from: u64| handoff::claim(&self.lane_words(*index)[lane::OWNER], from, me);
        let ended = |index: &usize| {
            let owner = self.lane_words(*index)[lane::OWNER].load(Ordering::Relaxed);
            // An owner with this thread's id and other thread-local memory was an earlier thread.
            (owner == me || !sys::is_thread(owner as u32)) && claim(index, owner)
        };
        let index = (0..lane::SLOTS).find(|index| claim(index, 0)).or_else(|| (0..lane::SLOTS).find(ended));
        if let Some(index) = index {
            self.use_lane(index);
            signals::equip_thread(index);
        }
        thread.lane.set(index.map_or(NONE, |index| index as u32 + 1));
        index
    }

    /// Counts a call of a hooked function, by the index of its coverage entry.
    #[inline(always)]
    pub(crate) fn called(&self, thread: &ThreadState, function: usize) {
        match self.lane_of(thread) {
            Some(lane) => add(&self.ring.entry(offset::LANE_CALLS, lane, lane::CALL_WORDS)[function], 1),
            None => {
                let entry = self.ring.entry(offset::COVERAGE, function, coverage::WORDS);
                entry[coverage::CALLS].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Number of calls of a hooked function by all threads.
    pub(crate) fn calls(&self, function: usize) -> u64 {
        let shared =
            self.ring.entry(offset::COVERAGE, function, coverage::WORDS)[coverage::CALLS].load(Ordering::Relaxed);
        let lanes = (0..lane::SLOTS)
            .map(|lane| self.ring.entry(offset::LANE_CALLS, lane, lane::CALL_WORDS)[function].load(Ordering::Relaxed));
        shared + lanes.sum::<u64>()
    }

    /// Counts a launch: [`header::KERNELS`] or [`header::GRAPHS`].
    #[inline(always)]
    pub(crate) fn launched(&self, thread: &ThreadState, counter: usize, now_ns: u64) {
        match self.lane_of(thread) {
            Some(lane) => {
                let words = self.lane_words(lane);
                words[lane::LAST_LAUNCH_NS].store(now_ns, Ordering::Relaxed);
                add(&words[if counter == header::KERNELS { lane::KERNELS } else { lane::GRAPHS }], 1);
            }
            None => {
                self.ring.header(header::LAST_LAUNCH_NS).store(now_ns, Ordering::Relaxed);
                self.count(counter);
            }
        }
    }

    /// Counts a collective that a device executes.
    #[inline]
    pub(crate) fn launched_collective(&self) {
        match self.lane_of(thread_state::current()) {
            Some(lane) => add(&self.lane_words(lane)[lane::COLLECTIVES], 1),
            None => self.count(header::COLLECTIVES),
        }
    }

    /// Takes back a count of [`Recorder::launched_collective`].
    #[cold]
    pub(crate) fn withdrew_collective(&self) {
        match self.lane_of(thread_state::current()) {
            Some(lane) => add(&self.lane_words(lane)[lane::COLLECTIVES], u64::MAX),
            None => {
                self.ring.header(header::COLLECTIVES).fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Counts a kernel or graph on a stream. Nothing else is kept of most launches. Returns whether
    /// the kernel communicates with other ranks by itself.
    #[inline(always)]
    pub(crate) fn on_stream(&self, thread: &ThreadState, stream_handle: usize, function: u64, now_ns: u64) -> bool {
        let Some(lane) = self.lane_of(thread) else {
            self.on_shared_stream(stream_handle, function, now_ns);
            return false;
        };
        let key = stream_handle as u64 + 1;
        let words = self.ring.entry(offset::LANE_STREAMS, lane, lane::STREAM_WORDS);
        for entry in words.chunks_exact(stream::WORDS).take(lane::STREAMS) {
            let found = entry[stream::HANDLE].load(Ordering::Relaxed);
            if found == 0 {
                entry[stream::HANDLE].store(key, Ordering::Relaxed);
            } else if found != key {
                continue;
            }
            add(&entry[stream::LAUNCHES], 1);
            entry[stream::LAST_NS].store(now_ns, Ordering::Relaxed);
            if function == 0 {
                return false;
            }
            entry[stream::LAST_FUNCTION].store(function, Ordering::Relaxed);
            return self.count_kernel(lane, key, function);
        }
        self.on_shared_stream(stream_handle, function, now_ns);
        function != 0 && self.count_kernel(lane, key, function)
    }

    /// Counts a launch of a kernel on a stream, by the stream's key. Returns whether the kernel
    /// communicates.
    #[inline(always)]
    fn count_kernel(&self, lane: usize, key: u64, function: u64) -> bool {
        let set = home_slot::<{ lane::KERNEL_SETS }>(function ^ key.rotate_left(32));
        let index = lane * lane::KERNEL_SETS + set;
        let entries = self.ring.entry(offset::LANE_KERNELS, index, lane::KERNEL_WAYS * kernel::WORDS);
        for entry in entries.chunks_exact(kernel::WORDS) {
            if entry[kernel::FUNCTION].load(Ordering::Relaxed) == function
                && entry[kernel::STREAM].load(Ordering::Relaxed) == key
            {
                add(&entry[kernel::LAUNCHES], 1);
                return entry[kernel::COMMUNICATES].load(Ordering::Relaxed) != 0;
            }
        }
        self.count_new_kernel(lane, entries, key, function)
    }

    /// Counts the first launch of a kernel on a stream by this thread, and every launch of a kernel
    /// that found no free entry in its set. A kernel that communicates replaces another one.
    #[cold]
    #[inline(never)]
    fn count_new_kernel(&self, lane: usize, entries: &[AtomicU64], key: u64, function: u64) -> bool {
        let is_new = self.see_function(function);
        let word = |entry: &&[AtomicU64], word: usize| entry[word].load(Ordering::Relaxed);
        let mut all = entries.chunks_exact(kernel::WORDS);
        let free = all.clone().find(|entry| word(entry, kernel::FUNCTION) == 0);
        // The names of the launches that never find an entry are not requested again and again.
        let communicates = (free.is_some() || is_new) && name_of(function).is_some_and(communicates);
        let victim = || all.find(|entry| communicates && word(entry, kernel::COMMUNICATES) == 0);
        let Some(entry) = free.or_else(victim) else {
            add(&self.lane_words(lane)[lane::UNCOUNTED], 1);
            return communicates;
        };
        // A replaced kernel is no longer counted.
        add(&self.lane_words(lane)[lane::UNCOUNTED], word(&entry, kernel::LAUNCHES));
        entry[kernel::FUNCTION].store(0, Ordering::Relaxed);
        entry[kernel::STREAM].store(key, Ordering::Release);
        entry[kernel::LAUNCHES].store(1, Ordering::Relaxed);
        entry[kernel::COMMUNICATES].store(communicates.into(), Ordering::Relaxed);
        entry[kernel::FUNCTION].store(function, Ordering::Release);
        communicates
    }

    /// Counts a copy in one of the directions of [`lane::COPY_KINDS`].
    pub(crate) fn copied(&self, kind: usize, bytes: u64) {
        let lane = self.lane_of(thread_state::current());
        if let Some(lane) = lane {
            let words = self.lane_words(lane);
            let kind = kind.min(lane::COPY_KINDS.len() - 1);
            add(&words[lane::COPIES + kind], 1);
            add(&words[lane::COPY_BYTES + kind], bytes);
        }
        self.last_launch(lane).store(clock::coarse_now_ns(), Ordering::Relaxed);
    }

    /// Records activity on the device: a copy, a memset, or the end of a synchronization.
    #[inline]
    pub(crate) fn active(&self) {
        let lane = self.lane_of(thread_state::current());
        self.last_launch(lane).store(clock::coarse_now_ns(), Ordering::Relaxed);
    }

    /// The word with the time of the last launch, for a thread with or without a lane.
    #[inline(always)]
    pub(crate) fn last_launch(&self, lane: Option<usize>) -> &AtomicU64 {
        match lane {
            Some(lane) => &self.lane_words(lane)[lane::LAST_LAUNCH_NS],
            None => self.ring.header(header::LAST_LAUNCH_NS),
        }
    }

    /// Counts device memory that was allocated at an address.
    pub(crate) fn device_allocated(&self, address: u64, bytes: u64) {
        // The free of an earlier allocation there was not seen.
        self.device_freed(ALLOCATIONS.take(address).unwrap_or(0));
        if ALLOCATIONS.put(address, bytes) {
            self.device_freed(bytes.wrapping_neg());
        } else {
            self.count(header::OVERFLOWS);
        }
    }

    /// Counts device memory that was freed.
    pub(crate) fn device_freed(&self, bytes: u64) {
        if bytes != 0
            && let Some(lane) = self.lane_of(thread_state::current())
        {
            add(&self.lane_words(lane)[lane::DEVICE_BYTES], bytes.wrapping_neg());
        }
    }

    /// Time of the newest launch of all threads.
    pub(crate) fn newest_launch_ns(&self) -> u64 {
        let lanes = (0..self.lanes_in_use()).map(Some).chain([None]);
        lanes.map(|lane| self.last_launch(lane).load(Ordering::Relaxed)).max().unwrap_or(0)
    }

    /// Number of lanes up to the last one in use.
    pub(crate) fn lanes_in_use(&self) -> usize {
        self.shared.lanes.load(Ordering::Acquire)
    }

    /// Counts allocated memory.
    pub(crate) fn allocated(&self, bytes: u64) {
        if let Some(lane) = self.lane_of(thread_state::current()) {
            add(&self.lane_words(lane)[lane::ALLOCATED_BYTES], bytes);
        }
    }

    /// Counts a kernel or graph on a stream, for a thread that has no room for the stream in its
    /// lane.
    #[cold]
    pub(crate) fn on_shared_stream(&self, stream_handle: usize, function: u64, now_ns: u64) {
        let key = stream_handle as u64 + 1;
        let mut index = home_slot::<{ stream::SLOTS }>(key);
        for _ in 0..stream::SLOTS {
            let entry = self.ring.entry(offset::STREAMS, index, stream::WORDS);
            let found = entry[stream::HANDLE].load(Ordering::Relaxed);
            let ours = found == key
                || found == 0
                    && match entry[stream::HANDLE].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => true,
                        Err(other) => other == key,
                    };
            if ours {
                entry[stream::LAUNCHES].fetch_add(1, Ordering::Relaxed);
                entry[stream::LAST_NS].store(now_ns, Ordering::Relaxed);
                if function != 0 && entry[stream::LAST_FUNCTION].swap(function, Ordering::Relaxed) != function {
                    self.see_function(function);
                }
                return;
            }
            index = (index + 1) % stream::SLOTS;
        }
        self.count(header::OVERFLOWS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::os::descriptor::Descriptor;

    fn recorder() -> Recorder {
        Recorder::create(Box::leak(Box::new(Descriptor::none()))).unwrap()
    }

    fn totals(recorder: &Recorder) -> lane::Totals {
        let fd = recorder.ring.descriptor.get().unwrap();
        let file = std::fs::File::open(format!("/proc/self/fd/{fd}")).unwrap();
        lane::totals(&|at, buffer: &mut [u8]| std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at)).unwrap()
    }

    fn kernels(recorder: &Recorder) -> Vec<lane::KernelCount> {
        let fd = recorder.ring.descriptor.get().unwrap();
        let file = std::fs::File::open(format!("/proc/self/fd/{fd}")).unwrap();
        let read = |at, buffer: &mut [u8]| std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at);
        lane::kernels(&read, lane::SLOTS).unwrap()
    }

    #[test]
    fn every_launch_counts_once_even_with_more_threads_than_lanes() {
        let recorder = recorder();
        let threads = lane::SLOTS + 20;
        let all_up = std::sync::Barrier::new(threads);
        std::thread::scope(|scope| {
            for number in 0..threads {
                let (recorder, all_up) = (&recorder, &all_up);
                scope.spawn(move || {
                    let thread = thread_state::current();
                    recorder.launched(thread, header::GRAPHS, 5);
                    all_up.wait();
                    for _ in 0..1000 {
                        recorder.launched(thread, header::KERNELS, 7 + number as u64);
                        recorder.on_stream(thread, 64, 9, 7);
                        recorder.called(thread, 3);
                    }
                });
            }
        });
        let all = totals(&recorder);
        assert_eq!(recorder.ring.header(header::KERNELS).load(Ordering::Relaxed), 20 * 1000);
        assert_eq!((all.kernels, all.graphs), (lane::SLOTS as u64 * 1000, lane::SLOTS as u64));
        assert_eq!(recorder.calls(3), threads as u64 * 1000);
    }

    #[test]
    fn the_lane_of_a_thread_that_ended_is_used_again_and_keeps_its_count() {
        let recorder = recorder();
        for _ in 0..lane::SLOTS * 3 {
            std::thread::scope(|scope| {
                scope.spawn(|| recorder.launched(thread_state::current(), header::KERNELS, 1));
            });
        }
        assert_eq!(recorder.ring.header(header::KERNELS).load(Ordering::Relaxed), 0, "no thread had to share");
        assert_eq!(totals(&recorder).kernels, lane::SLOTS as u64 * 3);
    }

    #[test]
    fn a_thread_with_many_streams_uses_the_shared_table_for_the_rest() {
        let recorder = recorder();
        for stream in 1..=lane::STREAMS + 2 {
            recorder.on_stream(thread_state::current(), stream * 64, 0, 1);
            recorder.on_stream(thread_state::current(), stream * 64, 0, 2);
        }
        let fd = recorder.ring.descriptor.get().unwrap();
        let file = std::fs::File::open(format!("/proc/self/fd/{fd}")).unwrap();
        let read = |at, buffer: &mut [u8]| std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at);
        let streams = lane::streams(&read).unwrap();
        assert_eq!(streams.len(), lane::STREAMS + 2);
        assert!(streams.iter().all(|entry| entry[stream::LAUNCHES] == 2 && entry[stream::LAST_NS] == 2), "{streams:?}");
    }

    #[test]
    fn launches_are_counted_by_kernel_and_stream() {
        let recorder = recorder();
        let launch = |stream: usize, function: u64| recorder.on_stream(thread_state::current(), stream, function, 1);
        for _ in 0..3 {
            launch(64, 0x1000);
            launch(64, 0x2000);
            launch(128, 0x1000);
            launch(64, 0);
        }
        std::thread::scope(|scope| scope.spawn(|| launch(64, 0x1000)).join()).unwrap();
        let count = |function, stream, launches| lane::KernelCount { function, stream, launches, communicates: false };
        let counts = kernels(&recorder);
        assert_eq!(counts, [count(0x1000, 64, 4), count(0x1000, 128, 3), count(0x2000, 64, 3)]);
        assert_eq!(totals(&recorder).uncounted, 0);
    }

    #[test]
    fn launches_without_space_in_the_table_are_known_to_be_missing() {
        let recorder = recorder();
        let many = 2 * (lane::KERNEL_SETS * lane::KERNEL_WAYS) as u64;
        for function in (1..=many).flat_map(|number| [number * 64; 5]) {
            recorder.on_stream(thread_state::current(), 64, function, 1);
        }
        let counts = kernels(&recorder);
        assert!(counts.len() > lane::KERNEL_SETS && counts.iter().all(|count| count.launches == 5), "{}", counts.len());
        assert_eq!(totals(&recorder).uncounted, (many - counts.len() as u64) * 5);
    }

    #[test]
    fn device_memory_is_what_was_allocated_and_not_freed_by_any_thread() {
        let recorder = recorder();
        // No other test uses these addresses.
        let address = |number: u64| 0x7f5a_0000_0000 + number * 0x20_0000;
        (0..500).for_each(|number| recorder.device_allocated(address(number), 1000 + number));
        assert_eq!(totals(&recorder).device_bytes, (1000..1500).sum::<u64>());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..500 {
                    recorder.device_freed(ALLOCATIONS.take(address(number)).unwrap());
                }
            });
        });
        assert_eq!((totals(&recorder).device_bytes, ALLOCATIONS.take(address(7))), (1000, None));
        recorder.device_allocated(address(0), 30);
        assert_eq!(totals(&recorder).device_bytes, 30, "a free was not seen");
        recorder.device_freed(ALLOCATIONS.take(address(0)).unwrap());
        assert_eq!(totals(&recorder).device_bytes, 0);
        assert_eq!(recorder.ring.header(header::OVERFLOWS).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn copies_and_allocations_are_counted_by_direction() {
        let recorder = recorder();
        recorder.copied(1, 100);
        recorder.copied(1, 10);
        recorder.copied(9, 1);
        recorder.allocated(4096);
        let all = totals(&recorder);
        assert_eq!((all.copies, all.copy_bytes), ([0, 2, 0, 0, 1], [0, 110, 0, 0, 1]));
        assert_eq!(all.allocated_bytes, 4096);
    }
}
