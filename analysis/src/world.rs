//! The ranks of a job as the judge sees them: one view for each rank, in ascending order, including
//! missing ranks.

use std::{mem, sync::OnceLock};

use xpu_timer_proto::{
    DecodeError, Message as _, lenient,
    v1::{
        Communicator, Evidence, Failure, FailureKind, FlightRecord, Op, OpKind, OpStatus, Operation, Presence,
        ProcessEvidence, RankEvidence,
    },
};

use crate::{
    facts,
    stacks::{self, GilHolder, Host},
    verdict::Activity,
};

/// Maximum number of absent ranks with an entry of their own: for any job, and for each known rank
/// of a large job.
const MAX_ABSENT: u64 = 1 << 14;
const MAX_ABSENT_PER_RANK: u64 = 64;

/// Whether the absent ranks of a world get entries of their own.
///
/// `WORLD_SIZE` may contain any number. The cost of an incident follows the `known` ranks. If a
/// world is far larger, only its size is kept.
#[must_use]
pub fn names_absent(world_size: u32, known: usize) -> bool {
    let known = u64::try_from(known).unwrap_or(u64::MAX);
    u64::from(world_size).saturating_sub(known) <= MAX_ABSENT.max(known.saturating_mul(MAX_ABSENT_PER_RANK))
}

/// All operations of one rank, encoded. The ranks of a large job have a million operations, and the
/// judge reads those of a few ranks: it decodes them when it does.
#[derive(Debug, Default)]
pub struct EncodedOperations {
    /// A `FlightRecord` with only the operations.
    encoded: Box<[u8]>,
    decoded: OnceLock<Vec<Operation>>,
}

/// Decodes the evidence of ranks, one after another. Keeps its memory for the next rank.
#[derive(Debug, Default)]
pub struct Splitter {
    encoded: Vec<u8>,
    operation: Operation,
    pending: Vec<Operation>,
}

impl Splitter {
    /// Decodes the evidence of a rank, whose flight record then contains only the operations that
    /// are pending, and keeps all operations encoded.
    ///
    /// # Errors
    /// If it is not a valid message.
    pub fn split(&mut self, encoded: &[u8]) -> Result<(RankEvidence, EncodedOperations), DecodeError> {
        self.encoded.clear();
        self.pending.clear();
        let mut evidence = RankEvidence::default();
        lenient::each_field(encoded, |number, field, value| {
            let Some(record) = value.filter(|_| number == RankEvidence::FLIGHT_FIELD) else {
                return evidence.merge(field);
            };
            let flight = evidence.flight.get_or_insert_default();
            lenient::each_field(record, |number, field, value| {
                let Some(operation) = value.filter(|_| number == FlightRecord::OPERATIONS_FIELD) else {
                    return flight.merge(field);
                };
                self.encoded.extend_from_slice(field);
                decode_again(&mut self.operation, operation)?;
                if self.operation.status() == OpStatus::Pending {
                    self.pending.push(mem::take(&mut self.operation));
                }
                Ok(())
            })
        })?;
        if let Some(flight) = &mut evidence.flight {
            flight.operations = self.pending.drain(..).collect();
            // A list of one entry has room for four. A large job has 100,000 of each.
            flight.communicators.shrink_to_fit();
            flight.streams.shrink_to_fit();
            flight.kernels.shrink_to_fit();
            flight.coverage.shrink_to_fit();
        }
        Ok((evidence, EncodedOperations { encoded: self.encoded.as_slice().into(), decoded: OnceLock::new() }))
    }
}

/// Why a search through operations ends early.
enum Stop {
    Found,
    Invalid,
}

impl From<DecodeError> for Stop {
    fn from(_: DecodeError) -> Self {
        Stop::Invalid
    }
}

impl EncodedOperations {
    /// Puts all operations back into the evidence.
    pub fn restore(&self, evidence: &mut RankEvidence) {
        if let Some(flight) = evidence.flight.as_mut().filter(|_| !self.encoded.is_empty()) {
            flight.operations.clone_from(self.decoded());
        }
    }

    fn decoded(&self) -> &Vec<Operation> {
        self.decoded.get_or_init(|| {
            let mut all = Vec::new();
            self.any(|operation| {
                all.push(mem::take(operation));
                false
            });
            all
        })
    }

