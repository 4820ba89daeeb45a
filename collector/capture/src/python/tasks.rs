//! Coroutines that are suspended: those of an event loop that waits, and all pending tasks of a
//! loop, of asyncio and of trio. The thread of a loop has no frame of a task that waits: its
//! coroutines wait for each other. Like frames, they change only while the thread runs. Also finds
//! threads that nobody can wake.

use std::collections::{HashMap, HashSet};

use xpu_timer_proto::{FUTURE, MAX_SUSPENDED, WAKEUP, server::PySpyFrame};

use crate::{cpython::Layout, memory::Snapshot};

use super::{
    builtins::{MIN_ADDRESS, attributes, class_name, item, items, members, read_integer, string},
    code::CodeCache,
    frames::{FrameWords, InterpreterFrame},
    threads::ThreadState,
};

/// Maximum number of coroutines that wait for each other.
const MAX_AWAITS: usize = 256;
/// Maximum number of objects between two coroutines, such as tasks and futures.
const MAX_BETWEEN: usize = 8;
/// Number of variables of a frame, and of words of a task, that are examined.
const VARIABLES: u64 = 6;
const TASK_WORDS: u64 = 32;
/// Maximum number of tasks of one `gather` that are examined.
const MAX_CHILDREN: u64 = 256;
/// Maximum number of tasks of a thread that are examined.
const MAX_TASKS: usize = 4096;
/// Maximum number of characters of a name.
const MAX_NAME: usize = 200;
/// From 3.11 on, bytes from the state of a coroutine to its frame.
const STATE_BEFORE: u64 = 5;
/// Up to 3.9, whether a frame runs; in 3.10, its state.
const FRAME_EXECUTES: u64 = 116;
const FRAME_STATE: u64 = 108;
/// Up to 3.9, the end of the evaluation stack of a frame that is suspended. In 3.10, its start, and
/// the number of its items.
const STACK_END: u64 = 72;
const STACK_START: u64 = 64;
const STACK_ITEMS: u64 = 80;
/// From 3.14 on, bytes from the header of a task to its entry in the list of its thread.
const TASK_NODE: u64 = 136;

/// Parts of the paths of the files whose frames are on the stack of a loop that waits.
const LOOP_FILES: [&str; 5] =
    ["/selectors.py:", "/asyncio/base_events.py:", "/asyncio/runners.py:", "/uvloop/", TRIO_FILES];
/// The loop of trio. Its functions have the runner in one of their first variables.
const TRIO_FILES: &str = "/trio/_core/";
const TRIO_RUNNER: &str = "Runner";
const TRIO_VARIABLES: u64 = 16;
/// Number of words of a runner that are examined.
const RUNNER_WORDS: u64 = 32;
/// The file with the method in which a task of trio waits for the others of its nursery, and the
/// class of the first variable of that method.
const NURSERY_FILE: &str = "/trio/_core/_run.py";
const NURSERY_MANAGER: &str = "NurseryManager";
const TRIO_TASK: &str = "Task";
/// The class of the method of its coroutine that trio calls next, which a task that waits has not.
const NEXT_CALL: &str = "builtin_function_or_method";
/// Ends of the paths of the files with `wait`, `wait_for` and `TaskGroup`. These wait for tasks by
/// a future of their own, and have the tasks in their variables.
const WAITER_FILES: [&str; 2] = ["/asyncio/tasks.py", "/asyncio/taskgroups.py"];
/// The objects that they wait for, in words.
const OTHER_TASKS: &str = "other tasks";
const COROUTINE: &str = "a coroutine";
const TASK: &str = "a task";

/// A task whose coroutine waits.
pub(super) struct PendingTask {
    pub name: String,
    /// Its coroutines, innermost first.
    pub frames: Vec<InterpreterFrame>,
    /// The object that the innermost one waits for; empty if it is to run next.
    pub awaits: String,
}

/// Parts of the paths of the files with the methods of the standard library in which a thread waits
/// for an object of one of these classes.
const WAIT_FILES: [&str; 2] = ["/threading.py:", "/queue.py:"];
const WAIT_CLASSES: [&str; 7] =
    ["Event", "Barrier", "Semaphore", "BoundedSemaphore", "Queue", "LifoQueue", "PriorityQueue"];

