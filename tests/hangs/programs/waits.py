"""Training jobs that hang because one process waits for another one, each in its own way.

    waits.py SCENARIO          starts the ranks and the helper processes of SCENARIO
    waits.py SCENARIO HELPER   is one of its helper processes, which has no rank
    waits.py --list            lists the scenarios

SCENARIO is a function of this file, which every rank calls. All ranks train; then, after
`TROUBLE_STEP` steps, the trouble of the scenario begins. The process that is to blame writes the
truth into the file XPU_HANGS_TRUTH just before.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import ctypes.util
import fcntl
import itertools
import json
import logging
import logging.handlers
import mmap
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.managers
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib

import cuda

TROUBLE_STEP = 75
FORK, SPAWN, FORKSERVER = map(multiprocessing.get_context, ("fork", "spawn", "forkserver"))
SCENARIOS = {}
libc = ctypes.CDLL(None, use_errno=True)


def scenario(ranks=2, helpers=()):
    def register(function):
        SCENARIOS[function.__name__] = (function, ranks, helpers)
        return function

    return register


def die_with_parent():
    """PR_SET_PDEATHSIG"""
    libc.prctl(1, signal.SIGKILL)


def path(name):
    """A file of the job. It is short enough for the name of a socket."""
    name = os.path.join(os.environ.get("XPU_EXAMPLE_RENDEZVOUS", "."), name)
    return min(os.path.abspath(name), os.path.relpath(name), key=len)


def wait_for_file(name):
    while not os.path.exists(path(name)):
        time.sleep(0.01)
    return path(name)


def publish(name, text):
    with open(f"{path(name)}.{os.getpid()}", "w") as file:
        file.write(str(text))
    os.replace(f"{path(name)}.{os.getpid()}", path(name))


def read_published(name):
    with open(wait_for_file(name)) as file:
        return file.read()


def blame(pids, causes, place):
    """Writes the truth: who is to blame, the acceptable causes, and where the culprit stands."""
    if target := os.environ.get("XPU_HANGS_TRUTH"):
        truth = {"hang": True, "culprits": list(pids), "causes": list(causes), "place": place}
        with open(f"{target}.{os.getpid()}", "w") as file:
            json.dump(truth, file)
        os.replace(f"{target}.{os.getpid()}", target)


def stand(trouble, *causes):
    """This process alone is to blame; it stays in the function `trouble` from now on."""
    blame([os.getpid()], causes, trouble.__name__)
    trouble()


def die(*causes):
    blame([os.getpid()], ["process_dead", *causes], None)
    os.kill(os.getpid(), signal.SIGKILL)


def checked(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# Processes.


def fork(target, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            target(*arguments)
        finally:
            os._exit(0)
    return pid


def _run(target, *arguments):
    die_with_parent()
    # A child of the fork server would keep it alive after the end of the rank.
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    target(*arguments)


def worker(target, *arguments, context=FORK, name=None, daemon=True):
    process = context.Process(target=_run, args=(target, *arguments), name=name or target.__name__, daemon=daemon)
    process.start()
    return process


def command(helper):
    """The command line of a helper process."""
    return [sys.executable, os.path.abspath(sys.argv[0]), sys.argv[1], helper]


def start(helper, **options):
    return subprocess.Popen(command(helper), preexec_fn=die_with_parent, **options)


class Job:
    """One rank of the training."""

    def __init__(self, rank=None, world=None):
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.world = int(os.environ["WORLD_SIZE"]) if world is None else world
        cuda.set_device(self.rank)
        self.stream = cuda.Stream()
        self.comm = cuda.Communicator.create("world", self.rank, self.world)
        self.gradients = cuda.Buffer(4096)
        self.layers = cuda.Kernel("transformer_layers", 30_000)

    def train_step(self):
        self.layers.launch(self.stream)
        self.comm.all_reduce(self.gradients, self.stream)
        self.stream.synchronize()

    def train(self, before_step=None, trouble=None):
        """Trains forever. `before_step` comes before each step, `trouble` before one of them."""
        for step in itertools.count():
            if before_step:
                before_step()
            if trouble and step == TROUBLE_STEP:
                trouble()
            self.train_step()


# How a process can stand still forever. All but the last two would be culprits of their own.


def back_off():
    """The remote shard is gone, but the code retries forever."""
    while not os.path.exists(path("shard-that-nobody-writes")):
        time.sleep(1)


def spin_until_fresh():
    """An endless loop that waits for a version which no one sets."""
    version = 0
    while version == 0:
        version = int(os.environ.get("SHARD_VERSION", "0"))


def evict_entries():
    """Takes a lock that is not reentrant twice."""
    entries_lock = threading.Lock()
    with entries_lock:
        with entries_lock:
            return


def wait_for_quota():
    threading.Event().wait()


def ask_licence_server():
    """The server accepts the connection in its backlog and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(listener.getsockname()).recv(1)


def read_from_mount():
    """A file of a mount that does not answer; here, it is a FIFO without a writer."""
    name = path(f"mount.{os.getpid()}")
    os.mkfifo(name)
    with open(name, "rb") as file:
        file.read()


def wait_for_signal():
    signal.sigwait({signal.SIGUSR2})


def suspend_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def answer_requests(receive, send, trouble):
    """The loop of a server: one answer for each request, until the trouble comes."""
    for count in itertools.count():
        request = receive()
        if not request:
            return
        if count == TROUBLE_STEP:
            trouble()
        send(request)


# Anonymous pipes.


@scenario(ranks=3)
def pipe_writer_backs_off(job):
    """Rank 1 reads tokens from a pipe; the tokenizer child at its other end retries forever."""
    if job.rank != 1:
        return job.train()
    reading, writing = os.pipe()

    def tokenize_shards():
        for _ in range(TROUBLE_STEP):
            os.write(writing, b"t" * 64)
            time.sleep(0.02)
        stand(back_off, "missing_rank", "data_loader", "storage_io", "host_lock")

    fork(tokenize_shards)

    def read_tokens():
        os.read(reading, 64)

    job.train(read_tokens)


@scenario(ranks=2)
def pipe_writer_killed(job):
    """Rank 0 reads from a pipe whose writer was killed; rank 0 itself keeps the pipe open."""
    if job.rank != 0:
        return job.train()
    reading, writing = os.pipe()

    def tokenize_shards():
        for _ in range(TROUBLE_STEP):
            os.write(writing, b"t" * 64)
            time.sleep(0.02)
        die("missing_rank", "data_loader", "storage_io")

    fork(tokenize_shards)

    def read_tokens():
        os.read(reading, 64)

    job.train(read_tokens)


@scenario(ranks=3)
def pipe_full(job):
    """Rank 2 writes metrics into a full pipe; the logger child no longer reads it, as it waits for
    its quota."""
    if job.rank != 2:
        return job.train()
    reading, writing = os.pipe()
    fcntl.fcntl(writing, 1031, 4096)  # F_SETPIPE_SZ

    def upload_metrics():
        for _ in range(TROUBLE_STEP):
            os.read(reading, 512)
        stand(wait_for_quota, "host_lock", "missing_rank", "storage_io")

    fork(upload_metrics)

    def log_metrics():
        os.write(writing, b"m" * 512)

    job.train(log_metrics)


@scenario(ranks=2)
def pipe_end_kept_open(job):
    """Rank 1 reads the output of a finished child to the end, but holds a writing end itself."""

    def read_report():
        reading, writing = os.pipe()
        os.waitpid(fork(os.write, writing, b"report"), 0)
        blame([os.getpid()], ["storage_io", "missing_rank"], "read_report")
        while os.read(reading, 4096):
            pass

    job.train(trouble=read_report if job.rank == 1 else None)


@scenario(ranks=2)
def pipe_half_message(job):
    """The child sends half of a message and waits for an acknowledgement, which the rank sends
    only after the whole message: both are to blame."""
    if job.rank != 1:
        return job.train()
    ours, theirs = socket.socketpair()

    def send_embeddings():
        for _ in range(TROUBLE_STEP):
            theirs.sendall(b"e" * 64)
            theirs.recv(1)
        theirs.sendall(b"e" * 32)
        theirs.recv(1)

    child = fork(send_embeddings)

    def receive_embeddings():
        theirs.close()
        for count in itertools.count():
            if count == TROUBLE_STEP:
                blame([os.getpid(), child], ["missing_rank", "data_loader", "storage_io"], "receive_embeddings")
            ours.recv(64, socket.MSG_WAITALL)
            ours.send(b"a")
            yield

    job.train(receive_embeddings().__next__)


# FIFOs.


@scenario(ranks=2)
def fifo_without_writer(job):
    """Rank 0 opens the FIFO of a controller that does not exist."""

    def open_command_fifo():
        os.mkfifo(path("commands"))
        with open(path("commands")) as file:
            file.readline()

    job.train(trouble=(lambda: stand(open_command_fifo, "storage_io", "missing_rank")) if job.rank == 0 else None)


