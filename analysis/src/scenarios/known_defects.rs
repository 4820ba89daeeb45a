//! Known defects: each is found by its published stacks, or by what its records show, in an
//! affected version only.

use std::collections::BTreeSet;

use xpu_timer_proto::{
    server::Library,
    v1::{DataType, Op},
};

use crate::{
    Verdict,
    known_defects::{DEFECTS, Defect},
    testing::{Job, Stack, native_thread, python_thread},
};

/// A thread of a published stack: native functions, Python frames, and whether it holds the
/// GIL.
type Thread = (&'static [&'static str], &'static [(&'static str, &'static str)], bool);

const GIL_WAITER: Thread = (&["__futex_abstimed_wait_common64", "pthread_cond_timedwait", "take_gil"], &[], false);
const MANAGER: &str = "_ExecutorManagerThread";
const POOL_PATH: &str = "/usr/lib/python3.11/concurrent/futures/process.py:1";
const QUEUES_PATH: &str = "/usr/lib/python3.11/multiprocessing/queues.py:1";
const CONNECTION_PATH: &str = "/usr/lib/python3.11/multiprocessing/connection.py:1";
const TRACKER_PATH: &str = "/usr/lib/python3.11/multiprocessing/resource_tracker.py:1";

/// The defects that stacks show: the name, an affected version and the next one that is not,
/// and the threads.
const PUBLISHED: &[(&str, &str, &str, &[Thread])] = &[
    (
        "nccl_abort_2_25",
        "2.25.1",
        "2.26.2",
        &[
            (
                &[
                    "syscall",
                    "std::__atomic_futex_unsigned_base::_M_futex_wait_until_steady(unsigned int*)",
                    "c10d::ProcessGroupNCCL::waitForFutureOrTimeout(std::future<bool>&)",
                    "c10d::ProcessGroupNCCL::abort()",
                ],
                &[("shutdown", "/job/train.py:9")],
                false,
            ),
            (&["poll", "ncclCommAbort", "c10d::NCCLComm::abort()", "start_thread"], &[], false),
        ],
    ),
    (
        "nccl_abort_proxy",
        "2.18.1",
        "2.19.1",
        &[
            (
                &[
                    "__futex_abstimed_wait_common64",
                    "__pthread_clockjoin_ex",
                    "commFree",
                    "commCleanup",
                    "commReclaim",
                    "ncclCommAbort",
                    "c10d::abortCommsFromMap",
                ],
                &[],
                false,
            ),
            (&["poll", "ncclProxyService", "start_thread"], &[], false),
        ],
    ),
    (
        "nccl_stray_connection",
        "2.27.5",
        "2.30.7",
        &[
            (&["cuStreamSynchronize", "cudaStreamSynchronize"], &[("step", "/job/train.py:9")], false),
            (&["accept", "socketTryAccept", "ncclSocketAccept", "ncclProxyService", "start_thread"], &[], false),
        ],
    ),
    (
        "torch_gloo_destructor",
        "2.7.1",
        "2.8.0",
        &[
            (
                &["pthread_cond_wait", "c10d::ProcessGroupGloo::~ProcessGroupGloo()", "_Py_Dealloc"],
                &[("main", "/job/train.py:80")],
                true,
            ),
            GIL_WAITER,
        ],
    ),
    (
        "torch_store_gil",
        "2.0.1",
        "2.1.0",
        &[
            (
                &["recv", "c10d::TCPStore::TCPStore(std::string, c10d::TCPStoreOptions const&)"],
                &[("connect", "/job/train.py:12")],
                true,
            ),
            GIL_WAITER,
        ],
    ),
    (
        "torch_execution_trace",
        "2.5.1",
        "2.6.0",
        &[
            (
                &["__lll_lock_wait", "pthread_mutex_lock", "torch::profiler::impl::recordOperatorStart(int)"],
                &[("all_gather", "/job/metrics.py:5")],
                true,
            ),
            (&["pthread_cond_timedwait", "take_gil", "torch::profiler::impl::onFunctionExit(int)"], &[], false),
        ],
    ),
    (
        "torch_stale_build_lock",
        "2.9.0",
        "2.15.0",
        &[(
            &["clock_nanosleep", "time_sleep"],
            &[
                ("FileBaton.wait", "/opt/venv/lib/python3.11/site-packages/torch/utils/file_baton.py:50"),
                ("_jit_compile", "/opt/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py:2156"),
                ("main", "/job/train.py:9"),
            ],
            false,
        )],
    ),
    (
        "python_pool_broken",
        "3.10.5",
        "3.11.5",
        &[
            (&["pthread_join"], &[("main", "/job/train.py:9")], false),
            (&["write"], &[("_send", CONNECTION_PATH), ("send_bytes", CONNECTION_PATH), ("_feed", QUEUES_PATH)], false),
            (
                &["sem_wait"],
                &[("join_thread", QUEUES_PATH), ("join_executor_internals", POOL_PATH), ("run", POOL_PATH)],
                false,
            ),
        ],
    ),
    (
        "python_pool_submit",
        "3.12.0",
        "3.12.1",
        &[
            (
                &["write"],
                &[
                    ("Connection._send", CONNECTION_PATH),
                    ("Connection.send_bytes", CONNECTION_PATH),
                    ("_ThreadWakeup.wakeup", POOL_PATH),
                    ("ProcessPoolExecutor.submit", POOL_PATH),
                    ("main", "/job/train.py:9"),
                ],
                false,
            ),
            (
                &["sem_wait", "PyThread_acquire_lock_timed"],
                &[("_ExecutorManagerThread.wait_result_broken_or_wakeup", POOL_PATH), ("run", POOL_PATH)],
                false,
            ),
        ],
    ),
    (
        "python_pool_shutdown",
        "3.12.7",
        "3.12.8",
        &[
            (&["pthread_join"], &[("main", "/job/train.py:9")], false),
            (
                &["sem_wait", "PyThread_acquire_lock_timed"],
                &[("_SafeQueue._on_queue_feeder_error", POOL_PATH), ("Queue._feed", QUEUES_PATH)],
                false,
            ),
            (&["sem_wait"], &[("Queue.join_thread", QUEUES_PATH), ("_join_executor_internals", POOL_PATH)], false),
        ],
    ),
    (
        "python_tracker_reentry",
        "3.11.5",
        "3.11.6",
        &[(
            &["sem_wait", "PyThread_acquire_lock_timed"],
            &[
                ("ResourceTracker.ensure_running", TRACKER_PATH),
                ("ResourceTracker.unregister", TRACKER_PATH),
                ("ResourceTracker.ensure_running", TRACKER_PATH),
                ("main", "/job/train.py:9"),
            ],
            false,
        )],
    ),
    (
        "python_tracker_exit",
        "3.14.4",
        "3.14.5",
        &[(
            &["__wait4", "waitpid", "os_waitpid"],
            &[("ResourceTracker._stop_locked", TRACKER_PATH), ("ResourceTracker.__del__", TRACKER_PATH)],
            false,
        )],
    ),
];

