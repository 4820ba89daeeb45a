//! The flight recorder: the only writer of the ring.
//!
//! Everything here is called from launching threads and takes no lock, allocates nothing and makes no system call; what does
//! not fit is counted. A slot is written by the thread that launched, then handed to the watcher; only the watcher frees it, so a
//! pending operation is never overwritten. Threads that launch in different communicators write no cache line in common.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use xpu_timer_proto::{
    ring::{self, header, lane, name, offset, op, pack_halves, pack_what, stream},
    v1::{DataType, Op, OpKind, OpStatus},
};

use crate::{
    bell,
    comms::Comms,
    handoff::Handoff,
    host::open::OpenCalls,
    pace,
    place::place_of,
    pools::EventPools,
    ring::{Ring, store_text},
    slot::{Slot, publish, state},
    sys::{self, Descriptor},
    thread_state::{self, ThreadState},
};

const _: () = assert!(size_of::<Slot>() == 64);

/// The shape of a matrix product, as [`xpu_timer_proto::v1::Matmul`] has it.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MatmulShape {
    pub batch: u32,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub trans_a: u32,
    pub trans_b: u32,
}

/// What is known of an operation when it begins.
pub struct Begin {
    /// Kind.
    pub kind: OpKind,
    /// Operation.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation.
    pub reduce: u8,
    /// Index in the communicator table.
    pub comm: Option<usize>,
    /// Identity of the communicator.
    pub communicator: u64,
    /// Sequence number.
    pub seq: u64,
    /// Elements.
    pub count: u64,
    /// Root or peer, -1 for none.
    pub peer: i32,
    /// Tag of a send or receive, -1 for any; `None` where there are no tags.
    pub tag: Option<i32>,
    /// Stream as the library was given it.
    pub stream: usize,
    /// Key into the name table.
    pub function: u64,
    /// Of a matrix product, which has no communicator, number and count.
    pub matmul: Option<MatmulShape>,
}

impl Begin {
    /// An operation without communicator.
    pub fn new(kind: OpKind, op: Op) -> Self {
        Begin {
            kind,
            op,
            dtype: DataType::Unspecified,
            reduce: 0,
            comm: None,
            communicator: 0,
            seq: 0,
            count: 0,
            peer: -1,
            tag: None,
            stream: 0,
            function: 0,
            matmul: None,
        }
    }
}

/// Kernels whose name has been asked for; twice the name table, so that a look-up ends soon.
const SEEN: usize = name::SLOTS * 2;

/// The recorder of this process.
pub struct Recorder {
    /// Shared with the collector.
    pub ring: Ring,
    /// Private side of the operation slots.
    pub slots: Box<[Slot]>,
    /// What passes between each lane's thread and the watcher; the last one is for threads without a lane.
    pub handoffs: Box<[Handoff]>,
    /// Communicators.
    pub comms: Comms,
    /// What host threads are inside of.
    pub open_calls: OpenCalls,
    /// Spare events.
    pub pools: EventPools,
    /// A test asked for panics; see [`crate::inject`].
    pub inject: AtomicBool,
    /// What is bracketed; see [`crate::config::Bracket`].
    pub bracket: AtomicU32,
    seen: Box<[AtomicU64]>,
    shared: Shared,
}

/// Numbers that all threads write, each seldom, apart from what they read at every launch.
#[derive(Default)]
#[repr(align(128))]
struct Shared {
    names: AtomicUsize,
    groups: AtomicU64,
    host_calls: AtomicU64,
    /// No lane from here on was ever taken.
    lanes: AtomicUsize,
    /// The watcher's heartbeat when its lateness was looked at last.
    heartbeat: AtomicU64,
}

/// When the watcher does not turn within so many slots it is called, long before there are none, and before a lane has none of its spare
/// events.
const SLOTS_A_RING: usize = 256;
/// Most tickets that a thread takes at once.
const MOST_TICKETS: u64 = 64;
/// So long they are good for; older ones would stand among the operations of a later time.
const TICKETS_NS: u64 = 5_000_000;
/// Numbers of groups that a thread takes at once.
const GROUPS: u64 = 64;

