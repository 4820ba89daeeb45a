//! `/metrics` of a real job on the simulated device: names, labels and values, checked by promtool,
//! scraped by a real Prometheus, and judged by DLRover's own diagnosis.
//!
//! Debian's Prometheus and PyPI's DLRover are found, or unpacked under `target`. Nothing is
//! installed into the machine, because the package would start a service of its own.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, compile_c, http, skip, tree, wait_until};

/// One line of a page without its name: labels and value.
#[derive(Debug, Clone)]
pub struct Sample {
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Sample {
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

pub fn page(job: &Job) -> String {
    http("GET", job.port + 1, "/metrics").expect("the metrics endpoint answers").1
}

/// The samples of a page whose name is `name`. No label value of these jobs has a quote or a comma
/// in it.
pub fn samples(page: &str, name: &str) -> Vec<Sample> {
    let of_name = page.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    of_name
        .map(|line| {
            let (head, value) = line.rsplit_once(' ').expect("a value");
            let labels = head.split_once('{').map_or("", |(_, labels)| labels.trim_end_matches('}'));
            let pairs = labels.split(',').filter_map(|pair| pair.split_once('='));
            Sample {
                labels: pairs.map(|(name, value)| (name.into(), value.trim_matches('"').into())).collect(),
                value: value.parse().unwrap_or_else(|_| panic!("no number: {line}")),
            }
        })
        .collect()
}

fn job() -> Job {
    Job::new()
        .with("XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL", "1")
        .with("XPU_TIMER_DEREGISTER_TIME", "3")
        .with("XPU_TIMER_JOB", "measured")
}

const COLLECTIVES: [&str; 5] = ["AVG_LATENCY", "MAX_LATENCY", "P99_LATENCY", "MIN_LATENCY", "BANDWIDTH"];

/// Waits until every rank has a series of its all-reduces.
fn wait_measured(job: &Job, ranks: usize) -> String {
    let mut text = String::new();
    wait_until(PATIENCE, "every rank has its series", || {
        text = http("GET", job.port + 1, "/metrics").map(|answer| answer.1).unwrap_or_default();
        let series = samples(&text, "XPU_TIMER_COLL_KERNEL_BANDWIDTH");
        let of_rank = |rank: usize| series.iter().any(|sample| sample.label("rank") == rank.to_string());
        (0..ranks).all(of_rank)
    });
    text
}

#[test]
fn a_job_is_measured_with_the_names_labels_and_units_of_the_original_tool() {
    let job = job();
    let mut ranks = job.train(2, &["--step-ms=5", "--seconds=600"]);
    ranks.wait_for("step 20 ", PATIENCE);
    wait_measured(&job, 2);
    // The page shows a launch from the next look on.
    let mut text = String::new();
    wait_until(PATIENCE, "twenty steps are on the page", || {
        text = page(&job);
        let launched = samples(&text, "xpu_timer_kernels_launched_total");
        launched.len() == 2 && launched.iter().all(|sample| sample.value >= 9.0 * 20.0)
    });

    let common = ["ip", "job_name", "local_rank", "pod_name", "rank"];
    let mut expected: Vec<&str> =
        common.into_iter().chain(["algorithm", "dtype", "level", "operation", "small", "transport"]).collect();
    expected.sort_unstable();
    let all: Vec<Vec<Sample>> =
        COLLECTIVES.iter().map(|part| samples(&text, &format!("XPU_TIMER_COLL_KERNEL_{part}"))).collect();
    for sample in all.iter().flatten() {
        assert_eq!(sample.labels.keys().map(String::as_str).collect::<Vec<_>>(), expected, "{sample:?}");
    }
    // 1,024 floats: 2 ranks put them on the bus once, and that is not small any more.
    let reduces = |samples: &[Sample]| {
        let of_four_bytes = |sample: &&Sample| sample.label("dtype") == "fp32" && sample.label("small") == "0";
        samples.iter().filter(of_four_bytes).find(|sample| sample.label("rank") == "1").cloned()
    };
    let [average, max, p99, min, bandwidth] =
        [0, 1, 2, 3, 4].map(|part| reduces(&all[part]).unwrap_or_else(|| panic!("{}: {text}", COLLECTIVES[part])));
    assert_eq!(average.label("operation"), "AllReduce");
    assert_eq!(average.label("algorithm"), "RING_LL", "the kernel's name tells it");
    assert_eq!((average.label("transport"), average.label("local_rank")), ("IntraNode", "1"));
    assert_eq!(
        (average.label("job_name"), average.label("pod_name"), average.label("ip")),
        ("measured", "NOT_SET", "NOT_SET")
    );
    assert!(0.0 < min.value && min.value <= average.value && average.value <= max.value, "{min:?} {average:?} {max:?}");
    assert!(min.value <= p99.value && p99.value <= max.value, "{p99:?}");
    // Latency is device time in microseconds, and bandwidth is bits over it, of the same
    // operations.
    let gbps = 1024.0 * 32.0 / 1e3 / average.value;
    assert!((bandwidth.value / gbps - 1.0).abs() < 0.02, "{bandwidth:?}, {gbps} of {average:?}");

    for (name, least) in
        [("xpu_timer_kernels_launched_total", 9.0 * 20.0), ("xpu_timer_collectives_launched_total", 20.0)]
    {
        let counted = samples(&text, name);
        assert!(counted.len() == 2 && counted.iter().all(|sample| sample.value >= least), "{counted:?}");
    }
    for name in
        ["xpu_timer_operations_dropped_total", "xpu_timer_operations_missed_total", "xpu_timer_hook_panics_total"]
    {
        assert!(samples(&text, name).iter().all(|sample| sample.value == 0.0), "{text}");
    }
    for part in ["HANG", "START_DUMP", "END_DUMP", "POOL_QUEUE_SIZE", "WORK_QUEUE_SIZE"] {
        let gauge = samples(&text, &format!("XPU_TIMER_COMMON_{part}"));
        assert_eq!(gauge.len(), 2, "{part}: {text}");
        assert!(gauge.iter().all(|sample| sample.labels.len() == common.len()), "{gauge:?}");
    }
    let memory = samples(&text, "XPU_TIMER_MEMORY_COUNTER");
    let of = |operation: &str, kind: &str| {
        memory
            .iter()
            .any(|sample| sample.label("operation") == operation && sample.label("kind") == kind && sample.value > 0.0)
    };
    assert!(of("cudaMalloc", ""), "{memory:?}");
    match promtool() {
        // The one thing that is not by the conventions is a name that is kept.
        Ok(promtool) => {
            let kept = "exit status: 3: XPU_TIMER_MEMORY_COUNTER metric name should not include type 'counter'\n";
            assert_eq!(check(&promtool, &text), kept, "{text}");
        }
        Err(reason) => skip(&reason),
    }
}

/// Matrix products and copies on the simulated device, until it is killed.
const PRODUCTS: &str = r#"
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaStreamSynchronize(void *);
int cublasCreate_v2(void **);
int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);

int main(void) {
    enum { SIZE = 48 };
    static float host[SIZE * SIZE];
    void *handle, *a, *b, *c;
    float one = 1, zero = 0;
    int code = cublasCreate_v2(&handle) | cudaMalloc(&a, sizeof host) | cudaMalloc(&b, sizeof host) | cudaMalloc(&c, sizeof host);
    for (int step = 0; code == 0; step++) {
        code |= cudaMemcpyAsync(a, host, sizeof host, 1, NULL);
        code |= cublasSgemm_v2(handle, 0, 1, SIZE, SIZE, SIZE, &one, a, SIZE, b, SIZE, &zero, c, SIZE);
        code |= cudaMemcpyAsync(host, c, sizeof host, 2, NULL) | cudaStreamSynchronize(NULL);
        if (step == 20) puts("step 20"), fflush(stdout);
        usleep(2000);
    }
    printf("failed with %d\n", code);
    return 1;
}
"#;

/// The program of matrix products, compiled for a job.
fn products(job: &Job) -> PathBuf {
    let sim = format!("-L{}", artifacts().sim().display());
    compile_c(&job.dir, "products", PRODUCTS, &[&sim, "-l:libcublas.so.13", "-l:libcudart.so.13"])
}

#[test]
fn processes_without_a_rank_have_series_of_their_own() {
    let job = job();
    let program = products(&job);
    let mut all: Vec<Process> = (0..2).map(|_| Process::spawn(&mut job.launch(&program))).collect();
    all.iter_mut().for_each(|process| process.wait_for("step 20", PATIENCE));
    wait_until(PATIENCE, "both are registered", || page(&job).contains("\nxpu_timer_ranks 2\n"));
    let text = page(&job);
    let hang = samples(&text, "XPU_TIMER_COMMON_HANG");
    let mut pids: Vec<String> = hang.iter().map(|sample| sample.label("pid").to_string()).collect();
    let mut expected: Vec<String> = all.iter().map(|process| process.pid().to_string()).collect();
    pids.sort();
    expected.sort();
    assert_eq!(pids, expected, "{text}");
    let mut lines: Vec<&str> = text.lines().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
    let all_lines = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), all_lines, "no sample is there twice: {text}");
}

