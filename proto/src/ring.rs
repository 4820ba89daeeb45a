//! The hook's flight recorder: a memfd that the hook writes with atomics and the collector reads
//! with `pread`.
//!
//! The memfd is an array of little-endian 64-bit words: a header, then fixed tables. Every field is
//! one word, so a reader never sees half of it. The writer publishes an entry by storing its first
//! word last (release). To reuse an operation slot, it clears the first word before it overwrites
//! the others; a reader that finds a changed first word after reading the rest drops the entry.
//! Words that are filled in later (launch configuration, returned, started, completed, status)
//! change only once, from 0 to their value.
//!
//! This module does not depend on the writer, `hook/src/runtime/recorder/`.

pub mod lane;
mod layout;
mod read;
pub mod span;

pub use layout::{
    BOOT_ID, COARSE_TICK_NS, FrameLayout, MAGIC, VERSION, WATCHER_CALLS, child_id, comm, copy, coverage, detail, fault,
    filtered, filters, header, kernel, key_of_child, launch, matmul, name, offset, op, pack_channels, pack_dimensions,
    pack_halves, pack_what, stack, stderr, store_wait, stream,
};
pub use read::{
    Fault, LastText, Progress, RECENT_OPERATIONS, RawStack, communicator_of, group_of, operation, read,
    read_communicators, read_fault, read_functions, read_header, read_last_text, read_names, read_progress, read_slots,
    read_stacks,
};
