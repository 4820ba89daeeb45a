"""Runs xpu_timer on a real GPU: healthy programs with and without it, and hangs.

    python3 tests/gpu/run.py --package target/dist/xpu_timer --out OUT [case ...]

`--package` is the unpacked archive of `cargo xtask dist`. The cases of torch need a PyTorch for
CUDA in the running Python, and `native` needs nvcc. Prints a line for each case, and writes
verdicts, metrics and stacks to OUT. The exit status is 1 when a case failed. `docs/gpu.md` has the
results.
"""

import argparse
import concurrent.futures
import glob
import gzip
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import urllib.request
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.join(os.path.dirname(HERE), "examples")
MARK = "XPU_TIMER_GPU_CASE"
HANG_TIMEOUT = 8
EVERYTHING = {
    "XPU_TIMER_BRACKET": "all",
    "XPU_TIMER_HOST_TRACING_FUNC": "torch.cuda@synchronize",  # and the default ones
    "XPU_TIMER_DUMP_STACK_COUNT": "1000",
    "XPU_TIMER_SIGNAL_HANDLER": "1",
}


@dataclass
class Hang:
    """A job that hangs: its program and what the verdict must say."""

    name: str
    command: list
    causes: set
    culprits: str
    contains: list = field(default_factory=list)
    variables: dict = field(default_factory=dict)


@dataclass
class Healthy:
    """A program whose output and exit status must not change under xpu_timer."""

    name: str
    command: list
    repeat: int = 1
    status: int = 0
    variables: dict = field(default_factory=dict)
    toggled: bool = False  # every kernel is recorded for a second, again and again


def ranks(count, *arguments):
    program = os.path.join(HERE, "ranks.py")
    return [sys.executable, os.path.join(EXAMPLES, "run_ranks.py"), f"--nproc={count}", program, *arguments]


def workload(name):
    return [sys.executable, os.path.join(HERE, "workloads.py"), name]


def hangs():
    user = ["ranks.py"]
    torch = [
        ("kernel", {"kernel_hang"}, "1", ["spin_kernel"]),
        ("absent", {"missing_rank", "storage_io"}, "1", ["read_shard", *user]),
        ("lock", {"host_lock"}, "1", ["wait_for_own_lock", *user]),
        ("killed", {"process_dead"}, "1", ["SIGKILL"]),
        ("stopped", {"process_stopped"}, "1", []),
        ("raise", {"process_dead"}, "1", ["exit code 1"]),
        ("memory", {"process_dead", "teardown"}, "1", []),
        ("order", {"op_mismatch"}, "1", ["broadcast"]),
        ("size", {"size_mismatch"}, "1", ["512"]),
        ("skip", {"op_mismatch", "count_mismatch", "missing_rank"}, "1", []),
        ("receive", {"p2p_unmatched", "missing_rank"}, "1", ["go_wrong"]),
        ("subgroup", {"missing_rank", "storage_io"}, "1", ["read_shard"]),
        ("init", {"comm_init", "missing_rank", "storage_io"}, "1", ["read_shard"]),
        ("graph", {"missing_rank", "storage_io"}, "1", ["read_shard"]),
    ]
    cases = [Hang(f"torch-{fault}", ranks(3, "--fault", fault), *rest) for fault, *rest in torch]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", os.path.join(HERE, "ranks.py")]
    cases.append(Hang("torchrun-absent", [*torchrun, "--fault", "absent"], {"missing_rank", "storage_io"}, "1", ["read_shard"]))
    for mode in ("sync", "stream", "event", "copy", "free", "queue", "graph", "host", "query"):
        linked = "static" if mode in ("sync", "queue", "graph") else "shared"
        # `query` polls the driver without success, and no call shows that it waits.
        expected = {"unknown"} if mode == "query" else {"kernel_hang"}
        named = ["wait_for_flag"] if mode in ("sync", "stream", "event", "copy", "free") else []
        # Without a rank, a recorded operation or a blocked watcher, a job that only waits for its
        # device counts as idle, unless this variable is set.
        silent = {"XPU_TIMER_IDLE_TIMEOUT": str(2 * HANG_TIMEOUT)} if mode in ("sync", "stream", "event", "host", "query") else {}
        cases.append(Hang(f"native-{mode}", [f"native-{linked}", mode], expected, "", named, silent))
    handled = {"XPU_TIMER_SIGNAL_HANDLER": "1"}
    cases.append(Hang("torch-segv", ranks(3, "--fault", "segv"), {"process_dead"}, "1", ["SIGSEGV"], handled))
    proven = ["wait_for_flag", "pending_operation"]
    cases.append(Hang("native-bracketed", ["native-static", "sync"], {"kernel_hang"}, "0", proven, {"XPU_TIMER_BRACKET": "all"}))
    return cases


