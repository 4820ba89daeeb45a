//! The differences between CPython versions and builds: the offsets of their structures, and where
//! an object has its interpreter.
//!
//! `layouts.c` prints the offsets of `layouts.rs`; a test compiles it against the headers of every
//! version, once more for each that has a free-threaded build (without a GIL). From 3.13 on, the
//! interpreter itself has a table of most of these offsets, which takes precedence. Before 3.13,
//! one table covers all patch releases of a version, because CPython keeps its structures unchanged
//! from the first release on, so that extension modules continue to work.
//! 3.11.2 and 3.11.7 were compared and have equal offsets; other tools rely on this too.

mod layouts;
pub(crate) mod runtime;

use crate::{
    error::Error,
    memory::{ReadError, Snapshot},
};

/// Why the interpreter of a process cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InterpreterError {
    /// It has no `_PyRuntime`, although the process runs a Python.
    #[error("not CPython 3.8 or newer: it has no symbol _PyRuntime")]
    NoRuntime,
    /// Its version is in neither of the places where it may be.
    #[error("the version of its CPython is unknown")]
    UnknownVersion,
    /// There is no layout for this version.
    #[error("{name} is not supported, only 3.{oldest} to 3.{newest}")]
    Unsupported {
        /// The kind of build and its version.
        name: String,
        /// Minor version of the oldest supported build of this kind.
        oldest: u8,
        /// Minor version of the newest one.
        newest: u8,
    },
    /// From 3.13 on, every interpreter has the table.
    #[error("{0} has no table of offsets")]
    NoDebugOffsets(String),
    /// The offsets are implausible.
    #[error("{0} has a table of offsets of an unknown format")]
    UnknownDebugOffsets(String),
    /// It has no interpreter state.
    #[error("its interpreter has not been started yet, or has ended")]
    NotRunning,
    /// A structure of the interpreter cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The process cannot be inspected.
    #[error(transparent)]
    Process(#[from] Error),
}

