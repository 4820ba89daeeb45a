"""Two ranks on the public CUDA and NCCL interfaces. Rank 1 fails between two sums in one of many
ways, while rank 0 waits for it.

    failing.py segv

Starts the ranks itself. Prints how rank 1 ended and what it wrote to standard error as one line of
JSON, `"status": null` if it lives on after a few seconds. Then it waits until its standard input is
closed, and ends the ranks.
"""

import ctypes
import faulthandler
import json
import mmap
import multiprocessing
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import urllib.request

LIVES_AFTER = 4


def bad_sample(_=None):
    raise ValueError("a bad sample")


def main():
    bad_sample()


def chained():
    try:
        {}["shard-7"]
    except KeyError:
        raise RuntimeError("the shard is lost")


def thread():
    threading.Thread(target=bad_sample, name="reader").start()
    queue.Queue().get()


def worker():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(bad_sample, [1])


def callback():
    """A callback of C code, as a hook of autograd is one."""
    ctypes.CFUNCTYPE(None)(bad_sample)()
    queue.Queue().get()


class Buffer:
    def __del__(self):
        bad_sample()


def deleted():
    Buffer()
    queue.Queue().get()


def exit_text():
    sys.exit("no checkpoint was found")


def exit_code():
    sys.exit(3)


def exit_at_once():
    os._exit(4)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def execute():
    os.execv("/nowhere/train", ["train"])


def forked():
    """The child fails, and its parent waits for it on a pipe that it holds itself."""
    incoming, _outgoing = os.pipe()
    if os.fork() == 0:
        bad_sample()
    os.read(incoming, 1)


def recursion():
    recursion()


def memory():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    bytearray(64 << 30)


def timeout():
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname(), timeout=0.2)
    peer.recv(1)


def cuda_error():
    import cuda

    cuda.set_device(99)


def retries():
    """Tries forever, and prints nothing."""
    while True:
        try:
            bad_sample()
        except ValueError:
            time.sleep(60)


def error_file():
    """Stores its exception for torchelastic, and prints nothing."""
    error = {"message": "ValueError: a bad sample", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": error}, file)
    os._exit(1)


def log_elsewhere():
    """Uncaught exceptions go to a file alone, as in a program with a logger."""
    log = open(os.devnull, "w")
    sys.excepthook = lambda *error: traceback.print_exception(*error, file=log)
    threading.excepthook = lambda about: print(about.exc_value, file=log)


def listened_to():
    """Waits until the hook listens to uncaught exceptions, if it is to."""
    is_wanted = any(os.environ.get(name) for name in ("XPU_TIMER_HOST_TRACING_FUNC", "XPU_TIMER_EXIT_HOOK_PLUGIN"))
    deadline = time.monotonic() + 30
    while is_wanted and isinstance(sys.excepthook, types.FunctionType) and time.monotonic() < deadline:
        time.sleep(0.01)


def elsewhere():
    listened_to()
    bad_sample()


def elsewhere_in_thread():
    listened_to()
    thread()


def oom_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def segv():
    ctypes.memset(8, 1, 1)


def segv_traced():
    faulthandler.enable()
    segv()


def abort():
    os.abort()


def segv_in_thread():
    one = threading.Thread(target=segv, name="reader")
    one.start()
    one.join()


def terminate():
    """An exception of C++ that nobody catches: `std::__throw_runtime_error`."""
    ctypes.CDLL("libstdc++.so.6")._ZSt21__throw_runtime_errorPKc(b"the shard has no rows")


def terminate_traced():
    faulthandler.enable()
    terminate()


def heap():
    """Frees memory that was not allocated."""
    memory = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(memory) + 8))


def assertion():
    ctypes.CDLL(None).__assert_fail(b"rows > 0", b"kernel.cpp", 7, b"forward")


def bus():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        memory[0]


def overflow():
    """Recursion through C code, which Python does not limit. It is libffi that reaches the end of
    the stack, because the copy of the argument takes nearly all of it."""
    sys.setrecursionlimit(1 << 30)

    class Large(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * (1 << 20))]

    large = Large()
    call = ctypes.CFUNCTYPE(None, Large)(lambda _: call(large))
    call(large)


