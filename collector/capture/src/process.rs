//! The capture of one process: the request, and the result before its native frames are symbolized.

mod capture;
pub(crate) mod fault;
mod running;
pub(crate) mod worker;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use xpu_timer_proto::{procfs, server::ProcessSample};

use crate::{
    kernel::Tables,
    native::{RawFrame, address_space::AddressSpace},
    objects::image::Image,
};

/// Extra time for threads that the kernel does not hold: this many times the deadline, but at most
/// `MAX_EXTENSION`.
const EXTENSION_FACTOR: u32 = 2;
const MAX_EXTENSION: Duration = Duration::from_secs(5);

/// Options of a capture: what to capture, and how long it may take.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time limit of the whole capture, for all processes together. On a busy machine the capture
    /// may take longer, up to [`Options::longest`].
    pub deadline: Duration,
    /// Also capture all descendants of the given processes.
    pub children: bool,
    /// Capture native stacks.
    pub native: bool,
    /// Capture Python stacks.
    pub python: bool,
    /// Also find what only the search for the cause of a hang uses: what each thread waits for, and
    /// the versions of libraries with known defects. It reads the descriptors of all processes of
    /// the machine.
    pub causes: bool,
    /// Total time limit of the search for source lines. Names are always looked up.
    pub lines_budget: Duration,
    /// Stop every thread while its stack is copied. This may cut short system calls of the target.
    pub force_ptrace: bool,
}

impl Options {
    /// The time after which the capture returns, however busy the machine is, as long as the
    /// machine makes progress at all.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.deadline + extension(self.deadline) + self.deadline / 4
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(5),
            children: false,
            native: true,
            python: true,
            causes: true,
            lines_budget: Duration::from_secs(1),
            force_ptrace: false,
        }
    }
}

/// The time that a capture may take beyond its deadline when the machine is busy.
pub(crate) fn extension(deadline: Duration) -> Duration {
    (deadline * EXTENSION_FACTOR).min(MAX_EXTENSION)
}

/// A thread of the process that lives, from all its threads. If the main thread has ended, the
/// address space is available through the living ones. Threads may end at any time, so the main
/// thread comes first if it lives, whatever the order of the ids.
pub(crate) fn live_thread(pid: i32, tids: &[i32]) -> Option<i32> {
    let lives = |tid: &i32| procfs::status(pid, *tid).is_ok_and(|status| !matches!(status.letter(), b'Z' | b'X'));
    std::iter::once(pid).chain(tids.iter().copied().filter(|tid| *tid != pid)).find(lives)
}

/// The request to capture one process.
pub(crate) struct Job {
    pub pid: i32,
    pub options: Options,
    pub deadline: Instant,
    pub tables: Arc<Tables>,
}

/// A process whose native frames are not symbolized yet.
#[derive(Default)]
pub(crate) struct RawProcess {
    pub pid: i32,
    pub parent_pid: i32,
    pub command: String,
    pub sample: ProcessSample,
    pub python_entries: Vec<Vec<bool>>,
    /// The places that the frames are at.
    pub places: Vec<RawCodeLocation>,
    /// Frames of the threads in `sample.stacktrace`, in the same order, as indices into `places`.
    pub frames: Vec<Vec<u32>>,
}

/// The module of code that is in no file, because the process generated it at run time.
pub(crate) const JIT_MODULE: &str = "[jit]";

/// A place in the code of one process that its frames are at, and the object that contains it.
pub(crate) struct RawCodeLocation {
    pub frame: RawFrame,
    pub image: Option<Arc<Image>>,
    pub bias: u64,
    /// Path of the mapping if there is no image for it, or [`JIT_MODULE`].
    pub path: String,
    /// The name of a function that was generated at run time, from the process's perf map.
    pub name: Option<Arc<str>>,
}

impl RawCodeLocation {
    /// The address in terms of the object's own tables.
    pub(crate) fn address(&self) -> u64 {
        self.frame.lookup().wrapping_sub(self.bias)
    }
}

/// Distinct places, each with an index. A thousand frames share a few dozen places, so the
/// information about a place is kept once.
#[derive(Default)]
pub(crate) struct CodeLocations {
    pub list: Vec<RawCodeLocation>,
    numbers: HashMap<RawFrame, u32>,
}

impl CodeLocations {
    /// The indices of the places of a stack.
    pub(crate) fn of(&mut self, frames: &[RawFrame], space: Option<&AddressSpace<'_>>) -> Vec<u32> {
        frames.iter().map(|frame| self.number(*frame, space)).collect()
    }

    fn number(&mut self, frame: RawFrame, space: Option<&AddressSpace<'_>>) -> u32 {
        if let Some(number) = self.numbers.get(&frame) {
            return *number;
        }
        let object = space.and_then(|space| space.object_at(frame.lookup()));
        let mapping = space.filter(|_| object.is_none()).and_then(|space| space.mapping(frame.lookup()));
        let made = mapping.as_ref().is_some_and(|mapping| mapping.executable && mapping.is_memory());
        let path =
            if made { JIT_MODULE.into() } else { mapping.map_or_else(String::new, |mapping| mapping.path.clone()) };
        let name = space.filter(|_| made).and_then(|space| space.perf_map().find(frame.lookup()));
        let number = self.list.len() as u32;
        self.list.push(RawCodeLocation {
            frame,
            image: object.as_ref().map(|object| Arc::clone(&object.image)),
            bias: object.map_or(0, |object| object.bias),
            path,
            name: name.map(Into::into),
        });
        self.numbers.insert(frame, number);
        number
    }
}
