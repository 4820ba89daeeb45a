//! Combines the samples of a dump into the facts about a process, and finds the thread that
//! represents it: the main thread, or the training thread while the main thread only waits for it.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use xpu_timer_proto::{
    LISTENS,
    server::{
        Awaited, AwaitedKind, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace, TcpConnection,
    },
    v1::{FlightRecord, OpKind, Operation},
};

use super::{
    classify::{
        TASK_LOCK, awaits_result, classify, classify_without, in_queue, joins_thread, polls_ring, queue_of_data,
        receives, stuck_task, waits_for_network, waits_for_signal, yields,
    },
    helpers,
    host::{
        DSleep, Host, IDLE_SHARE, Movement, ObservedActivity, Polling, Sample, ThreadStacks, ThreadWait,
        in_same_function, is_message_of, movement, reporting_threads, samples, serves_socket, within_library,
    },
    location::{locate, own_native_place, program},
    names::{base_name, frame_label, is_library, is_poll, own_frame, own_place, stored_command},
    patterns::{self, FREEZER_WCHAN},
    services::{awaits_task, is_between_requests},
};
use crate::verdict::Activity;

/// The kernel shows a process in a frozen control group as sleeping, so the judge uses a state of
/// its own.
const FROZEN: &str = "F (frozen)";

/// The kernel's name for the state of a waiting process.
const SLEEPING: &str = "S (sleeping)";

/// Reads a dump: the process, and its main thread or the training thread in its place.
pub(crate) fn read(dump: &Stacktrace, training: Option<u32>) -> Host {
    let dump = &*with_holders_of_both_samples(dump);
    let (first, last) = samples(dump);
    let pid = training.unwrap_or(u32::try_from(dump.pid).unwrap_or(0));
    // A process that vanished or could not be read the second time still has the stacks of the
    // first sample.
    let readable = match first {
        Some(first) if !last.has_stacks() => first,
        _ => last,
    };
    // A single sample says nothing about movement. A sample that came too late, on a busy machine,
    // does not prove that the process stands still.
    let seen_before = first.filter(|first| first.has_stacks() && last.has_stacks());
    let main = reporting_threads(readable, dump.pid, training);
    let before = seen_before.map(|first| reporting_threads(first, dump.pid, training));
    let moved = movement(dump, before, main);
    // A garbage collection computes. A thread in a collection that uses no processor is in a
    // finalizer.
    let idle = moved.is_some_and(|moved| moved.cpu_share < IDLE_SHARE);
    let state = state(first, last, readable.state, main, moved);
    let (did, observed, polls) = activities(before, main, idle);
    let same_in_both = did.is_none_or(|did| did == observed.activity);
    let observed = from_stuck_worker(dump, main, &observed).unwrap_or(observed);
    let (thread_waits, timed) = waits_of_threads((seen_before, readable), dump.pid, main);
    let observed = match observed.activity {
        Activity::DataLoader
            if main.0.is_some_and(|main| main.awaited.is_none()) && is_fed(&thread_waits, dump.pid) =>
        {
            classify_without(Activity::DataLoader, main.0, main.1)
        }
        Activity::DataLoader if is_filled_from_peers(readable, &observed.witness, main) => {
            classify_without(Activity::DataLoader, main.0, main.1)
        }
        _ => observed,
    };
    // I/O of other threads does not count as progress of a main thread that slept, or was in one
    // call, all the time.
    let seen_twice = main.0.is_some() && before.is_some_and(|before| before.0.is_some());
    let in_one_call = matches!(observed.activity, Activity::Sleep | Activity::Io) && same_in_both && seen_twice;
    let stood = |moved: Movement| in_one_call && !moved.main_ran && !state.starts_with('R');
    let work =
        if may_wait_for_helpers(observed.activity) { helpers::work(dump, pid, main) } else { Default::default() };
    let stuck = main.1.filter(|_| observed.witness == TASK_LOCK).and_then(stuck_task_stack);
    let flows = before.is_some_and(|before| serves_socket(before, main));
    // A loop whose tasks wait for each other serves nobody, whatever it polls.
    let awaited = main.0.and_then(|main| main.awaited.clone()).filter(|_| stuck.is_none());
    let listens = awaited.as_ref().is_some_and(|awaited| awaited.name.starts_with(LISTENS));
    let moved = moved.map(|moved| Movement {
        io: moved.io && !stood(moved) || flows,
        own_frame: moved.own_frame && !polls,
        helper_busy: work.busy,
        helper_progressed: work.progressed || work.reached_line,
        helper_may_loop: work.reached_line && !work.progressed,
        library_progressed: moved.is_busy()
            && !matches!(observed.activity, Activity::DeviceWait | Activity::CommInit)
            && before.is_some_and(|before| within_library(before, main)),
        ..moved
    });
    let host = Host {
        pid: dump.pid,
        parent_pid: dump.parent_pid,
        ended_parent_pid: dump.ended_parent_pid,
        command: stored_command(&dump.command),
        stack: has_frames(main),
        state: state.to_owned(),
        same_in_both,
        location: locate(main.0, stuck.as_ref().or(main.1), &observed, program(readable.native)),
        moved,
        d_sleep: first.and_then(|first| d_sleep(first, last, pid)),
        awaited,
        thread_waits,
        timed,
        awaits_result: main.1.is_some_and(|python| awaits_result(&python.frames)),
        polling: before.zip(moved).and_then(|(before, moved)| polling(before, main, moved, (&observed, same_in_both))),
        has_locked_threads: listens && first.is_some_and(|first| has_locked_threads([first, last], main)),
        lost_request: first.and_then(|first| lost_request([first, last], main)),
        rests: false,
        connections: connections(dump),
        observed,
    };
    Host { rests: rests(&host, dump, main.1), ..host }
}

