"""Data-, tensor- and pipeline-parallel jobs of 3 to 6 ranks in which one rank stops on its host for
a reason outside its own Python frame, and jobs that are slow but healthy.

    crews.py SCENARIO                starts the ranks and the helper processes of SCENARIO
    crews.py --list                  lists the scenarios: name, kind and seconds
    crews.py --helper NAME ARGUMENT… is a helper process: a child of a rank or of the launcher

A scenario is a function of this file, which every rank calls. The trouble of a hang begins after
`TROUBLE` steps. Just before it, a process writes the truth into the file XPU_HANGS_TRUTH: the pids
of the processes to blame and the acceptable causes.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import importlib
import itertools
import json
import logging
import logging.handlers
import mmap
import multiprocessing
import os
import queue
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib

if "RANK" in os.environ and "--helper" not in sys.argv:
    import cuda

TROUBLE = 20
# Seconds of host work in a step.
PAUSE = 0.03
FORK = multiprocessing.get_context("fork")
SCENARIOS = {}
HELPERS = {}
libc = ctypes.CDLL(None, use_errno=True)


class Scenario:
    """`late` maps a rank to the seconds by which it starts later than the others."""

    def __init__(self, function, kind, seconds, ranks, helpers, late):
        self.function, self.kind, self.seconds = function, kind, seconds
        self.ranks, self.helpers, self.late = ranks, helpers, late or {}


def _register(kind, seconds, ranks, helpers=(), late=None):
    def register(function):
        SCENARIOS[function.__name__] = Scenario(function, kind, seconds, ranks, helpers, late)
        return function

    return register


def hang(ranks, helpers=()):
    return _register("hang", 30, ranks, helpers)


def healthy(ranks, seconds):
    """No rank waits for as long as the hang timeout."""
    return _register("healthy", seconds, ranks)


def passes(ranks, seconds):
    """Ranks wait for longer than the hang timeout, for work that goes on."""
    return _register("passes", seconds, ranks)


def overdue(ranks, seconds, late):
    """Ranks wait for longer than the hang timeout, for one that starts later."""
    return _register("overdue", seconds, ranks, late=late)


def helper(function):
    HELPERS[function.__name__] = function
    return function


# Files and processes.


def path(name):
    return os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], name)


def publish(name, value):
    _replace(path(name), str(value))


def published(name):
    while not os.path.exists(path(name)):
        time.sleep(0.01)
    with open(path(name)) as file:
        return file.read()


def _replace(target, text):
    with open(f"{target}.{os.getpid()}", "w") as file:
        file.write(text)
    os.replace(f"{target}.{os.getpid()}", target)


def _write_truth(truth):
    if target := os.environ.get("XPU_HANGS_TRUTH"):
        _replace(target, json.dumps(truth))


def blame(pids, *causes):
    _write_truth({"hang": True, "culprits": list(pids), "causes": list(causes)})
    say(f"to blame: {list(pids)} {causes}")


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fifo(name):
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path(name))
    return path(name)


def die_with_parent():
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def helper_command(name, *arguments):
    return [sys.executable, os.path.abspath(__file__), "--helper", name, *map(str, arguments)]


def start_helper(name, *arguments, **options):
    return subprocess.Popen(helper_command(name, *arguments), preexec_fn=die_with_parent, **options)


def start_worker(target, *arguments):
    def run():
        die_with_parent()
        target(*arguments)

    worker = FORK.Process(target=run, name=target.__name__, daemon=True)
    worker.start()
    return worker


# The training.


class Crew:
    """One rank of the job, with the communicator of all ranks."""

    def __init__(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        publish(f"pid.{self.rank}", os.getpid())
        cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.world = cuda.Communicator.create("world")
        self.stream = cuda.Stream()
        self.forward = cuda.Kernel("layer_forward", 300)
        self.backward = cuda.Kernel("layer_backward", 500)
        self.optimizer = cuda.Kernel("adamw_step", 200)

    def pid_of(self, rank):
        return int(published(f"pid.{rank}"))

    def steps(self, count=None, pause=PAUSE):
        """Rank 0 reports its step at most every 0.3 s."""
        said = 0
        for step in itertools.count() if count is None else range(count):
            time.sleep(pause)
            if self.rank == 0 and time.monotonic() > said + 0.3:
                said = time.monotonic()
                say(f"step {step}")
            yield step


class DataParallel:
    def __init__(self, crew, elements=1024):
        self.crew = crew
        self.gradients = cuda.Buffer(elements)

    def step(self):
        crew = self.crew
        crew.forward.launch(crew.stream)
        crew.backward.launch(crew.stream)
        crew.world.all_reduce(self.gradients, crew.stream)
        crew.optimizer.launch(crew.stream)
        crew.stream.synchronize()


class Sharded:
    """Each rank has a shard of the parameters, gathers all of them, and scatters the gradients."""

    def __init__(self, crew, elements=256):
        self.crew = crew
        self.shard, self.full = cuda.Buffer(elements), cuda.Buffer(elements * crew.size)

    def step(self):
        crew = self.crew
        crew.world.all_gather(self.shard, self.full, crew.stream)
        crew.forward.launch(crew.stream)
        crew.backward.launch(crew.stream)
        crew.world.reduce_scatter(self.full, self.shard, crew.stream)
        crew.optimizer.launch(crew.stream)
        crew.stream.synchronize()


class TensorParallel:
    """Pairs of ranks share the layers, and the replicas share the gradients."""

    def __init__(self, crew):
        self.crew = crew
        self.tensor = crew.world.split(crew.rank // 2, crew.rank)
        self.replicas = crew.world.split(crew.rank % 2, crew.rank)
        self.activations, self.gradients, self.norm = cuda.Buffer(512), cuda.Buffer(2048), cuda.Buffer(1)

    def step(self):
        crew = self.crew
        for _ in range(2):
            crew.forward.launch(crew.stream)
            self.tensor.all_reduce(self.activations, crew.stream)
        crew.backward.launch(crew.stream)
        self.replicas.all_reduce(self.gradients, crew.stream)
        crew.world.all_reduce(self.norm, crew.stream)
        crew.optimizer.launch(crew.stream)
        crew.stream.synchronize()


class Pipeline:
    """Each rank is one stage. A step sends the activations of two microbatches down, and then their
    gradients up."""

    def __init__(self, crew):
        self.crew = crew
        self.activations, self.gradients, self.norm = cuda.Buffer(256), cuda.Buffer(256), cuda.Buffer(1)

    def step(self):
        crew, previous, following = self.crew, self.crew.rank - 1, self.crew.rank + 1
        for _ in range(2):
            if previous >= 0:
                crew.world.recv(self.activations, previous, crew.stream)
            crew.forward.launch(crew.stream)
            if following < crew.size:
                crew.world.send(self.activations, following, crew.stream)
        crew.stream.synchronize()
        for _ in range(2):
            if following < crew.size:
                crew.world.recv(self.gradients, following, crew.stream)
            crew.backward.launch(crew.stream)
            if previous >= 0:
                crew.world.send(self.gradients, previous, crew.stream)
        crew.world.all_reduce(self.norm, crew.stream)
        crew.optimizer.launch(crew.stream)
        crew.stream.synchronize()


# Hangs: a process of the rank's own, or one beside the job, stands still.


@helper
def tokenizer():
    merges_loaded = threading.Event()
    for line in sys.stdin:
        if line == "<|unseen|>\n":
            merges_loaded.wait()
        sys.stdout.write(" ".join(str(ord(letter)) for letter in line.strip()) + "\n")
        sys.stdout.flush()


@hang(ranks=3)
def tokenizer_keeps_a_line(crew):
    """Rank 1 reads the answer of its tokenizer from a pipe."""
    trainer = DataParallel(crew)
    child = start_helper("tokenizer", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def encode(text):
        child.stdin.write(text + "\n")
        return [int(token) for token in child.stdout.readline().split()]

    for step in crew.steps():
        text = f"sample {step}"
        if crew.rank == 1 and step == TROUBLE:
            blame([child.pid], "missing_rank", "storage_io", "host_lock")
            text = "<|unseen|>"
        encode(text)
        trainer.step()


@helper
def compiler(output):
    source = sys.stdin.read()
    with open(output, "w") as file:
        file.write(source[: len(source) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
        file.write(source[len(source) // 2 :])


@hang(ranks=4)
def compiler_is_stopped(crew):
    """Rank 3 waits in waitpid for its compiler, which a signal has stopped."""
    trainer = TensorParallel(crew)
    for step in crew.steps():
        if crew.rank == 3 and step == TROUBLE:
            child = start_helper("compiler", path("kernel.o"), stdin=subprocess.PIPE, text=True)
            blame([child.pid], "process_stopped", "missing_rank")
            child.stdin.write("__global__ void fused() {}\n" * 100)
            child.stdin.close()
            os.waitpid(child.pid, 0)
        trainer.step()


@helper
def object_store():
    """Its first client takes the quota and never returns it."""
    quota = threading.Semaphore(1)
    listener = socket.create_server(("127.0.0.1", 0))
    publish("object_store.pid", os.getpid())
    publish("object_store", listener.getsockname()[1])
    while True:
        client, _ = listener.accept()
        with client, client.makefile("rb") as lines:
            lines.readline()
            quota.acquire()
            client.sendall(b"201 Created\n")


@helper
def put(port, name):
    with socket.create_connection(("127.0.0.1", int(port))) as server, server.makefile("rb") as lines:
        server.sendall(f"PUT {name}\n".encode())
        if not lines.readline().startswith(b"201"):
            sys.exit(1)


class Uploader:
    """Uploads each checkpoint in a thread, which runs a client program."""

    def __init__(self):
        self.port = published("object_store")
        self.thread = None

    def start(self, name):
        self.thread = threading.Thread(target=self._upload, args=(name,), name="uploader", daemon=True)
        self.thread.start()

    def _upload(self, name):
        subprocess.run(helper_command("put", self.port, name), preexec_fn=die_with_parent, check=True)

    def finish(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None


@hang(ranks=3, helpers=["object_store"])
def upload_is_never_acknowledged(crew):
    """The last stage joins its uploader thread, whose client program waits for the server."""
    trainer = Pipeline(crew)
    uploader = Uploader()
    for step in crew.steps():
        if crew.rank == 2 and step in (TROUBLE // 2, TROUBLE):
            if step == TROUBLE:
                blame([int(published("object_store.pid"))], "missing_rank", "host_lock")
            uploader.start(f"step-{step}")
        trainer.step()
        uploader.finish()


def shard_worker(results, index):
    for batch in itertools.count(index, 2):
        if batch == 2 * TROUBLE:
            # The kernel's out-of-memory killer comes while the worker holds the lock in `put`.
            with results._wlock:
                blame([os.getpid()], "data_loader", "process_dead", "host_lock")
                os.kill(os.getpid(), signal.SIGKILL)
        results.put((batch, b"0" * 8000))


@hang(ranks=3)
def worker_dies_with_the_queue_lock(crew):
    """Rank 0 waits for a batch. One of its workers was killed while it held the lock of the queue,
    for which the other worker waits."""
    trainer = DataParallel(crew)
    results = FORK.SimpleQueue()
    workers = [start_worker(shard_worker, results, index) for index in range(2)] if crew.rank == 0 else []
    for _ in crew.steps():
        if workers:
            results.get()
        trainer.step()


@helper
def downloader():
    """A process beside the job that has locked the cache and waits for a signal."""
    with open(path("cache.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        publish("downloader", os.getpid())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        signal.sigwait({signal.SIGUSR2})


@hang(ranks=4, helpers=["downloader"])
def cache_lock_of_a_downloader(crew):
    """Rank 1 waits for the lock of the model cache, which a process outside the job holds."""
    trainer = Sharded(crew)
    holder = int(published("downloader"))
    for step in crew.steps():
        if crew.rank == 1 and step == TROUBLE:
            blame([holder], "storage_io", "host_lock", "missing_rank")
            with open(path("cache.lock"), "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        trainer.step()


def augmenter(changed, wanted, ready, shard):
    for step in itertools.count():
        if step == TROUBLE:
            blame([os.getpid()], "missing_rank", "host_lock", "data_loader", "storage_io")
            with open(shard, "rb") as file:
                file.read()
        with changed:
            ready.value = step
            changed.notify()
            changed.wait_for(lambda after=step: wanted.value > after)


@hang(ranks=4)
def condition_is_never_notified(crew):
    """Rank 1 waits for a condition of multiprocessing; its child opens a FIFO without a writer."""
    trainer = Pipeline(crew)
    changed = FORK.Condition()
    wanted, ready = (FORK.Value("i", -1, lock=False) for _ in range(2))
    if crew.rank == 1:
        start_worker(augmenter, changed, wanted, ready, fifo("shard"))
    for step in crew.steps():
        if crew.rank == 1:
            with changed:
                wanted.value = step
                changed.notify()
                changed.wait_for(lambda now=step: ready.value >= now)
        trainer.step()


@helper
def featurizer(board):
    """Answers the number in the first word of the file `board` with the second word."""
    features = queue.Queue()
    with open(board, "r+b") as file, mmap.mmap(file.fileno(), 8) as words:
        while True:
            (wanted,) = struct.unpack_from("i", words, 0)
            if wanted == TROUBLE:
                features.get()
            struct.pack_into("i", words, 4, wanted)
            time.sleep(0.005)


@hang(ranks=4)
def shared_flag_stays_down(crew):
    """Rank 3 polls a word of shared memory, which its child does not set any more."""
    trainer = DataParallel(crew)
    if crew.rank == 3:
        with open(path("board"), "w+b") as file:
            file.write(bytes(8))
            file.flush()
            words = mmap.mmap(file.fileno(), 8)
        child = start_helper("featurizer", path("board"))
    for step in crew.steps():
        if crew.rank == 3:
            if step == TROUBLE:
                blame([child.pid], "missing_rank", "host_lock", "data_loader")
            struct.pack_into("i", words, 0, step)
            while struct.unpack_from("i", words, 4) != (step,):
                time.sleep(0.005)
        trainer.step()


@helper
def compressor(manifest):
    packer = zlib.compressobj(1)
    for chunk in range(1 << 30):
        data = sys.stdin.buffer.read(1 << 16)
        if not data:
            break
        sys.stdout.buffer.write(packer.compress(data))
        if chunk == 4:
            with open(manifest, "w") as file:
                file.write("part 0\n")
    sys.stdout.buffer.write(packer.flush())


@hang(ranks=4)
def compressor_stops_reading(crew):
    """Rank 0 writes its checkpoint to a compressor, which opens a FIFO without a reader."""
    trainer = Sharded(crew)
    manifest = fifo("manifest")
    for step in crew.steps():
        if crew.rank == 0 and step == TROUBLE:
            with open(path("checkpoint.z"), "wb") as file:
                child = start_helper("compressor", manifest, stdin=subprocess.PIPE, stdout=file)
            blame([child.pid], "storage_io", "missing_rank")
            for _ in range(8):
                child.stdin.write(bytes(1 << 20))
            child.stdin.close()
            child.wait()
        trainer.step()


class Registry:
    """A list of files with a lock, which a thread holds for as long as it refreshes the list."""

    def __init__(self):
        self.lock = threading.Lock()
        self.refreshing, self.may_end = threading.Event(), threading.Event()
        self.names = []

    def refresh(self):
        with self.lock:
            self.refreshing.set()
            self.may_end.wait()

    def add(self, name):
        with self.lock:
            self.names.append(name)


@hang(ranks=3)
def forked_while_a_thread_has_the_lock(crew):
    """Rank 2 waits for a forked child, which inherited a lock that none of its threads holds."""
    trainer = DataParallel(crew)
    registry = Registry()
    for step in crew.steps():
        if crew.rank == 2 and step == TROUBLE:
            threading.Thread(target=registry.refresh, name="refresh", daemon=True).start()
            registry.refreshing.wait()
            child = os.fork()
            if child == 0:
                die_with_parent()
                registry.add(f"snapshot-{step}")
                os._exit(0)
            blame([child], "host_lock", "missing_rank")
            registry.may_end.set()
            os.waitpid(child, 0)
        trainer.step()


# Hangs: the rank itself, or several ranks.


class Checkpoints:
    """Saves the state in a thread, and saves it again if the scheduler announces a preemption."""

    def __init__(self):
        self.state = threading.Lock()
        signal.signal(signal.SIGUSR1, self.preempted)

    def save(self):
        with self.state:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(3600)  # until the bucket accepts requests again

    def preempted(self, _number, _frame):
        with self.state:
            say("saved before the preemption")


@hang(ranks=5)
def preemption_handler_wants_the_lock(crew):
    """The signal handler of rank 4 waits for a lock, and the thread that holds it sleeps."""
    trainer = DataParallel(crew)
    checkpoints = Checkpoints()
    for step in crew.steps():
        if crew.rank == 4 and step == TROUBLE:
            blame([os.getpid()], "host_lock", "missing_rank")
            threading.Thread(target=checkpoints.save, name="checkpoint", daemon=True).start()
            time.sleep(1)
        trainer.step()


class LogWriter(threading.Thread):
    """Writes records to a file of the C locale, and ends at the first one that it cannot encode."""

    def __init__(self, records):
        super().__init__(name="log-writer", daemon=True)
        self.records = records

    def run(self):
        with open(path("train.log"), "w", encoding="ascii") as file:
            while True:
                file.write(self.records.get().getMessage() + "\n")


class CompleteLog(logging.handlers.QueueHandler):
    """Loses no record: it waits while the queue is full."""

    def enqueue(self, record):
        self.queue.put(record)


@hang(ranks=4)
def log_queue_is_full(crew):
    """Rank 2 puts a log record into a full queue, whose reader thread has ended."""
    trainer = DataParallel(crew)
    records = queue.Queue(maxsize=32)
    writer = LogWriter(records)
    writer.start()
    log = logging.getLogger("train")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(CompleteLog(records))
    for step in crew.steps():
        if crew.rank == 2 and step == TROUBLE:
            blame([os.getpid()], "host_lock", "missing_rank")
            log.info("perplexity %s", "\N{INFINITY}")
        for layer in range(8):
            log.info("step %s layer %s", step, layer)
        trainer.step()


@hang(ranks=4)
def lock_across_an_all_reduce(crew):
    """Rank 1 keeps the lock of a file during a collective, and rank 3 wants it before that
    collective: they wait for each other."""
    trainer = TensorParallel(crew)
    index = open(path("index"), "a")
    for step in crew.steps():
        if step == TROUBLE and crew.rank == 1:
            fcntl.lockf(index, fcntl.LOCK_EX)
        if step == TROUBLE + 1 and crew.rank == 3:
            blame([crew.pid_of(1), crew.pid_of(3)], "storage_io", "host_lock", "missing_rank")
            fcntl.lockf(index, fcntl.LOCK_EX)
        trainer.step()


def read_token():
    with open(path("token")) as file:
        return file.read()


@hang(ranks=4)
def retry_swallows_the_error(crew):
    """Stage 2 tries again forever to read a file that nobody writes."""
    trainer = Pipeline(crew)
    for step in crew.steps():
        token = "initial"
        if crew.rank == 2 and step == TROUBLE:
            blame([os.getpid()], "missing_rank")
            token = None
        while token is None:
            try:
                token = read_token()
            except Exception:
                time.sleep(1)
        trainer.step()


@helper
def key_store():
    """Answers `GET KEY` as soon as somebody has sent `SET KEY VALUE`."""
    listener = socket.create_server(("127.0.0.1", 0))
    publish("key_store", listener.getsockname()[1])
    values, waiting, clients = {}, {}, {}
    while True:
        for ready in select.select([listener, *clients], [], [])[0]:
            if ready is listener:
                client, _ = listener.accept()
                clients[client] = client.makefile("rb")
                continue
            words = clients[ready].readline().decode().split()
            if not words:
                del clients[ready]
                continue
            if words[0] == "SET":
                values[words[1]] = words[2]
            else:
                waiting.setdefault(words[1], []).append(ready)
            for client in waiting.pop(words[1], []) if words[1] in values else ():
                client.sendall(values[words[1]].encode() + b"\n")


class KeyStore:
    def __init__(self):
        self.server = socket.create_connection(("127.0.0.1", int(published("key_store"))))
        self.lines = self.server.makefile("rb")

    def set(self, key, value):
        self.server.sendall(f"SET {key} {value}\n".encode())

    def get(self, key):
        self.server.sendall(f"GET {key}\n".encode())
        return self.lines.readline().decode().strip()


@hang(ranks=4, helpers=["key_store"])
def key_of_a_rank_that_opens_a_fifo(crew):
    """Ranks 1 and 2 wait in a store for a key, which rank 3 sets after it has opened its trace: a
    FIFO without a reader."""
    trainer = DataParallel(crew)
    store = KeyStore()
    for step in crew.steps():
        if step % 10 == 0 and crew.rank in (1, 2):
            store.get(f"plan-{step}")
        if step % 10 == 0 and crew.rank == 3:
            if step == TROUBLE:
                blame([os.getpid()], "storage_io", "missing_rank")
                with open(fifo("trace"), "w") as trace:
                    trace.write(f"plan {step}\n")
            store.set(f"plan-{step}", "even")
        trainer.step()


class Planner:
    """Asks for plans. The maker of a plan sets the result of its future."""

    def __init__(self):
        self.open = {}

    async def plan(self, step):
        self.open[step] = asyncio.get_running_loop().create_future()
        return await self.open[step]


@hang(ranks=6)
def stopped_rank_and_lost_future(crew):
    """Two independent culprits: rank 1 is stopped, and rank 4 awaits a future that nobody sets."""
    trainer = TensorParallel(crew)
    for step in crew.steps():
        if step == TROUBLE and crew.rank == 4:
            blame([crew.pid_of(1), crew.pid_of(4)], "process_stopped", "missing_rank", "host_lock")
            publish("preempt", 1)
            asyncio.run(Planner().plan(step))
        if step == TROUBLE and crew.rank == 1:
            published("preempt")
            os.kill(os.getpid(), signal.SIGSTOP)
        trainer.step()


class Metrics:
    """Flushes in a pool of one thread. The flush submits a task to this pool and waits for it."""

    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self.is_flushing = threading.Event()

    def close(self):
        self.pool.submit(self.flush)
        self.is_flushing.wait()

    def flush(self):
        written = self.pool.submit(sys.stdout.flush)
        self.is_flushing.set()
        return written.result()


@hang(ranks=4)
def left_early_with_a_stuck_pool(crew):
    """The data of rank 1 end one step early. It cannot exit, because its thread pool waits for
    itself."""
    trainer = DataParallel(crew)
    metrics = Metrics()
    for _ in crew.steps(TROUBLE if crew.rank == 1 else None):
        trainer.step()
    blame([os.getpid()], "teardown", "host_lock", "missing_rank")
    metrics.close()


@hang(ranks=4)
def one_rank_reduces_a_metric(crew):
    """Rank 3 sees a spike and calls one collective that the others do not call."""
    trainer = DataParallel(crew)
    peak = cuda.Buffer(2)
    for step in crew.steps():
        if crew.rank == 3 and step == TROUBLE:
            blame([os.getpid()], "size_mismatch", "op_mismatch", "missing_rank")
            crew.world.all_reduce(peak, crew.stream, op="max")
            crew.stream.synchronize()
        trainer.step()


def parse(sample):
    name, _, label = sample.partition(":")
    return name, int(label)


@hang(ranks=5)
def except_branch_announces_itself(crew):
    """Rank 2 fails to parse a sample and broadcasts from itself, where the others broadcast from
    rank 0."""
    trainer = DataParallel(crew)
    status = cuda.Buffer(8, "i32")
    for step in crew.steps():
        try:
            parse(f"{step}:" if crew.rank == 2 and step == TROUBLE else f"{step}:7")
            crew.world.broadcast(status, 0, crew.stream)
        except ValueError:
            blame([os.getpid()], "op_mismatch", "missing_rank")
            crew.world.broadcast(status, crew.rank, crew.stream)
        crew.stream.synchronize()
        trainer.step()


@hang(ranks=3)
def regular_expression_backtracks(crew):
    """Rank 0 is in a loop in C without an end: a regular expression tries 2^80 ways to match."""
    trainer = DataParallel(crew)
    words = re.compile(r"^(\w+\s?)*$")
    for step in crew.steps():
        text = "all good words"
        if crew.rank == 0 and step == TROUBLE:
            blame([os.getpid()], "missing_rank")
            text = "a" * 80 + "!"
        words.match(text)
        trainer.step()


@hang(ranks=4)
def stage_ends_silently(crew):
    """A library ends the process of stage 2 with exit code 0 and without a word."""
    trainer = Pipeline(crew)
    for step in crew.steps():
        if crew.rank == 2 and step == TROUBLE:
            blame([os.getpid()], "process_dead", "teardown")
            os._exit(0)
        trainer.step()


PLUGIN = """
import threading

