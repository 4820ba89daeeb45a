//! Stack capture against programs whose stacks are known, and against processes in every kind of trouble.

mod hard;
mod native;
mod python;
mod target;
