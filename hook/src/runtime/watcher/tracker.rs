//! Tracks which operations have started and completed. A stream executes in order, so only its
//! oldest operation is queried.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::Ordering,
};

use xpu_timer_proto::{
    ring::{comm, header, op, pack_halves},
    v1::{Op, OpKind, OpStatus},
};

use crate::runtime::{
    abi::{NOT_READY, STREAM_PER_THREAD, SUCCESS},
    contexts,
    device::{Code, Device},
    lock_free::{event_pools::LOW, slot::state},
    os::clock,
    recorder::{Recorder, operations},
    watcher::{
        device_clock::DeviceClocks,
        driver::{Driver, call},
    },
};

/// A time of an event outside of its possible times by more than this means that the clock of the
/// device or the host has jumped.
const PLAUSIBLE_NS: u64 = 1_000_000;

/// A thread that has launched nothing for this long may be waiting for a place in the device's
/// queue. The time of a launch is that of the coarse clock, which is up to 10 ms old.
const LAUNCHES_NS: u64 = 20_000_000;

/// The outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Still pending.
    Pending,
    /// Completed.
    Completed,
    /// Failed or aborted.
    Ended,
}

/// The watcher's own state of the operations.
pub(crate) struct Tracker {
    recorder: &'static Recorder,
    /// Operations by stream and, for host calls, by thread; oldest first.
    lanes: HashMap<Lane, VecDeque<usize>>,
    /// New operations of the launching threads. Empty between turns.
    arrived: Vec<usize>,
    driver: Driver,
    clocks: DeviceClocks,
    pending: usize,
    /// All streams share one hardware queue.
    pub has_one_queue: bool,
}

/// A sequence in which operations complete in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Lane {
    Stream {
        context: usize,
        stream: usize,
        /// The thread, for a per-thread stream.
        thread: u64,
    },
    /// A host call has a lane of its own, because a nonblocking call of its thread may overtake it.
    Host(usize),
}

impl Tracker {
    /// Without pending operations.
    pub(crate) fn new(recorder: &'static Recorder) -> Self {
        Tracker {
            recorder,
            lanes: HashMap::new(),
            arrived: Vec::new(),
            driver: Driver::new(recorder),
            clocks: DeviceClocks::default(),
            pending: 0,
            has_one_queue: false,
        }
    }

    /// Another thread continues: the driver's state of the thread is unknown.
    pub(crate) fn new_thread(&mut self) {
        self.driver.new_thread();
    }

