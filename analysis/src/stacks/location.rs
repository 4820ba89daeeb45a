//! Where a thread is: the innermost line of the user's own code, and the most specific native
//! function.

use xpu_timer_proto::server::{PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace};

use super::{
    host::ObservedActivity,
    names::{base_name, contains_any, file, in_c_library, is_library, is_named, own_frame, plain},
    patterns,
};
use crate::verdict::{Activity, Location};

/// Like [`own_frame`], for a thread that a library may have started: if no frame is the user's own,
/// the innermost frame of a package says more than the standard library's thread starter.
pub(super) fn most_specific_frame(frames: &[PySpyFrame]) -> Option<&PySpyFrame> {
    let of_package = |frame: &&PySpyFrame| contains_any(&frame.file_name, patterns::PACKAGE_PATHS);
    let own = frames.iter().any(|frame| !is_library(&frame.file_name));
    frames.iter().find(of_package).filter(|_| !own).or_else(|| own_frame(frames))
}

/// The innermost frame of the user's own code in another file than `own`, which it called.
fn caller(frames: &[PySpyFrame], own: &PySpyFrame) -> Option<String> {
    let mut frames = frames.iter().filter(|frame| !is_library(&frame.file_name));
    let other = frames.find(|frame| file(frame).is_some() && file(frame) != file(own))?;
    Some(format!("{} in {}", other.file_name, other.func_name))
}

/// The location of a thread with this activity, in a process that runs `program`.
pub(super) fn locate(
    native: Option<&PstackStacktrace>,
    python: Option<&PySpyStacktrace>,
    doing: &ObservedActivity,
    program: Option<&str>,
) -> Location {
    let own = python.and_then(|thread| own_frame(&thread.frames));
    let waits = doing.activity == Activity::DeviceWait;
    let caller = python.zip(own).filter(|_| waits).and_then(|(thread, own)| caller(&thread.frames, own));
    // Without Python frames, the program's own native function shows the place in the program.
    let own_native = |frames| program.filter(|_| own.is_none()).and_then(|program| own_native_frame(frames, program));
    let native_function = native.and_then(|thread| {
        let function = most_specific_function(&thread.frames, &doing.witness)?;
        // A function inside the interpreter adds nothing to the Python code that it runs.
        let runs = matches!(doing.activity, Activity::Running | Activity::Gil);
        if runs && own.is_some() && is_interpreter(&function.module) {
            return None;
        }
        Some(match own_native(&thread.frames) {
            Some(own) => native_path(&thread.frames, function, own),
            None => plain(&function.func_name).into_owned(),
        })
    });
    Location {
        python: own.map(|frame| frame.file_name.clone()),
        python_function: own.map(|frame| frame.func_name.clone()),
        caller,
        native: native_function.or_else(|| {
            native.filter(|thread| !thread.wchan.is_empty()).map(|thread| format!("{} (kernel)", thread.wchan))
        }),
    }
}

/// Combines the most specific function and the program's own innermost function, the inner of the
/// two first.
fn native_path(frames: &[PstackFrame], function: &PstackFrame, own: &PstackFrame) -> String {
    let depth = |wanted: &PstackFrame| frames.iter().position(|frame| std::ptr::eq(frame, wanted));
    let (name, place) = (plain(&function.func_name), format!("{}{}", plain(&own.func_name), source(own)));
    if function.func_name == own.func_name {
        place
    } else if depth(function) < depth(own) {
        format!("{name}, called from {place}")
    } else {
        format!("{place}, called from {name}{}", source(function))
    }
}

/// Whether an object contains Python's interpreter.
fn is_interpreter(module: &str) -> bool {
    patterns::INTERPRETER_FILES.iter().any(|start| base_name(module).starts_with(start))
}

/// The object that a process runs: the one with `main`, by the stack of its main thread.
pub(super) fn program(threads: &[PstackStacktrace]) -> Option<&str> {
    let of = |root: &str| {
        let mut frames = threads.iter().flat_map(|thread| &thread.frames);
        frames.find(|frame| frame.func_name == root).map(|frame| frame.module.as_str())
    };
    of("main").or_else(|| of("_start"))
}

/// The innermost frame of the program itself: in the object with `main`, and not of a language
/// runtime inside it.
fn own_native_frame<'a>(frames: &'a [PstackFrame], program: &str) -> Option<&'a PstackFrame> {
    innermost_of(frames, program).filter(|frame| frame.func_name != "_start")
}

/// The place of a thread in the program that this object contains: `read_shard (loader.cpp:41)`.
pub(super) fn own_native_place(frames: &[PstackFrame], program: &str) -> Option<String> {
    innermost_of(frames, program).map(|frame| format!("{}{}", plain(&frame.func_name), source(frame)))
}

