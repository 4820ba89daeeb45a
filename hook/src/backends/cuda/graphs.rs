//! The collectives that a graph holds. Captured, they do not happen; every launch of the graph is one of each of them.
//!
//! What is captured is kept by the capture, then by the graph, then by every instantiation of it. Captures are rare and may take a
//! lock; a launch looks its instantiation up without one. Equal lists are kept once and for ever, so that a program which captures
//! the same step again and again does not grow.

use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
};

use xpu_timer_proto::{
    ring::{comm, header},
    v1::{DataType, Op, OpKind},
};

use crate::{
    backends::bracket::{self, Open},
    interpose::hooked::After,
    runtime::{
        abi::SUCCESS,
        device::device,
        lifecycle::config::Bracket,
        lock_free::hash_slot::place_of,
        os::sys,
        recorder::{self, Begin, Recorder},
    },
};

/// A captured collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
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
    /// As an operation has it.
    pub tag: Option<i32>,
    /// Index in the communicator table.
    pub comm: usize,
    /// Its identity, by which a reused index is noticed.
    pub communicator: u64,
}

/// Captures and graphs that are remembered; the oldest are forgotten, because a host may abandon them without a word.
const MOST_REMEMBERED: usize = 256;

/// Collectives in all lists together.
const MOST_HELD: usize = 1 << 16;

/// Operations that one launch notes; of a graph with more, the last ones.
const MOST_NOTED: usize = 256;

struct Books {
    captures: Vec<(u64, Vec<Held>)>,
    graphs: Vec<(usize, Vec<Held>)>,
    lists: Vec<&'static List>,
    held: usize,
}

static BOOKS: Mutex<Books> = Mutex::new(Books { captures: Vec::new(), graphs: Vec::new(), lists: Vec::new(), held: 0 });
struct List(Vec<Held>);

/// Instantiated graphs that hold collectives, by handle.
const EXECS: usize = 1024;

static HANDLES: [AtomicUsize; EXECS] = [const { AtomicUsize::new(0) }; EXECS];
static LISTS: [AtomicPtr<List>; EXECS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; EXECS];

/// How many there are; most processes have none.
static USED: AtomicU64 = AtomicU64::new(0);

/// The books, unless another thread has them for longer than a moment; what is lost then is counted.
fn books() -> Option<MutexGuard<'static, Books>> {
    for _ in 0..1000 {
        if let Ok(books) = BOOKS.try_lock() {
            return Some(books);
        }
        sys::relax();
    }
    if let Some(recorder) = recorder::running() {
        recorder.count(header::OVERFLOWS);
    }
    None
}

/// A collective was called on a stream that is being captured.
pub fn hold(stream: usize, held: &[Held]) {
    let capture = device().map_or(0, |device| device.capture_of(stream));
    if capture == 0 || held.is_empty() {
        return;
    }
    let Some(mut books) = books() else { return };
    match books.captures.iter_mut().find(|(id, _)| *id == capture) {
        Some((_, list)) => list.extend(held),
        None => remember(&mut books.captures, capture, held.to_vec()),
    }
}

fn remember<K: PartialEq>(known: &mut Vec<(K, Vec<Held>)>, key: K, list: Vec<Held>) {
    known.retain(|(other, _)| *other != key);
    if known.len() == MOST_REMEMBERED {
        known.remove(0);
    }
    if !list.is_empty() {
        known.push((key, list));
    }
}

/// What a call does to the books when it has succeeded.
pub enum Change {
    /// A capture becomes the graph at this place.
    Captured {
        /// Its id.
        capture: u64,
        /// Where the handle is written.
        graph: usize,
    },
    /// The graph is instantiated at this place.
    Instantiated {
        /// Handle.
        graph: usize,
        /// Where the handle of the instantiation is written.
        exec: usize,
    },
    /// An instantiation becomes that of another graph.
    Updated {
        /// Handle.
        exec: usize,
        /// Handle.
        graph: usize,
    },
    /// A graph is copied to this place.
    Cloned {
        /// Handle.
        from: usize,
        /// Where the handle is written.
        to: usize,
    },
    /// A graph becomes part of another.
    Added {
        /// Handle.
        child: usize,
        /// Handle.
        graph: usize,
    },
    /// A graph is gone.
    GraphGone(usize),
    /// An instantiation is gone.
    ExecGone(usize),
}

/// Before the end of a capture, which its stream does not know afterwards.
pub fn ending(stream: usize, graph: usize) -> Change {
    Change::Captured { capture: device().map_or(0, |device| device.capture_of(stream)), graph }
}

/// A handle that a call has written.
fn handle_at(place: usize) -> usize {
    // SAFETY: null, or the caller's place for a handle, which the call has just written.
    unsafe { (place as *const usize).as_ref() }.copied().unwrap_or(0)
}

impl After for Change {
    fn after(self, _: &'static Recorder, result: i32) {
        if result != SUCCESS {
            return;
        }
        let Some(mut books) = books() else { return };
        let of_graph = |books: &Books, graph: usize| {
            books.graphs.iter().find(|(known, _)| *known == graph).map_or_else(Vec::new, |(_, list)| list.clone())
        };
        match self {
            Change::Captured { capture, graph } => {
                let at = books.captures.iter().position(|(id, _)| *id == capture && capture != 0);
                let list = at.map_or_else(Vec::new, |at| books.captures.remove(at).1);
                remember(&mut books.graphs, handle_at(graph), list);
            }
            Change::Instantiated { graph, exec } => {
                let list = of_graph(&books, graph);
                set_exec(&mut books, handle_at(exec), list);
            }
            Change::Updated { exec, graph } => {
                let list = of_graph(&books, graph);
                set_exec(&mut books, exec, list);
            }
            Change::Cloned { from, to } => {
                let list = of_graph(&books, from);
                remember(&mut books.graphs, handle_at(to), list);
            }
            Change::Added { child, graph } => {
                let list = [of_graph(&books, graph), of_graph(&books, child)].concat();
                remember(&mut books.graphs, graph, list);
            }
            Change::GraphGone(graph) => remember(&mut books.graphs, graph, Vec::new()),
            Change::ExecGone(exec) => set_exec(&mut books, exec, Vec::new()),
        }
    }
}

