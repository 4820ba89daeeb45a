//! Stack capture against programs whose stacks are known, and against processes in every kind of
//! trouble.

mod builds;
mod counts;
mod debug_files;
mod eintr;
mod frozen;
mod hard;
mod native;
mod odd;
mod python;
mod python_churn;
mod python_kinds;
mod pythons;
mod stuck;
mod target;