def register():
    import fused_plugin
    fused_plugin.registered = True

thread = threading.Thread(target=register, name="register", daemon=True)
thread.start()
thread.join()
"""


@hang(ranks=3)
def plugin_imports_itself(crew):
    """Rank 1 imports a module that waits for its thread, which waits for the import lock."""
    trainer = DataParallel(crew)
    os.makedirs(path("plugins"), exist_ok=True)
    sys.path.insert(0, path("plugins"))
    for step in crew.steps():
        if crew.rank == 1 and step == TROUBLE:
            with open(path("plugins/fused_plugin.py"), "w") as file:
                file.write(PLUGIN)
            importlib.invalidate_caches()
            blame([os.getpid()], "host_lock", "missing_rank")
            importlib.import_module("fused_plugin")
        trainer.step()


@hang(ranks=4)
def last_batch_is_uneven(crew):
    """Rank 3 gathers the predictions of five samples, the others those of eight."""
    trainer = Sharded(crew)
    predictions, of_all = cuda.Buffer(8), cuda.Buffer(8 * crew.size)
    for step in crew.steps():
        trainer.step()
        if crew.rank == 3 and step == TROUBLE:
            blame([os.getpid()], "size_mismatch")
            predictions = cuda.Buffer(5)
        crew.world.all_gather(predictions, of_all, crew.stream)
        crew.stream.synchronize()


# Healthy jobs.


@healthy(ranks=4, seconds=20)
def one_slow_rank(crew):
    """Rank 2 needs 0.8 s longer for each step."""
    trainer = DataParallel(crew)
    for _ in crew.steps(pause=PAUSE + (0.8 if crew.rank == 2 else 0)):
        trainer.step()


@passes(ranks=4, seconds=30)
def long_evaluation(crew):
    """Rank 0 evaluates for 13 s, with kernels and a report of its progress, and the others wait."""
    trainer = DataParallel(crew)
    score = cuda.Kernel("score_answers", 2000)
    for step in crew.steps():
        if crew.rank == 0 and step == TROUBLE:
            end = time.monotonic() + 13
            for sample in itertools.count():
                if time.monotonic() > end:
                    break
                score.launch(crew.stream)
                crew.stream.synchronize()
                time.sleep(0.05)
                if sample % 20 == 0:
                    say(f"evaluated {sample}")
        trainer.step()


def read_tokens(source):
    return re.findall(r"\w+|\S", source)


def number_tokens(tokens):
    numbers = {}
    return [numbers.setdefault(token, len(numbers)) for token in tokens]


def schedule(numbers):
    return sorted(numbers, key=lambda number: (number % 7, number % 31, number))


def allocate_registers(numbers):
    registers = [0] * 16
    for number in numbers:
        registers[number % 16] += number
    return registers


def encode_instructions(numbers):
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@helper
def busy_compiler(seconds, output):
    """Compiles one function after the other, each in about 0.2 s of CPU time."""
    end = time.monotonic() + float(seconds)
    with open(output, "wb") as file:
        for function in itertools.count():
            if time.monotonic() > end:
                break
            source = "".join(f"x{function}_{line} = x{line % 97} + {line % 13};" for line in range(15000))
            numbers = number_tokens(read_tokens(source))
            order = schedule(numbers)
            allocate_registers(order)
            file.write(zlib.compress(encode_instructions(order)))
            file.flush()


@passes(ranks=4, seconds=32)
def compile_of_15_seconds(crew):
    """Rank 1 waits for a compiler that is busy."""
    trainer = TensorParallel(crew)
    for step in crew.steps():
        if crew.rank == 1 and step == TROUBLE:
            start_helper("busy_compiler", 15, path("kernel.o")).wait()
        trainer.step()


@passes(ranks=4, seconds=28)
def checkpoint_is_written_steadily(crew):
    """Rank 0 writes 3 MiB a second for 12 s, and the others wait."""
    trainer = Sharded(crew)
    for step in crew.steps():
        if crew.rank == 0 and step == TROUBLE:
            with open(path("checkpoint"), "wb") as file:
                for _ in range(240):
                    file.write(bytes(160 << 10))
                    file.flush()
                    time.sleep(0.05)
            os.unlink(path("checkpoint"))
        trainer.step()


def slow_loader(batches):
    for batch in itertools.count():
        time.sleep(1.2)
        batches.put((batch, b"0" * 4096))


@healthy(ranks=3, seconds=20)
def loader_is_slow(crew):
    """The loader worker of rank 1 needs 1.2 s for a batch."""
    trainer = DataParallel(crew)
    batches = FORK.Queue(maxsize=2)
    if crew.rank == 1:
        start_worker(slow_loader, batches)
    for _ in crew.steps():
        if crew.rank == 1:
            batches.get()
        trainer.step()


@healthy(ranks=3, seconds=22)
def input_with_a_timeout(crew):
    """In each step, rank 0 waits up to 3 s for a command of an operator, who sends none."""
    trainer = DataParallel(crew)
    commands = os.open(fifo("commands"), os.O_RDWR)
    for _ in crew.steps():
        if crew.rank == 0 and select.select([commands], [], [], 3)[0]:
            os.read(commands, 4096)
        trainer.step()


@helper
def profiler():
    for line in sys.stdin:
        say(f"profile {line.strip()}")


@healthy(ranks=4, seconds=18)
def helper_at_rest(crew):
    """Each rank has a profiler process, which reads commands from a pipe and gets none."""
    trainer = Pipeline(crew)
    start_helper("profiler", stdin=subprocess.PIPE)
    for _ in crew.steps():
        trainer.step()


@overdue(ranks=4, seconds=24, late={2: 8})
def late_rank(crew):
    """Rank 2 starts 8 s after the others."""
    trainer = DataParallel(crew)
    for _ in crew.steps():
        trainer.step()


@healthy(ranks=3, seconds=32)
def steps_of_5_seconds(crew):
    """In each step, the host needs 1.5 s and the device 3.5 s."""
    trainer = DataParallel(crew)
    long_layer = cuda.Kernel("long_layer_forward", 3_500_000)
    for _ in crew.steps(pause=1.5):
        long_layer.launch(crew.stream)
        trainer.step()


def epoch_loader(batches, count):
    for batch in range(count):
        batches.put((batch, b"0" * 4096))


@healthy(ranks=6, seconds=40)
def job_that_ends(crew):
    """Six ranks train for 200 steps, join their workers, and end."""
    trainer = Sharded(crew)
    batches = FORK.Queue(maxsize=4)
    worker = start_worker(epoch_loader, batches, 200)
    for _ in crew.steps(200):
        batches.get()
        trainer.step()
    worker.join()
    crew.world.destroy()


# The launcher.


def launch(name):
    chosen = SCENARIOS[name]
    if "XPU_EXAMPLE_RENDEZVOUS" not in os.environ:
        os.environ["XPU_EXAMPLE_RENDEZVOUS"] = tempfile.mkdtemp(prefix="crews-")
    if chosen.kind != "hang":
        # The process of a late rank does not exist yet, so none is to blame.
        _write_truth({"hang": False, "causes": ["comm_init", "missing_rank"] if chosen.late else []})
    for beside in chosen.helpers:
        start_helper(beside)
    ranks = []
    start = time.monotonic()
    for rank in sorted(range(chosen.ranks), key=lambda rank: chosen.late.get(rank, 0)):
        time.sleep(max(0, start + chosen.late.get(rank, 0) - time.monotonic()))
        size = str(chosen.ranks)
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        command = [sys.executable, os.path.abspath(__file__), name]
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables}, preexec_fn=die_with_parent))
    return int(any([rank.wait() != 0 for rank in ranks]))


def main():
    _, first, *rest = sys.argv
    if first == "--list":
        for name, listed in SCENARIOS.items():
            print(name, listed.kind, listed.seconds)
        return 0
    if first == "--helper":
        HELPERS[rest[0]](*rest[1:])
        return 0
    if "RANK" in os.environ:
        SCENARIOS[first].function(Crew())
        return 0
    return launch(first)


if __name__ == "__main__":
    sys.exit(main())
