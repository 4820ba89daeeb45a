//! The function names, paths, system calls and kernel functions that identify an activity. Tables
//! only; `classify.rs` and its siblings match them.

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
/// Functions in which torch connects to the store of a job. The constructor of the store also waits
/// for the other ranks, in functions with other names.
pub(super) const STORE_CONNECT_NATIVE: &[&str] =
    &["c10d::TCPStore::TCPStore", "c10d::detail::Socket::connect", "SocketConnectOp", "TCPClient::connect"];
/// Functions of the C library in which a thread waits for that connection, or before a retry.
pub(super) const CONNECT_NATIVE: &[&str] = &["connect", "poll", "nanosleep", "clock_nanosleep"];
/// Python functions that create a communicator, inside `torch/distributed`.
pub(super) const CREATION_PYTHON: &[&str] =
    &["init_process_group", "rendezvous", "_create_c10d_store", "new_group", "_new_process_group_helper"];
/// These functions, and one that they call.
pub(super) const INIT_PYTHON: &[&str] = &[
    "init_process_group",
    "_store_based_barrier",
    "rendezvous",
    "_create_c10d_store",
    "new_group",
    "_new_process_group_helper",
];

/// The function in which an interpreter waits for the GIL, and the public functions that take the
/// GIL.
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

/// Starts of the names of libraries whose threads serve a device, a communicator or the hook.
pub(super) const RUNTIME_LIBRARIES: &[&str] = &[
    "libcuda.so",
    "libcudart",
    "libnccl",
    "librccl",
    "libmccl",
    "libhccl",
    "libhsa-runtime",
    "libamdhip64",
    "libgloo",
    "libtorch",
    "libc10",
    "libmpi",
    "libopen-pal",
    "libopen-rte",
    "libpmix",
    "libprrte",
    "libucp",
    "libuct",
    "libxpu_timer_hook",
];
/// Parts of internal functions of the C library, and the functions that programs call.
pub(super) const INTERNAL_NATIVE: &[(&str, &str)] = &[
    ("sem_wait", "sem_wait"),
    ("futex_abstimed_wait", "futex_wait"),
    ("futex_lock_pi", "pthread_mutex_lock"),
    ("lll_lock_wait", "pthread_mutex_lock"),
    ("pthread_cond_wait_common", "pthread_cond_wait"),
    ("pthread_clockjoin", "pthread_join"),
    ("pthread_timedjoin", "pthread_join"),
    ("pthread_rwlock_rdlock", "pthread_rwlock_rdlock"),
    ("pthread_rwlock_wrlock", "pthread_rwlock_wrlock"),
];

/// Functions of the C library that exist a second time with the suffix `64`, for large files.
pub(super) const LARGE_FILE_NATIVE: &[&str] =
    &["open", "openat", "creat", "fcntl", "pread", "pwrite", "lseek", "fallocate", "sendfile", "copy_file_range"];
/// The start of the C functions of a lock of Python's multiprocessing, and the name of the method.
pub(super) const SHARED_LOCK_NATIVE: &str = "_multiprocessing_SemLock_acquire";
pub(super) const SHARED_LOCK: &str = "SemLock.acquire";
/// The method of such a lock in a `with` statement, which only one process at a time enters.
pub(super) const EXCLUSIVE_LOCK: &str = "SemLock.__enter__";
/// The start of the function of libffi that calls a C function for Python.
pub(super) const FOREIGN_CALL_NATIVE: &str = "ffi_call";
/// The starts of the names of files that contain Python's interpreter.
pub(super) const INTERPRETER_FILES: &[&str] = &["python3", "libpython3"];

/// Parts of the paths of the C library and its companions.
pub(super) const C_LIBRARY: &[&str] =
    &["/libc.so", "/libc-2", "/libpthread", "/ld-linux", "/librt", "/ld-musl", "[vdso]"];
/// Parts of the paths of system sources: headers, and where distributions and Rust build their
/// libraries.
pub(super) const SYSTEM_SOURCES: &[&str] =
    &["/usr/include/", "/usr/lib/", "/rustc/", "./nptl/", "./misc/", "/sysdeps/"];
/// Parts of functions that belong to the runtime of a language, or to CUDA's runtime, and not to a
/// program.
pub(super) const RUNTIME_INSIDES: &[&str] =
    &["std::", "core::", "__gthread", "parking_lot", "libcudart_static_", "__device_stub__", "__cuda"];

/// Native functions that end communicators or the process.
pub(super) const TEARDOWN_NATIVE: &[&str] = &[
    "CommDestroy",
    "CommAbort",
    "CommFinalize",
    "Py_FinalizeEx",
    "__run_exit_handlers",
    "__cxa_finalize",
    "wait_for_thread_shutdown",
];
/// Python functions that end communicators or the process.
pub(super) const TEARDOWN_PYTHON: &[&str] = &["destroy_process_group", "_python_exit", "_exit_function"];

