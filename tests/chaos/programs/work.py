"""Healthy ranks that look unhealthy: `work.py MODE [--seconds S]`.

Each mode is a function. It works for some seconds, several times the hang timeout, in which it
launches no collective.
"""

import argparse
import asyncio
import concurrent.futures
import gc
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time

import cuda

MODES = {}


def mode(function):
    MODES[function.__name__] = function
    return function


class Rank:
    def __init__(self, seconds):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.world = cuda.Communicator.create("world", self.rank, self.size)
        self.stream, self.buffer = cuda.Stream(), cuda.Buffer(4096)
        self.kernel = cuda.Kernel("step", 200)
        self.seconds = seconds

    def step(self):
        self.kernel.launch(self.stream)
        self.world.all_reduce(self.buffer, self.stream)
        self.stream.synchronize()

    def left(self):
        """Loops until this rank's time is over: for work without collectives, because ranks end
        separately."""
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            yield

    def left_on_all(self):
        """Loops until one rank's time is over. All ranks agree on it, so all take equally many
        turns."""
        end, over = time.monotonic() + self.seconds, 0.0
        while not over:
            yield
            self.buffer.fill(float(time.monotonic() >= end))
            self.step()
            over = self.buffer.to_list()[0]

    def folder(self):
        return tempfile.mkdtemp(dir=os.environ["XPU_EXAMPLE_RENDEZVOUS"])


@mode
def shards(rank):
    """Reads shards and copies them to the device."""
    path = os.path.join(rank.folder(), "shard")
    with open(path, "wb") as file:
        file.write(os.urandom(1 << 20))
    for _ in rank.left():
        with open(path, "rb") as file:
            file.read()
        rank.buffer.from_list([1.0] * 4096)
        time.sleep(0.05)


@mode
def weights(rank):
    """Loads weights piece by piece, each for longer than a moment, and copies them."""
    for _ in rank.left():
        total = sum(index * index for index in range(2_000_000))
        rank.buffer.fill(float(total % 7))


@mode
def evaluate(rank):
    """Evaluates on the processor alone."""
    for _ in rank.left():
        sum(index % 3 for index in range(200_000))


@mode
def evaluate_in_c(rank):
    """Evaluates inside one C function for seconds at a time."""
    for _ in rank.left():
        sorted(range(3_000_000), key=lambda value: -value)


@mode
def checkpoint(rank):
    """Writes a checkpoint and synchronizes the file."""
    with open(os.path.join(rank.folder(), "model"), "wb") as file:
        for _ in rank.left():
            file.write(os.urandom(1 << 18))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.1)


@mode
def checkpoint_from_device(rank):
    """Copies from the device and writes, slowly."""
    with open(os.path.join(rank.folder(), "model"), "wb") as file:
        for _ in rank.left():
            file.write(bytes(str(rank.buffer.to_list()[:8]), "ascii"))
            time.sleep(0.5)


@mode
def memset_sync(rank):
    """A loop of memset and synchronize."""
    for _ in rank.left():
        cuda._cuda("cudaMemsetAsync", rank.buffer.pointer, 0, rank.buffer.nbytes, cuda._handle(rank.stream))
        rank.stream.synchronize()
        time.sleep(0.01)


@mode
def synchronize(rank):
    """Only synchronizes an idle device."""
    for _ in rank.left():
        cuda.synchronize()
        time.sleep(0.05)


@mode
def copies(rank):
    """Copies in both directions, without a kernel."""
    for _ in rank.left():
        rank.buffer.fill(2.0)
        rank.buffer.to_list()
        time.sleep(0.3)


@mode
def long_step(rank):
    """All ranks do host work for two timeouts between two collectives."""
    for _ in range(2):
        end = time.monotonic() + rank.seconds / 2
        while time.monotonic() < end:
            sum(range(50_000))
        rank.step()


@mode
def long_sleep(rank):
    """All ranks sleep between two collectives for longer than the timeout."""
    for _ in range(2):
        time.sleep(rank.seconds / 2)
        rank.step()


@mode
def compile(rank):
    """Runs compilers, as a just-in-time compiler does."""
    source = os.path.join(rank.folder(), "kernel.c")
    with open(source, "w") as file:
        file.write("#include <stdio.h>\n" + "".join(f"int f{i}(int x) {{ return x * {i} + (x > {i}); }}\n" for i in range(4000)))
    for _ in rank.left():
        subprocess.run(["gcc", "-O2", "-c", "-o", source + ".o", source], check=True)


@mode
def collect_garbage(rank):
    """Collects garbage of a large heap repeatedly."""
    heap = [[index] for index in range(400_000)]
    for _ in rank.left():
        gc.collect()
    del heap


