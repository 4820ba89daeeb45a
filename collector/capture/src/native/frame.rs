//! A frame of a native stack before it has a name.

/// One frame before it has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RawFrame {
    pub pc: u64,
    /// True when `pc` is the next instruction to run (the leaf, and what a signal interrupted), false for a return address,
    /// whose call lies before it.
    pub exact: bool,
    /// True for the code that the kernel makes a signal handler return to.
    pub signal: bool,
}

impl RawFrame {
    /// An address within the instruction that the frame is at.
    pub fn lookup(&self) -> u64 {
        if self.exact { self.pc } else { self.pc.wrapping_sub(1) }
    }
}
