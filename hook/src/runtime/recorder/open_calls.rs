//! The table of operations that host threads are executing.

use std::sync::atomic::{AtomicU32, Ordering};

/// Operations that can be open and watched at the same time. Further ones are only recorded.
pub const CELLS: usize = 256;

/// The open operations of the process. A cell contains a slot plus one, 0 for none.
pub struct OpenCalls {
    cells: [AtomicU32; CELLS],
}

impl OpenCalls {
    /// An empty table.
    pub fn new() -> Self {
        OpenCalls { cells: [const { AtomicU32::new(0) }; CELLS] }
    }

    /// The slots of all open operations.
    pub fn slots(&self) -> impl Iterator<Item = usize> {
        let held = self.cells.iter().map(|cell| cell.load(Ordering::Acquire));
        held.filter_map(|link| Some(link.checked_sub(1)? as usize))
    }

    /// Takes a cell for a slot and returns its number plus one, 0 when there is none. Each thread
    /// begins the search at a different cell.
    pub fn put(&self, slot: usize, tid: u32) -> usize {
        let link = slot as u32 + 1;
        let order = (0..CELLS).map(|step| (tid as usize + step) % CELLS);
        let free = |cell: &usize| {
            let cell = &self.cells[*cell];
            cell.load(Ordering::Relaxed) == 0
                && cell.compare_exchange(0, link, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        order.into_iter().find(free).map_or(0, |cell| cell + 1)
    }

    /// Frees a cell, by its number plus one.
    pub fn clear(&self, cell: usize) {
        if let Some(cell) = cell.checked_sub(1).and_then(|cell| self.cells.get(cell)) {
            cell.store(0, Ordering::Release);
        }
    }
}
