//! Traces of synthetic timelines, read by the software that they are made for.

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use flate2::read::GzDecoder;
use serde_json::Value;
use tempfile::TempDir;
use xpu_timer_proto::{
    Message,
    hook::{
        HostTrace, KernelTrace, KernelTraces, MatmulDebugData, NcclDebugData, RankMatmulInfo, kernel_trace::DebugData,
    },
    server::{NamedFrames, PySpyFrame, PySpyFrameList, PythonStackInTimeline},
};
use xpu_timer_tests::{Job, PATIENCE, PypiFramework, Timelines, artifacts, read_archive, skip, tree};

/// Runs the command on a folder, and returns the folder with its output.
pub fn generate(timelines: &Path, arguments: &[&str]) -> (TempDir, String) {
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(artifacts().bin("xpu_timer_gen_trace_timeline"));
    command.arg("--path").arg(timelines).arg("--output").arg(out.path().join("job")).args(arguments);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    (out, text)
}

fn folder(timelines: Timelines) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    timelines.write(folder.path()).unwrap();
    folder
}

/// The result of `traces.py` with packages of PyPI; `None` if they cannot be installed.
pub fn read_with(packages: &[&str], what: &str, path: &Path) -> Option<Value> {
    let python = match PypiFramework::set_up(packages, None, false) {
        Ok(framework) => framework.path("bin/python3"),
        Err(error) => {
            skip(&format!("{error:#}"));
            return None;
        }
    };
    let output =
        Command::new(python).arg(tree().join("tests/tests/it/traces.py")).arg(what).arg(path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_str(text.lines().last().unwrap()).unwrap())
}

pub const PERFETTO: &[&str] = &["perfetto==0.59.1", "protobuf==7.36.2"];
pub const HTA: &[&str] = &["HolisticTraceAnalysis==0.5.0"];
const OPERATIONS: u32 = 4000;