impl Recorder {
    /// A recorder with an empty ring. On the heap at once: the first device call may be made on the smallest stack.
    ///
    /// # Errors
    /// When there is no memory or descriptor for the ring.
    #[inline(never)]
    pub fn boxed(descriptor: &'static Descriptor) -> io::Result<Box<Self>> {
        Ok(Box::new(Recorder {
            ring: Ring::create(descriptor)?,
            slots: (0..op::SLOTS).map(|_| Slot::default()).collect(),
            handoffs: (0..=lane::SLOTS).map(|_| Handoff::new()).collect(),
            comms: Comms::new(),
            open_calls: OpenCalls::new(),
            pools: EventPools::new(),
            inject: AtomicBool::new(false),
            bracket: AtomicU32::new(0),
            seen: (0..SEEN).map(|_| AtomicU64::new(0)).collect(),
            shared: Shared::default(),
        }))
    }

    /// The same, not on the heap.
    ///
    /// # Errors
    /// As above.
    #[cfg(test)]
    pub fn create(descriptor: &'static Descriptor) -> io::Result<Self> {
        Self::boxed(descriptor).map(|recorder| *recorder)
    }

    /// Adds one to a word of the header.
    #[inline]
    pub fn count(&self, header: usize) {
        self.ring.header(header).fetch_add(1, Ordering::Relaxed);
    }

    /// Number of a new group, not 0, that no other group of this process has.
    pub fn next_group(&self, thread: &ThreadState) -> u64 {
        if thread.groups_left.get() == 0 {
            thread.next_group.set(self.shared.groups.fetch_add(GROUPS, Ordering::Relaxed) + 1);
            thread.groups_left.set(GROUPS as u32);
        }
        thread.groups_left.set(thread.groups_left.get() - 1);
        let number = thread.next_group.get();
        thread.next_group.set(number + 1);
        number
    }

    /// The next ticket of this thread, and whether the one behind it is this thread's, too.
    #[inline]
    fn next_ticket(&self, thread: &ThreadState, now_ns: u64) -> (u64, bool) {
        let (next, end) = (thread.next_ticket.get(), thread.end_of_tickets.get());
        if next < end && now_ns.saturating_sub(thread.tickets_ns.get()) < TICKETS_NS {
            thread.next_ticket.set(next + 1);
            return (next, next + 1 < end);
        }
        self.take_tickets(thread, now_ns)
    }

    /// Who launches alone takes tickets one by one, so that every one is used. Who finds that others took some meanwhile takes twice
    /// as many as the last time: no more are left unused than were used.
    fn take_tickets(&self, thread: &ThreadState, now_ns: u64) -> (u64, bool) {
        let recent = now_ns.saturating_sub(thread.tickets_ns.get()) < TICKETS_NS;
        let last = u64::from(thread.tickets.get());
        let count = if recent && thread.is_not_alone.get() { (last * 2).clamp(1, MOST_TICKETS) } else { 1 };
        let first = self.ring.header(header::OPS).fetch_add(count, Ordering::Relaxed);
        let alone = first == thread.end_of_tickets.get();
        thread.is_not_alone.set(!alone);
        thread.tickets.set(count as u32);
        thread.next_ticket.set(first + 1);
        thread.end_of_tickets.set(first + count);
        thread.tickets_ns.set(now_ns);
        (first, alone || count > 1)
    }

    /// Fetches a slot that this thread is about to use.
    #[inline]
    fn prefetch(&self, index: usize) {
        let words = self.ring.op(index);
        sys::prefetch(&self.slots[index]);
        sys::prefetch(&words[0]);
        sys::prefetch(&words[8]);
    }

