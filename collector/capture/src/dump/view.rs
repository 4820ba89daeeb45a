//! The choice of stacks.

/// Which stacks are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Native,
    Python,
    Merged,
}
