//! The exit codes of the programs, besides that of the command.

/// Exit code for wrong usage.
pub(crate) const USAGE: u8 = 2;
/// A shell's exit code for a command that exists but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// A shell's exit code for a command that does not exist.
pub(crate) const NOT_FOUND: u8 = 127;
