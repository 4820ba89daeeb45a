//! Where the structures of each CPython keep what the reader follows.
//!
//! The offsets of `layouts.rs` were printed by `layouts.c`, which a test compiles against the headers of every version. From
//! 3.13 on most of them are also told by the interpreter itself, which is what is believed then. Before that one table counts
//! for all patch releases of a version: CPython keeps its structures from the first release on, so that extension modules go
//! on working. 3.11.2 and 3.11.7 have been compared and are the same; other tools rely on the same.

use crate::memory::snapshot::{Snapshot, Torn};

macro_rules! layout {
    (
        $($(#[$doc:meta])* $plain:ident,)*;
        $($(#[$maybe_doc:meta])* $maybe:ident,)*;
        told: $($told:ident)*;
        told, and not in every version: $($told_maybe:ident)*
    ) => {
        /// Offsets of one minor version, in bytes.
        #[derive(Debug, Clone)]
        pub(crate) struct Layout {
            pub minor: u8,
            $($(#[$doc])* pub $plain: u64,)*
            $($(#[$maybe_doc])* pub $maybe: Option<u64>,)*
            pub debug_offsets: Option<DebugOffsets>,
        }

        /// Where `_Py_DebugOffsets`, with which `_PyRuntime` begins, keeps offsets of the same names.
        #[derive(Debug, Clone)]
        pub(crate) struct DebugOffsets {
            pub free_threaded: u64,
            $(pub $told: u64,)*
            $(pub $told_maybe: u64,)*
        }

        impl Layout {
            /// The layout as the interpreter tells it.
            pub(super) fn corrected(&self, told: &DebugOffsets, memory: &mut Snapshot, runtime: u64) -> Result<Layout, Torn> {
                let mut layout = self.clone();
                let mut offset = |at: u64| memory.word(OFFSETS, runtime.wrapping_add(at));
                $(layout.$told = offset(told.$told)?;)*
                $(layout.$told_maybe = Some(offset(told.$told_maybe)?);)*
                Ok(layout)
            }

            pub(super) fn offsets(&self) -> Vec<u64> {
                let mut offsets = vec![$(self.$plain,)*];
                $(offsets.extend(self.$maybe);)*
                offsets
            }
        }
    };
}

pub(super) const OFFSETS: &str = "the table of offsets of _PyRuntime";

layout! {
    /// _PyRuntimeState: set when the interpreter is about to end.
    runtime_finalizing,
    /// The list of interpreters, the newest first.
    runtime_interpreters,
    /// PyInterpreterState.
    interpreter_next,
    /// The list of its threads.
    interpreter_threads,
    /// sys.modules.
    interpreter_modules,
    /// _gc_runtime_state: the statistics of its three generations, from 3.15 on a pointer to them.
    gc_generations,
    gc_generation_size,
    gc_collections,
    /// Whether the collector runs.
    gc_collecting,
    /// _gil_runtime_state: the thread that holds or held the lock.
    gil_holder,
    /// Whether anyone holds it.
    gil_locked,
    /// PyThreadState.
    thread_size,
    thread_previous,
    thread_next,
    thread_interpreter,
    /// What pthread_self returns.
    thread_id,
    /// The frame on top, or the _PyCFrame that knows it.
    thread_frame,
    /// PyFrameObject, from 3.11 on _PyInterpreterFrame; as many bytes as are needed.
    frame_size,
    frame_previous,
    frame_code,
    /// Up to 3.10 the number of the last instruction, then its address.
    frame_instruction,
    /// Its local variables, then what it works with.
    frame_locals,
    /// PyGenObject: a pointer to its frame, from 3.11 on the frame.
    generator_frame,
    /// PyCodeObject.
    code_filename,
    /// The qualified name where there is one.
    code_name,
    code_first_line,
    code_lines,
    /// PyObject.
    object_type,
    object_size,
    bytes_length,
    bytes_data,
    unicode_length,
    unicode_state,
    unicode_kind_bit,
    unicode_compact_bit,
    unicode_ascii_bit,
    /// Where the characters of a compact ASCII string are.
    unicode_ascii_data,
    /// Where those of other compact strings are.
    unicode_compact_data,
    /// Pointer to the characters of all other strings.
    unicode_data_pointer,
    /// Sign and number of digits.
    long_tag,
    long_digits,
    dict_keys,
    dict_values,
    /// PyDictKeysObject: size of the hash table; from 3.11 on the binary logarithm of its size in bytes.
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
    /// The one lock of the process, in _PyRuntimeState.
    runtime_gil,
    /// Pointer to the lock of the interpreter.
    interpreter_gil,
    /// _gc_runtime_state, in _PyRuntimeState.
    runtime_gc,
    /// The same in PyInterpreterState.
    interpreter_gc,
    /// Statistics kept of the youngest generation, one after the other; the newest has the totals.
    gc_young_items,
    /// Behind them those of the other two.
    gc_old,
    gc_old_size,
    gc_old_items,
    /// The kernel's thread id.
    thread_native_id,
    /// The memory that frames lie in.
    thread_chunk,
    /// _PyCFrame.
    cframe_frame,
    frame_owner,
    frame_is_entry,
    /// The instructions.
    code_bytes,
    /// Whether all keys are strings.
    keys_kind,
    /// The keys of the attributes that lie in the objects themselves.
    type_cached_keys,;
    told: runtime_finalizing runtime_interpreters interpreter_next interpreter_threads interpreter_modules
        thread_previous thread_next thread_interpreter thread_id thread_frame
        frame_previous frame_code frame_instruction code_filename code_name code_first_line code_lines
        object_type object_size bytes_length bytes_data unicode_length unicode_state unicode_ascii_data
        long_tag long_digits dict_keys dict_values type_flags;
    told, and not in every version: interpreter_gil interpreter_gc thread_native_id thread_chunk frame_owner code_bytes
}
