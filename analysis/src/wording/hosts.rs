//! The process, the host or the device of one rank holds up the others.

use xpu_timer_proto::{
    server::AwaitedKind,
    v1::{Failure, FailureKind, Operation, Presence},
};

use super::{Number, Ranks, Statement, about, collectives, detail, line, phrases};
use crate::{
    case::{Case, Position},
    explanation::{Differ, HostState},
    facts,
    graph::Event,
    stacks::{GilHolder, NO_OTHER_THREAD},
    text::shape,
    verdict::EvidenceLine,
};

/// The end of a process: `is dead (killed by SIGKILL)`.
pub(super) fn end(case: &Case<'_>, rank_index: usize, number: Number) -> String {
    let view = case.view(rank_index);
    let exit = view.evidence.map(|evidence| evidence.exit.as_str()).filter(|exit| !exit.is_empty());
    let reason = view.reason().map(|failure| format!(": {}", reason_text(failure))).unwrap_or_default();
    let exit = exit.map_or(String::new(), |exit| format!(" ({exit}{reason})"));
    match view.presence {
        Presence::Left => format!("{} exited{exit}", number.has()),
        _ if view.host.state.starts_with('Z') => {
            format!(
                "{} dead: {}{exit}",
                number.is(),
                number.word("its process is a zombie", "their processes are zombies")
            )
        }
        _ if exit.is_empty() => {
            format!("{} dead: {} gone", number.is(), number.word("its process is", "their processes are"))
        }
        _ => format!("{} dead{exit}", number.is()),
    }
}

/// Maximum number of characters of a failure's text in a sentence.
const MOST_REASON: usize = 160;
/// Number of native functions that a line of evidence shows.
const SHOWN_FRAMES: usize = 8;

