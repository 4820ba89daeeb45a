"""Faults that stop a Python program in the middle of its work: waits for people, servers, children,
threads and locks.

`begin(NAME)` calls a function of this file. None of them returns, and none knows of devices or of
the program that it stops.
"""

import asyncio
import concurrent.futures
import fcntl
import itertools
import logging
import multiprocessing
import os
import pty
import queue
import re
import resource
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


def asks_a_person():
    """Asks a question on a terminal at which nobody sits."""
    _controller, terminal = pty.openpty()
    os.dup2(terminal, 0)
    sys.stdin = os.fdopen(0)
    input("continue? [y/n] ")


def breakpoint_left():
    """A debugger's prompt that was left in the code."""
    _controller, terminal = pty.openpty()
    os.dup2(terminal, 0)
    sys.stdin = os.fdopen(0)
    breakpoint()


def waits_for_signal():
    signal.pause()


def sleeps_on():
    """Retries forever."""
    while True:
        time.sleep(3600)


def polls_for_file():
    """Looks again and again for a file that never comes."""
    while not os.path.exists("/nonexistent/_SUCCESS"):
        time.sleep(0.2)


def silent_server():
    """A server that takes the request and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/metrics").read()


def full_server():
    """A server whose queue of connections is full."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    clients = []
    while True:
        clients.append(socket.create_connection(listener.getsockname()))


def no_message():
    """Waits for a peer in select."""
    ours, _theirs = socket.socketpair()
    select.select([ours], [], [])


def child_with_full_pipe():
    """Waits for a child that waits for its output to be read."""
    words = [sys.executable, "-c", "print('x' * 10_000_000)"]
    subprocess.Popen(words, stdout=subprocess.PIPE).wait()


def endless_child():
    subprocess.run(["tail", "-f", "/dev/null"], check=True)


def shell_command():
    os.system("tail -f /dev/null")


def queue_of_dead_thread():
    """The thread that fills the queue ended by an exception."""
    results = queue.Queue()
    threading.excepthook = lambda _problem: None

    def fill():
        results.put(1 / 0)

    threading.Thread(target=fill, name="prefetcher").start()
    results.get()


def queue_of_killed_worker():
    """The process that fills a queue is killed, and its queue has room for more."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    context.Process(target=kill_self, args=(0,), daemon=True).start()
    results.get()


def pipe_of_dead_child():
    """The child that was to answer has ended, and nobody has asked how; its end of the pipe is open
    in the parent as well."""
    reading, _writing = os.pipe()
    if os.fork() == 0:
        os._exit(3)
    os.read(reading, 1)


def barrier_of_processes():
    """A barrier for two processes, which the other one never reaches."""
    multiprocessing.get_context("fork").Barrier(2).wait()


def pool_of_killed_worker():
    """The worker of a pool is killed in its task, and the pool waits for the result."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(kill_self, [0])


def kill_self(_item):
    os.kill(os.getpid(), signal.SIGKILL)


def starved_executor():
    """A task waits for another one of the same executor, which has one thread."""
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="augment")
    executor.submit(lambda: executor.submit(abs, 1).result()).result()


def forked_with_lock():
    """A child inherits a lock that another thread held when it was forked."""
    lock = threading.Lock()
    lock.acquire()
    child = multiprocessing.get_context("fork").Process(target=lock.acquire)
    child.start()
    child.join()


def log_lock():
    """A thread holds the lock of the log handler and writes into a pipe that nobody reads."""
    _reading, writing = os.pipe()
    handler = logging.StreamHandler(os.fdopen(writing, "w"))
    logger = logging.getLogger("train")
    logger.addHandler(handler)
    blocked = threading.Thread(target=logger.warning, args=("x" * 1_000_000,), name="uploader")
    blocked.start()
    while handler.lock.acquire(blocking=False):
        handler.lock.release()
        time.sleep(0.01)
    logger.warning("step done")


def async_save():
    """Waits for the previous checkpoint, which a thread writes into a pipe that nobody reads."""
    _reading, writing = os.pipe()
    saver = threading.Thread(target=save, args=(writing,), name="checkpoint-saver")
    saver.start()
    saver.join()


def save(descriptor):
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(1_000_000))


def region_lock():
    """Waits for a lock on a part of a file, which a child holds."""
    path = os.path.join(tempfile.mkdtemp(), "cache.idx")
    file = open(path, "w+b")
    locked, ready = os.pipe()
    if os.fork() == 0:
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(ready, b"x")
        signal.pause()
    os.read(locked, 1)
    fcntl.lockf(file, fcntl.LOCK_EX)


def database_lock():
    """Waits for a database that another connection has locked."""
    path = os.path.join(tempfile.mkdtemp(), "runs.db")
    first = sqlite3.connect(path, isolation_level=None)
    first.execute("create table runs (id integer)")
    first.execute("begin exclusive")
    sqlite3.connect(path, timeout=1e6).execute("insert into runs values (1)")


def barrier_of_threads():
    """One thread of two comes."""
    threading.Barrier(2).wait()


def semaphore():
    multiprocessing.Semaphore(0).acquire()


def manager():
    """Asks a server process for a value, and it is stopped."""
    with multiprocessing.Manager() as server:
        values = server.dict()
        os.kill(server._process.pid, signal.SIGSTOP)
        values["loss"]


def event_loop():
    """Awaits what nobody will set."""

    async def fetch():
        await asyncio.get_running_loop().create_future()

    asyncio.run(fetch())


def backtracking():
    """A regular expression that takes years."""
    re.match(r"(\w+\s?)+$", "a" * 64 + "!")


def loop_in_c():
    sum(itertools.repeat(1, 10**15))


def loop_over_lines():
    """An endless loop of several statements."""
    low, high = 0, 10
    while low < high:
        middle = (low + high) // 2
        if middle < 20:
            low = min(middle, 4)
        else:
            high = middle


def spins_on_flag():
    done = []
    while not done:
        pass


def recursion():
    """Searches a tree without an end."""

    def visit(depth):
        for child in range(10):
            if depth < 50:
                visit(depth + 1)

    visit(0)


def finalizer():
    """Garbage whose finalizer blocks."""

    class Connection:
        def __init__(self):
            self.itself = self

        def __del__(self):
            signal.pause()

    Connection()
    import gc

    gc.collect()


def out_of_time():
    """The limit of processor time ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    while True:
        pass


def out_of_memory():
    """The limit of memory is met, nobody catches it."""
    size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
    bytearray(1 << 30)


def aborts():
    os.abort()


def frozen():
    """The container is paused; a stranger lets it go on when the job is forgotten, for no signal
    reaches it before."""
    group = tempfile.mkdtemp(prefix="xpu-hangs-", dir="/sys/fs/cgroup/freezer")
    release = f"(sleep 60; echo THAWED >{group}/freezer.state; until rmdir {group}; do sleep 1; done) 2>/dev/null &"
    subprocess.run(["sh", "-c", release], env={"PATH": os.environ["PATH"]}, start_new_session=True, check=True)
    with open(os.path.join(group, "tasks"), "w") as tasks:
        tasks.write(str(os.getpid()))
    with open(os.path.join(group, "freezer.state"), "w") as state:
        state.write("FROZEN")
    time.sleep(0.1)


NAMES = {name for name, value in list(globals().items()) if getattr(value, "__module__", None) == __name__}


def begin(name):
    globals()[name]()
