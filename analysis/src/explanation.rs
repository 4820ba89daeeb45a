//! Why the culprits of a finding hold up the others, as ranks, events and operations. The rules
//! build these values, and `wording` renders them in English.
//!
//! All ranks are rank indices.

use xpu_timer_proto::v1::{DataType, Op, Operation};

use crate::{
    graph::{Event, Mutual},
    history::Deviation,
    kernels::FewerLaunches,
    stacks::{GilHolder, ProcessState},
};

/// Why the culprits hold up the others.
#[derive(Debug, Clone)]
pub(crate) enum Explanation {
    /// Something about the process, the host or the device of one rank.
    Host { rank_index: usize, state: HostState },
    /// Ranks that completed a collective and are gone, while others are still inside.
    GoneAfter { gone: Vec<usize>, event: Event },
    /// A rank has a resource for which another rank waits. `inside` is the event in which the
    /// holder waits itself.
    HoldsUp { holder: usize, waiter: usize, inside: Option<Event> },
    /// Ranks that finalize their library where the others are in a collective.
    ShutDownInstead { culprits: Vec<usize>, differ: Differ },
    /// Ranks of a wait cycle that finalize their library, while others wait in other events.
    ShutDownInCycle { culprits: Vec<usize>, others: Vec<Event> },
    /// These ranks wait for resources of each other.
    HoldEachOther(Vec<usize>),
    /// A process that is not a rank, and for which ranks wait.
    Process(Box<ProcessFault>),
    /// A collective.
    Collective(CollectiveFault),
    /// The creation of a communicator.
    Creation(CreationFault),
    /// A wait cycle.
    Cycle(CycleFault),
    /// A send or a receive.
    Transfer(TransferFault),
}

/// The state that holds one rank.
#[derive(Debug, Clone)]
pub(crate) enum HostState {
    /// Its process has ended.
    Ended,
    /// A signal, a debugger or the freezer of its control group has stopped its process.
    Stopped,
    /// It is in uninterruptible sleep in a kernel function, whose name may be empty.
    SleepsUninterruptibly { wchan: String },
    /// It waits for its data loader.
    WaitsForLoader,
    /// A blocked thread holds the GIL.
    DeadlockedOnGil(GilHolder),
    /// It waits for a lock of its process, or for one that processes share.
    WaitsForLock { shared: bool },
    /// It is inside a read, write or sync, or in a call that waits for a file lock.
    StuckInIo { file_lock: bool },
    /// It compiles, by itself or in a child process with this name.
    Compiles { compiler: Option<String> },
    /// It collects Python garbage.
    CollectsGarbage,
    /// It is busy and makes progress: in its Python code, or by the bytes that it reads and writes.
    MakesProgress { in_python: bool },
    /// Its device is far behind its host and makes progress.
    SlowDevice,
    /// An operation does not complete on its device: the recorded one, or an unknown one after
    /// which kernel `last` was launched.
    StuckOnDevice { operation: Option<Box<Operation>>, last: Option<String> },
    /// It is in the teardown of its communicators or its interpreter.
    ShutsDown,
}

/// A process that is not a rank holds up ranks.
#[derive(Debug, Clone)]
pub(crate) struct ProcessFault {
    /// One of the ranks that wait for it.
    pub rank_index: usize,
    /// The processes through which that rank waits, as indices.
    pub before: Vec<usize>,
    /// The process, as an index.
    pub end: usize,
    pub state: ProcessState,
    /// Members of the chain wait for each other.
    pub mutual: Option<Mutual>,
    /// The rank is missing, and this process is not yet a rank.
    pub is_to_come: bool,
    /// The event in which others wait for the rank.
    pub event: Option<Event>,
}

/// How a rank is absent from a collective.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Absence {
    /// Its record does not show it, but all others are inside.
    Guess,
    /// It has launched the collective and does not wait for it, so no library runs it.
    NotWaiting,
    /// It is inside the call of the collective, which has launched nothing on the device yet.
    InCall,
    /// It has not launched the collective.
    NotEntered,
}

