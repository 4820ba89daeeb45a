"""Small jobs on the simulated device, written without knowledge of the judge's rules.

    blind.py JOB RANK[+RANK...]

JOB is a function of this file. It trains until its trouble begins on the ranks that are named, in
step 9.
"""

import ctypes
import importlib
import os
import sys
import tempfile
import threading
import time

import cuda

TROUBLE_STEP = 9


class Job:
    """The device, one communicator of all ranks, and the steps."""

    def __init__(self, ranks):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.ranks, self.mine = sorted(ranks), self.rank in ranks
        cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.stream = cuda.Stream()
        self.comm = cuda.Communicator.create("blind", self.rank, self.world)
        self.gradients, self.token = cuda.Buffer(4096), cuda.Buffer(8)
        self.kernel = cuda.Kernel("mlp", 200)

    def steps(self, count=1 << 20):
        """The numbers of the steps, each with whether the trouble of this rank begins in it."""
        for step in range(count):
            self.kernel.launch(self.stream)
            yield step, self.mine and step == TROUBLE_STEP

    def reduce(self):
        self.comm.all_reduce(self.gradients, self.stream)
        self.stream.synchronize()

    def train(self, trouble):
        """Steps with one all_reduce each, before which `trouble` comes."""
        for _step, here in self.steps():
            if here:
                trouble()
            self.reduce()


def forever():
    while True:
        time.sleep(3600)


def decoder_keeps_interpreter(job):
    """A thread reads a pipe in a C function that does not release the GIL."""
    holding = ctypes.PyDLL(None)

    def trouble():
        reader, _writer = os.pipe()
        buffer = ctypes.create_string_buffer(8)
        threading.Thread(target=holding.read, args=(reader, buffer, 1), name="decoder", daemon=True).start()
        time.sleep(1)

    job.train(trouble)


def another_program(job):
    """The process executes another program and keeps its pid."""
    job.train(lambda: os.execvp("sleep", ["sleep", "3600"]))


def main_thread_ends(job):
    """The main thread ends by itself; a thread that keeps the process alive does not."""

    def trouble():
        threading.Thread(target=forever, name="keeper").start()
        ctypes.CDLL(None).pthread_exit(None)

    job.train(trouble)


def module_in_import(job):
    """A plugin is imported twice: by a thread, which does not reach its end, and by the main
    thread."""

    def trouble():
        folder = tempfile.mkdtemp()
        with open(os.path.join(folder, "slow_plugin.py"), "w") as file:
            file.write("import time\nwhile True:\n    time.sleep(3600)\n")
        sys.path.insert(0, folder)
        threading.Thread(target=importlib.import_module, args=("slow_plugin",), name="plugins", daemon=True).start()
        time.sleep(0.5)
        importlib.import_module("slow_plugin")

    job.train(trouble)


def streams_cross(job):
    """Two streams and an event between them, which one rank records on the other stream."""
    other, event = cuda.Stream(), cuda.Event(timing=False)
    second = cuda.Communicator.create("blind-second", job.rank, job.world)
    for step, here in job.steps():
        if step == TROUBLE_STEP:
            first = (job.comm, job.token, other) if here else (second, job.gradients, job.stream)
            then = (second, job.gradients, job.stream) if here else (job.comm, job.token, other)
            first[0].all_reduce(first[1], first[2])
            event.record(first[2])
            then[2].wait(event)
            then[0].all_reduce(then[1], then[2])
            job.stream.synchronize()
            other.synchronize()
        job.reduce()


def short_graph(job):
    """One rank launches a graph with one all_reduce where the others launch one with two; the job
    goes on to its end."""
    graphs = []
    for reductions in (2, 1):
        with cuda.capture(job.stream) as graph:
            for _ in range(reductions):
                job.comm.all_reduce(job.gradients, job.stream)
        graphs.append(graph)
    for _step, here in job.steps(300):
        graphs[here].launch(job.stream)
        job.stream.synchronize()


def half_leaves(job):
    """The even ranks finish and leave; one of the odd ranks never arrives."""
    half = job.comm.split(job.rank % 2, job.rank)
    for step, _here in job.steps():
        if step == TROUBLE_STEP and job.rank % 2 == 0:
            sys.exit(0)
        if step == TROUBLE_STEP + 3 and job.mine:
            forever()
        half.all_reduce(job.gradients, job.stream)
        job.stream.synchronize()


def wrong_group(job):
    """One rank sums in the group of its pair what belongs into the group of its half."""
    half, pair = job.comm.split(job.rank % 2, job.rank), job.comm.split(job.rank // 2, job.rank)
    for _step, here in job.steps():
        (pair if here else half).all_reduce(job.token, job.stream)
        job.reduce()


def exchange_with_hole(job):
    """Every rank sends to all ranks, itself included, on its own stream; one send is missing."""
    exchange = cuda.Stream()
    part = cuda.Buffer(8)
    for _step, here in job.steps():
        job.reduce()
        with cuda.group():
            for peer in range(job.world):
                if not (here and peer == (job.rank + 1) % job.world):
                    job.comm.send(job.token, peer, exchange)
                job.comm.recv(part, peer, exchange)
        exchange.synchronize()


def unsent_update(job):
    """Rank 0 collects from one worker after the other and answers; one worker only listens."""
    for _step, here in job.steps():
        if job.rank == 0:
            for worker in range(1, job.world):
                job.comm.recv(job.token, worker, job.stream)
                job.comm.send(job.token, worker, job.stream)
        else:
            if not here:
                job.comm.send(job.token, 0, job.stream)
            job.comm.recv(job.token, 0, job.stream)
        job.stream.synchronize()


def first_of_all(job):
    """The first collective of the job has another size on one rank."""
    job.comm.all_reduce(job.token if job.mine else job.gradients, job.stream)
    job.stream.synchronize()


def dies_between_groups(job):
    """A rank dies after the groups of neighbours are made, and before those of every second
    rank."""
    pair, column = job.rank // 2, job.rank % 2
    neighbours = cuda.Communicator.create(f"blind-pair-{pair}", column, 2)
    if job.mine:
        os._exit(9)
    cuda.Communicator.create(f"blind-column-{column}", pair, job.world // 2, timeout=3600)
    for _step, _here in job.steps():
        neighbours.all_reduce(job.token, job.stream)
        job.stream.synchronize()


def kernel_and_sleep(job):
    """The first of the ranks has a kernel that does not end, the last one sleeps."""
    endless = cuda.Kernel("scan", 3_600_000_000)
    job.train(lambda: endless.launch(job.stream) if job.rank == job.ranks[0] else forever())


if __name__ == "__main__":
    globals()[sys.argv[1]](Job({int(rank) for rank in sys.argv[2].split("+")}))
