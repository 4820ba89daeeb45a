//! A rank creates the communicator with another number of ranks than the others.

use super::super::{
    case::Case,
    death::describe_end,
    rule::{Finding, Statement},
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect},
    text::{capital, ranks},
    verdict::Confidence,
};

/// The number of ranks that a rank passes to the creation of a suspect's communicator, and the
/// number that most others pass, if the two differ.
pub(crate) fn other_size(case: &Case<'_>, suspect: &Suspect, rank_index: usize) -> Option<(u32, u32)> {
    let events = match suspect {
        Suspect::Host { events, .. } => events.as_slice(),
        Suspect::Complete(event) => std::slice::from_ref(event),
        _ => return None,
    };
    events.iter().find_map(|event| {
        let Event::Init { comm } = *event else { return None };
        let comm = &case.comms[comm];
        let claim =
            |claimed_size: u32| comm.members.iter().filter(|member| member.claimed_size == claimed_size).count();
        let own = comm.member(rank_index)?.claimed_size;
        // More ranks have come than this rank expects, whatever number the majority passes.
        let too_few = comm.members.len() > own as usize && claim(comm.size) > 0;
        (own > 0 && own != comm.size && (too_few || claim(comm.size) > claim(own))).then_some((own, comm.size))
    })
}

/// Finds ranks that create the communicator with another number of ranks than the others.
pub(super) fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let views: Vec<usize> = match suspect {
        Suspect::Host { rank_index, .. } => vec![*rank_index],
        Suspect::Complete(Event::Init { comm }) => {
            case.comms[*comm].members.iter().map(|member| member.rank_index).collect()
        }
        _ => return None,
    };
    let sizes: Vec<(usize, (u32, u32))> =
        views.into_iter().filter_map(|rank_index| Some((rank_index, other_size(case, suspect, rank_index)?))).collect();
    let &(first, (own, right)) = sizes.first()?;
    let event = case.main_event(suspect)?;
    let culprits: Vec<usize> = sizes.iter().map(|(rank_index, _)| *rank_index).collect();
    let who = case.world.ranks(culprits.iter().copied());
    let verb = if who.len() == 1 { "creates" } else { "create" };
    let inside = case
        .world
        .ranks(case.graph.waiters_of(event).iter().copied().filter(|rank_index| !culprits.contains(rank_index)));
    let mut evidence = vec![line(
        format!("{} {verb} a communicator as one of {own} ranks, {} as one of {right}", ranks(&who), ranks(&inside)),
        who.clone(),
    )];
    for &rank_index in culprits.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding {
        statement: Statement::Sentence(format!(
            "{} {verb} the communicator as one of {own} ranks, {} as one of {right}{}.",
            capital(&ranks(&who)),
            ranks(&inside),
            match (who.as_slice(), case.view(first).dead()) {
                ([rank], true) => format!("; rank {rank} {}", describe_end(case, first, Number::One)),
                ([rank], false) if !case.place(first).is_empty() =>
                    format!("; rank {rank} stands{}", case.place(first)),
                _ => String::new(),
            },
        )),
        // The majority counts only ranks that have come. A rank that passes the world size may be
        // right against it.
        confidence: if culprits.len() > inside.len() || own == case.world.size {
            Confidence::Medium
        } else {
            case.members_confidence(&[event])
        },
        culprits,
        evidence,
    })
}
