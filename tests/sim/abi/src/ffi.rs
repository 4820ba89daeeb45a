//! Types for functions that are called from C: arguments, and handles of objects.
//!
//! A C function trusts its caller about every pointer, and so do the types of arguments. They
//! contain all of that trust, so that the functions themselves are safe Rust.
//!
//! C sees the address of an object as its handle, and a table contains the live addresses. A freed
//! address may be used again, as with the real libraries. An address that was never a handle, or is
//! already freed, is an error and not a crash.

#![allow(unsafe_code)]

use std::{
    collections::HashMap,
    ffi::{CStr, c_char},
    sync::{Arc, PoisonError, RwLock},
};

/// A required pointer was NULL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NullPointer;

/// A pointer through which a function returns a `T`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Out<T>(*mut T);
// SAFETY: the pointer is to the caller's memory for a value. Some functions write it from another
// thread when their work is done.
unsafe impl<T: Send> Send for Out<T> {}

impl<T> Out<T> {
    /// Returns `value` to the caller.
    pub fn set(self, value: T) -> Result<(), NullPointer> {
        self.at(0, value)
    }

    /// Returns `value` unless the caller passed NULL.
    pub fn set_if_wanted(self, value: T) {
        let _ = self.set(value);
    }

    /// Writes the element `index` of an array.
    pub fn at(self, index: usize, value: T) -> Result<(), NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: the C caller passed a pointer to writable memory for a T (or an array long
        // enough), or NULL.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// Whether the caller passed NULL.
    #[must_use]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The pointer to the element `index` of an array.
    #[must_use]
    pub fn offset(self, index: usize) -> Self {
        Out(self.0.wrapping_add(index))
    }

    /// The address.
    #[must_use]
    pub fn address(self) -> usize {
        self.0 as usize
    }

    /// The pointer, cast to another type.
    #[must_use]
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// NULL.
    #[must_use]
    pub fn null() -> Self {
        Out(std::ptr::null_mut())
    }

    /// A pointer of this process.
    #[must_use]
    pub fn to(target: &mut T) -> Self {
        Out(target)
    }
}

/// A pointer from which a function reads a `T`, or an array of them.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value.
    pub fn get(self) -> Result<T, NullPointer> {
        self.at(0)
    }

    /// The element `index` of an array.
    pub fn at(self, index: usize) -> Result<T, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: the C caller passed a pointer to a readable T (or an array long enough), or NULL.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Whether the caller passed NULL.
    #[must_use]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The pointer, cast to another type.
    #[must_use]
    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// The address.
    #[must_use]
    pub fn address(self) -> usize {
        self.0 as usize
    }

    /// A pointer of this process.
    #[must_use]
    pub fn from(source: &T) -> Self {
        In(source)
    }

    /// A pointer to the first of several.
    #[must_use]
    pub fn from_slice(source: &[T]) -> Self {
        In(source.as_ptr())
    }

    /// The pointer at an address, NULL for 0.
    #[must_use]
    pub fn from_address(address: usize) -> Self {
        In(address as *const T)
    }

    /// NULL.
    #[must_use]
    pub fn null() -> Self {
        In(std::ptr::null())
    }
}

/// A string of C.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// A copy of the string; invalid UTF-8 is replaced.
    pub fn get(self) -> Result<String, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: the C caller passed a string that ends with NUL, or NULL.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }

    /// A string of this process that lives as long as it.
    #[must_use]
    pub const fn of(text: &'static CStr) -> Self {
        Text(text.as_ptr())
    }

    /// NULL.
    #[must_use]
    pub const fn null() -> Self {
        Text(std::ptr::null())
    }

    /// The string at an address.
    #[must_use]
    pub fn at(address: usize) -> Self {
        Text(address as *const c_char)
    }

    /// A string that is not moved while its owner lives.
    #[must_use]
    pub fn borrowed(text: &CStr) -> Self {
        Text(text.as_ptr())
    }
}

// SAFETY: a shared Text comes from static or owned strings only, and reading a string needs no
// exclusion.
unsafe impl Sync for Text {}

/// Copies `count` bytes; the ranges may overlap.
pub fn copy(to: usize, from: usize, count: usize) {
    if count > 0 {
        // SAFETY: "device" memory is memory of this process, and the caller guarantees both ranges,
        // as on a device.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, count) };
    }
}

/// Writes `value`, `width` bytes wide (1, 2 or 4), `count` times.
pub fn fill(to: usize, value: u32, width: usize, count: usize) {
    for index in 0..count {
        copy(to + index * width, (&raw const value) as usize, width);
    }
}

/// A copy of the bytes at an address.
#[must_use]
pub fn bytes(from: usize, count: usize) -> Box<[u8]> {
    let mut bytes = vec![0u8; count].into_boxed_slice();
    copy(bytes.as_mut_ptr() as usize, from, count);
    bytes
}

/// Reads the `index`-th `T` of an array at an address.
#[must_use]
pub fn read<T: Copy>(from: usize, index: usize) -> T {
    // SAFETY: the caller guarantees the range, and every T used here is valid for all bit patterns.
    unsafe { (from as *const T).add(index).read_unaligned() }
}

/// Writes the `index`-th `T` of an array at an address.
pub fn write<T: Copy>(to: usize, index: usize, value: T) {
    // SAFETY: the caller guarantees the range.
    unsafe { (to as *mut T).add(index).write_unaligned(value) };
}

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