/// Parts of native functions, in lower case, that wait for the device or belong to a collective.
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
    // Freeing memory waits until the device has completed all work.
    "cumemfree",
    "cudafree",
    "hipfree",
    "graphlaunch",
    "worknccl",
    "gloo::",
    "c10d::processgroup",
    "c10d::reducer",
    "c10d::work",
    // Collectives of vLLM and SGLang in shared memory, on a CPU.
    "shm_cc_ops::",
    "shm_allreduce",
    "shm_allgather",
    "shm_gather",
];
/// Prefixes of the functions of NCCL and of libraries like it, in lower case, and parts of the
/// paths of these libraries, whose own functions often have no names.
pub(super) const NCCL_PREFIXES: &[&str] = &["nccl", "pnccl", "mccl", "pmccl"];
pub(super) const NCCL_LIBRARIES: &[&str] = &["/libnccl.so", "/librccl.so", "/libmccl.so"];
/// Prefixes of the C functions of collective libraries.
pub(super) const COLLECTIVE_PREFIXES: &[&str] = &["nccl", "pnccl", "mccl", "pmccl", "hccl", "cncl", "mpi_", "pmpi_"];
/// Python functions that wait for the device or in a collective. They count only inside `torch/` or
/// a module called `cuda`.
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

/// Parts of the paths of Python frames that compile.
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
/// Functions in those files that also run a compiled graph and therefore prove nothing.
pub(super) const COMPILE_NOT: &[&str] = &["runner", "call", "run", "__call__"];
/// Native functions of compilers inside the process, with that of Python itself.
pub(super) const COMPILE_NATIVE: &[&str] = &[
    "nvrtcCompileProgram",
    "nvPTXCompilerCompile",
    "llvm::",
    "mlir::",
    "builtin_compile",
    "Py_CompileString",
    "PyParser_AST",
    "PyPegen_run_parser",
    "PyAST_Compile",
];
/// Names of compiler programs.
pub(super) const COMPILERS: &[&str] = &[
    "nvcc", "cicc", "ptxas", "cc1plus", "cc1", "ninja", "g++", "gcc", "c++", "cc", "clang", "clang++", "ld", "hipcc",
    "mxcc",
];
/// Part of the command line of the processes in which torch.compile compiles.
pub(super) const COMPILE_WORKER: &str = "torch/_inductor/compile_worker";
/// Programs whose first argument is the program that they run.
pub(super) const INTERPRETERS: &[&str] =
    &["sh", "bash", "dash", "env", "python", "python3", "perl", "ccache", "sccache"];

/// Names of programs that serve a rank and do none of its work.
pub(super) const SERVICE_PROGRAMS: &[&str] = &[
    "gcs_server",
    "gpu_stats",
    "ncu",
    "nsys",
    "nvidia-smi",
    "py-spy",
    "raylet",
    "rocm-smi",
    "rocprofv3",
    "tensorboard",
    "tensorboard.main",
    "torchft_lighthouse",
    "wandb-core",
    "wandb-symon",
];
/// Modules whose `main` an interpreter runs to serve other processes.
pub(super) const SERVICE_MODULES: &[&str] = &["resource_tracker", "semaphore_tracker", "forkserver"];
/// Parts of the paths of the Python files of such programs and threads.
pub(super) const SERVICE_FILES: &[&str] = &[
    "/torch/_inductor/compile_worker/",
    "/torch/distributed/elastic/",
    "/ray/_private/",
    "/ray/autoscaler/",
    "/ray/dashboard/",
    "-packages/tensorboard/",
    "-packages/wandb/",
];
/// Files in which a worker process begins its work.
pub(super) const WORKER_STARTERS: &[&str] = &["/multiprocessing/process.py", "/concurrent/futures/process.py"];
/// Files with the loop in which a worker of a pool takes tasks, and its function; and the files in
/// which it waits for the next task.
pub(super) const TASK_LOOPS: &[(&str, &str)] = &[
    ("/concurrent/futures/process.py", "_process_worker"),
    ("/loky/process_executor.py", "_process_worker"),
    ("/multiprocessing/pool.py", "worker"),
    ("/torch/utils/data/_utils/worker.py", "_worker_loop"),
];
pub(super) const TASK_WAITS: &[&str] = &[
    "/loky/backend/queues.py",
    "/loky/backend/synchronize.py",
    "/multiprocessing/connection.py",
    "/multiprocessing/queues.py",
    "/multiprocessing/synchronize.py",
    "/selectors.py",
];
/// Beginnings of the functions of libraries that read data on threads of their own.
pub(super) const READERS: &[&str] = &["arrow::", "parquet::", "Aws::", "google::cloud::"];
/// Parts of such functions in which a thread waits for work.
pub(super) const IDLE_WORKERS: &[&str] = &["ThreadPool", "WorkerLoop", "PooledThreadExecutor"];

