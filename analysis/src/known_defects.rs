//! Known defects of NCCL, PyTorch, CPython, the C library and the driver: the affected versions,
//! the signature that sets such a hang apart from others, and where the fix is published.
//!
//! A defect is a remark on a verdict. It changes neither the cause nor the culprits. The signature
//! of a defect is what threads do on their stacks in both samples, what the records show
//! ([`Also`]), or both. `report.rs` compares the versions and evaluates what the records show.

use xpu_timer_proto::server::{ChildProcess, Library, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace};

use crate::stacks::{self, Sample, samples};

/// A published defect that hangs a process or a job.
pub(crate) struct Defect {
    pub name: &'static str,
    /// The library, by the name that the capture gives it.
    pub library: &'static str,
    /// The affected versions: from the first to before the second. An empty text means no limit.
    pub affected: &'static [(&'static str, &'static str)],
    /// The process on whose stacks the signature is.
    process: Process,
    /// The signs in different threads of one process. Empty if only the records show the defect.
    threads: &'static [ThreadSign],
    /// A further condition.
    pub also: Also,
    /// The defect and its effect, for the verdict.
    pub text: &'static str,
    /// The release with the fix, or what to do.
    pub fix: &'static str,
    pub url: &'static str,
}

/// The process on whose stacks a signature is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Process {
    Rank,
    /// A child process of a rank.
    Child,
    /// A process with one thread: a child process of a rank, or a forked one with the number of the
    /// rank.
    WithOneThread,
}

/// A condition on the records and the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Also {
    /// The stacks say enough.
    Nothing,
    /// No rank compiles, and none has a compiler as a child process.
    NoRankCompiles,
    /// The call of a collective of the rank has not returned, and nothing else is pending.
    CallHasNotReturned,
    /// All ranks have entered the first collective of a communicator whose ranks are on one node,
    /// with equal arguments, and it does not complete.
    FirstCollectiveStalls,
    /// All ranks have entered a reduction of bfloat16 with equal arguments, and it does not
    /// complete.
    Bfloat16Stalls,
    /// The sends and receives of a group have different sizes and match those of their peers, and
    /// none completes.
    UnequalTransfersStall,
}

