//! What the interpreter of one process counts.

use std::sync::Arc;

use crate::cpython::layout::Layout;

use super::{data_loaders::Loaders, gc, reader::Python, threads};

/// What the interpreter of one process counts.
pub(crate) struct Counting {
    live: i32,
    runtime: u64,
    layout: Arc<Layout>,
    loaders: Loaders,
}

impl Counting {
    /// What is needed to follow what it counts, from one look to the next.
    pub fn new(python: Python) -> Self {
        Counting {
            live: python.live,
            runtime: python.place.address,
            layout: python.place.layout,
            loaders: Loaders::default(),
        }
    }

    /// Collections of garbage, and batches that data loaders have yielded when there are any; `None` when the interpreter cannot
    /// be read any more. Loaders that are not known yet are found by a search.
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