    /// Whether a condition holds for any operation. Decodes one after another, and keeps none,
    /// except for those that the condition takes.
    fn any(&self, mut is: impl FnMut(&mut Operation) -> bool) -> bool {
        let mut operation = Operation::default();
        let search = lenient::each_part(&self.encoded, |_, encoded| {
            decode_again(&mut operation, encoded)?;
            if is(&mut operation) { Err(Stop::Found) } else { Ok(()) }
        });
        matches!(search, Err(Stop::Found))
    }
}

/// Decodes into a message whose memory is used again. The ranks of a large job have a million
/// operations.
fn decode_again(operation: &mut Operation, encoded: &[u8]) -> Result<(), DecodeError> {
    operation.clear();
    operation.merge(encoded)
}

/// One rank and the evidence about it.
#[derive(Debug)]
pub(crate) struct RankView<'a> {
    /// Rank in the job.
    pub rank: u32,
    /// Whether its process exists. `Unspecified` means that the rank is not visible from here, for
    /// example because it is on another node.
    pub presence: Presence,
    /// Everything collected about it. `None` for a missing rank.
    pub evidence: Option<&'a RankEvidence>,
    /// Its flight record. If its operations are encoded, it contains only the pending ones.
    pub flight: Option<&'a FlightRecord>,
    /// All its operations, if they are encoded.
    encoded: Option<&'a EncodedOperations>,
    /// Its process and main thread.
    pub host: Host,
}

impl<'a> RankView<'a> {
    fn of(evidence: &'a RankEvidence, encoded: Option<&'a EncodedOperations>) -> Self {
        let dump = evidence.dump.as_ref();
        let presence = match evidence.presence() {
            Presence::Unspecified if dump.is_some() || evidence.flight.is_some() => Presence::Present,
            presence => presence,
        };
        RankView {
            rank: evidence.rank,
            presence,
            evidence: Some(evidence),
            flight: facts::flight_of(evidence),
            encoded: encoded.filter(|operations| evidence.flight.is_some() && !operations.encoded.is_empty()),
            host: facts::host(evidence),
        }
    }

    fn missing(rank: u32) -> Self {
        RankView {
            rank,
            presence: Presence::Missing,
            evidence: None,
            flight: None,
            encoded: None,
            host: Host::default(),
        }
    }

    /// Its process is gone.
    pub(crate) fn dead(&self) -> bool {
        matches!(self.presence, Presence::Dead | Presence::Left) || self.host.gone()
    }

    /// Nothing at all is known about it.
    pub(crate) fn unseen(&self) -> bool {
        matches!(self.presence, Presence::Missing | Presence::Unspecified)
    }

