//! The result of a capture: a compact form that keeps what many frames have in common once, and the
//! expanded form that is written to files.

use std::{fmt::Write, sync::Arc};

use xpu_timer_proto::server::{ProcessSample, PstackFrame};

/// The stacks of one process, or the reason why there are none.
#[derive(Debug, Clone, Default)]
pub struct ProcessCapture {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 if unknown.
    pub parent_pid: i32,
    /// argv joined by spaces. For a process without argv, the kernel's name for it in brackets.
    pub command: String,
    /// The stacks, the state of the process, and the errors of the capture.
    pub sample: ProcessSample,
    /// For each thread in `sample.py_stacktrace` and each of its frames: whether C code entered the
    /// interpreter with this frame. [`merge`](crate::merge) needs it to insert Python frames into
    /// the native stack.
    pub python_entries: Vec<Vec<bool>>,
    /// All descendants, flattened, parents before their children. Empty unless `Options::children`
    /// is set.
    pub children: Vec<ProcessCapture>,
}

/// A captured process whose native frames are indices into a list of places.
#[derive(Debug, Clone, Default)]
pub struct Stacks {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 if unknown.
    pub parent_pid: i32,
    /// argv joined by spaces. For a process without argv, the kernel's name for it in brackets.
    pub command: String,
    /// As in [`ProcessCapture`], except that its native threads have no frames.
    pub sample: ProcessSample,
    /// As in [`ProcessCapture`].
    pub python_entries: Vec<Vec<bool>>,
    /// The places that `frames` refers to.
    pub places: Vec<CodeLocation>,
    /// For each thread in `sample.stacktrace`, the indices of its frames' places, leaf first.
    pub frames: Vec<Vec<u32>>,
    /// All descendants, flattened, parents before their children. Empty unless `Options::children`
    /// is set.
    pub children: Vec<Stacks>,
}

/// A place in the code of one process.
#[derive(Debug, Clone)]
pub struct CodeLocation {
    /// Program counter in the process.
    pub pc: u64,
    /// Path of the object that contains the place; `[jit]` for code generated at run time; empty if
    /// nothing is mapped there.
    pub module: Arc<str>,
    /// Program counter as an address of the object; 0 without an object.
    pub module_address: u64,
    /// The functions that a frame at this place stands for: the inlined ones, leaf first, then the
    /// function that they were inlined into.
    pub functions: Vec<Function>,
}

/// A function at a place.
#[derive(Debug, Clone)]
pub struct Function {
    /// Name of the function, or `??`.
    pub name: Arc<str>,
    /// `path:line`, if known.
    pub line: Option<Arc<str>>,
}

impl CodeLocation {
    /// `path:line` of one of the functions, or the object's path if the line is unknown.
    #[must_use]
    pub fn file_name<'a>(&'a self, function: &'a Function) -> &'a str {
        match &function.line {
            Some(line) => line,
            None if self.module.is_empty() => "??",
            None => &self.module,
        }
    }

    /// The functions, each with whether it was inlined.
    pub fn functions(&self) -> impl Iterator<Item = (&Function, bool)> {
        let outermost = self.functions.len().saturating_sub(1);
        self.functions.iter().enumerate().map(move |(index, function)| (function, index < outermost))
    }

    /// Expands one frame at this place. The `origin` of each result lacks the frame number at its
    /// start.
    fn expand(&self) -> Vec<PstackFrame> {
        let expand = |(function, inlined): (&Function, bool)| {
            let name = &function.name;
            let place = match &function.line {
                Some(line) => format!(" at {line}"),
                None if self.module.is_empty() => String::new(),
                None => format!(" from {}", self.module),
            };
            PstackFrame {
                func_name: name.to_string(),
                file_name: self.file_name(function).to_string(),
                origin: if inlined {
                    format!("{name} (){place}")
                } else {
                    format!("{:#018x} in {name} (){place}", self.pc)
                },
                pc: self.pc,
                module: self.module.to_string(),
                module_address: self.module_address,
                inlined,
            }
        };
        self.functions().map(expand).collect()
    }
}

/// Expands the frames of the threads of one process.
pub(crate) struct FrameExpander {
    // A thousand frames share a few dozen places.
    places: Vec<Vec<PstackFrame>>,
    // Frames whose memory can be used again.
    spare: Vec<PstackFrame>,
}

impl FrameExpander {
    pub(crate) fn new(places: &[CodeLocation]) -> Self {
        FrameExpander { places: places.iter().map(CodeLocation::expand).collect(), spare: Vec::new() }
    }

    /// Appends the frames with these indices to those of a thread.
    pub(crate) fn expand(&mut self, indices: &[u32], frames: &mut Vec<PstackFrame>) {
        for place in indices.iter().filter_map(|index| self.places.get(*index as usize)).flatten() {
            let mut frame = self.spare.pop().unwrap_or_default();
            frame.func_name.clone_from(&place.func_name);
            frame.file_name.clone_from(&place.file_name);
            frame.module.clone_from(&place.module);
            frame.origin.clear();
            // A write to a string cannot fail.
            let _ = write!(frame.origin, "#{:<3} {}", frames.len(), place.origin);
            let PstackFrame { func_name, file_name, module, origin, .. } = frame;
            frames.push(PstackFrame { func_name, file_name, module, origin, ..*place });
        }
    }

    /// Takes frames that are no longer needed, so that the next thread uses their memory.
    pub(crate) fn recycle(&mut self, frames: Vec<PstackFrame>) {
        self.spare.extend(frames);
    }
}

impl From<Stacks> for ProcessCapture {
    /// Expands every frame.
    fn from(stacks: Stacks) -> Self {
        let Stacks { pid, parent_pid, command, mut sample, python_entries, places, frames, children } = stacks;
        let mut expander = FrameExpander::new(&places);
        for (thread, indices) in sample.stacktrace.iter_mut().zip(frames) {
            expander.expand(&indices, &mut thread.frames);
        }
        let children = children.into_iter().map(ProcessCapture::from).collect();
        ProcessCapture { pid, parent_pid, command, sample, python_entries, children }
    }
}