    /// Whether no operation is pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending == 0 && self.recorder.open_calls.slots().next().is_none()
    }

    /// Checks all operations once. Returns whether any began or ended.
    pub(crate) fn turn(&mut self) -> bool {
        for handoff in self.recorder.handoffs_in_use() {
            handoff.take(&self.recorder.slots, |slot| self.arrived.push(slot));
        }
        let mut moved = !self.arrived.is_empty();
        let mut arrived = std::mem::take(&mut self.arrived);
        for slot in arrived.drain(..).rev() {
            self.add(slot);
        }
        self.arrived = arrived;
        let mut lanes = std::mem::take(&mut self.lanes);
        self.pending = lanes.values().map(VecDeque::len).sum();
        lanes.retain(|_, lane| {
            while let Some(slot) = lane.front().copied() {
                if !self.is_over(slot) {
                    break;
                }
                lane.pop_front();
                self.pending -= 1;
                moved = true;
            }
            !lane.is_empty()
        });
        self.lanes = lanes;
        self.fill_pools();
        moved
    }

    /// Adds an operation that has begun. The operations of a stream are ordered by their begin,
    /// from whatever thread they come.
    fn add(&mut self, slot: usize) {
        let lane = match self.recorder.kind(slot) {
            OpKind::HostCall => Lane::Host(slot),
            _ => self.stream_of(slot),
        };
        let since_ns = |slot: usize| self.recorder.slots[slot].since_ns.load(Ordering::Relaxed);
        let pending = self.lanes.entry(lane).or_default();
        let later = pending.iter().rev().take_while(|other| since_ns(**other) > since_ns(slot)).count();
        pending.insert(pending.len() - later, slot);
    }

    fn stream_of(&self, slot: usize) -> Lane {
        let entry = &self.recorder.slots[slot];
        let (context, stream) = (entry.context.load(Ordering::Relaxed), entry.stream.load(Ordering::Relaxed));
        // This handle denotes a different stream on each thread.
        let is_per_thread = stream == STREAM_PER_THREAD;
        let thread =
            if is_per_thread { self.recorder.ring.op(slot)[op::WHAT].load(Ordering::Relaxed) >> 32 } else { 0 };
        Lane::Stream { context, stream, thread }
    }

    /// The operation that has been pending longest, and since when.
    pub(crate) fn oldest(&self) -> Option<(usize, u64)> {
        self.lanes
            .values()
            .filter_map(|lane| lane.front().copied())
            .chain(self.recorder.open_calls.slots())
            .map(|slot| (slot, self.recorder.slots[slot].since_ns.load(Ordering::Relaxed)))
            .min_by_key(|(_, since_ns)| *since_ns)
    }

    /// The outcome of an operation that was pending.
    pub(crate) fn outcome(&self, slot: usize, ticket: u64) -> Outcome {
        let words = self.recorder.ring.op(slot);
        let status = words[op::STATUS].load(Ordering::Acquire) as u32 as i32;
        if words[op::TICKET].load(Ordering::Acquire) != ticket + 1 {
            // The slot belongs to another operation, which happens only after this one has ended.
            return Outcome::Completed;
        }
        match OpStatus::try_from(status) {
            Ok(OpStatus::Pending) => Outcome::Pending,
            Ok(OpStatus::Completed) => Outcome::Completed,
            _ => Outcome::Ended,
        }
    }

    /// Whether a slot's operation has ended. If so, its slot and those of its followers have been
    /// freed.
    fn is_over(&mut self, slot: usize) -> bool {
        let entry = &self.recorder.slots[slot];
        match entry.state() {
            state::OPEN => {
                let start = entry.start.load(Ordering::Acquire);
                self.query_start(slot, start);
                false
            }
            state::ARMED => self.query_end(slot),
            state::CLOSED => {
                self.free(slot);
                true
            }
            // Not handed over, which cannot happen here.
            _ => true,
        }
    }

    fn query_start(&mut self, slot: usize, start: usize) {
        let started = &self.recorder.ring.op(slot)[op::STARTED_NS];
        if start == 0 || started.load(Ordering::Relaxed) != 0 {
            return;
        }
        if self.query(slot, start) == Some(SUCCESS) {
            let now = clock::now_ns();
            let started = self.completion_of(slot, start, self.launched(slot, now), now);
            for member in operations::members(self.recorder, slot) {
                self.started(member, started, self.launched(member, now));
            }
        }
    }

    fn query_end(&mut self, slot: usize) -> bool {
        let entry = &self.recorder.slots[slot];
        let (start, end) = (entry.start.load(Ordering::Relaxed), entry.end.load(Ordering::Relaxed));
        let (status, error) = match self.query(slot, end) {
            // Driver calls are not allowed now.
            None => return false,
            Some(NOT_READY) => {
                self.query_start(slot, start);
                return false;
            }
            Some(SUCCESS) => (operations::completed_status(self.recorder, slot), 0),
            Some(code) => (OpStatus::Failed, code as u32),
        };
        let now = clock::now_ns();
        let (mut completed, mut elapsed) = (now, 0);
        if error == 0 {
            let context = entry.context.load(Ordering::Relaxed);
            let (recorder, others) = (self.recorder, self.has_one_queue && self.pending > 1);
            let may_wait = || others && now.saturating_sub(recorder.newest_launch_ns()) > LAUNCHES_NS;
            if self.clocks.renew(&mut self.driver, context, now, may_wait) {
                self.recorder.ring.header(header::ALIGNED_NS).store(now, Ordering::Relaxed);
            }
            let begun = operations::members(self.recorder, slot).map(|member| self.begun(member)).max();
            completed = self.completion_of(slot, end, begun.unwrap_or(0), now);
            elapsed = self.elapsed(context, start, end).unwrap_or(0);
        }
        for member in operations::members(self.recorder, slot) {
            let words = self.recorder.ring.op(member);
            if error == 0 {
                self.started(member, completed.saturating_sub(elapsed), self.launched(member, completed));
                words[op::DEVICE_NS].store(elapsed, Ordering::Relaxed);
                self.recorder.raise_counter(member, comm::COMPLETED);
            }
            words[op::COMPLETED_NS].store(completed, Ordering::Relaxed);
            words[op::STATUS].store(pack_halves(status as u32, error), Ordering::Release);
        }
        self.free(slot);
        true
    }

    /// When an event of an operation completed, which was seen complete at `seen_ns` and cannot
    /// have completed before `from_ns`. Without the clock of its device, this is when it was seen.
    fn completion_of(&mut self, slot: usize, event: usize, from_ns: u64, seen_ns: u64) -> u64 {
        let context = self.recorder.slots[slot].context.load(Ordering::Relaxed);
        let exact_ns = self.clocks.time_of(&mut self.driver, context, event, seen_ns);
        let possible = from_ns.saturating_sub(PLAUSIBLE_NS)..=seen_ns.saturating_add(PLAUSIBLE_NS);
        exact_ns.filter(|ns| possible.contains(ns)).map_or(seen_ns, |ns| ns.max(from_ns).min(seen_ns))
    }

    /// When an operation that has started before `by_ns` was launched.
    ///
    /// The host launches a kernel at the end of the call. On an empty stream, the start event
    /// completes before that. A collective may start within its call, and a copy may even end
    /// there.
    fn launched(&self, slot: usize, by_ns: u64) -> u64 {
        let words = self.recorder.ring.op(slot);
        let [entered, returned] = [op::ENTERED_NS, op::RETURNED_NS].map(|word| words[word].load(Ordering::Relaxed));
        let is_kernel = matches!(self.recorder.op(slot), Op::Kernel | Op::Matmul | Op::Attention);
        if is_kernel && (entered..by_ns).contains(&returned) { returned } else { entered }
    }

    /// When an operation was launched, or started if that is known.
    fn begun(&self, slot: usize) -> u64 {
        let words = self.recorder.ring.op(slot);
        let [entered, started] = [op::ENTERED_NS, op::STARTED_NS].map(|word| words[word].load(Ordering::Relaxed));
        entered.max(started)
    }

    /// Records the start, unless it was recorded before. It is corrected if it was before the
    /// launch, which is known once the call has returned.
    fn started(&self, slot: usize, started_ns: u64, launched_ns: u64) {
        let recorded = &self.recorder.ring.op(slot)[op::STARTED_NS];
        let _ = recorded.compare_exchange(0, started_ns, Ordering::Relaxed, Ordering::Relaxed);
        recorded.fetch_max(launched_ns, Ordering::Relaxed);
        self.recorder.raise_counter(slot, comm::STARTED);
    }

    /// Returns the events and frees the slots.
    fn free(&mut self, slot: usize) {
        let entry = &self.recorder.slots[slot];
        let context = entry.context.load(Ordering::Relaxed);
        for place in [&entry.start, &entry.end] {
            let event = place.swap(0, Ordering::Relaxed);
            if event == 0 {
                continue;
            }
            if !contexts::exists(context) {
                // The driver has freed it.
                continue;
            }
            let handed_back = self.recorder.handoff_of(slot).give_event(context, event)
                || self.recorder.pools.of(context).is_some_and(|pool| pool.push(event).is_ok());
            if !handed_back {
                self.driver.call(context, call::EVENT_DESTROY, |device| device.destroy_event(event));
            }
        }
        // Followers are in no queue. Their links are read before the slots are freed.
        for member in operations::members(self.recorder, slot) {
            self.recorder.slots[member].become_state(state::FREE);
        }
    }

    /// Keeps spare events ready in every context in which launches were seen.
    fn fill_pools(&mut self) {
        for (context, pool) in self.recorder.pools.contexts().filter(|(context, _)| contexts::exists(*context)) {
            while pool.len() < LOW {
                let event = self.driver.call(context, call::EVENT_CREATE, Device::create_event);
                let Some(Ok(Ok(event))) = event else { break };
                if pool.push(event).is_err() {
                    self.driver.call(context, call::EVENT_DESTROY, |device| device.destroy_event(event));
                    break;
                }
            }
        }
    }

    /// The driver's code for an event, or the code of a failed context switch: in a context that no
    /// longer exists, nothing completes.
    fn query(&mut self, slot: usize, event: usize) -> Option<Code> {
        let context = self.recorder.slots[slot].context.load(Ordering::Relaxed);
        match self.driver.call(context, call::EVENT_QUERY, |device| device.query_event(event))? {
            Ok(code) | Err(code) => Some(code),
        }
    }

    fn elapsed(&mut self, context: usize, start: usize, end: usize) -> Option<u64> {
        let elapsed = self.driver.call(context, call::EVENT_ELAPSED, |device| device.elapsed_ns(start, end));
        u64::try_from(elapsed?.ok()??).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{os::descriptor::Descriptor, recorder::NewOperation};

    #[test]
    fn operations_of_a_stream_are_ordered_by_begin_across_threads() {
        let recorder: &'static Recorder =
            Box::leak(Box::new(Recorder::create(Box::leak(Box::new(Descriptor::none()))).unwrap()));
        let begin = |since_ns: u64, stream: usize| {
            let slot = recorder.begin(&NewOperation { stream, ..NewOperation::new(OpKind::Collective, Op::Send) });
            let slot = slot.unwrap();
            recorder.slots[slot].since_ns.store(since_ns, Ordering::Relaxed);
            recorder.hand_over(slot);
            slot
        };
        let mut tracker = Tracker::new(recorder);
        let first = [begin(10, 0x40), begin(30, 0x40)];
        tracker.turn();
        // Those of another thread began earlier, and arrive later.
        let second = std::thread::scope(|scope| {
            scope.spawn(|| [begin(20, 0x40), begin(40, 0x40), begin(5, 0x80)]).join().unwrap()
        });
        tracker.turn();
        let mut streams: Vec<Vec<usize>> = tracker.lanes.values().map(|lane| lane.iter().copied().collect()).collect();
        streams.sort_by_key(Vec::len);
        assert_eq!(streams, [vec![second[2]], vec![first[0], second[0], first[1], second[1]]]);
        assert_eq!(tracker.oldest(), Some((second[2], 5)));
    }
}
