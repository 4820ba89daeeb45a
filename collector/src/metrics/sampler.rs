//! Reads the rings of the ranks for all that follows their operations: the series of `/metrics`,
//! the comparison of ranks, and the timeline. Also reads the counters of the Python interpreters.
//!
//! Each operation is read once. A ring that fills is read before it is full; all rings are read in
//! the interval of the metrics, and once more when their process has ended.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use tracing::{debug, warn};
use xpu_timer_capture::{Counter, Counts, NamedStack};
use xpu_timer_proto::{
    ring::{
        self, FrameLayout, RawStack, header, lane,
        span::{self, SpanCursor},
    },
    timeline,
    v1::{Communicator, CommunicatorPace, HookedFunction, MemoryReading, Operation, RankInfo},
};

use crate::{
    job::{JobKey, RankId},
    metrics::{
        MetricsSettings,
        cursor::Cursor,
        meaning::{self, Transfers},
        pace::Recorder,
        series::{AllSeries, HostFunctions},
    },
    os::{
        clock::{Now, nanoseconds},
        ring_file::{RingFile, kernel_name},
    },
    timeline::{
        TimelineSettings,
        kernel_trace::Recording,
        stacks::{LaunchStacks, Stacks},
        store::{Store, end_ns},
    },
};

/// Time between two looks at how full the rings are, while a rank launches many operations. It must
/// launch tens of thousands a second to overrun its ring in this time.
const SHORT_PEEK: Duration = Duration::from_millis(250);
/// The same while no rank does. Each look wakes the collector, which costs more than a look.
const LONG_PEEK: Duration = Duration::from_millis(500);
/// The number of operations or calls since the last look that is many: a part of their table.
const MANY_NEW: usize = ring::op::SLOTS / 4;
/// A ring with this number of new operations is read at once. Many small reads cost less than a
/// large one: their buffers stay in the cache.
const MANY_UNREAD: u64 = ring::op::SLOTS as u64 / 64;
/// The number of new calls of traced functions at which their ring is read at once.
const MANY_UNREAD_CALLS: u64 = span::SLOTS as u64 / 4;
/// Slots for which memory is kept from one read to the next: one whole ring. Eight ranks with 1,000
/// operations a second each need half of it.
const KEPT_SLOTS: usize = ring::op::SLOTS;
/// Number of operations that are handled together. They stay in the nearest cache, and other
/// programs have filled the others between two reads.
const BATCH: usize = 32;

/// The operations of all ranks.
pub(crate) struct Sampler {
    settings: MetricsSettings,
    looked_ns: u64,
    peeked_ns: u64,
    // The largest number of operations, or of traced calls, that the last look at a rank found
    // completed.
    most_new: usize,
    searched_ns: u64,
    ranks: BTreeMap<RankId, Sampled>,
    // Ranks that have ended and were read to their end.
    closed: BTreeSet<RankId>,
    // Memory of the last read: the slots of all rings, and some operations.
    slots: Vec<Slot>,
    operations: Vec<Operation>,
    transfers: Transfers,
    /// Whether a request for detail makes ranks report many operations.
    pub expects_many: bool,
    /// The last operations.
    pub timeline: Store,
    /// The recording for a request of the original tool.
    pub recording: Recording,
    /// The counters of their interpreters.
    pub interpreters: Interpreters,
}

/// The words of an operation in a ring.
type Slot = [u64; ring::op::WORDS];

/// A rank as input of the sampler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankView<'a> {
    /// Identity of its registry entry.
    pub id: RankId,
    /// Its job.
    pub job: &'a JobKey,
    /// Whether its process has ended.
    pub has_ended: bool,
    /// Its process; 0 if it is outside the collector's PID namespace.
    pub pid: i32,
    /// Its place in the job.
    pub info: &'a RankInfo,
    /// Its flight record; `None` if it registered without one.
    pub ring: Option<&'a RingFile>,
}

