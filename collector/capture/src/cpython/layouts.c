// Prints the offsets of one CPython as Rust: where its structures have the fields that the reader
// follows. The test that compares the output with layouts.rs compiles this against the headers of
// each version, with Py_BUILD_CORE, and for a free-threaded build also with Py_GIL_DISABLED: both
// builds of a version have the same headers.
#define Py_BUILD_CORE 1
#include <Python.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#endif
#include "internal/pycore_pystate.h"
#if PY_VERSION_HEX >= 0x030b0000
#include "internal/pycore_code.h"
#include "internal/pycore_dict.h"
#include "internal/pycore_frame.h"
#else
#include <frameobject.h>
#endif
#if PY_VERSION_HEX >= 0x030e0000
#include "internal/pycore_interpframe_structs.h"
#include "internal/pycore_tstate.h"
#endif
#ifdef Py_GIL_DISABLED
#define FREE_THREADED "true"
#else
#define FREE_THREADED "false"
#endif

#define AT(name, type, field) printf("    " name ": %zu,\n", offsetof(type, field))
#define SOME(name, type, field) printf("    " name ": Some(%zu),\n", offsetof(type, field))
#define NONE(name) printf("    " name ": None,\n")
#define NUMBER(name, value) printf("    " name ": %zu,\n", (size_t)(value))
#define SOME_NUMBER(name, value) printf("    " name ": Some(%zu),\n", (size_t)(value))

#if PY_VERSION_HEX < 0x030b0000
// From Objects/dict-common.h, which is not installed. It is identical in 3.8, 3.9 and 3.10.
struct _dictkeysobject {
    Py_ssize_t dk_refcnt;
    Py_ssize_t dk_size;
    void *dk_lookup;
    Py_ssize_t dk_usable;
    Py_ssize_t dk_nentries;
    char dk_indices[];
};
typedef struct _frame Frame;
#define FRAME_PREVIOUS f_back
#define FRAME_CODE f_code
#define FRAME_INSTRUCTION f_lasti
#define FRAME_LOCALS f_localsplus
#define GENERATOR_FRAME gi_frame
#else
typedef _PyInterpreterFrame Frame;
#define FRAME_PREVIOUS previous
#define FRAME_LOCALS localsplus
#define GENERATOR_FRAME gi_iframe
#if PY_VERSION_HEX >= 0x030d0000
#define FRAME_CODE f_executable
#define FRAME_INSTRUCTION instr_ptr
#else
#define FRAME_CODE f_code
#define FRAME_INSTRUCTION prev_instr
#endif
#endif

// Bytes before an object to the pointer to its dictionary. 3.11 has no macro for it.
#ifdef MANAGED_DICT_OFFSET
#define MANAGED_DICT (-MANAGED_DICT_OFFSET)
#else
#define MANAGED_DICT (3 * sizeof(PyObject *))
#endif

static unsigned first_bit(const void *state) {
    unsigned bits;
    memcpy(&bits, state, sizeof bits);
    return (unsigned)__builtin_ctz(bits);
}

static void state_bits(void) {
    PyASCIIObject text;
    memset(&text, 0, sizeof text);
    text.state.kind = 1;
    NUMBER("unicode_kind_bit", first_bit(&text.state));
    text.state.kind = 0;
    text.state.compact = 1;
    NUMBER("unicode_compact_bit", first_bit(&text.state));
    text.state.compact = 0;
    text.state.ascii = 1;
    NUMBER("unicode_ascii_bit", first_bit(&text.state));
}