/// Whether a thread with these frames, leaf first, waits without a timeout for an object to which
/// only its own frames refer: the variables of these methods and, up to 3.10, the evaluation stack
/// of their caller.
pub(super) fn awaits_alone(
    memory: &mut Snapshot,
    layout: &Layout,
    frames: &[PySpyFrame],
    raw_frames: &[InterpreterFrame],
) -> bool {
    let waits = |frame: &&PySpyFrame| WAIT_FILES.iter().any(|file| frame.file_name.contains(file));
    let methods = &raw_frames[..frames.iter().take_while(waits).count()];
    // In a build without the GIL, a reference count has two parts.
    let Some(leaf) = methods.first().filter(|_| !layout.free_threaded) else { return false };
    let has_timeout = variable(memory, layout, leaf.address, 1)
        .and_then(|timeout| class_name(memory, layout, timeout))
        .is_none_or(|class| class != "NoneType");
    let objects: Vec<u64> = methods.iter().filter_map(|frame| variable(memory, layout, frame.address, 0)).collect();
    let Some(object) = objects.last().copied().filter(|_| !has_timeout) else { return false };
    let is_awaited = class_name(memory, layout, object).is_some_and(|class| WAIT_CLASSES.contains(&&*class));
    let references = memory.read_u32("an object", object.wrapping_add(layout.object_references)).unwrap_or(u32::MAX);
    let own = objects.iter().filter(|one| **one == object).count() + usize::from(layout.minor <= 10);
    is_awaited && usize::try_from(references).is_ok_and(|references| references <= own)
}

/// The frames of the coroutines that wait for each other on a thread with these frames, leaf first.
/// Empty if the thread does not wait in an event loop. Both lists are leaf first as well.
pub(super) fn awaits(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    frames: &[PySpyFrame],
    raw_frames: &[InterpreterFrame],
) -> Vec<InterpreterFrame> {
    let of_loop = |frame: &&PySpyFrame| LOOP_FILES.iter().any(|file| frame.file_name.contains(file));
    let count = frames.iter().take_while(of_loop).count();
    let mut next = raw_frames[..count].iter().find_map(|frame| main_coroutine(memory, layout, frame.address));
    next = next.or_else(|| {
        let runner = runners(memory, layout, &frames[..count], &raw_frames[..count]).into_iter().next()?;
        let task = main_task(memory, layout, runner)?;
        Some(trio_task(memory, layout, task)?.coroutine)
    });
    let mut chain = Vec::new();
    // The frames before this one are of tasks of trio whose nurseries are followed already.
    let mut followed = 0;
    while chain.len() < MAX_AWAITS {
        let frame = next.and_then(|coroutine| suspended_frame(memory, layout, coroutine));
        next = frame.and_then(|frame| {
            chain.push(frame);
            let object = awaited(memory, layout, frame.address);
            let behind = object.and_then(|object| coroutine_behind(memory, layout, object));
            behind.or_else(|| {
                let task = task_of_waiter(memory, layout, codes, frame)?;
                coroutine_behind(memory, layout, task)
            })
        });
        if next.is_none() {
            let Some((at, task)) = task_of_nursery(memory, layout, codes, &chain[followed..]) else { break };
            followed += at + 1;
            // The frames below the nursery's are those of every task of trio that waits.
            chain.truncate(followed);
            next = Some(task.coroutine);
        }
    }
    chain.reverse();
    chain
}

/// The coroutine that the variables of a frame of a loop refer to, directly or through its task.
fn main_coroutine(memory: &mut Snapshot, layout: &Layout, frame: u64) -> Option<u64> {
    (0..VARIABLES).find_map(|index| {
        let object = variable(memory, layout, frame, index)?;
        let is_started = |name: &str| name == "coroutine" || is_task(name);
        class_name(memory, layout, object).filter(|name| is_started(name))?;
        coroutine_behind(memory, layout, object)
    })
}

/// The object that a variable of a frame refers to.
fn variable(memory: &mut Snapshot, layout: &Layout, frame: u64, index: u64) -> Option<u64> {
    let variable = frame.wrapping_add(layout.frame_locals + index * 8);
    memory.read_u64("a frame", variable).ok().map(|object| object & !7)
}