@mode
def server(rank):
    """An idle inference server: rank 0 waits for requests, the others for rank 0."""
    if rank.rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        select.select([listener], [], [], rank.seconds)
    else:
        threading.Event().wait(rank.seconds)


@mode
def notebook(rank):
    """A person reads the result of a notebook cell before running the next one."""
    rank.step()
    reading, _writing = os.pipe()
    select.select([reading], [], [], rank.seconds)
    rank.step()


@mode
def debugger(rank):
    """Rank 0 waits at a prompt between two steps; no rank waits for it yet."""
    rank.step()
    time.sleep(rank.seconds)


@mode
def download(rank):
    """Reads from a peer that sends a little at a time."""
    one, other = socket.socketpair()

    def sends():
        for _ in rank.left():
            other.send(b"x" * 1000)
            time.sleep(0.2)
        other.close()

    threading.Thread(target=sends, daemon=True).start()
    while one.recv(65536):
        pass


@mode
def busy_loaders(rank):
    """The main thread waits for worker processes that prepare data for a long time."""
    workers = [subprocess.Popen([sys.executable, "-c", f"import time\ne = time.monotonic() + {rank.seconds}\n"
                                 "while time.monotonic() < e: sum(range(100000))"]) for _ in range(2)]
    for worker in workers:
        worker.wait()


@mode
def uneven(rank):
    """One rank evaluates alone, for less than the timeout, while the others wait for it in a
    collective."""
    for _ in range(3):
        if rank.rank == 0:
            end = time.monotonic() + float(os.environ["XPU_TIMER_HANG_TIMEOUT"]) / 2
            while time.monotonic() < end:
                sum(range(50_000))
        rank.step()


@mode
def threads(rank):
    """Two hundred threads that sleep, and one that copies."""
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(rank.seconds + 5,), daemon=True).start()
    copies(rank)


@mode
def passing_threads(rank):
    """Launches kernels of many names from threads that live for a moment, while others start and
    end."""
    kernels = [cuda.Kernel(f"kind_{number}", 10) for number in range(200)]
    streams = [cuda.Stream() for _ in range(4)]

    def launches_briefly(number, stream):
        kernels[number % len(kernels)].launch(stream)

    started = 0
    for _ in rank.left():
        passing = [threading.Thread(target=launches_briefly, args=(started + place, stream)) for place, stream in enumerate(streams)]
        passing += [threading.Thread(target=int) for _ in streams]
        for thread in passing:
            thread.start()
        for thread in passing:
            thread.join()
        started += len(streams)


@mode
def forks(rank):
    """Starts short processes all the time."""
    for _ in rank.left():
        subprocess.run(["true"], check=True)


def computes(_number):
    """Work of a worker process; it takes about half a second."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        sum(range(10_000))


@mode
def pool_of_one(rank):
    """Rank 0 waits for a pool of worker processes, as a tokenizer does; the others wait for it in a
    collective."""
    if rank.rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(computes, range(int(4 * rank.seconds)), chunksize=1)
    rank.step()


@mode
def child_of_one(rank):
    """Rank 0 waits for a program that compresses; the others wait for it in a collective."""
    if rank.rank == 0:
        subprocess.run(["sh", "-c", f"timeout {rank.seconds} gzip </dev/zero >/dev/null; true"], check=True)
    rank.step()


@mode
def thread_of_one(rank):
    """Rank 0 waits for a thread of its own that evaluates; the others wait for it in a
    collective."""

    # Two samples of this many lines rarely find the same one; a loop at one line looks like an
    # endless loop.
    lines = "".join(f"    values = sorted((index % {divisor} for index in range(20_000)), reverse=True)\n" for divisor in range(3, 40))
    defined = {}
    exec(f"def turn():\n{lines}", defined)

    def evaluates():
        for _ in rank.left():
            defined["turn"]()

    if rank.rank == 0:
        thread = threading.Thread(target=evaluates)
        thread.start()
        thread.join()
    rank.step()


class Sender:
    """A process that sends this many bytes at a time to each connection, until the time is over."""

    SERVER = """
import socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
end, size, pause = time.monotonic() + float(sys.argv[1]), int(sys.argv[2]), 0.2
def send(peer):
    while time.monotonic() < end:
        peer.sendall(b"x" * size)
        time.sleep(pause)
    peer.close()
while time.monotonic() < end:
    listener.settimeout(max(end - time.monotonic(), 0.1))
    try:
        threading.Thread(target=send, args=(listener.accept()[0],)).start()
    except TimeoutError:
        break