/// A failure as a reason: `ValueError: bad batch at train.py:33 in step`.
fn reason_text(failure: &Failure) -> String {
    let message: String = failure.message.chars().take(MOST_REASON).collect();
    let cut = if failure.message.len() > message.len() { "…" } else { "" };
    let place = |word: &str| match failure.place.as_str() {
        "" => String::new(),
        place => format!(" {word} {place}"),
    };
    let thread = if failure.thread.is_empty() { String::new() } else { format!(", {}", failure.thread) };
    match failure.kind() {
        FailureKind::LastLine => format!("its last line on standard error is {message:?}{cut}"),
        FailureKind::Signal if message.is_empty() => format!("{}{}{thread}", failure.r#type, place("in")),
        FailureKind::Signal => {
            // The place may have two parts.
            let colon = match (message.starts_with("at address "), failure.place.contains(", ")) {
                (true, true) => ",",
                (true, false) => "",
                _ => ":",
            };
            format!("{}{}{colon} {message}{cut}{thread}", failure.r#type, place("in"))
        }
        _ if message.is_empty() => format!("{}{}{thread}", failure.r#type, place("at")),
        _ => format!("{}: {message}{cut}{}{thread}", failure.r#type, place("at")),
    }
}

/// The thread of a rank that an exception has ended, as a clause. Others may wait for its work.
fn beside_ended_thread(case: &Case<'_>, rank_index: usize, number: Number) -> Option<String> {
    let failed = case.view(rank_index).failures().iter().find(|failure| {
        failure.kind() == FailureKind::Exception && !failure.ignored && failure.thread.starts_with("thread ")
    })?;
    let reason = reason_text(&Failure { thread: String::new(), ..failed.clone() });
    Some(format!(", and {} {} has ended: {reason}", number.its(), failed.thread))
}

/// The line of evidence about a failure of some ranks.
pub(super) fn failure_text(who: &Ranks, failure: &Failure) -> String {
    let reason = reason_text(failure);
    let (who, number) = (who.text(), who.number());
    match failure.kind() {
        FailureKind::Handled => format!("{who} {} handling an exception: {reason}", number.is()),
        FailureKind::Signal => {
            let functions: Vec<&str> = failure.frames.iter().take(SHOWN_FRAMES).map(String::as_str).collect();
            let stack =
                if functions.is_empty() { String::new() } else { format!("; stack: {}", functions.join(" < ")) };
            format!("{who} received {reason}{stack}")
        }
        FailureKind::LastLine => format!("{who}: {reason}"),
        _ if failure.ignored => format!("Python ignored an exception of {who}: {reason}"),
        _ => format!("{who} raised {reason}"),
    }
}

/// The text about what holds one rank.
pub(super) fn statement(case: &Case<'_>, rank_index: usize, state: &HostState) -> Statement {
    match state {
        HostState::Ended => ended(case, rank_index),
        HostState::Stopped => stopped(case, rank_index),
        HostState::SleepsUninterruptibly { wchan } => sleeps_uninterruptibly(case, rank_index, wchan),
        HostState::WaitsForLoader => waits_for_loader(case, rank_index),
        HostState::DeadlockedOnGil(holder) => deadlocked_on_gil(holder),
        HostState::WaitsForLock { shared } => waits_for_lock(case, rank_index, *shared),
        HostState::StuckInIo { file_lock } => stuck_in_io(case, rank_index, *file_lock),
        HostState::Compiles { compiler } => compiles(case, rank_index, compiler.as_deref()),
        HostState::CollectsGarbage => collects_garbage(case, rank_index),
        HostState::MakesProgress { in_python } => makes_progress(case, rank_index, *in_python),
        HostState::SlowDevice => slow_device(case, rank_index),
        HostState::StuckOnDevice { operation, last } => {
            stuck_on_device(case, rank_index, operation.as_deref(), last.as_deref())
        }
        HostState::ShutsDown => shuts_down(case, rank_index),
    }
}

/// The line of evidence about what holds one rank. `None` if the other facts show it.
pub(super) fn state_line(case: &Case<'_>, rank_index: usize, state: &HostState) -> Option<EvidenceLine> {
    Some(match state {
        HostState::Ended => ended_line(case, rank_index),
        HostState::Stopped => stopped_line(case, rank_index),
        HostState::SleepsUninterruptibly { wchan } => sleeps_uninterruptibly_line(case, rank_index, wchan),
        HostState::DeadlockedOnGil(holder) => deadlocked_on_gil_line(case, rank_index, holder),
        HostState::Compiles { compiler } => compiles_line(case, rank_index, compiler.as_deref()),
        HostState::MakesProgress { in_python } => makes_progress_line(case, rank_index, *in_python),
        HostState::SlowDevice => slow_device_line(case, rank_index),
        HostState::StuckOnDevice { operation, .. } => pending_line(case, rank_index, operation.as_deref()?),
        HostState::WaitsForLoader
        | HostState::WaitsForLock { .. }
        | HostState::StuckInIo { .. }
        | HostState::CollectsGarbage
        | HostState::ShutsDown => return None,
    })
}

/// A rank whose process has ended.
fn ended(case: &Case<'_>, rank_index: usize) -> Statement {
    Statement::of_ranks(|number| end(case, rank_index, number))
}

pub(super) fn ended_line(case: &Case<'_>, rank_index: usize) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank} {}", end(case, rank_index, Number::One)), vec![rank])
}

/// Ranks that completed a collective and are gone, while others are still inside.
pub(super) fn gone_after(case: &Case<'_>, gone: &[usize], event: Event) -> Statement {
    let who = Ranks::of(case, gone);
    Statement::Sentence(format!(
        "{} died after {} completed {}; the others are still in it.",
        who.capital(),
        who.number().it(),
        case.describe(event)
    ))
}

/// A process that a signal, a debugger or the freezer of its control group has stopped.
fn stopped(case: &Case<'_>, rank_index: usize) -> Statement {
    let state = &case.view(rank_index).host.state;
    let how = |number: Number| match state.chars().next() {
        Some('F') => format!("frozen with {} control group (a paused container?)", number.its()),
        Some('t') => format!("stopped by a debugger (state {state})"),
        _ => format!("stopped by a signal (state {state})"),
    };
    Statement::of_ranks(|number| format!("{} {}{}", number.is(), how(number), case.place(rank_index)))
}

fn stopped_line(case: &Case<'_>, rank_index: usize) -> EvidenceLine {
    about(case, rank_index, &format!("is in process state {}", case.view(rank_index).host.state))
}

pub(super) fn kernel_function(wchan: &str) -> String {
    if wchan.is_empty() { String::new() } else { format!(" in kernel function {wchan}") }
}

/// A rank in uninterruptible sleep in a kernel function, whose name may be empty.
fn sleeps_uninterruptibly(case: &Case<'_>, rank_index: usize, wchan: &str) -> Statement {
    let sleeps = |number: Number| number.word("sleeps", "sleep");
    let (place, at) = (kernel_function(wchan), case.place(rank_index));
    Statement::of_ranks(|number| format!("{} uninterruptibly{place}{at}", sleeps(number)))
}

fn sleeps_uninterruptibly_line(case: &Case<'_>, rank_index: usize, wchan: &str) -> EvidenceLine {
    let place = kernel_function(wchan);
    about(case, rank_index, &format!("is in state D{place} in both samples and did not run in between"))
}

/// A rank that waits for its data loader.
fn waits_for_loader(case: &Case<'_>, rank_index: usize) -> Statement {
    let (helper, awaits) = (case.helper_text(rank_index), case.awaited_text(rank_index));
    Statement::of_ranks(|number| {
        let because = match (&helper, &awaits) {
            (Some(helper), _) => format!(", whose {helper}"),
            (None, Some(awaits)) => format!(", through {awaits}"),
            (None, None) => beside_ended_thread(case, rank_index, number).unwrap_or_default(),
        };
        format!("{} for {} data loader{}{because}", number.waits(), number.its(), case.place(rank_index))
    })
}

pub(super) fn gil_held(holder: &GilHolder) -> String {
    let location = holder.location.as_ref().map_or(String::new(), |location| format!(" at {location}"));
    format!(
        "deadlocked on the GIL: thread {} holds it and is blocked in {}{location}, and {}",
        holder.thread,
        holder.function,
        match holder.waiting {
            0 => "no other thread can run Python code".to_owned(),
            1 => "another thread waits for it".to_owned(),
            waiting => format!("{waiting} other threads wait for it"),
        }
    )
}

/// A rank in which a blocked thread holds the GIL.
fn deadlocked_on_gil(holder: &GilHolder) -> Statement {
    let how = gil_held(holder);
    Statement::of_ranks(|number| format!("{} {how}", number.is()))
}

fn deadlocked_on_gil_line(case: &Case<'_>, rank_index: usize, holder: &GilHolder) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank} is {}, in both samples", gil_held(holder)), vec![rank])
}

/// A rank that waits for a lock of its process, or for one that processes share. The lock is named
/// with its holder if that is known, else with what the other threads of the process do.
fn waits_for_lock(case: &Case<'_>, rank_index: usize, shared: bool) -> Statement {
    let awaited = case.awaited_text(rank_index);
    let is_mutex = case.awaited(rank_index).is_some_and(|awaited| awaited.kind() == AwaitedKind::Mutex);
    let is_own = awaited.is_none() && !shared || is_mutex;
    let other = || case.view(rank_index).evidence.and_then(facts::other_thread).filter(|_| is_own);
    let helper = case.helper_text(rank_index).or_else(other);
    Statement::of_ranks(|number| {
        let (waits, its, place) = (number.waits(), number.its(), case.place(rank_index));
        let ended = beside_ended_thread(case, rank_index, number).filter(|_| awaited.is_none() && !shared);
        let helper = helper.as_deref().map(|helper| beside_lock(helper, number));
        let helper = ended.or(helper).unwrap_or_default();
        match (&awaited, shared) {
            (Some(lock), _) => format!("{waits} for {lock}{place}{helper}"),
            (None, true) => format!("{waits} for a lock that several processes share{place}{helper}"),
            (None, false) => format!("{waits} for a lock or a thread of {its} own process{place}{helper}"),
        }
    })
}

/// What another thread or a child process does while the main thread waits for a lock, as a clause.
pub(super) fn beside_lock(helper: &str, number: Number) -> String {
    match helper {
        NO_OTHER_THREAD => format!(", and {} {helper}", number.it_has()),
        helper => format!(", while {} {helper}", number.its()),
    }
}

/// A rank inside a read, write or sync, or in a call that waits for a file lock.
fn stuck_in_io(case: &Case<'_>, rank_index: usize, file_lock: bool) -> Statement {
    let what = case.awaited_text(rank_index);
    Statement::of_ranks(|number| {
        // The place ends with the C function, unless the sentence names it already.
        let witness = case.witness(rank_index);
        let position = case.position(rank_index);
        let native = position.native.filter(|native| *native != witness || position.python.is_none());
        let place = phrases::place(Position { native, ..position });
        if file_lock {
            let what = what.as_deref().unwrap_or("a file lock that another process or file handle holds");
            return format!("{} for {what}, in {witness}{place}", number.waits());
        }
        let of = what.as_ref().map_or(String::new(), |what| format!(" of {what}"));
        format!("{} stuck in {witness}{of}{place}", number.is())
    })
}

/// Ranks that wait for each other: `Ranks 0-1 wait for each other: rank 0 is at a.py:7 in pull, and
/// waits for …`.
pub(super) fn hold_each_other(case: &Case<'_>, cycle: &[usize]) -> Statement {
    const SHOWN: usize = 4;
    let one = |rank_index: &usize| {
        let rank = case.view(*rank_index).rank;
        format!("rank {rank} is{}{}", case.place(*rank_index), case.own_wait_clause(*rank_index, Number::One))
    };
    let places: Vec<String> = cycle.iter().take(SHOWN).map(one).collect();
    let who = Ranks::of(case, cycle).capital();
    Statement::Sentence(format!("{who} wait for each other: {}", places.join("; ")))
}

/// A rank that has a resource for which another rank waits. `inside` is the event in which the
/// holder waits itself.
pub(super) fn holds_up(case: &Case<'_>, holder: usize, waiter: usize, inside: Option<Event>) -> Statement {
    let (rank, other) = (case.view(holder).rank, case.view(waiter).rank);
    let what = case.awaited_text(waiter).unwrap_or_default();
    let holder_location = match (inside, case.place(holder)) {
        (Some(event), _) => format!("; rank {rank} is itself in {}", case.describe(event)),
        (None, place) if place.is_empty() => String::new(),
        (None, place) => format!("; rank {rank} is{place}"),
    };
    let place = case.place(waiter);
    Statement::Sentence(format!("Rank {rank} holds up rank {other}, which waits for {what}{place}{holder_location}."))
}

/// The compiler of a rank, as a phrase: `in torch._dynamo…` or `in its child process nvcc`.
fn compiler_phrase(case: &Case<'_>, rank_index: usize, compiler: Option<&str>, number: Number) -> String {
    match compiler {
        None => format!("in {}", case.witness(rank_index)),
        Some(compiler) => format!("in {} {compiler}", number.word("its child process", "their child processes")),
    }
}

/// A rank that compiles, by itself or in a child process with the name `compiler`.
fn compiles(case: &Case<'_>, rank_index: usize, compiler: Option<&str>) -> Statement {
    Statement::of_ranks(|number| {
        format!(
            "{} compiling {}, which is slow but probably not a hang{}",
            number.is(),
            compiler_phrase(case, rank_index, compiler, number),
            case.location_clause(rank_index, number)
        )
    })
}

fn compiles_line(case: &Case<'_>, rank_index: usize, compiler: Option<&str>) -> EvidenceLine {
    about(case, rank_index, &format!("is compiling {}", compiler_phrase(case, rank_index, compiler, Number::One)))
}

/// A rank that collects Python garbage.
fn collects_garbage(case: &Case<'_>, rank_index: usize) -> Statement {
    Statement::of_ranks(|number| {
        let (is, place) = (number.is(), case.place(rank_index));
        format!("{is} collecting Python garbage{place}, which is slow but probably not a hang")
    })
}

/// What makes progress.
fn progressing_part(in_python: bool) -> &'static str {
    if in_python { "Python code" } else { "I/O" }
}

/// A busy rank that makes progress: in its Python code, or by the bytes that it reads and writes.
fn makes_progress(case: &Case<'_>, rank_index: usize, in_python: bool) -> Statement {
    let what = progressing_part(in_python);
    Statement::of_ranks(|number| {
        let (is, its, place) = (number.is(), number.its(), case.place(rank_index));
        format!("{is} busy{place}: {its} {what} makes progress, so this is probably a long step and not a hang")
    })
}

fn makes_progress_line(case: &Case<'_>, rank_index: usize, in_python: bool) -> EvidenceLine {
    detail(case, rank_index, &format!("its {} made progress between the samples", progressing_part(in_python)))
}

/// A rank whose device is far behind its host and makes progress.
fn slow_device(case: &Case<'_>, rank_index: usize) -> Statement {
    Statement::of_ranks(|number| {
        let (has, location) = (number.has(), case.location_clause(rank_index, number));
        let device = number.word("a slow device, which makes progress", "slow devices, which make progress");
        format!("{has} {device}, so this is probably not a hang{location}")
    })
}

fn slow_device_line(case: &Case<'_>, rank_index: usize) -> EvidenceLine {
    detail(case, rank_index, "its device made progress between the samples")
}

/// A device on which an operation does not complete: the recorded one, or an unknown one after
/// which kernel `last` was launched.
fn stuck_on_device(case: &Case<'_>, rank_index: usize, operation: Option<&Operation>, last: Option<&str>) -> Statement {
    let culprit = match (operation, last) {
        (Some(operation), _) => format!("{} does not complete", shape(operation)),
        (None, Some(last)) => format!("an operation does not complete; the last launched kernel is {last}"),
        (None, None) => "an operation that is not a collective does not complete".to_owned(),
    };
    Statement::of_ranks(|number| {
        let location = case.location_clause(rank_index, number);
        let device = number.word("its device", "their devices");
        format!("{} stuck on {device}: {culprit}{location}", number.is())
    })
}

fn pending_line(case: &Case<'_>, rank_index: usize, operation: &Operation) -> EvidenceLine {
    detail(case, rank_index, &format!("{} is pending", shape(operation)))
}

/// A rank in the teardown of its communicators or its interpreter.
fn shuts_down(case: &Case<'_>, rank_index: usize) -> Statement {
    let (witness, place) = (case.witness(rank_index), case.place(rank_index));
    // The place may already contain the frame that shows the teardown.
    let inside = if place.contains(&*witness) { String::new() } else { format!(" in {witness}") };
    Statement::of_ranks(|number| format!("{} shutting down{inside}{place}", number.is()))
}

/// Ranks that finalize their library where the others are in a collective.
pub(super) fn shut_down_instead(case: &Case<'_>, culprits: &[usize], differ: &Differ) -> Statement {
    let differs = &collectives::differ_text(case, differ);
    let who = Ranks::of(case, culprits);
    let is = who.number().is();
    Statement::Sentence(format!("{} {is} shutting down while others continue: {}", who.capital(), lower(differs)))
}

/// The text with its first letter in lower case.
fn lower(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// Ranks of a wait cycle that finalize their library, while others wait in other events.
pub(super) fn shut_down_in_cycle(case: &Case<'_>, culprits: &[usize], others: &[Event]) -> Statement {
    let who = Ranks::of(case, culprits);
    let place = super::place_of(case, culprits);
    let others: Vec<String> = others.iter().take(2).map(|event| case.waiters_in(*event)).collect();
    Statement::Sentence(format!(
        "{} {} shutting down{place}, while others continue: {}.",
        who.capital(),
        who.number().is(),
        others.join(", and ")
    ))
}