/// A task for which this frame waits, if it is one of asyncio's functions that wait for tasks by a
/// future of their own.
fn task_of_waiter(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    frame: InterpreterFrame,
) -> Option<u64> {
    let code = codes.get(memory, layout, frame.code).ok()?;
    if !WAITER_FILES.iter().any(|end| code.file().ends_with(end)) {
        return None;
    }
    let mut tasks = Vec::new();
    for index in 0..VARIABLES {
        let Some(object) = variable(memory, layout, frame.address, index) else { break };
        let set = match class_name(memory, layout, object).unwrap_or_default().as_str() {
            "set" => Some(object),
            "TaskGroup" => attributes(memory, layout, object, ["_tasks"]).ok().and_then(|[set]| set),
            name => {
                tasks.extend(is_task(name).then_some(object));
                None
            }
        };
        tasks.extend(set.and_then(|set| members(memory, layout, set)).into_iter().flatten());
    }
    tasks.retain(|task| waits(memory, layout, *task));
    // The first one, as they are numbered: a set has no order.
    tasks.into_iter().min_by_key(|task| {
        let name = words_of_task(memory, layout, *task).map(|words| task_name(memory, layout, words.name));
        name.map(|name| (name.len(), name))
    })
}

/// The runners of trio's loops that a thread with these frames runs.
fn runners(memory: &mut Snapshot, layout: &Layout, frames: &[PySpyFrame], raw_frames: &[InterpreterFrame]) -> Vec<u64> {
    let of_trio = frames.iter().zip(raw_frames).filter(|(frame, _)| frame.file_name.contains(TRIO_FILES));
    let mut found: Vec<u64> = Vec::new();
    for (_, raw) in of_trio {
        let variables = (0..TRIO_VARIABLES).map_while(|index| variable(memory, layout, raw.address, index));
        let variables: Vec<u64> = variables.filter(|object| !found.contains(object)).collect();
        let is_runner = |object: &u64| class_name(memory, layout, *object).is_some_and(|name| name == TRIO_RUNNER);
        found.extend(variables.into_iter().find(is_runner));
    }
    found
}

/// The objects of this class that an object with slots refers to, in the order of its slots' names.
fn in_slots(memory: &mut Snapshot, layout: &Layout, object: u64, class: &str) -> Vec<u64> {
    let mut word = |index: u64| memory.read_u64(TASK, object.wrapping_add(layout.object_size + index * 8)).ok();
    let words: Vec<u64> = (0..RUNNER_WORDS).map_while(&mut word).collect();
    words.into_iter().filter(|word| class_name(memory, layout, *word).is_some_and(|name| name == class)).collect()
}

/// The main task of a runner of trio. Its other one is `init_task`.
fn main_task(memory: &mut Snapshot, layout: &Layout, runner: u64) -> Option<u64> {
    in_slots(memory, layout, runner, TRIO_TASK).get(1).copied()
}

/// The tasks of a runner of trio.
fn tasks_of_runner(memory: &mut Snapshot, layout: &Layout, runner: u64) -> Vec<u64> {
    let sets = in_slots(memory, layout, runner, "set");
    sets.first().and_then(|set| members(memory, layout, *set)).unwrap_or_default()
}

/// A task of trio. `None` if the object is not one.
fn trio_task(memory: &mut Snapshot, layout: &Layout, task: u64) -> Option<TaskWords> {
    class_name(memory, layout, task).filter(|name| name == TRIO_TASK)?;
    let mut slot = |class: &str| in_slots(memory, layout, task, class).first().copied();
    let (event_loop, coroutine, name) =
        (slot(TRIO_RUNNER)?, slot("coroutine").or_else(|| slot("generator"))?, slot("str")?);
    Some(TaskWords { coroutine, name, event_loop })
}

/// The place in a chain of frames, outermost first, of one that waits for the other tasks of a
/// nursery, and the first of these tasks as they are named.
fn task_of_nursery(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    chain: &[InterpreterFrame],
) -> Option<(usize, TaskWords)> {
    for (at, frame) in chain.iter().enumerate().rev().take(MAX_BETWEEN) {
        if !codes.get(memory, layout, frame.code).is_ok_and(|code| code.file().ends_with(NURSERY_FILE)) {
            continue;
        }
        let Some(manager) = variable(memory, layout, frame.address, 0) else { continue };
        if class_name(memory, layout, manager).is_none_or(|name| name != NURSERY_MANAGER) {
            continue;
        }
        let [nursery] = attributes(memory, layout, manager, ["_nursery"]).ok()?;
        let [children] = attributes(memory, layout, nursery?, ["_children"]).ok()?;
        let tasks: Vec<TaskWords> = members(memory, layout, children?)?
            .into_iter()
            .filter_map(|task| trio_task(memory, layout, task))
            .collect();
        let first = tasks.into_iter().min_by_key(|task| task_name(memory, layout, task.name))?;
        return Some((at, first));
    }
    None
}

