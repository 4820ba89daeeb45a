//! `libnccl.so.2` of the simulated device: collectives between processes over shared memory.
//!
//! Like the real library, it gets the driver through `cuGetProcAddress_v2` and launches every group
//! as a kernel with `cuLaunchKernelEx`; the argument buffer describes its tasks. The kernels run on
//! the stream's thread and meet their peers in a file in /dev/shm, by sequence number: when a rank
//! skips an operation, its next operation meets the one that the others are still in.

#![deny(unsafe_code)]

mod api;
mod arena;
mod communicator;
mod driver;
mod group;
mod kernel;
mod task;
