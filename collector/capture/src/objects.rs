//! The ELF objects that processes map: programs, libraries, and their debug files.

pub(crate) mod bytes;
pub(crate) mod debug_file;
pub(crate) mod image;
pub(crate) mod image_cache;
mod mapped_file;
pub(crate) mod perf_map;
mod rebuilt;
pub(crate) mod target_files;