def torch_autograd():
    import torch

    doubled = torch.ones(3, requires_grad=True) * 2
    doubled.register_hook(bad_sample)
    doubled.sum().backward()


def torch_loader():
    from torch.utils.data import DataLoader, Dataset

    class Shards(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, _):
            bad_sample()

    next(iter(DataLoader(Shards(), num_workers=1)))


def torch_group():
    import datetime

    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['XPU_EXAMPLE_RENDEZVOUS']}/gloo", rank=int(os.environ["RANK"]), world_size=2,
        timeout=datetime.timedelta(seconds=2),
    )


def torch_gloo():
    """The other rank does not come."""
    import torch

    torch.distributed.all_reduce(torch.ones(3))


def torch_cuda():
    import torch

    torch.ones(3, device="cuda:99")


def float_error():
    os.kill(os.getpid(), signal.SIGFPE)


WAYS = {
    "main": main,
    "chained": chained,
    "thread": thread,
    "worker": worker,
    "callback": callback,
    "del": deleted,
    "exit-text": exit_text,
    "recursion": recursion,
    "memory": memory,
    "timeout": timeout,
    "cuda-error": cuda_error,
    "interrupt": interrupt,
    "exec": execute,
    "forked": forked,
    "retries": retries,
    "error-file": error_file,
    "elsewhere": elsewhere,
    "elsewhere-thread": elsewhere_in_thread,
    "segv": segv,
    "segv-faulthandler-first": segv,
    "segv-faulthandler-later": segv_traced,
    "segv-thread": segv_in_thread,
    "abort": abort,
    "terminate": terminate,
    "terminate-faulthandler": terminate_traced,
    "assertion": assertion,
    "heap": heap,
    "bus": bus,
    "overflow": overflow,
    "fpe": float_error,
    "torch-autograd": torch_autograd,
    "torch-loader": torch_loader,
    "torch-gloo": torch_gloo,
    "torch-cuda": torch_cuda,
    "exit-3": exit_code,
    "_exit-4": exit_at_once,
    "oom-kill": oom_kill,
}


def known():
    """Waits until the collector knows this process, if there is one."""
    if "XPU_TIMER_SOCKET" not in os.environ:
        return
    status = f"http://127.0.0.1:{os.environ['XPU_TIMER_BASEPORT']}/status"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(status, timeout=10) as answer:
            if any(rank["pid"] == os.getpid() for rank in json.load(answer)["ranks"]):
                return
        time.sleep(0.02)
    raise TimeoutError("the collector does not know this rank")


def train(way):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if way == "segv-faulthandler-first":
        faulthandler.enable()
    if way.startswith("elsewhere"):
        log_elsewhere()
    if way == "torch-gloo":
        torch_group()
    import cuda

    rank = int(os.environ["RANK"])
    cuda.set_device(rank)
    gradients = cuda.Buffer(64)
    world = cuda.Communicator.create("world")
    stream = cuda.Stream()
    world.all_reduce(gradients, stream)
    stream.synchronize()
    if rank == 1:
        known()
        WAYS[way]()
    world.all_reduce(gradients, stream)
    stream.synchronize()


def start(way):
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            variables = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                TORCHELASTIC_ERROR_FILE=f"{folder}/error.json",
            )
            command = [sys.executable, __file__, way]
            ranks.append(subprocess.Popen(command, env=variables, stderr=open(f"{folder}/{rank}", "wb")))
        try:
            lives = way in ("thread", "callback", "del", "forked", "retries", "elsewhere-thread")
            status = ranks[1].wait(LIVES_AFTER if lives else 60)
        except subprocess.TimeoutExpired:
            status = None
        with open(f"{folder}/1", "rb") as file:
            print(json.dumps({"status": status, "stderr": file.read().decode(errors="replace")}), flush=True)
        sys.stdin.read()
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    train(sys.argv[1]) if "RANK" in os.environ else start(sys.argv[1])