def shard_feeder():
    with open(wait_for_file("shards.fifo"), "wb", buffering=0) as fifo:
        for _ in range(TROUBLE_STEP):
            fifo.write(b"s" * 64)
            time.sleep(0.03)
        stand(evict_entries, "host_lock", "missing_rank", "storage_io", "data_loader")


@scenario(ranks=3, helpers=("shard_feeder",))
def fifo_feeder_locked(job):
    """Rank 1 reads a FIFO; the feeder process, which has no rank, takes its own lock twice."""
    if job.rank != 1:
        return job.train()
    os.mkfifo(path("shards.fifo"))
    fifo = open(path("shards.fifo"), "rb", buffering=0)

    def read_shard():
        fifo.read(64)

    job.train(read_shard)


# Sockets.


def unix_server(name, trouble, backlog=8):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path(name))
    listener.listen(backlog)
    connection, _ = listener.accept()
    answer_requests(lambda: connection.recv(64), connection.sendall, trouble)


def unix_client(name):
    connection = socket.socket(socket.AF_UNIX)
    wait_for_file(name)
    while connection.connect_ex(path(name)):
        time.sleep(0.01)
    return connection


def request(connection):
    """A function that sends one request and waits for the reply."""

    def wait_for_reply():
        connection.sendall(b"get")
        connection.recv(64)

    return wait_for_reply


def feature_store():
    unix_server("features.sock", lambda: stand(evict_entries, "host_lock", "missing_rank"))


@scenario(ranks=2, helpers=("feature_store",))
def unix_stream(job):
    """Rank 1 waits for the feature store on a Unix socket, which takes its own lock twice."""
    job.train(request(unix_client("features.sock")) if job.rank == 1 else None)


def busy_store():
    unix_server("busy.sock", lambda: stand(ask_licence_server, "missing_rank"), backlog=0)


@scenario(ranks=2, helpers=("busy_store",))
def unix_connect_backlog(job):
    """The store waits for its licence server, so rank 0 blocks in connect on the full backlog."""
    if job.rank != 0:
        return job.train()
    wait_for_reply = request(unix_client("busy.sock"))

    def connect_again():
        threading.Thread(target=wait_for_reply, name="prefetch", daemon=True).start()
        connections = []
        while True:
            connections.append(unix_client("busy.sock"))

    for _ in range(TROUBLE_STEP):
        wait_for_reply()
        job.train_step()
    connect_again()


def statistics_daemon():
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    daemon.bind(path("statistics.sock"))
    for _ in range(TROUBLE_STEP):
        daemon.recv(64)
    stand(back_off, "missing_rank", "storage_io")


@scenario(ranks=3, helpers=("statistics_daemon",))
def unix_datagrams_full(job):
    """Rank 2 blocks in sendto, because the statistics daemon retries forever and reads nothing."""
    if job.rank != 2:
        return job.train()
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = wait_for_file("statistics.sock")

    def send_statistics():
        sender.sendto(b"loss 0.1", address)

    job.train(send_statistics)


def reward_server():
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(path("rewards.sock"))
    for count in itertools.count():
        _, client = server.recvfrom(64)
        if count == TROUBLE_STEP:
            blame([os.getpid()], ["missing_rank"], "reward_server")
            continue
        server.sendto(b"1.0", client)


@scenario(ranks=2, helpers=("reward_server",))
def lost_reply(job):
    """The reward server drops one request and waits for the next one, while rank 1 waits for the
    reply: the server is to blame."""
    if job.rank != 1:
        return job.train()
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.bind(path("rewards-client.sock"))
    server = wait_for_file("rewards.sock")

    def wait_for_reward():
        client.sendto(b"score", server)
        client.recv(64)

    job.train(wait_for_reward)


def tcp_server(name, trouble):
    listener = socket.create_server(("127.0.0.1", 0))
    publish(name, listener.getsockname()[1])
    connection, _ = listener.accept()
    answer_requests(lambda: connection.recv(64), connection.sendall, trouble)


def tcp_client(name):
    return socket.create_connection(("127.0.0.1", int(read_published(name))))


def parameter_server():
    tcp_server("parameters.port", lambda: stand(wait_for_quota, "host_lock", "missing_rank"))


@scenario(ranks=3, helpers=("parameter_server",))
def tcp_parameter_server(job):
    """Rank 0 waits for the parameter server, which waits for an event that nobody sets."""
    job.train(request(tcp_client("parameters.port")) if job.rank == 0 else None)


def stopped_server():
    tcp_server("stopped.port", lambda: stand(suspend_self, "process_stopped"))


@scenario(ranks=2, helpers=("stopped_server",))
def tcp_server_stopped(job):
    """Rank 1 waits on a TCP connection for a server that was stopped by SIGSTOP."""
    job.train(request(tcp_client("stopped.port")) if job.rank == 1 else None)


def spinning_server():
    tcp_server("spinning.port", lambda: stand(spin_until_fresh, "missing_rank", "long_step"))


@scenario(ranks=2, helpers=("spinning_server",))
def tcp_server_spins(job):
    """Rank 0 waits on a TCP connection for a server in an endless loop."""
    job.train(request(tcp_client("spinning.port")) if job.rank == 0 else None)


def exchange_server():
    listener = socket.create_server(("127.0.0.1", 0))
    publish("exchange.port", listener.getsockname()[1])
    connection, _ = listener.accept()
    for _ in range(TROUBLE_STEP):
        connection.sendall(b"g" * 64)
        connection.recv(64, socket.MSG_WAITALL)
    publish("exchange.pid", os.getpid())
    send_weights(connection)


def send_weights(connection):
    connection.sendall(bytes(1 << 26))


@scenario(ranks=2, helpers=("exchange_server",))
def tcp_both_send(job):
    """Rank 1 and the exchange server both send large messages and none receives: both are to
    blame."""
    if job.rank != 1:
        return job.train()
    connection = tcp_client("exchange.port")

    def exchange_weights():
        connection.sendall(b"g" * 64)
        connection.recv(64, socket.MSG_WAITALL)

    for _ in range(TROUBLE_STEP):
        exchange_weights()
        job.train_step()
    server = int(read_published("exchange.pid"))
    blame([os.getpid(), server], ["missing_rank", "storage_io"], "send_weights")
    send_weights(connection)


def deaf_server():
    listener = socket.create_server(("127.0.0.1", 0))
    publish("deaf.port", listener.getsockname()[1])
    while not os.path.exists(path("deaf.go")):
        time.sleep(0.05)
    stand(back_off, "missing_rank")


@scenario(ranks=3, helpers=("deaf_server",))
def tcp_server_never_accepts(job):
    """Rank 1 sends its request to a server that retries something else before it accepts."""

    def register_worker():
        connection = tcp_client("deaf.port")
        connection.sendall(b"register")
        publish("deaf.go", "")
        connection.recv(64)

    job.train(trouble=register_worker if job.rank == 1 else None)


# eventfd.


@scenario(ranks=2)
def eventfd_never_written(job):
    """Rank 1 waits on an eventfd for its decoder child, which waits for the licence server."""
    if job.rank != 1:
        return job.train()
    frames = os.eventfd(0)

    def decode_frames():
        for _ in range(TROUBLE_STEP):
            os.eventfd_write(frames, 1)
            time.sleep(0.03)
        stand(ask_licence_server, "missing_rank", "data_loader", "storage_io")

    fork(decode_frames)

    def wait_for_frame():
        os.eventfd_read(frames)

    job.train(wait_for_frame)


@scenario(ranks=2)
def eventfd_token_taken(job):
    """Two children share one token of an eventfd semaphore with rank 0; one takes it and hangs."""
    if job.rank != 0:
        return job.train()
    tokens = os.eventfd(1, os.EFD_SEMAPHORE)

    def encode_with_token(bad):
        for count in itertools.count():
            os.eventfd_read(tokens)
            if bad and count == TROUBLE_STEP:
                stand(evict_entries, "host_lock", "missing_rank", "storage_io")
            time.sleep(0.002)
            os.eventfd_write(tokens, 1)
            time.sleep(0.03)

    fork(encode_with_token, False)
    fork(encode_with_token, True)

    def take_token():
        os.eventfd_read(tokens)
        os.eventfd_write(tokens, 1)

    job.train(take_token)


# Locks on files.


def lock_file(name):
    return os.open(path(name), os.O_RDWR | os.O_CREAT, 0o600)


def checkpoint_pruner():
    file = lock_file("checkpoints.lock")
    for _ in range(TROUBLE_STEP):
        with locked(file, fcntl.flock):
            time.sleep(0.005)
        time.sleep(0.03)
    fcntl.flock(file, fcntl.LOCK_EX)
    stand(back_off, "missing_rank", "storage_io")


@contextlib.contextmanager
def locked(file, lock):
    lock(file, fcntl.LOCK_EX)
    yield
    lock(file, fcntl.LOCK_UN)


def take_lock(file, lock):
    def read_checkpoint_index():
        with locked(file, lock):
            pass

    return read_checkpoint_index


