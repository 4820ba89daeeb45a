//! A frame of a native stack before it is symbolized.

/// One frame before it is symbolized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RawFrame {
    pub pc: u64,
    /// True if `pc` is the next instruction to run (the leaf, and the frame that a signal
    /// interrupted). False for a return address, where the call is before `pc`.
    pub exact: bool,
    /// True for the code that the kernel makes a signal handler return to.
    pub signal: bool,
}

impl RawFrame {
    /// An address within the frame's current instruction.
    pub fn lookup(&self) -> u64 {
        if self.exact { self.pc } else { self.pc.wrapping_sub(1) }
    }
}
