//! Incident folders with dumps that are made up, and with the verdict that the judge gives on them.

use std::{fs, path::Path};

use xpu_timer_analysis::judge;
use xpu_timer_proto::{
    Message,
    server::{
        CaptureMethod, ChildProcess, ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace,
        PySuspended, PySuspendedKind, Stacktrace,
    },
    v1::{
        Communicator, CommunicatorState, DataType, Evidence, FlightRecord, Op, OpKind, OpStatus, Operation, Presence,
        RankEvidence, RankInfo, Trigger, TriggerKind,
    },
};

const SECOND: u64 = 1_000_000_000;
const SAMPLED_NS: u64 = 1_795_259_000 * SECOND;
const COMMUNICATOR: u64 = 0x3f9a_11c2_77d0_5e01;

fn python(frames: &[&str]) -> Vec<PySpyFrame> {
    let frame = |name: &&str| {
        let (func, file) = name.split_once('@').expect("func@file");
        PySpyFrame { func_name: func.into(), file_name: file.into(), ..Default::default() }
    };
    frames.iter().rev().map(frame).collect()
}

fn native(frames: &[&str]) -> Vec<PstackFrame> {
    let frame = |name: &&str| {
        let (func, file) = name.split_once('@').expect("func@file");
        PstackFrame { func_name: func.into(), file_name: file.into(), ..Default::default() }
    };
    frames.iter().rev().map(frame).collect()
}

const MAIN: &[&str] = &["_start@python3.11", "__libc_start_main@libc.so.6", "Py_BytesMain@python3.11"];
const EVAL: &str = "_PyEval_EvalFrameDefault@python3.11";

/// The stacks of the main thread of a rank, root first.
struct Place {
    python: &'static [&'static str],
    /// Beneath the interpreter.
    native: &'static [&'static str],
}

const TRAIN: &str = "/work/megatron/pretrain_gpt.py";