/// The fault of a collective.
#[derive(Debug, Clone)]
pub(crate) enum CollectiveFault {
    /// A rank is absent from the event in which its peers wait, if that is known. `busy` if it uses
    /// a CPU all the time.
    Absent { rank_index: usize, event: Option<Event>, absence: Absence, busy: bool },
    /// Ranks have launched a kernel less often than the others.
    FewerLaunches(FewerLaunches),
    /// A rank has called a collective in a group that it has not closed.
    OpenGroup { rank_index: usize, event: Event },
    /// The records of some ranks end in a collective that the others completed.
    StaleRecords { stale: Vec<usize>, completed_by: Vec<usize>, event: Event },
    /// Ranks have started a collective of a host library and do not wait for it as the others do.
    NotWaitedFor { away: Vec<usize>, waiting: Vec<usize>, event: Event },
    /// A rank is at another place than most ranks, which are at one place.
    IsElsewhere { rank_index: usize, most: Vec<usize> },
    /// Few ranks are in a collective, while the others are together at another place.
    AloneIn { few: Vec<usize>, together: Vec<usize>, event: Event },
    /// The call of some ranks returned although the others are still in the collective.
    Skipped { completed_by: Vec<usize>, inside: Vec<usize>, event: Event },
    /// Few ranks are in a collective for which all others ended too early.
    OneTooMany { inside: Vec<usize>, ended: Vec<usize>, event: Event },
    /// The members run different operations.
    Differ(Differ),
    /// Ranks are stuck in other kernels than `most` ranks, which are stuck in one. `most` is `None`
    /// if no group is the largest.
    OtherKernels { odd: Vec<(Event, Vec<usize>)>, most: Option<(Event, Vec<usize>)> },
    /// All known members are in a collective that does not move. `certain` if every member is known
    /// to be inside, with equal arguments.
    Stalled { event: Event, certain: bool },
}

/// The members of a collective run different operations.
#[derive(Debug, Clone)]
pub(crate) struct Differ {
    pub event: Event,
    /// The variants, and the members that run each.
    pub groups: Vec<(OperationVariant, Vec<usize>)>,
    /// Index of the group that is known to be right.
    pub right: Option<usize>,
}

/// The property in which the operations of the members of a collective differ.
#[derive(Debug, Clone)]
pub(crate) enum OperationVariant {
    /// The operation, and its root if it has one.
    Operation { name: String, root: Option<i32> },
    /// The number of elements.
    Elements { op: Op, count: u64 },
    /// The type of the elements.
    Type { op: Op, dtype: DataType },
}

/// The step that a rank has not made while others create a communicator.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MissedStep {
    /// It has not set the key for which the others wait in the store.
    Key,
    /// Its call returned without the others.
    Left,
    /// It has not joined, and it has made no device call at all.
    JoinAndDevice,
    /// It has not joined.
    Join,
}

/// The fault in the creation of a communicator.
#[derive(Debug, Clone)]
pub(crate) enum CreationFault {
    /// A rank is missing. `still_starting` if it has probably only just started.
    Missing { rank_index: usize, missed: MissedStep, still_starting: bool },
    /// All known members are inside. `unnamed` members are unknown.
    AllInside { event: Event, unnamed: u32 },
    /// Few ranks wait in `event` for ranks that are all in the creation of a communicator.
    FewElsewhere { few: Vec<usize>, creating: Vec<usize>, event: Event },
    /// Ranks create it with another number of ranks.
    OtherSize(OtherSize),
    /// Ranks cannot connect to the store at which the others are.
    NoStore { outside: Vec<usize>, inside: Vec<usize> },
    /// Ranks create communicators of one size with different unique ids.
    DifferentIds { size: u32, creations: Vec<Event> },
    /// The creation returned on some ranks, which use the communicator already, without the others.
    CreatedAlone { returned: Vec<usize>, creation: Event, used: Event },
    /// Some ranks are in the creation, and the others wait for them elsewhere. The creating ranks
    /// are the culprits, or the absent ones.
    Split { split: SplitCreation, blames_creating: bool },
}