#[test]
fn matrix_products_and_copies_are_measured() {
    let job =
        job().with("XPU_TIMER_BRACKET", "matmuls").with("XPU_TIMER_DEVICE_NAME", "V100").with("POD_NAME", "pod-7");
    let mut command = job.launch(products(&job));
    let mut program = Process::spawn(command.env("RANK", "0").env("WORLD_SIZE", "1"));
    program.wait_for("step 20", PATIENCE);
    let mut text = String::new();
    wait_until(PATIENCE, "the products have their series", || {
        text = page(&job);
        !samples(&text, "XPU_TIMER_MM_KERNEL_FLOPS").is_empty()
    });
    let one = |part: &str| {
        let found = samples(&text, &format!("XPU_TIMER_MM_KERNEL_{part}"));
        assert_eq!(found.len(), 1, "{part}: {text}");
        found[0].clone()
    };
    let (average, tflops) = (one("AVG_LATENCY"), one("FLOPS"));
    let labels: Vec<&str> = tflops.labels.keys().map(String::as_str).collect();
    let common = ["dtype", "ip", "job_name", "level", "local_rank", "operation", "pod_name", "rank"];
    assert_eq!(labels, common, "{tflops:?}");
    assert_eq!((tflops.label("dtype"), tflops.label("operation"), tflops.label("level")), ("fp32", "Matmul", "1"));
    assert_eq!(tflops.label("pod_name"), "pod-7");
    // Two operations for each of 48 x 48 x 48 terms.
    let expected = 2.0 * 48f64.powi(3) / average.value / 1e6;
    assert!(
        (tflops.value / expected - 1.0).abs() < 0.05 || (tflops.value - expected).abs() < 2e-6,
        "{tflops:?} {expected}"
    );

    // Count and bytes are two words that the rank is just adding to: now and then a look falls
    // between them.
    wait_until(PATIENCE, "the copies are counted with their bytes", || {
        text = page(&job);
        let memory = samples(&text, "XPU_TIMER_MEMORY_COUNTER");
        let bytes = samples(&text, "xpu_timer_copied_bytes_total");
        ["H2D", "D2H"].iter().all(|kind| {
            let of_kind = |sample: &&Sample| sample.label("kind") == *kind;
            let copies = memory.iter().filter(|sample| sample.label("operation") == "cudaMemcpyAsync").find(of_kind);
            let bytes = bytes.iter().find(of_kind).map_or(0.0, |sample| sample.value);
            copies.is_some_and(|copies| copies.value >= 20.0 && bytes == copies.value * 48.0 * 48.0 * 4.0)
        })
    });
    let allocated = samples(&text, "xpu_timer_allocated_bytes_total");
    assert_eq!(allocated[0].value, 3.0 * 48.0 * 48.0 * 4.0, "{allocated:?}");
}