macro_rules! layout {
    (
        $($(#[$doc:meta])* $required:ident,)*;
        $($(#[$optional_doc:meta])* $optional:ident,)*;
        debug_offsets: $($debug_offsets:ident)*;
        debug_offsets, not in every version: $($debug_offsets_optional:ident)*;
        debug_offsets, not in every build: $($debug_offsets_rare:ident)*
    ) => {
        /// Offsets of one build of a minor version, in bytes.
        #[derive(Debug, Clone)]
        pub(crate) struct Layout {
            pub minor: u8,
            pub free_threaded: bool,
            $($(#[$doc])* pub $required: u64,)*
            $($(#[$optional_doc])* pub $optional: Option<u64>,)*
            pub debug_offsets: Option<DebugOffsets>,
        }

        /// Where `_Py_DebugOffsets`, at the start of `_PyRuntime`, has offsets of these names.
        #[derive(Debug, Clone)]
        pub(crate) struct DebugOffsets {
            $(pub $debug_offsets: u64,)*
            $(pub $debug_offsets_optional: u64,)*
            $(pub $debug_offsets_rare: Option<u64>,)*
        }

        impl Layout {
            /// Replaces offsets with those that the interpreter's own table has.
            fn with_debug_offsets(
                &self,
                debug_offsets: &DebugOffsets,
                memory: &mut Snapshot,
                runtime: u64,
            ) -> Result<Layout, ReadError> {
                let mut layout = self.clone();
                let mut offset = |at: u64| memory.read_u64(OFFSETS, runtime.wrapping_add(at));
                $(layout.$debug_offsets = offset(debug_offsets.$debug_offsets)?;)*
                $(layout.$debug_offsets_optional = Some(offset(debug_offsets.$debug_offsets_optional)?);)*
                $(layout.$debug_offsets_rare = debug_offsets.$debug_offsets_rare.map(&mut offset).transpose()?;)*
                Ok(layout)
            }

            fn offsets(&self) -> Vec<u64> {
                let mut offsets = vec![$(self.$required,)*];
                $(offsets.extend(self.$optional);)*
                offsets
            }
        }
    };
}

impl Layout {
    /// Size of the last instruction in a frame: up to 3.10 a number, later a pointer.
    pub(crate) fn instruction_bytes(&self) -> usize {
        if self.code_bytes.is_some() { 8 } else { 4 }
    }
}

/// Name of the interpreter's own table in errors.
const OFFSETS: &str = "the table of offsets of _PyRuntime";

layout! {
    /// _PyRuntimeState: set when the interpreter is shutting down.
    runtime_finalizing,
    /// The list of interpreters, newest first.
    runtime_interpreters,
    /// PyInterpreterState.
    interpreter_next,
    /// The list of threads of the interpreter.
    interpreter_threads,
    /// sys.modules.
    interpreter_modules,
    /// _gc_runtime_state: the statistics of its three generations; from 3.15 on, a pointer to them.
    gc_generations,
    gc_generation_size,
    gc_collections,
    /// Whether a collection is running.
    gc_collecting,
    /// _gil_runtime_state: the thread that holds the GIL or held it last.
    gil_holder,
    /// Whether a thread holds the GIL.
    gil_locked,
    /// How often the GIL has gone to another thread than the one that held it last.
    gil_switches,
    /// PyThreadState.
    thread_size,
    thread_previous,
    thread_next,
    thread_interpreter,
    /// The result of pthread_self in the thread.
    thread_id,
    /// The innermost frame, or the _PyCFrame that points to it.
    thread_frame,
    /// The innermost _PyErr_StackItem, which may be that of a generator.
    thread_exceptions,
    /// PyFrameObject; from 3.11 on, _PyInterpreterFrame. Only as many bytes as the reader needs.
    frame_size,
    frame_previous,
    frame_code,
    /// Up to 3.10 the index of the last instruction; later its address.
    frame_instruction,
    /// The local variables, followed by the evaluation stack.
    frame_locals,
    /// PyGenObject: a pointer to its frame; from 3.11 on, the frame itself.
    generator_frame,
    /// PyCodeObject.
    code_filename,
    /// The qualified name in versions that have one.
    code_name,
    code_first_line,
    code_lines,
    /// PyObject: four bytes of its number of references, which are 0 once it is freed.
    object_references,
    object_type,
    object_size,
    bytes_length,
    bytes_data,
    unicode_length,
    unicode_state,
    unicode_kind_bit,
    unicode_compact_bit,
    unicode_ascii_bit,
    /// The characters of a compact ASCII string.
    unicode_ascii_data,
    /// The characters of other compact strings.
    unicode_compact_data,
    /// Pointer to the characters of all other strings.
    unicode_data_pointer,
    /// Sign and number of digits.
    long_tag,
    long_digits,
    dict_keys,
    dict_values,
    /// PyDictKeysObject: size of the hash table; from 3.11 on, the binary logarithm of its size in
    /// bytes.
    keys_size,
    keys_entries,
    keys_indices,
    /// PyDictValues.
    values_data,
    /// Pointer to the items.
    list_items,
    /// The items.
    tuple_items,
    /// PyTypeObject.
    type_name,
    type_base,
    type_flags,
    type_dict_offset,;
    /// The only GIL of the process, in _PyRuntimeState.
    runtime_gil,
    /// Pointer to the GIL of the interpreter.
    interpreter_gil,
    /// _gc_runtime_state, in _PyRuntimeState.
    runtime_gc,
    /// _gc_runtime_state, in PyInterpreterState.
    interpreter_gc,
    /// The lists of objects of its generations, youngest first. Free-threaded builds have none.
    gc_lists,
    /// Number of consecutive statistics of the youngest generation. The newest has the totals.
    gc_young_items,
    /// Statistics of the other two generations, which follow.
    gc_old,
    gc_old_size,
    gc_old_items,
    /// The kernel's thread id.
    thread_native_id,
    /// The memory that contains the frames.
    thread_chunk,
    /// The list of its tasks of asyncio, in _PyThreadStateImpl.
    thread_tasks,
    /// _PyCFrame.
    cframe_frame,
    frame_owner,
    frame_is_entry,
    /// The instructions.
    code_bytes,
    /// _PyCodeArray: pointer to the copies of the instructions, which each thread of a
    /// free-threaded build has of its own. The first one is that of the code object.
    code_copies,
    /// The references of other threads than the owner, above two bits with marks.
    object_shared_references,
    /// Whether all keys are strings.
    keys_kind,
    /// The keys of the attributes that are stored in the objects themselves.
    type_cached_keys,
    /// Bytes before an object to the pointer to a dictionary that the interpreter manages.
    managed_dict,;
    debug_offsets: runtime_finalizing runtime_interpreters interpreter_next interpreter_threads interpreter_modules
        thread_previous thread_next thread_interpreter thread_id thread_frame
        frame_previous frame_code frame_instruction code_filename code_name code_first_line code_lines
        object_type object_size bytes_length bytes_data unicode_length unicode_state unicode_ascii_data
        long_tag long_digits dict_keys dict_values type_flags;
    debug_offsets, not in every version: interpreter_gil interpreter_gc thread_native_id thread_chunk frame_owner code_bytes;
    debug_offsets, not in every build: code_copies
}
