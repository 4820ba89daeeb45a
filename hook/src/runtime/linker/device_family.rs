//! The family of devices that this process uses, determined by its loaded libraries.

use std::sync::atomic::{AtomicUsize, Ordering};

use xpu_timer_proto::family::{FAMILIES, Family};

use crate::runtime::linker::dynamic::loaded;

/// Index of the family plus one, 0 while no runtime is loaded.
static CURRENT: AtomicUsize = AtomicUsize::new(0);

/// The family whose runtime is loaded. Determined once, because a name such as `mcclAllReduce` must
/// not change its meaning.
pub fn current() -> Option<&'static Family> {
    if CURRENT.load(Ordering::Relaxed) == 0 {
        let found = FAMILIES.iter().position(|family| family.is_loaded(|soname| loaded(soname).is_some()))?;
        CURRENT.store(found + 1, Ordering::Relaxed);
    }
    FAMILIES.get(CURRENT.load(Ordering::Relaxed) - 1)
}

/// The process's family, or all families while no runtime is loaded.
pub fn candidates() -> impl Iterator<Item = &'static Family> {
    let current = current();
    FAMILIES.iter().filter(move |family| current.is_none_or(|current| std::ptr::eq(current, *family)))
}
