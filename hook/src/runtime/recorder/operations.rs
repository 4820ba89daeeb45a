//! Operations and their slots, from the begin of a call until the watcher takes over.
//!
//! Operations that one pair of events brackets form a chain of slots: a leader and its followers.

use std::sync::atomic::Ordering;

use xpu_timer_proto::{
    ring::{self, header, lane, launch, name, op, pack_channels, pack_dimensions, pack_halves, pack_what},
    v1::{CommunicatorState, Op, OpKind, OpStatus},
};

use crate::runtime::{
    lock_free::{
        atomic,
        handoff::Handoff,
        slot::{publish, state},
    },
    os::{
        clock,
        thread_state::{self, ThreadState},
        wakeup,
    },
    recorder::{NewOperation, Recorder, names::name_in},
};

/// When the watcher has not run for this many slots, it is woken. That is long before no slot is
/// left, and before a lane runs out of spare events.
const SLOTS_PER_WAKEUP: usize = 256;

/// Maximum number of tickets that a thread takes at once.
const MAX_TICKETS: u64 = 64;

/// How long tickets in reserve are valid. Older ones would appear among the operations of a later
/// time.
const TICKETS_NS: u64 = 5_000_000;

/// Group numbers that a thread takes at once.
const GROUPS: u64 = 64;

impl Recorder {
    /// The number of a new group, which is unique in this process and not 0.
    pub(crate) fn next_group(&self, thread: &ThreadState) -> u64 {
        if thread.groups_left.get() == 0 {
            thread.next_group.set(self.shared.groups.fetch_add(GROUPS, Ordering::Relaxed) + 1);
            thread.groups_left.set(GROUPS as u32);
        }
        thread.groups_left.set(thread.groups_left.get() - 1);
        let number = thread.next_group.get();
        thread.next_group.set(number + 1);
        number
    }

    /// The next ticket of this thread, and whether the following ticket is this thread's too.
    #[inline]
    fn next_ticket(&self, thread: &ThreadState, now_ns: u64) -> (u64, bool) {
        let (next, end) = (thread.next_ticket.get(), thread.end_of_tickets.get());
        if next < end && now_ns.saturating_sub(thread.tickets_ns.get()) < TICKETS_NS {
            thread.next_ticket.set(next + 1);
            return (next, next + 1 < end);
        }
        self.take_tickets(thread, now_ns)
    }

    /// A thread that launches alone takes single tickets, so that all are used. A thread that finds
    /// that others took tickets meanwhile takes twice as many as last time, so no more tickets are
    /// wasted than used.
    fn take_tickets(&self, thread: &ThreadState, now_ns: u64) -> (u64, bool) {
        let recent = now_ns.saturating_sub(thread.tickets_ns.get()) < TICKETS_NS;
        let last = u64::from(thread.tickets.get());
        let count = if recent && thread.is_not_alone.get() { (last * 2).clamp(1, MAX_TICKETS) } else { 1 };
        let first = self.ring.header(header::OPS).fetch_add(count, Ordering::Relaxed);
        let alone = first == thread.end_of_tickets.get();
        thread.is_not_alone.set(!alone);
        thread.tickets.set(count as u32);
        thread.next_ticket.set(first + 1);
        thread.end_of_tickets.set(first + count);
        thread.tickets_ns.set(now_ns);
        (first, alone || count > 1)
    }

    /// Prefetches a slot that this thread is about to use.
    #[inline]
    fn prefetch(&self, index: usize) {
        let words = self.ring.op(index);
        atomic::prefetch(&self.slots[index]);
        atomic::prefetch(&words[0]);
        atomic::prefetch(&words[8]);
    }

