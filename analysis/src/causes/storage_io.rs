//! `storage_io`: others wait for a rank whose main thread is inside a read, write or sync that does
//! not progress.
//!
//! In both samples, the innermost native functions, the system call or the kernel function of the
//! main thread move bytes of a file or a pipe, and the number of bytes that the process has read
//! and written hardly changes. If it changes, the storage is slow and the rank is busy:
//! `long_step`. A lock on a file counts as storage, with medium confidence, because the holder of
//! the lock may be to blame. These do not count as storage:
//!
//! - A socket.
//! - A pipe whose other end a child process has, or had until it died.
//! - A terminal or the standard input, unless another rank waits for a message.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    stacks::is_file_lock,
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::StorageIo, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    // A rank that reads from a pipe of its child waits for the child. A rank that reads from a
    // terminal waits for a person; if others wait for it in a collective, that is `missing_rank`.
    let asks = |rank_index: usize| {
        case.at_terminal(rank_index) && matches!(case.main_event(suspect), None | Some(Event::Collective { .. }))
    };
    let beside = |rank_index: usize| case.waits_for_child_by_pipe(rank_index) || asks(rank_index);
    let rank_index =
        case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Io) && !beside(*rank_index))?;
    let view = case.view(rank_index);
    if view.host.moved.is_some_and(|moved| moved.io || moved.own_frame) {
        return None;
    }
    let witness = &view.host.observed.witness;
    let lock = is_file_lock(witness);
    let what = case.awaited_text(rank_index);
    let statement = Statement::of_ranks(|number| {
        let place = case.place(rank_index);
        if lock {
            let what = what.as_deref().unwrap_or("a lock on a file, which another process or file handle holds");
            return format!("{} for {what}, in {witness}{place}", number.waits());
        }
        let of = what.as_ref().map_or(String::new(), |what| format!(" of {what}"));
        format!("{} stuck in {witness}{of}{place}", number.is())
    });
    let most = if lock { Confidence::Medium } else { Confidence::High };
    let mut evidence = vec![line(format!("rank {}: inside {witness}", view.rank), vec![view.rank])];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    let confidence = case.host_confidence(suspect).min(most);
    Some(Finding { culprits: vec![rank_index], statement, confidence, evidence })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    (case.view(culprit).host.stack && culprits.iter().all(|rank_index| !case.does(*rank_index, Activity::Io)))
        .then(|| "the main thread is not inside a read, write or sync".to_owned())
}
