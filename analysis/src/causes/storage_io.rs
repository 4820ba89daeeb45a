//! `storage_io`: others wait for a rank whose main thread is inside a read, write or sync that does not progress.
//!
//! The innermost native functions, the system call or the kernel function of the main thread move bytes of a file or a pipe,
//! in both samples, and the bytes that the process has read and written hardly change. When they flow, the storage is slow
//! and the rank is busy: `long_step`. Sockets are not storage. A lock on a file is, with medium confidence, because whoever holds it
//! may be to blame. A pipe that a child process has the other end of is not.

use super::{Case, Cause, Confidence, Finding, Rule, Says, line};
use crate::{
    facts,
    graph::Suspect,
    stacks::{is_file_lock, moves_bytes},
    verdict::Activity,
};

pub(super) const RULE: Rule = Rule { cause: Cause::StorageIo, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Some(found) = with_global_lock(case, suspect) {
        return Some(found);
    }
    // Who reads what its child writes waits for the child.
    let view = case.host(suspect).filter(|view| case.does(*view, Activity::Io) && !case.child_behind_pipe(*view))?;
    let content = case.view(view);
    if content.host.moved.is_some_and(|moved| moved.io || moved.own_frame) {
        return None;
    }
    let witness = &content.host.doing.witness;
    let lock = is_file_lock(witness);
    let (does, most) = if lock {
        let what = case.awaits(view);
        let what = what.unwrap_or_else(|| "a lock on a file, which another process or file handle holds".to_owned());
        (format!("waits for {what}, in {witness}"), Confidence::Medium)
    } else {
        let of = case.awaits(view).map_or(String::new(), |what| format!(" of {what}"));
        (format!("is stuck in {witness}{of}"), Confidence::High)
    };
    let says = format!("{does}{}", case.place(view));
    let mut evidence = vec![line(format!("rank {}: main thread inside {witness}", content.rank), vec![content.rank])];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters(view, event)));
    evidence.extend(case.standing(view));
    let confidence = case.host_confidence(suspect).min(most);
    Some(Finding { culprits: vec![view], says: Says::Rank(says), confidence, evidence })
}

/// A thread is in a file call and holds Python's global lock, for which the others of the rank wait.
fn with_global_lock(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let view = case.one_rank(suspect)?;
    let content = case.view(view);
    let holder = facts::gil_holder(content.evidence?).filter(|holder| moves_bytes(&holder.function))?;
    let place = holder.place.as_ref().map_or(String::new(), |place| format!(" at {place}"));
    let says = format!(
        "is stuck in {}{place}, on thread {} with Python's global lock held, so no other thread of it runs",
        holder.function, holder.thread
    );
    let mut evidence = vec![line(format!("rank {}: {says}, in both samples", content.rank), vec![content.rank])];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters(view, event)));
    evidence.extend(case.standing(view));
    Some(Finding { culprits: vec![view], says: Says::Rank(says), confidence: case.host_confidence(suspect), evidence })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    (case.view(culprit).host.stack && culprits.iter().all(|view| !case.does(*view, Activity::Io)))
        .then(|| "the main thread is not inside a read, write or sync".to_owned())
}
