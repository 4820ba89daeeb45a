//! The words by which a stack tells what its thread does. Tables only; how they are asked stands in the parent module.

/// Native functions in which a thread creates a communicator or waits for its store.
pub(super) const INIT_NATIVE: &[&str] = &[
    "CommInit",
    "CommSplit",
    "CommShrink",
    "CommGrow",
    "bootstrapInit",
    "c10d::TCPStore",
    "c10d::FileStore",
    "c10d::PrefixStore",
];
/// Where torch makes a connection to the store of a job, as far as names of it are known; in its constructor it also waits there for the other ranks, by functions of
/// other names.
pub(super) const STORE_CONNECT_NATIVE: &[&str] =
    &["c10d::TCPStore::TCPStore", "c10d::detail::Socket::connect", "SocketConnectOp", "TCPClient::connect"];
/// Functions of the C library in which it waits for that connection, or before it tries again.
pub(super) const CONNECT_NATIVE: &[&str] = &["connect", "poll", "nanosleep", "clock_nanosleep"];
/// Python functions that do, inside `torch/distributed`.
pub(super) const INIT_PYTHON: &[&str] = &[
    "init_process_group",
    "_store_based_barrier",
    "rendezvous",
    "_create_c10d_store",
    "new_group",
    "_new_process_group_helper",
];

/// What an interpreter waits with for its global lock, and its public functions that do.
pub(super) const GIL_WAIT_NATIVE: &str = "pthread_cond_timedwait";
pub(super) const TAKES_GIL_NATIVE: &[&str] = &[
    "PyEval_EvalFrameDefault",
    "PyEval_RestoreThread",
    "PyEval_AcquireThread",
    "PyEval_AcquireLock",
    "PyThreadState_Attach",
    "PyGILState_Ensure",
    "Py_HandlePending",
];

/// Parts of the paths of the C library and its companions.
pub(super) const C_LIBRARY: &[&str] =
    &["/libc.so", "/libc-2", "/libpthread", "/ld-linux", "/librt", "/ld-musl", "[vdso]"];
/// Parts of the paths of source that comes with the system: headers, and where distributions and Rust build their libraries.
pub(super) const SYSTEM_SOURCES: &[&str] =
    &["/usr/include/", "/usr/lib/", "/rustc/", "./nptl/", "./misc/", "/sysdeps/"];
/// Parts of functions that belong to the runtime of a language rather than to anybody's program.
pub(super) const RUNTIME_INSIDES: &[&str] = &["std::", "core::", "__gthread", "parking_lot"];

/// Native functions in which communicators, or the process, end.
pub(super) const TEARDOWN_NATIVE: &[&str] = &[
    "CommDestroy",
    "CommAbort",
    "CommFinalize",
    "Py_FinalizeEx",
    "__run_exit_handlers",
    "__cxa_finalize",
    "wait_for_thread_shutdown",
];
/// Python functions in which they end.
pub(super) const TEARDOWN_PYTHON: &[&str] = &["destroy_process_group", "_python_exit", "_exit_function"];

