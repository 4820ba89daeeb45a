//! Child processes that compile.

use xpu_timer_proto::server::Stacktrace;

use super::{names::base_name, patterns};

/// The name of a child process that is a compiler, if it is alive.
pub(crate) fn compiler_child(dump: &Stacktrace) -> Option<String> {
    dump.children.iter().find_map(|child| {
        let mut words = child.command.split_whitespace().map(base_name);
        let program = words.find(|word| !patterns::INTERPRETERS.contains(word))?;
        let alive = child.samples.last().is_none_or(|sample| !sample.process_state.starts_with(['Z', 'X', 'x']));
        (alive && patterns::COMPILERS.contains(&program)).then(|| program.to_owned())
    })
}