int main(void) {
    printf("    minor: %d,\n", PY_MINOR_VERSION);
    printf("    free_threaded: " FREE_THREADED ",\n");
#if PY_VERSION_HEX >= 0x03090000
    AT("runtime_finalizing", _PyRuntimeState, _finalizing);
#else
    AT("runtime_finalizing", _PyRuntimeState, finalizing);
#endif
    AT("runtime_interpreters", _PyRuntimeState, interpreters.head);
#if PY_VERSION_HEX >= 0x030c0000
    NONE("runtime_gil");
    AT("interpreter_next", PyInterpreterState, next);
    AT("interpreter_threads", PyInterpreterState, threads.head);
    AT("interpreter_modules", PyInterpreterState, imports.modules);
    SOME("interpreter_gil", PyInterpreterState, ceval.gil);
#else
    SOME("runtime_gil", _PyRuntimeState, ceval.gil);
    AT("interpreter_next", PyInterpreterState, next);
#if PY_VERSION_HEX >= 0x030b0000
    AT("interpreter_threads", PyInterpreterState, threads.head);
#else
    AT("interpreter_threads", PyInterpreterState, tstate_head);
#endif
    AT("interpreter_modules", PyInterpreterState, modules);
    NONE("interpreter_gil");
#endif
#if PY_VERSION_HEX >= 0x03090000
    NONE("runtime_gc");
    SOME("interpreter_gc", PyInterpreterState, gc);
#else
    SOME("runtime_gc", _PyRuntimeState, gc);
    NONE("interpreter_gc");
#endif
    AT("gc_generations", struct _gc_runtime_state, generation_stats);
    NUMBER("gc_generation_size", sizeof(struct gc_generation_stats));
    AT("gc_collections", struct gc_generation_stats, collections);
    AT("gc_collecting", struct _gc_runtime_state, collecting);
#ifdef Py_GIL_DISABLED
    NONE("gc_lists");
#elif PY_VERSION_HEX >= 0x030e0000
    // The name of the three lists depends on the patch release of 3.14: its first releases have
    // an incremental collector, whose lists are of the same size and at the same place.
    SOME_NUMBER("gc_lists", offsetof(struct _gc_runtime_state, permanent_generation) -
                                3 * sizeof(struct gc_generation));
#else
    SOME("gc_lists", struct _gc_runtime_state, generations);
#endif
#if PY_VERSION_HEX >= 0x030f0000
    SOME_NUMBER("gc_young_items", GC_YOUNG_STATS_SIZE);
    SOME("gc_old", struct gc_stats, old);
    SOME_NUMBER("gc_old_size", sizeof(struct gc_old_stats_buffer));
    SOME_NUMBER("gc_old_items", GC_OLD_STATS_SIZE);
#else
    NONE("gc_young_items");
    NONE("gc_old");
    NONE("gc_old_size");
    NONE("gc_old_items");
#endif
    AT("gil_holder", struct _gil_runtime_state, last_holder);
    AT("gil_locked", struct _gil_runtime_state, locked);
    AT("gil_switches", struct _gil_runtime_state, switch_number);
    NUMBER("thread_size", sizeof(PyThreadState));
    AT("thread_previous", PyThreadState, prev);
    AT("thread_next", PyThreadState, next);
    AT("thread_interpreter", PyThreadState, interp);
    AT("thread_id", PyThreadState, thread_id);
#if PY_VERSION_HEX >= 0x030d0000
    SOME("thread_native_id", PyThreadState, native_thread_id);
    AT("thread_frame", PyThreadState, current_frame);
    NONE("cframe_frame");
    SOME("thread_chunk", PyThreadState, datastack_chunk);
#elif PY_VERSION_HEX >= 0x030b0000
    SOME("thread_native_id", PyThreadState, native_thread_id);
    AT("thread_frame", PyThreadState, cframe);
    SOME("cframe_frame", _PyCFrame, current_frame);
    SOME("thread_chunk", PyThreadState, datastack_chunk);
#else
    NONE("thread_native_id");
    AT("thread_frame", PyThreadState, frame);
    NONE("cframe_frame");
    NONE("thread_chunk");
#endif
#if PY_VERSION_HEX >= 0x030e0000
    SOME("thread_tasks", _PyThreadStateImpl, asyncio_tasks_head);
#else
    NONE("thread_tasks");
#endif
    AT("thread_exceptions", PyThreadState, exc_info);
    NUMBER("frame_size", offsetof(Frame, FRAME_INSTRUCTION) + 24);
    AT("frame_previous", Frame, FRAME_PREVIOUS);
    AT("frame_code", Frame, FRAME_CODE);
    AT("frame_instruction", Frame, FRAME_INSTRUCTION);
    AT("frame_locals", Frame, FRAME_LOCALS);
    AT("generator_frame", PyGenObject, GENERATOR_FRAME);
#if PY_VERSION_HEX >= 0x030c0000
    SOME("frame_owner", Frame, owner);
    NONE("frame_is_entry");
#elif PY_VERSION_HEX >= 0x030b0000
    SOME("frame_owner", Frame, owner);
    SOME("frame_is_entry", Frame, is_entry);
#else
    NONE("frame_owner");
    NONE("frame_is_entry");
#endif
    AT("code_filename", PyCodeObject, co_filename);
#if PY_VERSION_HEX >= 0x030b0000
    AT("code_name", PyCodeObject, co_qualname);
    SOME("code_bytes", PyCodeObject, co_code_adaptive);
#else
    AT("code_name", PyCodeObject, co_name);
    NONE("code_bytes");
#endif
#if PY_VERSION_HEX >= 0x030e0000 && defined(Py_GIL_DISABLED)
    SOME("code_copies", PyCodeObject, co_tlbc);
#else
    NONE("code_copies");
#endif
    AT("code_first_line", PyCodeObject, co_firstlineno);
#if PY_VERSION_HEX >= 0x030a0000
    AT("code_lines", PyCodeObject, co_linetable);
#else
    AT("code_lines", PyCodeObject, co_lnotab);
#endif
#ifdef Py_GIL_DISABLED
    AT("object_references", PyObject, ob_ref_local);
    SOME("object_shared_references", PyObject, ob_ref_shared);
#else
    AT("object_references", PyObject, ob_refcnt);
    NONE("object_shared_references");
#endif
    AT("object_type", PyObject, ob_type);
    NUMBER("object_size", sizeof(PyObject));
    AT("bytes_length", PyVarObject, ob_size);
    AT("bytes_data", PyBytesObject, ob_sval);
    AT("unicode_length", PyASCIIObject, length);
    AT("unicode_state", PyASCIIObject, state);
    state_bits();
    NUMBER("unicode_ascii_data", sizeof(PyASCIIObject));
    NUMBER("unicode_compact_data", sizeof(PyCompactUnicodeObject));
    AT("unicode_data_pointer", PyUnicodeObject, data);
#if PY_VERSION_HEX >= 0x030c0000
    AT("long_tag", PyLongObject, long_value.lv_tag);
    AT("long_digits", PyLongObject, long_value.ob_digit);
#else
    AT("long_tag", PyVarObject, ob_size);
    AT("long_digits", struct _longobject, ob_digit);
#endif
    AT("dict_keys", PyDictObject, ma_keys);
    AT("dict_values", PyDictObject, ma_values);
#if PY_VERSION_HEX >= 0x030b0000
    AT("keys_size", struct _dictkeysobject, dk_log2_index_bytes);
    SOME("keys_kind", struct _dictkeysobject, dk_kind);
#else
    AT("keys_size", struct _dictkeysobject, dk_size);
    NONE("keys_kind");
#endif
    AT("keys_entries", struct _dictkeysobject, dk_nentries);
    AT("keys_indices", struct _dictkeysobject, dk_indices);
#if PY_VERSION_HEX >= 0x030b0000
    AT("values_data", struct _dictvalues, values);
    SOME("type_cached_keys", PyHeapTypeObject, ht_cached_keys);
    SOME_NUMBER("managed_dict", MANAGED_DICT);
#else
    NUMBER("values_data", 0);
    NONE("type_cached_keys");
    NONE("managed_dict");
#endif
    AT("list_items", PyListObject, ob_item);
    AT("tuple_items", PyTupleObject, ob_item);
    AT("type_name", PyTypeObject, tp_name);
    AT("type_base", PyTypeObject, tp_base);
    AT("type_flags", PyTypeObject, tp_flags);
    AT("type_dict_offset", PyTypeObject, tp_dictoffset);
#if PY_VERSION_HEX >= 0x030d0000
#define DEBUG_OFFSET(name, field) printf("        " name ": %zu,\n", offsetof(_Py_DebugOffsets, field))
    printf("    debug_offsets: Some(DebugOffsets {\n");
    DEBUG_OFFSET("runtime_finalizing", runtime_state.finalizing);
    DEBUG_OFFSET("runtime_interpreters", runtime_state.interpreters_head);
    DEBUG_OFFSET("interpreter_next", interpreter_state.next);
    DEBUG_OFFSET("interpreter_threads", interpreter_state.threads_head);
    DEBUG_OFFSET("interpreter_modules", interpreter_state.imports_modules);
    DEBUG_OFFSET("interpreter_gil", interpreter_state.ceval_gil);
    DEBUG_OFFSET("interpreter_gc", interpreter_state.gc);
    DEBUG_OFFSET("thread_previous", thread_state.prev);
    DEBUG_OFFSET("thread_next", thread_state.next);
    DEBUG_OFFSET("thread_interpreter", thread_state.interp);
    DEBUG_OFFSET("thread_id", thread_state.thread_id);
    DEBUG_OFFSET("thread_native_id", thread_state.native_thread_id);
    DEBUG_OFFSET("thread_frame", thread_state.current_frame);
    DEBUG_OFFSET("thread_chunk", thread_state.datastack_chunk);
    DEBUG_OFFSET("frame_previous", interpreter_frame.previous);
    DEBUG_OFFSET("frame_code", interpreter_frame.executable);
    DEBUG_OFFSET("frame_instruction", interpreter_frame.instr_ptr);
    DEBUG_OFFSET("frame_owner", interpreter_frame.owner);
    DEBUG_OFFSET("code_filename", code_object.filename);
    DEBUG_OFFSET("code_name", code_object.qualname);
    DEBUG_OFFSET("code_bytes", code_object.co_code_adaptive);
#if PY_VERSION_HEX >= 0x030e0000 && defined(Py_GIL_DISABLED)
#define OPTIONAL_DEBUG_OFFSET(name, field) printf("        " name ": Some(%zu),\n", offsetof(_Py_DebugOffsets, field))
    OPTIONAL_DEBUG_OFFSET("code_copies", code_object.co_tlbc);
#else
    printf("        code_copies: None,\n");
#endif
    DEBUG_OFFSET("code_first_line", code_object.firstlineno);
    DEBUG_OFFSET("code_lines", code_object.linetable);
    DEBUG_OFFSET("object_type", pyobject.ob_type);
    DEBUG_OFFSET("object_size", pyobject.size);
    DEBUG_OFFSET("bytes_length", bytes_object.ob_size);
    DEBUG_OFFSET("bytes_data", bytes_object.ob_sval);
    DEBUG_OFFSET("unicode_length", unicode_object.length);
    DEBUG_OFFSET("unicode_state", unicode_object.state);
    DEBUG_OFFSET("unicode_ascii_data", unicode_object.asciiobject_size);
    DEBUG_OFFSET("long_tag", long_object.lv_tag);
    DEBUG_OFFSET("long_digits", long_object.ob_digit);
    DEBUG_OFFSET("dict_keys", dict_object.ma_keys);
    DEBUG_OFFSET("dict_values", dict_object.ma_values);
    DEBUG_OFFSET("type_flags", type_object.tp_flags);
    printf("    }),\n");
#else
    NONE("debug_offsets");
#endif
    return 0;
}