/// The state of one rank.
#[derive(Debug, Default)]
pub(crate) struct Sampled {
    /// Its kernel metrics.
    pub series: AllSeries,
    /// Its collectives for the comparison with other ranks.
    pub recorder: Recorder,
    /// The read position in its ring.
    pub cursor: Cursor,
    /// Its traced Python functions.
    pub traced: HostFunctions,
    calls: SpanCursor,
    /// The header of its ring, including the lanes.
    pub head: Option<[u64; header::WORDS]>,
    /// The sum of its lanes.
    pub totals: lane::Totals,
    /// Calls of its hooked functions, as of `functions_ns`.
    pub functions: Vec<HookedFunction>,
    functions_ns: u64,
    communicators: BTreeMap<u64, Communicator>,
    // Names of kernels, readable.
    names: HashMap<u64, String>,
    // Operations that the hook has dropped.
    dropped: u64,
    // Operations whose loss was reported to the timeline.
    lost: u64,
    stacks: LaunchStacks,
}

impl Sampler {
    /// Starts without data.
    #[must_use]
    pub(crate) fn new(settings: MetricsSettings, timeline: TimelineSettings) -> Self {
        Sampler {
            settings,
            looked_ns: 0,
            peeked_ns: 0,
            most_new: 0,
            searched_ns: 0,
            ranks: BTreeMap::new(),
            closed: BTreeSet::new(),
            slots: Vec::new(),
            operations: Vec::new(),
            transfers: Transfers::default(),
            expects_many: false,
            timeline: Store::new(nanoseconds(timeline.window), timeline.bytes),
            recording: Recording::new(timeline),
            interpreters: Interpreters::default(),
        }
    }

    /// The time between two looks at how full the rings are; `None` if that does not matter.
    #[must_use]
    pub(crate) fn peek_interval(&self) -> Option<Duration> {
        let expects_many = self.expects_many || self.recording.is_active();
        let is_short = expects_many || self.most_new >= MANY_NEW;
        (self.timeline.is_on() || expects_many).then_some(if is_short { SHORT_PEEK } else { LONG_PEEK })
    }

    /// The state of a rank.
    #[must_use]
    pub(crate) fn of(&self, rank: RankId) -> Option<&Sampled> {
        self.ranks.get(&rank)
    }

    /// Takes the blocks of a rank that were not reported to the cluster yet.
    pub(crate) fn take_unreported(&mut self, rank: RankId) -> Vec<CommunicatorPace> {
        self.ranks.get_mut(&rank).map(|sampled| sampled.recorder.take_unreported()).unwrap_or_default()
    }