#[test]
fn a_silent_series_expires_and_its_rank_stays() {
    let job = job().with("XPU_TIMER_HANG_TIMEOUT", "600").with("XPU_TIMER_IDLE_TIMEOUT", "0");
    let _ranks = job.train(2, &["--step-ms=5", "--fault=loader", "--fault-rank=1", "--fault-step", "60"]);
    wait_measured(&job, 2);
    wait_until(PATIENCE, "the series are gone", || !page(&job).contains("\nXPU_TIMER_COLL_KERNEL_"));
    let text = page(&job);
    assert_eq!(samples(&text, "XPU_TIMER_COMMON_HANG").len(), 2, "{text}");
    let launched = samples(&text, "xpu_timer_collectives_launched_total");
    assert!(launched.len() == 2 && launched.iter().all(|sample| sample.value > 0.0), "{launched:?}");
    // The rank that waits for its peer has one operation that does not complete.
    let waiting: f64 = samples(&text, "XPU_TIMER_COMMON_WORK_QUEUE_SIZE").iter().map(|sample| sample.value).sum();
    assert!(waiting >= 1.0, "{text}");
}

#[test]
fn a_real_prometheus_scrapes_the_job() {
    let job = job();
    let _ranks = job.train(2, &["--step-ms=5", "--seconds=600"]);
    wait_measured(&job, 2);
    let prometheus = match Prometheus::start(&job) {
        Ok(prometheus) => prometheus,
        Err(reason) => return skip(&reason),
    };
    let value = |query: &str| -> Vec<(String, String)> {
        let answer = prometheus.query(query);
        let results = answer["data"]["result"].as_array().cloned().unwrap_or_default();
        let pick = |result: &Value| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
            (text(&result["metric"]["rank"]), text(&result["value"][1]))
        };
        let mut found: Vec<(String, String)> = results.iter().map(pick).collect();
        found.sort();
        found
    };
    wait_until(PATIENCE, "the job is scraped", || value("up{job=\"xpu_timer\"}").iter().any(|(_, up)| up == "1"));
    let both = |value: &str| ["0", "1"].map(|rank| (rank.to_string(), value.to_string())).to_vec();
    wait_until(PATIENCE, "the ranks are healthy", || value("XPU_TIMER_COMMON_HANG") == both("0"));
    wait_until(PATIENCE, "the bandwidth is there", || {
        let found = value("max by (rank) (XPU_TIMER_COLL_KERNEL_BANDWIDTH{operation=\"AllReduce\"})");
        found.len() == 2 && found.iter().all(|(_, gbps)| gbps.parse::<f64>().is_ok_and(|gbps| gbps > 0.0))
    });
    let rate = "rate(xpu_timer_kernels_launched_total[30s]) > 0";
    wait_until(PATIENCE, "counters are counters", || value(rate).len() == 2);
}

