//! Counts of the interpreter of one process.

use std::sync::Arc;

use crate::cpython::layout::Layout;

use super::{data_loaders::Loaders, gc, reader::Python, threads};

/// Reads the counts of one interpreter again and again.
pub(crate) struct Counting {
    live: i32,
    runtime: u64,
    layout: Arc<Layout>,
    loaders: Loaders,
}

impl Counting {
    /// Prepares to read the counts of an interpreter.
    pub fn new(python: Python) -> Self {
        Counting {
            live: python.live,
            runtime: python.place.address,
            layout: python.place.layout,
            loaders: Loaders::default(),
        }
    }

    /// The number of garbage collections, and the number of batches that data loaders have yielded,
    /// if there are any. `None` if the interpreter is no longer readable. Unknown data loaders are
    /// found only by a search.
    pub fn read(&mut self, search: bool) -> Option<(u64, Option<u64>)> {
        let interpreters = threads::interpreters(self.live, &self.layout, self.runtime).ok()?;
        let collections = gc::collections(self.live, &self.layout, self.runtime, &interpreters)?;
        self.loaders.look(self.live, &self.layout);
        if search {
            self.loaders.search(self.live, &self.layout, &interpreters);
        }
        Some((collections, self.loaders.yielded()))
    }
}
