//! The facts that the judge reads about a process, from its dump or from the facts that a node has
//! condensed the dump to. Judging condensed evidence gives the same verdict.

use std::{borrow::Cow, cmp::Reverse, collections::HashSet};

use xpu_timer_proto::{
    kernels,
    server::{Library, Stacktrace},
    v1::{
        FlightRecord, HostActivity, HostFacts, HostGilHolder, HostHelper, HostMovement, HostPolling, HostSleep,
        HostThreadWait, KernelLaunches, OpStatus, ProcessEvidence, RankEvidence, RankInfo,
    },
};

use crate::{
    known_defects,
    stacks::{self, DSleep, GilHolder, Host, Movement, ObservedActivity, Polling, StuckHelper, ThreadWait},
    suspended,
    verdict::{Activity, Location},
};

/// Condenses the evidence of one rank for the cluster collector: the facts of its dump, the
/// communicators, all pending operations and the newest `operations` of the others. Omits what only
/// a report shows.
#[must_use]
pub fn condense(evidence: &RankEvidence, operations: usize) -> RankEvidence {
    let flight = flight_of(evidence);
    let host = evidence.dump.as_ref().map(|dump| read(dump, training(evidence))).or_else(|| evidence.host.clone());
    let is_known = !evidence.node.is_empty() && host.as_ref().is_some_and(|host| host.pid > 0);
    RankEvidence {
        rank: evidence.rank,
        presence: evidence.presence,
        dump: None,
        flight: flight.map(|flight| FlightRecord {
            rank: flight.rank.as_deref().filter(|_| !is_known).map(identity),
            ..condense_flight(flight, operations)
        }),
        node: evidence.node.clone(),
        errors: evidence.errors.clone(),
        exit: evidence.exit.clone(),
        failures: evidence.failures.clone(),
        host,
        stay: evidence.stay.clone(),
    }
}

/// The fields of a rank's process that the judge reads.
fn identity(info: &RankInfo) -> Box<RankInfo> {
    Box::new(RankInfo { node: info.node.clone(), pid: info.pid, ..Default::default() })
}

/// Condenses the evidence of a process that is not a rank, for the cluster collector.
#[must_use]
pub fn condense_process(evidence: &ProcessEvidence) -> ProcessEvidence {
    let host = evidence.dump.as_ref().map(|dump| read(dump, None)).or_else(|| evidence.host.clone());
    let shared_memory_with = evidence.shared_memory_with.clone();
    ProcessEvidence { node: evidence.node.clone(), dump: None, host, shared_memory_with }
}

/// The flight record of a rank, from its own field or from its dump.
pub(crate) fn flight_of(evidence: &RankEvidence) -> Option<&FlightRecord> {
    evidence.flight.as_ref().or_else(|| evidence.dump.as_ref()?.flight_record.as_ref())
}

/// The training thread, if it is not the main thread.
fn training(evidence: &RankEvidence) -> Option<u32> {
    stacks::training_thread(evidence.dump.as_ref()?, flight_of(evidence))
}

/// Number of kernels not known to communicate whose launches are compared.
const MOST_OTHER_KERNELS: usize = 64;

/// The kernels of a record whose numbers of launches the judge compares: those that communicate,
/// and of the others those launched most. Equal programs give equal lists.
pub(crate) fn compared_kernels(flight: &FlightRecord) -> Vec<&KernelLaunches> {
    let (known, mut others): (Vec<&KernelLaunches>, Vec<_>) =
        flight.kernels.iter().partition(|kernel| kernel.communicates);
    others.retain(|kernel| !kernels::is_of_host_call(&kernel.name));
    others.sort_by_key(|kernel| (Reverse(kernel.launches), kernel.name.as_str(), kernel.stream));
    others.truncate(MOST_OTHER_KERNELS);
    [known, others].concat()
}

/// A condensed record, without the process.
fn condense_flight(flight: &FlightRecord, operations: usize) -> FlightRecord {
    let pending = |index: usize| flight.operations[index].status() == OpStatus::Pending;
    let done = (0..flight.operations.len()).rev().filter(|index| !pending(*index));
    let kept: HashSet<usize> = done.take(operations).collect();
    let kept = |index: &usize| pending(*index) || kept.contains(index);
    // The judge reads only the streams of pending operations, and the stream that was used last.
    let handles: HashSet<u64> = (0..flight.operations.len())
        .filter(|index| pending(*index))
        .map(|index| flight.operations[index].stream)
        .collect();
    let newest = flight.streams.iter().map(|stream| stream.last_launch_ns).max().unwrap_or(0);
    let stream_kept =
        |stream: &&xpu_timer_proto::v1::Stream| stream.last_launch_ns == newest || handles.contains(&stream.handle);
    FlightRecord {
        rank: None,
        communicators: flight.communicators.clone(),
        operations: (0..flight.operations.len()).filter(kept).map(|index| flight.operations[index].clone()).collect(),
        streams: flight.streams.iter().filter(stream_kept).cloned().collect(),
        coverage: Vec::new(),
        health: flight.health.clone(),
        kernels: compared_kernels(flight).into_iter().cloned().collect(),
        ..*flight
    }
}

