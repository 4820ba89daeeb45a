//! What the operating system offers: processes, clocks, disks, memory.

pub mod clock;
pub(crate) mod descriptors;
pub(crate) mod disk;
pub(crate) mod process;
pub(crate) mod resources;
pub(crate) mod ring_file;
pub(crate) mod safe_path;
