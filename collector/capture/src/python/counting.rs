//! Counts of the interpreter of one process.

use std::sync::Arc;

use crate::cpython::layout::Layout;

use super::{data_loaders::DataLoaders, gc, reader::PythonReader, threads};

/// Reads the counts of one interpreter again and again.
pub(crate) struct CountReader {
    live_tid: i32,
    runtime: u64,
    layout: Arc<Layout>,
    loaders: DataLoaders,
}

impl CountReader {
    /// Prepares to read the counts of an interpreter.
    pub fn new(python: PythonReader) -> Self {
        CountReader {
            live_tid: python.live_tid,
            runtime: python.location.address,
            layout: python.location.layout,
            loaders: DataLoaders::default(),
        }
    }

    /// The number of garbage collections, and the number of batches that data loaders have yielded,
    /// if there are any. `None` if the interpreter is no longer readable. Unknown data loaders are
    /// found only by a search.
    pub fn read(&mut self, search: bool) -> Option<(u64, Option<u64>)> {
        let interpreters = threads::interpreters(self.live_tid, &self.layout, self.runtime).ok()?;
        let collections = gc::collections(self.live_tid, &self.layout, self.runtime, &interpreters)?;
        self.loaders.update(self.live_tid, &self.layout);
        if search {
            self.loaders.search(self.live_tid, &self.layout, &interpreters);
        }
        Some((collections, self.loaders.yielded()))
    }
}