/// Two nodes of two ranks, whose clocks are 40 s and 20 ppm apart.
const TWO_NODES: Timelines = Timelines {
    ranks: 4,
    ranks_per_node: 2,
    operations: OPERATIONS,
    period_ns: 1_000_000,
    slow_rank: Some(1),
    clock_step: (40_000_000_000, 20.0),
    realtime_step_ns: 1_000_000,
    lossy_rank: Some(3),
    hang: None,
};

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn perfettos_schema_reads_what_was_written() {
    let timelines = folder(TWO_NODES);
    // A hang of four ranks. Rank 2 is the culprit.
    let demo = read_archive(&tree().join("tests/fixtures/demo.zip")).unwrap();
    fs::write(timelines.path().join("verdict.json"), &demo["verdict.json"]).unwrap();
    let (out, text) = generate(timelines.path(), &["--groups", "tp2-dp2"]);
    let clocks = json(out.path().join("clocks.json"));
    assert_eq!(clocks[1]["aligned_with"], "node-0");
    assert!(clocks[1]["residual"]["median_us"].as_f64().unwrap() < 5.0, "{clocks}");
    assert!(text.contains("4 ranks on 2 nodes, 16000 operations"), "{text}");
    // All ranks have launched their products and all-reduces from the same places.
    let stacks = fs::read_to_string(out.path().join("merged_tracing_kernel_stack")).unwrap();
    let lines = [
        "<module>@train.py:77@0-3|;forward@train.py:41@0-3|;matmul 4096x4096x4096 bf16@compute@0-3| 1",
        "<module>@train.py:77@0-3|;backward@train.py:52@0-3|;AllReduce bf16 16 MiB@communication@0-3| 1",
    ];
    assert!(stacks.lines().count() == 2 && lines.iter().all(|line| stacks.contains(line)), "{stacks}");
    let svg = fs::read_to_string(out.path().join("tracing_kernel_stack.svg")).unwrap();
    assert!(svg.contains("AllReduce bf16 16 MiB"), "{svg}");
    let Some(found) = read_with(PERFETTO, "perfetto", &out.path().join("trace_job.bin")) else { return };

    // For each rank, a quarter of the operations are all-reduces, and an eighth are all-gathers.
    // All of them are split in two, except for the rank that starts last.
    let kinds = |name: &str| found["kinds"][name].as_u64().unwrap();
    assert_eq!(kinds("TYPE_SLICE_BEGIN"), kinds("TYPE_SLICE_END"));
    // The clocks of two nodes, the hang, the culprit, and what is missing of rank 3.
    assert_eq!((kinds("TYPE_INSTANT"), &found["unfinished"], &found["unknown_tracks"]), (5, &0.into(), &0.into()));
    assert_eq!(found["names"]["7 operations of the window are missing"], 1);
    let product = &found["product"];
    for (name, value) in [("lds", "4096 4096 4096".into()), ("algo", Value::from(99)), ("trans", "TN".into())] {
        assert_eq!(product[name], value, "{name}: {product}");
    }
    let labels = found["labels"].as_object().unwrap().iter();
    let lossy = labels.filter(|(_, labels)| labels.to_string().contains("7 operations of the window are missing"));
    assert_eq!(lossy.map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["node-1 rank 3 tp1 dp1"]);
    let of = |name: &str| found["names"][name].as_u64().unwrap_or(0);
    let (parts, all) = (of("waiting") + of("transfer"), u64::from(OPERATIONS) * 4);
    assert_eq!(kinds("TYPE_SLICE_BEGIN"), 2 * all + parts);
    assert_eq!((of("hang"), of("culprit: its last operation ends")), (1, 1));
    // The launch and the kernel have one name.
    assert_eq!(of("matmul 4096x4096x4096 bf16"), all / 2);
    assert_eq!(of("AllReduce bf16 16 MiB"), all / 2);
    assert_eq!(of("Send bf16 16 MiB") + of("Recv bf16 16 MiB"), all / 4);
    assert!(of("waiting") > all / 6 && of("waiting") == of("transfer"), "{}", found["names"]);
    assert!(text.contains(&format!("{} slices", kinds("TYPE_SLICE_BEGIN"))), "{text}");

    // A process, a host thread, two streams and two counters of each rank, and the track of the
    // whole job.
    assert_eq!(found["tracks"], 4 * 6 + 1);
    assert_eq!(found["counters"]["allocated memory"], serde_json::json!([16, 1_u64 << 30, 4_u64 << 30]));
    // Each operation takes most of its millisecond, so the devices are busy for most of the time.
    let [values, least, most] = [0, 1, 2].map(|at| found["counters"]["GPU busy"][at].as_u64().unwrap());
    assert!(values >= 8 && least == 0 && (60..=100).contains(&most), "{}", found["counters"]);
    assert_eq!(found["processes"][3], "node-1 rank 3 tp1 dp1");
    // Flows: from a launch to its kernel, and between the two ranks of each communicator.
    assert_eq!(found["flows_by_ranks"]["1"], all);
    assert_eq!(found["flows_by_ranks"]["2"].as_u64(), Some(all / 2 / 2));
    // Rank 1 reaches each all-reduce 300 us late, and the transfer is the rest.
    let reduction = &found["reduction"];
    assert_eq!((&reduction["group"], &reduction["nranks"]), (&"tp 0-1".into(), &2.into()));
    assert_eq!((&reduction["nodes"], &reduction["algorithm"]), (&1.into(), &"RING_LL".into()));
    let waiting = reduction["waiting_us"].as_f64().unwrap();
    assert!((200.0..400.0).contains(&waiting), "{reduction}");
}

#[test]
fn hta_divides_the_time_as_the_breakdown_does() {
    let written = Timelines { ranks: 2, clock_step: (0, 0.0), lossy_rank: Some(1), ..TWO_NODES };
    let timelines = folder(written);
    written.write_samples(timelines.path(), 1, 2_000_000_000).unwrap();
    let (out, text) = generate(timelines.path(), &["--chrome"]);
    check_chrome(&out.path().join("chrome_job/rank00001.json.gz"));
    assert!(text.contains("communication beside compute"), "{text}");
    let Some(found) = read_with(HTA, "hta", &out.path().join("chrome_job")) else { return };
    check_breakdown(&found, out.path(), 0.0);
    assert_eq!(found["kinds"], serde_json::json!(KINDS));
}

