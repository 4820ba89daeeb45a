"""Inference engines, trainers and the services around them, on the simulated device. No process has
a rank variable.

    engines.py SCENARIO     works until the trouble of the scenario, at step TROUBLE
    engines.py --list       one line for each scenario: NAME hang|idle|healthy SECONDS

The command starts all other processes. Before the trouble begins, the process that knows the
culprit writes the truth to the file XPU_HANGS_TRUTH.
"""

import asyncio
import collections
import concurrent.futures
import ctypes
import fcntl
import http.client
import http.server
import itertools
import json
import mmap
import multiprocessing
import multiprocessing.connection
import multiprocessing.managers
import os
import pdb
import pty
import queue
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib

TROUBLE = 40
PACE = 0.05
SCENARIOS = {}


def hang(function):
    SCENARIOS[function.__name__] = ("hang", 0)
    return function


def idle(function):
    SCENARIOS[function.__name__] = ("idle", 25)
    return function


def healthy(function):
    SCENARIOS[function.__name__] = ("healthy", 25)
    return function


# The truth.


def write_truth(truth):
    """Only the first truth counts."""
    path = os.environ.get("XPU_HANGS_TRUTH")
    if not path or os.path.exists(path):
        return
    part = f"{path}.{os.getpid()}"
    with open(part, "w") as file:
        json.dump(truth, file)
    os.replace(part, path)


def blame(causes, place, *culprits):
    """Names the processes to blame: the calling process if there are no `culprits`."""
    culprits = sorted(culprits) or [os.getpid()]
    write_truth({"hang": True, "culprits": culprits, "causes": causes, "place": place})


def blame_nobody():
    write_truth({"hang": False})


# Processes.


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def die_with_starter():
    """For the child of a fork server, whose parent outlives the process that asked for it."""
    die_with_parent()
    in_thread(follow, multiprocessing.parent_process(), name="follow-starter")


def follow(process):
    process.join()
    os.kill(os.getpid(), signal.SIGKILL)


def start(function, *arguments, fds=(), **options):
    """Runs a function of this program in a new process that inherits the descriptors `fds`."""
    command = [sys.executable, os.path.abspath(__file__), "--run", function, *map(str, arguments)]
    return subprocess.Popen(command, preexec_fn=die_with_parent, pass_fds=fds, **options)


def wait_for_all(processes):
    for process in processes:
        process.wait()


def in_thread(function, *arguments, name=None):
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


# Messages and files.


def scratch(name):
    """A path in the folder of this run."""
    return os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], name)


class Lines:
    """Messages as lines of JSON over two binary files."""

    def __init__(self, reading, writing):
        self.reading, self.writing = reading, writing

    @classmethod
    def over(cls, sock):
        """Without a buffer for reading, so that a selector sees each unread line."""
        return cls(sock.makefile("rb", buffering=0), sock.makefile("wb"))

    @classmethod
    def of_child(cls, process):
        return cls(process.stdout, process.stdin)

    def send(self, message):
        self.writing.write(json.dumps(message).encode() + b"\n")
        self.writing.flush()

    def recv(self):
        line = self.reading.readline()
        if not line:
            sys.exit(0)
        return json.loads(line)

    def ask(self, message):
        self.send(message)
        return self.recv()


def listen(name=None, kind=socket.SOCK_STREAM):
    """A listening socket: of the family AF_UNIX with a `name`, else on a free port of loopback."""
    sock = socket.socket(socket.AF_UNIX if name else socket.AF_INET, kind)
    sock.bind(scratch(name) if name else ("127.0.0.1", 0))
    sock.listen(16)
    return sock


def connect(name, kind=socket.SOCK_STREAM):
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.connect(scratch(name))
    return sock


def connect_port(port):
    return socket.create_connection(("127.0.0.1", int(port)))


def port_of(listener):
    return listener.getsockname()[1]


def accept_all(listener, count):
    """The connections of `count` peers, in the order of the indexes that they send first."""
    found = {}
    while len(found) < count:
        lines = Lines.over(listener.accept()[0])
        found[lines.recv()] = lines
    return [found[index] for index in sorted(found)]


def storage(name):
    """A descriptor of a file on a mount that does not answer: a FIFO without a writer."""
    path = scratch(name)
    if not os.path.exists(path):
        os.mkfifo(path)
    return os.open(path, os.O_RDWR)


class Model:
    """Two kernels on a stream, and an all-reduce if the model is sharded over `size` processes."""

    def __init__(self, index, group=None, size=0, microseconds=3000):
        # Only processes that use the device load it: a forked child cannot use that of its parent.
        import cuda

        cuda.set_device(index)
        self.stream = cuda.Stream()
        self.kernels = [cuda.Kernel(name, microseconds) for name in ("attention", "mlp")]
        self.group = cuda.Communicator.create(group, index, size) if group else None
        self.values = cuda.Buffer(256).fill(1)

    def forward(self):
        for kernel in self.kernels:
            kernel.launch(self.stream)
        if self.group:
            self.group.all_reduce(self.values, self.stream, "max")
        self.stream.synchronize()


# An HTTP front end, a scheduler and two tensor parallel workers: the scheduler takes a lock twice.


