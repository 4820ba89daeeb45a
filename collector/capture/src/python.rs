//! Python stacks, read from the interpreter's own structures without its help and without stopping
//! anything.
//!
//! The frames of a thread change only while that thread runs, and they keep their code alive. So
//! the frames of a thread that slept all the time are correct, whatever other threads do. The
//! frames of a thread that ran are read before and after its native stack is sampled. The result
//! has only the frames, from the root on, that both reads agree on. A stack contains nothing that
//! threads share, so two threads never need to be stopped together.
//!
//! This holds without a GIL too. In a free-threaded build, threads run Python code at the same
//! time, but no thread changes the frames of another one. A frame does not count its reference to
//! its code, but the garbage collector frees nothing that a frame of any thread refers to. From
//! 3.14 on, each thread executes a copy of the instructions of its own. A copy lives as long as its
//! thread, so an instruction is in one of the copies that the code object lists.
//!
//! A thread may be caught while it publishes a frame. Then the number of frames that C code entered
//! differs from the number of frames of the interpreter's loop on its native stack, and the thread
//! is read again.

mod builtins;
mod code;
pub(crate) mod consistency;
pub(crate) mod counting;
mod exceptions;
pub(crate) mod frames;
mod greenlets;
pub(crate) mod reader;
pub(crate) mod sampling;
mod tasks;
mod threads;