/// Beginning of the names of ZeroMQ's threads.
pub(super) const MESSAGE_THREADS: &str = "ZMQbg/";
/// Beginnings of the names of the files that contain ZeroMQ.
pub(super) const MESSAGE_LIBRARIES: &[&str] = &["libzmq", "_zmq."];

/// Functions of a data loader, in any file.
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
/// Parts of the file names of data loaders, in lower case.
pub(super) const LOADER_FILES: &[&str] = &["dataloader", "data_loader", "/utils/data/"];
/// Prefixes of words in a function name that mark a queue as the queue of a loader.
pub(super) const LOADER_HINTS: &[&str] =
    &["next", "load", "data", "batch", "fetch", "sample", "shard", "prefetch", "read"];
/// Part of the paths of queues between processes, and the file of their queue class.
pub(super) const OF_PROCESSES: &str = "/multiprocessing/";
pub(super) const QUEUE_OF_PROCESSES: &str = "/multiprocessing/queues.py";
/// Files of the standard library whose [`QUEUE_FUNCTIONS`] wait for another thread or process.
pub(super) const QUEUE_FILES: &[&str] = &["/queue.py", "/multiprocessing/queues.py", "/multiprocessing/connection.py"];
/// The function in those files that waits for room.
pub(super) const QUEUE_PUT: &str = "put";
/// The file of the standard library that calls methods of objects in a manager process.
pub(super) const MANAGER_FILE: &str = "/multiprocessing/managers.py";
/// Functions in those files.
pub(super) const QUEUE_FUNCTIONS: &[&str] =
    &["get", "recv", "recv_bytes", "_recv", "_recv_bytes", "poll", "_poll", "wait"];

/// Files of libraries in which a thread waits for the work of child processes: pools and futures,
/// of the standard library and of others.
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

/// Files of the standard library in which a thread waits for the result of a task that it gave to a
/// pool or an executor, and the functions that wait.
pub(super) const RESULT_FILES: &[&str] = &["/concurrent/futures/_base.py", "/multiprocessing/pool.py"];
pub(super) const RESULT_FUNCTIONS: &[&str] = &["result", "exception", "wait", "as_completed", "get", "next"];

/// Parts of the paths of the files that serve a request, or run a task of a pool, below the code of
/// the program.
pub(super) const REQUEST_FILES: &[&str] = &[
    "/socketserver.py:",
    "/concurrent/futures/thread.py:",
    "/concurrent/futures/process.py:",
    "/multiprocessing/pool.py:",
    "/multiprocessing/managers.py:",
    "/anyio/_backends/",
    "/grpc/_server.py:",
];

/// System calls of x86-64 that move bytes of a socket: read, write, sendto, recvfrom, sendmsg,
/// recvmsg.
pub(super) const SOCKET_SYSCALLS: &[i64] = &[0, 1, 44, 45, 46, 47];

/// System calls of x86-64 that move bytes of a file, or wait until they are on disk.
pub(super) const IO_SYSCALLS: &[i64] = &[
    0, 1, 2, 4, 5, 6, 8, 17, 18, 19, 20, 26, 40, 72, 73, 74, 75, 76, 77, 82, 83, 84, 87, 162, 187, 217, 257, 277, 285,
    295, 296, 306, 326, 328,
];
/// The C library functions of these system calls.
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
/// Functions of the interpreter in which `input()` reads from something other than a terminal. The
/// thread waits for a person or another program.
pub(super) const INPUT_NATIVE: &[&str] = &["PyFile_GetLine"];
/// Prefixes of functions, of the C library and of the kernel, that read events and not data.
pub(super) const EVENT_READS: &[&str] = &["eventfd_", "inotify_read", "signalfd_", "timerfd_"];
/// Functions that wait for a lock on a file.
pub(super) const FILE_LOCKS: &[&str] = &["flock", "lockf", "fcntl", "fcntl64"];
/// Prefixes of words, or of several words joined by `_`, in the names of kernel functions that wait
/// for a file, a pipe or a disk.
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

/// The file of Python's multiprocessing with the locks, conditions and barriers that processes
/// share, and part of the path of its native module.
pub(super) const SHARED_LOCK_FILE: &str = "/multiprocessing/synchronize.py";
pub(super) const SHARED_LOCK_MODULE: &str = "/_multiprocessing.";
/// Files in which a Python program waits for a child process, and the functions that wait.
pub(super) const CHILD_FILES: &[&str] = &["/subprocess.py", "/multiprocessing/popen_fork.py"];
pub(super) const CHILD_FUNCTIONS: &[&str] = &["communicate", "_communicate", "wait", "_wait", "run", "poll"];

