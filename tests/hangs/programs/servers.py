"""Inference servers on the simulated device, none of whose processes has a rank variable.

    servers.py SCENARIO     serves requests until the trouble of the scenario, in batch TROUBLE
    servers.py --list       one line for each scenario: NAME hang|passes|idle|healthy SECONDS

The command starts all other processes of the server. Before the trouble begins, whoever knows the
process that is to blame writes the truth to the file XPU_HANGS_TRUTH.
"""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import http.server
import itertools
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import cuda

TROUBLE = 100
SKIP = object()
SCENARIOS = {}


def scenario(function, kind="hang", seconds=0):
    SCENARIOS[function.__name__] = (kind, seconds)
    return function


def idle(function):
    return scenario(function, "idle", 25)


def healthy(function):
    return scenario(function, "healthy", 25)


def passes(function):
    return scenario(function, "passes", 30)


# The truth.


def write_truth(truth):
    """The first truth stands: one that names two culprits is written before either stops."""
    path = os.environ.get("XPU_HANGS_TRUTH")
    if not path or os.path.exists(path):
        return
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump(truth, file)
    os.replace(f"{path}.{os.getpid()}", path)


def blame(causes, place, *culprits):
    """The process itself is the culprit if none is named."""
    culprits = sorted(culprits) or [os.getpid()]
    write_truth({"hang": True, "culprits": culprits, "causes": causes, "place": place})


def blame_nobody():
    write_truth({"hang": False})


# Processes.


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent and parent.pid != os.getppid():
        in_thread(watch_parent, parent, name="death-pipe")


def watch_parent(parent):
    """A fork server lives as long as its children, so they look after its parent."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent():
    """An orphan ends after ten minutes."""
    ctypes.CDLL(None).prctl(1, 0)
    signal.alarm(600)


def set_title(title):
    """As setproctitle: the kernel shows `title` as the name and the command line."""
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    data = title.encode()[: end - start - 1]
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
    ctypes.CDLL(None).prctl(15, data[:15])


def start(function, *arguments, **environment):
    """Runs `function` of this program in a new process; a function as argument goes by its name."""
    texts = [getattr(argument, "__name__", str(argument)) for argument in arguments]
    command = [sys.executable, os.path.abspath(sys.argv[0]), "--run", function, *texts]
    return subprocess.Popen(command, env=os.environ | environment, preexec_fn=die_with_parent)


def in_thread(function, *arguments, name=None):
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def scratch(name):
    return os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], f"{name}.{os.getpid()}")


# How a worker gets its batches.


class Wire:
    """Messages as lines of JSON over a stream socket."""

    def __init__(self, sock):
        self.sock, self.lines = sock, sock.makefile("rb")

    @classmethod
    def connect(cls, address):
        if address.isdigit():
            return cls(socket.create_connection(("127.0.0.1", int(address))))
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return cls(sock)

    def send(self, message):
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def recv(self):
        line = self.lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def poll(self, timeout):
        return bool(select.select([self.sock], [], [], timeout)[0])


class Ring:
    """Counters in shared memory, which both sides poll: the newest request, the newest result."""

    def __init__(self, path):
        with open(path, "ab+") as file:
            file.truncate(4096)
            self.words = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
        self.mine, self.theirs, self.seen = 0, 1, 0

    def other_end(self):
        self.mine, self.theirs = 1, 0
        return self

    def send(self, message):
        self.words[self.mine] = message["step"]

    def recv(self):
        while self.words[self.theirs] <= self.seen:
            time.sleep(0.002)
        self.seen = self.words[self.theirs]
        return {"step": self.seen}

    def poll(self, timeout):
        deadline = time.monotonic() + timeout
        while self.words[self.theirs] <= self.seen and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.words[self.theirs] > self.seen


class Inbox:
    """A thread reads the messages ahead, as the input thread of an engine does; `lose` is the step
    whose message it takes for a duplicate."""

    def __init__(self, channel, lose):
        self.channel, self.lose, self.messages = channel, lose, queue.Queue()
        self.send = channel.send
        in_thread(self.read_ahead, name="input")

    def read_ahead(self):
        while True:
            message = self.channel.recv()
            if message["step"] != self.lose:
                self.messages.put(message)
            else:
                blame(["host_lock", "missing_rank"], "next_batch")

    def next_batch(self):
        return self.messages.get()

    recv = next_batch


# The workers, and the engine that gives them batches.


class Worker:
    """A model worker: `rank` of the communicator `group`."""

    def __init__(self, group, rank, size, trouble=None, device=None):
        self.rank, self.size, self.trouble = rank, size, trouble
        cuda.set_device(rank if device is None else device)
        self.stream = cuda.Stream()
        self.comm = cuda.Communicator.create(group, rank, size)
        self.hidden = cuda.Buffer(4096)
        self.kernel = cuda.Kernel("attention", 300)

    def reduce(self, comm=None):
        (comm or self.comm).all_reduce(self.hidden, self.stream)
        self.stream.synchronize()

    def execute_model(self, step):
        for layer in range(3):
            self.kernel.launch(self.stream)
            if step == TROUBLE and layer == 1 and self.trouble and self.trouble(self) is SKIP:
                continue
            self.reduce()

    def serve(self, channel):
        while True:
            batch = wait_for_batch(channel)
            self.execute_model(batch["step"])
            channel.send({"step": batch["step"], "rank": self.rank})


def wait_for_batch(channel):
    return channel.recv()


class Engine:
    """The scheduler: one batch at a time goes to all workers. A polite one asks for the results
    with a timeout, and reports its health meanwhile."""

    def __init__(self, channels, trouble=None, polite=False):
        self.channels, self.trouble, self.polite = channels, trouble, polite
        self.health = 0

    def serve(self, requests=None):
        for step in itertools.count(1):
            if requests is not None:
                requests.get()
            self.schedule_batch(step)
            self.collect_results(step)
            time.sleep(0.02)

    def schedule_batch(self, step):
        for rank, channel in enumerate(self.channels):
            if step == TROUBLE and rank == len(self.channels) // 2 and self.trouble:
                self.trouble(self)
            channel.send({"step": step})

    def collect_results(self, step):
        for channel in self.channels:
            while self.polite and not channel.poll(0.5):
                self.report_health()
            try:
                assert channel.recv()["step"] == step
            except (EOFError, ConnectionError):
                self.wait_for_replacement()

    def report_health(self):
        self.health += 1

    def wait_for_replacement(self):
        """Nobody replaces a worker that is lost."""
        while True:
            self.report_health()
            time.sleep(0.5)


def tp_worker(channel, group, rank, size, trouble, title):
    """A worker that multiprocessing started."""
    die_with_parent()
    set_title(title)
    if trouble is lose_request:
        channel = Inbox(channel, lose=TROUBLE)
    Worker(group, rank, size, trouble).serve(channel)


def spawn_workers(size, troubles, group="tp", title="VLLM::Worker_TP", method="spawn"):
    """Returns the engine's ends of the pipes, and the processes. `troubles`: rank to function."""
    context = multiprocessing.get_context(method)
    channels, workers = [], []
    for rank in range(size):
        mine, theirs = context.Pipe()
        arguments = theirs, group, rank, size, troubles.get(rank), f"{title}{rank}"
        worker = context.Process(target=tp_worker, args=arguments, name=f"{title}{rank}", daemon=True)
        worker.start()
        theirs.close()
        channels.append(mine)
        workers.append(worker)
    return channels, workers