    /// The number of a new host call, from 1.
    pub(crate) fn next_host_call(&self) -> u64 {
        self.shared.host_calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Claims a slot and publishes the operation as pending. `None` when the slot's previous
    /// operation is still pending, which is counted. The age counts from now. The watcher frees the
    /// slot, and is woken when many slots are in use.
    pub(crate) fn begin(&self, what: &NewOperation) -> Option<usize> {
        let slot = self.begin_unwatched(what);
        if slot.is_none_or(|slot| slot % SLOTS_PER_WAKEUP == 0) {
            self.wake_watcher_if_late();
        }
        slot
    }

    /// Wakes the watcher if it has not run since the last check. A job with the collectives of
    /// training makes no system call here.
    #[cold]
    fn wake_watcher_if_late(&self) {
        let heartbeat = self.ring.header(header::HEARTBEAT_NS).load(Ordering::Relaxed);
        if self.shared.heartbeat.swap(heartbeat, Ordering::Relaxed) == heartbeat {
            wakeup::wake_watcher();
        }
    }

    /// Like [`Recorder::begin`], for an operation whose slot a host thread frees.
    pub(crate) fn begin_unwatched(&self, what: &NewOperation) -> Option<usize> {
        let thread = thread_state::current();
        let now = clock::burst_now_ns(thread);
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

        let [first, second, third, fourth, fifth, sixth] = what.words(thread.group.get());
        let values = [
            (op::WHAT, pack_what(what.kind, what.op, what.dtype, what.reduce, thread.tid())),
            first,
            second,
            third,
            fourth,
            (op::STREAM, what.stream as u64),
            (op::ENTERED_NS, now),
            (op::RETURNED_NS, 0),
            (op::STARTED_NS, 0),
            (op::COMPLETED_NS, 0),
            (op::STATUS, pack_halves(OpStatus::Pending as u32, 0)),
            (op::DEVICE_NS, 0),
            (op::FUNCTION, what.function),
            fifth,
            sixth,
        ];
        publish(self.ring.op(index), ticket, values);
        if self.stacks.are_wanted() {
            self.keep_stack(ticket, what);
        }
        Some(index)
    }

    /// Records the launch configuration of a kernel. Other operations have none.
    pub(crate) fn set_launch_config(&self, index: usize, grid: [u32; 3], block: [u32; 3]) {
        let words = self.ring.op(index);
        if self.op(index) == Op::Kernel {
            words[launch::GRID].store(pack_dimensions(grid), Ordering::Relaxed);
            words[launch::BLOCK].store(pack_dimensions(block), Ordering::Relaxed);
        }
    }

    /// Records the size of the first kernel of a collective.
    pub(crate) fn set_channels(&self, index: usize, blocks: u32, threads: u32) {
        let word = &self.ring.op(index)[op::PEER];
        // Only the launching thread writes this word.
        let peer = word.load(Ordering::Relaxed);
        if peer >> 32 == 0 {
            word.store(pack_halves(peer as u32, pack_channels(blocks, threads)), Ordering::Relaxed);
        }
    }

    /// Hands an open slot to the watcher.
    pub(crate) fn hand_over(&self, index: usize) {
        let slot = &self.slots[index];
        slot.become_state(state::OPEN);
        self.handoff_of(index).push(&self.slots, index);
    }

    /// The exchanges with all threads that have launched anything, including those without a lane.
    pub(crate) fn handoffs_in_use(&self) -> impl Iterator<Item = &Handoff> {
        let (without, lanes) = self.handoffs.split_last().expect("there is one more than lanes");
        lanes[..self.lanes_in_use()].iter().chain([without])
    }

    /// The exchange with the thread that launched a slot's operation.
    pub(crate) fn handoff_of(&self, index: usize) -> &Handoff {
        &self.handoffs[usize::from(self.slots[index].lane.load(Ordering::Relaxed))]
    }

    /// Records that the host has left the call.
    pub(crate) fn returned(&self, index: usize, now_ns: u64) {
        self.ring.op(index)[op::RETURNED_NS].store(now_ns, Ordering::Relaxed);
    }

    /// Ends an operation with a status that the host determined. `completed_ns` is 0 when the time
    /// is unknown. The watcher frees the slot.
    pub(crate) fn close(&self, index: usize, status: OpStatus, error: u32, completed_ns: u64) {
        self.settle(index, status, error, completed_ns);
        self.slots[index].become_state(state::CLOSED);
    }

    /// Writes the status of an operation that has ended.
    pub(crate) fn settle(&self, index: usize, status: OpStatus, error: u32, completed_ns: u64) {
        let words = self.ring.op(index);
        words[op::COMPLETED_NS].store(completed_ns, Ordering::Relaxed);
        words[op::STATUS].store(pack_halves(status as u32, error), Ordering::Release);
    }

    /// The operation as a message.
    pub(crate) fn operation(&self, index: usize) -> xpu_timer_proto::v1::Operation {
        let words = std::array::from_fn(|word| self.ring.op(index)[word].load(Ordering::Acquire));
        let function: u64 = words[op::FUNCTION];
        let text = self
            .names()
            .find(|entry| function != 0 && entry[name::FUNCTION].load(Ordering::Acquire) == function)
            .map(name_in);
        ring::operation(&words, text.unwrap_or_default())
    }
}

impl Recorder {
    /// The kind of an operation.
    pub(crate) fn kind(&self, slot: usize) -> OpKind {
        let what = self.ring.op(slot)[op::WHAT].load(Ordering::Relaxed);
        OpKind::try_from((what & 0xff) as i32).unwrap_or_default()
    }

