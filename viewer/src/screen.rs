//! What stdout can show: its width and whether it understands colours.

/// What stdout can show. The default is plain text of any width.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Screen {
    /// Columns; `None` for lines of any length.
    pub width: Option<usize>,
    /// Whether the terminal understands escape sequences for colours.
    pub colour: bool,
}