@scenario(ranks=3, helpers=("checkpoint_pruner",))
def flock_held(job):
    """Rank 1 waits for a flock that the checkpoint pruner holds while it retries forever."""
    job.train(take_lock(lock_file("checkpoints.lock"), fcntl.flock) if job.rank == 1 else None)


def index_builder():
    file = lock_file("index.lock")
    for _ in range(TROUBLE_STEP):
        with locked(file, fcntl.lockf):
            time.sleep(0.005)
        time.sleep(0.03)
    fcntl.lockf(file, fcntl.LOCK_EX)
    stand(ask_licence_server, "missing_rank", "storage_io")


@scenario(ranks=2, helpers=("index_builder",))
def fcntl_lock_held(job):
    """Rank 0 waits for a POSIX lock of the index builder, which waits for its licence server."""
    job.train(take_lock(lock_file("index.lock"), fcntl.lockf) if job.rank == 0 else None)


def ofd_lock(file, kind):
    """F_OFD_SETLKW on the whole file; `kind` is LOCK_EX or LOCK_UN."""
    number = fcntl.F_WRLCK if kind == fcntl.LOCK_EX else fcntl.F_UNLCK
    fcntl.fcntl(file, 38, struct.pack("hhqqi4x", number, 0, 0, 0, 0))


@scenario(ranks=3)
def ofd_lock_inherited(job):
    """Rank 2 closes its locked file, but its indexer child inherited the lock and waits for its
    quota; rank 1 waits for the lock."""
    if job.rank == 1:
        job.train(take_lock(lock_file("tokens.lock"), ofd_lock))

    def index_tokens():
        stand(wait_for_quota, "host_lock", "missing_rank", "storage_io")

    def start_indexer():
        file = lock_file("tokens.lock")
        ofd_lock(file, fcntl.LOCK_EX)
        fork(index_tokens)
        os.close(file)

    job.train(trouble=start_indexer if job.rank == 2 else None)


@scenario(ranks=2)
def flock_taken_twice(job):
    """Rank 1 opens one lock file twice and locks both: it waits for itself."""

    def save_twice():
        fcntl.flock(lock_file("self.lock"), fcntl.LOCK_EX)
        fcntl.flock(lock_file("self.lock"), fcntl.LOCK_EX)

    job.train(trouble=(lambda: stand(save_twice, "storage_io", "host_lock", "missing_rank")) if job.rank == 1 else None)


@scenario(ranks=3)
def two_file_locks(job):
    """Ranks 0 and 1 take two flocks in opposite orders: both are to blame."""
    names = ["vocabulary.lock", "corpus.lock"]
    publish(f"pid.{job.rank}", os.getpid())

    def lock_both():
        first, second = names if job.rank == 0 else names[::-1]
        fcntl.flock(lock_file(first), fcntl.LOCK_EX)
        publish(f"has.{job.rank}", "")
        wait_for_file(f"has.{1 - job.rank}")
        pids = [int(read_published(f"pid.{rank}")) for rank in (0, 1)]
        blame(pids, ["storage_io", "host_lock", "missing_rank"], "lock_both")
        fcntl.flock(lock_file(second), fcntl.LOCK_EX)

    job.train(trouble=lock_both if job.rank < 2 else None)


# System V and POSIX semaphores.


def system_v_key():
    """One key for each scenario, so that a killed run leaves at most one object behind."""
    return zlib.crc32(f"{os.path.abspath(__file__)} {sys.argv[1]}".encode()) & 0x7FFFFFFF


class SystemVSemaphore:
    def __init__(self, value):
        libc.semctl(libc.semget(system_v_key(), 1, 0o600), 0, 0)  # IPC_RMID of an earlier run
        self.number = checked(libc.semget(system_v_key(), 1, 0o1600))
        checked(libc.semctl(self.number, 0, 16, value))  # SETVAL

    def add(self, change):
        checked(libc.semop(self.number, struct.pack("Hhh", 0, change, 0), 1))


def hold_semaphore(semaphore, trouble):
    """Uses the semaphore in each step, and keeps it in the last one."""
    for _ in range(TROUBLE_STEP):
        semaphore.add(-1)
        time.sleep(0.005)
        semaphore.add(1)
        time.sleep(0.03)
    semaphore.add(-1)
    trouble()


def use_semaphore(semaphore):
    def copy_with_semaphore():
        semaphore.add(-1)
        semaphore.add(1)

    return copy_with_semaphore


@scenario(ranks=2)
def sysv_semaphore_owner_killed(job):
    """Rank 1 waits for a System V semaphore whose holder, a child, was killed without undo."""
    if job.rank != 1:
        return job.train()
    semaphore = SystemVSemaphore(1)
    fork(hold_semaphore, semaphore, lambda: die("host_lock", "missing_rank"))
    job.train(use_semaphore(semaphore))


@scenario(ranks=2)
def sysv_semaphore_owner_reads(job):
    """Rank 0 waits for a System V semaphore whose holder is stuck on a mount."""
    if job.rank != 0:
        return job.train()
    semaphore = SystemVSemaphore(1)
    trouble = lambda: stand(read_from_mount, "storage_io", "host_lock", "missing_rank")
    fork(hold_semaphore, semaphore, trouble)
    job.train(use_semaphore(semaphore))


class NamedSemaphore:
    """sem_open; the processes that share it are forked."""

    def __init__(self, value):
        libc.sem_open.restype = ctypes.c_void_p
        name = f"/waits-{os.getpid()}".encode()
        self.pointer = ctypes.c_void_p(libc.sem_open(name, os.O_CREAT, 0o600, value))
        libc.sem_unlink(name)

    def add(self, change):
        checked(libc.sem_wait(self.pointer) if change < 0 else libc.sem_post(self.pointer))


@scenario(ranks=3)
def posix_semaphore_owner_stuck(job):
    """Rank 2 waits for a POSIX semaphore whose holder, a child, takes its own lock twice."""
    if job.rank != 2:
        return job.train()
    semaphore = NamedSemaphore(1)
    fork(hold_semaphore, semaphore, lambda: stand(evict_entries, "host_lock", "missing_rank"))
    job.train(use_semaphore(semaphore))


@scenario(ranks=2)
def posix_semaphore_not_posted(job):
    """Rank 0 waits for one post more than its code ever makes."""
    if job.rank != 0:
        return job.train()
    semaphore = NamedSemaphore(TROUBLE_STEP)

    def acquire_slot():
        semaphore.add(-1)

    for _ in range(TROUBLE_STEP):
        acquire_slot()
        job.train_step()
    stand(acquire_slot, "host_lock", "missing_rank")


# Objects of multiprocessing.


def hold_lock(lock, trouble, causes, killed=False):
    for _ in range(TROUBLE_STEP):
        with lock:
            time.sleep(0.005)
        time.sleep(0.03)
    lock.acquire()
    die(*causes) if killed else stand(trouble, *causes)


def use_lock(lock):
    def update_shared_state():
        with lock:
            pass

    return update_shared_state


@scenario(ranks=2)
def mp_lock_held(job):
    """Rank 1 waits for a multiprocessing.Lock; its holder, a spawned child, retries forever."""
    if job.rank != 1:
        return job.train()
    lock = SPAWN.Lock()
    worker(hold_lock, lock, back_off, ["host_lock", "missing_rank"], context=SPAWN, name="cache-writer")
    job.train(use_lock(lock))


@scenario(ranks=2)
def mp_lock_owner_killed(job):
    """Rank 0 waits for a multiprocessing.Lock whose holder was killed."""
    if job.rank != 0:
        return job.train()
    lock = FORK.Lock()
    worker(hold_lock, lock, None, ["host_lock", "missing_rank"], True, name="cache-writer")
    job.train(use_lock(lock))


def mp_rounds(before, trouble, causes, pause=0.03):
    """A child's work: `before` in each step, then the trouble."""
    for _ in range(TROUBLE_STEP):
        before()
        time.sleep(pause)
    stand(trouble, *causes)


@scenario(ranks=3)
def mp_event_never_set(job):
    """Rank 1 waits for an event of its prefetch child, which waits for its licence server."""
    if job.rank != 1:
        return job.train()
    ready = FORK.Event()
    worker(mp_rounds, ready.set, ask_licence_server, ["host_lock", "missing_rank", "data_loader"], name="prefetch")

    def wait_until_ready():
        ready.wait()
        ready.clear()

    job.train(wait_until_ready)


@scenario(ranks=2)
def mp_condition_never_notified(job):
    """Rank 0 waits on a condition, and the child that notifies it sleeps in a retry loop."""
    if job.rank != 0:
        return job.train()
    condition, made = FORK.Condition(), FORK.Value("i", 0, lock=False)

    def notify_batch():
        with condition:
            made.value += 1
            condition.notify_all()

    worker(mp_rounds, notify_batch, back_off, ["host_lock", "missing_rank", "data_loader"], name="batcher")
    used = itertools.count()

    def wait_for_batch():
        mine = next(used)
        with condition:
            while made.value <= mine:
                condition.wait()

    job.train(wait_for_batch)