    /// Reads the rings that it is time for, and forgets ranks that are gone.
    pub(crate) fn turn<'a>(&mut self, ranks: impl Iterator<Item = RankView<'a>>, now: Now) {
        let is_due = |since_ns: u64, interval: Duration| now.mono_ns >= since_ns.saturating_add(nanoseconds(interval));
        let looks = is_due(self.looked_ns, self.settings.look);
        if looks || self.peek_interval().is_some_and(|interval| is_due(self.peeked_ns, interval)) {
            self.read(ranks.collect(), looks, false, now);
        }
    }

    /// Reads all rings now, for a request that covers the time until now.
    pub(crate) fn read_all<'a>(&mut self, ranks: impl Iterator<Item = RankView<'a>>, now: Now) {
        self.read(ranks.collect(), false, true, now);
    }

    /// Asks for the counters of the interpreters and the names of stacks, and tells hooks that keep
    /// stacks where the frames are.
    fn look_at_interpreters(&mut self, living: &[RankView<'_>], now: Now) {
        let search = now.mono_ns >= self.searched_ns.saturating_add(nanoseconds(self.settings.publish));
        if search {
            self.searched_ns = now.mono_ns;
        }
        let mut stacks = Vec::new();
        for rank in living {
            let Some(sampled) = self.ranks.get_mut(&rank.id) else { continue };
            let unnamed = sampled.stacks.take_unnamed();
            if !unnamed.is_empty() {
                stacks.push((rank.id, rank.pid, unnamed));
            }
            let wants_stacks = sampled.head.is_some_and(|head| head[header::STACKS_WANTED] > 0);
            let layout = self.interpreters.of(rank.id).and_then(|counts| counts.frames);
            if let (true, Some(ring), Some(layout)) = (wants_stacks, rank.ring, layout)
                && let Err(error) = tell_layout(ring, &layout)
            {
                debug!("rank {} (pid {}): its stacks are not kept: {error}", rank.info.rank, rank.pid);
            }
        }
        // The counters are published no more often than the other values. Those of a new rank are
        // read at once, because they show where the frames of its interpreter are.
        let is_new = |rank: &RankView<'_>| self.interpreters.of(rank.id).is_none();
        if !search && stacks.is_empty() && !living.iter().any(is_new) {
            return;
        }
        let ranks = living.iter().map(|rank| (rank.id, rank.pid)).collect();
        for (id, _, unnamed) in self.interpreters.request(CountRequest { ranks, search, stacks }) {
            if let Some(sampled) = self.ranks.get_mut(&id) {
                sampled.stacks.give_back(unnamed);
            }
        }
    }

    /// Reads the rings. `looks` includes everything else that the metrics need. Without `all`, only
    /// rings that fill are read in between.
    fn read(&mut self, ranks: Vec<RankView<'_>>, looks: bool, all: bool, now: Now) {
        self.peeked_ns = now.mono_ns;
        let ids: BTreeSet<RankId> = ranks.iter().map(|rank| rank.id).collect();
        self.ranks.retain(|id, _| ids.contains(id));
        self.closed.retain(|id| ids.contains(id));
        let living: Vec<RankView<'_>> = ranks.iter().filter(|rank| !rank.has_ended).copied().collect();
        if looks {
            self.looked_ns = now.mono_ns;
            self.look_at_interpreters(&living, now);
        }
        // The places in `slots` of what has completed.
        let mut completed = Vec::new();
        let mut slots = std::mem::take(&mut self.slots);
        for rank in ranks.iter().filter(|rank| !self.closed.contains(&rank.id)) {
            let Some(ring) = rank.ring else { continue };
            let sampled = self.ranks.entry(rank.id).or_default();
            if !(looks || all || rank.has_ended || sampled.fills(ring)) {
                continue;
            }
            match sampled.read(ring, looks, &self.settings, now, &mut slots) {
                Ok(places) => completed.push((rank, places)),
                // The rank is just ending, or it spoils its own ring.
                Err(error) => debug!("rank {} (pid {}): its ring cannot be read: {error}", rank.info.rank, rank.pid),
            }
        }
        self.most_new = completed.iter().map(|(_, places)| places.len()).max().unwrap_or(0);
        let here = members_here(&living, &self.ranks);
        for (id, stack) in self.interpreters.take_stacks() {
            if let Some(sampled) = self.ranks.get_mut(&id) {
                sampled.stacks.name(stack);
            }
        }
        for (rank, places) in completed {
            let Some(sampled) = self.ranks.get_mut(&rank.id) else { continue };
            if let Some(calls) = rank.ring.and_then(|ring| sampled.read_calls(ring, now).ok()) {
                self.most_new = self.most_new.max(calls.len());
                self.timeline.add_calls(rank.id, rank.job, &calls);
                self.recording.add_calls(rank.id, &calls, now);
            }
            let mut first_ns = u64::MAX;
            for batch in batches(&places, &slots) {
                let operations = sampled.operations(batch.iter().map(|place| &slots[*place]), &mut self.operations);
                sampled.add(rank, operations, &here, &self.settings, &mut self.transfers, now);
                self.timeline.add(rank.id, rank.job, operations);
                sampled.stacks.see(operations);
                self.recording.add(rank.id, rank.info, operations, sampled.known(), now);
                if sampled.cursor.began_late {
                    first_ns = operations.iter().map(end_ns).fold(first_ns, u64::min);
                }
            }
            self.timeline.add_lost(rank.id, sampled.take_lost(), now.mono_ns);
            if std::mem::take(&mut sampled.cursor.began_late) {
                self.timeline.set_begin(rank.id, first_ns.min(now.mono_ns));
            }
            if rank.has_ended {
                self.timeline.set_communicators(rank.id, sampled.communicators.values().cloned().collect());
                self.recording.end(rank.id, rank.info, sampled.known());
            }
            self.timeline.set_stacks(rank.id, sampled.stacks.complete());
            if let Some(reading) = sampled.memory(looks, now) {
                self.timeline.add_memory(rank.id, reading);
            }
        }
        slots.clear();
        slots.shrink_to(KEPT_SLOTS);
        self.slots = slots;
        for rank in ranks.iter().filter(|rank| rank.has_ended) {
            self.ranks.remove(&rank.id);
            self.closed.insert(rank.id);
        }
        if looks {
            for sampled in self.ranks.values_mut() {
                sampled.series.turn(&self.settings, now.mono_ns);
                sampled.traced.turn(&self.settings, now.mono_ns);
                sampled.recorder.forget(now.mono_ns);
            }
            self.timeline.turn(now, |id| ids.contains(&id));
        }
    }
}