def model_worker(address, group, rank, size):
    """A worker that the engine started as a program of its own."""
    rank, trouble = int(rank), os.environ.get("TROUBLE")
    channel = Wire.connect(address)
    channel.send({"hello": rank})
    Worker(group, rank, int(size), globals()[trouble] if trouble else None).serve(channel)


def start_workers(size, troubles, listener, group="tp"):
    """As `spawn_workers`, for workers that connect to the socket `listener`."""
    address = listener.getsockname()
    address = address if isinstance(address, str) else address[1]
    workers = []
    for rank in range(size):
        trouble = troubles.get(rank)
        environment = {"TROUBLE": trouble.__name__} if trouble else {}
        workers.append(start("model_worker", address, group, rank, size, **environment))
    wires = [Wire(listener.accept()[0]) for _ in workers]
    wires.sort(key=lambda wire: wire.recv()["hello"])
    return wires, workers


def listen_unix(name="engine"):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(scratch(name))
    listener.listen()
    return listener


def listen_tcp():
    return socket.create_server(("127.0.0.1", 0))


def ring_worker(path, group, rank, size):
    trouble = os.environ.get("TROUBLE")
    set_title(f"sglang::scheduler_TP{rank}")
    worker = Worker(group, int(rank), int(size), globals()[trouble] if trouble else None)
    worker.ring = Ring(path).other_end()
    worker.serve(worker.ring)


def start_ring_workers(size, troubles, group="tp"):
    rings, workers = [], []
    for rank in range(size):
        path = scratch(f"ring{rank}")
        rings.append(Ring(path))
        environment = {"TROUBLE": troubles[rank].__name__} if rank in troubles else {}
        workers.append(start("ring_worker", path, group, rank, size, **environment))
    return rings, workers


# Troubles of a worker. Each writes the truth first, and blocks.


def lose_request(_worker):
    """A sign for `tp_worker`; the message is lost before the worker sees it."""


def allocate_blocks(_worker):
    """The thread that swaps holds the lock of the block table, and waits for a page."""
    blame(["host_lock", "missing_rank"], "allocate_blocks")
    table, held, page = threading.Lock(), threading.Event(), os.pipe()

    def swap_out():
        with table:
            held.set()
            os.read(page[0], 1)

    in_thread(swap_out, name="swapper")
    held.wait()
    with table:
        raise AssertionError


def report_load():
    while True:
        time.sleep(0.05)


def encode_prompts(_worker):
    """A tokenizer's extension reads a pipe that nobody writes, and keeps the GIL."""
    blame(["gil_deadlock"], "encode_prompts")
    in_thread(report_load, name="load")
    vocabulary, _writing = os.pipe()
    ctypes.PyDLL(None).read(vocabulary, ctypes.create_string_buffer(1), 1)


def encode_in_background(worker):
    """Encodes in another thread, so that the main thread no longer gets the GIL."""
    in_thread(encode_prompts, worker, name="tokenizer")
    while True:
        time.sleep(0.01)


def fetch_adapter(_worker):
    """The registry of adapters accepts a connection, and never answers."""
    blame(["missing_rank"], "fetch_adapter")
    registry = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(registry.getsockname()) as connection:
        connection.sendall(b"GET /adapters/7 HTTP/1.1\r\n\r\n")
        connection.recv(1)


def wait_for_sampler(_worker):
    """The sampler sets its flag, and notifies nobody."""
    blame(["host_lock", "missing_rank"], "wait_for_sampler")
    condition = threading.Condition()
    with condition:
        condition.wait()