@scenario(ranks=2)
def mp_barrier_one_absent(job):
    """Rank 1 and two children meet at a barrier; one child sleeps in a retry loop instead."""
    if job.rank != 1:
        return job.train()
    barrier = FORK.Barrier(3)
    causes = ["host_lock", "missing_rank"]

    def rotate_shards():
        while True:
            barrier.wait()

    worker(rotate_shards, name="shard-0")
    worker(mp_rounds, barrier.wait, back_off, causes, name="shard-1")

    def meet_shards():
        barrier.wait()

    job.train(meet_shards)


def load_batches(batches, trouble, causes):
    for number in range(TROUBLE_STEP):
        batches.put(number)
        time.sleep(0.03)
    time.sleep(0.2)  # the queue's thread sends the last batch
    if trouble is None:
        die(*causes)
    stand(trouble, *causes)


def next_batch_of(batches):
    def next_batch():
        return batches.get()

    return next_batch


@scenario(ranks=3)
def mp_queue_worker_stuck(job):
    """Rank 2 waits for a batch; its loader, a spawned process, reads from a silent mount."""
    if job.rank != 2:
        return job.train()
    batches = SPAWN.Queue()
    causes = ["data_loader", "storage_io"]
    worker(load_batches, batches, read_from_mount, causes, context=SPAWN, name="loader-0")
    job.train(next_batch_of(batches))


@scenario(ranks=2)
def mp_queue_worker_killed(job):
    """Rank 1 waits for a batch of a loader that was killed."""
    if job.rank != 1:
        return job.train()
    batches = FORK.Queue()
    worker(load_batches, batches, None, ["data_loader"], name="loader-0")
    job.train(next_batch_of(batches))


def consume_samples(samples, trouble, causes, done=lambda: None):
    for _ in range(TROUBLE_STEP):
        samples.get()
        done()
    stand(trouble, *causes)


@scenario(ranks=2)
def mp_queue_full(job):
    """Rank 0 blocks in put on a full queue, because the consumer takes its own lock twice."""
    if job.rank != 0:
        return job.train()
    samples = FORK.Queue(4)
    worker(consume_samples, samples, evict_entries, ["host_lock", "data_loader", "missing_rank"], name="uploader")

    def upload_sample():
        samples.put(b"sample")

    job.train(upload_sample)


@scenario(ranks=2)
def mp_simple_queue_full(job):
    """Rank 1 blocks in put of a SimpleQueue, because its consumer was stopped by SIGSTOP."""
    if job.rank != 1:
        return job.train()
    samples = FORK.SimpleQueue()
    worker(consume_samples, samples, suspend_self, ["process_stopped"], name="uploader")

    def upload_sample():
        samples.put(bytes(32_000))

    job.train(upload_sample)


@scenario(ranks=2)
def mp_joinable_queue(job):
    """Rank 1 waits until all tasks are done, but the worker is in an endless loop."""
    if job.rank != 1:
        return job.train()
    tasks = FORK.JoinableQueue()
    causes = ["host_lock", "data_loader", "missing_rank", "long_step"]
    worker(consume_samples, tasks, spin_until_fresh, causes, tasks.task_done, name="augmenter")

    def wait_for_tasks():
        tasks.put("augment")
        tasks.join()

    job.train(wait_for_tasks)


class ShardSchedule:
    """Lives in the process of the manager."""

    def __init__(self):
        self.count = 0

    def next_shard(self):
        self.count += 1
        if self.count > TROUBLE_STEP:
            stand(wait_for_quota, "host_lock", "missing_rank")
        return self.count


class ScheduleManager(multiprocessing.managers.BaseManager):
    pass


ScheduleManager.register("ShardSchedule", ShardSchedule)


@scenario(ranks=2)
def mp_manager(job):
    """Rank 0 calls an object in a manager process, where the call waits for an event forever."""
    if job.rank != 0:
        return job.train()
    manager = ScheduleManager(ctx=FORK)
    manager.start(die_with_parent)
    schedule = manager.ShardSchedule()

    def ask_next_shard():
        schedule.next_shard()

    job.train(ask_next_shard)


def score_sample(number):
    if number == TROUBLE_STEP:
        die("host_lock", "data_loader", "missing_rank")
    return number


@scenario(ranks=2)
def mp_pool_worker_killed(job):
    """Rank 1 waits for a task of a pool whose worker was killed; the pool replaced the worker, but
    the task is lost."""
    if job.rank != 1:
        return job.train()
    pool = FORK.Pool(2, die_with_parent)
    numbers = itertools.count()

    def score_samples():
        pool.apply(score_sample, (next(numbers),))

    job.train(score_samples)


def rank_documents(number):
    if number == TROUBLE_STEP:
        stand(ask_licence_server, "missing_rank", "host_lock", "data_loader")
    return number


@scenario(ranks=2)
def mp_pool_worker_stuck(job):
    """Rank 0 waits in Pool.map for one worker that waits for its licence server."""
    if job.rank != 0:
        return job.train()
    pool = FORK.Pool(2, die_with_parent)
    numbers = itertools.count()

    def rank_batch():
        first = next(numbers)
        pool.map(rank_documents, [first, -1])

    job.train(rank_batch)


def render_views(connection):
    answer_requests(connection.recv, connection.send, lambda: stand(wait_for_quota, "host_lock", "missing_rank"))


@scenario(ranks=2)
def mp_connection(job):
    """Rank 0 waits in Connection.recv for its renderer, a process of the fork server."""
    if job.rank != 0:
        return job.train()
    ours, theirs = FORKSERVER.Pipe()
    worker(render_views, theirs, context=FORKSERVER, name="renderer")

    def request_view():
        ours.send("view")
        ours.recv()

    job.train(request_view)


def build_index(results):
    results.put(bytes(1 << 22))


@scenario(ranks=2)
def mp_joined_before_get(job):
    """Rank 1 joins a child before it takes the child's large result from the queue, so the child
    cannot end: rank 1 is to blame."""

    def collect_index():
        results = FORK.Queue()
        child = worker(build_index, results, name="index-builder")
        blame([os.getpid()], ["host_lock", "missing_rank", "data_loader"], "collect_index")
        child.join()
        return results.get()

    job.train(trouble=collect_index if job.rank == 1 else None)


# Objects of pthread and futexes in shared memory.