/// The places of operations in batches, which do not cut a group.
fn batches<'a>(places: &'a [usize], slots: &'a [Slot]) -> impl Iterator<Item = &'a [usize]> {
    let mut rest = places;
    std::iter::from_fn(move || {
        let group = |index: usize| ring::group_of(&slots[rest[index]]);
        let continues = |end: &usize| *end < rest.len() && group(*end) != 0 && group(*end) == group(*end - 1);
        let mut end = BATCH.min(rest.len());
        while end > 0 && continues(&end) {
            end += 1;
        }
        let (batch, after) = rest.split_at(end);
        rest = after;
        (!batch.is_empty()).then_some(batch)
    })
}

/// Tells a hook where the frames of its interpreter are, if it does not know.
fn tell_layout(ring: &RingFile, layout: &FrameLayout) -> io::Result<()> {
    let words = layout.words();
    if ring.word(header::FRAME_LAYOUT)? == words[0] {
        return Ok(());
    }
    let mut last_first = words.into_iter().enumerate().rev();
    last_first.try_for_each(|(index, word)| ring.write(header::FRAME_LAYOUT + index, word))
}

/// Number of ranks of each communicator that live on this node.
fn members_here(living: &[RankView<'_>], ranks: &BTreeMap<RankId, Sampled>) -> HashMap<u64, u32> {
    let mut here = HashMap::new();
    for sampled in living.iter().filter_map(|rank| ranks.get(&rank.id)) {
        for id in sampled.communicators.keys() {
            *here.entry(*id).or_default() += 1;
        }
    }
    here
}

impl Sampled {
    /// Whether the ring has many operations or calls that were not read.
    fn fills(&self, ring: &RingFile) -> bool {
        ring.word(header::OPS).is_ok_and(|tickets| self.cursor.unread(tickets) >= MANY_UNREAD)
            || self.is_traced()
                && ring.word(header::SPANS).is_ok_and(|tickets| self.calls.unread(tickets) >= MANY_UNREAD_CALLS)
    }

    /// Whether Python functions of the rank are traced, as of the last look.
    fn is_traced(&self) -> bool {
        self.head.is_some_and(|head| head[header::SPANS] > 0)
    }

    /// Reads the calls of traced functions that have ended.
    fn read_calls(&mut self, ring: &RingFile, now: Now) -> io::Result<Vec<Operation>> {
        if !self.is_traced() {
            return Ok(Vec::new());
        }
        let read_at = |at, buffer: &mut [u8]| ring.read_at(at, buffer);
        let functions = span::read_functions(read_at)?;
        let calls = self.calls.read(read_at, &functions)?;
        self.traced.add(functions, &calls, now.mono_ns);
        Ok(calls)
    }

    /// The device memory at this moment, when the lanes were read. `None` if no allocation was
    /// seen, or if the ring contradicts itself.
    fn memory(&self, looks: bool, now: Now) -> Option<MemoryReading> {
        let allocated_bytes = self.totals.device_bytes;
        let is_known = self.totals.allocated_bytes > 0 && allocated_bytes <= self.totals.allocated_bytes;
        (looks && is_known).then_some(MemoryReading { monotonic_ns: now.mono_ns, allocated_bytes })
    }

    /// What the original tool's format needs besides the operations.
    fn known(&self) -> (&BTreeMap<u64, Communicator>, &Stacks) {
        (&self.communicators, self.stacks.complete())
    }

    /// Operations that were found to be missing since the last call.
    fn take_lost(&mut self) -> u64 {
        let lost = self.cursor.missed.saturating_add(self.dropped).saturating_add(self.calls.missed);
        lost.saturating_sub(std::mem::replace(&mut self.lost, lost))
    }

    /// Reads what has completed, and with `looks` also what else the metrics need. Appends slots to
    /// `slots`, and returns the places there of what has completed.
    fn read(
        &mut self,
        ring: &RingFile,
        looks: bool,
        settings: &MetricsSettings,
        now: Now,
        slots: &mut Vec<Slot>,
    ) -> io::Result<Vec<usize>> {
        let read_at = |at, buffer: &mut [u8]| ring.read_at(at, buffer);
        if looks || self.head.is_none() {
            self.head = Some(ring::read_header(read_at)?);
            self.totals = lane::totals(&read_at)?;
        }
        if looks && (self.functions_ns == 0 || now.mono_ns >= self.functions_ns + nanoseconds(settings.publish)) {
            self.functions_ns = now.mono_ns;
            self.functions = ring::read_functions(read_at)?;
        }
        self.dropped = ring.word(header::DROPPED)?;
        let places = self.cursor.read_completed(read_at, ring.word(header::OPS)?, slots)?;
        let completed = || places.iter().map(|place| &slots[*place]);
        // Neighbors mostly have one kernel and one communicator.
        let (mut unnamed, mut is_unknown) = (BTreeSet::new(), false);
        let (mut function, mut communicator) = (0, None);
        for words in completed() {
            if std::mem::replace(&mut function, words[ring::op::FUNCTION]) != function
                && function != 0
                && !self.names.contains_key(&function)
            {
                unnamed.insert(function);
            }
            let of_collective = ring::communicator_of(words);
            if of_collective.is_some() && std::mem::replace(&mut communicator, of_collective) != of_collective {
                is_unknown |= of_collective.is_some_and(|id| !self.communicators.contains_key(&id));
            }
        }
        if !unnamed.is_empty() {
            let names = ring::read_names(read_at)?;
            self.names.extend(names.into_iter().map(|(function, name)| (function, kernel_name(&name))));
            // A name is published before its key is used, so a key without a name now never gets
            // one.
            for function in unnamed {
                self.names.entry(function).or_default();
            }
        }
        // After the slots: the stack of an operation is published before the operation completes.
        if self.head.is_some_and(|head| head[header::STACKS_WANTED] > 0) {
            let used = ring.word(header::STACKS)? as usize;
            self.stacks.add(ring::read_stacks(read_at, self.stacks.read, used)?);
        }
        if is_unknown {
            let all = ring::read_communicators(read_at)?;
            self.communicators = all.into_iter().map(|communicator| (communicator.id, communicator)).collect();
        }
        Ok(places)
    }

    /// Makes operations of slots, in the memory of earlier ones.
    fn operations<'s, 'o>(
        &self,
        slots: impl Iterator<Item = &'s Slot>,
        operations: &'o mut Vec<Operation>,
    ) -> &'o [Operation] {
        let mut count = 0;
        let mut last: (u64, &str) = (0, "");
        for words in slots {
            let function = words[ring::op::FUNCTION];
            if function != last.0 {
                last = (function, self.names.get(&function).map_or("", String::as_str));
            }
            if count == operations.len() {
                operations.push(Operation::default());
            }
            let operation = &mut operations[count];
            let mut name = std::mem::take(&mut operation.function);
            if !timeline::is_same_text(&name, last.1) {
                name.clear();
                name.push_str(last.1);
            }
            *operation = ring::operation(words, name);
            count += 1;
        }
        &operations[..count]
    }

    fn add(
        &mut self,
        rank: &RankView<'_>,
        operations: &[Operation],
        here: &HashMap<u64, u32>,
        settings: &MetricsSettings,
        transfers: &mut Transfers,
        now: Now,
    ) {
        // The members of a group on one stream are one launch.
        type Members<'a> = Vec<(&'a Operation, &'a Communicator)>;
        let mut groups: BTreeMap<(u64, u64), Members<'_>> = BTreeMap::new();
        for operation in operations.iter().filter(|operation| operation.group != 0) {
            let Some(communicator) = self.communicators.get(&operation.communicator) else { continue };
            groups.entry((operation.group, operation.stream)).or_default().push((operation, communicator));
        }
        for operation in operations {
            if let Some((key, done)) = meaning::matmul(operation, settings) {
                self.series.add(key, done, now.mono_ns);
            }
            let Some(communicator) = self.communicators.get(&operation.communicator) else { continue };
            let (alone, members);
            let together: &[(&Operation, &Communicator)] = if operation.group == 0 {
                alone = [(operation, communicator)];
                &alone
            } else {
                // The first member represents all.
                let Some(found) = groups.remove(&(operation.group, operation.stream)) else { continue };
                members = found;
                &members
            };
            self.recorder.add(together, rank.info.world_size, now.mono_ns);
            let spans_nodes = together.iter().any(|(_, communicator)| spans_nodes(rank, communicator, here));
            if let Some((key, done)) = meaning::collective(together, spans_nodes, settings, transfers) {
                self.series.add(key, done, now.mono_ns);
            }
        }
    }
}