    /// How its process ended.
    pub(crate) fn exit(&self) -> Exit<'a> {
        Exit::of(self.evidence.map_or("", |evidence| evidence.exit.as_str()))
    }

    /// Exceptions and signals of its process.
    pub(crate) fn failures(&self) -> &'a [Failure] {
        self.evidence.map_or(&[], |evidence| &evidence.failures)
    }

    /// Why its process ended, if that failed: the fatal signal, else the exception that was raised
    /// last, else its last words.
    pub(crate) fn reason(&self) -> Option<&'a Failure> {
        let is = |kind: FailureKind| {
            self.failures().iter().find(|failure| failure.kind() == kind && !failure.ignored && !is_of_thread(failure))
        };
        match self.exit() {
            Exit::Signal(_) => is(FailureKind::Signal),
            exit if exit.failed() || exit == Exit::Code(INTERRUPTED) => {
                is(FailureKind::LastLine).or_else(|| is(FailureKind::Exception))
            }
            _ => None,
        }
    }

    /// Its process cannot run, whatever its stacks show.
    pub(crate) fn halted(&self) -> bool {
        self.dead() || self.host.halted()
    }

    /// Its main thread uses a CPU in the host code of NCCL.
    pub(crate) fn busy_in_nccl(&self) -> bool {
        self.host.observed.activity == Activity::Running && stacks::is_busy_in_nccl(&self.host.observed.witness)
    }

    /// Operations that have neither completed nor failed, oldest first.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &'a Operation> + use<'a> {
        self.listed().iter().filter(|operation| operation.status() == OpStatus::Pending)
    }

    /// The operations of its flight record.
    fn listed(&self) -> &'a [Operation] {
        self.flight.map_or(&[], |flight| &flight.operations)
    }

    /// All recorded operations, oldest first. A search through all ranks of a job uses
    /// [`RankView::any_operation`] or [`RankView::newest_operation`].
    pub(crate) fn operations(&self) -> impl Iterator<Item = &'a Operation> + use<'a> {
        self.encoded.map_or(self.listed(), |encoded| encoded.decoded()).iter()
    }

    /// Whether a condition holds for any recorded operation. Encoded operations stay encoded.
    pub(crate) fn any_operation(&self, mut is: impl FnMut(&Operation) -> bool) -> bool {
        match self.encoded {
            Some(encoded) => encoded.any(|operation| is(operation)),
            None => self.listed().iter().any(is),
        }
    }

    /// The newest operation for which a condition holds: the newest pending one, if there is one.
    /// Decodes the operations only if one of them is it.
    pub(crate) fn newest_operation(&self, is: impl Fn(&Operation) -> bool) -> Option<&'a Operation> {
        let newest = |all: &'a [Operation]| all.iter().rev().find(|operation| is(operation));
        match self.encoded {
            Some(encoded) => newest(self.listed())
                .or_else(|| encoded.any(|operation| is(operation)).then(|| newest(encoded.decoded()))?),
            None => newest(self.listed()),
        }
    }

    /// The name of its node, if known.
    pub(crate) fn node(&self) -> Option<&'a str> {
        let node = self.evidence.map(|evidence| evidence.node.as_str()).filter(|node| !node.is_empty());
        node.or_else(|| self.flight?.rank.as_ref().map(|info| info.node.as_str()).filter(|node| !node.is_empty()))
    }

    /// Its process id on its node: as the collector sees it, else as its record contains it.
    pub(crate) fn pid(&self) -> Option<i32> {
        Some(self.host.pid).filter(|pid| *pid > 0).or_else(|| Some(self.flight?.rank.as_ref()?.pid))
    }

    /// The watcher has been silent for so long that the device state in the record is stale.
    pub(crate) fn watcher_stale(&self) -> bool {
        const STALE_NS: u64 = 2_000_000_000;
        self.flight.is_some_and(|flight| {
            flight.health.as_ref().is_some_and(|health| {
                health.heartbeat_ns != 0 && flight.read_ns.saturating_sub(health.heartbeat_ns) > STALE_NS
            })
        })
    }

    /// Its record reports losses.
    pub(crate) fn lossy(&self) -> bool {
        let health = self.flight.and_then(|flight| flight.health.as_ref());
        health.is_some_and(|health| health.dropped > 0 || health.overflows > 0)
    }

    /// Its record is complete since the beginning: nothing was lost, overwritten or left out.
    pub(crate) fn has_full_history(&self) -> bool {
        let last = self.operations().map(|operation| operation.ticket).max();
        !self.lossy() && last.is_none_or(|last| self.operations().count() as u64 == last.saturating_add(1))
    }

    /// It has used a device, by its record.
    pub(crate) fn has_device(&self) -> bool {
        self.flight.is_some_and(|flight| !flight.streams.is_empty())
            || self.pending().any(|operation| operation.stream != 0)
            || self.any_operation(|operation| operation.stream != 0)
    }

    /// A collective that the rank polls for completion: each poll is an entry of its own in the
    /// record, with an end of its own, and the communicator has not completed the collective.
    pub(crate) fn polled_collective(&self, communicator: &Communicator) -> Option<&'a Operation> {
        let next = communicator.completed + 1;
        let asks = |operation: &Operation| {
            is_collective(operation) && operation.communicator == communicator.id && operation.seq == next
        };
        let mut first = None;
        let asks_again =
            |operation: &Operation| asks(operation) && *first.get_or_insert(operation.ticket) != operation.ticket;
        let is_polled = communicator.launched >= next && self.any_operation(asks_again);
        is_polled.then(|| self.operations().find(|operation| asks(operation)))?
    }

    /// Age of its oldest pending operation.
    pub(crate) fn oldest_pending_ns(&self) -> u64 {
        self.pending().map(|operation| self.age_ns(operation.entered_ns)).max().unwrap_or(0)
    }

    /// Nanoseconds from a time to the reading of its record.
    pub(crate) fn age_ns(&self, since_ns: u64) -> u64 {
        self.flight.map_or(0, |flight| flight.read_ns).saturating_sub(since_ns)
    }
}