/// Functions of the C library that wait for a signal, and their system calls of x86-64.
pub(super) const SIGNAL_NATIVE: &[&str] =
    &["pause", "sigsuspend", "sigwait", "sigwaitinfo", "sigtimedwait", "sigtimedwait64"];
pub(super) const SIGNAL_SYSCALLS: &[i64] = &[34, 128, 130];
/// Functions in which a main thread waits for the end of another thread: of the C library and the
/// interpreter, then of Python's `threading`.
pub(super) const JOIN_NATIVE: &[&str] =
    &["pthread_join", "pthread_clockjoin", "pthread_timedjoin", "wait_for_thread_shutdown"];
pub(super) const JOIN_PYTHON: &[&str] = &["join", "_wait_for_tstate_lock", "_shutdown"];
pub(super) const THREADING_FILE: &str = "/threading.py";

/// Functions of the C library that wait for data from a socket.
pub(super) const NETWORK_NATIVE: &[&str] =
    &["recv", "recvfrom", "recvmsg", "connect", "accept", "accept4", "poll", "ppoll", "select", "epoll_wait"];

/// Functions of the C library that wait for an event, a message or a semaphore that processes
/// share.
pub(super) const MESSAGE_NATIVE: &[&str] = &[
    "eventfd_read",
    "eventfd_write",
    "mq_receive",
    "mq_send",
    "mq_timedreceive",
    "mq_timedsend",
    "msgrcv",
    "msgsnd",
    "semop",
    "semtimedop",
];

/// Functions of the C library that hand bytes to another process, and wait until it takes them.
pub(super) const SEND_NATIVE: &[&str] = &[
    "write", "writev", "pwrite", "pwrite64", "pwritev", "send", "sendto", "sendmsg", "sendmmsg", "sendfile", "splice",
];

/// Functions of the C library that wait for the end of a child process, and their system calls of
/// x86-64.
pub(super) const CHILD_NATIVE: &[&str] = &["wait", "wait3", "wait4", "waitpid", "waitid"];
pub(super) const CHILD_SYSCALLS: &[i64] = &[61, 247];

/// Kernel functions of processes in a frozen control group, for the freezers of versions 1 and 2.
/// Newer kernels inline the freezer of version 2 into `get_signal`. Otherwise only a stopped
/// process is in `get_signal`, and its state shows that.
pub const FREEZER_WCHAN: &[&str] = &["__refrigerator", "do_freezer_trap", "get_signal"];

/// Prefixes of kernel functions in which a thread sleeps and a signal wakes it. A thread in state
/// `D` in one of them is frozen: kernels since 6.1 show the freezer of version 1 like this.
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

/// The function of the C library that lets other threads run. A thread that calls it again and
/// again polls.
pub(super) const YIELD_NATIVE: &str = "sched_yield";
/// Files of libraries with a ring in shared memory (the message queues of vLLM and SGLang), and the
/// functions that poll it.
pub(super) const RING_FILES: &[&str] = &["/shm_broadcast.py"];
pub(super) const RING_FUNCTIONS: &[&str] = &["acquire_read", "acquire_write"];

/// The name of the code that the kernel makes a signal handler return to.
pub(super) const SIGNAL_FRAME: &str = "<signal handler called>";

/// Beginnings of the names of native functions that raise a signal or a C++ exception.
pub(super) const RAISING_NATIVE: &[&str] = &[
    "raise",
    "__GI_raise",
    "gsignal",
    "__GI_gsignal",
    "abort",
    "__GI_abort",
    "pthread_kill",
    "__pthread_kill",
    "kill",
    "__kill",
    "__assert_fail",
    "__GI___assert_fail",
    "__assert_perror_fail",
    "__libc_message",
    "std::terminate",
    "__cxxabiv1::",
    "__gnu_cxx::__verbose_terminate_handler",
    "__cxa_",
    "_Unwind_",
    "__gxx_personality",
];

/// Prefixes and parts of the paths of frames that are not the user's own.
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
/// Parts of the paths of packages: libraries outside the standard library.
pub(super) const PACKAGE_PATHS: &[&str] = &["site-packages/", "dist-packages/"];
/// Files of the standard library that start a script or a thread.
pub(super) const STARTERS: &[&str] =
    &["runpy.py", "threading.py", "importlib", "<frozen", "<string>", "multiprocessing/"];

/// Parts of the paths of the files of asyncio whose functions wait for another task.
pub(super) const TASK_LOCK_FILE: &str = "/asyncio/locks.py";
pub(super) const TASK_QUEUE_FILE: &str = "/asyncio/queues.py";
pub(super) const TASK_SERVER_FILE: &str = "/asyncio/base_events.py";
/// Functions of the C library in which an event loop waits.
pub(super) const POLL_NATIVE: &[&str] =
    &["poll", "ppoll", "select", "pselect", "epoll_wait", "epoll_pwait", "epoll_pwait2"];