fn is_task(name: &str) -> bool {
    name.ends_with(".Task") || name == "Task"
}

/// The frame of a coroutine that waits in an `await`.
fn suspended_frame(memory: &mut Snapshot, layout: &Layout, coroutine: u64) -> Option<InterpreterFrame> {
    let inside = coroutine.wrapping_add(layout.generator_frame);
    let address = if layout.minor <= 10 { memory.read_u64(COROUTINE, inside).ok()? } else { inside };
    let mut state = |offset: u64| memory.read_u8(COROUTINE, address.wrapping_add(offset)).ok();
    let is_suspended = match layout.minor {
        ..=9 => state(FRAME_EXECUTES)? == 0 && memory.read_u64(COROUTINE, address.wrapping_add(STACK_END)).ok()? != 0,
        10 => state(FRAME_STATE)?.cast_signed() == -1,
        11..=12 => state(0u64.wrapping_sub(STATE_BEFORE))?.cast_signed() == -1,
        // -1 in an await, -2 in a `yield`, as that of a coroutine that is a generator.
        13..=14 => matches!(state(0u64.wrapping_sub(STATE_BEFORE))?.cast_signed(), -1 | -2),
        15.. => state(0u64.wrapping_sub(STATE_BEFORE))? == 2,
    };
    let mut bytes = vec![0; layout.frame_size as usize];
    if !is_suspended || address < MIN_ADDRESS || !memory.copy(address, &mut bytes) {
        return None;
    }
    let FrameWords { code, instruction, .. } = FrameWords::parse(layout, &bytes);
    Some(InterpreterFrame { address, code, instruction, previous: 0, entry: false })
}

/// The object that a suspended frame waits for: the top of its evaluation stack. From 3.11 on, the
/// top follows the instruction in the frame: up to 3.13 as a number of four bytes, later as a
/// pointer. From 3.15 on, an empty item may be above the object.
fn awaited(memory: &mut Snapshot, layout: &Layout, frame: u64) -> Option<u64> {
    let mut word = |address: u64| memory.read_u64(COROUTINE, address).ok();
    let top = frame.wrapping_add(layout.frame_instruction + 8);
    let end = match layout.minor {
        ..=9 => word(frame.wrapping_add(STACK_END))?,
        10 => {
            let items = word(frame.wrapping_add(STACK_ITEMS))? & u64::from(u32::MAX);
            word(frame.wrapping_add(STACK_START))?.wrapping_add(items * 8)
        }
        11..=13 => {
            let length = word(top)? & u64::from(u32::MAX);
            frame.wrapping_add(layout.frame_locals).wrapping_add(length * 8)
        }
        14.. => word(top)?,
    };
    let mut object = |index: u64| Some(word(end.wrapping_sub(index * 8))? & !7);
    match object(1)? {
        0 => object(2),
        found => Some(found),
    }
}

/// The coroutine that an awaited object is, or else the object.
fn inner_coroutine(memory: &mut Snapshot, layout: &Layout, mut object: u64) -> Result<u64, u64> {
    for _ in 0..MAX_BETWEEN {
        let name = class_name(memory, layout, object).unwrap_or_default();
        match name.as_str() {
            "coroutine" | "async_generator" | "generator" => return Ok(object),
            "_asyncio.FutureIter" | "FutureIter" | "async_generator_asend" | "coroutine_wrapper" => {
                let inside = memory.read_u64(COROUTINE, object.wrapping_add(layout.object_size));
                object = inside.map_err(|_| object)?;
            }
            _ => break,
        }
    }
    Err(object)
}

/// The coroutine that runs behind an object which another coroutine waits for.
fn coroutine_behind(memory: &mut Snapshot, layout: &Layout, mut object: u64) -> Option<u64> {
    for _ in 0..MAX_BETWEEN {
        object = match inner_coroutine(memory, layout, object) {
            Ok(coroutine) => return Some(coroutine),
            Err(object) => object,
        };
        object = match class_name(memory, layout, object)?.as_str() {
            "_GatheringFuture" => unfinished_child(memory, layout, object)?,
            name if is_task(name) => words_of_task(memory, layout, object)?.coroutine,
            _ => return None,
        };
    }
    None
}

