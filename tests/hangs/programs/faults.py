"""Ways in which one rank of a job stops, each a function as in real programs.

Every function blocks forever, ends the process, or keeps it busy; none knows of the device.
`run(NAME)` calls one of them.
"""

import ctypes
import fcntl
import gc
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

FOREVER = 1 << 20


def fifo():
    """Opens a file on a file system that never answers, like a dead network file system."""
    path = os.path.join(tempfile.mkdtemp(), "shard-00017.tar")
    os.mkfifo(path)
    with open(path, "rb") as shard:
        shard.read()


def pipe_read():
    """Reads from a helper that never writes."""
    reading, _writing = os.pipe()
    os.read(reading, 1)


def pipe_write():
    """Writes to a helper that never reads."""
    _reading, writing = os.pipe()
    while True:
        os.write(writing, bytes(65536))


def stdout_full():
    """Prints into a pipe without a reader."""
    reading, writing = os.pipe()
    os.dup2(writing, sys.stdout.fileno())
    while reading:
        print("loss", 0.1, flush=True)


def socket_read():
    """Waits for the answer of a remote store."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    client.sendall(b"GET /shard HTTP/1.1\r\n\r\n")
    client.recv(1)


def file_lock():
    """Waits for a lock on a file that another process holds forever."""
    path = os.path.join(tempfile.mkdtemp(), "index.lock")
    held = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)


def upload():
    """Waits for a command that does not end."""
    subprocess.run(["sleep", str(FOREVER)], check=True)


def sleep():
    """Sleeps between attempts that never succeed."""
    while True:
        time.sleep(FOREVER)


def event():
    """Waits for an event that no thread sets."""
    threading.Event().wait()


def empty_queue():
    """Waits for an item that no thread puts."""
    queue.Queue().get()


def join():
    """Waits for a thread that sleeps."""
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    thread.join()


def lock_order():
    """Two threads take two locks in opposite order."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def opposite():
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=opposite, name="metrics-writer", daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def native_lock():
    """Takes a mutex of the C library twice."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def gil_main():
    """A thread holds a mutex and waits for the GIL; this one holds the GIL and waits for the
    mutex."""
    mutex = ctypes.create_string_buffer(64)
    held = threading.Event()

    def holder():
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
        held.set()
        while True:
            time.sleep(0.001)

    threading.Thread(target=holder, name="callback", daemon=True).start()
    held.wait()
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def gil_thread():
    """A thread calls C code that blocks and does not release the GIL."""
    threading.Thread(target=ctypes.PyDLL(None).pause, name="extension", daemon=True).start()
    while True:
        time.sleep(0.001)


def collect():
    """Repeatedly collects garbage on a huge heap."""
    heap = [[] for _ in range(2_000_000)]
    for item in heap:
        item.append(item)
    while True:
        gc.collect()


def compile_kernels():
    """Waits for a compiler."""
    compiler = os.path.join(tempfile.mkdtemp(), "ptxas")
    shutil.copy(shutil.which("sleep"), compiler)
    subprocess.run([compiler, str(FOREVER)], check=True)


def busy():
    """Computes endlessly."""
    number = 0
    while True:
        number += 1


def uninterruptible():
    """The parent of vfork sleeps uninterruptibly until its child ends."""
    ctypes.CDLL(os.environ["XPU_HANGS_LIBRARY"]).block_in_vfork()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    ctypes.string_at(8)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def leave():
    """Ends without an error, like a loop with one batch less."""
    sys.exit(0)


def leave_at_once():
    os._exit(3)


def error():
    raise ValueError("loss is nan")


def worker(target):
    """A loader's worker process and the wait for its batch."""
    batches = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=target, name="loader-worker", daemon=True)
    process.start()
    return batches.get()


def worker_killed():
    worker(killed)


def worker_fifo():
    worker(fifo)


def worker_sleeps():
    worker(sleep)


def worker_lock():
    """The worker inherits a lock that was held when it was forked."""
    lock = threading.Lock()
    lock.acquire()
    worker(lock.acquire)


def run(name):
    globals()[name]()