/// The exit code by which a shell reports SIGINT.
const INTERRUPTED: i32 = 130;

/// Whether an exception ended another thread or process, and not the one that is named.
fn is_of_thread(failure: &Failure) -> bool {
    failure.kind() == FailureKind::Exception && !failure.thread.is_empty()
}

/// How a process ended, parsed from the text that the collector writes: `exit code 1`, `killed by
/// SIGSEGV (core dumped)`. No other code parses that text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit<'a> {
    /// Unknown.
    Unknown,
    /// It exited by itself, with this code.
    Code(i32),
    /// This signal ended it: `SIGKILL`, `signal 40`.
    Signal(&'a str),
}

impl<'a> Exit<'a> {
    /// Parses the text. Returns [`Exit::Unknown`] if the text does not say how the process ended.
    #[must_use]
    pub fn of(text: &'a str) -> Self {
        // The rest says when: `exit code 3, before its first device call`.
        let text = text.split(", ").next().unwrap_or_default();
        if let Some(code) = text.strip_prefix("exit code ") {
            return code.parse().map_or(Exit::Unknown, Exit::Code);
        }
        let signal = text.strip_prefix("killed by ");
        signal.map_or(Exit::Unknown, |signal| Exit::Signal(signal.split(" (").next().unwrap_or(signal)))
    }

    /// The process exited with success.
    #[must_use]
    pub fn succeeded(self) -> bool {
        self == Exit::Code(0)
    }

    /// The process was asked to end: by a signal that asks for it, or with the code by which a
    /// shell reports such a signal.
    #[must_use]
    pub fn was_requested(self) -> bool {
        matches!(self, Exit::Code(143) | Exit::Signal("SIGTERM" | "SIGINT" | "SIGHUP"))
    }

    /// The process exited with an error of its own.
    #[must_use]
    pub fn failed(self) -> bool {
        matches!(self, Exit::Code(_)) && !self.succeeded() && !self.was_requested()
    }
}

/// Whether an operation is a collective, which counts in the sequence of its communicator.
pub(crate) fn is_collective(operation: &Operation) -> bool {
    operation.kind() == OpKind::Collective && operation.communicator != 0 && !is_p2p(operation)
}

/// Whether an operation is a send or a receive.
pub(crate) fn is_p2p(operation: &Operation) -> bool {
    operation.kind() == OpKind::Collective && matches!(operation.op(), Op::Send | Op::Recv)
}

/// Whether an operation is a host call that ends only when all ranks of a new communicator have
/// made it.
pub(crate) fn is_init(operation: &Operation) -> bool {
    operation.kind() == OpKind::HostCall && matches!(operation.op(), Op::CommInit | Op::CommSplit)
}

/// A process that is not a rank.
#[derive(Debug)]
pub(crate) struct ProcessView {
    /// Its node.
    pub node: String,
    /// Its process and main thread.
    pub host: Host,
    /// The thread that holds its GIL, if that is deadlocked.
    pub gil_holder: Option<GilHolder>,
    /// The activity of its other threads; see [`stacks::other_thread`].
    pub other_thread: Option<String>,
    /// If it was killed or failed: the pids of the processes with which it shared memory.
    pub shared_memory_with: Vec<i32>,
}

impl ProcessView {
    fn of(evidence: &ProcessEvidence) -> Self {
        let host = facts::host_of_process(evidence);
        ProcessView {
            node: evidence.node.clone(),
            gil_holder: facts::gil_holder_of(evidence.dump.as_ref(), evidence.host.as_ref()),
            other_thread: facts::other_thread_of(evidence),
            shared_memory_with: evidence.shared_memory_with.clone(),
            host,
        }
    }
}