fn movement(moved: Movement) -> HostMovement {
    let Movement {
        cpu_share,
        io_bytes,
        io,
        own_frame,
        main_ran,
        main_ran_seldom,
        helper_busy,
        helper_progressed,
        helper_may_loop,
        library_progressed,
        runnable,
    } = moved;
    HostMovement {
        cpu_share,
        io_bytes,
        io,
        own_frame,
        main_ran,
        main_ran_seldom,
        helper_busy,
        helper_progressed,
        helper_may_loop,
        library_progressed,
        runnable,
    }
}

fn read(dump: &Stacktrace, training: Option<u32>) -> HostFacts {
    let Host {
        pid,
        parent_pid,
        ended_parent_pid,
        command,
        stack,
        state,
        observed,
        same_in_both,
        location,
        moved,
        d_sleep,
        awaited,
        thread_waits,
        timed,
        awaits_result,
        has_locked_threads,
        lost_request,
        polling,
        rests,
        connections,
    } = stacks::read(dump, training);
    HostFacts {
        stack,
        state,
        activity: activity(observed.activity).into(),
        witness: observed.witness,
        same_in_both,
        python: location.python,
        python_function: location.python_function,
        native: location.native,
        moved: moved.map(movement),
        d_sleep: d_sleep.map(|DSleep { main, thread, wchan }| Box::new(HostSleep { main, thread, wchan })),
        stuck_helper: stacks::stuck_helper(dump, training)
            .map(|StuckHelper { name, state, pid, command }| HostHelper { who: name, place: state, pid, command })
            .map(Box::new),
        gil_holder: stacks::gil_holder(dump).map(|GilHolder { thread, function, location, waiting }| {
            Box::new(HostGilHolder { thread, function, place: location, waiting: waiting as u64 })
        }),
        compiler: stacks::compiler_child(dump),
        suspended: suspended::facts(dump),
        awaited: awaited.map(Box::new),
        thread_waits: thread_waits
            .into_iter()
            .map(|ThreadWait { awaited, own }| HostThreadWait { awaited: Some(awaited), own })
            .collect(),
        timed,
        awaits_result,
        has_locked_threads,
        lost_request,
        caller: location.caller,
        pid,
        command,
        parent_pid,
        ended_parent_pid,
        other_thread: stacks::other_thread(dump, training),
        libraries: known_defects::libraries(dump),
        defect_signs: known_defects::signs(dump),
        tcp_connections: connections,
        rests,
        polling: polling.map(|Polling { sharers, in_ring }| Box::new(HostPolling { sharers, in_ring })),
    }
}

/// The process and the main thread of a rank.
pub(crate) fn host(evidence: &RankEvidence) -> Host {
    if let Some(dump) = &evidence.dump {
        return stacks::read(dump, training(evidence));
    }
    evidence.host.as_ref().map_or_else(Host::default, host_of_facts)
}

/// A process that is not a rank, and its main thread.
pub(crate) fn host_of_process(evidence: &ProcessEvidence) -> Host {
    match &evidence.dump {
        Some(dump) => stacks::read(dump, None),
        None => evidence.host.as_ref().map_or_else(Host::default, host_of_facts),
    }
}

fn host_of_facts(facts: &HostFacts) -> Host {
    Host {
        pid: facts.pid,
        parent_pid: facts.parent_pid,
        ended_parent_pid: facts.ended_parent_pid,
        connections: facts.tcp_connections.clone(),
        command: facts.command.clone(),
        stack: facts.stack,
        state: facts.state.clone(),
        observed: ObservedActivity { activity: of_message(facts.activity()), witness: facts.witness.clone() },
        same_in_both: facts.same_in_both,
        location: Location {
            python: facts.python.clone(),
            python_function: facts.python_function.clone(),
            caller: facts.caller.clone(),
            native: facts.native.clone(),
        },
        awaited: facts.awaited.as_deref().cloned(),
        thread_waits: facts.thread_waits.iter().filter_map(thread_wait).collect(),
        timed: facts.timed,
        awaits_result: facts.awaits_result,
        has_locked_threads: facts.has_locked_threads,
        lost_request: facts.lost_request.clone(),
        rests: facts.rests,
        polling: facts
            .polling
            .as_deref()
            .map(|polling| Polling { sharers: polling.sharers.clone(), in_ring: polling.in_ring }),
        moved: facts.moved.as_ref().map(|moved| Movement {
            cpu_share: moved.cpu_share,
            io_bytes: moved.io_bytes,
            io: moved.io,
            own_frame: moved.own_frame,
            main_ran: moved.main_ran,
            main_ran_seldom: moved.main_ran_seldom,
            helper_busy: moved.helper_busy,
            helper_progressed: moved.helper_progressed,
            helper_may_loop: moved.helper_may_loop,
            library_progressed: moved.library_progressed,
            runnable: moved.runnable,
        }),
        d_sleep: facts.d_sleep.as_ref().map(|sleep| DSleep {
            main: sleep.main,
            thread: sleep.thread.clone(),
            wchan: sleep.wchan.clone(),
        }),
    }
}

