//! The offsets of the structures of every CPython are those of its headers, and what is read with
//! them. No Debian has a free-threaded build (without a GIL), but its headers are those of the
//! other build. So a small program with the structures of such an interpreter stands in for it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_proto::samples;
use xpu_timer_tests::{PATIENCE, Process, artifacts, compile_c, forky_headers, python_version, skip, tree};

use super::{
    capture_until,
    python::{FORKY, FREE_THREADED, HOST},
};

/// The beginning of the table of offsets.
const HEAD: &str = "\
//! Printed by `layouts.c` for each CPython; `cargo xtask bless` rewrites it.

use super::{DebugOffsets, Layout};

";

/// The arguments with which a compiler finds the headers of a version, `3.14`, or of its
/// free-threaded build, `3.14t`. Both have the same headers.
fn header_flags(version: &str) -> Result<Vec<String>, String> {
    let gil = version.trim_end_matches('t');
    let mut flags = vec!["-w".to_string()];
    flags.extend((gil != version).then(|| "-DPy_GIL_DISABLED=1".to_string()));
    for path in headers(gil)? {
        flags.push(format!("-I{}", path.display()));
        flags.push(format!("-I{}", path.join("internal").display()));
    }
    Ok(flags)
}

/// Folders with the headers of a version.
fn headers(version: &str) -> Result<Vec<PathBuf>, String> {
    let name = format!("python{version}");
    if FORKY.contains(&version) {
        let root = forky_headers().map_err(|error| format!("headers of CPython {version}: {error:#}"))?;
        let include = root.join("usr/include");
        return Ok(vec![include.join(&name), include.clone(), include.join("x86_64-linux-gnu")]);
    }
    let python = python_version(version).ok_or_else(|| format!("CPython {version} is not installed"))?;
    let mut ask = Command::new(python);
    ask.args(["-c", "import sysconfig; print(sysconfig.get_path('include'))"]);
    let folder = PathBuf::from(Process::spawn(&mut ask).wait(PATIENCE).stdout.trim());
    if folder.join("internal/pycore_pystate.h").exists() {
        Ok(vec![folder])
    } else {
        Err(format!("CPython {version} has no headers in {}", folder.display()))
    }
}

/// One element of the table.
fn printed(source: &str, version: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let flags = header_flags(version)?;
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = compile_c(folder.path(), "layouts", source, &flags);
    let output = Process::spawn(&mut Command::new(program)).wait(PATIENCE);
    let lines: String = output.stdout.lines().map(|line| format!("    {line}\n")).collect();
    Ok(format!("    Layout {{\n{lines}    }},\n"))
}

/// `cargo xtask bless` (BLESS=1) rewrites the table.
#[test]
fn layouts_are_those_of_the_headers() {
    let folder = tree().join("collector/capture/src/cpython");
    let source = fs::read_to_string(folder.join("layouts.c")).expect("the program that prints them");
    let table = folder.join("layouts.rs");
    let old = fs::read_to_string(&table).expect("the table");
    let versions: Vec<&str> = HOST.into_iter().chain(FORKY).chain(FREE_THREADED).collect();
    let mut new = format!("{HEAD}pub(super) static LAYOUTS: [Layout; {}] = [\n", versions.len());
    let mut blocks = old.split_inclusive("\n    },\n").map(|block| &block[block.find("    Layout {").unwrap_or(0)..]);
    for version in versions {
        let known = blocks.next().unwrap_or_default();
        match printed(&source, version) {
            Ok(block) => new += &block,
            Err(reason) => {
                skip(&reason);
                new += known;
            }
        }
    }
    new += "];\n";
    if std::env::var_os("BLESS").is_some() {
        fs::write(&table, new).expect("the table can be written");
    } else {
        assert!(old == new, "{} is stale: run `cargo xtask bless`", table.display());
    }
}

/// Has the structures of a free-threaded interpreter, without the code of one: four threads with
/// three frames each. `gil` enables its GIL, `moves` lets the main thread change its copy of the
/// instructions all the time, and with `yields`, the chain of the last thread ends like that of a
/// generator which has just yielded.
const STAND_IN: &str = r#"#define _GNU_SOURCE
#define Py_BUILD_CORE 1
#include <Python.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "internal/pycore_ceval.h"
#include "internal/pycore_code.h"
#include "internal/pycore_frame.h"
#include "internal/pycore_runtime.h"
#include "internal/pycore_runtime_init.h"
#include "internal/pycore_tstate.h"
#if PY_VERSION_HEX >= 0x030e0000
#include "internal/pycore_interpframe_structs.h"
#define EXECUTABLE(code) { .bits = (uintptr_t)(code) | 1 }
#else
#define EXECUTABLE(code) (PyObject *)(code)
#endif
enum { UNITS = 40, DEPTH = 3, THREADS = 4 };