/// All ranks of a job, ascending.
#[derive(Debug)]
pub(crate) struct World<'a> {
    /// One view for each rank. A rank index is an index into this list.
    pub views: Vec<RankView<'a>>,
    /// The processes that are not ranks, and that ranks wait for.
    pub processes: Vec<ProcessView>,
    /// Number of ranks of the job: from the evidence, or more if a higher rank was seen.
    pub size: u32,
}

impl<'a> World<'a> {
    /// Reads the evidence, with the operations of each rank if they are encoded. Entries out of
    /// order are sorted. If a rank has several entries, the first counts.
    pub(crate) fn of(evidence: &'a Evidence, operations: &'a [EncodedOperations]) -> Self {
        let views = evidence.ranks.iter().enumerate();
        let mut views: Vec<RankView> = views.map(|(at, rank)| RankView::of(rank, operations.get(at))).collect();
        views.sort_by_key(|view| view.rank);
        views.dedup_by_key(|view| view.rank);
        let highest = views.last().map_or(0, |view| view.rank.saturating_add(1));
        let size = evidence.world_size.max(highest);
        if views.len() < evidence.world_size as usize && names_absent(evidence.world_size, views.len()) {
            let known = mem::take(&mut views);
            let mut known = known.into_iter().peekable();
            for rank in 0..evidence.world_size {
                views.push(known.next_if(|view| view.rank == rank).unwrap_or_else(|| RankView::missing(rank)));
            }
            views.extend(known);
        }
        let processes = evidence.processes.iter().map(ProcessView::of).collect();
        World { views, processes, size }
    }

    /// The ranks behind some rank indices, ascending.
    pub(crate) fn ranks(&self, views: impl IntoIterator<Item = usize>) -> Vec<u32> {
        let mut ranks: Vec<u32> = views.into_iter().map(|rank_index| self.views[rank_index].rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_job_follows_its_ranks_and_not_the_claimed_world_size() {
        let evidence = |world_size: u32, known: u32| Evidence {
            world_size,
            ranks: (0..known).map(|rank| RankEvidence { rank, ..Default::default() }).collect(),
            ..Default::default()
        };
        for (world_size, known, views) in [
            (4, 2, 4),
            (16_000, 8, 16_000),
            (u32::MAX, 2, 2),
            (4_000_000_000, 0, 0),
            (1 << 20, 2, 2),
            (100_000, 2_000, 100_000),
        ] {
            let evidence = evidence(world_size, known);
            let world = World::of(&evidence, &[]);
            assert_eq!((world.views.len(), world.size), (views, world_size), "{known} ranks of {world_size}");
        }
        // The rank number says nothing about the number of ranks.
        let ranks = vec![RankEvidence { rank: i32::MAX as u32, ..Default::default() }];
        let evidence = Evidence { world_size: 1 << 31, ranks, ..Default::default() };
        assert_eq!(World::of(&evidence, &[]).views.len(), 1);
        assert!(crate::judge(&evidence).to_text().len() < 10_000);
    }

    #[test]
    fn the_exit_text_of_the_collector_is_parsed() {
        assert_eq!(Exit::of(""), Exit::Unknown);
        assert_eq!(Exit::of("exit code many"), Exit::Unknown);
        assert_eq!(Exit::of("exit code 3"), Exit::Code(3));
        assert_eq!(Exit::of("exit code 3, before its first device call"), Exit::Code(3));
        assert_eq!(Exit::of("before its first device call"), Exit::Unknown);
        assert_eq!(Exit::of("killed by SIGSEGV (core dumped)"), Exit::Signal("SIGSEGV"));
        assert_eq!(Exit::of("killed by signal 40"), Exit::Signal("signal 40"));
    }

    #[test]
    fn success_request_and_error_are_distinguished() {
        let parsed = |text: &str| {
            let exit = Exit::of(text);
            (exit.succeeded(), exit.was_requested(), exit.failed())
        };
        assert_eq!(parsed("exit code 0"), (true, false, false));
        assert_eq!(parsed("exit code 143"), (false, true, false));
        assert_eq!(parsed("killed by SIGTERM"), (false, true, false));
        assert_eq!(parsed("exit code 1"), (false, false, true));
        assert_eq!(parsed("killed by SIGKILL"), (false, false, false));
        assert_eq!(parsed(""), (false, false, false));
    }
}