def gather_inputs(_worker):
    """Both threads of the pool wait for tasks that the pool has no thread for."""
    blame(["host_lock", "missing_rank"], "gather_inputs")
    pool = concurrent.futures.ThreadPoolExecutor(2, "inputs")

    def read_part(part):
        return pool.submit(str, part).result()

    def read_image(image):
        started.wait()
        return read_part(image)

    started = threading.Barrier(2)
    for image in [pool.submit(read_image, number) for number in range(2)]:
        image.result()


def next_image(_worker):
    """The decoder of images has stopped without a word, so nothing comes into the queue."""
    blame(["host_lock", "data_loader", "missing_rank"], "next_image")
    queue.Queue(4).get()


def write_trace(_worker):
    """The thread that drains the pipe of the trace has ended, and the pipe is full."""
    blame(["storage_io", "missing_rank"], "write_trace")
    _reading, writing = os.pipe()
    with open(writing, "wb") as trace:
        trace.write(bytes(1 << 20))


def load_adapter(_worker):
    """The weights come through a FIFO that nobody opens for writing."""
    blame(["storage_io", "missing_rank"], "load_adapter")
    path = scratch("adapter")
    os.mkfifo(path)
    with open(path, "rb") as file:
        file.read()


def lock_cache_folder(_worker):
    """The worker locks the folder of its cache a second time through another descriptor."""
    blame(["storage_io", "host_lock", "missing_rank"], "lock_cache_folder")
    with open(scratch("cache"), "w") as first, open(scratch("cache"), "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def join_prefetch(_worker):
    """The thread that prefetches cache blocks waits for an event that is never set."""
    blame(["host_lock", "missing_rank"], "join_prefetch")
    in_thread(threading.Event().wait, name="prefetch").join()


def back_off(_worker):
    """A retry has computed a pause of weeks."""
    blame(["missing_rank"], "back_off")
    time.sleep(0.1 * 2**24)


def spin_for_ready(worker):
    """A busy loop over a flag that nobody sets."""
    blame(["missing_rank"], "spin_for_ready")
    worker.ready = False
    while not worker.ready:
        pass


def freeze(_worker):
    """An operator stops the worker to look at it, and forgets it."""
    blame(["process_stopped"], "freeze")
    os.kill(os.getpid(), signal.SIGSTOP)


def run_out_of_memory(_worker):
    """The kernel kills the worker."""
    blame(["process_dead"], None)
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error(_worker):
    """An exception ends the worker."""
    blame(["process_dead"], None)
    raise RuntimeError("out of blocks")


def skip_empty_layer(_worker):
    """The worker leaves out a layer that has no tokens for it, and waits for the next batch."""
    blame(["missing_rank"], "wait_for_batch")
    return SKIP


def pad_batch(worker):
    """The worker pads its batch to another size."""
    blame(["size_mismatch"], "pad_batch")
    worker.comm.all_reduce(cuda.Buffer(8192), worker.stream)
    worker.stream.synchronize()


def gather_logits(worker):
    """The worker gathers the logits where all others reduce."""
    blame(["op_mismatch", "size_mismatch"], "gather_logits")
    worker.comm.all_gather(cuda.Buffer(4096 // worker.size), worker.hidden, worker.stream)
    worker.stream.synchronize()


def autotune(worker):
    """A kernel of the autotuner never ends."""
    blame(["kernel_hang"], "autotune")
    cuda.Kernel("autotune_gemm", 10**12).launch(worker.stream)
    worker.stream.synchronize()


# Troubles of an engine, or of another process without a device.


def lock_scheduler(_engine):
    """The thread of the statistics holds the scheduler's lock while it waits for its server."""
    blame(["host_lock", "missing_rank", "unknown"], "lock_scheduler")
    lock, held, server = threading.Lock(), threading.Event(), listen_tcp()

    def push_statistics():
        with lock:
            held.set()
            socket.create_connection(server.getsockname()).recv(1)

    in_thread(push_statistics, name="statistics")
    held.wait()
    with lock:
        raise AssertionError


# Scenarios: an engine with pipes to four workers.


@scenario
def pipe_worker_lock():
    """Worker 2 waits for its block table, whose lock its own swapper holds; the engine waits."""
    channels, _ = spawn_workers(4, {2: allocate_blocks})
    Engine(channels).serve()


@scenario
def pipe_worker_killed():
    """Worker 1 is killed in the middle of a batch; the engine stays polite and does not look."""
    channels, _ = spawn_workers(4, {1: run_out_of_memory})
    Engine(channels, polite=True).serve()


@scenario
def pipe_worker_gil():
    """The tokenizer thread of worker 3 keeps the GIL in a blocking read."""
    channels, _ = spawn_workers(4, {3: encode_in_background})
    Engine(channels, polite=True).serve()


@scenario
def pipe_lost_request():
    """The input thread of worker 1 drops a batch, so its main thread enters no collective."""
    channels, _ = spawn_workers(4, {1: lose_request})
    Engine(channels, polite=True).serve()


@scenario
def pipe_worker_skips():
    """Worker 2 leaves one all_reduce out, and waits for the next batch."""
    channels, _ = spawn_workers(4, {2: skip_empty_layer})
    Engine(channels, polite=True).serve()


@scenario
def pipe_engine_lock():
    """The engine has given the batch to two of four workers when its scheduler's lock blocks it."""
    channels, _ = spawn_workers(4, {})
    Engine(channels, trouble=lock_scheduler).serve()


@scenario
def pipe_two_culprits():
    """Worker 1 is stopped, and worker 3 waits for a silent registry, in the same layer."""
    channels, workers = spawn_workers(4, {1: freeze, 3: fetch_adapter})

    def tell_both(_engine):
        blame(["process_stopped", "missing_rank"], "fetch_adapter", workers[1].pid, workers[3].pid)

    Engine(channels, trouble=tell_both, polite=True).serve()


@scenario
def pipe_engine_exits():
    """The engine is the launched command, and ends after half of a batch; its workers live on,
    because each holds the other ends of the pipes that it inherited."""
    channels, workers = [], []
    for rank in range(4):
        mine, theirs = multiprocessing.Pipe()
        channels.append(mine)
        workers.append(os.fork())
        if workers[-1] == 0:
            outlive_parent()
            set_title(f"VLLM::Worker_TP{rank}")
            Worker("tp", rank, 4).serve(theirs)

    def fail(_engine):
        blame(["process_dead"], None)
        os._exit(1)

    Engine(channels, trouble=fail).serve()


def detokenizer(results, outputs):
    """The process that collects the results; it is stopped in a batch."""
    die_with_parent()
    set_title("VLLM::Detokenizer")
    for step in itertools.count(1):
        results.recv()
        if step == TROUBLE:
            detokenize()
        outputs.send(step)


def detokenize():
    blame(["process_stopped"], "detokenize")
    os.kill(os.getpid(), signal.SIGSTOP)


def output_worker(channel, results, rank):
    """Only worker 0 sends results: large ones, into a pipe."""
    die_with_parent()
    set_title(f"VLLM::Worker_TP{rank}")
    worker = Worker("tp", rank, 3)
    while True:
        worker.execute_model(wait_for_batch(channel)["step"])
        if rank == 0:
            send_outputs(results)


def send_outputs(results):
    results.send(bytes(50_000))


@scenario
def pipe_collector_stopped():
    """The collector of results is stopped; worker 0 blocks on the full pipe to it, and the engine,
    which runs ahead, waits for outputs."""
    context = multiprocessing.get_context("spawn")
    reading, writing = context.Pipe(duplex=False)
    done, outputs = context.Pipe(duplex=False)
    context.Process(target=detokenizer, args=(reading, outputs), name="detokenizer").start()
    pipes = [context.Pipe() for _ in range(3)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=output_worker, args=(theirs, writing, rank), name=f"worker-{rank}").start()
    for step in itertools.count(1):
        for mine, _ in pipes:
            mine.send({"step": step})
        if step > 4:
            while not done.poll(0.5):
                pass
            done.recv()
        time.sleep(0.02)


# Scenarios: the same over Unix sockets, for workers that are programs of their own.


@scenario
def unix_worker_socket():
    """Worker 0 waits for a registry that never answers; the engine blocks in its receive."""
    channels, _ = start_workers(4, {0: fetch_adapter}, listen_unix())
    Engine(channels).serve()


@scenario
def unix_worker_stopped():
    """Worker 2 is stopped by a signal; the engine asks for results with a timeout."""
    channels, _ = start_workers(4, {2: freeze}, listen_unix())
    Engine(channels, polite=True).serve()


@scenario
def unix_worker_full_pipe():
    """Worker 1 writes its trace into a full pipe whose reader has ended."""
    channels, _ = start_workers(4, {1: write_trace}, listen_unix())
    Engine(channels).serve()


def moe_worker(address, rank, odd):
    """Each layer reduces over the tensor group, and then over the expert group."""
    rank = int(rank)
    channel = Wire.connect(address)
    channel.send({"hello": rank})
    worker = Worker("tensor", rank, 4)
    experts = cuda.Communicator.create("experts", rank, 4)
    while True:
        step = wait_for_batch(channel)["step"]
        if step == TROUBLE and rank == int(odd):
            dispatch_experts(worker, experts)
        worker.execute_model(step)
        worker.reduce(experts)
        channel.send({"step": step})


def dispatch_experts(worker, experts):
    blame(["order_mismatch"], "dispatch_experts")
    experts.all_reduce(worker.hidden, worker.stream)
    worker.stream.synchronize()


@scenario
def unix_worker_order():
    """Worker 3 enters the expert group before the tensor group."""
    listener = listen_unix()
    for rank in range(4):
        start("moe_worker", listener.getsockname(), rank, 3)
    wires = [Wire(listener.accept()[0]) for _ in range(4)]
    for wire in wires:
        wire.recv()
    Engine(wires, polite=True).serve()


# Scenarios: over TCP.


@scenario
def tcp_worker_size():
    """Worker 1 pads its batch to another size than the others."""
    channels, _ = start_workers(4, {1: pad_batch}, listen_tcp())
    Engine(channels, polite=True).serve()


@scenario
def tcp_worker_raises():
    """An exception ends worker 2, while the engine waits for worker 0."""
    channels, _ = start_workers(4, {2: raise_error}, listen_tcp())
    Engine(channels).serve()


@scenario
def tcp_worker_operation():
    """Worker 3 gathers where all others reduce."""
    channels, _ = start_workers(4, {3: gather_logits}, listen_tcp())
    Engine(channels).serve()


@scenario
def tcp_worker_busy():
    """Worker 0 spins on a flag that nobody sets."""
    channels, _ = start_workers(4, {0: spin_for_ready}, listen_tcp())
    Engine(channels, polite=True).serve()


def key_value_store(listener):
    """Answers `get` when the key is set, as TCPStore does."""
    keys, changed = {}, threading.Condition()

    def serve(wire):
        with contextlib.suppress(EOFError):
            while True:
                request = wire.recv()
                with changed:
                    if "value" in request:
                        keys[request["key"]] = request["value"]
                        changed.notify_all()
                    changed.wait_for(functools.partial(keys.__contains__, request["key"]))
                wire.send({"value": keys[request["key"]]})

    while True:
        in_thread(serve, Wire(listener.accept()[0]), name="store-client")


def get_layout(_worker):
    """The worker asks the store for the layout of the batch after the next, which is not set."""
    blame(["missing_rank", "comm_init"], "get_layout")
    store = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
    store.sendall(json.dumps({"key": f"layout/{TROUBLE + 2}"}).encode() + b"\n")
    store.recv(4096)


@scenario
def tcp_store_key():
    """Worker 2 waits for a key of the store in the engine that nobody sets."""
    store = listen_tcp()
    in_thread(key_value_store, store, name="store")
    os.environ["STORE"] = str(store.getsockname()[1])
    channels, _ = start_workers(4, {2: get_layout}, listen_tcp())
    Engine(channels, polite=True).serve()


# Scenarios: over counters in shared memory, which the workers poll.


def overrun(worker):
    """The worker takes the ring for wrapped around, and polls for a batch that has been."""
    blame(["missing_rank"], "recv")
    worker.ring.seen = 1 << 40
    worker.ring.recv()


@scenario
def ring_worker_overrun():
    """Worker 3 has lost count of the ring, and polls for a batch that never comes."""
    rings, _ = start_ring_workers(4, {3: overrun})
    Engine(rings, polite=True).serve()


@scenario
def ring_worker_condition():
    """Worker 0 waits for a condition that nobody notifies."""
    rings, _ = start_ring_workers(4, {0: wait_for_sampler})
    Engine(rings, polite=True).serve()


@scenario
def ring_worker_killed():
    """Worker 3 is killed; both sides of the ring poll on."""
    rings, _ = start_ring_workers(4, {3: run_out_of_memory})
    Engine(rings).serve()


def ring_engine(*paths):
    Engine([Ring(path) for path in paths], trouble=run_out_of_memory).serve()


@scenario
def ring_engine_killed():
    """The engine is killed when it has written the batch for one of three workers: the other two
    poll their rings. The front end has seen the end of the engine, and waits."""
    start_ring_workers(3, {})
    engine = start("ring_engine", *[scratch(f"ring{rank}") for rank in range(3)])
    engine.wait()
    while True:
        time.sleep(0.5)


# Scenarios: an HTTP front end.


def serve_http(handle, port=0):
    """A front end in threads; `handle` answers a POST. Returns its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.reply(handle(self))

        def do_GET(self):
            self.reply({"status": "ok"})

        def reply(self, message):
            body = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    in_thread(server.serve_forever, name="http")
    return server.server_port


def send_prompts(port, count=1 << 30, pause=0.025):
    """A client that asks one question after the other."""
    for number in range(count):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps({"n": number}).encode())
        with urllib.request.urlopen(request, timeout=1 << 20) as answer:
            answer.read()
        time.sleep(pause)


def probe_health(port):
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            answer.read()
        time.sleep(0.5)


class Frontend:
    """Hands prompts to the engine's queue, and waits for the batch that has answered them."""

    def __init__(self, engine):
        self.engine, self.prompts, self.answers = engine, queue.Queue(), queue.Queue()

    def generate(self, _handler):
        self.prompts.put(1)
        return {"text": self.answers.get()}

    def run(self):
        for step in itertools.count(1):
            self.prompts.get()
            self.engine.schedule_batch(step)
            self.engine.collect_results(step)
            self.answers.put(step)


def serve_behind_http(engine, **load):
    frontend = Frontend(engine)
    port = serve_http(frontend.generate)
    in_thread(lambda: send_prompts(port, **load), name="client")
    in_thread(probe_health, port, name="probe")
    frontend.run()


@scenario
def http_pool_starved():
    """The pool of worker 1 is full of tasks that wait for the pool; the front end stays healthy."""
    channels, _ = spawn_workers(4, {1: gather_inputs})
    serve_behind_http(Engine(channels, polite=True))


@scenario
def http_queue_empty():
    """Worker 2 waits for an image that its decoder never delivers; /health still answers."""
    channels, _ = spawn_workers(3, {2: next_image}, method="forkserver")
    serve_behind_http(Engine(channels))


@scenario
def http_engine_gil():
    """An extension keeps the GIL of the engine, so neither the scheduler nor the front end goes on;
    half of the workers have their batch, and wait for the others, which have none."""
    channels, _ = start_workers(4, {}, listen_tcp())
    serve_behind_http(Engine(channels, trouble=encode_prompts))


def engine_behind_socket(address):
    """An engine process with two workers, which gets its prompts from the front end's socket."""
    front = Wire.connect(address)
    channels, _ = spawn_workers(2, {})
    engine = Engine(channels)
    while True:
        step = front.recv()["step"]
        engine.schedule_batch(step)
        engine.collect_results(step)
        front.send({"step": step})


@scenario
def http_front_end_lock():
    """The front end is another process than the engine, and waits for its own tokenizer; the engine
    and its workers have nothing to do although clients wait."""
    listener = listen_unix()
    start("engine_behind_socket", listener.getsockname())
    engine = Wire(listener.accept()[0])
    prompts = itertools.count(1)

    def generate(_handler):
        step = next(prompts)
        if step == TROUBLE:
            wait_for_tokenizer()
        engine.send({"step": step})
        return engine.recv()

    port = serve_http(generate)
    in_thread(send_prompts, port, name="client")
    probe_health(port)


def wait_for_tokenizer():
    blame(["host_lock", "missing_rank", "unknown"], "wait_for_tokenizer")
    threading.Event().wait()


@idle
def http_long_poll():
    """As `http_front_end_lock`, but the request waits for news, which the next request may bring;
    no other request comes."""
    blame_nobody()
    listener = listen_unix()
    start("engine_behind_socket", listener.getsockname())
    engine = Wire(listener.accept()[0])
    prompts, news = itertools.count(1), threading.Event()

    def generate(_handler):
        step = next(prompts)
        if step == TROUBLE:
            news.wait()
        engine.send({"step": step})
        return engine.recv()

    port = serve_http(generate)
    in_thread(send_prompts, port, name="client")
    probe_health(port)


@idle
def http_idle():
    """The load has ended, and the server waits for requests."""
    blame_nobody()
    channels, _ = spawn_workers(4, {})
    serve_behind_http(Engine(channels), count=TROUBLE)


@healthy
def http_healthy():
    """The server serves one request after the other."""
    blame_nobody()
    channels, _ = spawn_workers(4, {})
    serve_behind_http(Engine(channels, polite=True), pause=0.2)


@healthy
def http_rare_requests():
    """A request comes every six seconds; between them all workers wait for the engine."""
    blame_nobody()
    channels, _ = start_workers(3, {}, listen_unix())
    serve_behind_http(Engine(channels), pause=6)


@passes
def http_slow_reload():
    """Worker 1 needs twelve seconds for new weights, and then the server goes on."""
    blame_nobody()
    channels, _ = spawn_workers(4, {1: reload_weights})
    serve_behind_http(Engine(channels, polite=True))


def reload_weights(worker):
    for _ in range(120):
        worker.hidden.fill(1.0)
        time.sleep(0.1)


# Scenarios: two servers under one command.


def single_server(name, prompts=1 << 30):
    """A server whose engine is also rank 0, with one more worker."""
    trouble = globals().get(os.environ.get("TROUBLE"))
    os.environ.pop("TROUBLE", None)
    listener = listen_unix(name)
    start("model_worker", listener.getsockname(), name, 1, 2, **({"TROUBLE": trouble.__name__} if trouble else {}))
    wire = Wire(listener.accept()[0])
    wire.recv()
    driver = Worker(name, 0, 2)
    for step in range(1, int(prompts)):
        wire.send({"step": step})
        driver.execute_model(step)
        wire.recv()
        time.sleep(0.02)
    accept_requests(listener)


def accept_requests(listener):
    while True:
        listener.accept()


def serve_both(first, second, prompts=1 << 30):
    """Starts the servers `llama` and `qwen`, and waits for them as a shell does."""
    servers = [
        start("single_server", "llama", prompts, **({"TROUBLE": first.__name__} if first else {})),
        start("single_server", "qwen", **({"TROUBLE": second.__name__} if second else {})),
    ]
    for server in servers:
        server.wait()


@scenario
def two_servers_fifo():
    """The worker of qwen loads an adapter from a FIFO that nobody writes; llama serves on."""
    serve_both(None, load_adapter)


@scenario
def two_servers_one_idle():
    """llama has no more requests; the worker of qwen is killed."""
    serve_both(None, run_out_of_memory, prompts=40)


@scenario
def two_servers_flock():
    """The worker of llama waits for a file lock that it holds itself; qwen serves on."""
    serve_both(lock_cache_folder, None)


def wait_for_peer_pid(name):
    path = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], name)
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        return int(file.read())


def join_after_peer(worker):
    """Tells both culprits when the other server's worker has said who it is."""
    blame(["process_dead", "host_lock"], "join_prefetch", os.getpid(), wait_for_peer_pid("killed"))
    join_prefetch(worker)


def leave_pid_and_die(_worker):
    path = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "killed")
    with open(f"{path}.new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{path}.new", path)
    os.kill(os.getpid(), signal.SIGKILL)


