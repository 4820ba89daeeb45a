"""Faults of the machine: a file system that stops answering, a freezer, a debugger, a
compiler that never ends.

`begin(NAME)` calls a function of this file. None of them returns but `pause_all`, and none knows of
devices or of the program. What has to live beside the program is started as a process that is not
its child.
"""

import ctypes
import importlib
import mmap
import multiprocessing
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor

# Constants of the protocol of /dev/fuse, version 7.31.
LOOKUP, FORGET, GETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, CREATE = 1, 2, 3, 14, 15, 16, 18, 20, 25, 26, 27, 28, 35
ENOENT, ENOSYS = 2, 38
FILES = {b"part-00003.bin": 2, b"model_zoo.py": 3, b"weights.ckpt": 4}
FILE_BYTES = 1 << 20
NEW_MOUNTS, RECURSIVE, PRIVATE = 0x20000, 0x4000, 0x40000
PTRACE_ATTACH = 16


def attributes(node):
    mode = 0o40755 if node == 1 else 0o100644
    size = 0 if node == 1 else FILE_BYTES
    return struct.pack("<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def directory_entry(name, node):
    return struct.pack("<2Q2I", node, node, len(name), 8) + name + bytes(-len(name) % 8)


def serve(device, *silent):
    """Answers all requests of a FUSE mount but those whose number is in `silent`, and all after the
    first of those."""
    silent = {int(number) for number in silent}
    entry = lambda node: struct.pack("<4Q2I", node, 0, 3600, 3600, 0, 0) + attributes(node)
    opened = struct.pack("<Q2I", 1, 0, 0)
    while True:
        request = os.read(int(device), FILE_BYTES + 4096)
        _, number, unique, node = struct.unpack_from("<2I2Q", request)
        if number in silent:
            signal.pause()
        error, answer = 0, b""
        if number == INIT:
            answer = struct.pack("<4I2H2I2HI28x", 7, 31, 1 << 17, 0, 16, 12, 1 << 17, 1, 32, 0, 0)
        elif number == LOOKUP:
            node = FILES.get(request[40:].rstrip(b"\0"), 0)
            error, answer = (0, entry(node)) if node else (ENOENT, b"")
        elif number == GETATTR:
            answer = struct.pack("<Q2I", 3600, 0, 0) + attributes(node)
        elif number == READDIR and struct.unpack_from("<2QI", request, 40)[1] == 0:
            answer = b"".join(directory_entry(name, node) for name, node in FILES.items())
        elif number in (OPEN, OPENDIR):
            answer = opened
        elif number == CREATE:
            answer = entry(5) + opened
        elif number == READ:
            answer = bytes(struct.unpack_from("<2QI", request, 40)[2])
        elif number == WRITE:
            answer = struct.pack("<2I", struct.unpack_from("<2QI", request, 40)[2], 0)
        elif number not in (RELEASE, FLUSH, FSYNC, READDIR):
            error = ENOSYS
        if number != FORGET:
            os.write(int(device), struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)


def beside(*command, pass_fds=()):
    """Starts a process that is not a child of this one."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(["sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *command], env=environment, pass_fds=pass_fds, check=True)


def mount(*silent):
    """A folder whose server leaves requests of these kinds without an answer. No other process sees
    the mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    folder = tempfile.mkdtemp()
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    done = libc.unshare(NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None) == 0
    if not done or libc.mount(b"remote", folder.encode(), b"fuse.remote", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "a FUSE mount")
    beside(sys.executable, __file__, "serve", str(device), *map(str, silent), pass_fds=[device])
    os.close(device)
    return folder


def fuse_read():
    """Reads a shard whose server no longer answers."""
    with open(os.path.join(mount(READ), "part-00003.bin"), "rb", buffering=0) as shard:
        shard.read(4096)


def fuse_stat():
    os.stat(os.path.join(mount(LOOKUP), "part-00003.bin"))


def fuse_list():
    os.listdir(mount(OPENDIR))


def fuse_write():
    """Writes a checkpoint."""
    with open(os.path.join(mount(WRITE), "new.ckpt"), "wb") as checkpoint:
        checkpoint.write(bytes(FILE_BYTES))


def fuse_close():
    """Everything is written, and the flush of the close never completes."""
    descriptor = os.open(os.path.join(mount(FLUSH), "new.ckpt"), os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, bytes(4096))
    os.close(descriptor)


def fuse_sync():
    descriptor = os.open(os.path.join(mount(FSYNC), "new.ckpt"), os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, bytes(4096))
    os.fsync(descriptor)


def fuse_mapped():
    """Touches a page of a mapped file."""
    with open(os.path.join(mount(READ), "weights.ckpt"), "rb") as weights:
        return mmap.mmap(weights.fileno(), FILE_BYTES, prot=mmap.PROT_READ)[4096]


def fuse_import():
    """Imports a module from a file system that no longer answers."""
    sys.path.insert(0, mount(READ))
    importlib.import_module("model_zoo")


def fuse_killed():
    """It got SIGKILL while it waits for the file system, without effect."""
    folder = mount(READ)
    waits = f"grep -q request_wait_answer /proc/{os.getpid()}/wchan"
    # Those that are answered are soon over.
    beside("sh", "-c", f"n=0; while [ $n -lt 5 ]; do {waits} && n=$((n + 1)) || n=0; sleep 0.2; done; kill -9 {os.getpid()}")
    with open(os.path.join(folder, "part-00003.bin"), "rb", buffering=0) as shard:
        shard.read(4096)


def fuse_worker():
    """The worker of a loader reads from a file system that no longer answers."""
    fork = multiprocessing.get_context("fork")
    batches = fork.Queue()
    fork.Process(target=lambda: batches.put(fuse_read()), name="loader-worker", daemon=True).start()
    return batches.get()


def frozen_with_group():
    """A control group of version 2 is frozen, like a paused container."""
    mounts = (line.split() for line in open("/proc/self/mounts"))
    root = next(point for _, point, kind, *_ in mounts if kind == "cgroup2")
    group = tempfile.mkdtemp(prefix="xpu-hangs-", dir=root)
    remove = f"(until rmdir {group}; do sleep 1; done) 2>/dev/null &"
    subprocess.run(["sh", "-c", remove], env={"PATH": os.environ["PATH"]}, start_new_session=True, check=True)
    for name, value in (("cgroup.procs", os.getpid()), ("cgroup.freeze", 1)):
        with open(os.path.join(group, name), "w") as file:
            file.write(str(value))
    time.sleep(0.1)


def in_gdb():
    """A debugger is attached and stops it."""
    words = ["-nx", "-iex", "set auto-solib-add off", "-p", str(os.getpid()), "-ex", "shell sleep 100000"]
    beside("gdb", "-q", "-batch", *words)
    while True:
        time.sleep(0.01)


def hold(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, int(pid), None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    signal.pause()


def in_tracer():
    """A tracer has stopped it and does not continue it."""
    beside(sys.executable, __file__, "hold", str(os.getpid()))
    while True:
        time.sleep(0.01)


def in_strace():
    """It reads from a pipe under strace."""
    beside("strace", "-q", "-f", "-o", "/dev/null", "-p", str(os.getpid()))
    while "TracerPid:\t0\n" in open("/proc/self/status").read():
        time.sleep(0.05)
    reading, _writing = os.pipe()
    os.read(reading, 1)


def extension():
    """The source of an extension whose end the compiler never reaches: a file that includes
    itself twice, 40 deep."""
    source = os.path.join(tempfile.mkdtemp(), "fused_norm.cpp")
    with open(source, "w") as file:
        file.write("#if __INCLUDE_LEVEL__ < 40\n#include __FILE__\n#include __FILE__\n#endif\n")
    return ["g++", "-O2", "-fPIC", "-shared", source, "-o", source + ".so"]


def builds_extension():
    subprocess.run(extension(), check=True)


def builds_with_shell():
    """Like a build system: a shell starts the compiler and waits."""
    subprocess.run(["sh", "-c", '"$@"; echo built', "sh", *extension()], check=True)


def builds_in_pool():
    """A pool of processes compiles, and the program waits for the first result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(subprocess.run, extension()).result()


def import_of(text):
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "tables_of_zoo.py"), "w") as file:
        file.write(text)
    sys.path.insert(0, folder)
    importlib.import_module("tables_of_zoo")


def long_import():
    """A module that computes its tables when it is imported."""
    import_of("TABLE = {}\nnumber = 0\nwhile True:\n    number += 1\n    TABLE[number % 64] = number ** 3 % 97\n")


def import_twice():
    """A thread imports a module whose import waits for an answer, and so must everybody who imports
    it."""
    text = "import socket\nOURS, THEIRS = socket.socketpair()\nOURS.recv(1)\n"
    threading.Thread(target=import_of, args=(text,), name="warm-up", daemon=True).start()
    while "tables_of_zoo" not in sys.modules:
        time.sleep(0.01)
    importlib.import_module("tables_of_zoo")


def full_queue():
    """Puts a second result into a queue for one, whose reader is gone."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue(1)
    reader = fork.Process(target=results.get)
    reader.start()
    for number in range(3):
        results.put(number)


def child_that_does_not_read():
    """Feeds a child that does not read."""
    child = subprocess.Popen(["tail", "-f", "/dev/null"], stdin=subprocess.PIPE)
    child.stdin.write(bytes(1 << 20))


def name_server():
    """Asks a name server that drops the question."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.sendto(b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x07storage\0\0\x01\0\x01", server.getsockname())
    client.recvfrom(512)


def handshake():
    """The server is alive as far as the kernel goes: it never accepts, and so nobody answers the
    greeting of TLS."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    ssl.create_default_context().wrap_socket(client, server_hostname="localhost")


def pause_all(seconds):
    """Another process stops and continues all ranks."""
    ranks = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read()
    beside("sh", "-c", f"kill -STOP {ranks}; sleep {seconds}; kill -CONT {ranks}")


NAMES = {name for name, value in list(globals().items()) if getattr(value, "__module__", None) == __name__}


def begin(name):
    globals()[name]()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