/// The task that holds up an event loop, as the stack of its thread.
fn stuck_task_stack(python: &PySpyStacktrace) -> Option<PySpyStacktrace> {
    let task = stuck_task(python)?;
    Some(PySpyStacktrace { frames: task.frames.clone(), ..Default::default() })
}

/// Whether a process serves others or works on their tasks, and waits for the next request or task:
/// for a message, for the end of a child, or for some time. A program without Python may wait so in
/// a lock.
fn rests(host: &Host, dump: &Stacktrace, python: Option<&PySpyStacktrace>) -> bool {
    use AwaitedKind::{Child, Event, Pipe, Several, Socket};
    let frames = python.map_or(&[][..], |python| &python.frames);
    let awaits = match host.observed.activity {
        Activity::Io => {
            host.awaited.as_ref().is_some_and(|one| matches!(one.kind(), Child | Event | Pipe | Several | Socket))
        }
        Activity::Lock | Activity::DataLoader => dump.py_stacktrace.is_empty() || awaits_task(frames),
        Activity::Sleep | Activity::Unknown => true,
        _ => false,
    };
    awaits && host.frozen() && !host.halted() && !host.is_in_send() && is_between_requests(&dump.command, frames)
}

/// The activity of the main thread in the first sample and in the last one, and whether the thread
/// polls. It may be in the middle of a poll in one of the samples, in the same function. That is
/// not progress, and the other sample shows what the thread does. A wait for an object says more
/// than the sleep.
fn activities(
    before: Option<ThreadStacks<'_>>,
    main: ThreadStacks<'_>,
    idle: bool,
) -> (Option<Activity>, ObservedActivity, bool) {
    let excluded = if idle { Activity::Gc } else { Activity::Unknown };
    let does = |(native, python)| classify_without(excluded, native, python);
    let (did, observed) = (before.map(does), does(main));
    let in_one_function = || before.is_some_and(|before| in_same_function(before, main));
    let both = || did.iter().chain([&observed]);
    let asleep = both().find(|one| one.activity == Activity::Sleep).cloned();
    // A loop that lets other threads run polls as well, and uses a processor.
    let yields = || before.is_some_and(|before| [before, main].iter().any(|(native, _)| yields(*native)));
    let polls = (idle && asleep.is_some() || yields()) && in_one_function();
    let may_be_poll = |one: &ObservedActivity| {
        matches!(one.activity, Activity::Sleep | Activity::Running | Activity::Io | Activity::Unknown)
    };
    match asleep.filter(|_| idle && polls && both().all(may_be_poll)) {
        Some(asleep) => (did.map(|_| Activity::Sleep), asleep, polls),
        None => (did.map(|did| did.activity), observed, polls),
    }
}