@scenario
def two_servers_both():
    """The worker of llama is killed, and the one of qwen joins a thread that never ends."""
    serve_both(leave_pid_and_die, join_after_peer)


# Scenarios: a server beside a training job that has ranks.


def trainer(trouble=""):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = Worker("train", rank, world, globals().get(trouble), device=4 + rank)
    for step in itertools.count(1):
        worker.execute_model(step)
        time.sleep(0.03)


def start_training(troubles):
    for rank in range(2):
        start("trainer", troubles[rank].__name__ if rank in troubles else "", RANK=str(rank), WORLD_SIZE="2")


@scenario
def beside_training_server():
    """Worker 1 of the server that evaluates waits for a silent registry; the training goes on."""
    start_training({})
    channels, _ = start_workers(2, {1: fetch_adapter}, listen_unix())
    Engine(channels, polite=True).serve()


@scenario
def beside_training_rank():
    """Rank 1 of the training waits for a condition; the server without ranks goes on."""
    start_training({1: wait_for_sampler})
    channels, _ = start_workers(2, {}, listen_unix())
    Engine(channels, polite=True).serve()


@scenario
def beside_training_killed():
    """Worker 0 of the server is killed; the training with ranks goes on."""
    start_training({})
    channels, _ = start_workers(2, {0: run_out_of_memory}, listen_tcp())
    Engine(channels, polite=True).serve()