@hang
def radix_cache_lock():
    listener = listen("scheduler")
    start("radix_scheduler")
    scheduler = Lines.over(listener.accept()[0])
    turn = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with turn:
                answer = json.dumps(scheduler.ask(request)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    start("http_client", server.server_port)
    server.serve_forever()


def http_client(port):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for prompt in itertools.count():
        opener.open(f"http://127.0.0.1:{port}/generate", json.dumps(prompt).encode()).read()
        time.sleep(PACE)


class RadixCache:
    """Prefixes of prompts. `insert` evicts under the lock that `evict` takes again."""

    def __init__(self):
        self.lock = threading.Lock()
        self.prefixes = []

    def insert(self, prefix):
        with self.lock:
            self.prefixes.append(prefix)
            if len(self.prefixes) > TROUBLE:
                blame(["host_lock"], "RadixCache.evict")
                self.evict()

    def evict(self):
        with self.lock:
            del self.prefixes[:10]


def radix_scheduler():
    front = Lines.over(connect("scheduler"))
    listener = listen("workers")
    for index in range(2):
        start("shard_worker", index, 2)
    workers = accept_all(listener, 2)
    cache = RadixCache()
    while True:
        prompt = front.recv()
        cache.insert(prompt)
        for worker in workers:
            worker.send(prompt)
        front.send([worker.recv() for worker in workers])


def shard_worker(index, size):
    scheduler = Lines.over(connect("workers"))
    scheduler.send(int(index))
    model = Model(int(index), "shards", int(size))
    while True:
        prompt = scheduler.recv()
        model.forward()
        scheduler.send(prompt)


# A router, a prefill and a decode process with a ring in shared memory, whose credits are counters
# of eventfd: the decode process reads an adapter from storage.

SLOTS, SLOT_BYTES = 4, 4096


@hang
def decode_reads_adapter():
    with open(scratch("ring"), "wb") as file:
        file.truncate(SLOTS * SLOT_BYTES)
    semaphore = 1
    libc = ctypes.CDLL(None)
    free, filled = libc.eventfd(SLOTS, semaphore), libc.eventfd(0, semaphore)
    prompts, prompts_end = socket.socketpair()
    tokens, tokens_end = socket.socketpair()
    fds = (free, filled)
    start("prefill", prompts_end.fileno(), *fds, fds=(prompts_end.fileno(), *fds))
    start("decode", tokens_end.fileno(), *fds, fds=(tokens_end.fileno(), *fds))
    prompts_end.close()
    tokens_end.close()
    prefill, decode = Lines.over(prompts), Lines.over(tokens)
    for prompt in itertools.count():
        prefill.send(prompt)
        if prompt >= 2 * SLOTS:
            decode.recv()
            time.sleep(PACE)


def map_ring():
    with open(scratch("ring"), "r+b") as file:
        return mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)


def take(counter):
    os.read(int(counter), 8)


def give(counter):
    os.write(int(counter), (1).to_bytes(8, sys.byteorder))


def prefill(prompts, free, filled):
    router = Lines.over(socket.socket(fileno=int(prompts)))
    ring, model = map_ring(), Model(0)
    for number in itertools.count():
        prompt = router.recv()
        model.forward()
        take(free)
        struct.pack_into("q", ring, number % SLOTS * SLOT_BYTES, prompt)
        give(filled)


def decode(tokens, free, filled):
    router = Lines.over(socket.socket(fileno=int(tokens)))
    ring, model = map_ring(), Model(1)
    for number in itertools.count():
        take(filled)
        (prompt,) = struct.unpack_from("q", ring, number % SLOTS * SLOT_BYTES)
        if number == TROUBLE:
            load_adapter("chat-lora")
        model.forward()
        give(free)
        router.send(prompt)


def load_adapter(name):
    file = storage(name)
    blame(["storage_io"], "load_adapter")
    os.read(file, 1 << 20)


# An engine of spawned processes with queues of multiprocessing: the detokenizer locks the file of
# its vocabulary twice.


@hang
def detokenizer_locks_twice():
    context = multiprocessing.get_context("spawn")
    prompts, logits, texts = context.Queue(), context.Queue(), context.Queue()
    context.Process(target=queue_engine, args=(prompts, logits), daemon=True).start()
    context.Process(target=detokenizer, args=(logits, texts), daemon=True).start()
    for prompt in itertools.count():
        prompts.put(prompt)
        texts.get()
        time.sleep(PACE)


def queue_engine(prompts, logits):
    die_with_parent()
    model = Model(0)
    while True:
        prompt = prompts.get()
        model.forward()
        logits.put(prompt)