/// The memory that the main thread polls, if other processes share any with it. The thread stays in
/// one function of the program, and wakes up again and again from a sleep, or only lets other
/// threads run. One that computes looks the same otherwise.
fn polling(
    before: ThreadStacks<'_>,
    main: ThreadStacks<'_>,
    moved: Movement,
    (observed, same_in_both): (&ObservedActivity, bool),
) -> Option<Polling> {
    let both = [main, before];
    let sharers = both.iter().filter_map(|(native, _)| *native).map(|native| &native.sharers);
    let sharers = sharers.into_iter().find(|sharers| !sharers.is_empty())?.clone();
    let in_ring = both.iter().all(|(_, python)| python.is_some_and(|python| polls_ring(&python.frames)));
    let wakes = match observed.activity {
        Activity::Sleep => same_in_both && moved.main_ran && !moved.main_ran_seldom,
        // Between two calls it may need the GIL.
        Activity::Running | Activity::Gil => {
            (moved.main_ran || moved.is_busy()) && both.iter().any(|(native, _)| yields(*native))
        }
        _ => false,
    };
    ((wakes || in_ring) && !moved.io && !moved.own_frame).then_some(Polling { sharers, in_ring })
}

fn has_frames((native, python): ThreadStacks<'_>) -> bool {
    native.is_some_and(|thread| !thread.frames.is_empty()) || python.is_some_and(|thread| !thread.frames.is_empty())
}

/// The state of the process in the last sample, else in the readable one. A frozen or traced
/// process has a state of its own.
fn state<'a>(
    first: Option<Sample<'a>>,
    last: Sample<'a>,
    readable: &'a str,
    main: ThreadStacks<'a>,
    moved: Option<Movement>,
) -> &'a str {
    let frozen = main.0.is_some_and(|thread| {
        let wakeable = || patterns::WAKEABLE_WCHAN.iter().any(|start| thread.wchan.starts_with(start));
        FREEZER_WCHAN.contains(&thread.wchan.as_str()) || thread.state.starts_with('D') && wakeable()
    });
    match (frozen, last.state, first) {
        (true, state, _) if !state.starts_with(['T', 't']) => FROZEN,
        (_, "", _) => readable,
        (_, state, first) if state.starts_with('t') => traced_state(state, first, moved),
        (_, state, _) => state,
    }
}

/// Whether a queue inside of a process gets its content from other processes that are not its
/// children: all own threads that wait do so for these. A loader is a thread or a child.
fn is_fed(waits: &[ThreadWait], pid: i32) -> bool {
    let is_foreign = |wait: &ThreadWait| {
        let holders = &wait.awaited.holders;
        !holders.is_empty() && holders.iter().all(|holder| !holder.child && holder.pid != pid)
    };
    let mut own = waits.iter().filter(|wait| wait.own).peekable();
    own.peek().is_some() && own.all(is_foreign)
}

/// Whether the queue `witness` of the main thread only has a name about data, and another thread of
/// the program waits for a device or for other ranks. Then that thread is not a loader, and may be
/// what the main thread waits for.
fn is_filled_from_peers(sample: Sample<'_>, witness: &str, (_, main): ThreadStacks<'_>) -> bool {
    let Some(main) = main.filter(|main| queue_of_data(&main.frames).is_some_and(|queue| queue == witness)) else {
        return false;
    };
    let waits_for_peers = |thread: &PySpyStacktrace| {
        let native = sample.native_of(thread.os_thread_id);
        own_frame(&thread.frames).is_some() && classify(native, Some(thread)).activity == Activity::DeviceWait
    };
    sample.python.iter().filter(|thread| thread.os_thread_id != main.os_thread_id).any(waits_for_peers)
}

/// The dump, in which each wait has the holders that either of its samples shows. On a busy
/// machine, a capture may find the processes at the other end in time in only one of the samples.
fn with_holders_of_both_samples(dump: &Stacktrace) -> Cow<'_, Stacktrace> {
    let mut completed = Cow::Borrowed(dump);
    let Some(first) = &dump.first_sample else { return completed };
    for (after, thread) in dump.stacktrace.iter().enumerate() {
        let Some(before) = first.stacktrace.iter().position(|before| before.pid == thread.pid) else { continue };
        if let Some(known) = known_holders(thread, &first.stacktrace[before]) {
            completed.to_mut().stacktrace[after].awaited = Some(known.clone());
        } else if let Some(known) = known_holders(&first.stacktrace[before], thread)
            && let Some(first) = &mut completed.to_mut().first_sample
        {
            first.stacktrace[before].awaited = Some(known.clone());
        }
    }
    completed
}