def healthy():
    cases = [Healthy(f"native-{linked}", [f"native-{linked}", "healthy"]) for linked in ("static", "shared")]
    names = ["workers", "shared", "error", "out_of_memory", "allocator", "profiler", "jax", "cupy", "lightning"]
    cases += [Healthy(name, workload(name), status=7 if name == "error" else 0) for name in names]
    cases += [Healthy(name, workload(name)) for name in ("triton", "numba", "generate")]
    cases.append(Healthy("torch-ranks", ranks(2, "--steps", "10")))
    everything = ("workers", "error", "allocator", "profiler", "jax", "cupy", "numba", "generate", "captured", "green", "segments")
    cases += [Healthy(f"all-{name}", workload(name), status=7 if name == "error" else 0, variables=EVERYTHING) for name in everything]
    cases.append(Healthy("variety", ranks(2, "--steps", "2", "--variety")))
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    nonblocking = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    for name, variables in (("all", {}), ("one-queue", one_queue), ("nonblocking", nonblocking)):
        # PyTorch 2.11 cannot abort a group of nonblocking communicators.
        options = ["--steps", "10", *(["--variety"] if variables is not nonblocking else [])]
        command = ["env", *(f"{variable}={value}" for variable, value in variables.items()), *ranks(2, *options)]
        cases.append(Healthy(f"{name}-torch-ranks", command, variables=EVERYTHING))
    cases += [Healthy(f"all-native-{linked}", [f"native-{linked}", "healthy"], variables=EVERYTHING) for linked in ("static", "shared")]
    cases.append(Healthy("toggled-captured", workload("captured"), toggled=True))
    cases.append(Healthy("toggled-transformer", workload("transformer"), toggled=True))
    bracketed = {"XPU_TIMER_BRACKET": "all"}
    paced = ["native-static", "paced", "2"]
    cases.append(Healthy("paced", paced, repeat=5))
    cases.append(Healthy("bracketed-paced", paced, repeat=5, variables=bracketed))
    cases.append(Healthy("launches", workload("launches"), repeat=4))
    cases.append(Healthy("transformer", workload("transformer"), repeat=2))
    cases.append(Healthy("bracketed-transformer", workload("transformer"), repeat=2, variables=bracketed))
    return cases