fn slots_of(exec: usize) -> impl Iterator<Item = usize> {
    let first = place_of::<EXECS>(exec as u64);
    (0..EXECS).map(move |step| (first + step) % EXECS)
}

fn set_exec(books: &mut Books, exec: usize, list: Vec<Held>) {
    let known = slots_of(exec)
        .take_while(|slot| HANDLES[*slot].load(Ordering::Relaxed) != 0)
        .find(|slot| HANDLES[*slot].load(Ordering::Relaxed) == exec);
    if list.is_empty() {
        if let Some(slot) = known {
            // Its handle stays, so that the ones behind it are still found; the place is used again.
            LISTS[slot].store(std::ptr::null_mut(), Ordering::Release);
        }
        return;
    }
    let Some(list) = books.keep(list) else { return };
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

impl Books {
    /// The list as it is kept for ever.
    fn keep(&mut self, list: Vec<Held>) -> Option<&'static List> {
        if let Some(known) = self.lists.iter().find(|known| known.0 == list) {
            return Some(known);
        }
        if self.held + list.len() > MOST_HELD {
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

/// What an instantiated graph holds.
fn of_exec(exec: usize) -> &'static [Held] {
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

/// The launch of a graph: one operation for it, and one for each collective in it. The events of the launch bracket them all,
/// because what happens inside a graph cannot be told from outside.
pub fn launch(recorder: &'static Recorder, exec: usize, stream: usize) -> Option<Open> {
    let held = of_exec(exec);
    if bracket::is_captured(stream) {
        hold(stream, held);
        return None;
    }
    let is_bracketed = recorder.bracket.load(Ordering::Relaxed) != Bracket::None as u32;
    let what = Begin { stream, function: exec as u64, ..Begin::new(OpKind::GraphLaunch, Op::Graph) };
    let leader = if is_bracketed { recorder.begin(&what) } else { None };
    let noted_from = held.len().saturating_sub(MOST_NOTED);
    let mut last = leader;
    for (number, held) in held.iter().enumerate() {
        let Some(what) = count(recorder, held, stream) else { continue };
        let (Some(before), true) = (last, number >= noted_from) else { continue };
        let Some(index) = recorder.begin(&what) else { continue };
        recorder.slots[before].follower.store(index as u32 + 1, Ordering::Relaxed);
        last = Some(index);
    }
    let leader = leader?;
    recorder.hand_over(leader);
    bracket::start(recorder, leader);
    Some(Open(leader))
}

/// Gives a collective its number in its communicator. `None` when that is gone.
fn count(recorder: &'static Recorder, held: &Held, stream: usize) -> Option<Begin> {
    if recorder.comm_id(held.comm) != held.communicator {
        return None;
    }
    let point_to_point = matches!(held.op, Op::Send | Op::Recv);
    let counter = if point_to_point { comm::POINT_TO_POINT } else { comm::LAUNCHED };
    let seq = recorder.comm_word(held.comm, counter).fetch_add(1, Ordering::Relaxed) + 1;
    if !point_to_point {
        recorder.launched_collective();
    }
    Some(Begin {
        dtype: held.dtype,
        reduce: held.reduce,
        comm: Some(held.comm),
        communicator: held.communicator,
        seq,
        count: held.count,
        peer: held.peer,
        tag: held.tag,
        stream,
        ..Begin::new(OpKind::Collective, held.op)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::os::descriptor;

    fn held(count: u64) -> Held {
        Held {
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
    fn an_instantiation_keeps_what_its_graph_held() {
        let recorder: &'static Recorder =
            Box::leak(Box::new(Recorder::create(Box::leak(Box::new(descriptor::Descriptor::none()))).unwrap()));
        let (mut graph, mut exec) = (0usize, 0usize);
        BOOKS.lock().unwrap().captures.push((7, vec![held(1), held(2)]));
        graph += 0x100;
        Change::Captured { capture: 7, graph: &raw const graph as usize }.after(recorder, SUCCESS);
        exec += 0x200;
        Change::Instantiated { graph: 0x100, exec: &raw const exec as usize }.after(recorder, SUCCESS);
        Change::GraphGone(0x100).after(recorder, SUCCESS);
        assert_eq!(of_exec(0x200), [held(1), held(2)]);
        assert_eq!(of_exec(0x300), []);
        // The same again is the same list; another one replaces it; at the end there is none.
        let lists = BOOKS.lock().unwrap().lists.len();
        for _ in 0..3 {
            BOOKS.lock().unwrap().graphs.push((0x100, vec![held(1), held(2)]));
            Change::Instantiated { graph: 0x100, exec: &raw const exec as usize }.after(recorder, SUCCESS);
        }
        assert_eq!(BOOKS.lock().unwrap().lists.len(), lists);
        remember(&mut BOOKS.lock().unwrap().graphs, 0x100, vec![held(3)]);
        Change::Updated { exec: 0x200, graph: 0x100 }.after(recorder, SUCCESS);
        assert_eq!(of_exec(0x200), [held(3)]);
        Change::ExecGone(0x200).after(recorder, 1);
        assert_eq!(of_exec(0x200), [held(3)], "a call that failed changes nothing");
        Change::ExecGone(0x200).after(recorder, SUCCESS);
        assert_eq!(of_exec(0x200), []);
    }
}
