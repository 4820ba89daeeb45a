//! The collectives inside a graph. A captured collective is not executed; each launch of the graph
//! executes it once.
//!
//! Captured collectives belong to the capture, then to the graph, then to each instantiation of it.
//! Captures are rare and may take a lock; a launch finds its instantiation without one. Equal lists
//! are stored once and never freed, so that a program that captures the same step repeatedly does
//! not grow.

use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
};

use xpu_timer_proto::{
    ring::{comm, header},
    v1::{DataType, Op, OpKind},
};

use crate::{
    backends::bracket::{self, OpenOperation},
    interpose::hooked::AfterCall,
    runtime::{
        abi::SUCCESS,
        device::device,
        lock_free::atomic::home_slot,
        os::sys,
        recorder::{self, NewOperation, Recorder},
    },
};

/// A captured collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CapturedCollective {
    /// Operation.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation.
    pub reduce: u8,
    /// Elements.
    pub count: u64,
    /// Root or peer.
    pub peer: i32,
    /// Tag of a send or receive.
    pub tag: Option<i32>,
    /// Index in the communicator table.
    pub comm: usize,
    /// Identity of the communicator, to detect a reused index.
    pub communicator: u64,
}

/// Maximum number of captures and of graphs. The oldest are forgotten, because a host may abandon
/// them without a call.
const MAX_REMEMBERED: usize = 256;

/// Maximum number of collectives in all lists together.
const MAX_STORED_COLLECTIVES: usize = 1 << 16;

/// Maximum number of operations that a launch records. For a larger graph they are the last ones.
const MAX_RECORDED: usize = 256;

struct GraphRecords {
    captures: Vec<(u64, Vec<CapturedCollective>)>,
    graphs: Vec<(usize, Vec<CapturedCollective>)>,
    lists: Vec<&'static List>,
    held: usize,
}

static RECORDS: Mutex<GraphRecords> =
    Mutex::new(GraphRecords { captures: Vec::new(), graphs: Vec::new(), lists: Vec::new(), held: 0 });
struct List(Vec<CapturedCollective>);

/// Instantiated graphs with collectives, by handle.
const EXECS: usize = 1024;

static HANDLES: [AtomicUsize; EXECS] = [const { AtomicUsize::new(0) }; EXECS];
static LISTS: [AtomicPtr<List>; EXECS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; EXECS];

/// Number of such graphs. Most processes have none.
static USED: AtomicU64 = AtomicU64::new(0);

/// Locks the records. `None` when another thread holds them for longer than a moment; the loss is
/// counted.
fn records() -> Option<MutexGuard<'static, GraphRecords>> {
    for _ in 0..1000 {
        if let Ok(records) = RECORDS.try_lock() {
            return Some(records);
        }
        sys::relax();
    }
    if let Some(recorder) = recorder::running() {
        recorder.count(header::OVERFLOWS);
    }
    None
}

/// Records collectives that were called on a capturing stream.
pub(crate) fn capture_collectives(stream: usize, collectives: &[CapturedCollective]) {
    let capture = device().map_or(0, |device| device.capture_of(stream));
    if capture == 0 || collectives.is_empty() {
        return;
    }
    let Some(mut records) = records() else { return };
    match records.captures.iter_mut().find(|(id, _)| *id == capture) {
        Some((_, list)) => list.extend(collectives),
        None => remember(&mut records.captures, capture, collectives.to_vec()),
    }
}

fn remember<K: PartialEq>(known: &mut Vec<(K, Vec<CapturedCollective>)>, key: K, list: Vec<CapturedCollective>) {
    known.retain(|(other, _)| *other != key);
    if known.len() == MAX_REMEMBERED {
        known.remove(0);
    }
    if !list.is_empty() {
        known.push((key, list));
    }
}

/// A change of the records, made when the call has succeeded.
pub(crate) enum GraphChange {
    /// A capture becomes the graph whose handle is written to `graph`.
    Captured {
        /// Id of the capture.
        capture: u64,
        /// Where the handle is written.
        graph: usize,
    },
    /// The graph is instantiated.
    Instantiated {
        /// Handle.
        graph: usize,
        /// Where the handle of the instantiation is written.
        exec: usize,
    },
    /// An instantiation is updated from another graph.
    Updated {
        /// Handle.
        exec: usize,
        /// Handle.
        graph: usize,
    },
    /// A graph is cloned.
    Cloned {
        /// Handle.
        from: usize,
        /// Where the handle is written.
        to: usize,
    },
    /// A graph becomes a child of another one.
    Added {
        /// Handle.
        child: usize,
        /// Handle.
        graph: usize,
    },
    /// A graph is destroyed.
    GraphGone(usize),
    /// An instantiation is destroyed.
    ExecGone(usize),
}

