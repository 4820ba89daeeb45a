//! The exported functions, one file per area, and the table from which `cuGetProcAddress` answers.

#![allow(unsafe_code, non_snake_case)]

mod device;
mod entry;
mod graph;
mod green;
mod launch;
mod lookup;
mod memory;
mod stream;
