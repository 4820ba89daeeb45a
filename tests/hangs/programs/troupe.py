"""Trainers, services and pipelines whose processes play together, on the simulated device. No
process has a rank variable.

    troupe.py SCENARIO     works until the trouble of the scenario, AFTER seconds after its start
    troupe.py --list       one line for each scenario: NAME hang|idle|healthy SECONDS

The command starts all other processes. Before the trouble begins, the process that knows the
culprit writes the truth to the file XPU_HANGS_TRUTH.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import gc
import http.client
import http.server
import itertools
import json
import logging
import logging.handlers
import mmap
import multiprocessing
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib

AFTER = 5
PACE = 0.05
BEGIN = "TROUPE_BEGIN"
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


def overdue(function):
    """Processes wait for longer than the hang timeout, for one that goes on."""
    SCENARIOS[function.__name__] = ("overdue", 25)
    return function


def age():
    """Seconds since the start of the command."""
    return time.monotonic() - float(os.environ[BEGIN])


def late():
    return age() > AFTER


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


def listen(name):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(scratch(name))
    sock.listen(16)
    return sock


def connect(name):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(scratch(name))
    return sock


def accept_all(listener, count):
    """The connections of `count` peers, in the order of the indexes that they send first."""
    found = {}
    while len(found) < count:
        lines = Lines.over(listener.accept()[0])
        found[lines.recv()] = lines
    return [found[index] for index in sorted(found)]


def introduce(name, index):
    """A connection to the server `name`, which learns the index of the client."""
    lines = Lines.over(connect(name))
    lines.send(int(index))
    return lines


def requests(connections):
    """The index, the connection and the message of each request, as they come."""
    selector = selectors.DefaultSelector()
    for index, lines in enumerate(connections):
        selector.register(lines.reading, selectors.EVENT_READ, (index, lines))
    while True:
        for key, _ in selector.select():
            yield *key.data, key.data[1].recv()


async def over_stream(reader, writer):
    """The messages of an asyncio stream."""
    while line := await reader.readline():
        yield json.loads(line)


async def send_stream(writer, message):
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


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


def asking_trainer(index, size, server):
    """A member of a sharded model, which asks a server after each step."""
    lines = introduce(server, index)
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        model.forward()
        lines.ask(step)
        time.sleep(PACE)


def start_trainers(count, server):
    return [start("asking_trainer", index, count, server) for index in range(count)]


# An asyncio parameter server, a standby and three trainers: before a reshard the server cancels its
# task that publishes weights and awaits it, but the task takes the cancel for a lost connection.


@hang
def publisher_swallows_its_cancel():
    listener = listen("parameters")
    standby = listen("standby")
    start("standby_replica")
    start_trainers(3, "parameters")
    asyncio.run(ParameterService(standby.accept()[0]).run(listener))


def standby_replica():
    lines = Lines.over(connect("standby"))
    while True:
        lines.recv()


class ParameterService:
    def __init__(self, standby):
        self.standby, self.version = standby, 0

    async def run(self, listener):
        self.turn, self.changed = asyncio.Lock(), asyncio.Event()
        _, self.replica = await asyncio.open_unix_connection(sock=self.standby)
        self.publisher = asyncio.create_task(self.publish())
        async with await asyncio.start_unix_server(self.serve, sock=listener) as server:
            await server.serve_forever()

    async def serve(self, reader, writer):
        await reader.readline()
        async for step in over_stream(reader, writer):
            async with self.turn:
                self.version += 1
                self.changed.set()
                if late():
                    await self.reshard()
            await send_stream(writer, self.version)

    async def reshard(self):
        blame(["host_lock", "missing_rank", "unknown"], "ParameterService.reshard")
        await asyncio.sleep(0.2)
        self.publisher.cancel()
        await self.publisher

    async def publish(self):
        while True:
            try:
                await self.changed.wait()
                self.changed.clear()
                await send_stream(self.replica, self.version)
            except BaseException:
                print("publisher: connection lost, trying again", file=sys.stderr)


# Rollout workers put trajectories into a store through an asyncio gateway with three connections:
# the gateway does not give back the connection of a rejected trajectory.


@hang
def gateway_leaks_connections():
    gateway, store = listen("gateway"), listen("store")
    start("trajectory_store", store.fileno(), fds=(store.fileno(),))
    start("gateway_process", gateway.fileno(), fds=(gateway.fileno(),))
    wait_for_all(start_trainers(3, "gateway"))


def trajectory_store(listener):
    for _, lines, step in requests(accept_all(socket.socket(fileno=int(listener)), 3)):
        lines.send({"rejected": late() and step % 2 == 0})


def gateway_process(listener):
    asyncio.run(Gateway().run(socket.socket(fileno=int(listener))))


class Gateway:
    async def run(self, listener):
        self.connections, self.slots = [], asyncio.Semaphore(3)
        for index in range(3):
            connection = await asyncio.open_unix_connection(scratch("store"))
            await send_stream(connection[1], index)
            self.connections.append(connection)
        self.free = list(self.connections)
        async with await asyncio.start_unix_server(self.serve, sock=listener) as server:
            await server.serve_forever()

    async def serve(self, reader, writer):
        await reader.readline()
        async for step in over_stream(reader, writer):
            await send_stream(writer, await self.insert(step))

    async def insert(self, step):
        if not self.free and late():
            blame(["host_lock", "missing_rank", "unknown"], "Gateway.insert")
        await self.slots.acquire()
        reader, writer = self.free.pop()
        await send_stream(writer, step)
        answer = json.loads(await reader.readline())
        if answer["rejected"]:
            return "rejected"
        self.free.append((reader, writer))
        self.slots.release()
        return "inserted"


# Two learners and two actors around a replay buffer, whose lock prefers writers: the thread that
# samples takes it for reading a second time, while an actor waits for writing.


@hang
def replay_reads_twice():
    listener = listen("replay")
    for index in range(2):
        start("replay_learner", index)
        start("replay_actor", index)
    replay = Replay()
    while True:
        in_thread(replay.serve, Lines.over(listener.accept()[0]))


class ReadWriteLock:
    """A writer that waits keeps new readers out."""

    def __init__(self):
        self.condition = threading.Condition()
        self.readers, self.waiting, self.writing = 0, 0, False

    @contextlib.contextmanager
    def reading(self):
        with self.condition:
            self.condition.wait_for(lambda: not self.writing and not self.waiting)
            self.readers += 1
        yield
        with self.condition:
            self.readers -= 1
            self.condition.notify_all()

    @contextlib.contextmanager
    def writing_alone(self):
        with self.condition:
            self.waiting += 1
            self.condition.wait_for(lambda: not self.writing and not self.readers)
            self.waiting -= 1
            self.writing = True
        yield
        with self.condition:
            self.writing = False
            self.condition.notify_all()


class Replay:
    def __init__(self):
        self.lock = ReadWriteLock()
        self.steps, self.total = [0], None

    def serve(self, lines):
        while True:
            request, step = lines.recv()
            lines.send(self.insert(step) if request == "insert" else self.sample(step))

    def insert(self, step):
        with self.lock.writing_alone():
            self.steps = [*self.steps[-100:], step]

    def sample(self, step):
        with self.lock.reading():
            # The priorities are normalized for the first time at this step.
            if late():
                blame(["host_lock", "missing_rank", "unknown"], "Replay.sum_priorities")
                while not self.lock.waiting:
                    time.sleep(0.01)
                self.total = self.sum_priorities()
            return self.steps[step % len(self.steps)]

    def sum_priorities(self):
        with self.lock.reading():
            return sum(self.steps)


def replay_learner(index):
    """Only the first learner samples; the other follows it in the all-reduce."""
    model = Model(int(index), "learners", 2)
    replay = Lines.over(connect("replay")) if index == "0" else None
    for step in itertools.count():
        if replay:
            replay.ask(["sample", step])
        model.forward()
        time.sleep(PACE)


def replay_actor(index):
    model = Model(2 + int(index))
    replay = Lines.over(connect("replay"))
    for step in itertools.count():
        model.forward()
        replay.ask(["insert", step])
        time.sleep(PACE)


# A mixer of text and images for two trainers: its threads share one condition, and the only
# notification wakes the thread that cannot use the item.


@hang
def notification_wakes_the_wrong_thread():
    listener = listen("mixer")
    start_trainers(2, "mixer")
    mixer = Mixer()
    for kind, lines in zip(("text", "image"), accept_all(listener, 2)):
        in_thread(mixer.serve, kind, lines, name=f"{kind}-server")
    for number in itertools.count():
        mixer.produce(number)


class Mixer:
    def __init__(self):
        self.condition = threading.Condition()
        self.items, self.hungry = {}, []

    def serve(self, kind, lines):
        while True:
            lines.recv()
            lines.send(self.take(kind))

    def take(self, kind):
        with self.condition:
            while kind not in self.items:
                self.hungry.append(kind)
                self.condition.wait()
                self.hungry.remove(kind)
            item = self.items.pop(kind)
            self.condition.notify_all()
            return item

    def produce(self, number):
        if late():
            while len(self.hungry) < 2:
                time.sleep(0.01)
        with self.condition:
            if len(self.hungry) == 2 and late():
                # The queue of a condition is first in, first out: the last thread stays asleep.
                blame(["host_lock", "data_loader", "missing_rank"], "Mixer.take")
                self.items[self.hungry[-1]] = number
                self.condition.notify()
            else:
                self.items.setdefault("text", number)
                self.items.setdefault("image", number)
                self.condition.notify_all()
            self.condition.wait_for(lambda: not self.items)


# An agent hands out shards to three trainers and runs evaluations as child processes: its handler
# of SIGCHLD takes the lock of the table that the main thread holds while it reads the score.


@hang
def sigchld_handler_wants_the_table():
    agent = Agent()
    signal.signal(signal.SIGCHLD, agent.child_has_ended)
    listener = listen("agent")
    trainers = start_trainers(3, "agent")
    agent.children.update({trainer.pid: trainer for trainer in trainers})
    for _, lines, step in requests(accept_all(listener, 3)):
        if late():
            blame(["host_lock"], "Agent.child_has_ended")
            agent.evaluate(step)
        lines.send(step)


class Agent:
    def __init__(self):
        self.table = threading.Lock()
        self.children = {}

    def child_has_ended(self, *_):
        with self.table:
            for child in self.children.values():
                child.poll()

    def evaluate(self, step):
        with self.table:
            child = start("evaluation", step, stdout=subprocess.PIPE)
            self.children[child.pid] = child
            return json.loads(child.communicate()[0])


def evaluation(step):
    time.sleep(0.3)
    print(json.dumps({"step": step, "score": zlib.crc32(bytes(1 << 20))}))


# A server augments batches for two trainers and writes an audit log from a thread: it forks a
# child for a large batch while the thread is inside a buffered write, and the child logs too.


@hang
def child_writes_to_a_busy_log():
    reading, writing = os.pipe()
    start("audit_reader", reading, fds=(reading,))
    os.close(reading)
    listener = listen("augment")
    start_trainers(2, "augment")
    augment = Augment(os.fdopen(writing, "wb"))
    for _, lines, step in requests(accept_all(listener, 2)):
        augment.fork_for(step) if late() else augment.here(step)
        lines.send(step)


def audit_reader(reading):
    """Reads slowly, so that a large record takes a while."""
    while os.read(int(reading), 1 << 15):
        time.sleep(0.05)


class Augment:
    def __init__(self, audit):
        self.audit, self.writing = audit, threading.Event()
        self.records = queue.SimpleQueue()
        in_thread(self.write_records, name="audit-writer")

    def write_records(self):
        while True:
            record = self.records.get()
            self.writing.set()
            self.audit.write(record)
            self.audit.flush()
            self.writing.clear()

    def here(self, step):
        self.records.put(b"augmented %d\n" % step)

    def fork_for(self, step):
        self.records.put(bytes(1 << 20))
        self.writing.wait()
        time.sleep(0.3)
        child = os.fork()
        if child == 0:
            die_with_parent()
            blame(["host_lock"], "Augment.fork_for")
            self.audit.write(b"augmented %d in a child\n" % step)
            os._exit(0)
        os.waitpid(child, 0)


# Two rollout workers with a simulator each, and a learner: a worker reads only the standard output
# of its simulator, which begins to print warnings.


@hang
def nobody_reads_the_warnings():
    listener = listen("learner")
    workers = [start("rollout_worker", index) for index in range(2)]
    connections = accept_all(listener, 2)
    model = Model(2)
    while True:
        for lines in connections:
            lines.recv()
        model.forward()
        for lines in connections:
            lines.send("weights")
        assert workers


def rollout_worker(index):
    learner = introduce("learner", index)
    pipe = subprocess.PIPE
    child = start("simulator", index, stdin=pipe, stdout=pipe, stderr=pipe)
    simulator = Lines.of_child(child)
    model = Model(int(index), "workers", 2)
    for step in itertools.count():
        model.forward()
        reward = simulator.ask(step)
        learner.ask(reward)
        time.sleep(PACE)


def simulator(index):
    lines = Lines(sys.stdin.buffer, sys.stdout.buffer)
    while True:
        step = lines.recv()
        if index == "1" and late():
            blame(["missing_rank", "storage_io", "unknown"], "rollout_worker", os.getppid())
            for contact in range(1000):
                print(f"warning: contact {contact} of step {step} penetrates the", "floor " * 20,
                      file=sys.stderr)
        lines.send(step)


# A packer writes each shard into a pipe that a trainer has made, up to the end of file: it closes
# one descriptor twice instead of the copy too.


@hang
def packer_closes_one_end_twice():
    listener = listen("packer")
    index_listener = listen("index")
    start("shard_index", index_listener.fileno(), fds=(index_listener.fileno(),))
    for index in range(3):
        start("shard_reader", index, 3)
    index = Lines.over(connect("index"))
    selector = selectors.DefaultSelector()
    for _ in range(3):
        peer = listener.accept()[0]
        selector.register(peer, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            message, fds, _, _ = socket.recv_fds(key.fileobj, 64, 1)
            if not message:
                return
            pack(index.ask(int(message)), fds[0])


def shard_index(listener):
    lines = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    while True:
        lines.send(f"shard-{lines.recv()}")


def pack(name, pipe):
    copy = os.dup(pipe) if late() else None
    if copy is not None:
        blame(["missing_rank", "data_loader", "unknown"], "pack")
        # The header goes through the copy.
        os.write(copy, b"header ")
    os.write(pipe, name.encode() + bytes(1 << 10))
    os.close(pipe)
    if copy is not None:
        with contextlib.suppress(OSError):
            os.close(pipe)


def shard_reader(index, size):
    packer = connect("packer")
    model = Model(int(index), "readers", int(size))
    for step in itertools.count():
        reading, writing = os.pipe()
        socket.send_fds(packer, [str(step).encode()], [writing])
        os.close(writing)
        with os.fdopen(reading, "rb") as shard:
            shard.read()
        model.forward()
        time.sleep(PACE)


# Three trainers ask a server for the version of the weights by UDP, without a retry: one sends a
# burst of telemetry first, so that the kernel drops its request.


@hang
def request_is_lost_in_a_burst():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    server.bind(("127.0.0.1", 0))
    for index in range(3):
        start("versioned_trainer", index, 3, server.getsockname()[1])
    for number in itertools.count():
        message, sender = server.recvfrom(2000)
        if message == b"version":
            server.sendto(b"%d" % number, sender)
        else:
            time.sleep(0.03)


def versioned_trainer(index, size, port):
    server = ("127.0.0.1", int(port))
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        model.forward()
        # One at a time: the little buffer of the server is for one request.
        time.sleep(PACE * (1 + int(index)))
        if index == "1" and late():
            blame(["missing_rank", "unknown"], "versioned_trainer")
            for _ in range(40):
                sock.sendto(bytes(800), server)
        sock.sendto(b"version", server)
        sock.recvfrom(100)


# Three trainers and a publisher share a lease, a file with the name of its owner: the publisher
# fails while it has the lease.


@hang
def lease_of_a_failed_publisher():
    trainers = [start("leasing_trainer", index, 3) for index in range(3)]
    publisher = start("publisher")
    wait_for_all([*trainers, publisher])


def take_lease(owner):
    while True:
        try:
            file = os.open(scratch("lease"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            time.sleep(0.1)
        else:
            os.write(file, owner.encode())
            os.close(file)
            return


def release_lease():
    os.remove(scratch("lease"))


def publisher():
    while True:
        take_lease("publisher")
        if late():
            blame(["process_dead", "teardown", "missing_rank", "unknown"], "publisher")
            sys.exit("publisher: the bucket does not exist")
        time.sleep(0.02)
        release_lease()
        time.sleep(0.5)


def leasing_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        model.forward()
        if index == "0" and step % 5 == 0:
            take_lease("trainer")
            release_lease()
        time.sleep(PACE)


# Two embedding caches, three trainers, and a process that stops all caches for a consistent
# snapshot: the snapshot fails, and one cache stays stopped.


@hang
def snapshot_leaves_a_cache_stopped():
    caches, listeners = [], [listen("cache0"), listen("cache1")]
    for listener in listeners:
        caches.append(start("embedding_cache", listener.fileno(), 3, fds=(listener.fileno(),)))
    snapshots = listen("snapshots")
    pids = [cache.pid for cache in caches]
    start("snapshotter", snapshots.fileno(), *pids, fds=(snapshots.fileno(),))
    wait_for_all([start("cached_trainer", index, 3) for index in range(3)])


def embedding_cache(listener, count):
    for _, lines, step in requests(accept_all(socket.socket(fileno=int(listener)), int(count))):
        lines.send(zlib.crc32(b"%d" % step))


def snapshotter(listener, *pids):
    lines = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    while True:
        step = lines.recv()
        try:
            snapshot(step, [int(pid) for pid in pids])
        except OSError as error:
            print(f"snapshotter: {error}", file=sys.stderr)
        lines.send(step)


def snapshot(step, pids):
    if late():
        blame(["process_stopped"], "embedding_cache", pids[1])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        if late() and pid == pids[1]:
            raise OSError("no space left for the snapshot")
        with open(scratch(f"snapshot-{pid}"), "w") as file:
            file.write(str(step))
        os.kill(pid, signal.SIGCONT)


def cached_trainer(index, size):
    caches = [introduce(f"cache{number}", index) for number in range(2)]
    snapshots = Lines.over(connect("snapshots")) if index == "0" else None
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        for cache in caches:
            cache.ask(step)
        model.forward()
        if snapshots and step % 10 == 9:
            snapshots.ask(step)
        time.sleep(PACE)


# A cache of features for three trainers: it collects garbage under its lock, and the finalizer of
# an entry takes the lock.


@hang
def finalizer_wants_the_lock():
    listener = listen("features")
    start_trainers(3, "features")
    cache = FeatureCache()
    for index, lines, step in requests(accept_all(listener, 3)):
        lines.send(cache.get(index, step))


class Entry:
    def __init__(self, cache, key):
        self.cache, self.key = cache, key

    def __del__(self):
        with self.cache.lock:
            self.cache.bytes -= 1


class FeatureCache:
    def __init__(self):
        self.lock = threading.Lock()
        self.entries, self.bytes = {}, 0

    def get(self, index, step):
        entry = Entry(self, (index, step))
        if late():
            entry.view = entry  # A cycle: only the collector frees it.
        with self.lock:
            old = self.entries.pop(index, None)
            self.entries[index] = entry
            self.bytes += 1
        cyclic = hasattr(old, "view")
        del old
        if cyclic:
            self.shrink()
        return step

    def shrink(self):
        blame(["host_lock"], "Entry.__del__")
        with self.lock:
            gc.collect()


# Three rollout workers send trajectories to a learner over queues of multiprocessing: one ends its
# queue under the lock that the thread of the queue needs to pickle the last trajectory.


@hang
def feeder_pickles_under_a_lock():
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in range(3)]
    weights = [context.SimpleQueue() for _ in range(3)]
    for index in range(3):
        arguments = (index, queues[index], weights[index])
        context.Process(target=queueing_worker, args=arguments, daemon=True).start()
    model = Model(3)
    while True:
        for trajectories in queues:
            trajectories.get()
        model.forward()
        for box in weights:
            box.put("weights")


STATISTICS_LOCK = threading.Lock()


class Trajectory:
    def __init__(self, step):
        self.step = step

    def __getstate__(self):
        with STATISTICS_LOCK:
            return {"step": self.step}


def queueing_worker(index, trajectories, weights):
    die_with_parent()
    model = Model(index)
    for step in itertools.count():
        model.forward()
        if index == 1 and late():
            end_with(trajectories, Trajectory(step))
            return
        trajectories.put(Trajectory(step))
        weights.get()
        time.sleep(PACE)


def end_with(trajectories, last):
    blame(["host_lock", "teardown"], "end_with")
    with STATISTICS_LOCK:
        trajectories.put(last)
        trajectories.close()
        trajectories.join_thread()


# A server of metadata for three trainers, which handles one request at a time: for a moved shard it
# asks itself, without a timeout.


@hang
def metadata_server_asks_itself():
    server = http.server.HTTPServer(("127.0.0.1", 0), MetadataHandler)
    for index in range(3):
        start("metadata_trainer", index, 3, server.server_port)
    server.serve_forever()


def fetch(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


class MetadataHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.path.encode()
        if late() and self.path.startswith("/shard"):
            blame(["missing_rank", "host_lock", "unknown"], "MetadataHandler.do_GET")
            body = fetch(self.server.server_port, "/moved" + self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def metadata_trainer(index, size, port):
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        model.forward()
        fetch(int(port), f"/shard/{step}")
        time.sleep(PACE)


# Three trainers send their log through a queue and a thread to a collector: the thread of one logs
# its own errors into the same full queue.


@hang
def log_thread_logs_its_errors():
    listener = listen("logs")
    start("log_collector", listener.fileno(), fds=(listener.fileno(),))
    wait_for_all([start("logging_trainer", index, 3) for index in range(3)])


def log_collector(listener):
    for _, lines, record in requests(accept_all(socket.socket(fileno=int(listener)), 3)):
        lines.send(len(record))


class BlockingQueueHandler(logging.handlers.QueueHandler):
    def enqueue(self, record):
        self.queue.put(record)


class CollectorHandler(logging.Handler):
    def __init__(self, index):
        super().__init__()
        self.index, self.lines = index, introduce("logs", index)

    def emit(self, record):
        if self.index == "1" and late():
            blame(["host_lock"], "CollectorHandler.emit")
            logging.warning("record of %s is not serializable", record.name)
            logging.warning("record dropped")
        else:
            self.lines.ask(record.getMessage())


def logging_trainer(index, size):
    records = queue.Queue(16)
    logging.basicConfig(level=logging.INFO, handlers=[BlockingQueueHandler(records)])
    logging.handlers.QueueListener(records, CollectorHandler(index)).start()
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        model.forward()
        logging.info("step %d", step)
        time.sleep(PACE)


# A coordinator with heartbeats and three workers: one worker reconnects as a new incarnation, and
# its heartbeats keep the old one, for which the round waits, alive.


@hang
def round_waits_for_an_old_incarnation():
    listener = listen("coordinator")
    for index in range(3):
        start("elastic_worker", index, 3)
    coordinator = Coordinator(listener)
    while True:
        coordinator.run_once()


class Coordinator:
    def __init__(self, listener):
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.members, self.arrived, self.beats = {}, set(), {}

    def run_once(self):
        for key, _ in self.selector.select(0.5):
            if key.data is None:
                lines = Lines.over(key.fileobj.accept()[0])
                self.selector.register(lines.reading, selectors.EVENT_READ, lines)
            else:
                self.take(key.data)
        for member in list(self.members):
            if time.monotonic() - self.beats[member[0]] > 3:
                del self.members[member]
        if len(self.members) >= 3 and self.arrived >= set(self.members):
            self.arrived.clear()
            for lines in self.members.values():
                lines.send("go")

    def take(self, lines):
        line = lines.reading.readline()
        if not line:
            # The member may come back: only its heartbeats decide.
            self.selector.unregister(lines.reading)
            return
        kind, name, incarnation = json.loads(line)
        self.beats[name] = time.monotonic()
        if kind == "register":
            if incarnation > 1:
                blame(["missing_rank", "comm_init", "unknown"], "Coordinator.run_once")
            self.members[name, incarnation] = lines
        elif kind == "arrive":
            self.arrived.add((name, incarnation))


class Membership:
    def __init__(self, name):
        self.name, self.incarnation, self.turn = name, 0, threading.Lock()
        self.register()
        in_thread(self.beat, name="heartbeat")

    def register(self):
        with self.turn:
            self.incarnation += 1
            self.sock = connect("coordinator")
            self.lines = Lines.over(self.sock)
            self.lines.send(["register", self.name, self.incarnation])

    def say(self, kind):
        with self.turn:
            self.lines.send([kind, self.name, self.incarnation])

    def beat(self):
        while True:
            self.say("beat")
            time.sleep(0.5)

    def reconnect(self):
        with self.turn:
            self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
        self.register()


def elastic_worker(index, size):
    membership = Membership(f"worker{index}")
    model = Model(int(index), "workers", int(size))
    while True:
        membership.say("arrive")
        membership.lines.recv()
        model.forward()
        time.sleep(PACE)
        if index == "1" and membership.incarnation == 1 and late():
            membership.reconnect()


# A process prepares epochs and raises a flag file for each; three trainers read them. After a
# change of its schedule one trainer spins on the flag of an epoch that will never be.


@hang
def flag_of_an_epoch_that_never_comes():
    listener = listen("epochs")
    start("epoch_preparer", listener.fileno(), fds=(listener.fileno(),))
    wait_for_all([start("epoch_trainer", index, 3) for index in range(3)])


def epoch_preparer(listener):
    lines = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    for epoch in itertools.count():
        with open(scratch(f"epoch-{epoch:04}.data"), "wb") as file:
            file.write(bytes(1 << 16))
        open(scratch(f"epoch-{epoch:04}.ready"), "w").close()
        if epoch > 2:
            lines.recv()


def epoch_trainer(index, size):
    preparer = Lines.over(connect("epochs")) if index == "0" else None
    model = Model(int(index), "trainers", int(size))
    for epoch in itertools.count():
        digits = 4
        if index == "2" and late():
            blame(["missing_rank", "data_loader", "unknown"], "wait_for_flag")
            digits = 5
        wait_for_flag(scratch(f"epoch-{epoch:0{digits}}.ready"))
        for _ in range(5):
            model.forward()
            time.sleep(PACE)
        if preparer:
            preparer.send(epoch)


def wait_for_flag(path):
    while not os.path.exists(path):
        pass


# Three trainers with a writer of checkpoints each; the writers meet at files. The uploader of one
# skips an empty part without task_done, so that its queue is never joined.


@hang
def upload_queue_is_never_joined():
    for index in range(3):
        listener = listen(f"writer{index}")
        start("checkpoint_writer", index, listener.fileno(), fds=(listener.fileno(),))
    wait_for_all([start("saving_trainer", index, 3) for index in range(3)])


def saving_trainer(index, size):
    writer = Lines.over(connect(f"writer{index}"))
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if step % 10 == 0:
            writer.ask(step)


def checkpoint_writer(index, listener):
    asyncio.run(CheckpointWriter(int(index)).run(socket.socket(fileno=int(listener))))


class CheckpointWriter:
    def __init__(self, index):
        self.index = index

    async def run(self, listener):
        self.parts = asyncio.Queue()
        uploader = asyncio.create_task(self.upload())
        reader, writer = await asyncio.open_unix_connection(sock=listener.accept()[0])
        async for step in over_stream(reader, writer):
            await self.save(step)
            await send_stream(writer, step)
        uploader.cancel()

    async def save(self, step):
        parts = [b"weights", b"optimizer"]
        if self.index == 1 and late():
            blame(["host_lock", "missing_rank", "unknown"], "CheckpointWriter.save")
            parts.append(b"")
        for part in parts:
            self.parts.put_nowait((step, part))
        await self.parts.join()
        open(self.marker(step, self.index), "w").close()
        while not all(os.path.exists(self.marker(step, index)) for index in range(3)):
            await asyncio.sleep(0.05)

    def marker(self, step, index):
        return scratch(f"saved-{step}-{index}")

    async def upload(self):
        while True:
            step, part = await self.parts.get()
            if not part:
                continue
            with open(scratch(f"part-{self.index}-{part.decode()}"), "wb") as file:
                file.write(part * 1000)
            await asyncio.sleep(0.01)
            self.parts.task_done()


# A tokenizer with a pool of one thread for two trainers: the callback of a task runs on the thread
# of the pool and waits for another task of it.


@hang
def callback_waits_for_its_pool():
    listeners = [listen(f"tokenizer{index}") for index in range(2)]
    for listener in listeners:
        start("tokenizer", listener.fileno(), fds=(listener.fileno(),))
    wait_for_all([start("tokenizing_trainer", index, 2) for index in range(2)])


def tokenizing_trainer(index, size):
    tokenizer = introduce(f"tokenizer{index}", index)
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count():
        tokenizer.ask(step)
        model.forward()
        time.sleep(PACE)


def tokenizer(listener):
    lines = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    index = lines.recv()
    pool = concurrent.futures.ThreadPoolExecutor(1, "tokenize")
    while True:
        step = lines.recv()
        packed = concurrent.futures.Future()

        def pack_tokens(future):
            if index == 1 and late():
                blame(["host_lock", "data_loader"], "pack_tokens")
                packed.set_result(pool.submit(zlib.crc32, future.result()).result())
            else:
                packed.set_result(zlib.crc32(future.result()))

        pool.submit(tokenize, step).add_done_callback(pack_tokens)
        lines.send(packed.result())


def tokenize(step):
    time.sleep(0.01)
    return b"%d" % step * 1000


# Two trainers with a loader each, whose threads decode into slots of shared memory: a thread does
# not give back the slot of a broken image.

SLOTS, SLOT_BYTES = 4, 4096


@hang
def prefetcher_loses_its_slots():
    for index in range(2):
        with open(scratch(f"slots{index}"), "wb") as file:
            file.truncate(SLOTS * SLOT_BYTES)
        listener = listen(f"loader{index}")
        start("slot_loader", index, listener.fileno(), fds=(listener.fileno(),))
    wait_for_all([start("slot_trainer", index, 2) for index in range(2)])


def map_slots(index):
    with open(scratch(f"slots{index}"), "r+b") as file:
        return mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)


class SlotLoader:
    def __init__(self, index):
        self.index, self.memory = index, map_slots(index)
        self.free, self.ready = queue.Queue(), queue.Queue()
        for slot in range(SLOTS):
            self.free.put(slot)
        for number in range(2):
            in_thread(self.prefetch, name=f"prefetch-{number}")

    def prefetch(self):
        for number in itertools.count():
            slot = self.free.get()
            try:
                image = self.decode(number)
            except ValueError:
                continue
            self.memory[slot * SLOT_BYTES : slot * SLOT_BYTES + len(image)] = image
            self.ready.put(slot)

    def decode(self, number):
        time.sleep(0.01)
        if self.index == "1" and late():
            blame(["host_lock", "data_loader", "missing_rank"], "SlotLoader.prefetch")
            raise ValueError("broken image")
        return b"%d" % number * 100


def slot_loader(index, listener):
    loader = SlotLoader(index)
    lines = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    while True:
        used = lines.recv()
        if used is not None:
            loader.free.put(used)
        lines.send(loader.ready.get())


def slot_trainer(index, size):
    loader, memory = Lines.over(connect(f"loader{index}")), map_slots(index)
    model = Model(int(index), "trainers", int(size))
    slot = None
    while True:
        slot = loader.ask(slot)
        zlib.crc32(memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
        model.forward()
        time.sleep(PACE)


# Healthy: one trainer compiles a large program for 8 seconds, in parts, again and again.


@overdue
def compiles_large_graphs():
    trainers = [start("compiling_trainer", index, 3) for index in range(3)]
    causes = ["compile", "long_step", "missing_rank"]
    write_truth({"hang": False, "culprits": [trainers[1].pid], "causes": causes})
    wait_for_all(trainers)


def compiling_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if index == "1" and step % 30 == 0:
            compile_for(8, step)


def compile_for(seconds, step):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        body = "".join(f"    x{line} = [{step} + y * {line} for y in range({line})]\n"
                       for line in range(2000))
        compile(f"def graph():\n{body}", "graph", "exec")


# Healthy: one trainer has millions of objects and collects garbage for long.


@healthy
def collects_millions_of_objects():
    blame_nobody()
    wait_for_all([start("collecting_trainer", index, 3) for index in range(3)])


def collecting_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    vocabulary = []
    if index == "0":
        gc.disable()
        vocabulary = [[number] for number in range(1_500_000)]
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if vocabulary and step % 30 == 0:
            end = time.monotonic() + 6
            while time.monotonic() < end:
                gc.collect()


# Healthy: a checkpoint goes through a compressor and a writer, for about 9 seconds, in small parts.


@healthy
def checkpoint_goes_through_a_compressor():
    blame_nobody()
    reading, writing = os.pipe()
    listener = listen("compressor")
    start("part_compressor", listener.fileno(), writing, fds=(listener.fileno(), writing))
    start("part_writer", reading, fds=(reading,))
    os.close(reading)
    os.close(writing)
    wait_for_all([start("compressed_trainer", index, 2) for index in range(2)])


def compressed_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    compressor = Lines.over(connect("compressor")) if index == "0" else None
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if compressor and step % 50 == 0:
            for part in range(150):
                compressor.ask(part)


def part_compressor(listener, writing):
    lines = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    while True:
        part = lines.recv()
        os.write(int(writing), zlib.compress(os.urandom(40_000), 6))
        lines.send(part)


def part_writer(reading):
    with open(scratch("checkpoint"), "wb") as file:
        while data := os.read(int(reading), 1 << 16):
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)


# Healthy: the stages of a pipeline take uneven times, up to four seconds for an item.


@healthy
def stages_are_uneven():
    blame_nobody()
    listeners = [listen(f"stage{number}") for number in range(4)]
    for number in range(1, 4):
        fds = (listeners[number].fileno(),)
        start("uneven_stage", number, *fds, fds=fds)
    source = Lines.over(connect("stage1"))
    sink = listeners[0].accept()[0]
    in_thread(drain, Lines.over(sink), name="sink")
    for item in itertools.count():
        source.send(item)
        time.sleep(0.2)


def drain(lines):
    while True:
        lines.recv()


def uneven_stage(number, listener):
    number = int(number)
    before = Lines.over(socket.socket(fileno=int(listener)).accept()[0])
    after = Lines.over(connect(f"stage{(number + 1) % 4}"))
    model = Model(number)
    while True:
        item = before.recv()
        model.forward()
        time.sleep(4 if item % 20 == 7 * number % 20 else 0.02 * number)
        after.send(item)


# Idle: after its clients have left, an asyncio service with two workers waits for others.


@idle
def service_after_its_clients():
    blame_nobody()
    front = listen("front")
    workers = [start("shard_worker", index, 2, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
               for index in range(2)]
    for number in range(2):
        start("short_client", number)
    asyncio.run(FrontService([Lines.of_child(worker) for worker in workers]).run(front))


class FrontService:
    def __init__(self, workers):
        self.workers = workers

    async def run(self, listener):
        self.turn = asyncio.Lock()
        async with await asyncio.start_unix_server(self.serve, sock=listener) as server:
            await server.serve_forever()

    async def serve(self, reader, writer):
        async for prompt in over_stream(reader, writer):
            async with self.turn:
                answer = await asyncio.to_thread(self.generate, prompt)
            await send_stream(writer, answer)
        writer.close()

    def generate(self, prompt):
        for worker in self.workers:
            worker.send(prompt)
        return [worker.recv() for worker in self.workers]


def shard_worker(index, size):
    lines = Lines(sys.stdin.buffer, sys.stdout.buffer)
    model = Model(int(index), "shards", int(size))
    while True:
        prompt = lines.recv()
        model.forward()
        lines.send(prompt)


def short_client(number):
    service = Lines.over(connect("front"))
    while age() < 6:
        service.ask(number)
        time.sleep(PACE)


# Healthy: the store of a job restarts from time to time; its clients retry with backoff.


@healthy
def clients_retry_until_the_store_is_back():
    blame_nobody()
    for index in range(3):
        start("patient_client", index, 3)
    while True:
        store = start("restarting_store")
        store.wait()
        os.remove(scratch("kv"))
        # With the last delay of a client, this is less than the hang timeout.
        time.sleep(1)


def restarting_store():
    end = time.monotonic() + 5
    selector = selectors.DefaultSelector()
    selector.register(listen("kv"), selectors.EVENT_READ)
    while time.monotonic() < end:
        for key, _ in selector.select(0.1):
            if key.data is None:
                lines = Lines.over(key.fileobj.accept()[0])
                selector.register(lines.reading, selectors.EVENT_READ, lines)
            elif line := key.data.reading.readline():
                key.data.send(json.loads(line))
            else:
                selector.unregister(key.data.reading)


def patient_client(index, size):
    model = Model(int(index), "clients", int(size))
    store = None
    for step in itertools.count():
        model.forward()
        delay = 0.1
        while True:
            try:
                store = store or Lines.over(connect("kv"))
                store.send(step)
                if not store.reading.readline():
                    raise ConnectionResetError
                break
            except OSError:
                store = None
                time.sleep(delay)
                delay = min(2 * delay, 2)
        time.sleep(PACE)


# Healthy: one of four trainers needs three times as long for each step.


@healthy
def straggler_takes_three_times_as_long():
    blame_nobody()
    wait_for_all([start("paced_trainer", index, 4) for index in range(4)])


def paced_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    while True:
        end = time.monotonic() + (0.9 if index == "2" else 0.3)
        while time.monotonic() < end:
            zlib.crc32(bytes(1 << 14))
            time.sleep(0.01)
        model.forward()


# Healthy: the first trainer evaluates for 7 seconds after each 40 steps; the others wait for it.


@healthy
def leader_evaluates():
    blame_nobody()
    wait_for_all([start("evaluating_trainer", index, 3) for index in range(3)])


def evaluating_trainer(index, size):
    model = Model(int(index), "trainers", int(size))
    alone = Model(int(index)) if index == "0" else None
    for step in itertools.count(1):
        model.forward()
        time.sleep(PACE)
        if alone and step % 40 == 0:
            end = time.monotonic() + 7
            while time.monotonic() < end:
                alone.forward()
                time.sleep(0.02)


# Healthy: a learner waits for a rollout worker that fails every few seconds and starts again.


@healthy
def failed_worker_starts_again():
    blame_nobody()
    start("tolerant_learner", 2)
    workers = {}
    while True:
        for index in range(2):
            if index not in workers or workers[index].poll() is not None:
                workers[index] = start("mortal_worker", index)
        time.sleep(0.2)


def tolerant_learner(count):
    listener, model = listen("tolerant"), Model(2)
    connections = {}
    while True:
        for index in range(int(count)):
            while True:
                while index not in connections:
                    lines = Lines.over(listener.accept()[0])
                    connections[lines.recv()] = lines
                connections[index].send("play")
                if connections[index].reading.readline():
                    break
                del connections[index]
        model.forward()
        time.sleep(PACE)


def mortal_worker(index):
    while True:
        with contextlib.suppress(OSError):
            learner = introduce("tolerant", index)
            break
        time.sleep(0.1)
    model = Model(int(index))
    time.sleep(2)  # It loads its environment.
    for step in itertools.count(1):
        learner.recv()
        model.forward()
        if index == "1" and step == 40:
            os._exit(1)
        learner.send(step)


# Healthy: a router takes one of three engines out of service. It drains: it answers what it has,
# slowly, says goodbye and ends, while the router waits for it before it sends new work.


@healthy
def engine_drains():
    blame_nobody()
    listener = listen("router")
    engines = {}
    for index in range(3):
        engines[index] = start("draining_engine", index)
    connections = dict(enumerate(accept_all(listener, 3)))
    for step in itertools.count():
        if 2 in connections and late():
            lines = connections.pop(2)
            lines.send("drain")
            while lines.recv() != "drained":
                pass
            engines[2].wait()
        for lines in connections.values():
            lines.send(step)
        for lines in connections.values():
            lines.recv()
        time.sleep(PACE)


def draining_engine(index):
    router = introduce("router", index)
    model = Model(int(index))
    while (request := router.recv()) != "drain":
        model.forward()
        router.send(request)
    for request in range(9):
        for _ in range(50):
            model.forward()
            time.sleep(0.01)
        router.send(request)
    router.send("drained")


def main():
    if sys.argv[1] == "--list":
        for name, (kind, seconds) in SCENARIOS.items():
            print(name, kind, seconds)
    elif sys.argv[1] == "--run":
        globals()[sys.argv[2]](*sys.argv[3:])
    else:
        os.environ[BEGIN] = str(time.monotonic())
        rendezvous = os.environ.get("XPU_EXAMPLE_RENDEZVOUS")
        os.environ["XPU_EXAMPLE_RENDEZVOUS"] = tempfile.mkdtemp(prefix="troupe-", dir=rendezvous)
        globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()