/// Called before the end of a capture. Afterwards the stream does not know its id any more.
pub(crate) fn capture_ending(stream: usize, graph: usize) -> GraphChange {
    GraphChange::Captured { capture: device().map_or(0, |device| device.capture_of(stream)), graph }
}

/// A handle that a call has written.
fn handle_at(place: usize) -> usize {
    // SAFETY: null, or the caller's place for a handle, which the call has written.
    unsafe { (place as *const usize).as_ref() }.copied().unwrap_or(0)
}

impl AfterCall for GraphChange {
    fn after(self, _: &'static Recorder, result: i32) {
        if result != SUCCESS {
            return;
        }
        let Some(mut records) = records() else { return };
        let of_graph = |records: &GraphRecords, graph: usize| {
            records.graphs.iter().find(|(known, _)| *known == graph).map_or_else(Vec::new, |(_, list)| list.clone())
        };
        match self {
            GraphChange::Captured { capture, graph } => {
                let at = records.captures.iter().position(|(id, _)| *id == capture && capture != 0);
                let list = at.map_or_else(Vec::new, |at| records.captures.remove(at).1);
                remember(&mut records.graphs, handle_at(graph), list);
            }
            GraphChange::Instantiated { graph, exec } => {
                let list = of_graph(&records, graph);
                set_exec(&mut records, handle_at(exec), list);
            }
            GraphChange::Updated { exec, graph } => {
                let list = of_graph(&records, graph);
                set_exec(&mut records, exec, list);
            }
            GraphChange::Cloned { from, to } => {
                let list = of_graph(&records, from);
                remember(&mut records.graphs, handle_at(to), list);
            }
            GraphChange::Added { child, graph } => {
                let list = [of_graph(&records, graph), of_graph(&records, child)].concat();
                remember(&mut records.graphs, graph, list);
            }
            GraphChange::GraphGone(graph) => remember(&mut records.graphs, graph, Vec::new()),
            GraphChange::ExecGone(exec) => set_exec(&mut records, exec, Vec::new()),
        }
    }
}

fn slots_of(exec: usize) -> impl Iterator<Item = usize> {
    let first = home_slot::<EXECS>(exec as u64);
    (0..EXECS).map(move |step| (first + step) % EXECS)
}

fn set_exec(records: &mut GraphRecords, exec: usize, list: Vec<CapturedCollective>) {
    let known = slots_of(exec)
        .take_while(|slot| HANDLES[*slot].load(Ordering::Relaxed) != 0)
        .find(|slot| HANDLES[*slot].load(Ordering::Relaxed) == exec);
    if list.is_empty() {
        if let Some(slot) = known {
            // The handle stays, so that entries after it are still found. The entry can be reused.
            LISTS[slot].store(std::ptr::null_mut(), Ordering::Release);
        }
        return;
    }
    let Some(list) = records.intern(list) else { return };
    let free = |slot: &usize| LISTS[*slot].load(Ordering::Relaxed).is_null();
    let Some(slot) = known.or_else(|| slots_of(exec).find(free)) else {
        if let Some(recorder) = recorder::running() {
            recorder.count(header::OVERFLOWS);
        }
        return;
    };
    LISTS[slot].store(std::ptr::from_ref(list).cast_mut(), Ordering::Release);
    HANDLES[slot].store(exec, Ordering::Release);
    USED.fetch_add(1, Ordering::Relaxed);
}

impl GraphRecords {
    /// The stored copy of a list.
    fn intern(&mut self, list: Vec<CapturedCollective>) -> Option<&'static List> {
        if let Some(known) = self.lists.iter().find(|known| known.0 == list) {
            return Some(known);
        }
        if self.held + list.len() > MAX_STORED_COLLECTIVES {
            if let Some(recorder) = recorder::running() {
                recorder.count(header::OVERFLOWS);
            }
            return None;
        }
        self.held += list.len();
        let list: &'static List = Box::leak(Box::new(List(list)));
        self.lists.push(list);
        Some(list)
    }
}

/// The collectives of an instantiated graph.
fn collectives_of(exec: usize) -> &'static [CapturedCollective] {
    if USED.load(Ordering::Relaxed) == 0 {
        return &[];
    }
    for slot in slots_of(exec) {
        match HANDLES[slot].load(Ordering::Acquire) {
            0 => return &[],
            handle if handle == exec => {
                // SAFETY: null, or a list that is never freed.
                let list = unsafe { LISTS[slot].load(Ordering::Acquire).as_ref() };
                return list.map_or(&[], |list| &list.0);
            }
            _ => {}
        }
    }
    &[]
}