class Place:
    """The folders, ports and environment of one run. Its processes end with it."""

    taken = 0
    guard = threading.Lock()

    def __init__(self, name, options):
        with Place.guard:
            number = Place.taken
            Place.taken += 1
        self.dir = os.path.join(options.out, "work", name)
        shutil.rmtree(self.dir, ignore_errors=True)
        for folder in ("timeline", "log"):
            os.makedirs(os.path.join(self.dir, folder))
        self.sockets = tempfile.mkdtemp(prefix="xpu")
        self.port = 20000 + 40 * number
        self.mark = f"{os.getpid()}-{number}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XPU_TIMER_")},
            "PATH": f"{options.package}:{options.built}:{os.environ['PATH']}",
            "TMPDIR": self.sockets,
            "XPU_TIMER_TIMELINE_PATH": os.path.join(self.dir, "timeline"),
            "XPU_TIMER_LOGGING_DIR": os.path.join(self.dir, "log"),
            "XPU_TIMER_BASEPORT": str(self.port),
            "XPU_TIMER_HANG_TIMEOUT": str(HANG_TIMEOUT),
            "XPU_TIMER_SAMPLE_INTERVAL": "1",
            "XPU_TIMER_LINGER": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port + 20),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(options.out, "work", "inductor"),
            "TRITON_CACHE_DIR": os.path.join(options.out, "work", "triton"),
            MARK: self.mark,
        }

    def start(self, command, launched=True, **streams):
        words = ["xpu_timer_launch", *command] if launched else command
        path = shutil.which(words[0], path=self.environment["PATH"])
        if path is None:
            raise FileNotFoundError(words[0])
        return subprocess.Popen([path, *words[1:]], env=self.environment, start_new_session=True, text=True, **streams)

    def incident(self):
        latest = os.path.join(self.dir, "timeline", "latest")
        try:
            with open(os.path.join(latest, "verdict.json")) as file:
                return json.load(file)
        except (OSError, ValueError):
            return None

    def fetch(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 1}{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError as problem:
            return f"# {problem}\n"

    def end(self):
        mark = f"{MARK}={self.mark}".encode()
        for _ in range(100):
            left = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in environment_of(pid)]
            if not left:
                break
            for pid in left:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.1)
        shutil.rmtree(self.sockets, ignore_errors=True)


