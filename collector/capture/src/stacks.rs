//! The stacks of one process with what many frames have in common kept once, and the long form that is written to files.

use std::sync::Arc;

use xpu_timer_proto::server::{ProcessSample, PstackFrame};

/// The stacks of one process, or the reason why there are none.
#[derive(Debug, Clone, Default)]
pub struct ProcessCapture {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 when unknown.
    pub parent_pid: i32,
    /// argv joined by spaces, else the name that the kernel knows, in brackets.
    pub command: String,
    /// The stacks, the state, and what could not be had.
    pub sample: ProcessSample,
    /// For each thread in `sample.py_stacktrace` and each of its frames: whether C code entered the interpreter with it. It
    /// is what [`merge`] needs to put Python frames in their places in the native stack.
    pub python_entries: Vec<Vec<bool>>,
    /// All descendants, flattened, parents before their children. Empty unless asked for.
    pub children: Vec<ProcessCapture>,
}

/// A captured process whose native frames are numbers of places.
#[derive(Debug, Clone, Default)]
pub struct Stacks {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 when unknown.
    pub parent_pid: i32,
    /// argv joined by spaces, else the name that the kernel knows, in brackets.
    pub command: String,
    /// As in [`ProcessCapture`], but its native threads have no frames.
    pub sample: ProcessSample,
    /// As in [`ProcessCapture`].
    pub python_entries: Vec<Vec<bool>>,
    /// The places that `frames` names.
    pub places: Vec<Place>,
    /// For each thread in `sample.stacktrace` the places of its frames, leaf first.
    pub frames: Vec<Vec<u32>>,
    /// All descendants, flattened, parents before their children. Empty unless asked for.
    pub children: Vec<Stacks>,
}

/// A place in the code of one process.
#[derive(Debug, Clone)]
pub struct Place {
    /// Program counter in the process.
    pub pc: u64,
    /// Path of the object that it lies in; `[jit]` for code that was made at run time, empty when nothing is mapped there.
    pub module: Arc<str>,
    /// The program counter by the addresses of the object; 0 without one.
    pub module_address: u64,
    /// The functions that a frame there stands for: those that were inlined, leaf first, and the one they were inlined into.
    pub functions: Vec<Function>,
}

/// A function at a place.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its name, or `??`.
    pub name: Arc<str>,
    /// `path:line`, if that is known.
    pub line: Option<Arc<str>>,
}

impl Place {
    /// `path:line` of one of the functions, else the object.
    #[must_use]
    pub fn file_name<'a>(&'a self, function: &'a Function) -> &'a str {
        match &function.line {
            Some(line) => line,
            None if self.module.is_empty() => "??",
            None => &self.module,
        }
    }

    /// The functions, with whether they were inlined.
    pub fn functions(&self) -> impl Iterator<Item = (&Function, bool)> {
        let outermost = self.functions.len().saturating_sub(1);
        self.functions.iter().enumerate().map(move |(index, function)| (function, index < outermost))
    }

    /// The frames that one frame here stands for, each with its `origin` less the number that it begins with.
    fn spell_out(&self) -> Vec<PstackFrame> {
        let spell = |(function, inlined): (&Function, bool)| {
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
        self.functions().map(spell).collect()
    }
}

impl From<Stacks> for ProcessCapture {
    /// Spells every frame out.
    fn from(stacks: Stacks) -> Self {
        let Stacks { pid, parent_pid, command, mut sample, python_entries, places, frames, children } = stacks;
        // A thousand frames are at a few dozen places.
        let places: Vec<Vec<PstackFrame>> = places.iter().map(Place::spell_out).collect();
        for (thread, frames) in sample.stacktrace.iter_mut().zip(frames) {
            for frame in frames.iter().filter_map(|number| places.get(*number as usize)).flatten() {
                let origin = format!("#{:<3} {}", thread.frames.len(), frame.origin);
                thread.frames.push(PstackFrame {
                    func_name: frame.func_name.clone(),
                    file_name: frame.file_name.clone(),
                    origin,
                    module: frame.module.clone(),
                    ..*frame
                });
            }
        }
        let children = children.into_iter().map(ProcessCapture::from).collect();
        ProcessCapture { pid, parent_pid, command, sample, python_entries, children }
    }
}