/// DLRover's judge reads pages over five minutes: what it is given are pages of this job, one of
/// each state, at such times.
#[test]
fn dlrovers_diagnosis_distinguishes_a_hung_job_from_a_healthy_one() {
    let python = match dlrover_python() {
        Ok(python) => python,
        Err(reason) => return skip(&reason),
    };
    let job = job().with("XPU_TIMER_HANG_TIMEOUT", "3");
    let judge = |state: &str| {
        let mut command = job.command(&python);
        command.arg(tree().join("tests/tests/it/metrics/judge.py")).arg(state);
        let output = Process::spawn(command.env("XPU_TIMER_PORT", (job.port + 1).to_string()).env("NO_PROXY", "*"))
            .wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}\n{}", output.stdout, output.stderr);
        output.stdout.lines().last().unwrap_or_default().to_string()
    };
    let mut collector = Process::spawn(job.command(artifacts().bin("xpu_timer_collector")).arg("node"));
    wait_until(PATIENCE, "the collector listens", || collector.stderr().contains("listening on"));
    assert_eq!(judge("empty"), "healthy", "a node on which no rank runs is not hung");
    let mut ranks = job.train(2, &["--step-ms=5", "--fault=loader", "--fault-rank=1", "--fault-step", "400"]);
    ranks.wait_for("step 20 ", PATIENCE);
    assert_eq!(judge("healthy"), "healthy");
    let _ = job.wait_incident(1, Duration::from_secs(90));
    let text = page(&job);
    for part in ["HANG", "START_DUMP", "END_DUMP"] {
        let values: Vec<f64> =
            samples(&text, &format!("XPU_TIMER_COMMON_{part}")).iter().map(|sample| sample.value).collect();
        // The dump takes its sample interval of two seconds and a little more.
        let range = if part == "END_DUMP" { 2.0..=20.0 } else { 1.0..=1.0 };
        assert!(values.len() == 2 && values.iter().all(|value| range.contains(value)), "{part}: {text}");
    }
    assert_eq!(judge("hung"), "hung");
    drop(ranks);
    collector.signal(nix::sys::signal::Signal::SIGTERM);
    wait_until(PATIENCE, "the collector ends", || collector.try_wait().is_some());
}