"""

    def __init__(self, seconds, size):
        words = [sys.executable, "-c", self.SERVER, str(seconds), str(size)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
        self.port = int(self.process.stdout.readline())

    def connect(self, **options):
        return socket.create_connection(("127.0.0.1", self.port), **options)

    def wait(self):
        self.process.wait()


@mode
def download_of_one(rank):
    """Rank 0 receives from a server that sends a little at a time; the others wait for it in a
    collective."""
    if rank.rank == 0:
        sender = Sender(rank.seconds, 1000)
        peer = sender.connect()
        while peer.recv(65536):
            pass
        sender.wait()
    rank.step()


@mode
def timed_download_of_one(rank):
    """Receives with a timeout, as HTTP libraries do: it waits in poll, not in recv."""
    if rank.rank == 0:
        sender = Sender(rank.seconds, 20_000)
        peer = sender.connect(timeout=30)
        while peer.recv(65536):
            pass
        sender.wait()
    rank.step()


@mode
def downloads_in_threads_of_one(rank):
    """Rank 0 waits for threads that receive; the others wait for it in a collective."""

    def receive(peer):
        while peer.recv(65536):
            pass

    if rank.rank == 0:
        sender = Sender(rank.seconds, 20_000)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(receive, [sender.connect(timeout=30) for _ in range(2)]))
        sender.wait()
    rank.step()


@mode
def asynchronous_download_of_one(rank):
    """Rank 0 receives in an event loop; the others wait for it in a collective."""

    async def receive(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while await reader.read(65536):
            pass
        writer.close()

    if rank.rank == 0:
        sender = Sender(rank.seconds, 20_000)
        asyncio.run(receive(sender.port))
        sender.wait()
    rank.step()


@mode
def upload_of_one(rank):
    """Rank 0 sends to a peer that takes a little at a time, so that it blocks in send; the others
    wait for it in a collective."""
    if rank.rank == 0:
        taker = "import socket, sys, time\n" \
            "listener = socket.socket()\n" \
            "listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)\n" \
            "listener.bind(('127.0.0.1', 0))\n" \
            "listener.listen()\n" \
            "print(listener.getsockname()[1], flush=True)\n" \
            "peer = listener.accept()[0]\n" \
            "while peer.recv(8192):\n    time.sleep(0.1)\n"
        with subprocess.Popen([sys.executable, "-c", taker], stdout=subprocess.PIPE) as started:
            peer = socket.create_connection(("127.0.0.1", int(started.stdout.readline())))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
            for _ in rank.left():
                peer.sendall(b"x" * 400_000)
            peer.close()
    rank.step()


@mode
def copies_of_one(rank):
    """Rank 0 copies from its device, slowly; the others wait for it in a collective."""
    if rank.rank == 0:
        for _ in rank.left():
            rank.buffer.to_list()
            time.sleep(0.4)
    rank.step()


@mode
def posted_receive(rank):
    """A receive is posted for the whole life of the job on a communicator of its own; steps of most
    of a timeout go on."""
    control, stream, message = cuda.Communicator.create("control", rank.rank, rank.size), cuda.Stream(), cuda.Buffer(16)
    if rank.rank == 1:
        control.recv(message, 0, stream)
    for _ in range(5):
        time.sleep(rank.seconds / 6)
        rank.step()
    if rank.rank == 0:
        control.send(message, 1, stream)
    stream.synchronize()


@mode
def slow_pipeline(rank):
    """Each rank in turn works on a batch for most of a timeout; the last receive is posted several
    timeouts ahead."""
    for _ in range(3):
        if rank.rank > 0:
            rank.world.recv(rank.buffer, rank.rank - 1, rank.stream)
            rank.stream.synchronize()
        end = time.monotonic() + rank.seconds / 6
        while time.monotonic() < end:
            sum(range(10_000))
        if rank.rank < rank.size - 1:
            rank.world.send(rank.buffer, rank.rank + 1, rank.stream)
            rank.stream.synchronize()
    rank.step()


@mode
def steps(rank):
    """Plain steps."""
    for _ in rank.left_on_all():
        time.sleep(0.02)


def crowd():
    """Makes the first device call where the limits allow no further thread."""
    over = threading.Event()
    waiting = []
    try:
        while True:
            waiting.append(threading.Thread(target=over.wait))
            waiting[-1].start()
    except RuntimeError:
        waiting.pop()
    try:
        cuda.Buffer(16).fill(1.0)
    except cuda.CudaError:
        # The simulated device has a thread, too; it tries again at the next call.
        pass
    over.set()
    for thread in waiting:
        thread.join()
    print(f"crowded by {len(waiting)} threads", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--seconds", type=float, default=3 * float(os.environ.get("XPU_TIMER_HANG_TIMEOUT", "3")) + 3)
    parser.add_argument("--crowded", action="store_true", help="make the first device call when no thread can be created")
    options = parser.parse_args()
    if options.crowded:
        crowd()
    rank = Rank(options.seconds)
    for _ in range(3):
        rank.step()
    MODES[options.mode](rank)
    rank.step()
    sys.stdout.write(f"rank {rank.rank} done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