/// The signature of one thread. Other frames may be between its frames.
struct ThreadSign {
    /// Native functions, the innermost first, each with its alternatives. A name that begins with
    /// `*` may be any part of a function.
    native: &'static [&'static [&'static str]],
    /// Python functions without their class, the innermost first, with the end of the path of their
    /// file.
    python: &'static [(&'static str, &'static str)],
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Any,
    /// The first Python function of the signature is the innermost of the thread.
    AtInnermost,
    HoldsGil,
    WaitsForGil,
}

const POOL: &str = "concurrent/futures/process.py";
const QUEUES: &str = "multiprocessing/queues.py";
const CONNECTION: &str = "multiprocessing/connection.py";
const TRACKER: &str = "multiprocessing/resource_tracker.py";
const LAUNCH: &[&str] =
    &["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"];
const LOCK_WAIT: &[&str] = &["*lll_lock_wait", "*pthread_mutex_lock", "futex_wait", "__futex_lock_pi64"];

const fn native(native: &'static [&'static [&'static str]]) -> ThreadSign {
    ThreadSign { native, python: &[], state: State::Any }
}

const fn python(python: &'static [(&'static str, &'static str)]) -> ThreadSign {
    ThreadSign { native: &[], python, state: State::Any }
}

const fn with_state(sign: ThreadSign, state: State) -> ThreadSign {
    ThreadSign { native: sign.native, python: sign.python, state }
}

/// The known defects. Each was read at its address. The limits of the versions are those that the
/// address or the release notes of the project state.
pub(crate) const DEFECTS: &[Defect] = &[
    Defect {
        name: "nccl_abort_2_25",
        library: "NCCL",
        affected: &[("2.25.1", "2.26.2")],
        process: Process::Rank,
        threads: &[
            native(&[&["ProcessGroupNCCL::waitForFutureOrTimeout"], &["ProcessGroupNCCL::abort"]]),
            native(&[&["ncclCommAbort"]]),
        ],
        also: Also::Nothing,
        text: "ncclCommAbort does not return while PyTorch aborts a process group",
        fix: "fixed in NCCL 2.26.2",
        url: "https://github.com/pytorch/pytorch/issues/149153",
    },
    Defect {
        name: "nccl_abort_proxy",
        library: "NCCL",
        affected: &[("2.16.5", "2.19.1")],
        process: Process::Rank,
        threads: &[
            native(&[
                &["*pthread_join", "*pthread_clockjoin", "*pthread_timedjoin"],
                &["commFree", "commReclaim"],
                &["ncclCommAbort"],
            ]),
            native(&[&["ncclProxyService"]]),
        ],
        also: Also::Nothing,
        text: "ncclCommAbort waits for the end of a proxy thread that does not end",
        fix: "fixed in NCCL 2.19.1",
        url: "https://github.com/NVIDIA/nccl/issues/992",
    },
    Defect {
        name: "nccl_stray_connection",
        library: "NCCL",
        affected: &[("2.27", "2.30")],
        process: Process::Rank,
        threads: &[native(&[&["ncclSocketAccept"], &["ncclProxyService"]])],
        also: Also::Nothing,
        text: "the proxy service of NCCL waits in accept after another program, such as a port scanner, has connected",
        fix: "fixed in NCCL 2.30 update 1",
        url: "https://github.com/NVIDIA/nccl/pull/1834",
    },
    Defect {
        name: "nccl_launch_blocking",
        library: "NCCL",
        affected: &[("2.13", "2.16.5")],
        process: Process::Rank,
        threads: &[
            native(&[LAUNCH, &["ncclLaunchKernel"]]),
            native(&[&["*pthread_cond_wait"], &["ncclProxyGetPostedOps", "ncclProxyProgress"]]),
        ],
        also: Also::CallHasNotReturned,
        text: "with CUDA_LAUNCH_BLOCKING=1 the launch of a collective waits for data that the proxy thread sends \
               only after the launch",
        fix: "unset CUDA_LAUNCH_BLOCKING, or use an NCCL with the fix that its pull request 774 describes",
        url: "https://github.com/NVIDIA/nccl/issues/750",
    },
    Defect {
        name: "nccl_alltoallv_2_8",
        library: "NCCL",
        affected: &[("2.7", "2.8.4")],
        process: Process::Rank,
        threads: &[],
        also: Also::UnequalTransfersStall,
        text: "a group of sends and receives of unequal sizes (alltoallv) hangs",
        fix: "fixed in NCCL 2.8.4",
        url: "https://docs.nvidia.com/deeplearning/nccl/release-notes/rel_2-8-4.html",
    },
    Defect {
        name: "nccl_alltoallv_2_18",
        library: "NCCL",
        affected: &[("2.8.4", "2.18.1")],
        process: Process::Rank,
        threads: &[],
        also: Also::UnequalTransfersStall,
        text: "a group of sends and receives in an irregular pattern (alltoallv) hangs",
        fix: "fixed in NCCL 2.18.1",
        url: "https://docs.nvidia.com/deeplearning/nccl/release-notes/rel_2-18-1.html",
    },
    Defect {
        name: "nccl_bfloat16_sharp",
        library: "NCCL",
        affected: &[("2.18.1", "2.18.2")],
        process: Process::Rank,
        threads: &[native(&[&["*sharp_coll"]])],
        also: Also::Bfloat16Stalls,
        text: "a reduction of bfloat16 over InfiniBand SHARP hangs on nodes with fewer NICs than GPUs",
        fix: "use a later NCCL, or turn SHARP off (NCCL_COLLNET_ENABLE=0)",
        url: "https://docs.nvidia.com/deeplearning/nccl/release-notes/rel_2-18-1.html",
    },
    Defect {
        name: "driver_p2p_560",
        library: "NVIDIA driver",
        affected: &[("560", "570")],
        process: Process::Rank,
        threads: &[],
        also: Also::FirstCollectiveStalls,
        text: "the first collective between the GPUs of a node hangs when they use P2P",
        fix: "fixed in driver 570; until then NCCL_P2P_DISABLE=1",
        url: "https://github.com/dmlc/xgboost/issues/11242",
    },
    Defect {
        name: "torch_stale_build_lock",
        library: "PyTorch",
        affected: &[("", "2.15")],
        process: Process::Rank,
        threads: &[python(&[("wait", "torch/utils/file_baton.py")])],
        also: Also::NoRankCompiles,
        text: "the build of a C++ extension waits for the lock file of a build that was killed",
        fix: "delete the file `lock` in the folder of the extension; PyTorch 2.15 uses a lock that ends with its \
              process",
        url: "https://github.com/pytorch/pytorch/pull/190543",
    },
    Defect {
        name: "torch_gloo_destructor",
        library: "PyTorch",
        affected: &[("", "2.8")],
        process: Process::Rank,
        threads: &[
            with_state(native(&[&["ProcessGroupGloo::~ProcessGroupGloo"]]), State::HoldsGil),
            with_state(native(&[]), State::WaitsForGil),
        ],
        also: Also::Nothing,
        text: "the destructor of a gloo process group holds the GIL while it waits for the work of the group",
        fix: "fixed in PyTorch 2.8",
        url: "https://github.com/pytorch/pytorch/pull/154976",
    },
    Defect {
        name: "torch_store_gil",
        library: "PyTorch",
        affected: &[("", "2.1")],
        process: Process::Rank,
        threads: &[
            with_state(native(&[&["TCPStore::TCPStore"]]), State::HoldsGil),
            with_state(native(&[]), State::WaitsForGil),
        ],
        also: Also::Nothing,
        text: "the constructor of TCPStore holds the GIL while it waits for the other ranks",
        fix: "fixed in PyTorch 2.1",
        url: "https://github.com/pytorch/pytorch/pull/100555",
    },
    Defect {
        name: "torch_execution_trace",
        library: "PyTorch",
        affected: &[("2.0", "2.6")],
        process: Process::Rank,
        threads: &[
            with_state(native(&[&["*recordOperatorStart", "*onFunctionExit"]]), State::WaitsForGil),
            with_state(native(&[LOCK_WAIT, &["*recordOperatorStart", "*onFunctionExit"]]), State::HoldsGil),
        ],
        also: Also::Nothing,
        text: "the execution trace observer takes its lock and the GIL in both orders",
        fix: "fixed in PyTorch 2.6; until then turn the execution trace off",
        url: "https://github.com/pytorch/pytorch/pull/136892",
    },
    Defect {
        name: "python_pool_broken",
        library: "CPython",
        affected: &[("3.9", "3.11.5")],
        process: Process::Rank,
        threads: &[python(&[("_send", CONNECTION), ("_feed", QUEUES)]), python(&[("join_executor_internals", POOL)])],
        also: Also::Nothing,
        text: "ProcessPoolExecutor hangs after one of its processes has died while a task was sent to it",
        fix: "fixed in CPython 3.11.5 and 3.12",
        url: "https://github.com/python/cpython/issues/94777",
    },
    Defect {
        name: "python_pool_submit",
        library: "CPython",
        affected: &[("3.9", "3.11.6"), ("3.12", "3.12.1")],
        process: Process::Rank,
        threads: &[
            python(&[("_send", CONNECTION), ("wakeup", POOL), ("submit", POOL)]),
            with_state(python(&[("wait_result_broken_or_wakeup", POOL)]), State::AtInnermost),
        ],
        also: Also::Nothing,
        text: "ProcessPoolExecutor.submit fills a pipe while it holds the lock that the reader of the pipe waits for",
        fix: "fixed in CPython 3.11.6 and 3.12.1; until then submit fewer tasks at once",
        url: "https://github.com/python/cpython/issues/105829",
    },
    Defect {
        name: "python_pool_shutdown",
        library: "CPython",
        affected: &[("3.12", "3.12.8"), ("3.13", "3.13.1")],
        process: Process::Rank,
        threads: &[
            with_state(python(&[("_on_queue_feeder_error", POOL)]), State::AtInnermost),
            python(&[("join_thread", QUEUES)]),
        ],
        also: Also::Nothing,
        text: "ProcessPoolExecutor waits at shutdown for a thread that waits for its lock after an error in a task",
        fix: "fixed in CPython 3.12.8 and 3.13.1",
        url: "https://github.com/python/cpython/pull/125492",
    },
    Defect {
        name: "python_tracker_reentry",
        library: "CPython",
        affected: &[("", "3.11.6"), ("3.12", "3.12.1")],
        process: Process::Rank,
        threads: &[python(&[("ensure_running", TRACKER), ("ensure_running", TRACKER)])],
        also: Also::Nothing,
        text: "the resource tracker of multiprocessing locks itself out when the garbage collector runs inside it",
        fix: "fixed in CPython 3.11.6 and 3.12.1",
        url: "https://github.com/python/cpython/issues/109593",
    },
    Defect {
        name: "python_tracker_exit",
        library: "CPython",
        affected: &[("3.12.10", "3.13"), ("3.13.3", "3.13.12"), ("3.14", "3.14.5")],
        process: Process::Rank,
        threads: &[ThreadSign {
            native: &[&["*waitpid", "*wait4"]],
            python: &[("_stop_locked", TRACKER), ("__del__", TRACKER)],
            state: State::AtInnermost,
        }],
        also: Also::Nothing,
        text: "the exit of the process waits for its resource tracker, which waits for a child made by os.fork",
        fix: "fixed in CPython 3.14.5",
        url: "https://github.com/python/cpython/issues/146313",
    },
    Defect {
        name: "glibc_exit_handlers",
        library: "glibc",
        affected: &[("", "")],
        process: Process::Child,
        threads: &[native(&[&["*lll_lock_wait"], &["__cxa_atexit", "__internal_atexit", "__cxa_at_quick_exit"]])],
        also: Also::Nothing,
        text: "a forked worker waits for the lock of the exit handlers, which another thread held during the fork",
        fix: "start threads after the workers, or start the workers by forkserver or spawn",
        url: "https://github.com/ultralytics/ultralytics/pull/26085",
    },
    Defect {
        name: "gomp_after_fork",
        library: "GNU OpenMP",
        affected: &[("", "")],
        process: Process::WithOneThread,
        threads: &[native(&[
            &["*gomp_barrier_wait", "*gomp_team_barrier_wait", "gomp_team_start", "gomp_simple_barrier_wait"],
            &["*GOMP_parallel", "gomp_team_start"],
        ])],
        also: Also::Nothing,
        text: "a forked worker waits in a parallel region for OpenMP threads that only its parent has",
        fix: "start the workers by forkserver or spawn, or set OMP_NUM_THREADS=1",
        url: "https://github.com/OpenMathLib/OpenBLAS/pull/343",
    },
];

impl Defect {
    /// Whether the stacks alone distinguish the defect from other hangs.
    pub(crate) fn is_specific(&self) -> bool {
        !self.threads.is_empty()
    }

    /// Whether a version is affected.
    pub(crate) fn affects(&self, version: &str) -> bool {
        let version = numbers(version);
        self.affected
            .iter()
            .any(|(from, before)| version >= numbers(from) && (before.is_empty() || version < numbers(before)))
    }

    /// The remark on a verdict. `version` is the affected version that is loaded, if known.
    pub(crate) fn sentence(&self, version: Option<&str>) -> String {
        let Defect { library, text, fix, .. } = self;
        let versions = self.versions();
        match version {
            Some(version) => {
                format!("This looks like a known defect of {library} {versions} ({version} is loaded): {text}; {fix}.")
            }
            None => format!(
                "This may be a known defect of {library} {versions} (the loaded version is unknown): {text}; {fix}."
            ),
        }
    }

    /// The affected versions: `2.16.5 to before 2.19.1`.
    pub(crate) fn versions(&self) -> String {
        let range = |(from, before): &(&str, &str)| match (*from, *before) {
            ("", "") => "every version".to_owned(),
            ("", before) => format!("before {before}"),
            (from, "") => format!("from {from}"),
            (from, before) => format!("{from} to before {before}"),
        };
        self.affected.iter().map(range).collect::<Vec<_>>().join(" and ")
    }
}

/// The numbers of a version, for comparison.
fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// The libraries of a rank, from its samples and those of its child processes.
pub(crate) fn libraries(dump: &Stacktrace) -> Vec<Library> {
    let own = [&dump.last_sample, &dump.first_sample].into_iter().flatten();
    let mut found: Vec<Library> = Vec::new();
    for library in own.chain(dump.children.iter().flat_map(|child| &child.samples)).flat_map(|sample| &sample.libraries)
    {
        match found.iter_mut().find(|known| known.name == library.name) {
            Some(known) if known.version.is_empty() => known.version.clone_from(&library.version),
            Some(_) => {}
            None => found.push(library.clone()),
        }
    }
    found
}

/// The names of the defects whose signature is on the stacks of a rank, whatever the versions.
pub(crate) fn signs(dump: &Stacktrace) -> Vec<String> {
    let (first, last) = samples(dump);
    let has = |defect: &&Defect| match defect.process {
        Process::Rank => matches(defect, first, last),
        Process::Child => dump.children.iter().any(|child| in_child(defect, child)),
        Process::WithOneThread => {
            (last.native.len() == 1 && matches(defect, first, last))
                || dump.children.iter().any(|child| in_child(defect, child))
        }
    };
    let specific = DEFECTS.iter().filter(|defect| defect.is_specific());
    specific.filter(has).map(|defect| defect.name.to_owned()).collect()
}

fn in_child(defect: &Defect, child: &ChildProcess) -> bool {
    let samples = child.samples.iter().map(stacks::sample_of);
    let samples: Vec<Sample<'_>> = samples.filter(|sample| sample.has_stacks()).collect();
    let Some(last) = samples.last() else { return false };
    let first = (samples.len() > 1).then(|| samples[0]);
    matches(defect, first, *last) && (defect.process == Process::Child || last.native.len() == 1)
}

/// Whether different threads have the signs of a defect, each in all samples with stacks.
fn matches(defect: &Defect, first: Option<Sample<'_>>, last: Sample<'_>) -> bool {
    let first = first.filter(|first| first.has_stacks());
    let threads = |sign: &ThreadSign| -> Vec<u32> {
        let of = |sample: Sample<'_>| -> Vec<u32> {
            threads_of(sample).filter(|tid| has_sign(sample, *tid, sign)).collect()
        };
        let before = first.map(of);
        of(last).into_iter().filter(|tid| before.as_ref().is_none_or(|before| before.contains(tid))).collect()
    };
    let found: Vec<Vec<u32>> = defect.threads.iter().map(threads).collect();
    match &found[..] {
        [one] => !one.is_empty(),
        [one, other] => one.iter().any(|one| other.iter().any(|other| one != other)),
        _ => false,
    }
}

/// The ids of the threads of a sample. Without native stacks, those of Python.
fn threads_of(sample: Sample<'_>) -> impl Iterator<Item = u32> {
    let python = sample.python.iter().map(|thread| thread.os_thread_id);
    let native = sample.native.iter().map(|thread| thread.pid);
    let is_new = move |tid: &u32| !sample.native.iter().any(|thread| thread.pid == *tid);
    native.chain(python.filter(is_new))
}

fn has_sign(sample: Sample<'_>, tid: u32, sign: &ThreadSign) -> bool {
    let native = sample.native_of(tid);
    let python = sample.python_of(tid);
    let in_state = match sign.state {
        State::Any => true,
        State::AtInnermost => python.is_some_and(|thread| {
            let innermost = thread.frames.first();
            innermost.is_some_and(|frame| sign.python.first().is_some_and(|wanted| is_python(frame, wanted)))
        }),
        State::HoldsGil => python.is_some_and(|thread| thread.owns_gil),
        State::WaitsForGil => native.is_some_and(stacks::is_in_gil_wait),
    };
    in_state && has_native(native, sign.native) && has_python(python, sign.python)
}

fn has_native(thread: Option<&PstackStacktrace>, wanted: &[&[&str]]) -> bool {
    let mut frames = thread.into_iter().flat_map(|thread| &thread.frames);
    wanted.iter().all(|names| frames.any(|frame| names.iter().any(|name| is_function(&frame.func_name, name))))
}

fn has_python(thread: Option<&PySpyStacktrace>, wanted: &[(&str, &str)]) -> bool {
    let mut frames = thread.into_iter().flat_map(|thread| &thread.frames);
    wanted.iter().all(|wanted| frames.any(|frame| is_python(frame, wanted)))
}

fn is_python(frame: &PySpyFrame, (name, file): &(&str, &str)) -> bool {
    frame.func_name.rsplit('.').next() == Some(*name) && frame.path().ends_with(file)
}

/// Whether a function has this name, with any namespace and parameters.
fn is_function(function: &str, name: &str) -> bool {
    if let Some(part) = name.strip_prefix('*') {
        return function.contains(part);
    }
    let function = function.split('(').next().unwrap_or(function);
    function.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with("::"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use xpu_timer_proto::server::ProcessSample;

    use super::*;

    fn defect(name: &str) -> &'static Defect {
        DEFECTS.iter().find(|defect| defect.name == name).expect("it is in the table")
    }

    #[test]
    fn versions_compare_by_their_numbers() {
        let abort = defect("nccl_abort_proxy");
        for (version, affected) in [("2.16.5", true), ("2.18", true), ("2.9.9", false), ("2.19.1", false), ("x", false)]
        {
            assert_eq!(abort.affects(version), affected, "{version}");
        }
        assert!(defect("glibc_exit_handlers").affects("2.36"));
        assert_eq!(abort.versions(), "2.16.5 to before 2.19.1");
        assert_eq!(defect("python_tracker_reentry").versions(), "before 3.11.6 and 3.12 to before 3.12.1");
    }

    #[test]
    fn the_table_is_complete_and_documented() {
        let page = include_str!("../../docs/verdict.md");
        let mut names = BTreeSet::new();
        assert!(DEFECTS.len() >= 12);
        for defect in DEFECTS {
            assert!(names.insert(defect.name), "{} is there twice", defect.name);
            assert!(defect.url.starts_with("https://") && !defect.affected.is_empty(), "{}", defect.name);
            assert!(defect.is_specific() || defect.also != Also::Nothing, "{}", defect.name);
            let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", defect.name)));
            let row = row.unwrap_or_else(|| panic!("{} has no row in docs/verdict.md", defect.name));
            for part in [defect.library, &defect.versions(), defect.url] {
                assert!(row.contains(part), "{}: {part} is not in {row}", defect.name);
            }
        }
    }

    #[test]
    fn libraries_of_a_sample_without_a_version_take_that_of_another() {
        let sample = |version: &str| ProcessSample {
            libraries: vec![Library { name: "NCCL".into(), version: version.into() }],
            ..Default::default()
        };
        let dump =
            Stacktrace { first_sample: Some(sample("2.18.3")), last_sample: Some(sample("")), ..Default::default() };
        assert_eq!(libraries(&dump), [Library { name: "NCCL".into(), version: "2.18.3".into() }]);
    }
}