/// The words of a task that are next to each other in all versions.
struct TaskWords {
    coroutine: u64,
    name: u64,
    event_loop: u64,
}

/// Finds the coroutine of a task, and the words around it. `None` if the task is not written in C.
fn words_of_task(memory: &mut Snapshot, layout: &Layout, task: u64) -> Option<TaskWords> {
    let mut word = |index: u64| memory.read_u64(TASK, task.wrapping_add(layout.object_size + index * 8)).ok();
    let words: Vec<u64> = (0..TASK_WORDS).map_while(&mut word).collect();
    let is_coroutine = |word: &u64| {
        class_name(memory, layout, *word).is_some_and(|name| matches!(name.as_str(), "coroutine" | "generator"))
    };
    let at = words.iter().position(is_coroutine)?;
    Some(TaskWords { coroutine: words[at], name: *words.get(at + 1)?, event_loop: words[0] })
}

/// The pending tasks of the event loops that a thread with these frames runs.
pub(super) fn pending(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    thread: &ThreadState,
    frames: &[PySpyFrame],
    raw_frames: &[InterpreterFrame],
) -> Vec<PendingTask> {
    // Deep stacks repeat a few functions.
    let mut known: HashMap<u64, bool> = HashMap::new();
    let is_of_loop = |frame: &PySpyFrame| LOOP_FILES.iter().any(|file| frame.file_name.contains(file));
    let of_loop = frames
        .iter()
        .zip(raw_frames)
        .filter(|(frame, raw)| *known.entry(raw.code).or_insert_with(|| is_of_loop(frame)));
    let mut event_loops = HashSet::new();
    for (_, raw) in of_loop {
        // Methods of the loop have it as their first variable, and others have its main task.
        for index in 0..VARIABLES {
            let object = variable(memory, layout, raw.address, index).unwrap_or(0);
            match class_name(memory, layout, object) {
                Some(name) if is_task(&name) => {
                    event_loops.extend(words_of_task(memory, layout, object).map(|words| words.event_loop));
                }
                Some(name) if name.ends_with("EventLoop") || name.ends_with(".Loop") => {
                    event_loops.insert(object);
                }
                _ => {}
            }
        }
    }
    let mut tasks = Vec::new();
    if !event_loops.is_empty() {
        tasks = listed(memory, layout, thread);
        tasks.extend(registered(memory, layout, thread).unwrap_or_default());
    }
    for runner in runners(memory, layout, frames, raw_frames) {
        event_loops.insert(runner);
        tasks.extend(tasks_of_runner(memory, layout, runner));
    }
    let mut seen = HashSet::new();
    let mut found: Vec<PendingTask> = Vec::new();
    for task in tasks.into_iter().take(MAX_TASKS).filter(|task| seen.insert(*task)) {
        found.extend(pending_task(memory, layout, codes, &event_loops, task));
    }
    // As they were numbered.
    found.sort_by(|one, other| (one.name.len(), &one.name).cmp(&(other.name.len(), &other.name)));
    found.truncate(MAX_SUSPENDED);
    found
}

/// The task at an address, if it waits in one of these loops.
fn pending_task(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    event_loops: &HashSet<u64>,
    task: u64,
) -> Option<PendingTask> {
    class_name(memory, layout, task).filter(|name| is_task(name))?;
    let mut is_of_loop = |words: &TaskWords| event_loops.contains(&words.event_loop);
    let of_trio = trio_task(memory, layout, task).filter(&mut is_of_loop);
    let is_of_trio = of_trio.is_some();
    let words = of_trio.or_else(|| words_of_task(memory, layout, task).filter(is_of_loop))?;
    let mut frames = Vec::new();
    let mut awaits = String::new();
    let mut coroutine = words.coroutine;
    while frames.len() < MAX_AWAITS {
        let Some(frame) = suspended_frame(memory, layout, coroutine) else { break };
        frames.push(frame);
        let Some(object) = awaited(memory, layout, frame.address) else { break };
        match inner_coroutine(memory, layout, object) {
            Ok(inner) => coroutine = inner,
            Err(object) => {
                awaits = described(memory, layout, object);
                if awaits == FUTURE && task_of_waiter(memory, layout, codes, frame).is_some() {
                    awaits = OTHER_TASKS.into();
                }
                break;
            }
        }
    }
    if is_of_trio && in_slots(memory, layout, task, NEXT_CALL).is_empty() {
        let of_nursery = task_of_nursery(memory, layout, codes, &frames);
        awaits = if of_nursery.is_some() { OTHER_TASKS } else { WAKEUP }.into();
    }
    frames.reverse();
    let name = task_name(memory, layout, words.name);
    (!frames.is_empty()).then_some(PendingTask { name, frames, awaits })
}