/// The wait of a thread in the other sample, if only that one has the holders. It is the same wait
/// if the thread did not run in between, or if both have one name.
fn known_holders<'a>(sample: &PstackStacktrace, other: &'a PstackStacktrace) -> Option<&'a Awaited> {
    let awaited = sample.awaited.as_ref().filter(|awaited| awaited.holders.is_empty())?;
    let known = other.awaited.as_ref().filter(|known| !known.holders.is_empty() && known.kind == awaited.kind)?;
    let slept = sample.context_switches != 0 && sample.context_switches == other.context_switches;
    (slept || (&awaited.name, &awaited.object) == (&known.name, &known.object)).then_some(known)
}

/// The waits of the threads other than the main thread, except for objects that only the process
/// itself has, and whether the main thread or an own thread waits with a timeout. If the main
/// thread wants a mutex, only its owner counts. If a thread waits for another object than in the
/// sample before, something has woken it and may wake the others: that counts as a timeout.
fn waits_of_threads(
    (before, sample): (Option<Sample<'_>>, Sample<'_>),
    pid: i32,
    (native, python): ThreadStacks<'_>,
) -> (Vec<ThreadWait>, Option<bool>) {
    let main = native.map(|thread| thread.pid).or(python.map(|thread| thread.os_thread_id));
    let owner = native.and_then(helpers::mutex_owner);
    let runs_own_code = |tid: u32| {
        let frames = sample.python_of(tid).map(|thread| &thread.frames);
        frames.is_some_and(|frames| frames.iter().any(|frame| !is_library(&frame.file_name)))
    };
    let program = program(sample.native);
    let runs_program =
        |thread: &PstackStacktrace| program.is_some_and(|program| own_native_place(&thread.frames, program).is_some());
    let awaits_message =
        sample.native.iter().any(|thread| !passes_messages(thread) && is_in(thread, patterns::MESSAGE_LIBRARIES));
    // A thread of a library writes into no pipe or socket that Python code reads without polling.
    let reads = |thread: &PstackStacktrace| {
        !thread.frames.iter().any(|frame| is_poll(&frame.func_name))
            && thread.awaited.as_ref().is_some_and(|awaited| is_message_of(awaited, pid))
    };
    let needs_python = python.is_some() && native.is_some_and(reads);
    let is_ignored = |thread: &PstackStacktrace| {
        is_of_runtime(thread)
            || passes_messages(thread) && !awaits_message
            || needs_python && sample.python_of(thread.pid).is_none()
    };
    let mut waits = Vec::new();
    let mut timed = native.and_then(|thread| thread.timed);
    for thread in sample.native.iter().filter(|thread| Some(thread.pid) != main && !is_ignored(thread)) {
        let own = if sample.python.is_empty() { runs_program(thread) } else { runs_own_code(thread.pid) };
        if own {
            timed = timed.zip(thread.timed).map(|(one, other)| one || other);
        }
        let Some(awaited) = thread.awaited.as_ref().filter(|_| owner.is_none_or(|owner| owner == thread.pid)) else {
            continue;
        };
        let has_others = awaited.holders.is_empty() || awaited.holders.iter().any(|holder| holder.pid != pid);
        // A FIFO that no other process has open is like a file.
        let is_inner = !has_others && (awaited.kind() != AwaitedKind::Pipe || awaited.name.is_empty());
        if !is_inner {
            waits.push(ThreadWait { awaited: awaited.clone(), own });
        }
    }
    if before.is_some_and(|before| changes_wait(before, sample, main)) {
        timed = Some(true);
    }
    (waits, timed)
}

/// Whether Python threads of the program other than the main thread wait for locks at different
/// places, each at one place in both samples. A thread in a queue waits for its tasks, and threads
/// at one place may wait for one event.
fn has_locked_threads(samples: [Sample<'_>; 2], (_, main): ThreadStacks<'_>) -> bool {
    let main = main.map(|main| main.os_thread_id);
    let locked = |sample: Sample<'_>| -> HashSet<(u32, String)> {
        let others = sample.python.iter().filter(|thread| Some(thread.os_thread_id) != main);
        let is_locked = |thread: &&PySpyStacktrace| {
            let native = sample.native_of(thread.os_thread_id);
            !in_queue(&thread.frames) && classify(native, Some(thread)).activity == Activity::Lock
        };
        let place = |thread: &PySpyStacktrace| Some((thread.os_thread_id, own_place(&thread.frames)?));
        others.filter(is_locked).filter_map(place).collect()
    };
    let [first, last] = samples.map(locked);
    let places: HashSet<&str> = first.intersection(&last).map(|(_, place)| place.as_str()).collect();
    places.len() > 1
}