class RobustMutex:
    """A process-shared, robust pthread mutex in memory that forked processes share."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)
        self.pointer = ctypes.byref((ctypes.c_char * 64).from_buffer(self.memory))
        attributes = ctypes.create_string_buffer(16)
        libc.pthread_mutexattr_init(attributes)
        libc.pthread_mutexattr_setpshared(attributes, 1)
        libc.pthread_mutexattr_setrobust(attributes, 1)
        libc.pthread_mutex_init(self.pointer, attributes)

    def __enter__(self):
        libc.pthread_mutex_lock(self.pointer)

    def __exit__(self, *_error):
        libc.pthread_mutex_unlock(self.pointer)

    acquire = __enter__


@scenario(ranks=2)
def robust_mutex_owner_asleep(job):
    """Rank 1 waits for a robust mutex; the child that owns it lives, but retries forever."""
    if job.rank != 1:
        return job.train()
    mutex = RobustMutex()
    fork(hold_lock, mutex, back_off, ["host_lock", "missing_rank"])
    job.train(use_lock(mutex))


@scenario(ranks=2)
def robust_mutex_owner_stopped(job):
    """Rank 0 waits for a robust mutex; the child that owns it was stopped by SIGSTOP."""
    if job.rank != 0:
        return job.train()
    mutex = RobustMutex()
    fork(hold_lock, mutex, suspend_self, ["process_stopped"])
    job.train(use_lock(mutex))


@scenario(ranks=2)
def shared_futex(job):
    """Rank 1 waits on a futex in shared memory for its child, which takes its own lock twice."""
    if job.rank != 1:
        return job.train()
    memory = mmap.mmap(-1, 4096)
    word = ctypes.c_uint32.from_buffer(memory)
    futex = lambda operation, value: libc.syscall(202, ctypes.byref(word), operation, value, None, None, 0)

    def fill_ring():
        for _ in range(TROUBLE_STEP):
            word.value += 1
            futex(1, 1)  # FUTEX_WAKE
            time.sleep(0.03)
        stand(evict_entries, "host_lock", "missing_rank")

    fork(fill_ring)
    seen = itertools.count()

    def wait_for_ring():
        expected = next(seen)
        while word.value <= expected:
            futex(0, word.value)  # FUTEX_WAIT

    job.train(wait_for_ring)


# Message queues.


@scenario(ranks=2)
def sysv_message_queue(job):
    """Rank 0 waits in msgrcv for its reader child, which reads from a silent mount."""
    if job.rank != 0:
        return job.train()
    libc.msgctl(libc.msgget(system_v_key(), 0o600), 0, None)  # IPC_RMID of an earlier run
    number = checked(libc.msgget(system_v_key(), 0o1600))

    def read_records():
        for _ in range(TROUBLE_STEP):
            checked(libc.msgsnd(number, struct.pack("q8s", 1, b"record"), 8, 0))
            time.sleep(0.03)
        stand(read_from_mount, "storage_io", "missing_rank", "data_loader")

    fork(read_records)
    message = ctypes.create_string_buffer(64)

    def receive_record():
        checked(libc.msgrcv(number, message, 8, 0, 0))

    job.train(receive_record)


class PosixMessageQueue:
    def __init__(self):
        name = f"/waits-{os.getpid()}".encode()
        attributes = (ctypes.c_long * 8)(0, 4, 64)
        self.number = checked(libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, attributes))
        libc.mq_unlink(name)

    def send(self):
        checked(libc.mq_send(self.number, b"m" * 64, 64, 0))

    def receive(self):
        checked(libc.mq_receive(self.number, ctypes.create_string_buffer(64), 64, None))


@scenario(ranks=2)
def posix_message_queue_empty(job):
    """Rank 1 waits in mq_receive for its child, which waits for a signal."""
    if job.rank != 1:
        return job.train()
    messages = PosixMessageQueue()
    causes = ["missing_rank", "storage_io"]
    fork(mp_rounds, messages.send, wait_for_signal, causes)

    def receive_plan():
        messages.receive()

    job.train(receive_plan)


@scenario(ranks=2)
def posix_message_queue_full(job):
    """Rank 0 blocks in mq_send, because the child that receives is in an endless loop."""
    if job.rank != 0:
        return job.train()
    messages = PosixMessageQueue()
    causes = ["missing_rank", "long_step", "storage_io"]
    fork(mp_rounds, messages.receive, spin_until_fresh, causes, 0)

    def send_statistics():
        messages.send()

    job.train(send_statistics)


# Flags in shared memory.


@scenario(ranks=3)
def shared_flag_polled(job):
    """Rank 1 polls a counter in shared memory; its producer takes its own lock twice."""
    if job.rank != 1:
        return job.train()
    produced = FORK.Value("i", 0, lock=False)

    def produce_batch():
        produced.value += 1

    worker(mp_rounds, produce_batch, evict_entries, ["host_lock", "missing_rank", "data_loader"], name="producer")
    consumed = itertools.count()

    def poll_producer():
        mine = next(consumed)
        while produced.value <= mine:
            time.sleep(0.005)

    job.train(poll_producer)


@scenario(ranks=2)
def shared_flag_spun_on(job):
    """Rank 0 spins on a counter in shared memory; its producer was killed."""
    if job.rank != 0:
        return job.train()
    memory = mmap.mmap(-1, 4096)

    def decode_samples():
        for count in range(TROUBLE_STEP):
            memory[0] = count + 1
            time.sleep(0.03)
        die("missing_rank", "data_loader")

    fork(decode_samples)
    consumed = itertools.count()

    def spin_on_producer():
        mine = next(consumed)
        while memory[0] <= mine:
            os.sched_yield()

    job.train(spin_on_producer)


def map_board():
    """Counters in shared memory: the newest batch for each rank, and the newest that it took."""
    with open(path("board"), "ab+") as file:
        file.truncate(128)
        return memoryview(mmap.mmap(file.fileno(), 128)).cast("Q")


def give_batch(board, batch, ranks):
    """Gives a batch to `ranks`, and waits until they have taken it."""
    for rank in ranks:
        board[rank] = batch
    while min(board[8 + rank] for rank in ranks) < batch:
        time.sleep(0.002)


def batches_of(rank):
    """A function with which a rank takes its next batch."""
    board, batches = map_board(), itertools.count(1)

    def poll_board():
        batch = next(batches)
        while board[rank] < batch:
            time.sleep(0.002)
        board[8 + rank] = batch

    return poll_board


def board_scheduler():
    board = map_board()
    for batch in range(1, TROUBLE_STEP):
        give_batch(board, batch, range(3))
    give_batch(board, TROUBLE_STEP, range(2))
    stand(read_from_mount, "storage_io")


@scenario(ranks=3, helpers=("board_scheduler",))
def board_polled(job):
    """The ranks poll shared memory for their batches. The scheduler, which is not a relative of
    theirs, reads from a silent mount before it gives a batch to rank 2."""
    job.train(batches_of(job.rank))


def board_sampler():
    board = map_board()
    for count in range(1, TROUBLE_STEP):
        board[0] = count
        time.sleep(0.03)
    stand(evict_entries, "host_lock", "missing_rank")


@scenario(ranks=2, helpers=("board_sampler",))
def board_spun_on(job):
    """Rank 1 spins on a counter in shared memory; the sampler, which is not a relative of it, takes
    its own lock twice."""
    if job.rank != 1:
        return job.train()
    board, consumed = map_board(), itertools.count()

    def spin_on_sampler():
        mine = next(consumed)
        while board[0] <= mine:
            os.sched_yield()

    job.train(spin_on_sampler)


# Children.


def prune_checkpoints():
    stand(wait_for_quota, "host_lock", "missing_rank")


@scenario(ranks=2)
def subprocess_run(job):
    """Rank 1 waits in subprocess.run for a child that waits for an event forever."""

    def prune_old_checkpoints():
        subprocess.run(command("prune_checkpoints"), preexec_fn=die_with_parent)

    job.train(trouble=prune_old_checkpoints if job.rank == 1 else None)


@scenario(ranks=3)
def waitpid_of_sleeper(job):
    """Rank 0 waits in waitpid for a forked child that reads from a silent mount."""

    def verify_shards():
        stand(read_from_mount, "storage_io", "missing_rank")

    def run_verification():
        os.waitpid(fork(verify_shards), 0)

    job.train(trouble=run_verification if job.rank == 0 else None)


def convert_dataset():
    """Starts a daemon that inherits the output, and ends."""
    parent, daemon = os.getpid(), os.fork()
    if daemon == 0:
        publish("daemon.pid", os.getpid())
        while os.getppid() == parent:
            time.sleep(0.01)
        die_with_parent()
        back_off()
    read_published("daemon.pid")
    blame([daemon], ["missing_rank", "storage_io"], "back_off")
    print("converted", flush=True)


@scenario(ranks=2)
def communicate_with_grandchild(job):
    """Rank 1 waits in communicate for the end of the output of a child that has ended; a daemon
    that the child started keeps the pipe open."""

    def read_conversion():
        start("convert_dataset", stdout=subprocess.PIPE).communicate()

    # The rank becomes the daemon's parent, so the daemon ends with it.
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    job.train(trouble=read_conversion if job.rank == 1 else None)


def list_shards():
    die_with_parent()
    for number in range(100):
        print(f"shard-{number}", flush=True)
    stand(ask_licence_server, "missing_rank", "storage_io")


@scenario(ranks=2)
def shell_pipeline(job):
    """Rank 0 waits for `list_shards | sort`, whose first command waits for a server."""
    line = f"'{sys.executable}' '{os.path.abspath(__file__)}' {sys.argv[1]} list_shards | sort"

    def select_shards():
        subprocess.check_output(line, shell=True, preexec_fn=die_with_parent)

    job.train(trouble=select_shards if job.rank == 0 else None)


def model_registry():
    listener = socket.create_server(("127.0.0.1", 0))
    publish("registry.port", listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        if b"/latest" in connection.recv(4096):
            stand(evict_entries, "host_lock", "missing_rank")
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok")
        connection.close()


def fetch():
    url = f"http://127.0.0.1:{read_published('registry.port')}/latest"
    urllib.request.urlopen(url).read()


@scenario(ranks=2, helpers=("model_registry",))
def download_tool(job):
    """Rank 1 waits for a download tool, which waits for the model registry, which takes its own
    lock twice."""

    def download_model():
        subprocess.run(command("fetch"), preexec_fn=die_with_parent, check=True)

    def check_registry():
        urllib.request.urlopen(f"http://127.0.0.1:{read_published('registry.port')}/health").read()

    job.train(check_registry if job.rank == 1 else None, download_model if job.rank == 1 else None)


@scenario(ranks=2)
def curl_of_stopped_server(job):
    """Rank 0 waits for curl, or a tool like it, which waits for a server that is stopped."""
    if job.rank != 0:
        return job.train()

    def serve_weights():
        listener = socket.create_server(("127.0.0.1", 0))
        publish("weights.port", listener.getsockname()[1])
        _connection, _ = listener.accept()
        stand(suspend_self, "process_stopped")

    fork(serve_weights)
    line = f"exec 3<>/dev/tcp/127.0.0.1/{read_published('weights.port')}; echo GET / >&3; cat <&3"

    def download_weights():
        subprocess.run(["bash", "-c", line], preexec_fn=die_with_parent, check=True)

    job.train(trouble=download_weights)


@scenario(ranks=2)
def lock_inherited_over_fork(job):
    """The child of rank 1 waits for a lock that a thread of rank 1 held at the fork; this thread
    does not exist in the child."""
    registry_lock = threading.Lock()

    def refresh_registry():
        while True:
            with registry_lock:
                time.sleep(0.5)

    def export_registry():
        registry_lock.acquire()

    def run_export():
        threading.Thread(target=refresh_registry, name="refresh", daemon=True).start()
        time.sleep(0.2)
        os.waitpid(fork(stand, export_registry, "host_lock", "missing_rank"), 0)

    job.train(trouble=run_export if job.rank == 1 else None)


# The GIL.


def flush_native_cache():
    """A C function that sleeps without releasing the GIL."""
    ctypes.PyDLL(None).pause()


@scenario(ranks=2)
def gil_held_beside_accept(job):
    """A thread of rank 1 holds the GIL in a C call, and the main thread sleeps in accept."""

    def accept_debugger():
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Timer(0.3, stand, (flush_native_cache, "gil_deadlock")).start()
        listener.accept()

    job.train(trouble=accept_debugger if job.rank == 1 else None)


def gil_server():
    def report_statistics():
        while True:
            time.sleep(0.5)

    threading.Thread(target=report_statistics, name="statistics", daemon=True).start()
    tcp_server("gil.port", lambda: stand(flush_native_cache, "gil_deadlock", "missing_rank"))


@scenario(ranks=2, helpers=("gil_server",))
def gil_held_in_server(job):
    """Rank 0 waits for a server whose main thread holds the GIL in a C call that never returns."""
    job.train(request(tcp_client("gil.port")) if job.rank == 0 else None)


# A key-value store, and locks between ranks.


class Store:
    """The client of `key_value_store`: SET key value, GET key (waits), ADD key."""

    def __init__(self):
        self.file = tcp_client("store.port").makefile("rw")

    def call(self, *words):
        print(*words, file=self.file, flush=True)
        return self.file.readline().strip()

    def wait_for_key(self, key):
        return self.call("GET", key)

    def barrier(self, name, world):
        """All but the last one wait for the last one."""
        if int(self.call("ADD", f"{name}.arrived")) == world:
            self.call("SET", f"{name}.done", 1)
        self.wait_for_key(f"{name}.done")


def key_value_store():
    values, changed = {}, threading.Condition()

    def serve(connection):
        file = connection.makefile("rw")
        for line in file:
            kind, key, *value = line.split()
            with changed:
                if kind == "SET":
                    values[key] = value[0]
                elif kind == "ADD":
                    values[key] = str(int(values.get(key, "0")) + 1)
                elif kind == "STOP":
                    threading.Thread(target=stand, args=(suspend_self, "process_stopped")).start()
                changed.notify_all()
                changed.wait_for(lambda: key in values)
                print(values[key], file=file, flush=True)

    listener = socket.create_server(("127.0.0.1", 0))
    publish("store.port", listener.getsockname()[1])
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


@scenario(ranks=3, helpers=("key_value_store",))
def store_key_nobody_sets(job):
    """Rank 0 waits for a key of the store with a misspelled name, which nobody sets."""
    store = Store()
    store.call("SET", f"ready.{job.rank}", 1)

    def wait_for_dataset():
        blame([os.getpid()], ["missing_rank", "comm_init"], "wait_for_key")
        store.wait_for_key("dataset.raedy")

    job.train(trouble=wait_for_dataset if job.rank == 0 else None)


@scenario(ranks=3, helpers=("key_value_store",))
def store_key_setter_stuck(job):
    """Rank 0 waits for a key that rank 2 would set, but rank 2 takes its own lock twice; rank 1
    waits for both in the collective."""
    store = Store()

    def publish_shards():
        stand(evict_entries, "host_lock", "missing_rank")
        store.call("SET", "shards", 1)

    def wait_for_shards():
        store.wait_for_key("shards")

    job.train(trouble={0: wait_for_shards, 2: publish_shards}.get(job.rank))


@scenario(ranks=3, helpers=("key_value_store",))
def store_final_barrier(job):
    """The training is over. Ranks 0 and 2 wait at a barrier of the store for rank 1, which reads
    from a silent mount."""
    store = Store()
    for _ in range(TROUBLE_STEP):
        job.train_step()

    def save_model():
        if job.rank == 1:
            stand(read_from_mount, "storage_io", "teardown", "missing_rank")

    save_model()
    store.barrier("final", job.world)


@scenario(ranks=2, helpers=("key_value_store",))
def store_final_barrier_rank_gone(job):
    """Rank 0 waits at the final barrier of the store for rank 1, which was killed before it."""
    store = Store()
    for _ in range(TROUBLE_STEP):
        job.train_step()
    if job.rank == 1:
        die()
    store.barrier("final", job.world)


@scenario(ranks=2, helpers=("key_value_store",))
def store_stopped(job):
    """Rank 1 waits for a store whose process was stopped by SIGSTOP."""
    store = Store()

    def read_plan():
        store.call("STOP", "plan")

    job.train(trouble=read_plan if job.rank == 1 else None)


@scenario(ranks=3)
def two_pipes_crossed(job):
    """Ranks 0 and 1 read from each other's FIFO before they write: both are to blame."""
    if job.rank == 2:
        return job.train()
    os.mkfifo(path(f"to.{job.rank}"))
    inbox = os.open(path(f"to.{job.rank}"), os.O_RDWR)
    outbox = os.open(wait_for_file(f"to.{1 - job.rank}"), os.O_RDWR)
    publish(f"pid.{job.rank}", os.getpid())

    def exchange_halo(read_first=False):
        if not read_first:
            os.write(outbox, b"halo")
        os.read(inbox, 4)

    def exchange_edges():
        pids = [int(read_published(f"pid.{rank}")) for rank in (0, 1)]
        blame(pids, ["storage_io", "missing_rank"], "exchange_halo")
        exchange_halo(read_first=True)

    job.train(exchange_halo, exchange_edges)


