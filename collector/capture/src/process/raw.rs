//! A captured process before its native frames are symbolized.

use xpu_timer_proto::server::ProcessSample;

use super::places::RawPlace;

/// A process whose native frames are not symbolized yet.
#[derive(Default)]
pub(crate) struct RawProcess {
    pub pid: i32,
    pub parent_pid: i32,
    pub command: String,
    pub sample: ProcessSample,
    pub python_entries: Vec<Vec<bool>>,
    /// The places that the frames are at.
    pub places: Vec<RawPlace>,
    /// Frames of the threads in `sample.stacktrace`, in the same order, as indices into `places`.
    pub frames: Vec<Vec<u32>>,
}