/// Parts of native functions, in lower case, that wait for the device or are a collective of a library.
pub(super) const DEVICE_NATIVE: &[&str] = &[
    "streamsynchronize",
    "devicesynchronize",
    "eventsynchronize",
    "ctxsynchronize",
    "streamwaitvalue",
    "cudamemcpy",
    "cumemcpy",
    "hipmemcpy",
    "mcmemcpy",
    "musamemcpy",
    "launchkernel",
    "launchcooperativekernel",
    "graphlaunch",
    "worknccl",
    "gloo::",
    "c10d::processgroup",
    "c10d::reducer",
    "c10d::work",
];
/// Beginnings of the C functions of the collective libraries.
pub(super) const COLLECTIVE_PREFIXES: &[&str] = &["nccl", "pnccl", "mccl", "pmccl", "hccl", "cncl", "mpi_", "pmpi_"];
/// Python functions that wait for the device or in a collective; only inside `torch/` or a module called `cuda`.
pub(super) const DEVICE_PYTHON: &[&str] =
    &["synchronize", "barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "monitored_barrier"];

/// Native functions of the garbage collector of CPython 3.8 to 3.15.
pub(super) const GC_NATIVE: &[&str] = &[
    "gc_collect_main",
    "gc_collect_region",
    "gc_collect_young",
    "gc_collect_increment",
    "gc_collect_full",
    "gc_collect_generations",
    "collect_generations",
    "deduce_unreachable",
    "_PyGC_Collect",
    "PyGC_Collect",
];

/// Parts of the path of a Python frame that compiles.
pub(super) const COMPILE_PATHS: &[&str] = &[
    "/torch/_inductor/",
    "/torch/_dynamo/convert_frame",
    "/torch/_dynamo/symbolic_convert",
    "/torch/_dynamo/output_graph",
    "/torch/utils/cpp_extension",
    "/triton/compiler/",
    "/triton/runtime/build",
    "/torch/_functorch/aot_autograd",
];
/// Functions in those files that also run a compiled graph, so that they prove nothing.
pub(super) const COMPILE_NOT: &[&str] = &["runner", "call", "run", "__call__"];
/// Native functions of compilers inside the process.
pub(super) const COMPILE_NATIVE: &[&str] = &["nvrtcCompileProgram", "nvPTXCompilerCompile", "llvm::", "mlir::"];
/// Programs that compile.
pub(super) const COMPILERS: &[&str] = &[
    "nvcc", "cicc", "ptxas", "cc1plus", "cc1", "ninja", "g++", "gcc", "c++", "cc", "clang", "clang++", "ld", "hipcc",
    "mxcc",
];
/// Programs whose first argument is the program that they run.
pub(super) const INTERPRETERS: &[&str] =
    &["sh", "bash", "dash", "env", "python", "python3", "perl", "ccache", "sccache"];

/// Functions of a data loader, whatever its file.
pub(super) const LOADER_FUNCTIONS: &[&str] = &[
    "__next__",
    "_next_data",
    "_get_data",
    "_try_get_data",
    "_next_index",
    "next_batch",
    "get_batch",
    "load_batch",
    "fetch_batch",
    "read_batch",
];
/// Native functions of a data loader, without their class.
pub(super) const LOADER_NATIVE: &[&str] =
    &["next_batch", "get_batch", "load_batch", "fetch_batch", "read_batch", "nextBatch", "getBatch", "loadBatch"];
/// Parts of a file name, in lower case, that belong to a data loader.
pub(super) const LOADER_FILES: &[&str] = &["dataloader", "data_loader", "/utils/data/"];
/// Beginnings of words in the name of a function that make a queue the queue of a loader.
pub(super) const LOADER_HINTS: &[&str] =
    &["next", "load", "data", "batch", "fetch", "sample", "shard", "prefetch", "read"];
/// The part of their paths that tells those of several processes, and the one of them that is a queue.
pub(super) const OF_PROCESSES: &str = "/multiprocessing/";
pub(super) const QUEUE_OF_PROCESSES: &str = "/multiprocessing/queues.py";
/// Files of the standard library whose functions below are waits for another thread or process.
pub(super) const QUEUE_FILES: &[&str] = &["/queue.py", "/multiprocessing/queues.py", "/multiprocessing/connection.py"];
/// Functions in those files.
pub(super) const QUEUE_FUNCTIONS: &[&str] =
    &["get", "recv", "recv_bytes", "_recv", "_recv_bytes", "poll", "_poll", "wait"];

/// Files of libraries in which a thread waits for the work of child processes: pools and futures, the standard library's and others'.
pub(super) const WORKER_FILES: &[&str] = &[
    "/multiprocess",
    "/concurrent/futures/",
    "/subprocess.py",
    "/asyncio/",
    "/joblib/",
    "/loky/",
    "/billiard/",
    "/pexpect/",
    "/torch/utils/data/",
];

/// System calls of x86-64 that move bytes of a socket: read, write, sendto, recvfrom, sendmsg, recvmsg.
pub(super) const SOCKET_SYSCALLS: &[i64] = &[0, 1, 44, 45, 46, 47];

/// System calls of x86-64 that move bytes of a file, or wait until it is safe on its disk.
pub(super) const IO_SYSCALLS: &[i64] = &[
    0, 1, 2, 4, 5, 6, 8, 17, 18, 19, 20, 26, 40, 72, 73, 74, 75, 76, 77, 82, 83, 84, 87, 162, 187, 217, 257, 277, 285,
    295, 296, 306, 326, 328,
];
/// Their functions in the C library.
pub(super) const IO_NATIVE: &[&str] = &[
    "read",
    "write",
    "pread",
    "pwrite",
    "pread64",
    "pwrite64",
    "readv",
    "writev",
    "preadv",
    "pwritev",
    "fsync",
    "fdatasync",
    "msync",
    "sync",
    "syncfs",
    "open",
    "open64",
    "openat",
    "openat64",
    "stat",
    "lstat",
    "fstat",
    "unlink",
    "rename",
    "mkdir",
    "getdents64",
    "sendfile",
    "sendfile64",
    "fallocate",
    "ftruncate",
    "copy_file_range",
    "flock",
    "lockf",
    "fcntl",
    "fcntl64",
];
/// Functions of the interpreter in which `input()` reads what is no terminal: a person, or another program, is waited for.
pub(super) const INPUT_NATIVE: &[&str] = &["PyFile_GetLine"];
/// Beginnings of functions, of the C library and of the kernel, that read what only tells of events.
pub(super) const EVENT_READS: &[&str] = &["eventfd_", "inotify_read", "signalfd_", "timerfd_"];
/// Those that wait for a lock on a file.
pub(super) const FILE_LOCKS: &[&str] = &["flock", "lockf", "fcntl", "fcntl64"];
/// Beginnings of words, or of several joined by `_`, in the name of a kernel function in which a thread waits for a file, a pipe or a disk.
pub(super) const IO_WCHAN: &[&str] = &[
    "pipe_read",
    "pipe_write",
    "pipe_wait",
    "fuse_",
    "request_wait_answer",
    "nfs",
    "rpc_wait",
    "io_schedule",
    "folio_wait",
    "wait_on_page",
    "jbd2",
    "xfs_",
    "ext4_",
    "ceph_",
    "lustre",
    "ll_",
    "cl_sync",
    "gpfs",
    "wait_on_buffer",
    "submit_bio_wait",
];

/// The file of Python's multiprocessing whose locks, conditions and barriers processes share, and the part of the path of the module behind it.
pub(super) const SHARED_LOCK_FILE: &str = "/multiprocessing/synchronize.py";
pub(super) const SHARED_LOCK_MODULE: &str = "/_multiprocessing.";
/// Files in which a program of Python waits for a child process, with the functions that do.
pub(super) const CHILD_FILES: &[&str] = &["/subprocess.py", "/multiprocessing/popen_fork.py"];
pub(super) const CHILD_FUNCTIONS: &[&str] = &["communicate", "_communicate", "wait", "_wait", "run", "poll"];

/// Functions of the C library that wait for a signal, and their system calls of x86-64.
pub(super) const SIGNAL_NATIVE: &[&str] =
    &["pause", "sigsuspend", "sigwait", "sigwaitinfo", "sigtimedwait", "sigtimedwait64"];
pub(super) const SIGNAL_SYSCALLS: &[i64] = &[34, 128, 130];
/// Functions in which a main thread waits for the end of another thread: of the C library and of the interpreter, then of Python's `threading`.
pub(super) const JOIN_NATIVE: &[&str] =
    &["pthread_join", "pthread_clockjoin", "pthread_timedjoin", "wait_for_thread_shutdown"];
pub(super) const JOIN_PYTHON: &[&str] = &["join", "_wait_for_tstate_lock", "_shutdown"];
pub(super) const THREADING_FILE: &str = "/threading.py";

/// Functions of the C library that wait for what comes over a socket.
pub(super) const NETWORK_NATIVE: &[&str] =
    &["recv", "recvfrom", "recvmsg", "connect", "accept", "accept4", "poll", "ppoll", "select", "epoll_wait"];

/// Functions of the C library that wait for a child process to end, and their system calls of x86-64.
pub(super) const CHILD_NATIVE: &[&str] = &["wait", "wait3", "wait4", "waitpid", "waitid"];
pub(super) const CHILD_SYSCALLS: &[i64] = &[61, 247];

/// Kernel functions in which a process stands whose control group is frozen, of the freezers of version 1 and 2. Newer kernels have that of
/// version 2 inlined into `get_signal`, in which otherwise only a process stands that is stopped, as its state says.
pub const FREEZER_WCHAN: &[&str] = &["__refrigerator", "do_freezer_trap", "get_signal"];

/// Beginnings of kernel functions in which a thread sleeps so that a signal wakes it. One that is in state `D` there is frozen: that is how kernels
/// since 6.1 show the freezer of version 1.
pub(super) const WAKEABLE_WCHAN: &[&str] = &[
    "futex_",
    "hrtimer_nanosleep",
    "do_nanosleep",
    "ep_poll",
    "do_epoll_wait",
    "poll_schedule_timeout",
    "do_sigtimedwait",
    "sk_wait_data",
];

/// Functions of the C library that sleep.
pub(super) const SLEEP_NATIVE: &[&str] = &["nanosleep", "clock_nanosleep", "usleep", "sleep"];
/// `nanosleep` and `clock_nanosleep` of x86-64.
pub(super) const SLEEP_SYSCALLS: &[i64] = &[35, 230];

/// Parts of functions in which a thread waits for a lock or a condition.
pub(super) const LOCK_NATIVE: &[&str] = &[
    "futex",
    "lll_lock_wait",
    "pthread_mutex_lock",
    "pthread_rwlock",
    "pthread_cond_wait",
    "pthread_cond_timedwait",
    "pthread_cond_clockwait",
    "sem_wait",
    "sem_timedwait",
    "sem_clockwait",
    "PyThread_acquire_lock",
    "pthread_join",
    "pthread_clockjoin",
];
/// `futex` of x86-64.
pub(super) const FUTEX_SYSCALL: i64 = 202;

/// Beginnings and parts of the paths of frames that are not the user's own.
pub(super) const LIBRARY_PATHS: &[&str] = &[
    "site-packages/",
    "dist-packages/",
    "/lib/python2",
    "/lib/python3",
    "/lib64/python3",
    "/torch/",
    "importlib",
    "<frozen",
    "<string>",
];
/// Parts of the paths of packages, which are libraries and not the standard one.
pub(super) const PACKAGE_PATHS: &[&str] = &["site-packages/", "dist-packages/"];
/// Files of the standard library that stand around a script: what starts it, or starts its thread.
pub(super) const STARTERS: &[&str] =
    &["runpy.py", "threading.py", "importlib", "<frozen", "<string>", "multiprocessing/"];