# Scenarios: two replicas of two workers each.


@scenario
def replica_sleeps():
    """Worker 1 of replica 1 sleeps for weeks before a retry; replica 0 serves on."""
    first, _ = spawn_workers(2, {}, group="replica0", title="VLLM::DP0_Worker_TP")
    second, _ = spawn_workers(2, {1: back_off}, group="replica1", title="VLLM::DP1_Worker_TP")
    in_thread(Engine(second, polite=True).serve, name="engine-dp1")
    Engine(first, polite=True).serve()


@scenario
def replica_engine_lock():
    """The engine thread of replica 1 waits for the scheduler's lock, so one of its workers has the
    batch and the other has not; replica 0, in the same process, serves on."""
    first, _ = start_workers(2, {}, listen_tcp(), group="replica0")
    second, _ = start_workers(2, {}, listen_tcp(), group="replica1")
    in_thread(Engine(second, trouble=lock_scheduler).serve, name="engine-dp1")
    Engine(first, polite=True).serve()


def expert_replica(channel, replica, rank, trouble):
    """After each batch the workers of all replicas agree whether one has more work."""
    die_with_parent()
    set_title(f"sglang::scheduler_DP{replica}_TP{rank}")
    worker = Worker(f"replica{replica}", rank, 2, trouble, device=2 * replica + rank)
    everyone = cuda.Communicator.create("everyone", 2 * replica + rank, 4)
    while True:
        step = wait_for_batch(channel)["step"]
        worker.execute_model(step)
        worker.reduce(everyone)
        channel.send({"step": step})