/// Whether a Python thread other than the main one ran between the samples, and waits in another
/// system call than before.
fn changes_wait(first: Sample<'_>, last: Sample<'_>, main: Option<u32>) -> bool {
    let is_other = |thread: &&PstackStacktrace| Some(thread.pid) != main && last.python_of(thread.pid).is_some();
    let changes = |thread: &PstackStacktrace| {
        first.native_of(thread.pid).is_some_and(|before| {
            before.context_switches != thread.context_switches && before.syscall != thread.syscall
        })
    };
    last.native.iter().filter(is_other).any(changes)
}

/// The place of a thread other than the main thread that serves a request or works on a task, and
/// waits there in both samples for an object to which only it refers.
fn lost_request(samples: [Sample<'_>; 2], (_, main): ThreadStacks<'_>) -> Option<String> {
    let main = main.map(|main| main.os_thread_id);
    let serves = |frame: &PySpyFrame| patterns::REQUEST_FILES.iter().any(|file| frame.file_name.contains(file));
    let [first, last] = samples.map(|sample| -> Vec<(u32, String)> {
        let others = sample.python.iter().filter(|thread| Some(thread.os_thread_id) != main && thread.awaits_alone);
        let serving = others.filter(|thread| thread.frames.iter().any(serves));
        serving.filter_map(|thread| Some((thread.os_thread_id, own_place(&thread.frames)?))).collect()
    });
    last.into_iter().find(|thread| first.contains(thread)).map(|(_, place)| place)
}

/// Whether a thread belongs to a device runtime or a library of collectives, or to the hook. Such
/// threads wait for other ranks and for drivers all the time.
fn is_of_runtime(thread: &PstackStacktrace) -> bool {
    is_in(thread, patterns::RUNTIME_LIBRARIES)
}

/// Whether a thread belongs to ZeroMQ. It waits for all sockets, and passes messages on to the
/// threads of the program, so it matters only while one of these waits for a message.
fn passes_messages(thread: &PstackStacktrace) -> bool {
    thread.thread_name.starts_with(patterns::MESSAGE_THREADS)
}

/// Whether a thread is in a library whose file name begins with one of these names.
fn is_in(thread: &PstackStacktrace, libraries: &[&str]) -> bool {
    let is_one = |frame: &PstackFrame| libraries.iter().any(|name| base_name(&frame.module).starts_with(name));
    thread.frames.iter().any(is_one)
}

/// The TCP connections to other machines in the last sample that has any.
fn connections(dump: &Stacktrace) -> Vec<TcpConnection> {
    let samples = [&dump.last_sample, &dump.first_sample].into_iter().flatten();
    let connected = samples.map(|sample| &sample.tcp_connections).find(|connections| !connections.is_empty());
    connected.cloned().unwrap_or_default()
}

/// The state of a process that is traced in the last sample. A debugger holds it only if it did so
/// in the first sample as well and the main thread did not run in between. Otherwise the capture
/// itself stopped it, which takes microseconds and is still visible on a busy machine.
fn traced_state<'a>(state: &'a str, first: Option<Sample<'a>>, moved: Option<Movement>) -> &'a str {
    let ran = moved.is_none_or(|moved| moved.main_ran || moved.cpu_share > 0.0);
    match first {
        Some(first) if !first.state.starts_with('t') && !first.state.is_empty() => first.state,
        Some(_) if !ran => state,
        _ => SLEEPING,
    }
}

/// A thread waits for a loader if it receives from a queue of worker processes and one of them is
/// stuck, or from any of their pipes if one of them is dead or no other process has the other end
/// open.
fn from_stuck_worker(
    dump: &Stacktrace,
    (native, python): ThreadStacks<'_>,
    observed: &ObservedActivity,
) -> Option<ObservedActivity> {
    if !matches!(observed.activity, Activity::Lock | Activity::Unknown) {
        return None;
    }
    let frame = receives(&python?.frames)?;
    let abandoned = native.and_then(|thread| thread.awaited.as_ref()).is_some_and(|awaited| {
        awaited.kind() == AwaitedKind::Pipe
            && !awaited.holders.is_empty()
            && awaited.holders.iter().all(|holder| holder.pid == dump.pid)
    });
    let queue = frame.file_name.contains(patterns::QUEUE_OF_PROCESSES);
    let stuck = helpers::worst_child(dump).is_some_and(|child| child.is_dead() || queue && child.is_stuck());
    (abandoned || stuck).then(|| ObservedActivity { activity: Activity::DataLoader, witness: frame_label(frame) })
}

/// Whether a main thread with this activity may wait for the work of its own threads or child
/// processes.
fn may_wait_for_helpers(activity: Activity) -> bool {
    use Activity::{Compile, DataLoader, Io, Lock, Sleep, Unknown};
    matches!(activity, Compile | DataLoader | Io | Lock | Sleep | Unknown)
}

fn d_sleep(first: Sample<'_>, last: Sample<'_>, pid: u32) -> Option<DSleep> {
    let before: HashMap<u32, &PstackStacktrace> = first.native.iter().map(|thread| (thread.pid, thread)).collect();
    let mut found: Vec<DSleep> = last
        .native
        .iter()
        .filter(|thread| thread.state.starts_with('D'))
        .filter(|thread| {
            before.get(&thread.pid).is_some_and(|before| {
                before.state.starts_with('D')
                    && before.wchan == thread.wchan
                    && before.context_switches == thread.context_switches
            })
        })
        .map(|thread| DSleep {
            main: thread.pid == pid,
            thread: thread.thread_name.clone(),
            wchan: thread.wchan.clone(),
        })
        .collect();
    found.sort_by_key(|thread| !thread.main);
    if !found.is_empty() {
        return found.into_iter().next();
    }
    // The state of a process is known even if its threads could not be read.
    let alone = last.native.is_empty() && first.state.starts_with('D') && last.state.starts_with('D');
    alone.then(|| DSleep { main: true, thread: String::new(), wchan: String::new() })
}

/// Number of newest operations whose threads are considered.
const NEWEST: usize = 32;

/// The id of the thread that represents a process, if it is not the main thread but the training
/// thread, for which the main thread only waits.
///
/// The flight record has the thread that launched each operation. Another thread than the main one
/// represents the process under these conditions: it launched the newest operations and the main
/// thread none of them; it runs code of the program; and the main thread waits for the end of a
/// thread, sleeps, or waits for a signal. If the main thread waits for a lock, a result or a
/// message, the other thread must not be in a lock itself: of two threads that wait for each other,
/// the main one says more. A thread that waits for its tasks never counts.
pub(crate) fn training_thread(dump: &Stacktrace, flight: Option<&FlightRecord>) -> Option<u32> {
    let flight = flight?;
    // The ids of another pid namespace belong to other threads here.
    let pid = flight.rank.as_ref()?.pid;
    if pid == 0 || pid != dump.pid {
        return None;
    }
    let (_, last) = samples(dump);
    let (native, python) = reporting_threads(last, dump.pid, None);
    let main = native.map(|thread| thread.pid).or_else(|| u32::try_from(pid).ok())?;
    // Communicators are often created before the thread is started.
    let launched = |operation: &&Operation| operation.kind() != OpKind::HostCall;
    let newest = || flight.operations.iter().rev().filter(launched).take(NEWEST).map(|operation| operation.tid);
    let tid = newest().next().filter(|tid| *tid != 0)?;
    if newest().any(|launched_by| launched_by == main) {
        return None;
    }
    let candidate = reporting_threads(last, dump.pid, Some(tid));
    let doing = |(native, python): ThreadStacks<'_>| classify(native, python).activity;
    if !of_the_program(candidate, last) || candidate.1.is_some_and(|thread| in_queue(&thread.frames)) {
        return None;
    }
    let activity = doing((native, python));
    if joins_thread(native, python) || activity == Activity::Sleep || waits_for_signal(native) {
        return Some(tid);
    }
    let waits = activity == Activity::Lock || native.is_some_and(waits_for_network);
    (waits && doing(candidate) != Activity::Lock).then_some(tid)
}

/// Whether a thread runs code of the program: frames of the user's own in Python; any frames in a
/// process without Python.
fn of_the_program((native, python): ThreadStacks<'_>, sample: Sample<'_>) -> bool {
    match python {
        Some(thread) => thread.frames.iter().any(|frame| !is_library(&frame.file_name)),
        None => sample.python.is_empty() && native.is_some_and(|thread| !thread.frames.is_empty()),
    }
}
