//! Python stacks, read from the interpreter's own structures without its help and without stopping anything.
//!
//! The frames of a thread change only while that thread runs, and keep their code alive. So the frames of a thread that slept all
//! the time are right as they are, whatever the others do meanwhile. The frames of a thread that ran are read before and after
//! its native stack is sampled: what both looks have in common, from the root on, is shown, and a frame that differs is not. No
//! two threads ever need to stand still together: a stack consists of nothing that threads share.
//!
//! A thread may be caught in the middle of announcing a frame. It shows: the frames that C code entered are then not as many as
//! the frames of the interpreter's loop on its native stack. It is looked at again.

pub(crate) mod agreement;
mod builtins;
mod code;
pub(crate) mod counting;
mod data_loaders;
mod frames;
mod gc;
mod lines;
mod locate;
mod names;
pub(crate) mod reader;
pub(crate) mod stack;
pub(crate) mod stopped_copy;
mod threads;
