//! The choice between native, Python and merged stacks.

/// Which stacks to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Native,
    Python,
    Merged,
}
