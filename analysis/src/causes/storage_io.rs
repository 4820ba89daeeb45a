//! `storage_io`: others wait for a rank whose main thread is inside a read, write or sync that does not progress.
//!
//! The innermost native functions, the system call or the kernel function of the main thread move bytes of a file or a pipe,
//! in both samples, and the bytes that the process has read and written hardly change. When they flow, the storage is slow
//! and the rank is busy: `long_step`. Sockets are not storage.

use super::{Case, Cause, Finding, Rule, Says, line};
use crate::{graph::Suspect, verdict::Activity};

pub(super) const RULE: Rule = Rule { cause: Cause::StorageIo, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let view = case.host(suspect).filter(|view| case.does(*view, Activity::Io))?;
    let content = case.view(view);
    if content.host.moved.is_some_and(|moved| moved.io || moved.own_frame) {
        return None;
    }
    let says = format!("is stuck in {}{}", content.host.doing.witness, case.place(view));
    let mut evidence = vec![line(
        format!("rank {}: main thread inside {}", content.rank, content.host.doing.witness),
        vec![content.rank],
    )];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters(view, event)));
    evidence.extend(case.standing(view));
    Some(Finding { culprits: vec![view], says: Says::Rank(says), confidence: case.host_confidence(suspect), evidence })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    (case.view(culprit).host.stack && culprits.iter().all(|view| !case.does(*view, Activity::Io)))
        .then(|| "the main thread is not inside a read, write or sync".to_owned())
}