def environment_of(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def run_hang(case, options):
    place = Place(case.name, options)
    streams = {name: open(os.path.join(place.dir, name), "w") for name in ("stdout", "stderr")}
    place.environment.update(case.variables)
    begun = time.monotonic()
    try:
        process = place.start(case.command, **streams)
        verdict, until = None, begun + options.patience
        while verdict is None and time.monotonic() < until:
            time.sleep(0.1)
            verdict = place.incident()
            if process.poll() is not None:
                until = min(until, time.monotonic() + 5)
        seconds = time.monotonic() - begun
        if verdict is None:
            ended = process.poll()
            return False, f"no verdict within {seconds:.0f} s (exit status {ended}): {tail(place.dir, 'stderr')}"
        time.sleep(1)  # report.html and the SVG are written after the verdict
        with open(os.path.join(place.dir, "metrics"), "w") as file:
            file.write(place.fetch("/metrics"))
    finally:
        place.end()
        for stream in streams.values():
            stream.close()
    return judge(case, verdict, seconds)


def judge(case, verdict, seconds):
    culprits = ",".join(str(rank) for rank in verdict["culprits"])
    text = json.dumps(verdict)
    problems = [] if verdict["cause"] in case.causes else [f"cause is not {' or '.join(sorted(case.causes))}"]
    if case.culprits not in ("", culprits):
        problems.append(f"culprits are not {case.culprits}")
    problems += [f"no {part!r}" for part in case.contains if part not in text]
    times = f"after {seconds:.0f} s, {verdict['seconds_from_timeout']} s after the timeout; hook {verdict['hook']}"
    said = f"{verdict['cause']} ({verdict['confidence']}) culprits {culprits or '-'} {times}: {verdict['sentence']}"
    return not problems, "; ".join([*problems, said])


def tail(folder, name):
    with open(os.path.join(folder, name), errors="replace") as file:
        return file.read()[-600:].replace("\n", " | ")


def run_healthy(case, options):
    """Runs it in turn without and with xpu_timer, and compares what it said."""
    said, measured, folders, fetched, lasted = {}, {False: [], True: []}, [], [], {False: [], True: []}
    for turn in range(2 * case.repeat):
        launched = turn % 2 == 1
        place = Place(f"{case.name}-{turn}", options)
        if launched:
            place.environment.update(case.variables)
        try:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            begun = time.monotonic()
            process = place.start(case.command, launched, **streams)
            toggling = threading.Thread(target=toggle, args=(place, process, fetched))
            if case.toggled and launched:
                toggling.start()
            try:
                out, err = process.communicate(timeout=options.patience)
                ended = time.monotonic()
            except subprocess.TimeoutExpired:
                return False, f"{'with' if launched else 'without'} xpu_timer it did not end"
            finally:
                if toggling.is_alive():
                    toggling.join()
            if place.incident() is not None:
                folders.append(place.incident()["sentence"])
        finally:
            place.end()
        lasted[launched].append(f"{ended - begun:.1f}")
        lines = out.splitlines()
        for line in lines:
            if line.startswith("MEASURED"):
                _, name, value = line.split()
                measured[launched].append((name, float(value)))
        lines = sorted(line for line in lines if not line.startswith("MEASURED"))
        said.setdefault(launched, (process.returncode, lines, sorted(without_numbers(err))))
    problems = [f"an incident: {sentence}" for sentence in folders]
    if said[False][0] != case.status:
        problems.append(f"without xpu_timer its status is not {case.status}: {sorted(said[False][2])[-3:]}")
    if said[True][:2] != said[False][:2]:
        problems.append(f"with xpu_timer {said[True][:2]}, without {said[False][:2]}")
    extra = [line for line in said[True][2] if line not in said[False][2]]
    if extra:
        problems.append(f"stderr has {extra[:3]}")
    figures = f"; {', '.join(lasted[False])} -> {', '.join(lasted[True])} s"
    for name in dict.fromkeys(name for name, _ in measured[True]):
        values = {launched: sorted(value for own, value in measured[launched] if own == name) for launched in (False, True)}
        figures += f"; {name} {values[False]} -> {values[True]}, the best {values[True][0] / values[False][0]:.4f} times"
    if case.toggled and not any(fetched):
        problems.append("no timeline was fetched")
    if case.toggled:
        figures += f"; {len(fetched)} times toggled, operations {fetched}"
    return not problems, "; ".join([*problems, f"status {said[True][0]} {said[True][1][-2:]}{figures}"])


def toggle(place, process, fetched):
    """Records every kernel for a second, again and again, until the process ends."""
    while process.poll() is None:
        folder, _ = timeline(place, 1)
        fetched.append(sum(os.path.getsize(path) for path in glob.glob(f"{folder}/*.ops")) if folder else 0)
        time.sleep(0.5)


def timeline(place, seconds, kernels="all"):
    """The folder with timelines, or None and the error.

    Of `all` kernels in the next seconds, or of what was `recorded` in the last ones.
    """
    command = ["xpu_timer_collector", "timeline", "--seconds", str(seconds), "--kernels", kernels, "--output", place.dir]
    done = place.start(command, launched=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = done.communicate(timeout=60 + seconds)
    return (out.split()[-1], "") if done.returncode == 0 else (None, err)


def trace_of(place, folder):
    """The complete events of the first rank of a timeline, and the command's output."""
    command = ["xpu_timer_gen_trace_timeline", "--path", folder, "--output", "case", "--chrome"]
    done = subprocess.run(command, env=place.environment, cwd=place.dir, capture_output=True, text=True, timeout=60)
    paths = sorted(glob.glob(f"{place.dir}/**/rank*.json.gz", recursive=True))
    if not paths:
        raise RuntimeError(f"no trace: {done.stderr}")
    with gzip.open(paths[0]) as file:
        return events_of(json.load(file)), done.stdout


def events_of(trace):
    """Name, category, start and end of the complete events of a Chrome trace."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    times = [(round(float(event["ts"]) * 1000) + base, round(float(event["dur"]) * 1000)) for event in events]
    return [(event["name"], event.get("cat", ""), start, start + length, event.get("args", {})) for event, (start, length) in zip(events, times)]


def without_numbers(text):
    """Lines of stderr that can be compared: without addresses, pids and times."""
    return {re.sub(r"0x[0-9a-f]+|\d+", "N", line) for line in text.splitlines()}


def run_matmul(options):
    """The rate that the metrics give for products whose rate the program measures itself."""
    place = Place("matmul", options)
    try:
        process = place.start(workload("matmul"), stdout=subprocess.PIPE)
        scraped = ""
        while process.poll() is None:
            time.sleep(1)
            text = place.fetch("/metrics")
            scraped = text if "XPU_TIMER_MM_KERNEL_FLOPS{" in text else scraped
        out = process.stdout.read()
    finally:
        place.end()
    with open(os.path.join(options.out, "metrics.txt"), "w") as file:
        file.write(scraped)
    own = float(re.search(r"MEASURED \S+ (\S+)", out)[1])
    rates = [float(line.split()[-1]) for line in scraped.splitlines() if line.startswith("XPU_TIMER_MM_KERNEL_FLOPS{")]
    # The first products, which load the library, have a series of their own level.
    held = bool(rates) and abs(max(rates) / own - 1) < 0.05
    return held, f"the program measured {own} TFLOP/s, XPU_TIMER_MM_KERNEL_FLOPS says {rates}"


def spread(values):
    ordered = sorted(values)
    at = [ordered[int(part * (len(ordered) - 1))] / 1000 for part in (0, 0.01, 0.5, 0.99, 1)]
    return "least {:.1f}, 1 % {:.1f}, median {:.1f}, 99 % {:.1f}, most {:.1f} us".format(*at)


def run_clock(options):
    """Start and end of kernels in the trace, against what the host saw of them."""
    place = Place("clock", options)
    try:
        process = place.start(["native-shared", "clock", "16"], stdout=subprocess.PIPE)
        time.sleep(2)
        folder, problem = timeline(place, 12)
        if folder is None:
            return False, problem
        seen = [[int(part) for part in line.split()[1:]] for line in process.communicate(timeout=60)[0].splitlines() if line.startswith("KERNEL")]
        events = [event for event in trace_of(place, folder)[0] if "until_released" in event[0] and event[1] == "kernel"]
    finally:
        place.end()
    started, ended = [], []
    for _, _, start, end, _ in events:
        nearest = min(seen, key=lambda known: abs(known[2] - end))
        if abs(nearest[2] - end) < 5_000_000:
            # A time outside the window in which the host saw it is an error.
            started.append(start - nearest[1] if start > nearest[1] else min(0, start - nearest[0]))
            ended.append(end - nearest[3] if end > nearest[3] else min(0, end - nearest[2]))
    if len(started) < 300:
        return False, f"only {len(started)} of {len(seen)} kernels are in the trace, {len(events)} events"
    close = sum(abs(error) <= 10_000 for error in started + ended) / len(started + ended)
    return close >= 0.99, f"{len(started)} of {len(seen)} kernels; start {spread(started)}; end {spread(ended)}; within 10 us: {close:.4f}"


def run_profiled(options):
    """Kernels of a training in our trace and in that of torch's profiler."""
    place = Place("profiled", options)
    profile = place.environment["PROFILE"] = os.path.join(place.dir, "profile.json")
    place.environment["XPU_TIMER_BRACKET"] = "all"
    try:
        process = place.start(workload("profiled"), stdout=subprocess.DEVNULL)
        while process.poll() is None and not os.path.exists(profile):
            time.sleep(0.2)
        time.sleep(2)
        folder, problem = timeline(place, 60, "recorded")
        if folder is None:
            return False, problem
        own, said = trace_of(place, folder)
        process.wait(timeout=60)
        with open(profile) as file:
            theirs = events_of(json.load(file))
    finally:
        place.end()
    with open(os.path.join(options.out, "trace.txt"), "w") as file:
        file.write(said)
    # Kernels of matrix products have the names of the calls in our trace, and other names there.
    theirs = [event for event in theirs if event[1] == "kernel" and not event[0].startswith(("nvjet", "cutlass"))]
    theirs = sorted((start, end, name) for name, _, start, end, _ in theirs)
    first, last = theirs[0][0] - 200_000, theirs[-1][1] + 200_000
    own = sorted((start, end, name) for name, category, start, end, _ in own if category == "kernel" and first <= start <= last)
    mine = {}
    for start, end, name in own:
        mine.setdefault(kernel_name(name), []).append((start, end))
    starts, ends, longer, missing = [], [], [], 0
    for start, end, name in theirs:
        same = mine.get(kernel_name(name), [])
        nearest = min(same, key=lambda known: abs(known[1] - end), default=None)
        if nearest is None or abs(nearest[1] - end) > 500_000:
            missing += 1
            continue
        starts.append(nearest[0] - start)
        ends.append(nearest[1] - end)
        longer.append(nearest[1] - nearest[0] - end + start)
    with open(os.path.join(options.out, "kernels.txt"), "w") as file:
        counts = {}
        for name, which in [(kernel_name(name), 0) for _, _, name in theirs] + [(kernel_name(name), 1) for _, _, name in own]:
            counts.setdefault(name, [0, 0])[which] += 1
        file.writelines(f"{counted} {name}\n" for name, counted in sorted(counts.items()))
    if not starts:
        return False, f"no kernel in common: {len(theirs)} and {len(own)}"
    text = f"{len(theirs)} kernels in the profile, {len(own)} in the trace, {missing} not found; start {spread(starts)}; end {spread(ends)}; longer by {spread(longer)}"
    return missing <= len(theirs) // 50 and abs(statistics.median(ends)) < 10_000, text


def kernel_name(name):
    return re.split(r"[<(]", name.removeprefix("void "))[0].split("::")[-1]


def run_attention(options):
    """The rate of flash attention in the metrics, against the program's own."""
    place = Place("attention", options)
    place.environment["XPU_TIMER_BRACKET"] = "matmuls"
    scraped = ""
    try:
        process = place.start(workload("attention"), stdout=subprocess.PIPE)
        while process.poll() is None:
            time.sleep(1)
            text = place.fetch("/metrics")
            scraped = text if 'operation="FA"' in text else scraped
        own = [float(line.split()[-1]) for line in process.stdout.read().splitlines() if line.startswith("MEASURED")]
    finally:
        place.end()
    lines = [line for line in scraped.splitlines() if "_FLOPS{" in line and 'operation="FA"' in line]
    rates = [float(line.split()[-1]) for line in lines]
    # The forward and the backward pass may be in one series or in two.
    held = bool(rates) and all(0.9 * min(own) < rate < 1.1 * max(own) for rate in rates)
    return held, f"the program measured {own} TFLOP/s forward and backward, the metrics say {rates}"


def run_record(options):
    """Sampled stacks of a training with C frames; a trace of a job of three ranks."""
    place = Place("record", options)
    report = []
    try:
        process = place.start(ranks(3, "--steps", "100000"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(14)
        for name in ("main", "native"):
            folder = os.path.join(place.dir, name)
            command = ["xpu_timer_dump", "record", "--all", "--seconds", "4", "--rate", "20", "-o", folder]
            done = place.start(command + (["--native"] if name == "native" else []), launched=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            report.append(done.communicate(timeout=60)[0])
            with open(os.path.join(folder, "all.folded")) as file:
                report.append(file.read())
        folder, problem = timeline(place, 4)
        report.append(trace_of(place, folder)[1] if folder else problem)
        ended = process.poll()
    finally:
        place.end()
    with open(os.path.join(options.out, "record.txt"), "w") as file:
        file.write("\n".join(report))
    held = ended is None and "go_wrong" not in report[1] and "ranks.py" in report[1] and "cuda" in report[3].lower() and folder
    return bool(held), f"ended {ended}; {report[0].strip().splitlines()[-1:]} {report[4].strip().splitlines()[:6]}"


def run_tools(options):
    """print_env, and a dump of a process that waits for its device."""
    place = Place("tools", options)
    report = []
    try:
        process = place.start(["native-shared", "stream"], stdout=subprocess.DEVNULL)
        time.sleep(4)
        for command in (["xpu_timer_dump", "--pid", str(process.pid)], ["xpu_timer_print_env", "--pid", str(process.pid)]):
            begun = time.monotonic()
            done = place.start(command, launched=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            out = done.communicate(timeout=30)[0]
            report.append(f"$ {' '.join(command)}  # status {done.returncode}, {time.monotonic() - begun:.2f} s\n{out}")
    finally:
        place.end()
    with open(os.path.join(options.out, "tools.txt"), "w") as file:
        file.write("\n".join(report))
    return "cudaStreamSynchronize" in report[0], report[0].splitlines()[0]


def run_sanitizer(options):
    """compute-sanitizer reports the errors of every call of the driver, also of the hook's."""
    if shutil.which("compute-sanitizer") is None:
        return None, "no compute-sanitizer"
    said = []
    for launched in (False, True):
        place = Place(f"sanitizer-{int(launched)}", options)
        place.environment["XPU_TIMER_BRACKET"] = "all"
        try:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command = ["compute-sanitizer", "--print-limit", "20", "native-shared", "healthy"]
            process = place.start(command, launched, **streams)
            said.append((process.returncode, process.communicate(timeout=options.patience)[0]))
        finally:
            place.end()
    with open(os.path.join(options.out, "sanitizer.txt"), "w") as file:
        file.write("\n".join(out for _, out in said))
    summaries = [re.findall(r"ERROR SUMMARY: .*", out) for _, out in said]
    return summaries[0] == summaries[1], f"without {summaries[0]}, with xpu_timer {summaries[1]}"


def build_native(options):
    """The native program with a static and a shared runtime; without nvcc its cases cannot run."""
    if shutil.which("nvcc") is None:
        return
    source = os.path.join(HERE, "native.cu")
    builds = [subprocess.Popen(["nvcc", "-o", os.path.join(options.built, f"native-{kind}"), source, "-cudart", kind]) for kind in ("static", "shared")]
    for build in builds:
        build.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--package", required=True, type=os.path.abspath)
    parser.add_argument("--out", required=True, type=os.path.abspath)
    parser.add_argument("--seconds", type=float, default=3600, help="no case starts after this time")
    parser.add_argument("--patience", type=float, default=90, help="seconds for one program")
    parser.add_argument("--jobs", type=int, default=4, help="number of hangs at one time")
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; default: all")
    options = parser.parse_args()
    options.built = os.path.join(options.out, "work", "built")
    os.makedirs(options.built, exist_ok=True)
    build_native(options)
    with open("/sys/devices/system/clocksource/clocksource0/current_clocksource") as file:
        readings = timeit.timeit(time.monotonic_ns, number=1_000_000) * 1000
        print(f"clock {file.read().strip()}, {readings:.0f} ns a reading from Python")
    begun = time.monotonic()
    failed = []
    results = open(os.path.join(options.out, "results.txt"), "w")

    def run(name, function, *arguments):
        if options.cases and not any(part in name for part in options.cases):
            return
        if time.monotonic() - begun > options.seconds:
            held, text = None, "there was no time left for it"
        else:
            try:
                held, text = function(*arguments, options)
            except Exception as problem:  # one broken case must not cost the others
                held, text = False, repr(problem)
        word = {True: "ok", False: "FAILED", None: "skipped"}[held]
        if held is False:
            failed.append(name)
        line = f"{time.monotonic() - begun:5.0f} s  {name}: {word}: {text}"
        print(line, flush=True)
        results.write(line + "\n")
        results.flush()

    # Measurements come first, because the other cases load the machine.
    for case in healthy():
        if case.repeat > 1:
            run(f"healthy-{case.name}", run_healthy, case)
    for measure in (run_clock, run_profiled, run_matmul, run_attention):
        run(measure.__name__.removeprefix("run_"), measure)
    together = [(f"hang-{case.name}", run_hang, case) for case in hangs()]
    together += [(f"healthy-{case.name}", run_healthy, case) for case in healthy() if case.repeat == 1]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda case: run(*case), together))
    for rest in (run_tools, run_sanitizer, run_record):
        run(rest.__name__.removeprefix("run_"), rest)
    print(f"{len(failed)} failed: {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