/// The name of a task: a text, or the number of a task whose name nobody has asked for.
fn task_name(memory: &mut Snapshot, layout: &Layout, name: u64) -> String {
    match class_name(memory, layout, name).as_deref() {
        Some("int") => read_integer(memory, layout, name).map_or_else(String::new, |number| format!("Task-{number}")),
        Some("str") => string(memory, layout, name).unwrap_or_default().chars().take(MAX_NAME).collect(),
        _ => String::new(),
    }
}

/// An awaited object that is not a coroutine, for people.
fn described(memory: &mut Snapshot, layout: &Layout, object: u64) -> String {
    match class_name(memory, layout, object) {
        Some(name) if is_task(&name) => {
            let words = words_of_task(memory, layout, object);
            let name = words.map_or_else(String::new, |words| task_name(memory, layout, words.name));
            format!("task '{name}'")
        }
        Some(name) if name == "_GatheringFuture" => "the tasks of a gather".into(),
        Some(name) if name.ends_with("Future") => FUTURE.into(),
        _ => String::new(),
    }
}

/// The tasks in the list of a thread, from 3.14 on.
fn listed(memory: &mut Snapshot, layout: &Layout, thread: &ThreadState) -> Vec<u64> {
    let Some(offset) = layout.thread_tasks else { return Vec::new() };
    let head = thread.address.wrapping_add(offset);
    let (mut found, mut before) = (Vec::new(), head);
    while found.len() < MAX_TASKS {
        let Ok(node) = memory.read_u64(TASK, before) else { break };
        // The list is doubly linked, and ends where it starts.
        if node == head || node < MIN_ADDRESS || memory.read_u64(TASK, node.wrapping_add(8)) != Ok(before) {
            break;
        }
        found.push(node.wrapping_sub(layout.object_size + TASK_NODE));
        before = node;
    }
    found
}

/// The tasks in the weak set of the module asyncio. From 3.14 on, it has only tasks that are not
/// written in C.
fn registered(memory: &mut Snapshot, layout: &Layout, thread: &ThreadState) -> Option<Vec<u64>> {
    let interpreter = memory.read_u64(TASK, thread.address.wrapping_add(layout.thread_interpreter)).ok()?;
    let modules = memory.read_u64(TASK, interpreter.wrapping_add(layout.interpreter_modules)).ok()?;
    let module = item(memory, layout, modules, "asyncio.tasks").ok()??;
    let names = ["_all_tasks", "_scheduled_tasks"];
    let weak_set = attributes(memory, layout, module, names).ok()?.into_iter().flatten().next()?;
    let [set] = attributes(memory, layout, weak_set, ["data"]).ok()?;
    let references = members(memory, layout, set?)?.into_iter();
    // The object is the first field after the header of a weak reference, in all versions.
    let referent = |reference: u64| memory.read_u64(TASK, reference.wrapping_add(layout.object_size)).ok();
    Some(references.filter_map(referent).collect())
}

/// The first task of a `gather` that still waits.
fn unfinished_child(memory: &mut Snapshot, layout: &Layout, gathering: u64) -> Option<u64> {
    let [children] = attributes(memory, layout, gathering, ["_children"]).ok()?;
    items(memory, layout, children?, MAX_CHILDREN).into_iter().find(|child| waits(memory, layout, *child))
}

/// Whether an object is a task that waits.
fn waits(memory: &mut Snapshot, layout: &Layout, object: u64) -> bool {
    class_name(memory, layout, object).is_some_and(|name| is_task(&name))
        && coroutine_behind(memory, layout, object)
            .is_some_and(|coroutine| suspended_frame(memory, layout, coroutine).is_some())
}