@scenario(ranks=2)
def two_locks_crossed(job):
    """Rank 1 and its child take two multiprocessing locks in opposite orders: both are to blame."""
    if job.rank != 1:
        return job.train()
    index, cache, met = FORK.Lock(), FORK.Lock(), FORK.Barrier(2)

    def update_both(first, second):
        with first:
            met.wait()
            with second:
                pass

    child = worker(update_both, cache, index, name="cache-writer")

    def update_index():
        blame([os.getpid(), child.pid], ["host_lock"], "update_both")
        update_both(index, cache)

    job.train(trouble=update_index)


# Chains.


@scenario(ranks=3)
def chain_of_three(job):
    """Rank 0 waits in a collective for rank 2, which waits for its loader, which waits for an
    event."""
    if job.rank != 2:
        return job.train()
    batches = FORK.Queue()
    worker(load_batches, batches, wait_for_quota, ["data_loader", "host_lock"], name="loader-0")
    job.train(next_batch_of(batches))


def cache_server():
    """Holds the lock of the cache while it answers; is stopped in the middle of an answer."""
    file = lock_file("cache.lock")
    publish("cache.ready", "")
    for _ in range(TROUBLE_STEP):
        with locked(file, fcntl.flock):
            time.sleep(0.002)
        time.sleep(0.03)
    fcntl.flock(file, fcntl.LOCK_EX)
    stand(suspend_self, "process_stopped")


def load_from_cache(batches):
    file = lock_file("cache.lock")
    while True:
        with locked(file, fcntl.flock):
            batches.put(1)
        time.sleep(0.01)


@scenario(ranks=3, helpers=("cache_server",))
def chain_of_four(job):
    """Rank 0 waits for rank 2, which waits for its loader, which waits for a lock of the cache
    server, which is stopped by SIGSTOP."""
    if job.rank != 2:
        return job.train()
    wait_for_file("cache.ready")
    batches = FORK.Queue(2)
    worker(load_from_cache, batches, name="loader-0")
    job.train(next_batch_of(batches))


@scenario(ranks=3)
def chain_through_two_ranks(job):
    """Rank 0 waits in the collective; rank 1 waits on a socket for rank 2, which waits for a child
    that takes its own lock twice."""
    if job.rank == 0:
        return job.train()
    if job.rank == 1:
        connection = tcp_client("peer.port")
        return job.train(request(connection))
    listener = socket.create_server(("127.0.0.1", 0))
    publish("peer.port", listener.getsockname()[1])
    connection, _ = listener.accept()

    def answer_peer():
        connection.sendall(connection.recv(64))

    def compact_cache():
        child = fork(stand, evict_entries, "host_lock", "missing_rank")
        os.waitpid(child, 0)

    for _ in range(TROUBLE_STEP):
        answer_peer()
        job.train_step()
    compact_cache()


def front_server():
    """Passes each request on to `database`."""
    backend = tcp_client("database.port")
    listener = socket.create_server(("127.0.0.1", 0))
    publish("front.port", listener.getsockname()[1])
    connection, _ = listener.accept()

    def query_backend(data):
        backend.sendall(data)
        connection.sendall(backend.recv(64))

    answer_requests(lambda: connection.recv(64), query_backend, lambda: None)


def database():
    tcp_server("database.port", lambda: stand(read_from_mount, "storage_io", "missing_rank"))