class Vocabulary:
    def __enter__(self):
        self.file = open(scratch("vocabulary.lock"), "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()


def detokenizer(logits, texts):
    die_with_parent()
    for number in itertools.count():
        tokens = logits.get()
        with Vocabulary():
            if number == TROUBLE:
                reload_vocabulary()
        texts.put(str(tokens))


def reload_vocabulary():
    """The caller has the lock already, through another open file."""
    blame(["storage_io", "host_lock"], "reload_vocabulary")
    with Vocabulary():
        pass


# A parameter server of two shards and three trainers over TCP: the main thread of a shard ends with
# an exception, and joins threads that wait for it.


@hang
def parameter_server_ends():
    listeners = [listen(), listen()]
    ports = [port_of(listener) for listener in listeners]
    for shard, listener in enumerate(listeners):
        start("parameter_shard", shard, listener.fileno(), fds=(listener.fileno(),))
        listener.close()
    wait_for_all([start("ps_trainer", index, *ports) for index in range(3)])


def ps_trainer(index, *ports):
    shards = [Lines.over(connect_port(port)) for port in ports]
    model = Model(int(index))
    while True:
        for shard in shards:
            shard.ask("pull")
        model.forward()
        for shard in shards:
            shard.ask("push")
        time.sleep(PACE)


def parameter_shard(shard, listener):
    listener = socket.socket(fileno=int(listener))
    gradients = queue.Queue()
    for _ in range(3):
        lines = Lines.over(listener.accept()[0])
        threading.Thread(target=serve_trainer, args=(lines, gradients)).start()
    apply_gradients(gradients, fails=shard == "1")


def serve_trainer(lines, gradients):
    while True:
        if lines.recv() == "push":
            applied = threading.Event()
            gradients.put(applied)
            applied.wait()
        lines.send("done")


def apply_gradients(gradients, fails):
    for update in itertools.count():
        applied = gradients.get()
        if fails and update == 3 * TROUBLE:
            blame(["teardown", "host_lock"], "apply_gradients")
            raise FloatingPointError("the gradients are not finite")
        applied.set()


# Actors and a learner that share a replay ring under a lock of multiprocessing: an actor holds the
# lock while it asks again and again for a license of its simulator.

REPLAY = 64


@hang
def actor_holds_replay_lock():
    context = multiprocessing.get_context("fork")
    ring = context.RawArray("d", REPLAY)
    lock, ready, room = context.Lock(), context.Semaphore(0), context.Semaphore(REPLAY)
    shared = (ring, lock, ready, room)
    processes = [context.Process(target=replay_learner, args=shared)]
    processes += [context.Process(target=replay_actor, args=(index, *shared)) for index in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def replay_actor(index, ring, lock, ready, room):
    die_with_parent()
    for episode in itertools.count():
        time.sleep(PACE)
        room.acquire()
        with lock:
            if index == 2 and episode == TROUBLE:
                blame(["missing_rank", "host_lock"], "check_out_license")
                while not check_out_license():
                    time.sleep(5)
            ring[episode % REPLAY] = episode
        ready.release()


def check_out_license():
    return os.path.exists(scratch("license"))


def replay_learner(ring, lock, ready, room):
    die_with_parent()
    model = Model(0)
    while True:
        for _ in range(3):
            ready.acquire()
            with lock:
                sum(ring)
            room.release()
        model.forward()


# An evaluation harness, its generator, a grader, a sandbox and a solution: a solution never ends.


@hang
def solution_never_ends():
    generator = Lines.of_child(start("generator", stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    with multiprocessing.connection.Listener(scratch("grader"), "AF_UNIX") as listener:
        start("grader")
        grader = listener.accept()
    for problem in range(100):
        answer = generator.ask(problem)
        grader.send(answer)
        grader.recv()


def generator():
    harness = Lines(sys.stdin.buffer, sys.stdout.buffer)
    model = Model(0)
    while True:
        problem = harness.recv()
        for _ in range(10):
            model.forward()
        harness.send(problem)


def grader():
    harness = multiprocessing.connection.Client(scratch("grader"))
    while True:
        sandbox = start("sandbox", harness.recv(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        harness.send(sandbox.communicate()[0])


def sandbox(problem):
    sys.exit(start("solution", problem).wait())


def solution(problem):
    if problem == "5":
        blame(["missing_rank", "unknown"], "solution")
        while not os.path.exists(scratch("never")):
            time.sleep(0.2)
    print(problem)


# Trainers forked by a launcher that sets no variables: the thread that reads the shards of one
# trainer ends with an exception.


@hang
def reader_thread_dies():
    for index in range(4):
        if os.fork() == 0:
            die_with_parent()
            forked_trainer(index, 4)
    for _ in range(4):
        os.wait()


def forked_trainer(index, size):
    shards = queue.Queue(2)
    in_thread(read_shards, index, shards, name="reader")
    model = Model(index, "trainers", size)
    while True:
        shards.get()
        model.forward()
        time.sleep(PACE)


def read_shards(index, shards):
    for number in itertools.count():
        data = struct.pack("i", number)
        if index == 2 and number == TROUBLE:
            data = b""
            blame(["data_loader", "host_lock"], "read_shards")
        shards.put(struct.unpack("i", data))


# A pool embeds documents: a worker of the pool is killed within a task, which never completes.


@hang
def pool_task_is_lost():
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, start_embedder, (context.Value("i", 0),)) as pool:
        for batch in itertools.count():
            pool.map(embed, range(4 * batch, 4 * batch + 4), chunksize=1)


def start_embedder(started):
    die_with_parent()
    with started.get_lock():
        index = started.value
        started.value += 1
    embed.model = Model(index % 8)


def embed(document):
    embed.model.forward()
    time.sleep(PACE)
    if document == 2 * TROUBLE:
        blame(["process_dead", "data_loader"], "embed")
        os.kill(os.getpid(), signal.SIGKILL)
    return document


# A front end waits for a worker, which waits for a forked child. The child inherits a lock that a
# thread of the worker held at the moment of the fork.


@hang
def child_inherits_lock():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start("image_worker", theirs.fileno(), fds=(theirs.fileno(),))
    theirs.close()
    for request in itertools.count():
        ours.send(str(request).encode())
        ours.recv(100)
        time.sleep(PACE)


class Statistics:
    """Counters under a lock. Its thread writes them to disk, for longer than a fork takes."""

    def __init__(self):
        self.lock = threading.Lock()
        self.writing, self.written = threading.Event(), threading.Event()
        in_thread(self.write, name="statistics")

    def write(self):
        time.sleep(TROUBLE * PACE)
        with self.lock:
            self.writing.set()
            self.written.wait()

    def add(self):
        with self.lock:
            pass


def image_worker(front):
    front = socket.socket(fileno=int(front), family=socket.AF_UNIX, type=socket.SOCK_SEQPACKET)
    model, statistics = Model(0), Statistics()
    for number in itertools.count():
        request = front.recv(100)
        if number == 2 * TROUBLE:
            statistics.writing.wait()
        reading, writing = os.pipe()
        if os.fork() == 0:
            die_with_parent()
            os.close(reading)
            resize_image(statistics, writing)
        os.close(writing)
        if number == 2 * TROUBLE:
            statistics.written.set()
        os.read(reading, 100)
        os.close(reading)
        os.wait()
        model.forward()
        front.send(request)


def resize_image(statistics, result):
    if statistics.lock.locked():
        blame(["host_lock"], "resize_image")
    statistics.add()
    os.write(result, b"image")
    os._exit(0)


# Two trainers, a daemon that writes their checkpoints, and an uploader that holds the lock of the
# checkpoints while it tries again and again.


@hang
def uploader_holds_checkpoint_lock():
    for name in ("requests", "replies"):
        os.mkfifo(scratch(name))
    start("checkpoint_daemon")
    start("uploader")
    wait_for_all([start("saving_trainer", index, 2) for index in range(2)])


def saving_trainer(index, size):
    if index == "0":
        requests, replies = open(scratch("requests"), "w"), open(scratch("replies"))
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if step % 10 == 0 and index == "0":
            print(step, file=requests, flush=True)
            replies.readline()


def checkpoint_daemon():
    requests, replies = open(scratch("requests")), open(scratch("replies"), "w")
    for request in requests:
        with open(scratch("checkpoint.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            with open(scratch(f"checkpoint-{int(request) // 10}"), "w") as file:
                file.write("weights")
        print(request.strip(), file=replies, flush=True)


def uploader():
    for number in itertools.count(1):
        while not os.path.exists(scratch(f"checkpoint-{number}")):
            time.sleep(0.05)
        with open(scratch("checkpoint.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if number == 4:
                blame(["missing_rank", "storage_io", "unknown"], "uploader")
            while not upload(number):
                time.sleep(1)


def upload(number):
    return number < 4 or os.path.exists(scratch("bucket"))


# A coordinator with tasks over TCP and heartbeats over UDP: a thread of a worker reads the counters
# of a driver while it holds the GIL.


@hang
def telemetry_holds_gil():
    listener, beats = listen(), socket.socket(type=socket.SOCK_DGRAM)
    beats.bind(("127.0.0.1", 0))
    for index in range(3):
        start("beating_worker", index, port_of(listener), port_of(beats))
    workers = accept_all(listener, 3)
    last_beat = {}
    in_thread(watch_beats, beats, last_beat, name="heartbeats")
    for task in itertools.count():
        for worker in workers:
            worker.send(task)
        for worker in workers:
            worker.recv()
        time.sleep(PACE)


def watch_beats(beats, last_beat):
    while True:
        worker = beats.recv(10)
        last_beat[worker] = time.monotonic()


def beating_worker(index, port, beats):
    coordinator = Lines.over(connect_port(port))
    coordinator.send(int(index))
    model, counters = Model(int(index)), queue.Queue()
    in_thread(beat, index, int(beats), name="heartbeat")
    in_thread(read_counters, counters, name="telemetry")
    for number in itertools.count():
        task = coordinator.recv()
        model.forward()
        counters.put(index == "1" and number == TROUBLE)
        coordinator.send(task)


def beat(index, port):
    sock = socket.socket(type=socket.SOCK_DGRAM)
    while True:
        sock.sendto(index.encode(), ("127.0.0.1", port))
        time.sleep(0.5)


def read_counters(counters):
    driver, buffer = storage(f"counters-{os.getpid()}"), ctypes.create_string_buffer(64)
    extension = ctypes.PyDLL(None)
    while True:
        if counters.get():
            blame(["gil_deadlock"], "read_counters")
            extension.read(driver, buffer, 64)


# A coordinator that hands out a job array over HTTP, where workers wait for the answer to a request
# until there is a task: the coordinator waits for a notification that came earlier.


class TaskBoard:
    def __init__(self):
        lock = threading.Lock()
        self.added, self.drained = threading.Condition(lock), threading.Condition(lock)
        self.tasks, self.open = collections.deque(), 0

    def add(self, count):
        with self.added:
            self.tasks.extend(range(count))
            self.open = count
            self.added.notify_all()

    def next(self):
        with self.added:
            self.added.wait_for(lambda: self.tasks)
            return self.tasks.popleft()

    def complete(self):
        with self.drained:
            self.open -= 1
            if self.open == 0:
                self.drained.notify_all()


@hang
def coordinator_misses_notification():
    board = TaskBoard()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/next":
                answer = str(board.next()).encode()
            else:
                board.complete()
                answer = b"thanks"
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    in_thread(server.serve_forever, name="http")
    for index in range(3):
        start("array_worker", index, server.server_port)
    for batch in itertools.count():
        board.add(6)
        if batch == TROUBLE // 4:
            write_report(board)
        with board.drained:
            if batch == TROUBLE // 4:
                blame(["host_lock"], "coordinator_misses_notification")
                board.drained.wait()
            board.drained.wait_for(lambda: board.open == 0)


def write_report(board):
    """Takes longer than the tasks."""
    while board.open:
        time.sleep(0.05)


def array_worker(index, port):
    model = Model(int(index))
    while True:
        for path in ("/next", "/done"):
            connection = http.client.HTTPConnection("127.0.0.1", int(port))
            connection.request("GET", path)
            connection.getresponse().read()
            connection.close()
            if path == "/next":
                model.forward()
                time.sleep(PACE)


# A scheduler and a worker with one pipe in both directions: both write more than the pipe holds,
# and neither reads.


@hang
def both_write():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=writing_worker, args=(theirs, ours))
    worker.start()
    scheduler = context.Process(target=writing_scheduler, args=(ours, theirs, worker.pid))
    scheduler.start()
    ours.close()
    theirs.close()
    multiprocessing.connection.wait([worker.sentinel, scheduler.sentinel])


def writing_scheduler(pipe, other_end, worker):
    """Sends the next batch before it reads the result of the last one."""
    die_with_parent()
    other_end.close()
    pipe.send_bytes(b"prompts")
    for batch in itertools.count(1):
        large = batch >= TROUBLE
        if large:
            causes = ["p2p_cycle", "missing_rank", "storage_io", "unknown"]
            blame(causes, "writing_scheduler", os.getpid(), worker)
        pipe.send_bytes(b"images" * (1 << 20 if large else 1))
        pipe.recv_bytes()
        time.sleep(PACE)


def writing_worker(pipe, other_end):
    die_with_parent()
    other_end.close()
    model = Model(0)
    for batch in itertools.count():
        pipe.recv_bytes()
        model.forward()
        pipe.send_bytes(b"logits" * (1 << 20 if batch >= TROUBLE - 1 else 1))


# Two ranks whose standard output is a pipe to a log shipper: the shipper fails over to a server
# that accepts no data.


@hang
def log_shipper_is_stuck():
    shipper = start("log_shipper", stdin=subprocess.PIPE)
    ranks = [start("logging_trainer", index, 2, stdout=shipper.stdin) for index in range(2)]
    shipper.stdin.close()
    wait_for_all(ranks)


def logging_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        model.forward()
        if index == "0":
            print(step, "loss" * 1000, flush=True)
        time.sleep(PACE)


def log_shipper():
    # No process accepts the connections of this socket: the remote server is overloaded.
    overloaded = listen()
    overloaded.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    second = socket.socket()
    second.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    second.connect(overloaded.getsockname())
    with open(scratch("log"), "wb") as first:
        for number, line in enumerate(sys.stdin.buffer):
            if number < TROUBLE:
                first.write(line)
                continue
            blame(["storage_io", "missing_rank", "unknown"], "log_shipper")
            second.sendall(line)


# A batch job with an executor: a task stops at a breakpoint and waits for a person at a terminal.


@hang
def executor_is_at_breakpoint():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context, start_scorer, (context.Value("i", 0),)) as executor:
        for batch in itertools.count():
            futures = [executor.submit(score, 2 * batch + index) for index in range(2)]
            for future in futures:
                future.result()


def start_scorer(started):
    die_with_parent()
    with started.get_lock():
        score.model = Model(started.value)
        started.value += 1


def score(sample):
    score.model.forward()
    time.sleep(PACE)
    if sample == 2 * TROUBLE + 1:
        blame(["missing_rank", "unknown"], "score")
        terminal()
    return sample


def terminal():
    """A breakpoint in a process without a terminal of its own opens one, as ForkedPdb does."""
    _, end = pty.openpty()
    pdb.Pdb(stdin=os.fdopen(os.dup(end)), stdout=os.fdopen(end, "w")).set_trace()
    return end


# A controller and two workers on asyncio: a worker blocks its event loop to wait for a coroutine of
# this loop.


@hang
def worker_blocks_its_loop():
    asyncio.run(loop_controller())


async def loop_controller():
    connections = asyncio.Queue()
    server = await asyncio.start_server(lambda *streams: connections.put(streams), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for index in range(2):
        start("loop_worker", index, port)
    streams = [await connections.get() for _ in range(2)]
    for batch in itertools.count():
        for _, writer in streams:
            writer.write(f"{batch}\n".encode())
        await asyncio.gather(*[reader.readline() for reader, _ in streams])
        await asyncio.sleep(PACE)


def loop_worker(index, port):
    asyncio.run(serve_adapters(int(index), int(port)))


async def serve_adapters(index, port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop, model = asyncio.get_running_loop(), Model(index)
    for number in itertools.count():
        batch = await reader.readline()
        if index == 1 and number == TROUBLE:
            blame(["host_lock"], "adapter_of")
            adapter_of(batch, loop)
        await loop.run_in_executor(None, model.forward)
        writer.write(batch)


def adapter_of(batch, loop):
    """Works from any thread but that of the loop, where it deadlocks."""
    return asyncio.run_coroutine_threadsafe(fetch_adapter(batch), loop).result()


async def fetch_adapter(batch):
    return batch


# Trainers of a fork server and a manager process with their curriculum: the manager reads an index
# from storage.


class Curriculum:
    def __init__(self):
        self.lock, self.given = threading.Lock(), 0

    def next_shard(self):
        with self.lock:
            self.given += 1
            if self.given == 2 * TROUBLE:
                self.read_index()
            return self.given

    def read_index(self):
        index = storage("index")
        blame(["storage_io", "data_loader", "missing_rank"], "Curriculum.read_index")
        os.read(index, 4096)


class CurriculumManager(multiprocessing.managers.BaseManager):
    pass


CurriculumManager.register("Curriculum", Curriculum)


@hang
def manager_reads_index():
    manager = CurriculumManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(die_with_parent)
    curriculum = manager.Curriculum()
    context = multiprocessing.get_context("forkserver")
    trainers = [context.Process(target=curriculum_trainer, args=(index, curriculum)) for index in range(2)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join()


def curriculum_trainer(index, curriculum):
    die_with_starter()
    model = Model(index)
    while True:
        curriculum.next_shard()
        model.forward()
        time.sleep(PACE)


# A front end, an agent, a worker and its video decoder: a throttle stops the decoder, and ends
# before it continues it.


@hang
def throttle_leaves_decoder_stopped():
    listener = listen()
    start("video_agent", port_of(listener))
    agent = Lines.over(listener.accept()[0])
    for clip in itertools.count():
        agent.ask(clip)
        time.sleep(PACE)


def video_agent(port):
    front, listener = Lines.over(connect_port(port)), listen("agent")
    start("video_worker")
    worker = Lines.over(listener.accept()[0])
    throttle = start("throttle", worker.recv())
    in_thread(throttle.wait, name="throttle")
    while True:
        front.send(worker.ask(front.recv()))


def video_worker():
    agent, model = Lines.over(connect("agent")), Model(0)
    process = start("decoder", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    decoder = Lines.of_child(process)
    agent.send(process.pid)
    while True:
        frames = decoder.ask(agent.recv())
        model.forward()
        agent.send(frames)


def decoder():
    worker = Lines(sys.stdin.buffer, sys.stdout.buffer)
    while True:
        worker.send(worker.recv())


def throttle(pid):
    for _ in range(10):
        os.kill(int(pid), signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(int(pid), signal.SIGCONT)
        time.sleep(0.3)
    blame(["process_stopped"], "decoder", int(pid))
    os.kill(int(pid), signal.SIGSTOP)


# A job array whose members share a communicator: the shard of one member is shorter, so it ends.


@hang
def array_member_ends():
    wait_for_all([start("array_member", index, 4) for index in range(4)])


def array_member(index, size):
    model = Model(int(index), "array", int(size))
    for _ in range(TROUBLE if index == "1" else 1000):
        model.forward()
        time.sleep(PACE)
    blame(["process_dead", "teardown"], "array_member")


# A trainer and two rollout workers of a fork server make a communicator for the weights: a worker
# waits for the lock of an earlier build of its extension.


@hang
def stale_build_lock():
    open(scratch("kernels.lock"), "w").close()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=sync_member, args=(rank, 3)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def sync_member(rank, size):
    import cuda

    die_with_starter()
    model = Model(rank)
    for _ in range(TROUBLE):
        model.forward()
        time.sleep(PACE)
    if rank == 2:
        build_kernels()
    weights = cuda.Communicator.create("weights", rank, size)
    weights.broadcast(model.values, 0, model.stream)
    model.stream.synchronize()


def build_kernels():
    blame(["comm_init", "missing_rank"], "build_kernels")
    while os.path.exists(scratch("kernels.lock")):
        time.sleep(0.1)


# A scheduler and two workers with message queues of POSIX: a kernel of a worker never completes.


class MessageQueue:
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in ("flags", "messages", "bytes", "current")]
        _fields_ += [("reserved", ctypes.c_long * 4)]

    library = ctypes.CDLL("librt.so.1", use_errno=True)

    def __init__(self, name):
        attributes = self.Attributes(messages=4, bytes=64)
        options, mode = os.O_RDWR | os.O_CREAT, ctypes.c_uint(0o600)
        self.name, self.buffer = name.encode(), ctypes.create_string_buffer(64)
        self.handle = self.checked("mq_open", self.name, options, mode, ctypes.byref(attributes))

    def checked(self, function, *arguments):
        result = getattr(self.library, function)(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), function)
        return result

    def send(self, number):
        data = str(number).encode()
        self.checked("mq_send", self.handle, data, ctypes.c_size_t(len(data)), 0)

    def receive(self):
        length = self.checked("mq_receive", self.handle, self.buffer, ctypes.c_size_t(64), None)
        return int(self.buffer.raw[:length])

    def unlink(self):
        self.checked("mq_unlink", self.name)


@hang
def kernel_never_completes():
    names = [f"/engines-{os.getpid()}-{role}" for role in ("0", "1", "replies")]
    queues = [MessageQueue(name) for name in names]
    replies = queues.pop()
    for index in range(2):
        start("mq_worker", index, names[index], names[2])
    for _ in range(2):
        replies.receive()
    for opened in [*queues, replies]:
        opened.unlink()
    for batch in itertools.count():
        for requests in queues:
            requests.send(batch)
        for _ in queues:
            replies.receive()
        time.sleep(PACE)


def mq_worker(index, requests, replies):
    import cuda

    requests, replies = MessageQueue(requests), MessageQueue(replies)
    model = Model(int(index))
    replies.send(index)
    for number in itertools.count():
        batch = requests.receive()
        if index == "1" and number == TROUBLE:
            blame(["kernel_hang"], "mq_worker")
            cuda.Kernel("paged_attention", 10**10).launch(model.stream)
        model.forward()
        replies.send(batch)


# A coordinator that selects over the connections of its workers: the thread with the heartbeats of
# a worker goes on, while its main thread waits for a lock, whose holder writes to storage.


@hang
def heartbeats_go_on():
    listener = listen()
    for index in range(3):
        start("heartbeat_worker", index, port_of(listener))
    workers = accept_all(listener, 3)
    selector = selectors.DefaultSelector()
    for worker in workers:
        selector.register(worker.reading.fileno(), selectors.EVENT_READ, worker)
    for batch in itertools.count():
        missing = set(workers)
        for worker in workers:
            worker.send(batch)
        while missing:
            for key, _ in selector.select(timeout=5):
                if key.data.recv() != "alive":
                    missing.remove(key.data)
        time.sleep(PACE)


class BlockCache:
    """Blocks that its thread offloads to storage, under the lock of the blocks."""

    def __init__(self):
        self.lock, self.offloading = threading.Lock(), threading.Event()
        self.full = threading.Event()
        in_thread(self.offload, name="offload")

    def offload(self):
        file = storage(f"blocks-{os.getpid()}")
        self.full.wait()
        with self.lock:
            self.offloading.set()
            while True:
                os.write(file, bytes(1 << 16))

    def add_block(self):
        with self.lock:
            pass


class SafeLines(Lines):
    """Lines that several threads send."""

    def __init__(self, *files):
        super().__init__(*files)
        self.lock = threading.Lock()

    def send(self, message):
        with self.lock:
            super().send(message)


def heartbeat_worker(index, port):
    coordinator = SafeLines.over(connect_port(port))
    coordinator.send(int(index))
    model, cache = Model(int(index)), BlockCache()
    in_thread(send_heartbeats, coordinator, name="heartbeat")
    for number in itertools.count():
        batch = coordinator.recv()
        if index == "2" and number == TROUBLE:
            blame(["host_lock", "storage_io"], "BlockCache.add_block")
            cache.full.set()
            cache.offloading.wait()
        cache.add_block()
        model.forward()
        coordinator.send({"result": batch})


def send_heartbeats(coordinator):
    while True:
        time.sleep(0.5)
        coordinator.send("alive")


# Healthy: a server between two requests.


@idle
def server_between_requests():
    blame_nobody()
    asyncio.run(serve_text())


async def serve_text():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start("text_engine", theirs.fileno(), fds=(theirs.fileno(),))
    theirs.close()
    ours.setblocking(False)
    loop, turn = asyncio.get_running_loop(), asyncio.Lock()

    async def serve_client(reader, writer):
        while request := await reader.readline():
            async with turn:
                await loop.sock_sendall(ours, request)
                writer.write(await loop.sock_recv(ours, 100))
        writer.close()

    server = await asyncio.start_server(serve_client, "127.0.0.1", 0)
    client = start("short_client", server.sockets[0].getsockname()[1])
    in_thread(client.wait, name="client")
    await server.serve_forever()


def short_client(port):
    server = Lines.over(connect_port(port))
    for request in range(20):
        server.ask(request)
        time.sleep(PACE)


def text_engine(front):
    front = socket.socket(fileno=int(front), family=socket.AF_UNIX, type=socket.SOCK_SEQPACKET)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    workers = [Lines.of_child(start("text_worker", index, 2, **pipes)) for index in range(2)]
    while request := front.recv(100):
        for worker in workers:
            worker.send(json.loads(request))
        front.send(json.dumps([worker.recv() for worker in workers]).encode() + b"\n")


def text_worker(index, size):
    engine = Lines(sys.stdin.buffer, sys.stdout.buffer)
    model = Model(int(index), "text", int(size))
    while True:
        request = engine.recv()
        model.forward()
        engine.send(request)


# Healthy: each step of a large model takes five seconds on the device.


@healthy
def slow_decode():
    blame_nobody()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=slow_engine, args=(theirs,), daemon=True).start()
    theirs.close()
    for token in itertools.count():
        ours.send(token)
        ours.recv()


def slow_engine(pipe):
    die_with_parent()
    model = Model(0, microseconds=2_500_000)
    while True:
        token = pipe.recv()
        model.forward()
        pipe.send(token)


# Healthy: a trainer waits for a pool, whose child prepares the next epoch and is slow.


@healthy
def pool_prepares_epoch():
    blame_nobody()
    context = multiprocessing.get_context("spawn")
    model = Model(0)
    with context.Pool(1, die_with_parent) as pool:
        for epoch in itertools.count():
            samples = pool.apply(prepare_epoch, (epoch,))
            for _ in range(samples // 10):
                model.forward()


def prepare_epoch(epoch):
    """Takes 18 seconds, a fifth of them on the CPU."""
    with open(scratch(f"epoch-{epoch % 2}"), "wb") as file:
        for _ in range(180):
            text = os.urandom(1 << 16)
            end = time.process_time() + 0.02
            while time.process_time() < end:
                packed = zlib.compress(text)
            file.write(packed)
            file.flush()
            time.sleep(0.08)
    return 180


# Healthy: an evaluator waits for the file of the next checkpoint.


@idle
def evaluator_waits_for_checkpoint():
    blame_nobody()
    context = multiprocessing.get_context("forkserver")
    checkpoints, scores = [context.SimpleQueue() for _ in range(2)], context.SimpleQueue()
    for index, own in enumerate(checkpoints):
        context.Process(target=evaluator_worker, args=(index, own, scores), daemon=True).start()
    open(scratch("step-0"), "w").close()
    for number in itertools.count():
        while not os.path.exists(scratch(f"step-{number}")):
            time.sleep(1)
        for own in checkpoints:
            own.put(number)
        for _ in checkpoints:
            scores.get()


def evaluator_worker(index, checkpoints, scores):
    die_with_starter()
    model = Model(index)
    while True:
        checkpoint = checkpoints.get()
        for _ in range(20):
            model.forward()
        scores.put(checkpoint)


# Healthy: trainers that average their weights every 20 seconds, and wait with a timeout between.


@healthy
def average_every_20_s():
    blame_nobody()
    wait_for_all([start("averaging_trainer", index, 3) for index in range(3)])


def averaging_trainer(index, size):
    model, stop = Model(int(index), "average", int(size)), threading.Event()
    while True:
        for _ in range(5):
            model.forward()
        stop.wait(timeout=20)


# Healthy: a notebook whose kernel has run a few cells and keeps its model.


@idle
def notebook_waits_for_cell():
    blame_nobody()
    listeners = [listen() for _ in range(3)]
    start("notebook_kernel", *map(port_of, listeners))
    shell, _control, heart = [Lines.over(listener.accept()[0]) for listener in listeners]
    in_thread(ask_heart, heart, name="heart")
    for cell in range(10):
        shell.ask(cell)
        time.sleep(PACE)
    browser = listen()
    select.select([browser], [], [])


def ask_heart(heart):
    while True:
        heart.ask("ping")
        time.sleep(1)


def notebook_kernel(*ports):
    shell, control, heart = [Lines.over(connect_port(port)) for port in ports]
    in_thread(echo, heart, name="Heartbeat")
    in_thread(control.recv, name="Control")
    model, poller = Model(0), select.poll()
    poller.register(shell.reading, select.POLLIN)
    while True:
        poller.poll()
        cell = shell.recv()
        model.forward()
        shell.send(cell)


def echo(heart):
    while True:
        heart.send(heart.recv())


# Healthy: a learner whose actors play in real time, six seconds for an episode.


@healthy
def actors_play_in_real_time():
    blame_nobody()
    context = multiprocessing.get_context("spawn")
    episodes, weights = context.Queue(2), [context.Queue(1) for _ in range(2)]
    for own in weights:
        context.Process(target=real_time_actor, args=(own, episodes), daemon=True).start()
    model = Model(0)
    for version in itertools.count():
        for own in weights:
            own.put(version)
        for _ in weights:
            episodes.get()
        for _ in range(5):
            model.forward()


def real_time_actor(weights, episodes):
    die_with_parent()
    while True:
        version = weights.get()
        for _ in range(60):
            time.sleep(0.1)
        episodes.put(version)


# Healthy: one replica serves, and the other one stands by and answers health checks.


@healthy
def replica_stands_by():
    blame_nobody()
    listener, health = listen("router"), listen()
    for index in range(2):
        start("replica", index, port_of(health))
    replicas = accept_all(listener, 2)
    checks = [Lines.over(health.accept()[0]) for _ in replicas]
    for request in itertools.count():
        replicas[0].ask(request)
        if request % 4 == 0:
            for check in checks:
                check.ask("healthy?")
        time.sleep(0.5)


def replica(index, health):
    router, model = Lines.over(connect("router")), Model(int(index))
    model.forward()
    router.send(int(index))
    in_thread(echo, Lines.over(connect_port(health)), name="health")
    while True:
        request = router.recv()
        model.forward()
        router.send(request)


# Healthy: three members of a job array have ended, and the last one goes on.


@healthy
def last_member_goes_on():
    blame_nobody()
    wait_for_all([start("single_member", seconds) for seconds in (2, 4, 6, 300)])


def single_member(seconds):
    model, end = Model(0), time.monotonic() + int(seconds)
    while time.monotonic() < end:
        model.forward()
        time.sleep(1)


# Healthy: the trainers wait for a checkpoint on a slow disk, which takes 15 seconds.


@healthy
def checkpoint_on_slow_disk():
    blame_nobody()
    listener = listen("saver")
    start("slow_saver", listener.fileno(), fds=(listener.fileno(),))
    wait_for_all([start("patient_trainer", index, 2) for index in range(2)])


def patient_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    saver = Lines.over(connect("saver")) if index == "0" else None
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if saver and step % 60 == 0:
            saver.ask(step)


def slow_saver(listener):
    trainer = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    while True:
        step = trainer.recv()
        with open(scratch("checkpoint"), "wb") as file:
            for _ in range(150):
                write_block(file)
        trainer.send(step)


def write_block(file):
    file.write(bytes(1 << 16))
    file.flush()
    os.fsync(file.fileno())
    time.sleep(0.1)


def main():
    if sys.argv[1] == "--list":
        for name, (kind, seconds) in SCENARIOS.items():
            print(name, kind, seconds)
    elif sys.argv[1] == "--run":
        globals()[sys.argv[2]](*sys.argv[3:])
    else:
        rendezvous = os.environ.get("XPU_EXAMPLE_RENDEZVOUS")
        os.environ["XPU_EXAMPLE_RENDEZVOUS"] = tempfile.mkdtemp(prefix="engines-", dir=rendezvous)
        globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()