/// Records a graph launch: an operation for the graph, and one for each collective in it. The
/// launch's events bracket them all, because progress inside a graph cannot be observed.
pub(crate) fn launch(recorder: &'static Recorder, exec: usize, stream: usize) -> Option<OpenOperation> {
    let collectives = collectives_of(exec);
    if bracket::is_captured(stream) {
        capture_collectives(stream, collectives);
        return None;
    }
    let is_bracketed = !recorder.bracketed.is_off();
    let what = NewOperation { stream, function: exec as u64, ..NewOperation::new(OpKind::GraphLaunch, Op::Graph) };
    let leader = if is_bracketed { recorder.begin(&what) } else { None };
    let first_recorded = collectives.len().saturating_sub(MAX_RECORDED);
    let mut last = leader;
    for (number, collective) in collectives.iter().enumerate() {
        let Some(what) = count(recorder, collective, stream) else { continue };
        let (Some(before), true) = (last, number >= first_recorded) else { continue };
        let Some(index) = recorder.begin(&what) else { continue };
        recorder.slots[before].follower.store(index as u32 + 1, Ordering::Relaxed);
        last = Some(index);
    }
    let leader = leader?;
    recorder.hand_over(leader);
    bracket::start(recorder, leader);
    Some(OpenOperation(leader))
}

/// Assigns the next sequence number of its communicator to a collective. `None` when the
/// communicator no longer exists.
fn count(recorder: &'static Recorder, held: &CapturedCollective, stream: usize) -> Option<NewOperation> {
    if recorder.comm_id(held.comm) != held.communicator {
        return None;
    }
    let point_to_point = matches!(held.op, Op::Send | Op::Recv);
    let counter = if point_to_point { comm::POINT_TO_POINT } else { comm::LAUNCHED };
    let seq = recorder.comm_word(held.comm, counter).fetch_add(1, Ordering::Relaxed) + 1;
    if !point_to_point {
        recorder.launched_collective();
    }
    Some(NewOperation {
        dtype: held.dtype,
        reduce: held.reduce,
        comm: Some(held.comm),
        communicator: held.communicator,
        seq,
        count: held.count,
        peer: held.peer,
        tag: held.tag,
        stream,
        ..NewOperation::new(OpKind::Collective, held.op)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::os::descriptor;

    fn held(count: u64) -> CapturedCollective {
        CapturedCollective {
            op: Op::AllReduce,
            dtype: DataType::Float32,
            reduce: 0,
            count,
            peer: -1,
            tag: None,
            comm: 0,
            communicator: 5,
        }
    }

    #[test]
    fn an_instantiation_keeps_the_collectives_of_its_graph() {
        let recorder: &'static Recorder =
            Box::leak(Box::new(Recorder::create(Box::leak(Box::new(descriptor::Descriptor::none()))).unwrap()));
        let (mut graph, mut exec) = (0usize, 0usize);
        RECORDS.lock().unwrap().captures.push((7, vec![held(1), held(2)]));
        graph += 0x100;
        GraphChange::Captured { capture: 7, graph: &raw const graph as usize }.after(recorder, SUCCESS);
        exec += 0x200;
        GraphChange::Instantiated { graph: 0x100, exec: &raw const exec as usize }.after(recorder, SUCCESS);
        GraphChange::GraphGone(0x100).after(recorder, SUCCESS);
        assert_eq!(collectives_of(0x200), [held(1), held(2)]);
        assert_eq!(collectives_of(0x300), []);
        // An equal list is stored once, another list replaces it, and finally there is none.
        let lists = RECORDS.lock().unwrap().lists.len();
        for _ in 0..3 {
            RECORDS.lock().unwrap().graphs.push((0x100, vec![held(1), held(2)]));
            GraphChange::Instantiated { graph: 0x100, exec: &raw const exec as usize }.after(recorder, SUCCESS);
        }
        assert_eq!(RECORDS.lock().unwrap().lists.len(), lists);
        remember(&mut RECORDS.lock().unwrap().graphs, 0x100, vec![held(3)]);
        GraphChange::Updated { exec: 0x200, graph: 0x100 }.after(recorder, SUCCESS);
        assert_eq!(collectives_of(0x200), [held(3)]);
        GraphChange::ExecGone(0x200).after(recorder, 1);
        assert_eq!(collectives_of(0x200), [held(3)], "a call that failed changes nothing");
        GraphChange::ExecGone(0x200).after(recorder, SUCCESS);
        assert_eq!(collectives_of(0x200), []);
    }
}