    /// The function of an operation, such as an all-reduce.
    pub(crate) fn op(&self, slot: usize) -> Op {
        let what = self.ring.op(slot)[op::WHAT].load(Ordering::Relaxed);
        Op::try_from(((what >> 8) & 0xff) as i32).unwrap_or_default()
    }
}

/// The communicator of an operation.
pub(crate) fn comm_of(recorder: &Recorder, index: usize) -> Option<usize> {
    recorder.slots[index].comm.load(Ordering::Relaxed).checked_sub(1).map(usize::from)
}

/// Ends an operation and its followers with a status that the host determined. Followers first,
/// because the watcher frees them all together with the leader.
pub(crate) fn close_all(recorder: &'static Recorder, index: usize, status: OpStatus, error: u32, now_ns: u64) {
    for member in members(recorder, index).skip(1) {
        recorder.settle(member, status, error, now_ns);
    }
    recorder.close(index, status, error, now_ns);
}

/// Adds an operation to those that the events of `leader` bracket.
pub(crate) fn follow(recorder: &'static Recorder, leader: usize, index: usize) {
    let behind = recorder.slots[leader].follower.swap(index as u32 + 1, Ordering::Relaxed);
    recorder.slots[index].follower.store(behind, Ordering::Relaxed);
}

/// The slots that the events of `index` bracket, `index` first. Must not be called once the watcher
/// may free them.
pub(crate) fn members(recorder: &'static Recorder, index: usize) -> impl Iterator<Item = usize> {
    chain(recorder, index as u32 + 1, |recorder, slot| recorder.slots[slot].follower.load(Ordering::Relaxed))
}

/// Follows a chain of slots whose links are slot numbers plus one. Each link is read before its
/// slot is returned, so the caller may give the slot away.
pub(crate) fn chain(
    recorder: &'static Recorder,
    first: u32,
    next: impl Fn(&Recorder, usize) -> u32,
) -> impl Iterator<Item = usize> {
    let mut link = first;
    // No chain is longer than the table, so a corrupted one ends.
    (0..op::SLOTS).map_while(move |_| {
        let slot = link.checked_sub(1)? as usize;
        link = next(recorder, slot);
        Some(slot)
    })
}

/// The status of an operation whose end event is complete. After an abort the kernel has ended, but
/// it did not do its work.
pub(crate) fn completed_status(recorder: &Recorder, index: usize) -> OpStatus {
    match comm_of(recorder, index).map(|comm| recorder.comm_state(comm)) {
        Some(CommunicatorState::Aborted) => OpStatus::Aborted,
        _ => OpStatus::Completed,
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::ring::stream;

    use super::*;
    use crate::runtime::os::{clock, sys};

    fn read(recorder: &Recorder) -> xpu_timer_proto::v1::FlightRecord {
        let fd = recorder.ring.descriptor.get().unwrap();
        let path = format!("/proc/self/fd/{fd}");
        let file = std::fs::File::open(path).unwrap();
        ring::read(
            |at, buffer| std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at),
            Default::default(),
            clock::now_ns(),
        )
        .unwrap()
    }

    #[test]
    fn an_operation_is_readable_by_other_processes_at_every_step() {
        let recorder = Recorder::for_test();
        let what =
            NewOperation { seq: 3, count: 10, stream: 0x70, ..NewOperation::new(OpKind::Collective, Op::AllReduce) };
        let slot = recorder.begin(&what).unwrap();
        let [operation] = &read(recorder).operations[..] else { panic!("one operation") };
        assert_eq!((operation.ticket, operation.op(), operation.seq, operation.count), (0, Op::AllReduce, 3, 10));
        assert_eq!((operation.status(), operation.tid), (OpStatus::Pending, sys::gettid()));
        recorder.hand_over(slot);
        recorder.returned(slot, 77);
        recorder.close(slot, OpStatus::Failed, 700, 99);
        let [operation] = &read(recorder).operations[..] else { panic!("one operation") };
        assert_eq!((operation.status(), operation.error, operation.returned_ns), (OpStatus::Failed, 700, 77));
        assert_eq!(recorder.operation(slot), *operation);
    }

    #[test]
    fn a_pending_slot_is_never_overwritten_and_the_loss_is_counted() {
        let recorder = Recorder::for_test();
        let begin = || recorder.begin(&NewOperation { seq: 1, ..NewOperation::new(OpKind::Collective, Op::Send) });
        for lap in 0..op::SLOTS {
            let slot = begin().unwrap();
            if lap != 5 {
                recorder.slots[slot].state.store(state::FREE, Ordering::Relaxed);
            }
        }
        let second: Vec<Option<usize>> = (0..op::SLOTS).map(|_| begin()).collect();
        assert_eq!(second.iter().filter(|slot| slot.is_none()).count(), 1);
        assert!(second[5].is_none());
        let record = read(recorder);
        assert_eq!(record.health.unwrap().dropped, 1);
        assert_eq!(record.operations[0].ticket, 5);
    }

    #[test]
    fn a_single_launching_thread_uses_every_ticket() {
        let recorder = Recorder::for_test();
        let begin = || recorder.begin(&NewOperation::new(OpKind::Collective, Op::AllReduce)).unwrap();
        assert_eq!((0..500).map(|_| begin()).collect::<Vec<_>>(), (0..500).collect::<Vec<_>>());
        assert_eq!(recorder.ring.header(header::OPS).load(Ordering::Relaxed), 500);
    }

    #[test]
    fn threads_that_launch_together_share_no_ticket_and_leave_few_unused() {
        const EACH: usize = 400;
        let recorder = Recorder::for_test();
        let all_up = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    all_up.wait();
                    for _ in 0..EACH {
                        assert!(recorder.begin(&NewOperation::new(OpKind::Collective, Op::AllReduce)).is_some());
                    }
                });
            }
        });
        // A second operation with the same ticket would have been refused.
        let used = (0..op::SLOTS).filter(|slot| recorder.ring.op(*slot)[op::TICKET].load(Ordering::Relaxed) != 0);
        assert_eq!(used.count(), 8 * EACH);
        let taken = recorder.ring.header(header::OPS).load(Ordering::Relaxed) as usize;
        assert!(taken <= 2 * 8 * EACH, "{taken} tickets for {} operations", 8 * EACH);
    }

    #[test]
    fn streams_count_from_many_threads_and_overflow_is_counted() {
        let recorder = Recorder::for_test();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for stream in 0..200 {
                        recorder.on_shared_stream(stream * 64, 0, 1);
                    }
                });
            }
        });
        let streams = read(recorder).streams;
        assert_eq!(streams.len(), 200);
        assert!(streams.iter().all(|stream| stream.launches == 4), "{streams:?}");
        for stream in 0..100 {
            recorder.on_shared_stream(100_000 + stream * 64, 0, 1);
        }
        assert_eq!(read(recorder).health.unwrap().overflows, 200 + 100 - stream::SLOTS as u64);
    }

    #[test]
    fn names_are_kept_once_and_cut() {
        let recorder = Recorder::for_test();
        let key = recorder.name_key("ncclCommInitRank");
        assert_eq!(recorder.name_key("ncclCommInitRank"), key);
        recorder.add_name(7, &[b'k'; 1000]);
        let slot =
            recorder.begin(&NewOperation { function: 7, ..NewOperation::new(OpKind::Kernel, Op::Kernel) }).unwrap();
        assert_eq!(recorder.operation(slot).function.len(), crate::runtime::recorder::NAME_BYTES);
        assert_eq!(read(recorder).operations[0].function.len(), crate::runtime::recorder::NAME_BYTES);
    }
}