/// Ranks that create a communicator of `claimed` ranks, while `others` create it with `size` ranks.
#[derive(Debug, Clone)]
pub(crate) struct OtherSize {
    pub culprits: Vec<usize>,
    pub claimed: u32,
    pub others: Vec<usize>,
    pub size: u32,
}

/// Some ranks are in the creation of a communicator, and the others wait for them in `used`.
#[derive(Debug, Clone)]
pub(crate) struct SplitCreation {
    /// Ranks in the creation.
    pub creating: Vec<usize>,
    /// Ranks that have not joined it.
    pub absent: Vec<usize>,
    pub creation: Event,
    pub used: Event,
}

/// The action of the ranks that left their pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PatternBreak {
    /// They left out a collective.
    Collective,
    /// They left out a send or a receive.
    Transfer,
    /// They made a send or a receive that they had never made before.
    NewTransfer,
    /// They made a send or a receive once more, where a collective had always come.
    RepeatedTransfer,
    /// They made a collective of a communicator in which they had never made it before.
    NewCollective,
    /// They exchanged two collectives.
    Order,
    /// They exchanged two operations, at least one of them a send or a receive.
    TransferOrder,
}

/// Why ranks wait for each other in a cycle.
#[derive(Debug, Clone)]
pub(crate) enum CycleFault {
    /// Ranks left the pattern of their operations, shown by one of them. `waited` is an event in
    /// which the others wait.
    LeftPattern { culprits: Vec<usize>, kind: PatternBreak, shown_by: (usize, Deviation), waited: Option<Event> },
    /// Ranks entered the communicators in another order than the ranks that wait in these events.
    OtherOrder { culprits: Vec<usize>, waited: Vec<Event> },
    /// Ranks are in event `own` instead of `left_out`, which other ranks have completed among
    /// themselves.
    LeftOut { culprits: Vec<usize>, own: Event, left_out: Event },
    /// A rank is in event `own`, while others wait for it in several others.
    OutOfStep { rank_index: usize, own: Event, owed: Vec<Event> },
    /// The sends and receives of these ranks wait for each other.
    Transfers { culprits: Vec<usize>, transfers: Vec<Event> },
}

/// A transfer of a wait cycle without a counterpart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenEnd {
    /// The send or receive.
    pub event: Event,
    /// The rank that waits in it.
    pub waiter: usize,
    /// The rank that it waits for.
    pub awaited: usize,
}

/// A property in which the two ends of a pair differ.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Property {
    Size,
    Type,
}

/// Numbers of transfers that the members of a communicator have made in their groups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupCounts {
    /// Index of the communicator.
    pub comm: usize,
    /// Number of groups.
    pub groups: u64,
    /// Transfers of a rank that left one out.
    pub fewer: u64,
    /// Transfers of the others.
    pub most: u64,
}

/// The fault of a send or a receive.
#[derive(Debug, Clone)]
pub(crate) enum TransferFault {
    /// A rank has not made the counterpart of `event`, which is a receive or a send of `waiter`.
    /// `waits_itself` if the culprit itself waits for the waiter.
    NoCounterpart { culprit: usize, waiter: usize, recv: bool, event: Event, waits_itself: bool },
    /// Ranks left out a transfer of a group.
    FewerInGroups { fewer: Vec<usize>, others: Vec<usize>, counts: GroupCounts },
    /// A rank receives from any rank, and no rank can send to it.
    NobodySends { rank_index: usize, event: Event },
    /// A rank is in a transfer, and all other members have launched a collective that it has not.
    InsteadOfCollective { rank_index: usize, event: Event, collective: Event },
    /// The tags of a send and its receive differ. `blamed` is the end that changed, or both.
    TagsDiffer { ends: [(usize, Event); 2], blamed: Vec<usize> },
    /// A send and its receive differ in a property.
    EndsDiffer { ends: Box<[(usize, Operation); 2]>, property: Property, blamed: Vec<usize> },
    /// A rank is at an end of all transfers without a counterpart.
    OtherTransfers { culprit: usize, open: Vec<OpenEnd> },
    /// All members are in the counterparts of each other's transfers, and the data does not move.
    Stalled { event: Event },
}