/// Whether a communicator has ranks on other nodes.
fn spans_nodes(rank: &RankView<'_>, communicator: &Communicator, here: &HashMap<u64, u32>) -> bool {
    let (world, local) = (rank.info.world_size, rank.info.local_world_size);
    if local > 0 && (world <= local || communicator.size > local) {
        return world > local;
    }
    here.get(&communicator.id).copied().unwrap_or(0) < communicator.size
}

/// Time limit of one read.
const COUNT_DEADLINE: Duration = Duration::from_secs(2);

/// A request to the thread.
pub(crate) struct CountRequest {
    /// The processes of the ranks.
    ranks: Vec<(RankId, i32)>,
    /// Whether to look for new iterators of data loaders.
    search: bool,
    /// Stacks whose frames must be named.
    stacks: Vec<UnnamedStacks>,
}

/// A rank, its process, and stacks that it has stored.
type UnnamedStacks = (RankId, i32, Vec<RawStack>);

/// What the thread has found out.
#[derive(Default)]
struct Found {
    counts: BTreeMap<RankId, Counts>,
    stacks: Vec<(RankId, NamedStack)>,
}

type Latest = Arc<Mutex<Found>>;

/// Reads the counters of the ranks' Python interpreters, and the names of their code, on a thread
/// of its own. The kernel may block a reader of another process's memory, and the collector must
/// not block. The first request starts the thread; it ends when this is dropped.
#[derive(Default)]
pub(crate) struct Interpreters {
    requests: Option<mpsc::SyncSender<CountRequest>>,
    latest: Latest,
    failed: bool,
}

