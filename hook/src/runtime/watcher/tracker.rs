//! Tracks which operations have started and completed. A stream executes in order, so only its
//! oldest operation is queried.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::Ordering,
};

use xpu_timer_proto::{
    ring::{comm, header, op, pack_halves},
    v1::{OpKind, OpStatus},
};

use crate::runtime::{
    abi::{CONTEXT_IS_DESTROYED, NOT_READY, STREAM_PER_THREAD, SUCCESS},
    contexts,
    device::{Code, Device, device},
    lifecycle::exit,
    lock_free::{event_pools::LOW, slot::state},
    os::clock,
    recorder::{Recorder, operations},
};

/// Indices into [`xpu_timer_proto::ring::WATCHER_CALLS`].
mod call {
    pub const SET_CURRENT: u64 = 1;
    pub const EVENT_QUERY: u64 = 2;
    pub const EVENT_ELAPSED: u64 = 3;
    pub const EXCHANGE_CAPTURE_MODE: u64 = 6;
    pub const EVENT_CREATE: u64 = 7;
    pub const EVENT_DESTROY: u64 = 8;
}

/// The outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Still pending.
    Pending,
    /// Completed.
    Completed,
    /// Failed or aborted.
    Ended,
}

/// The watcher's own state of the operations.
pub struct Tracker {
    recorder: &'static Recorder,
    /// Operations by stream and, for host calls, by thread; oldest first.
    lanes: HashMap<Lane, VecDeque<usize>>,
    /// New operations of the launching threads. Empty between turns.
    arrived: Vec<usize>,
    context: usize,
    relaxed: bool,
    pending: usize,
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
    pub fn new(recorder: &'static Recorder) -> Self {
        Tracker { recorder, lanes: HashMap::new(), arrived: Vec::new(), context: 0, relaxed: false, pending: 0 }
    }

    /// Another thread continues: the driver's state of the thread is unknown.
    pub fn new_thread(&mut self) {
        self.context = 0;
        self.relaxed = false;
    }

    /// Whether no operation is pending.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && self.recorder.open_calls.slots().next().is_none()
    }

    /// Checks all operations once. Returns whether any began or ended.
    pub fn turn(&mut self) -> bool {
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
        lanes.retain(|_, lane| {
            while let Some(slot) = lane.front().copied() {
                if !self.is_over(slot) {
                    break;
                }
                lane.pop_front();
                moved = true;
            }
            !lane.is_empty()
        });
        self.pending = lanes.values().map(VecDeque::len).sum();
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
    pub fn oldest(&self) -> Option<(usize, u64)> {
        self.lanes
            .values()
            .filter_map(|lane| lane.front().copied())
            .chain(self.recorder.open_calls.slots())
            .map(|slot| (slot, self.recorder.slots[slot].since_ns.load(Ordering::Relaxed)))
            .min_by_key(|(_, since_ns)| *since_ns)
    }

    /// The outcome of an operation that was pending.
    pub fn outcome(&self, slot: usize, ticket: u64) -> Outcome {
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
            for member in operations::members(self.recorder, slot) {
                self.started(member, now);
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
        let elapsed = if error == 0 { self.elapsed(start, end) } else { None };
        for member in operations::members(self.recorder, slot) {
            let words = self.recorder.ring.op(member);
            if error == 0 {
                let entered = words[op::ENTERED_NS].load(Ordering::Relaxed);
                self.started(member, now.saturating_sub(elapsed.unwrap_or(0)).max(entered));
                words[op::DEVICE_NS].store(elapsed.unwrap_or(0), Ordering::Relaxed);
                self.recorder.raise_counter(member, comm::COMPLETED);
            }
            words[op::COMPLETED_NS].store(now, Ordering::Relaxed);
            words[op::STATUS].store(pack_halves(status as u32, error), Ordering::Release);
        }
        self.free(slot);
        true
    }

    /// Records the start, unless it was recorded before.
    fn started(&self, slot: usize, now: u64) {
        let started = &self.recorder.ring.op(slot)[op::STARTED_NS];
        let _ = started.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
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
                self.call(context, call::EVENT_DESTROY, |device| device.destroy_event(event));
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
                let event = self.call(context, call::EVENT_CREATE, Device::create_event);
                let Some(Ok(Ok(event))) = event else { break };
                if pool.push(event).is_err() {
                    self.call(context, call::EVENT_DESTROY, |device| device.destroy_event(event));
                    break;
                }
            }
        }
    }

    /// The driver's code for an event, or the code of a failed context switch: in a context that no
    /// longer exists, nothing completes.
    fn query(&mut self, slot: usize, event: usize) -> Option<Code> {
        let context = self.recorder.slots[slot].context.load(Ordering::Relaxed);
        match self.call(context, call::EVENT_QUERY, |device| device.query_event(event))? {
            Ok(code) | Err(code) => Some(code),
        }
    }

    fn elapsed(&mut self, start: usize, end: usize) -> Option<u64> {
        self.call(self.context, call::EVENT_ELAPSED, |device| device.elapsed_ns(start, end))?.ok().flatten()
    }

    /// Makes a driver call in a context, stamped before it begins. `None` when no call may be made
    /// now; an error when the context cannot be made current.
    fn call<R>(&mut self, context: usize, what: u64, function: impl FnOnce(&Device) -> R) -> Option<Result<R, Code>> {
        let device = device()?;
        if !self.relaxed {
            // Otherwise a query would break another thread's capture.
            if let Err(code) = self.stamped(call::EXCHANGE_CAPTURE_MODE, 0, || device.relax_capture())?.flatten() {
                return Some(Err(code));
            }
            self.relaxed = true;
        }
        if context != 0 && context != self.context {
            if let Err(code) = self.stamped(call::SET_CURRENT, context, || device.make_current(context))?.flatten() {
                return Some(Err(code));
            }
            self.context = context;
        }
        self.stamped(what, context, || function(device))
    }

    /// Makes a driver call, unless no call may be made now. An error when `context` has been
    /// destroyed; 0 for a call that needs none.
    fn stamped<R>(&self, what: u64, context: usize, function: impl FnOnce() -> R) -> Option<Result<R, Code>> {
        let [call, since] =
            [header::WATCHER_CALL, header::WATCHER_SINCE_NS].map(|word| self.recorder.ring.header(word));
        since.store(clock::now_ns(), Ordering::Relaxed);
        // The exit handler, and a thread that destroys a context, set a flag and then read the
        // stamp; this stamps and then reads the flags. At least one of them sees the other.
        call.store(what, Ordering::SeqCst);
        let may_call = !exit::is_ending() && self.recorder.destroying.load(Ordering::SeqCst) == 0;
        let result =
            may_call.then(|| if contexts::exists(context) { Ok(function()) } else { Err(CONTEXT_IS_DESTROYED) });
        call.store(0, Ordering::SeqCst);
        since.store(0, Ordering::Relaxed);
        result
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::Op;

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