    /// Number of a new host call, from 1.
    pub fn next_host_call(&self) -> u64 {
        self.shared.host_calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes a slot and publishes the operation in it as pending. `None` when the slot's operation of the lap before is still
    /// pending; that is counted. Its age counts from now. The watcher frees the slot, and comes early when many are in use.
    pub fn begin(&self, what: &Begin) -> Option<usize> {
        let slot = self.begin_unwatched(what);
        if slot.is_none_or(|slot| slot % SLOTS_A_RING == 0) {
            self.ring_if_late();
        }
        slot
    }

    /// Calls the watcher unless it has turned since so many slots ago. A job with the collectives of training makes no call here.
    #[cold]
    fn ring_if_late(&self) {
        let heartbeat = self.ring.header(header::HEARTBEAT_NS).load(Ordering::Relaxed);
        if self.shared.heartbeat.swap(heartbeat, Ordering::Relaxed) == heartbeat {
            bell::ring();
        }
    }

    /// The same for an operation whose slot a host thread frees.
    pub fn begin_unwatched(&self, what: &Begin) -> Option<usize> {
        let thread = thread_state::current();
        let now = pace::now_ns(thread);
        let lane = self.lane_of(thread);
        self.last_launch(lane).store(now, Ordering::Relaxed);
        let (ticket, next_is_ours) = self.next_ticket(thread, now);
        let index = ticket as usize % op::SLOTS;
        if next_is_ours {
            self.prefetch((index + 1) % op::SLOTS);
        }
        let slot = &self.slots[index];
        if !slot.claim() {
            self.count(header::DROPPED);
            return None;
        }
        slot.lane.store(lane.unwrap_or(lane::SLOTS) as u8, Ordering::Relaxed);
        slot.comm.store(what.comm.map_or(0, |comm| comm as u16 + 1), Ordering::Relaxed);
        slot.since_ns.store(now, Ordering::Relaxed);
        slot.stream.store(what.stream, Ordering::Relaxed);
        for word in [&slot.context, &slot.start, &slot.end, &slot.output] {
            word.store(0, Ordering::Relaxed);
        }
        slot.next.store(0, Ordering::Relaxed);
        slot.follower.store(0, Ordering::Relaxed);

        let (communicator, seq, count) = what.matmul.map_or((what.communicator, what.seq, what.count), |shape| {
            (
                pack_halves(shape.m, shape.n),
                pack_halves(shape.k, shape.batch),
                pack_halves(shape.trans_a, shape.trans_b),
            )
        });
        let values = [
            (op::WHAT, pack_what(what.kind, what.op, what.dtype, what.reduce, thread.tid())),
            (op::COMMUNICATOR, communicator),
            (op::SEQ, seq),
            (op::COUNT, count),
            (op::PEER, u64::from(what.peer as u32)),
            (op::STREAM, what.stream as u64),
            (op::ENTERED_NS, now),
            (op::RETURNED_NS, 0),
            (op::STARTED_NS, 0),
            (op::COMPLETED_NS, 0),
            (op::STATUS, pack_halves(OpStatus::Pending as u32, 0)),
            (op::DEVICE_NS, 0),
            (op::FUNCTION, what.function),
            (op::GROUP, thread.group.get()),
            (op::TAG, what.tag.map_or(0, |tag| pack_halves(tag as u32, 1))),
        ];
        publish(self.ring.op(index), ticket, values);
        Some(index)
    }

    /// Hands a slot to the watcher, open.
    pub fn hand_over(&self, index: usize) {
        let slot = &self.slots[index];
        slot.become_state(state::OPEN);
        self.handoff_of(index).push(&self.slots, index);
    }

    /// What passes between the watcher and the threads that have launched anything, those without a lane included.
    pub fn handoffs_in_use(&self) -> impl Iterator<Item = &Handoff> {
        let (without, lanes) = self.handoffs.split_last().expect("there is one more than lanes");
        lanes[..self.shared.lanes.load(Ordering::Acquire)].iter().chain([without])
    }

    /// A thread has taken a lane.
    pub fn use_lane(&self, lane: usize) {
        self.shared.lanes.fetch_max(lane + 1, Ordering::AcqRel);
    }

    /// What passes between the watcher and the thread that launched a slot's operation.
    pub fn handoff_of(&self, index: usize) -> &Handoff {
        &self.handoffs[usize::from(self.slots[index].lane.load(Ordering::Relaxed))]
    }

    /// The host has left the call.
    pub fn returned(&self, index: usize, now_ns: u64) {
        self.ring.op(index)[op::RETURNED_NS].store(now_ns, Ordering::Relaxed);
    }

    /// The host knows how the operation ended. `completed_ns` 0: it ended, but nobody saw when. The watcher frees the slot.
    pub fn close(&self, index: usize, status: OpStatus, error: u32, completed_ns: u64) {
        self.settle(index, status, error, completed_ns);
        self.slots[index].become_state(state::CLOSED);
    }

    /// Writes how an operation ended, and what that says of its communicator.
    pub fn settle(&self, index: usize, status: OpStatus, error: u32, completed_ns: u64) {
        let words = self.ring.op(index);
        words[op::COMPLETED_NS].store(completed_ns, Ordering::Relaxed);
        words[op::STATUS].store(pack_halves(status as u32, error), Ordering::Release);
    }

    /// A kernel or graph on a stream, by a thread that has no room for it in its lane.
    #[cold]
    pub fn on_shared_stream(&self, stream_handle: usize, function: u64, now_ns: u64) {
        let key = stream_handle as u64 + 1;
        let mut index = place_of::<{ stream::SLOTS }>(key);
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

    /// Makes sure that a kernel has its name. Asked on the launching thread, where the handle is certainly valid: by the time
    /// the watcher came to it, its module might be unloaded.
    #[inline(always)]
    pub fn see_function(&self, function: u64) {
        // Nearly always it is where it is looked for first.
        if self.seen[place_of::<SEEN>(function)].load(Ordering::Relaxed) != function && self.is_new(function) {
            crate::device::name_function(self, function);
        }
    }

    /// Whether the name of this key has never been asked for; true once for each key.
    #[inline(never)]
    fn is_new(&self, key: u64) -> bool {
        let mut index = place_of::<SEEN>(key);
        for _ in 0..SEEN {
            match self.seen[index].load(Ordering::Relaxed) {
                0 if self.seen[index].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed).is_ok() => {
                    return true;
                }
                0 => {}
                found if found == key => return false,
                _ => index = (index + 1) % SEEN,
            }
        }
        false
    }

    /// Adds a name for a function key. The caller does so once for each key.
    pub fn add_name(&self, function: u64, text: &[u8]) {
        let index = self.shared.names.fetch_add(1, Ordering::Relaxed);
        if index >= name::SLOTS {
            self.shared.names.store(name::SLOTS, Ordering::Relaxed);
            self.count(header::OVERFLOWS);
            return;
        }
        let entry = self.ring.entry(offset::NAMES, index, name::WORDS);
        store_text(&entry[name::TEXT..], &text[..text.len().min(crate::ring::NAME_BYTES)]);
        entry[name::FUNCTION].store(function, Ordering::Release);
    }

    /// Makes sure that a function of the host's API has its name; its key is the address of a static string.
    pub fn name_key(&self, text: &'static str) -> u64 {
        let key = text.as_ptr() as u64;
        if self.is_new(key) {
            self.add_name(key, text.as_bytes());
        }
        key
    }

    fn names(&self) -> impl Iterator<Item = &'static [AtomicU64]> {
        let entries = 0..self.shared.names.load(Ordering::Relaxed).min(name::SLOTS);
        entries.map(|index| self.ring.entry(offset::NAMES, index, name::WORDS))
    }

