//! What a loaded object means for the inline hooks.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicU32, Ordering},
};

use xpu_timer_proto::family::{FAMILIES, Library};

use crate::runtime::linker::elf::Object;

/// Which functions are replaced (`XPU_TIMER_INLINE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Level {
    /// Nothing.
    Off = 1,
    /// Functions that cannot be reached otherwise.
    Auto = 2,
    /// Also functions of the driver and the runtime where these libraries bind to themselves. What
    /// the driver launches internally belongs to a launch that is seen anyway, so this is for
    /// investigations.
    All = 3,
}

pub static LEVEL: AtomicU32 = AtomicU32::new(Level::Off as u32);

/// What a loaded object means for the inline hooks.
pub(crate) struct Role {
    pub is_program: bool,
    pub is_symbolic: bool,
    /// It is a library of a device family.
    is_family: bool,
}

impl Role {
    pub fn of(object: &Object, is_program: bool) -> Self {
        let soname = object.soname();
        let is_one_of = |sonames: &[&CStr]| sonames.iter().any(|name| name.to_bytes() == soname);
        let is_family =
            FAMILIES.iter().any(|family| Library::ALL.iter().any(|library| is_one_of(family.sonames(*library))));
        Role { is_program, is_symbolic: object.is_symbolic, is_family }
    }

    /// Whether calls of an exported function of this library can bypass every preloaded symbol.
    pub fn hides_exported(&self, library: Library) -> bool {
        match library {
            // The program is searched before preloaded libraries.
            Library::Collectives | Library::Blas => self.is_program || self.is_symbolic,
            Library::Driver | Library::Runtime => {
                self.is_symbolic && self.is_family && LEVEL.load(Ordering::Relaxed) == Level::All as u32
            }
            _ => false,
        }
    }

    /// Whether the object may contain copies of functions that it does not export.
    pub(crate) fn may_hide_copies(&self) -> bool {
        !self.is_family
    }
}
