//! Handles of objects. C sees the address of an object, and a table contains the live addresses.
//!
//! A freed address may be used again, as with the real libraries. An address that was never a
//! handle, or is already freed, is an error and not a crash.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
};

/// The live objects of one kind.
#[derive(Debug)]
pub struct Handles<T> {
    table: RwLock<Option<HashMap<usize, Arc<T>>>>,
}

impl<T> Handles<T> {
    /// An empty table.
    #[must_use]
    pub const fn new() -> Self {
        Handles { table: RwLock::new(None) }
    }

    /// Adds an object and returns its handle.
    pub fn insert(&self, object: Arc<T>) -> usize {
        let handle = Arc::as_ptr(&object) as usize;
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.get_or_insert_default().insert(handle, object);
        handle
    }

    /// The object of a handle.
    pub fn get(&self, handle: usize) -> Option<Arc<T>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.as_ref()?.get(&handle).cloned()
    }

    /// Removes an object.
    pub fn remove(&self, handle: usize) -> Option<Arc<T>> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.as_mut()?.remove(&handle)
    }

    /// All objects, unordered.
    pub fn all(&self) -> Vec<Arc<T>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.as_ref().map(|table| table.values().cloned().collect()).unwrap_or_default()
    }
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self::new()
    }
}