fn waits() -> Place {
    Place {
        python: &[
            "<module>@/work/megatron/pretrain_gpt.py:272",
            "pretrain@/work/megatron/training/training.py:349",
            "train@/work/megatron/training/training.py:1232",
            "train_step@/work/megatron/training/training.py:716",
            "optimizer_step@/work/megatron/optimizer/distrib.py:188",
            "synchronize@/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py:892",
        ],
        native: &[
            "THCPModule_cudaSynchronize@/opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_python.so",
            "cudaDeviceSynchronize@/usr/local/cuda/lib64/libcudart.so.12",
            "cuCtxSynchronize@/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        ],
    }
}

fn loads() -> Place {
    Place {
        python: &[
            "<module>@/work/megatron/pretrain_gpt.py:272",
            "pretrain@/work/megatron/training/training.py:349",
            "train@/work/megatron/training/training.py:1228",
            "get_batch@/work/megatron/pretrain_gpt.py:96",
            "__next__@/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:701",
            "_next_data@/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1448",
            "get@/usr/lib/python3.11/queue.py:180",
            "wait@/usr/lib/python3.11/threading.py:324",
        ],
        native: &["lock_PyThread_acquire_lock@python3.11", "sem_clockwait@libc.so.6"],
    }
}

fn thread_of(tid: u32, name: &str, frames: Vec<PstackFrame>, switches: u64) -> PstackStacktrace {
    PstackStacktrace {
        pid: tid,
        thread_name: name.into(),
        frames,
        state: "S (sleeping)".into(),
        wchan: "futex_wait_queue".into(),
        capture: CaptureMethod::ZeroStop.into(),
        context_switches: switches,
        ..Default::default()
    }
}

fn sample(pid: u32, place: &Place, others: usize, variety: usize, later: bool) -> ProcessSample {
    let mut frames: Vec<&str> = MAIN.to_vec();
    frames.push(EVAL);
    frames.extend(place.native);
    let switches = 100;
    let mut stacktrace = vec![thread_of(pid, "python3", native(&frames), switches)];
    let mut py_stacktrace = vec![PySpyStacktrace {
        pid,
        os_thread_id: pid,
        thread_name: "MainThread".into(),
        frames: python(place.python),
        ..Default::default()
    }];
    for other in 1..others {
        let tid = pid + other as u32;
        // The threads of a kind differ in depth a little, as pools do.
        let kind = (other * 7 + variety * usize::from(other % 5 == 0)) % 23;
        let pool =
            format!("at::internal::worker_{kind}@/opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so");
        let calls = format!("c10::ThreadPool::main_loop_{}@libc10.so", kind % 4);
        let mut frames =
            vec!["clone3@libc.so.6", "start_thread@libc.so.6", "execute_native_thread_routine@libstdc++.so.6"];
        frames.push(&pool);
        frames.extend(std::iter::repeat_n(calls.as_str(), kind % 5));
        frames.extend(["std::condition_variable::wait@libstdc++.so.6", "pthread_cond_wait@libc.so.6"]);
        stacktrace.push(thread_of(tid, &format!("pool-{}", kind % 6), native(&frames), 7));
        if other == 1 {
            let mut frames = vec!["clone3@libc.so.6", "start_thread@libc.so.6", "thread_run@python3.11", EVAL];
            frames.extend(["lock_PyThread_acquire_lock@python3.11", "sem_clockwait@libc.so.6"]);
            let line = if later { 41 } else { 40 };
            if let Some(thread) = stacktrace.last_mut() {
                (thread.frames, thread.context_switches) = (native(&frames), 7 + u64::from(later));
            }
            let beat = format!("beat@/work/megatron/heartbeat.py:{line}");
            py_stacktrace.push(PySpyStacktrace {
                pid,
                os_thread_id: tid,
                thread_name: "heartbeat".into(),
                frames: python(&[
                    "_bootstrap@/usr/lib/python3.11/threading.py:995",
                    "run@/usr/lib/python3.11/threading.py:975",
                    &beat,
                ]),
                ..Default::default()
            });
        }
    }
    ProcessSample {
        stacktrace,
        py_stacktrace,
        process_state: "S (sleeping)".into(),
        captured_unix_ns: SAMPLED_NS + if later { 5 * SECOND } else { 0 },
        cpu_time_ns: 100 * SECOND + if later { 20_000_000 } else { 0 },
        io_bytes: 1_000_000 + if later { 300 } else { 0 },
        ..Default::default()
    }
}

fn flight(rank: u32, world: u32, seq: u64, pending: bool) -> FlightRecord {
    let id = COMMUNICATOR;
    let now = 5_000 * SECOND;
    let done = if pending { seq - 1 } else { seq };
    let operation = Operation {
        ticket: 9,
        kind: OpKind::Collective.into(),
        op: Op::AllReduce.into(),
        communicator: id,
        seq,
        count: 1 << 20,
        dtype: DataType::Bfloat16.into(),
        peer: -1,
        entered_ns: now - 310 * SECOND,
        returned_ns: now - 310 * SECOND + 1,
        started_ns: now - 309 * SECOND,
        status: OpStatus::Pending.into(),
        ..Default::default()
    };
    FlightRecord {
        rank: Some(Box::new(RankInfo { rank: rank as i32, world_size: world, ..Default::default() })),
        communicators: vec![Communicator {
            id,
            size: world,
            rank: rank as i32,
            state: CommunicatorState::Ready.into(),
            launched: seq,
            started: seq,
            completed: done,
            ..Default::default()
        }],
        operations: if pending { vec![operation] } else { Vec::new() },
        collectives_launched: seq,
        last_launch_ns: now - 310 * SECOND,
        read_ns: now,
        ..Default::default()
    }
}

fn dump(rank: u32, world: u32, place: &Place, threads: usize, seq: u64, pending: bool) -> Stacktrace {
    let pid = 40_000 + rank * 200;
    let first = sample(pid, place, threads, rank as usize, false);
    let mut last = sample(pid, place, threads, rank as usize, true);
    Stacktrace {
        stacktrace: std::mem::take(&mut last.stacktrace),
        py_stacktrace: std::mem::take(&mut last.py_stacktrace),
        pid: pid as i32,
        rank: rank as i32,
        process_state: last.process_state.clone(),
        first_sample: Some(first),
        last_sample: Some(last),
        flight_record: Some(flight(rank, world, seq, pending)),
        node: format!("gpu-node-{:03}", rank / 8),
        command: format!("python {TRAIN} --micro-batch-size 4"),
        ..Default::default()
    }
}

fn write(folder: &Path, rank: u32, world: u32, dump: &Stacktrace) {
    let path = folder.join(format!("{rank:05}-{world:05}.stacktrace"));
    fs::write(path, dump.encode_to_vec()).expect("the folder can be written");
}

fn write_verdict(folder: &Path, world: u32, ranks: Vec<RankEvidence>) {
    let evidence = Evidence {
        incident: "20261121T030412Z-1".into(),
        job: "llama-pretrain".into(),
        world_size: world,
        attempt: 0,
        trigger: Some(Trigger { kind: TriggerKind::Operation.into(), rank: 0, unix_ns: SAMPLED_NS, operation: None }),
        ranks,
        hang_timeout_ns: 300 * SECOND,
        sample_interval_ns: 5 * SECOND,
        ..Default::default()
    };
    let mut verdict = judge(&evidence);
    verdict.timing.opened_at = Some("2026-11-21T03:04:12Z".into());
    verdict.timing.seconds_from_timeout = Some(6.2);
    let json = serde_json::to_string_pretty(&verdict).expect("a verdict is JSON");
    fs::write(folder.join("verdict.json"), json).expect("the folder can be written");
}

fn evidence(rank: u32, dump: Stacktrace) -> RankEvidence {
    RankEvidence {
        rank,
        presence: Presence::Present.into(),
        flight: dump.flight_record.clone(),
        node: dump.node.clone(),
        dump: Some(dump.into()),
        ..Default::default()
    }
}

/// Four ranks; rank 2 waits for its data loader, whose worker waits for a disk.
pub fn small(folder: &Path) {
    let ranks = (0..4).map(|rank| {
        let mut dump = match rank {
            2 => dump(rank, 4, &loads(), 6, 41, false),
            _ => dump(rank, 4, &waits(), 6, 42, true),
        };
        if rank == 2 {
            let worker = |later| {
                let mut worker = sample(40_990, &loads(), 1, 0, later);
                worker.process_state = "D (disk sleep)".into();
                worker.stacktrace = vec![thread_of(
                    40_990,
                    "pt_data_worker",
                    native(&["_start@python3.11", EVAL, "os_read@python3.11", "read@libc.so.6"]),
                    3,
                )];
                worker.py_stacktrace = vec![PySpyStacktrace {
                    pid: 40_990,
                    os_thread_id: 40_990,
                    thread_name: "MainThread".into(),
                    frames: python(&[
                        "_worker_loop@/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py:308",
                        "__getitem__@/work/megatron/data/indexed.py:214",
                    ]),
                    ..Default::default()
                }];
                worker
            };
            dump.children.push(ChildProcess {
                pid: 40_990,
                parent_pid: dump.pid,
                command: "pt_data_worker".into(),
                samples: vec![worker(false), worker(true)],
            });
        }
        write(folder, rank, 4, &dump);
        evidence(rank, dump)
    });
    let ranks = ranks.collect();
    write_verdict(folder, 4, ranks);
}

fn suspended(kind: PySuspendedKind, name: &str, awaits: &str, frames: &[&str]) -> PySuspended {
    PySuspended { kind: kind.into(), name: name.into(), frames: python(frames), awaits: awaits.into() }
}

/// Two ranks. Rank 1 runs an event loop in which tasks wait, one of them not yet in the first
/// sample. A thread of it has greenlets.
pub fn tasks(folder: &Path) {
    const FETCH: &[&str] = &["fetch@/work/rollout/client.py:31", "Queue.get@/usr/lib/python3.12/asyncio/queues.py:158"];
    const MAIN: &[&str] = &["rollout@/work/rollout/train.py:88"];
    let main = || Place {
        python: &[
            "<module>@/work/rollout/train.py:120",
            "run@/usr/lib/python3.12/asyncio/runners.py:195",
            "run_forever@/usr/lib/python3.12/asyncio/base_events.py:645",
            "select@/usr/lib/python3.12/selectors.py:468",
        ],
        native: &["select_epoll_poll@python3.12", "epoll_wait@libc.so.6"],
    };
    let ranks = (0..2).map(|rank| {
        let mut dump = match rank {
            0 => dump(rank, 2, &waits(), 4, 42, true),
            _ => dump(rank, 2, &main(), 4, 41, false),
        };
        if rank == 1 {
            let task = |name: &str, awaits: &str, frames| suspended(PySuspendedKind::Task, name, awaits, frames);
            let mut all = vec![task("Task-1", "the tasks of a gather", MAIN)];
            all.extend((2..14).map(|number| task(&format!("Task-{number}"), "a future", FETCH)));
            let first = dump.first_sample.as_mut().expect("two samples");
            first.py_stacktrace[0].suspended = all.clone();
            all.push(task(
                "beat",
                "a future",
                &["beat@/work/rollout/train.py:12", "sleep@/usr/lib/python3.12/asyncio/tasks.py:665"],
            ));
            dump.py_stacktrace[0].suspended = all;
            let greenlet = suspended(PySuspendedKind::Greenlet, "Greenlet", "", &["serve@/work/rollout/pages.py:9"]);
            dump.py_stacktrace[1].suspended = vec![greenlet.clone(), greenlet];
        }
        write(folder, rank, 2, &dump);
        evidence(rank, dump)
    });
    let ranks = ranks.collect();
    write_verdict(folder, 2, ranks);
}

/// A large job: one rank loads data, one is stopped, one in D state, one dead, one without a dump;
/// the rest waits.
pub fn large(folder: &Path, world: u32, threads: usize) {
    let (loader, stopped, sleeper, dead, absent) = (389, 17, 640, 901, 902);
    let ranks = (0..world).filter(|&rank| rank != absent).map(|rank| {
        if rank == dead {
            return RankEvidence {
                rank,
                presence: Presence::Dead.into(),
                node: format!("gpu-node-{:03}", rank / 8),
                exit: "killed by SIGKILL".into(),
                errors: vec!["the process is gone".into()],
                flight: Some(flight(rank, world, 42, true)),
                ..Default::default()
            };
        }
        let mut dump = match rank {
            _ if rank == loader => dump(rank, world, &loads(), threads, 41, false),
            _ => dump(rank, world, &waits(), threads, 42, true),
        };
        if rank == stopped {
            dump.process_state = "T (stopped)".into();
        } else if rank == sleeper {
            dump.process_state = "D (disk sleep)".into();
        }
        write(folder, rank, world, &dump);
        // The judge looks at main threads; the others would only fill the memory here.
        dump.stacktrace.truncate(1);
        dump.first_sample = None;
        evidence(rank, dump)
    });
    let ranks = ranks.collect();
    write_verdict(folder, world, ranks);
}

/// Names that contain markup, script, or the end tag of their element.
pub fn hostile(folder: &Path) {
    let evil = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">";
    let mut dump = dump(0, 2, &waits(), 3, 42, true);
    for thread in &mut dump.py_stacktrace {
        thread.thread_name = evil.into();
        for frame in &mut thread.frames {
            frame.func_name = format!("{evil}\u{0}\u{2028}{{{{7*7}}}}${{7*7}}");
            frame.file_name = format!("<!--<script>{evil}:1");
        }
    }
    dump.node = evil.into();
    dump.command = evil.into();
    dump.process_state = evil.into();
    write(folder, 0, 2, &dump);
    let mut verdict = judge(&Evidence { world_size: 2, ..Default::default() });
    verdict.sentence = evil.into();
    verdict.job = evil.into();
    let json = serde_json::to_string(&verdict).expect("a verdict is JSON");
    fs::write(folder.join("verdict.json"), json).expect("the folder can be written");
}