/// Debian's promtool.
fn promtool() -> Result<PathBuf, String> {
    Ok(debian()?.join("promtool"))
}

/// A program of Debian's package `prometheus`.
fn debian() -> Result<PathBuf, String> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let find = || {
        let installed = PathBuf::from("/usr/bin");
        if installed.join("prometheus").exists() && installed.join("promtool").exists() {
            return Ok(installed);
        }
        once("prometheus", "bin-ready", |folder| {
            run(Command::new("apt-get").args(["update", "-qq"]))?;
            run(Command::new("apt-get").args(["download", "-qq", "prometheus"]).current_dir(folder))?;
            let packages = fs::read_dir(folder).map_err(|error| error.to_string())?.flatten().map(|entry| entry.path());
            let package = packages.filter(|path| path.extension().is_some_and(|name| name == "deb")).last();
            let package = package.ok_or("apt-get download left no package")?;
            run(Command::new("dpkg-deb").arg("-x").arg(package).arg(folder))
        })
        .map(|folder| folder.join("usr/bin"))
    };
    FOLDER.get_or_init(find).clone().map_err(|error| format!("no prometheus: {error}"))
}

/// The Python of a virtual environment that has dlrover.
fn dlrover_python() -> Result<PathBuf, String> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let find = || {
        let folder = once("dlrover-venv", "k8s-ready", |folder| {
            run(Command::new(xpu_timer_tests::python()).args(["-m", "venv"]).arg(folder))?;
            run(Command::new(folder.join("bin/pip")).args(["install", "--quiet", "dlrover[k8s]"]))
        })?;
        Ok(folder.join("bin/python"))
    };
    PYTHON.get_or_init(find).clone().map_err(|error: String| format!("no dlrover: {error}"))
}

/// A folder under `target` that the first test sets up.
fn once(name: &str, mark: &str, set_up: impl FnOnce(&Path) -> Result<(), String>) -> Result<PathBuf, String> {
    let folder = tree().join("target").join(name);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let lock = fs::File::create(folder.join(".lock")).map_err(|error| error.to_string())?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error.to_string())?;
    if !folder.join(mark).exists() {
        set_up(&folder)?;
        fs::write(folder.join(mark), "").map_err(|error| error.to_string())?;
    }
    Ok(folder)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    let last = words.trim_end().lines().next_back().unwrap_or_default().to_string();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {last}")) }
}

/// The problems that promtool finds in a page; empty when it is valid and follows the conventions.
fn check(promtool: &Path, page: &str) -> String {
    let mut command = Command::new(promtool);
    let mut child = command
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    child.stdin.take().expect("stdin is piped").write_all(page.as_bytes()).expect("promtool reads");
    let output = child.wait_with_output().expect("promtool ends");
    let words = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if output.status.success() { words } else { format!("{}: {words}", output.status) }
}

/// A Prometheus for one job, on its own port; it ends with the job.
struct Prometheus {
    port: u16,
    _process: Process,
}

impl Prometheus {
    /// Starts it and waits until it is ready.
    fn start(job: &Job) -> Result<Self, String> {
        let program = debian()?.join("prometheus");
        let port = job.spare_port();
        let config = job.dir.join("prometheus.yml");
        let target = job.port + 1;
        let text = format!(
            "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: xpu_timer\n    static_configs:\n      - targets: \
             ['127.0.0.1:{target}']\n"
        );
        fs::write(&config, text).map_err(|error| error.to_string())?;
        let mut command = job.command(program);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", job.dir.join("tsdb").display()));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let process = Process::spawn(&mut command);
        wait_until(PATIENCE, "Prometheus is ready", || {
            http("GET", port, "/-/ready").is_ok_and(|(status, _)| status == 200)
        });
        Ok(Prometheus { port, _process: process })
    }

    /// The answer to an instant query.
    fn query(&self, query: &str) -> Value {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let (_, body) = http("GET", self.port, &format!("/api/v1/query?query={encoded}")).expect("Prometheus answers");
        serde_json::from_str(&body).expect("JSON")
    }
}