/// HTA's kinds of time, if compute and communication overlap at all.
const KINDS: [&str; 3] = ["COMMUNICATION", "COMPUTATION", "COMPUTATION overlapping COMMUNICATION"];

/// Compares what HTA finds in a folder of traces with our breakdown there. Times may differ by some
/// microseconds, or by one in 10,000.
pub fn check_breakdown(found: &Value, folder: &Path, slack_us: f64) {
    let ours = json(folder.join("breakdown_job.json"));
    let kinds: Vec<&str> = found["kinds"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(kinds == KINDS || kinds == KINDS[..2], "{kinds:?}");
    // HTA may round a short overlap to nothing.
    let has_overlap = ours.as_array().unwrap().iter().any(|row| row["overlap_percent"].as_f64() > Some(0.01));
    assert!(kinds == KINDS || !has_overlap, "{kinds:?} {ours}");
    for (rank, (time, overlap)) in
        found["time"].as_array().unwrap().iter().zip(found["overlap"].as_array().unwrap()).enumerate()
    {
        let ours = ours.as_array().unwrap().iter().find(|row| row["rank"] == rank).unwrap();
        let number = |value: &Value| value.as_f64().unwrap();
        for (theirs, name) in [
            ("kernel_time(us)", "kernel_time_us"),
            ("idle_time(us)", "idle_time_us"),
            ("compute_time(us)", "compute_time_us"),
            ("non_compute_time(us)", "non_compute_time_us"),
        ] {
            let (theirs, ours) = (number(&time[theirs]), number(&ours[name]));
            assert!(
                (theirs - ours).abs() <= slack_us.max(ours * 1e-4),
                "rank {rank}: {name} is {ours}, and {theirs} for HTA"
            );
        }
        let difference = number(&overlap["comp_comm_overlap_pctg"]) - number(&ours["overlap_percent"]);
        let percent = 100.0 * slack_us / number(&ours["communication_time_us"]);
        assert!(difference.abs() < percent.max(0.01), "rank {rank}: {overlap} {ours}");
    }
}

/// Checks the parts of a file for Chrome that HTA does not read: counters, sampled stacks, and what
/// is missing.
fn check_chrome(path: &Path) {
    let mut text = String::new();
    GzDecoder::new(fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |phase: &str, name: &str| -> Vec<&Value> {
        events.iter().filter(|event| event["ph"] == phase && (event["name"] == name || name.is_empty())).collect()
    };
    let memory: Vec<u64> =
        of("C", "allocated memory").iter().filter_map(|event| event["args"]["bytes"].as_u64()).collect();
    assert_eq!(memory, [1 << 30, 2 << 30, 3 << 30, 4 << 30]);
    let busy = of("C", "GPU busy");
    assert!(busy.len() > 1 && busy.iter().any(|event| event["args"]["percent"].as_u64() > Some(60)), "{busy:?}");
    assert_eq!(of("M", "process_labels")[0]["args"]["labels"], "7 operations of the window are missing");
    let track = of("M", "thread_name")[0];
    assert_eq!(track["args"]["name"], "host: MainThread (sampled)");
    let (begins, ends) = (of("B", ""), of("E", ""));
    let names: Vec<&str> = begins.iter().filter_map(|event| event["name"].as_str()).collect();
    assert_eq!(names, ["main (train.py)", "step (train.py)", "evaluate (metrics.py)"]);
    assert_eq!(ends.len(), 3);
    assert!(begins.iter().chain(&ends).all(|event| event["tid"] == track["tid"]), "{track}");
    let in_order = events.iter().filter(|event| event["ph"] == "B" || event["ph"] == "E");
    assert!(in_order.map(|event| event["ts"].as_f64().unwrap()).is_sorted(), "the stack is nested");
}

/// A job on the simulated device whose rank 1 stays in its data loader after 40 steps.
#[test]
fn the_folder_of_a_hang_becomes_a_trace() {
    let job = Job::new();
    let mut ranks = job.train(2, &["--step-ms=5", "--fault=loader", "--fault-rank=1", "--fault-step", "40"]);
    ranks.wait_for("step 30 ", PATIENCE);
    let incident = job.wait_incident(1, Duration::from_secs(90));
    let (out, text) = generate(&incident.path, &[]);
    assert!(text.contains("2 ranks on 1 node,"), "{text}");
    let Some(found) = read_with(PERFETTO, "perfetto", &out.path().join("trace_job.bin")) else { return };
    let of = |name: &str| found["names"][name].as_u64().unwrap_or(0);
    assert_eq!((of("hang"), of("culprit: its last operation ends")), (1, 1), "{found}");
    assert_eq!((&found["unfinished"], &found["unknown_tracks"]), (&1.into(), &0.into()), "rank 0 waits: {found}");
    // 40 all-reduces of two ranks, and the one that rank 1 never starts.
    assert_eq!(found["flows_by_ranks"]["2"], 40, "{found}");
}

/// One rank of the original tool, at the moment of its clock.
fn original(rank: u32) -> Vec<u8> {
    let product = MatmulDebugData { shapes: vec![1, 4096, 1024, 512], dtype: "bf16".into(), ..<_>::default() };
    let reduction = |seq| NcclDebugData {
        comm_hash: 77,
        ranks: 2,
        seq,
        dtype: "fp16".into(),
        input_size_in_bytes: 4096,
        ..<_>::default()
    };
    let trace = |kernel_type, trace_code, start_us, debug_data| KernelTrace {
        kernel_type,
        trace_code,
        start_us: 1_800_000_000_000_000 + start_us,
        dur_us: 50,
        delay_us: 20,
        debug_data: Some(debug_data),
        ..<_>::default()
    };
    let traces = (0..100).flat_map(|step| {
        [
            trace(0, 3, step * 1000, DebugData::MmDebug(product.clone())),
            trace(1, 4, step * 1000 + 100, DebugData::NcclDebug(reduction(step))),
        ]
    });
    let host = HostTrace { start_us: 1_800_000_000_000_000, dur_us: 9, name: "GC".into(), count: 2, debug_data: None };
    KernelTraces { traces: traces.collect(), host_traces: vec![host], pid: 11, rank }.encode_to_vec()
}

#[test]
fn timelines_of_the_original_tool_are_read_and_a_broken_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..3 {
        let path = folder.path().join(format!("0000{rank}-00003.timeline"));
        let bytes = if rank == 2 { b"nonsense".to_vec() } else { original(rank) };
        fs::write(&path, bytes).unwrap();
        let names = "3,xpu_timer_mm_bmnk_1_4096_1024_512_\n4,xpu_timer_AllReduce_RING_LL_Sum_f16_size_4096\n";
        fs::write(path.with_extension("timeline.meta"), names).unwrap();
    }
    let frame = |func: &str| PySpyFrame { func_name: func.into(), file_name: "a.py:1".into(), ..<_>::default() };
    let frames = PySpyFrameList { frames: vec![frame("<module>"), frame("step")] };
    let named_frames = vec![NamedFrames { name: "xpu_timer_mm_bmnk_1_4096_1024_512_".into(), frames: Some(frames) }];
    let stacks = PythonStackInTimeline { named_frames, rank: 1 }.encode_to_vec();
    fs::write(folder.path().join("00001-00003.tracing_kernel_callstack"), stacks).unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(artifacts().bin("xpu_timer_gen_trace_timeline"));
    let output = command.arg("--path").arg(folder.path()).args(["-c", "2", "--no-launchtime", "--output", "old"]);
    let output = output.current_dir(out.path()).output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("00002-00003.timeline is left out"), "{errors}");
    assert!(text.starts_with("trace_old.bin: 2 ranks") && text.contains("402 operations"), "{text}");
    let matmuls = RankMatmulInfo::decode(&fs::read(out.path().join("matmul_old.bin")).unwrap()[..]).unwrap();
    let of_rank = &matmuls.mm_infos.iter().find(|of_rank| of_rank.rank == 1).unwrap().infos.as_ref().unwrap().infos;
    assert_eq!((of_rank.len(), of_rank[0].tflops.len()), (1, 100));
    // 2 x 4096 x 1024 x 512 in 50 us.
    assert!((of_rank[0].tflops[0] - 85.9).abs() < 0.1, "{}", of_rank[0].tflops[0]);
    let stacks = fs::read_to_string(out.path().join("merged_tracing_kernel_stack")).unwrap();
    assert!(stacks.starts_with("<module>@a.py:1@1|0/2;step@a.py:1@1|0/2;xpu_timer_mm_bmnk_"), "{stacks}");
}

