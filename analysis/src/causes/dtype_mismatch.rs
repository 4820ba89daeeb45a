//! `dtype_mismatch`: all ranks have entered the same operation with different element types.
//!
//! Like `op_mismatch`, with the same operation and different types. It comes before
//! `size_mismatch`, because a rank that sends the same bytes as another type differs in both. Ranks
//! that differed in the same way before, in an operation that completed, may do so. The rule also
//! covers a send and its receive.

use xpu_timer_proto::v1::{DataType, Operation};

use super::{
    case::Case,
    collective::Collective,
    op_mismatch::{finding, key},
    rule::{Finding, Rule, never_ruled_out},
    size_mismatch,
};
use crate::{
    graph::Suspect,
    text::{dtype_name, op_name},
    verdict::Cause,
};

pub(super) const RULE: Rule = Rule { cause: Cause::DtypeMismatch, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let differ = |one: &Operation, other: &Operation| one.dtype != other.dtype && one.dtype != 0 && other.dtype != 0;
    if let Some(found) = size_mismatch::ends_differ(case, suspect, "types", differ, |operation| operation.dtype as u64)
    {
        return Some(found);
    }
    let collective = Collective::of(case, suspect)?;
    if collective.dissent(case, key).is_some() {
        return None;
    }
    let dissent = collective.new_dissent(case, |operation| operation.dtype)?;
    let op = collective.operations.first()?.1.op();
    let name = |dtype: &i32| {
        let dtype = dtype_name(DataType::try_from(*dtype).unwrap_or_default());
        format!("{} of {}", op_name(op), if dtype.is_empty() { "an unknown type" } else { dtype })
    };
    Some(finding(case, &collective, dissent, name))
}