_PyRuntimeState _PyRuntime = _PyRuntimeState_INIT(_PyRuntime, _Py_Debug_Cookie);
static PyInterpreterState *const interpreter = &_PyRuntime._main_interpreter;
static struct _gil_runtime_state gil;
static _PyThreadStateImpl states[THREADS];
static _PyInterpreterFrame frames[THREADS][DEPTH + 1];
static PyTypeObject code_type = {.tp_name = "code"}, text_type = {.tp_name = "str"};
static PyTypeObject tuple_type = {.tp_name = "tuple"}, error_type = {.tp_name = "ValueError"};
static PyCodeObject *codes[DEPTH];
static int ready;

// Half of the objects have no references of the thread that owns them.
static void *made(PyTypeObject *type, size_t items) {
    static int number;
    PyVarObject *object = calloc(1, 512);
    object->ob_size = items;
    object->ob_base.ob_type = type;
    if (number++ % 2) object->ob_base.ob_ref_local = 1;
    else object->ob_base.ob_ref_shared = 1 << _Py_REF_SHARED_SHIFT | _Py_REF_MERGED;
    return object;
}

static PyObject *text(const char *characters) {
    PyASCIIObject *text = made(&text_type, 0);
    text->length = strlen(characters);
    text->state.kind = text->state.compact = text->state.ascii = 1;
    strcpy((char *)(text + 1), characters);
    return (PyObject *)text;
}

// The instruction at index `unit` is in line 11 + unit.
static PyCodeObject *code(const char *name) {
    PyBytesObject *lines = made(&text_type, 2 * UNITS);
    for (int unit = 0; unit < UNITS; unit++) memcpy(lines->ob_sval + 2 * unit, "\350\2", 2);
    PyCodeObject *code = made(&code_type, UNITS);
    code->co_qualname = text(name);
    code->co_filename = text("/srv/train.py");
    code->co_firstlineno = 10;
    code->co_linetable = (PyObject *)lines;
    return code;
}

// The instructions that a thread executes. From 3.14 on each has a copy, in an array that grows.
static char *instructions(PyCodeObject *code, size_t number) {
#if PY_VERSION_HEX >= 0x030e0000
    _PyCodeArray *old = code->co_tlbc, *array = calloc(1, sizeof *array + 8 * (number + 2));
    array->size = number + 2;
    if (old) memcpy(array->entries, old->entries, 8 * old->size);
    array->entries[0] = code->co_code_adaptive;
    if (number) array->entries[number] = malloc(2 * UNITS);
    __atomic_store_n(&code->co_tlbc, array, __ATOMIC_RELEASE);
    return array->entries[number];
#else
    return code->co_code_adaptive;
#endif
}

static void run(size_t number) {
    _PyInterpreterFrame *own = frames[number];
    PyThreadState *state = &states[number].base;
    int units[DEPTH] = {5 + number, 20, UNITS - 1};
    for (int depth = 0; depth < DEPTH; depth++) {
        _PyInterpreterFrame frame = {.f_executable = EXECUTABLE(codes[depth]), .previous = own + depth + 1};
        frame.instr_ptr = (_Py_CODEUNIT *)instructions(codes[depth], number) + units[depth];
        own[depth] = frame;
    }
    // C code entered the interpreter here.
    own[DEPTH].owner = 3;
    state->interp = interpreter;
    state->prev = number ? &states[number - 1].base : NULL;
    state->next = number + 1 < THREADS ? &states[number + 1].base : NULL;
    state->thread_id = pthread_self();
    state->native_thread_id = syscall(SYS_gettid);
    state->current_frame = own;
    __atomic_fetch_add(&ready, 1, __ATOMIC_SEQ_CST);
}

static void *thread(void *number) {
    run((size_t)number);
    for (;;) pause();
}

