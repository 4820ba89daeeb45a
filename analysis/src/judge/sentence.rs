//! The sentence of a verdict, from the findings.

use super::arbitration::Ruling;
use crate::{
    causes::{Case, Finding, Number, Statement},
    graph::Suspect,
    text::{capital, ranks},
};

/// Number of suspects that the sentence spells out. The others are counted.
const MAX_SPELLED: usize = 3;

/// The sentence of a verdict. `primary` is the index of the first finding's rule, `main` the
/// suspect with the most waiters among its findings.
pub(super) fn sentence(
    case: &Case<'_>,
    findings: &[Ruling<'_>],
    primary: usize,
    main: Option<&Suspect>,
    culprits: &[usize],
) -> String {
    let mut parts: Vec<String> = Vec::new();
    let of_ranks = |statement: &Statement, views: &[usize]| {
        let who = case.world.ranks(views.iter().copied());
        match (statement, Number::of(who.len())) {
            (Statement::OfRanks { one, .. }, Number::One) => format!("{} {one}", ranks(&who)),
            (Statement::OfRanks { many, .. }, Number::Many) => format!("{} {many}", ranks(&who)),
            (Statement::Sentence(sentence), _) => sentence.trim_end_matches('.').to_owned(),
        }
    };
    let spelled = |finding: &Finding| of_ranks(&finding.statement, &finding.culprits);
    let first: Vec<&Finding> =
        findings.iter().filter(|ruling| ruling.rule == primary).map(|ruling| &ruling.finding).collect();
    let is_sentence = matches!(first[0].statement, Statement::Sentence(_));
    if is_sentence {
        parts.push(spelled(first[0]));
    } else {
        // Ranks with the same statement share one clause.
        let mut said: Vec<(&Statement, Vec<usize>)> = Vec::new();
        for finding in &first {
            match said.iter().position(|(statement, _)| **statement == finding.statement) {
                Some(index) => said[index].1.extend(&finding.culprits),
                None if said.len() < MAX_SPELLED => said.push((&finding.statement, finding.culprits.clone())),
                None => {}
            }
        }
        let counted: usize = said.iter().map(|(_, views)| views.len()).sum();
        for (statement, views) in &said {
            parts.push(of_ranks(statement, views));
        }
        let all: usize = first.iter().map(|finding| finding.culprits.len()).sum();
        if counted < all {
            parts.push(format!("and so do {} more ranks", all - counted));
        }
    }
    let mut text = parts.join("; ");
    if let Some(main) = main.filter(|_| !is_sentence) {
        let waits = case.waiters_clause(main, culprits, &text);
        text.push_str(&waits);
    }
    for ruling in findings.iter().filter(|ruling| ruling.rule != primary).take(MAX_SPELLED) {
        text.push_str("; also ");
        text.push_str(&spelled(&ruling.finding));
    }
    text.push('.');
    capital(&text)
}