fn defect(name: &str) -> &'static Defect {
    DEFECTS.iter().find(|defect| defect.name == name).expect("it is in the table")
}

/// Sets the version of a library of a rank. An empty version is unknown.
fn load(job: &mut Job, rank: u32, library: &str, version: &str) {
    let sample = job.rank(rank).dump.as_mut().and_then(|dump| dump.last_sample.as_mut()).expect("two samples");
    sample.libraries.push(Library { name: library.into(), version: version.into() });
}

/// Two ranks: rank 0 waits in a collective, and rank 1 has these threads.
fn with_threads(threads: &[Thread]) -> Job {
    let mut job = Job::with_world(2, 30);
    job.enter(0x77, 0, Op::AllReduce);
    let (main_native, main_python, gil) = threads[0];
    job.set_stack(1, Stack::new(main_python, main_native));
    let dump = job.rank(1).dump.as_mut().expect("a dump");
    let first = dump.first_sample.as_mut().expect("two samples");
    dump.py_stacktrace.iter_mut().chain(&mut first.py_stacktrace).for_each(|thread| thread.owns_gil = gil);
    for (tid, (native, python, _)) in (5000..).zip(&threads[1..]) {
        let frames: Vec<(&'static str, String)> =
            python.iter().map(|(function, file)| (*function, (*file).to_owned())).collect();
        let python = (!frames.is_empty()).then(|| python_thread(tid, MANAGER, &frames));
        job.thread(1, native_thread(tid, native, "S (sleeping)", "", None, 9), python);
    }
    job
}

/// A child process of rank 1 with these stacks of its threads in both samples.
fn with_child(stacks: &[&[&str]]) -> Job {
    let mut job = Job::with_world(2, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.set_stack(1, Stack::loader());
    job.child(1, "python train.py", "S (sleeping)");
    let child = &mut job.rank(1).dump.as_mut().expect("a dump").children[0];
    for sample in &mut child.samples {
        let threads = (4242..).zip(stacks);
        sample.stacktrace =
            threads.map(|(tid, stack)| native_thread(tid, stack, "S (sleeping)", "", None, 9)).collect();
    }
    job
}

fn names(verdict: &Verdict) -> Vec<&str> {
    verdict.known_defects.iter().map(|defect| defect.name.as_str()).collect()
}

/// The verdict without its remarks on known defects.
fn without_remarks(verdict: Verdict) -> Verdict {
    Verdict { known_defects: Vec::new(), ..verdict }
}

#[test]
fn a_defect_is_found_by_its_stacks_in_an_affected_version_only() {
    let mut tested: BTreeSet<&str> = BTreeSet::new();
    for (name, affected, fixed, threads) in PUBLISHED {
        let job = with_threads(threads);
        let library = defect(name).library;
        let judge = |version: &str| {
            let mut job = job.clone();
            load(&mut job, 1, library, version);
            job.judge_with_defects()
        };
        let verdict = judge(affected);
        assert_eq!(names(&verdict), [*name], "{}", verdict.to_text());
        let found = &verdict.known_defects[0];
        assert_eq!((found.version.as_deref(), &found.ranks[..]), (Some(*affected), &[1][..]), "{name}");
        // Without the breaks of its lines.
        let text = verdict.to_text().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(&format!("known: This looks like a known defect of {library}")), "{text}");
        assert!(text.contains(&format!("{} (rank 1)", found.url)), "{text}");
        assert_eq!(names(&judge(fixed)), [""; 0], "{name} in {fixed}");
        let unknown = judge("");
        assert_eq!((names(&unknown), unknown.known_defects[0].version.as_deref()), (vec![*name], None));
        assert!(unknown.known_defects[0].text.contains("the loaded version is unknown"), "{name}");
        // A defect is only a remark.
        assert_eq!(without_remarks(verdict), without_remarks(judge(fixed)), "{name}");
        tested.insert(name);
    }
    let elsewhere = ["nccl_launch_blocking", "nccl_bfloat16_sharp", "glibc_exit_handlers", "gomp_after_fork"];
    let specific = DEFECTS.iter().filter(|defect| defect.is_specific()).map(|defect| defect.name);
    let untested: Vec<&str> = specific.filter(|name| !tested.contains(name) && !elsewhere.contains(name)).collect();
    assert_eq!(untested, [""; 0]);
}

#[test]
fn one_thread_of_a_signature_is_not_enough() {
    for (name, affected, _, threads) in PUBLISHED.iter().filter(|published| published.3.len() > 1) {
        for without in 1..threads.len() {
            let kept: Vec<Thread> =
                threads.iter().enumerate().filter(|(index, _)| *index != without).map(|(_, thread)| *thread).collect();
            let mut job = with_threads(&kept);
            load(&mut job, 1, defect(name).library, affected);
            assert_eq!(names(&job.judge_with_defects()), [""; 0], "{name} without thread {without}");
        }
    }
}

#[test]
fn a_sign_in_the_first_sample_only_does_not_count() {
    let (_, affected, _, threads) = PUBLISHED[0];
    let mut job = with_threads(threads);
    load(&mut job, 1, "NCCL", affected);
    job.rank(1).dump.as_mut().expect("a dump").stacktrace[1].frames.clear();
    assert_eq!(names(&job.judge_with_defects()), [""; 0]);
}

#[test]
fn a_build_that_some_rank_works_on_is_not_a_stale_lock() {
    let (_, affected, _, threads) = *PUBLISHED.iter().find(|(name, ..)| *name == "torch_stale_build_lock").unwrap();
    let mut job = with_threads(threads);
    load(&mut job, 1, "PyTorch", affected);
    job.child(0, "/usr/bin/ninja -v", "R (running)");
    assert_eq!(names(&job.judge_with_defects()), [""; 0]);
}

#[test]
fn locks_that_a_forked_worker_inherited_are_found_in_the_worker() {
    let atexit: &[&str] = &["__lll_lock_wait_private", "__internal_atexit", "__cxa_atexit", "cv::imdecode"];
    let mut job = with_child(&[atexit]);
    load(&mut job, 1, "glibc", "2.36");
    assert_eq!(names(&job.judge_with_defects()), ["glibc_exit_handlers"]);
    let parallel: &[&str] = &["futex_wait", "gomp_team_barrier_wait_end", "GOMP_parallel", "at::parallel_for"];
    let mut job = with_child(&[parallel]);
    load(&mut job, 1, "GNU OpenMP", "1.0.0");
    assert_eq!(names(&job.judge_with_defects()), ["gomp_after_fork"]);
    let mut job = with_child(&[parallel, &["futex_wait", "gomp_thread_start"]]);
    load(&mut job, 1, "GNU OpenMP", "1.0.0");
    assert_eq!(names(&job.judge_with_defects()), [""; 0], "its team has threads");
}

#[test]
fn a_blocking_launch_needs_a_call_that_has_not_returned() {
    let mut job = with_threads(&[
        (
            &["ioctl", "cuLaunchKernelEx", "cudaLaunchKernelExC", "ncclLaunchKernel", "doLaunches", "ncclAllReduce"],
            &[("step", "/job/train.py:9")],
            false,
        ),
        (&["futex_wait", "pthread_cond_wait", "ncclProxyProgress", "start_thread"], &[], false),
    ]);
    load(&mut job, 1, "NCCL", "2.14.3");
    assert_eq!(names(&job.judge_with_defects()), [""; 0]);
    job.enter_with(0x77, 1, Op::AllReduce, |operation| operation.returned_ns = 0);
    assert_eq!(names(&job.judge_with_defects()), ["nccl_launch_blocking"]);
    job.kernel(1, "step");
    assert_eq!(names(&job.judge_with_defects()), [""; 0], "the queue of the device may be full");
}

/// All ranks are inside one collective, with equal arguments.
fn stalled(done: u64, dtype: DataType) -> Job {
    let mut job = Job::with_world(2, done);
    for rank in 0..2 {
        job.enter_with(0x77, rank, Op::AllReduce, |operation| operation.dtype = dtype.into());
    }
    job
}

#[test]
fn a_stall_of_all_ranks_is_compared_with_the_versions() {
    let sharp = native_thread(5002, &["poll", "sharp_coll_req_wait", "ncclProxyProgress"], "S (sleeping)", "", None, 9);
    let with = |mut job: Job, library: &str, version: &str| {
        for rank in 0..2 {
            load(&mut job, rank, library, version);
            job.thread(rank, sharp.clone(), None);
        }
        job.judge_with_defects()
    };
    let verdict = with(stalled(30, DataType::Bfloat16), "NCCL", "2.18.1");
    assert_eq!(names(&verdict), ["nccl_bfloat16_sharp"]);
    assert_eq!(verdict.known_defects[0].ranks, [0, 1]);
    assert_eq!(names(&with(stalled(30, DataType::Float32), "NCCL", "2.18.1")), [""; 0]);
    assert_eq!(names(&with(stalled(0, DataType::Float32), "NVIDIA driver", "560.35.03")), ["driver_p2p_560"]);
    assert_eq!(names(&with(stalled(1, DataType::Float32), "NVIDIA driver", "560.35.03")), [""; 0], "not the first");
    assert_eq!(names(&with(stalled(0, DataType::Float32), "NVIDIA driver", "570.86.10")), [""; 0]);
    assert_eq!(names(&with(stalled(0, DataType::Float32), "NVIDIA driver", "")), [""; 0], "an unknown version");
}

#[test]
fn an_alltoallv_that_stalls_is_compared_with_the_versions() {
    let judge = |counts: [u64; 2], version: &str| {
        let mut job = Job::with_world(3, 0);
        for rank in 0..3_u32 {
            for peer in (0..3).filter(|peer| *peer != rank) {
                let count = counts[usize::from(rank + peer == 2)];
                for op in [Op::Send, Op::Recv] {
                    job.transfer(0x77, rank, op, peer as i32);
                    let operation = job.flight(rank).operations.last_mut().expect("it was just added");
                    (operation.group, operation.count) = (7, count);
                }
            }
            load(&mut job, rank, "NCCL", version);
        }
        job.judge_with_defects()
    };
    let verdict = judge([100, 200], "2.12.12");
    assert_eq!(names(&verdict), ["nccl_alltoallv_2_18"], "{}", verdict.to_text());
    assert_eq!(names(&judge([100, 200], "2.7.8")), ["nccl_alltoallv_2_8"]);
    assert_eq!(names(&judge([100, 100], "2.12.12")), [""; 0], "equal sizes");
    assert_eq!(names(&judge([100, 200], "2.18.1")), [""; 0]);
}