impl Interpreters {
    /// The counts in the process of a rank; `None` if it does not run CPython or cannot be read.
    pub(crate) fn of(&self, rank: RankId) -> Option<Counts> {
        lock(&self.latest).counts.get(&rank).copied()
    }

    /// Takes the stacks that were named.
    fn take_stacks(&self) -> Vec<(RankId, NamedStack)> {
        std::mem::take(&mut lock(&self.latest).stacks)
    }

    /// Requests a read of these processes unless the thread is still busy, and forgets all others.
    /// Returns the stacks that will not be named.
    pub(crate) fn request(&mut self, request: CountRequest) -> Vec<UnnamedStacks> {
        if self.failed || (request.ranks.is_empty() && self.requests.is_none()) {
            return request.stacks;
        }
        let requests = self.requests.get_or_insert_with(|| {
            let (sender, requests) = mpsc::sync_channel(1);
            let latest = Arc::clone(&self.latest);
            let started = thread::Builder::new().name("counting".into()).spawn(move || count(&requests, &latest));
            if let Err(error) = started {
                warn!(
                    "garbage collections and data loaders are not counted, because no thread can be started: {error}"
                );
                self.failed = true;
            }
            sender
        });
        // A request that is not accepted is repeated at the next turn.
        match requests.try_send(request) {
            Ok(()) => Vec::new(),
            Err(mpsc::TrySendError::Full(request) | mpsc::TrySendError::Disconnected(request)) => request.stacks,
        }
    }
}

