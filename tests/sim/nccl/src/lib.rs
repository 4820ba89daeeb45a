//! `libnccl.so.2` of the simulated device: collectives between processes over shared memory.
//!
//! Like the real library it takes the driver through `cuGetProcAddress_v2` and launches every group as a kernel with
//! `cuLaunchKernelEx`, whose argument buffer says what to do. The kernels run on the stream's thread and meet their peers in
//! a file of /dev/shm: by sequence number, so that whoever skips an operation meets the others' skipped one with its next.

#![deny(unsafe_code)]

mod api;
mod arena;
mod communicator;
mod driver;
mod group;
mod init;
mod kernel;
mod reduce;
mod task;