@scenario(ranks=2, helpers=("front_server", "database"))
def chain_of_two_servers(job):
    """Rank 1 waits for the front server, which waits for the database, which reads from a mount."""
    job.train(request(tcp_client("front.port")) if job.rank == 1 else None)


def transform_images(images, batches):
    while True:
        images.get()
        batches.put(1)


@scenario(ranks=2)
def chain_of_loader_stages(job):
    """Rank 0 waits for the transform stage, which waits for the download stage, which retries
    forever."""
    if job.rank != 0:
        return job.train()
    images, batches = FORK.Queue(), FORK.Queue()
    worker(load_batches, images, back_off, ["data_loader", "missing_rank"], name="download")
    worker(transform_images, images, batches, name="transform")
    job.train(next_batch_of(batches))


# Data loaders.


class Loader:
    """Worker processes, each with a queue of indices; batches come in order."""

    def __init__(self, work, context=FORK, workers=2):
        self.indices = [context.Queue() for _ in range(workers)]
        self.results = context.Queue(4)
        self.sent, self.wanted, self.cache = itertools.count(), itertools.count(), {}
        for number, indices in enumerate(self.indices):
            worker(work, indices, self.results, context=context, name=f"DataLoader-{number}")
        for _ in range(2 * workers):
            self.send_index()

    def send_index(self):
        index = next(self.sent)
        self.indices[index % len(self.indices)].put(index)

    def next_batch(self):
        wanted = next(self.wanted)
        while wanted not in self.cache:
            index, batch = self.results.get()
            self.cache[index] = batch
        self.send_index()
        return self.cache.pop(wanted)


def worker_loop(indices, results, trouble=None, causes=("data_loader",)):
    while True:
        index = indices.get()
        if index == TROUBLE_STEP:
            stand(trouble, *causes) if trouble else die(*causes)
        results.put((index, bytes(64)))


def loop_with_read(indices, results):
    worker_loop(indices, results, read_from_mount, ("data_loader", "storage_io"))


def loop_with_spin(indices, results):
    worker_loop(indices, results, spin_until_fresh, ("data_loader", "long_step"))


def loop_with_lock(indices, results):
    worker_loop(indices, results, evict_entries, ("data_loader", "host_lock"))


def loop_with_stop(indices, results):
    worker_loop(indices, results, suspend_self, ("process_stopped", "data_loader"))


def train_with_loader(job, bad_rank, *arguments):
    if job.rank != bad_rank:
        return job.train()
    job.train(Loader(*arguments).next_batch)


@scenario(ranks=2)
def loader_worker_reads(job):
    """A loader worker of rank 1 reads from a silent mount."""
    train_with_loader(job, 1, loop_with_read)


@scenario(ranks=2)
def loader_worker_spins(job):
    """A spawned loader worker of rank 0 is in an endless loop in its transform."""
    train_with_loader(job, 0, loop_with_spin, SPAWN)


@scenario(ranks=2)
def loader_worker_locked(job):
    """The loader worker of rank 0, which comes from the fork server, takes its own lock twice."""
    train_with_loader(job, 0, loop_with_lock, FORKSERVER, 1)


@scenario(ranks=2)
def loader_worker_stopped(job):
    """A loader worker of rank 1 is stopped by SIGSTOP, and the other one waits to deliver."""
    train_with_loader(job, 1, loop_with_stop)


@scenario(ranks=3)
def loader_worker_killed(job):
    """A loader worker of rank 0 is killed, as by the kernel when memory is short."""
    train_with_loader(job, 0, worker_loop)


class ForgetfulLoader(Loader):
    def send_index(self):
        if (index := next(self.sent)) == TROUBLE_STEP:
            self.forgotten = index
            return
        self.indices[index % len(self.indices)].put(index)

    def next_batch(self):
        if (wanted := next(self.wanted)) == getattr(self, "forgotten", -1):
            blame([os.getpid()], ["data_loader"], "next_batch")
        while wanted not in self.cache:
            index, batch = self.results.get()
            self.cache[index] = batch
        self.send_index()
        return self.cache.pop(wanted)


@scenario(ranks=2)
def loader_index_never_sent(job):
    """Rank 1 never sends one index, so no worker has anything to do, and rank 1 waits for its
    batch: rank 1 is to blame."""
    if job.rank != 1:
        return job.train()
    job.train(ForgetfulLoader(worker_loop).next_batch)


@scenario(ranks=2)
def loader_behind_pin_thread(job):
    """Rank 1 waits for its pin-memory thread, which waits for a worker that waits for a server."""
    if job.rank != 1:
        return job.train()
    batches, pinned = FORK.Queue(), queue.Queue(2)
    worker(load_batches, batches, ask_licence_server, ["data_loader", "missing_rank"], name="loader-0")

    def pin_memory():
        while True:
            pinned.put(batches.get())

    threading.Thread(target=pin_memory, name="pin_memory", daemon=True).start()
    job.train(next_batch_of(pinned))


@scenario(ranks=3, helpers=("dataset_server",))
def loaders_of_all_ranks_wait(job):
    """The loader threads of all ranks wait for the dataset server, whose main thread holds the lock
    of the dataset while it retries forever."""
    connection = tcp_client(f"dataset.{job.rank}.port")
    batches = FORK.Queue(1)

    def download_batches():
        while True:
            request(connection)()
            batches.put(1)

    thread = threading.Thread(target=download_batches, name="download", daemon=True)
    thread.start()
    job.train(next_batch_of(batches))


def dataset_server():
    dataset_lock, reached = threading.Lock(), threading.Event()

    def serve_rank(rank):
        listener = socket.create_server(("127.0.0.1", 0))
        publish(f"dataset.{rank}.port", listener.getsockname()[1])
        connection, _ = listener.accept()

        def send_batch(data):
            with dataset_lock:
                connection.sendall(data)

        answer_requests(lambda: connection.recv(64), send_batch, reached.set)

    for rank in range(3):
        threading.Thread(target=serve_rank, args=(rank,), name=f"rank-{rank}", daemon=True).start()
    reached.wait()
    dataset_lock.acquire()
    stand(back_off, "data_loader", "missing_rank", "host_lock")


# Checkpoints and logs.


@scenario(ranks=2)
def checkpoint_writer_stuck(job):
    """Rank 0 joins the previous checkpoint writer, which waits for a lock on the checkpoint that
    the same process has already taken."""

    def write_checkpoint():
        fcntl.flock(lock_file("step.lock"), fcntl.LOCK_EX)
        fcntl.flock(lock_file("step.lock"), fcntl.LOCK_EX)

    def save_checkpoint():
        worker(stand, write_checkpoint, "storage_io", "host_lock", name="checkpoint-writer").join()

    job.train(trouble=save_checkpoint if job.rank == 0 else None)


@scenario(ranks=2)
def checkpoint_writer_killed(job):
    """Rank 1 waits for the event of a checkpoint writer that was killed."""

    def save_checkpoint():
        saved = FORK.Event()
        worker(die, "host_lock", "missing_rank", name="checkpoint-writer")
        saved.wait()

    job.train(trouble=save_checkpoint if job.rank == 1 else None)


def write_log(records):
    for _ in range(TROUBLE_STEP):
        records.get()
    die("host_lock", "missing_rank")


@scenario(ranks=2)
def log_listener_killed(job):
    """Rank 1 logs into a full queue whose listener process was killed."""
    if job.rank != 1:
        return job.train()
    records = FORK.Queue(4)
    worker(write_log, records, name="log-listener")
    log = logging.getLogger("train")
    handler = logging.handlers.QueueHandler(records)
    handler.enqueue = records.put  # wait instead of an error when the queue is full
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def log_loss():
        log.info("loss 0.1")

    job.train(log_loss)


# asyncio and executors.


def actor_server():
    tcp_server("actors.port", lambda: stand(wait_for_quota, "host_lock", "missing_rank"))


@scenario(ranks=2, helpers=("actor_server",))
def asyncio_stream(job):
    """Rank 1 waits in asyncio for a reply of the actor server, which waits for an event."""
    if job.rank != 1:
        return job.train()

    async def train_with_actor():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(read_published("actors.port")))
        while True:
            writer.write(b"act")
            await reader.read(64)
            job.train_step()

    asyncio.run(train_with_actor())


@scenario(ranks=2)
def asyncio_subprocess(job):
    """Rank 0 waits in asyncio for the end of a child that waits for an event forever."""
    if job.rank != 0:
        return job.train()

    async def run_cleanup():
        child = await asyncio.create_subprocess_exec(*command("prune_checkpoints"), preexec_fn=die_with_parent)
        await child.wait()

    job.train(trouble=lambda: asyncio.run(run_cleanup()))


@scenario(ranks=2)
def asyncio_future_forgotten(job):
    """Rank 1 awaits a future that no task resolves."""

    async def gather_rollouts():
        rollouts = [asyncio.sleep(0.01), asyncio.get_running_loop().create_future()]
        await asyncio.gather(*rollouts)

    def collect_rollouts():
        asyncio.run(gather_rollouts())

    job.train(trouble=(lambda: stand(collect_rollouts, "missing_rank", "host_lock")) if job.rank == 1 else None)