@scenario
def replica_killed():
    """Worker 0 of replica 1 is killed; replica 0 waits for it in the group of all replicas."""
    context = multiprocessing.get_context("spawn")
    channels = []
    for number in range(4):
        mine, theirs = context.Pipe()
        arguments = theirs, number // 2, number % 2, run_out_of_memory if number == 2 else None
        context.Process(target=expert_replica, args=arguments, name=f"dp{number // 2}", daemon=True).start()
        channels.append(mine)
    in_thread(Engine(channels[2:], polite=True).serve, name="engine-dp1")
    Engine(channels[:2], polite=True).serve()


# Scenarios: prefill and decode on different workers, which send the cache from one to the other.


def prefill_worker(address, rank, trouble=""):
    rank = int(rank)
    channel = Wire.connect(address)
    channel.send({"hello": rank})
    worker = Worker("prefill", rank, 2, globals().get(trouble))
    transfer = cuda.Communicator.create("transfer", rank, 4)
    while True:
        step = wait_for_batch(channel)["step"]
        worker.execute_model(step)
        send_cache(worker, transfer)
        channel.send({"step": step})


def send_cache(worker, transfer):
    transfer.send(worker.hidden, worker.rank + 2, worker.stream)
    worker.stream.synchronize()


def decode_worker(address, rank, trouble=""):
    rank = int(rank)
    channel = Wire.connect(address)
    channel.send({"hello": rank + 2})
    worker = Worker("decode", rank, 2, device=rank + 2)
    transfer = cuda.Communicator.create("transfer", rank + 2, 4)
    while True:
        step = wait_for_batch(channel)["step"]
        if step == TROUBLE and trouble:
            globals()[trouble](worker, transfer)
        receive_cache(worker, transfer)
        worker.execute_model(step)
        channel.send({"step": step})