fn count(requests: &mpsc::Receiver<CountRequest>, latest: &Latest) {
    let mut counter = Counter::default();
    while let Ok(CountRequest { ranks, search, stacks }) = requests.recv() {
        let pids: Vec<i32> = ranks.iter().map(|(_, pid)| *pid).collect();
        let counts = counter.read(&pids, search, COUNT_DEADLINE);
        let known = ranks.iter().zip(counts).filter_map(|((rank, _), counts)| Some((*rank, counts?)));
        lock(latest).counts = known.collect();
        for (rank, pid, unnamed) in stacks {
            let named = counter.name_stacks(pid, unnamed, COUNT_DEADLINE);
            lock(latest).stacks.extend(named.into_iter().map(|stack| (rank, stack)));
        }
    }
}

fn lock(latest: &Latest) -> MutexGuard<'_, Found> {
    latest.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use xpu_timer_proto::{env::Source, v1::OpStatus};

    use super::*;

    #[test]
    fn a_ring_that_fills_is_looked_at_more_often() {
        let source = Source::new(|_| None, "");
        let mut sampler = Sampler::new(MetricsSettings::new(&source), TimelineSettings::new(&source));
        let file = std::fs::File::from(memfd_create("ring", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(ring::offset::END as u64).unwrap();
        let put = |word: usize, value: u64| {
            std::os::unix::fs::FileExt::write_all_at(&file, &value.to_le_bytes(), word as u64 * 8).unwrap();
        };
        put(header::MAGIC, ring::MAGIC);
        put(header::VERSION, ring::VERSION.into());
        let ring = RingFile::new(file.try_clone().unwrap().into(), 1).unwrap();
        let (job, info) = (JobKey { name: "job".into(), instance: String::new() }, RankInfo::default());
        let view = RankView { id: 1, job: &job, has_ended: false, pid: 0, info: &info, ring: Some(&ring) };
        let mut interval_after = |tickets: usize| {
            for ticket in 0..tickets {
                let slot = ring::offset::OPS / 8 + ticket * ring::op::WORDS;
                put(slot + ring::op::STATUS, OpStatus::Completed as u64);
                put(slot + ring::op::TICKET, ticket as u64 + 1);
            }
            put(header::OPS, tickets as u64);
            sampler.read_all([view].into_iter(), Now::get());
            sampler.peek_interval()
        };
        assert_eq!(interval_after(MANY_NEW - 1), Some(LONG_PEEK));
        assert_eq!(interval_after(2 * MANY_NEW - 1), Some(SHORT_PEEK));
        assert_eq!(interval_after(2 * MANY_NEW), Some(LONG_PEEK));
        sampler.expects_many = true;
        assert_eq!(sampler.peek_interval(), Some(SHORT_PEEK));
    }

    #[test]
    fn batches_do_not_cut_a_group() {
        let slot = |group: u64| {
            let mut words = [0; ring::op::WORDS];
            words[ring::op::GROUP] = group;
            words
        };
        let mut slots: Vec<Slot> = vec![slot(0); 3 * BATCH + 5];
        slots[BATCH - 2..BATCH + 3].fill(slot(7));
        slots[BATCH + 3..BATCH + 5].fill(slot(8));
        let places: Vec<usize> = (0..slots.len()).collect();
        let lengths: Vec<usize> = batches(&places, &slots).map(<[usize]>::len).collect();
        assert_eq!(lengths, [BATCH + 3, BATCH, BATCH, 2]);
        assert_eq!(batches(&[], &slots).count(), 0);
    }
}