def plan_step(number, trouble, causes):
    if number == TROUBLE_STEP:
        stand(trouble, *causes)
    return number


def train_with_executor(job, bad_rank, trouble, *causes):
    if job.rank != bad_rank:
        return job.train()
    executor = concurrent.futures.ProcessPoolExecutor(2, FORK, die_with_parent)
    numbers = itertools.count()

    def wait_for_plan():
        executor.submit(plan_step, next(numbers), trouble, causes).result()

    # Starts the workers from the main thread, whose end would end them.
    job.train(wait_for_plan)


@scenario(ranks=2)
def process_pool_worker_stuck(job):
    """Rank 1 waits for a future of a process pool whose worker takes its own lock twice."""
    train_with_executor(job, 1, evict_entries, "host_lock", "missing_rank")


@scenario(ranks=2)
def process_pool_worker_stopped(job):
    """Rank 0 waits for a future of a process pool whose worker is stopped by SIGSTOP."""
    train_with_executor(job, 0, suspend_self, "process_stopped")


@scenario(ranks=2)
def thread_pool_nested(job):
    """The only thread of a pool waits for a task of its own pool: rank 1 is to blame."""
    executor = concurrent.futures.ThreadPoolExecutor(1, "executor")

    def tokenize(text):
        return text

    def tokenize_batch():
        return executor.submit(tokenize, "text").result()

    def prepare_batch():
        blame([os.getpid()], ["host_lock"], "tokenize_batch")
        executor.submit(tokenize_batch).result()

    job.train(trouble=prepare_batch if job.rank == 1 else None)


@scenario(ranks=2, helpers=("parameter_server",))
def thread_pool_with_server(job):
    """Rank 0 waits for a thread of its pool, which waits for the parameter server."""
    if job.rank != 0:
        return job.train()
    executor = concurrent.futures.ThreadPoolExecutor(1, "pull")
    pull = request(tcp_client("parameters.port"))

    def pull_parameters():
        executor.submit(pull).result()

    job.train(pull_parameters)


# Two culprits of equal evidence.


def two_culprits(job, first, second, causes, place):
    """Rank 1 begins `first` and rank 2 `second`, both in the same step."""
    publish(f"pid.{job.rank}", os.getpid())

    def begin(trouble):
        if job.rank == 1:
            blame([int(read_published(f"pid.{rank}")) for rank in (1, 2)], causes, place)
            publish("begun", "")
        wait_for_file("begun")
        trouble()

    job.train(trouble={1: lambda: begin(first), 2: lambda: begin(second)}.get(job.rank))


@scenario(ranks=3)
def two_culprits_sleep_and_lock(job):
    """Rank 1 sleeps in a retry loop, rank 2 takes its own lock twice: both are to blame."""
    two_culprits(job, back_off, evict_entries, ["missing_rank", "host_lock"], "back_off")


@scenario(ranks=3)
def two_culprits_poll_and_dead(job):
    """Rank 1 polls for a file, rank 2 is killed: both are to blame."""
    kill_self = lambda: os.kill(os.getpid(), signal.SIGKILL)
    two_culprits(job, back_off, kill_self, ["process_dead", "missing_rank"], "back_off")


@scenario(ranks=4)
def two_culprits_same_wait(job):
    """Ranks 1 and 2 both wait for a server that does not answer, each for its own."""
    two_culprits(job, ask_licence_server, ask_licence_server, ["missing_rank"], "ask_licence_server")


@scenario(ranks=3)
def two_culprits_read_and_spin(job):
    """Rank 1 reads from a silent mount, rank 2 is in an endless loop: both are to blame."""
    causes = ["storage_io", "missing_rank", "long_step"]
    two_culprits(job, read_from_mount, spin_until_fresh, causes, "read_from_mount")


# Mistakes in point-to-point operations and the order of communicators.


@scenario(ranks=2)
def recv_never_sent(job):
    """Rank 1 receives once more than rank 0 sends: rank 1 is to blame."""

    def exchange_activations():
        if job.rank == 0:
            job.comm.send(job.gradients, 1, job.stream)
        else:
            job.comm.recv(job.gradients, 0, job.stream)
        job.stream.synchronize()

    def receive_extra():
        job.comm.recv(job.gradients, 0, job.stream)
        blame([os.getpid()], ["p2p_unmatched"], "receive_extra")
        job.stream.synchronize()

    job.train(exchange_activations, receive_extra if job.rank == 1 else None)


@scenario(ranks=2)
def send_to_itself(job):
    """Rank 1 sends to itself and never receives it."""

    def send_to_self():
        job.comm.send(job.gradients, job.comm.rank, job.stream)
        blame([os.getpid()], ["p2p_unmatched", "p2p_cycle"], "send_to_self")
        job.stream.synchronize()

    job.train(trouble=send_to_self if job.rank == 1 else None)


@scenario(ranks=3)
def peer_off_by_one(job):
    """In one step rank 1 receives from rank 2, not from rank 0, which sends to it."""
    activations = cuda.Buffer(1 << 20)

    def forward_stage(source=0):
        if job.rank == 0:
            job.comm.send(activations, 1, job.stream)
        elif job.rank == 1:
            job.comm.recv(activations, source, job.stream)
        job.stream.synchronize()

    def forward_wrong_source():
        if job.rank == 1:
            blame([os.getpid()], ["p2p_unmatched"], "forward_stage")
        forward_stage(source=2)

    for _ in range(TROUBLE_STEP):
        forward_stage()
        job.train_step()
    forward_wrong_source()
    job.train()


def swap_once(job, reduce_both):
    """Each rank calls `reduce_both` with two communicators in each step. Rank 1 swaps them once."""
    tensor = cuda.Communicator.create("tensor", job.rank, job.world)
    for _ in range(TROUBLE_STEP):
        reduce_both([job.comm, tensor])
        time.sleep(0.03)
    if job.rank == 1:
        blame([os.getpid()], ["order_mismatch"], reduce_both.__name__)
        reduce_both([tensor, job.comm])
    reduce_both([job.comm, tensor])


@scenario(ranks=3)
def communicators_swapped(job):
    """Rank 1 uses its two communicators in the wrong order in one step."""

    def reduce_both(comms):
        for comm in comms:
            comm.all_reduce(job.gradients, job.stream)
            job.stream.synchronize()

    swap_once(job, reduce_both)


@scenario(ranks=3)
def communicators_swapped_in_a_queue(job):
    """As `communicators_swapped`, but each rank launches both collectives before it waits."""

    def launch_both(comms):
        for comm in comms:
            comm.all_reduce(job.gradients, job.stream)
        job.stream.synchronize()

    swap_once(job, launch_both)


@scenario(ranks=3)
def ring_without_start(job):
    """In one step every rank receives from its left before it sends to its right: all are to
    blame."""
    publish(f"pid.{job.rank}", os.getpid())
    left, right = (job.rank - 1) % job.world, (job.rank + 1) % job.world
    outgoing = cuda.Buffer(4096)

    def pass_blocks():
        with cuda.group():
            job.comm.send(outgoing, right, job.stream)
            job.comm.recv(job.gradients, left, job.stream)
        job.stream.synchronize()

    def pass_blocks_in_order():
        if job.rank == 0:
            pids = [int(read_published(f"pid.{rank}")) for rank in range(job.world)]
            blame(pids, ["p2p_cycle"], "pass_blocks_in_order")
        job.comm.recv(job.gradients, left, job.stream)
        job.stream.synchronize()
        job.comm.send(outgoing, right, job.stream)

    job.train(pass_blocks, pass_blocks_in_order)


@scenario(ranks=3)
def communicator_not_joined(job):
    """Ranks 0 and 2 make a communicator for the evaluation, but rank 1 continues to train."""
    publish(f"pid.{job.rank}", os.getpid())

    def make_evaluation_group():
        if job.rank == 0:
            blame([int(read_published("pid.1"))], ["comm_init", "missing_rank", "order_mismatch"], "train_step")
        cuda.Communicator.create("evaluation", job.rank, job.world)

    job.train(trouble=make_evaluation_group if job.rank != 1 else None)


def launch(size, helpers):
    """Starts the ranks and the helpers of a scenario, as torchrun does, and waits for the ranks."""
    for helper in helpers:
        start(helper)
    ranks = []
    for rank in range(size):
        variables = dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
        environment = dict(os.environ, **{key: str(value) for key, value in variables.items()})
        program = [sys.executable, os.path.abspath(sys.argv[0]), sys.argv[1]]
        ranks.append(subprocess.Popen(program, env=environment, preexec_fn=die_with_parent))
    for rank in ranks:
        rank.wait()


def main():
    name, *helper = sys.argv[1:]
    if name == "--list":
        for listed in SCENARIOS:
            print(listed, "hang 0")
    elif helper:
        globals()[helper[0]]()
    elif "RANK" in os.environ:
        SCENARIOS[name][0](Job())
    else:
        launch(*SCENARIOS[name][1:])


if __name__ == "__main__":
    main()