#[test]
fn the_start_of_a_cut_file_is_used() {
    let timelines = folder(TWO_NODES);
    let cut = timelines.path().join("00003-00004.ops");
    let bytes = fs::read(&cut).unwrap();
    // The file has one full block of 4,096 operations at most, so the cut leaves the head only.
    fs::write(&cut, &bytes[..bytes.len() - 1]).unwrap();
    fs::write(timelines.path().join("00002-00004.ops"), b"").unwrap();
    let mut command = Command::new(artifacts().bin("xpu_timer_gen_trace_timeline"));
    let output = command.arg("--path").arg(timelines.path()).arg("--output").arg(timelines.path().join("cut"));
    let output = output.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("00002-00004.ops is left out: "), "{errors}");
    assert!(errors.contains("00003-00004.ops: only its first 0 operations can be read: "), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("3 ranks on 2 nodes, 8000 operations"), "{text}");
}

#[test]
fn the_comparison_names_lost_time_and_the_slow_rank() {
    let before = folder(Timelines { ranks: 8, ranks_per_node: 8, slow_rank: None, clock_step: (0, 0.0), ..TWO_NODES });
    let after =
        folder(Timelines { ranks: 8, ranks_per_node: 8, slow_rank: Some(5), clock_step: (0, 0.0), ..TWO_NODES });
    let out = tempfile::tempdir().unwrap();
    let mut texts = BTreeMap::new();
    for kind in ["performance-diff", "tflops-box", "xccl-box"] {
        let picture = out.path().join(format!("{kind}.svg"));
        let mut command = Command::new(artifacts().bin("xpu_timer_diff"));
        command.arg("--path").arg(before.path()).arg("--path").arg(after.path());
        command.args(["--name", "before", "--name", "after", "--type", kind, "--output"]).arg(&picture);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        texts.insert(kind, String::from_utf8_lossy(&output.stdout).into_owned());
        let svg = fs::read_to_string(picture).unwrap();
        roxmltree::Document::parse(&svg).unwrap();
        assert!(svg.contains("before") && svg.contains("after"), "{svg}");
    }
    let text = &texts["performance-diff"];
    assert!(text.contains("rank 5 is 50 % slower than the other 7 ranks in matmul 4096x4096x4096 bf16"), "{text}");
    assert!(text.contains("rank 5 starts last in 100 % of the collectives of ranks 0-7"), "{text}");
    assert!(!texts["tflops-box"].contains("AllReduce bf16"), "{}", texts["tflops-box"]);
}

#[test]
fn recorded_stacks_alone_make_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let timelines = Timelines { operations: 40_000, ..Timelines::default() };
    (0..timelines.ranks).for_each(|rank| timelines.write_samples(folder.path(), rank, 20_000_000_000).unwrap());
    let (out, text) = generate(folder.path(), &[]);
    assert!(text.contains("4 ranks on 1 node, 0 operations, 12 slices"), "{text}");
    let trace = fs::read(out.path().join("trace_job.bin")).unwrap();
    let has = |name: &str| trace.windows(name.len()).any(|bytes| bytes == name.as_bytes());
    assert!(has("evaluate (metrics.py)") && has("host: MainThread (sampled)"));
}

#[test]
fn a_folder_without_timelines_is_an_error() {
    let empty = tempfile::tempdir().unwrap();
    let mut command = Command::new(artifacts().bin("xpu_timer_gen_trace_timeline"));
    let output = command.arg("--path").arg(empty.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("has no timeline"));
    let usage =
        Command::new(artifacts().bin("xpu_timer_gen_trace_timeline")).args(["--groups", "4tp"]).output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}