    /// Whether a kernel or function of such a name was seen.
    pub fn any_name(&self, is_it: impl Fn(&str) -> bool) -> bool {
        self.names().any(|entry| is_it(&name_in(entry)))
    }

    /// The message of an operation, for a signal.
    pub fn operation(&self, index: usize) -> xpu_timer_proto::v1::Operation {
        let words = std::array::from_fn(|word| self.ring.op(index)[word].load(Ordering::Acquire));
        let function: u64 = words[op::FUNCTION];
        let text = self
            .names()
            .find(|entry| function != 0 && entry[name::FUNCTION].load(Ordering::Acquire) == function)
            .map(name_in);
        ring::operation(&words, text.unwrap_or_default())
    }
}

/// The text of an entry of the name table.
fn name_in(entry: &[AtomicU64]) -> String {
    let words = entry[name::TEXT..].iter().map(|word| word.load(Ordering::Relaxed));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Recorder::create(descriptor).unwrap()
    }

    fn read(recorder: &Recorder) -> xpu_timer_proto::v1::FlightRecord {
        let fd = recorder.ring.descriptor.get().unwrap();
        let path = format!("/proc/self/fd/{fd}");
        let file = std::fs::File::open(path).unwrap();
        ring::read(
            |at, buffer| std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at),
            Default::default(),
            sys::now_ns(),
        )
        .unwrap()
    }

    #[test]
    fn an_operation_is_readable_from_outside_at_every_step() {
        let recorder = recorder();
        let what = Begin { seq: 3, count: 10, stream: 0x70, ..Begin::new(OpKind::Collective, Op::AllReduce) };
        let slot = recorder.begin(&what).unwrap();
        let [operation] = &read(&recorder).operations[..] else { panic!("one operation") };
        assert_eq!((operation.ticket, operation.op(), operation.seq, operation.count), (0, Op::AllReduce, 3, 10));
        assert_eq!((operation.status(), operation.tid), (OpStatus::Pending, sys::gettid()));
        recorder.hand_over(slot);
        recorder.returned(slot, 77);
        recorder.close(slot, OpStatus::Failed, 700, 99);
        let [operation] = &read(&recorder).operations[..] else { panic!("one operation") };
        assert_eq!((operation.status(), operation.error, operation.returned_ns), (OpStatus::Failed, 700, 77));
        assert_eq!(recorder.operation(slot), *operation);
    }

    #[test]
    fn a_pending_slot_is_never_overwritten_and_the_loss_is_counted() {
        let recorder = recorder();
        let begin = || recorder.begin(&Begin { seq: 1, ..Begin::new(OpKind::Collective, Op::Send) });
        for lap in 0..op::SLOTS {
            let slot = begin().unwrap();
            if lap != 5 {
                recorder.slots[slot].state.store(state::FREE, Ordering::Relaxed);
            }
        }
        let second: Vec<Option<usize>> = (0..op::SLOTS).map(|_| begin()).collect();
        assert_eq!(second.iter().filter(|slot| slot.is_none()).count(), 1);
        assert!(second[5].is_none());
        let record = read(&recorder);
        assert_eq!(record.health.unwrap().dropped, 1);
        assert_eq!(record.operations[0].ticket, 5);
    }

    #[test]
    fn who_launches_alone_uses_every_ticket() {
        let recorder = recorder();
        let begin = || recorder.begin(&Begin::new(OpKind::Collective, Op::AllReduce)).unwrap();
        assert_eq!((0..500).map(|_| begin()).collect::<Vec<_>>(), (0..500).collect::<Vec<_>>());
        assert_eq!(recorder.ring.header(header::OPS).load(Ordering::Relaxed), 500);
    }

    #[test]
    fn threads_that_launch_together_share_no_ticket_and_leave_few_unused() {
        const EACH: usize = 400;
        let recorder = recorder();
        let all_up = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    all_up.wait();
                    for _ in 0..EACH {
                        assert!(recorder.begin(&Begin::new(OpKind::Collective, Op::AllReduce)).is_some());
                    }
                });
            }
        });
        // A slot whose ticket two threads had would have been refused.
        let used = (0..op::SLOTS).filter(|slot| recorder.ring.op(*slot)[op::TICKET].load(Ordering::Relaxed) != 0);
        assert_eq!(used.count(), 8 * EACH);
        let taken = recorder.ring.header(header::OPS).load(Ordering::Relaxed) as usize;
        assert!(taken <= 2 * 8 * EACH, "{taken} tickets for {} operations", 8 * EACH);
    }

    #[test]
    fn streams_count_from_many_threads_and_overflow_is_counted() {
        let recorder = recorder();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for stream in 0..200 {
                        recorder.on_shared_stream(stream * 64, 0, 1);
                    }
                });
            }
        });
        let streams = read(&recorder).streams;
        assert_eq!(streams.len(), 200);
        assert!(streams.iter().all(|stream| stream.launches == 4), "{streams:?}");
        for stream in 0..100 {
            recorder.on_shared_stream(100_000 + stream * 64, 0, 1);
        }
        assert_eq!(read(&recorder).health.unwrap().overflows, 200 + 100 - stream::SLOTS as u64);
    }

    #[test]
    fn names_are_kept_once_and_cut() {
        let recorder = recorder();
        let key = recorder.name_key("ncclCommInitRank");
        assert_eq!(recorder.name_key("ncclCommInitRank"), key);
        recorder.add_name(7, &[b'k'; 1000]);
        let slot = recorder.begin(&Begin { function: 7, ..Begin::new(OpKind::Kernel, Op::Kernel) }).unwrap();
        assert_eq!(recorder.operation(slot).function.len(), crate::ring::NAME_BYTES);
        assert_eq!(read(&recorder).operations[0].function.len(), crate::ring::NAME_BYTES);
    }
}