fn thread_wait(facts: &HostThreadWait) -> Option<ThreadWait> {
    Some(ThreadWait { awaited: facts.awaited.clone()?, own: facts.own })
}

/// See [`stacks::stuck_helper`].
pub(crate) fn stuck_helper(evidence: &RankEvidence) -> Option<StuckHelper> {
    match &evidence.dump {
        Some(dump) => stacks::stuck_helper(dump, training(evidence)),
        None => {
            let helper = evidence.host.as_ref()?.stuck_helper.as_ref()?;
            Some(StuckHelper {
                name: helper.who.clone(),
                state: helper.place.clone(),
                pid: helper.pid,
                command: helper.command.clone(),
            })
        }
    }
}

/// See [`stacks::other_thread`].
pub(crate) fn other_thread(evidence: &RankEvidence) -> Option<String> {
    match &evidence.dump {
        Some(dump) => stacks::other_thread(dump, training(evidence)),
        None => evidence.host.as_ref()?.other_thread.clone(),
    }
}

/// See [`stacks::other_thread`].
pub(crate) fn other_thread_of(evidence: &ProcessEvidence) -> Option<String> {
    match &evidence.dump {
        Some(dump) => stacks::other_thread(dump, None),
        None => evidence.host.as_ref()?.other_thread.clone(),
    }
}

/// See [`stacks::gil_holder`].
pub(crate) fn gil_holder(evidence: &RankEvidence) -> Option<GilHolder> {
    gil_holder_of(evidence.dump.as_deref(), evidence.host.as_ref())
}

/// The holder of a process's GIL, from its dump or from the facts in its place.
pub(crate) fn gil_holder_of(dump: Option<&Stacktrace>, facts: Option<&HostFacts>) -> Option<GilHolder> {
    match dump {
        Some(dump) => stacks::gil_holder(dump),
        None => {
            let holder = facts?.gil_holder.as_ref()?;
            Some(GilHolder {
                thread: holder.thread.clone(),
                function: holder.function.clone(),
                location: holder.place.clone(),
                waiting: usize::try_from(holder.waiting).unwrap_or(usize::MAX),
            })
        }
    }
}

/// See [`known_defects::signs`].
pub(crate) fn defect_signs(evidence: &RankEvidence) -> Cow<'_, [String]> {
    match &evidence.dump {
        Some(dump) => known_defects::signs(dump).into(),
        None => evidence.host.as_ref().map(|host| host.defect_signs.as_slice()).unwrap_or_default().into(),
    }
}

/// See [`known_defects::libraries`].
pub(crate) fn libraries(evidence: &RankEvidence) -> Cow<'_, [Library]> {
    match &evidence.dump {
        Some(dump) => known_defects::libraries(dump).into(),
        None => evidence.host.as_ref().map(|host| host.libraries.as_slice()).unwrap_or_default().into(),
    }
}

/// See [`stacks::compiler_child`].
pub(crate) fn compiler_child(evidence: &RankEvidence) -> Option<String> {
    match &evidence.dump {
        Some(dump) => stacks::compiler_child(dump),
        None => evidence.host.as_ref()?.compiler.clone(),
    }
}

fn activity(activity: Activity) -> HostActivity {
    match activity {
        Activity::Unknown => HostActivity::Unknown,
        Activity::DeviceWait => HostActivity::DeviceWait,
        Activity::CommInit => HostActivity::CommInit,
        Activity::DataLoader => HostActivity::DataLoader,
        Activity::Io => HostActivity::Io,
        Activity::Lock => HostActivity::Lock,
        Activity::Gil => HostActivity::Gil,
        Activity::Compile => HostActivity::Compile,
        Activity::Gc => HostActivity::Gc,
        Activity::Sleep => HostActivity::Sleep,
        Activity::Teardown => HostActivity::Teardown,
        Activity::Running => HostActivity::Running,
    }
}

fn of_message(activity: HostActivity) -> Activity {
    match activity {
        HostActivity::Unknown => Activity::Unknown,
        HostActivity::DeviceWait => Activity::DeviceWait,
        HostActivity::CommInit => Activity::CommInit,
        HostActivity::DataLoader => Activity::DataLoader,
        HostActivity::Io => Activity::Io,
        HostActivity::Lock => Activity::Lock,
        HostActivity::Gil => Activity::Gil,
        HostActivity::Compile => Activity::Compile,
        HostActivity::Gc => Activity::Gc,
        HostActivity::Sleep => Activity::Sleep,
        HostActivity::Teardown => Activity::Teardown,
        HostActivity::Running => Activity::Running,
    }
}