def receive_cache(worker, transfer, count=4096):
    transfer.recv(cuda.Buffer(count), worker.rank, worker.stream)
    worker.stream.synchronize()


def serve_disaggregated(prefill="", decode=""):
    """Worker 1 of each half may have a trouble."""
    listener = listen_tcp()
    port = listener.getsockname()[1]
    for rank in range(2):
        start("prefill_worker", port, rank, prefill if rank else "")
        start("decode_worker", port, rank, decode if rank else "")
    wires = [Wire(listener.accept()[0]) for _ in range(4)]
    wires.sort(key=lambda wire: wire.recv()["hello"])
    Engine(wires, polite=True).serve()


def wait_for_free_slot(_worker, _transfer):
    """The decoder counts one slot too few, and waits until one is returned."""
    blame(["host_lock", "p2p_unmatched", "missing_rank"], "wait_for_free_slot")
    threading.Semaphore(0).acquire()


def expect_more_blocks(worker, transfer):
    """The decoder expects twice the blocks that are sent."""
    blame(["size_mismatch"], "receive_cache")
    receive_cache(worker, transfer, count=8192)


@scenario
def disaggregated_decode_slot():
    """Decode worker 1 waits for a slot, so it does not receive what prefill worker 1 sends."""
    serve_disaggregated(decode=wait_for_free_slot)


@scenario
def disaggregated_decode_size():
    """Decode worker 1 receives more blocks than prefill worker 1 sends."""
    serve_disaggregated(decode=expect_more_blocks)


@scenario
def disaggregated_prefill_stopped():
    """Prefill worker 1 is stopped: its peer waits in a collective, and decode worker 1 for the
    cache."""
    serve_disaggregated(prefill=freeze)


@scenario
def disaggregated_prefill_killed():
    """Prefill worker 1 is killed."""
    serve_disaggregated(prefill=run_out_of_memory)


# Scenarios: workers that a zygote forks.


def zygote(path, spoil=""):
    """Forks a worker for each line; in generation 1, `spoil` comes before or after a fork."""
    control = Wire.connect(path)
    set_title("zygote")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging, log = threading.Lock(), None
    while True:
        order = control.recv()
        if order["generation"] == 1 and order["rank"] == 1:
            if spoil == "freeze":
                pause_zygote()
            elif spoil == "lock":
                log = in_thread(write_log, logging, name="log")
                while not logging.locked():
                    pass
        if os.fork() == 0:
            die_with_parent()
            set_title(f"worker.{order['generation']}.{order['rank']}")
            with contextlib.suppress(EOFError):
                serve_forked(Wire.connect(order["address"]), logging, **order)
            sys.exit()
        if log:
            log.join()