/// Whether a function of the program is one of CUDA's runtime, which nvcc links statically:
/// `cudaDeviceSynchronize`.
fn is_cuda_runtime(function: &str) -> bool {
    function.strip_prefix("cuda").is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_uppercase()))
}

fn innermost_of<'a>(frames: &'a [PstackFrame], program: &str) -> Option<&'a PstackFrame> {
    frames.iter().find(|frame| {
        frame.module == program
            && is_named(&frame.func_name)
            && !contains_any(&frame.func_name, patterns::RUNTIME_INSIDES)
            && !is_cuda_runtime(&frame.func_name)
            && !contains_any(&frame.file_name, patterns::SYSTEM_SOURCES)
    })
}

/// The source line of a frame, if known: ` (loader.cpp:41)`.
fn source(frame: &PstackFrame) -> String {
    let line = base_name(&frame.file_name);
    if line.contains(':') { format!(" ({line})") } else { String::new() }
}

/// The native function that says most about where a thread is. In this order: the function by which
/// it was classified; the public function of the C library that was called; the caller of the C
/// library, without the internals of a language runtime; the innermost function.
fn most_specific_function<'a>(frames: &'a [PstackFrame], witness: &str) -> Option<&'a PstackFrame> {
    let frames: Vec<&PstackFrame> = frames.iter().filter(|frame| is_named(&frame.func_name)).collect();
    let innermost = frames.first()?;
    let library = frames.iter().take_while(|frame| in_c_library(frame)).count();
    let by_witness = frames[library..].iter().find(|frame| frame.func_name == witness);
    let public = |frame: &&&PstackFrame| {
        !frame.func_name.starts_with('_') && !frame.func_name.contains('.') && frame.func_name != "syscall"
    };
    let entry = frames[..library].iter().rfind(public).copied();
    // libffi has called an internal function of the C library, whose plain name is known.
    let is_called =
        frames.get(library).is_some_and(|caller| caller.func_name.starts_with(patterns::FOREIGN_CALL_NATIVE));
    let entry = entry.or_else(|| frames[..library].last().copied().filter(|_| is_called));
    let caller = frames[library..].iter().find(|frame| !contains_any(&frame.func_name, patterns::RUNTIME_INSIDES));
    Some(by_witness.copied().or(entry).or(caller.copied()).unwrap_or(innermost))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most_specific(witness: &str, stack: &[(&str, &str)]) -> String {
        let frame = |(function, module): &(&str, &str)| PstackFrame {
            func_name: (*function).into(),
            module: (*module).into(),
            ..Default::default()
        };
        let frames: Vec<PstackFrame> = stack.iter().map(frame).collect();
        most_specific_function(&frames, witness).map_or("nothing", |frame| &frame.func_name).to_owned()
    }

    const LIBC: &str = "/usr/lib/x86_64-linux-gnu/libc.so.6";
    const PYTHON: &str = "/usr/lib/libpython3.11.so";
    const CUDA: &str = "/usr/lib/libcuda.so.1";

    fn frame(function: &str, file: &str) -> PySpyFrame {
        PySpyFrame { func_name: function.into(), file_name: file.into(), ..Default::default() }
    }

    #[test]
    fn a_pool_thread_is_located_by_the_package_that_uses_the_pool() {
        let pool = frame("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py:83");
        let package =
            frame("_write_files", "/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/filesystem.py:9");
        let most_specific = |frames: &[PySpyFrame]| most_specific_frame(frames).map(|frame| frame.func_name.clone());
        assert_eq!(most_specific(&[package.clone(), pool.clone()]).as_deref(), Some("_write_files"));
        let own = frame("save", "/job/train.py:3");
        assert_eq!(most_specific(&[package, own, pool.clone()]).as_deref(), Some("save"));
        assert_eq!(most_specific(&[pool]).as_deref(), Some("_worker"));
    }

    #[test]
    fn the_insides_of_a_running_interpreter_are_not_a_location() {
        let frames = vec![frame("spin", "/job/train.py:188")];
        let python = PySpyStacktrace { frames, ..Default::default() };
        let native = |module: &str| PstackStacktrace {
            frames: vec![PstackFrame {
                func_name: "unicodekeys_lookup_unicode".into(),
                module: module.into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let running = ObservedActivity { activity: Activity::Running, witness: String::new() };
        let located = |module: &str, python: Option<&PySpyStacktrace>| {
            locate(Some(&native(module)), python, &running, None).native
        };
        assert_eq!(located("/usr/bin/python3.11", Some(&python)), None);
        assert_eq!(located("/opt/lib/libpython3.11.so.1.0", Some(&python)), None);
        assert!(located("/opt/lib/libtorch.so", Some(&python)).is_some());
        assert!(located("/usr/bin/python3.11", None).is_some());
    }

    #[test]
    fn the_location_includes_the_caller_of_a_device_wrapper() {
        let frames = vec![
            frame("sync", "/job/cuda.py:143"),
            frame("Stream.wait", "/job/cuda.py:90"),
            frame("f", "/usr/lib/python3/dist-packages/x.py:1"),
            frame("step", "/job/train.py:88"),
        ];
        let python = PySpyStacktrace { frames, ..Default::default() };
        let doing = |activity| ObservedActivity { activity, witness: String::new() };
        let caller = |activity| locate(None, Some(&python), &doing(activity), None).caller;
        assert_eq!(caller(Activity::DeviceWait).as_deref(), Some("/job/train.py:88 in step"));
        assert_eq!(caller(Activity::Sleep), None);
    }

    #[test]
    fn the_most_specific_function() {
        let lock = [
            ("__futex_abstimed_wait_common64", LIBC),
            ("__new_sem_wait_slow64.constprop.0", LIBC),
            ("PyThread_acquire_lock_timed", PYTHON),
        ];
        assert_eq!(most_specific("", &lock), "PyThread_acquire_lock_timed");
        assert_eq!(most_specific("", &[("__GI___libc_read", LIBC), ("read", LIBC), ("_Py_read", PYTHON)]), "read");
        let device = [("ioctl", LIBC), ("??", CUDA), ("cuStreamSynchronize", CUDA), ("cudaStreamSynchronize", CUDA)];
        assert_eq!(most_specific("cuStreamSynchronize", &device), "cuStreamSynchronize");
        let called = [
            ("__futex_abstimed_wait_common64", LIBC),
            ("__new_sem_wait_slow64.constprop.0", LIBC),
            ("ffi_call", "/usr/lib/libffi.so.8"),
        ];
        assert_eq!(plain(&most_specific("", &called)), "sem_wait");
        let rust = [("syscall", LIBC), ("std::sys::futex_wait", "/app"), ("app::wait", "/app")];
        assert_eq!(most_specific("", &rust), "app::wait");
        assert_eq!(most_specific("", &[("syscall", LIBC)]), "syscall");
        assert_eq!(most_specific("", &[("??", "/app")]), "nothing");
    }

    #[test]
    fn a_program_without_python_is_located_by_its_own_function() {
        let frame = |function: &str, module: &str, source: &str| PstackFrame {
            func_name: function.into(),
            module: module.into(),
            file_name: source.into(),
            ..Default::default()
        };
        let located = |frames: &[PstackFrame]| {
            let threads = [PstackStacktrace { frames: frames.to_vec(), ..Default::default() }];
            locate(Some(&threads[0]), None, &ObservedActivity::default(), program(&threads)).native.unwrap_or_default()
        };
        let lock = [
            frame("futex_wait", LIBC, "./nptl/futex-internal.h:146"),
            frame("pthread_mutex_lock", LIBC, "./nptl/pthread_mutex_lock.c:93"),
            frame("std::mutex::lock", "/job/train", "/usr/include/c++/12/bits/std_mutex.h:100"),
            frame("Optimizer::step", "/job/train", "/job/src/train.cpp:108"),
            frame("main", "/job/train", "/job/src/train.cpp:253"),
            frame("__libc_start_main", LIBC, "libc.so.6"),
            frame("_start", "/job/train", "??"),
        ];
        assert_eq!(located(&lock), "pthread_mutex_lock, called from Optimizer::step (train.cpp:108)");
        assert_eq!(located(&lock[3..]), "Optimizer::step (train.cpp:108)");
        assert_eq!(located(&lock[5..6]), "__libc_start_main", "nothing of its own");
        assert_eq!(located(&lock[..2]), "pthread_mutex_lock", "a stack that does not reach its root");

        // The most specific function may have called the program's own innermost function.
        let loader = [
            frame("read", LIBC, "./io/read.c:26"),
            frame("read_shard", "/job/train", "/job/src/shards.cpp:12"),
            frame("Loader::next_batch", "/job/train", "/job/src/loader.cpp:77"),
            frame("main", "/job/train", "/job/src/train.cpp:253"),
        ];
        let thread = [PstackStacktrace { frames: loader.to_vec(), ..Default::default() }];
        let doing = ObservedActivity { activity: Activity::DataLoader, witness: "Loader::next_batch".into() };
        let native = locate(Some(&thread[0]), None, &doing, program(&thread)).native;
        assert_eq!(
            native.as_deref(),
            Some("read_shard (shards.cpp:12), called from Loader::next_batch (loader.cpp:77)")
        );
    }
}