int main(int count, char **arguments) {
    const char *names[DEPTH] = {"inner", "middle", "outer"};
    for (int depth = 0; depth < DEPTH; depth++) codes[depth] = code(names[depth]);
    PyTupleObject *values = made(&tuple_type, 1);
    values->ob_item[0] = text("bad batch");
    PyBaseExceptionObject *error = made(&error_type, 0);
    error->args = (PyObject *)values;
    static _PyErr_StackItem handled;
    handled.exc_value = (PyObject *)error;
    states[1].base.exc_info = &handled;
    run(0);
    for (size_t number = 1; number < THREADS; number++) {
        pthread_t id;
        pthread_create(&id, NULL, thread, (void *)number);
        while (__atomic_load_n(&ready, __ATOMIC_SEQ_CST) == number) usleep(100);
    }
    const char *word = count > 1 ? arguments[1] : "";
    int moves = !strcmp(word, "moves");
    gil.enabled = gil.locked = !strcmp(word, "gil");
    if (!strcmp(word, "yields")) frames[3][DEPTH - 1].previous = NULL;
    gil.last_holder = &states[2].base;
    interpreter->ceval.gil = &gil;
    interpreter->threads.head = &states[0].base;
    _PyRuntime.interpreters.head = interpreter;
    puts("ready");
    fflush(stdout);
    // The main thread makes a new copy of its code again and again, and goes on in it.
    for (size_t number = THREADS; moves; number++) {
        frames[0][0].instr_ptr = (_Py_CODEUNIT *)instructions(codes[0], number) + 5;
        usleep(3000);
    }
    for (;;) pause();
}
"#;

/// The stand-ins for all free-threaded builds whose headers are there. No object file has the
/// symbols that their headers refer to, and none of them is called.
fn stand_ins(folder: &Path) -> Vec<(&'static str, PathBuf)> {
    let mut made = Vec::new();
    for version in FREE_THREADED {
        match header_flags(version) {
            Ok(flags) => {
                let link = ["-O1", "-pthread", "-no-pie", "-Wl,--unresolved-symbols=ignore-all"];
                let flags: Vec<&str> = flags.iter().map(String::as_str).chain(link).collect();
                made.push((version, compile_c(folder, &format!("python{version}"), STAND_IN, &flags)));
            }
            Err(reason) => skip(&reason),
        }
    }
    made
}

#[test]
fn threads_without_a_gil_execute_their_own_copies_of_the_code() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (version, program) in stand_ins(folder.path()) {
        for (word, holder) in [("rest", None), ("gil", Some(2)), ("yields", None)] {
            let mut process = Process::spawn(Command::new(&program).arg(word));
            process.wait_for("ready", PATIENCE);
            let captured = capture_until(process.pid(), version, |sample| sample.py_stacktrace.len() == 4);
            let sample = &captured.sample;
            assert_eq!(sample.errors.len(), usize::from(word == "yields"), "{version}: {:?}", sample.errors);
            assert_eq!(sample.longest_stop_ns, 0, "{version}");
            for (number, trace) in sample.py_stacktrace.iter().enumerate() {
                let about = format!("{version} {word} {number}: {trace:?}");
                let frames: Vec<String> =
                    trace.frames.iter().map(|frame| format!("{} {}", frame.func_name, frame.file_name)).collect();
                let leaf = format!("inner /srv/train.py:{}", 16 + number);
                assert_eq!(frames, [leaf.as_str(), "middle /srv/train.py:31", "outer /srv/train.py:50"], "{about}");
                assert_eq!(trace.owns_gil, holder == Some(number), "{about}");
                assert_eq!(trace.incomplete.contains("root"), word == "yields" && number == 3, "{about}");
                let handled: Vec<(&str, &str)> =
                    trace.exceptions.iter().map(|one| (one.r#type.as_str(), one.message.as_str())).collect();
                let expected: &[(&str, &str)] = if number == 1 { &[("ValueError", "bad batch")] } else { &[] };
                assert_eq!(handled, expected, "{about}");
            }
        }
    }
}

/// A copy that a thread has just made is read before its stack is shown.
#[test]
fn new_copies_of_the_code_are_found_while_samples_are_taken() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (version, program) in stand_ins(folder.path()) {
        let mut process = Process::spawn(Command::new(&program).arg("moves"));
        process.wait_for("ready", PATIENCE);
        let output = folder.path().join(format!("record-{version}"));
        let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
        command.args(["record", "--rate", "200", "--seconds", "2", "--pid", &process.pid().to_string(), "--output"]);
        let recorded = Process::spawn(command.arg(&output)).wait(PATIENCE);
        assert_eq!(recorded.code(), 0, "{version}: {}", recorded.stderr);
        let samples = samples::decode(&fs::read(output.join(samples::file_name(0, 1))).expect("the samples"));
        let samples = samples.expect("a file of samples");
        let mut lines: Vec<&str> = samples.frames.iter().map(|frame| frame.file_name.as_str()).collect();
        lines.sort_unstable();
        lines.dedup();
        let expected = [16, 17, 18, 19, 31, 50].map(|line| format!("/srv/train.py:{line}"));
        assert_eq!(lines, expected, "{version}");
        assert!(samples.threads.len() == 4 && samples.stacks.iter().all(|stack| stack.frames.len() == 3), "{version}");
    }
}