def write_log(logging):
    with logging:
        time.sleep(0.3)


def pause_zygote():
    blame(["process_stopped", "comm_init"], "pause_zygote")
    os.kill(os.getpid(), signal.SIGSTOP)


def serve_forked(channel, logging, generation, rank, size, trouble, **_):
    channel.send({"hello": rank})
    log_start(logging, generation)
    Worker(f"generation{generation}", rank, size, globals().get(trouble)).serve(channel)


def log_start(logging, generation):
    if generation == 1 and logging.locked():
        blame(["host_lock", "comm_init", "missing_rank"], "log_start")
    with logging:
        pass


def serve_with_zygote(spoil="", trouble=None, size=3):
    """Serves 100 batches with one generation of workers, and then starts another."""
    control, listener = listen_unix("zygote"), listen_unix()
    start("zygote", control.getsockname(), spoil)
    orders = Wire(control.accept()[0])
    for generation in range(2):
        for rank in range(size):
            mine = trouble.__name__ if trouble and rank == size - 1 and generation == 0 else ""
            orders.send(
                {"generation": generation, "rank": rank, "size": size, "trouble": mine}
                | {"address": listener.getsockname()}
            )
        wires = []
        while len(wires) < size:
            wires.append(Wire(listener.accept()[0]))
        wires.sort(key=lambda wire: wire.recv()["hello"])
        engine = Engine(wires, polite=True)
        for step in range(1, TROUBLE + 1 if generation == 0 else 1 << 30):
            engine.schedule_batch(step)
            engine.collect_results(step)
            time.sleep(0.02)
        # The old generation sees the end of its sockets, and exits.
        for wire in wires:
            wire.lines.close()
            wire.sock.close()


@scenario
def zygote_inherited_lock():
    """The second generation of worker 1 inherits a lock that a thread of the zygote held during the
    fork; the others wait for it in the creation of their communicator."""
    serve_with_zygote(spoil="lock")


@scenario
def zygote_stopped():
    """The zygote is stopped before it forks worker 1 of the second generation: worker 0 waits for
    the missing one in the creation of the communicator."""
    serve_with_zygote(spoil="freeze")


@scenario
def zygote_worker_killed():
    """The last worker is killed, and the zygote ignores the ends of its children."""
    serve_with_zygote(trouble=run_out_of_memory, size=4)


@scenario
def zygote_worker_gil():
    """The last worker keeps its GIL in an extension that reads a pipe."""
    serve_with_zygote(trouble=encode_prompts, size=4)


# Scenarios: warm-up, and communicators that come late.


def warm_worker(rank, trouble=""):
    """Warms up one size after the other; would then serve."""
    rank = int(rank)
    worker = Worker("warm", rank, 4, globals().get(trouble))
    for size in itertools.count(1):
        worker.execute_model(size)
        time.sleep(0.03)


def report_progress():
    while True:
        time.sleep(0.5)


@scenario
def warmup_kernel():
    """A kernel of the autotuner never ends on worker 2; the server waits for the warm-up."""
    for rank in range(4):
        start("warm_worker", rank, autotune if rank == 2 else "")
    report_progress()


def finish_early(_worker):
    """The list of sizes of this worker is shorter, and it waits for requests."""
    blame(["missing_rank", "teardown"], "finish_early")
    listen_unix(f"warm{os.getpid()}").accept()


@scenario
def warmup_shorter():
    """Worker 3 has fewer sizes to warm up, and already waits for requests."""
    for rank in range(4):
        start("warm_worker", rank, finish_early if rank == 3 else "")
    report_progress()


def late_worker(rank, condition, place):
    """Serves in pairs first, and then creates a communicator of all."""
    rank = int(rank)
    worker = Worker(f"pair{rank // 2}", rank % 2, 2, device=rank)
    for step in range(TROUBLE * 2 // 3):
        worker.execute_model(step)
        time.sleep(0.03)
    if condition == "before":
        globals()[place](worker)
    everyone = cuda.Communicator.create("everyone", rank, 4)
    for step in range(1 << 30):
        worker.execute_model(step)
        if step == TROUBLE // 3 and condition == "after":
            globals()[place](worker)
        worker.reduce(everyone)
        time.sleep(0.03)


def start_late_workers(odd, condition, place):
    for rank in range(4):
        start("late_worker", rank, condition if rank == odd else "", place)
    report_progress()


def find_topology(_worker):
    """A probe of the links waits for an event that never comes."""
    blame(["host_lock", "comm_init", "missing_rank"], "find_topology")
    threading.Event().wait()


@scenario
def world_after_pairs():
    """Worker 3 still probes its links when the others create the communicator of all."""
    start_late_workers(3, "before", find_topology)


@scenario
def world_after_pairs_killed():
    """Worker 1 is killed before the communicator of all is created."""
    start_late_workers(1, "before", run_out_of_memory)


@scenario
def world_then_slot():
    """Worker 0 waits for a slot of a semaphore, between its pair and all."""
    start_late_workers(0, "after", acquire_slot)


def acquire_slot(_worker):
    blame(["host_lock", "missing_rank"], "acquire_slot")
    slots = multiprocessing.get_context("fork").Semaphore(0)
    slots.acquire()


def main(names):
    match sys.argv[1:]:
        case ["--list"]:
            for name, (kind, seconds) in SCENARIOS.items():
                if name in names and names[name].__module__ == names["__name__"]:
                    print(name, kind, seconds)
        case ["--run", function, *arguments]:
            names[function](*arguments)
        case [name]:
            names[name]()


if __name__ == "__main__":
    main(globals())
