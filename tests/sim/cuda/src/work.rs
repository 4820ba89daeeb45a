//! The kinds of work in a stream, which run on its worker thread.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sim_abi::{
    fault::{self, Kind},
    ffi,
};

use crate::{
    event::{Event, Marker},
    memory,
    module::{Behaviour, Function},
    process,
    queue::Queue,
};

/// A host function with its user data (an address of the caller).
#[derive(Clone, Copy)]
pub enum HostCall {
    /// cuLaunchHostFunc.
    Plain(extern "C" fn(usize), usize),
    /// cuStreamAddCallback, with the stream's handle.
    Callback(extern "C" fn(usize, i32, usize), usize, usize),
}

/// A piece of work, as it was submitted or captured.
#[derive(Clone)]
pub enum Work {
    /// A kernel and its copied arguments.
    Kernel { function: Arc<Function>, arguments: Option<Arc<[u8]>>, fault: Option<Kind> },
    /// A host call.
    Host(HostCall),
    /// A copy within this process's memory.
    Copy { to: usize, from: usize, count: usize },
    /// A copy from bytes that were staged at submission.
    Write { to: usize, bytes: Arc<[u8]> },
    /// Fills `count` elements of `width` bytes.
    Fill { to: usize, value: u32, width: usize, count: usize },
    /// cuMemFreeAsync.
    Free(usize),
    /// An event's record.
    Record(Arc<Marker>),
    /// A record of an event inside a graph: every launch makes a new record.
    RecordAtLaunch(Arc<Event>),
    /// A wait for another stream's record.
    Await(Arc<Marker>),
    /// A wait for all work that another stream has so far.
    AwaitQueue(Arc<Queue>, u64),
    /// A launched graph.
    Graph(Arc<[Work]>),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Kernel { function, .. } => write!(f, "kernel {}", function.name.to_string_lossy()),
            Work::Graph(nodes) => write!(f, "graph of {} nodes", nodes.len()),
            Work::Copy { count, .. } => write!(f, "copy of {count} bytes"),
            _ => write!(f, "work"),
        }
    }
}

impl Work {
    /// This work for a launch now: kernels are counted, and the events of a graph get a new record.
    pub fn launched(&self) -> Work {
        match self {
            Work::Kernel { function, arguments, .. } => {
                Work::Kernel { function: function.clone(), arguments: arguments.clone(), fault: counted(function) }
            }
            Work::RecordAtLaunch(event) => Work::Record(event.renew()),
            Work::Graph(nodes) => Work::Graph(nodes.iter().map(Work::launched).collect()),
            other => other.clone(),
        }
    }

    /// Runs it on the worker of `queue`.
    pub fn run(self, queue: &Queue) {
        match self {
            Work::RecordAtLaunch(_) => {}
            Work::Kernel { function, arguments, fault } => match function.behaviour {
                Behaviour::Host(run) => {
                    let arguments = arguments.as_deref().unwrap_or_default();
                    run(arguments.as_ptr() as usize, arguments.len());
                }
                Behaviour::Lasts(_) if fault == Some(Kind::StuckKernel) => queue.sleep(None),
                Behaviour::Lasts(_) if fault == Some(Kind::Lost) => process::lose(),
                Behaviour::Lasts(time) => queue.sleep(Some(time + slower())),
            },
            Work::Host(HostCall::Plain(function, data)) => function(data),
            Work::Host(HostCall::Callback(function, stream, data)) => function(stream, 0, data),
            Work::Copy { to, from, count } => ffi::copy(to, from, count),
            Work::Write { to, bytes } => ffi::copy(to, bytes.as_ptr() as usize, bytes.len()),
            Work::Fill { to, value, width, count } => ffi::fill(to, value, width, count),
            Work::Free(address) => drop(memory::free(address)),
            Work::Record(marker) => marker.complete(),
            Work::Await(marker) => marker.wait(),
            Work::AwaitQueue(other, position) => other.wait(position),
            Work::Graph(nodes) => nodes.iter().for_each(|node| node.clone().run(queue)),
        }
    }
}

/// Counts a launch, and returns its fault, if any. NCCL's kernels do not count.
fn counted(function: &Function) -> Option<Kind> {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    if !matches!(function.behaviour, Behaviour::Lasts(_)) {
        return None;
    }
    let number = LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1;
    [Kind::StuckKernel, Kind::Lost].into_iter().find(|kind| fault::faults(false).at(*kind, number))
}

fn slower() -> Duration {
    Duration::from_millis(fault::faults(false).value(Kind::Slow).unwrap_or(0))
}
