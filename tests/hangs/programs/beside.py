"""Small jobs on the simulated device in which the main thread, or the only communicator, has no
evidence.

    beside.py JOB [RANK]

JOB is a function of this file. It trains until its trouble begins on the rank that is named, in
step 9; without a rank, on all.
"""

import os
import pty
import signal
import socket
import sys
import threading
import time

import cuda

TROUBLE_STEP = 9


class Job:
    def __init__(self, rank):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.mine = rank is None or self.rank == rank
        cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.stream = cuda.Stream()
        self.comm = cuda.Communicator.create("beside", self.rank, self.world)
        self.buffer = cuda.Buffer(4096)
        self.kernel = cuda.Kernel("mlp", 200)

    def reduce(self, comm):
        comm.all_reduce(self.buffer, self.stream)
        self.stream.synchronize()

    def train(self, trouble):
        """Steps with one all_reduce each, before which `trouble` comes."""
        cuda.set_device(int(os.environ["LOCAL_RANK"]))
        for step in range(1 << 20):
            self.kernel.launch(self.stream)
            if self.mine and step == TROUBLE_STEP:
                trouble()
            self.reduce(self.comm)

    def in_thread(self, trouble):
        trainer = threading.Thread(target=self.train, args=(trouble,), name="trainer")
        trainer.start()
        return trainer


def write_into_full_pipe():
    _reading, writing = os.pipe()
    os.write(writing, bytes(1_000_000))


def ask_silent_server():
    listener = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(listener.getsockname()).recv(1)


def thread_joined(job):
    """The main thread waits for the end of the one that trains."""
    job.in_thread(write_into_full_pipe).join()


def thread_and_signal(job):
    """The main thread waits for the signal that ends the job."""
    job.in_thread(ask_silent_server)
    signal.sigwait({signal.SIGTERM})


def thread_and_sleep(job):
    """The main thread sometimes checks whether the other thread lives."""
    trainer = job.in_thread(lambda: threading.Barrier(2).wait())
    while trainer.is_alive():
        time.sleep(0.5)


def two_orders(job):
    """One rank has its two communicators the other way round, and waits for each collective, from
    the first step on."""
    other = cuda.Communicator.create("other", job.rank, job.world)
    comms = [other, job.comm] if job.mine else [job.comm, other]
    while True:
        for comm in comms:
            job.reduce(comm)


def idle_after(job, idles):
    """The cells of a notebook have run, and the user does not start the next one."""
    for _ in range(TROUBLE_STEP):
        job.reduce(job.comm)
    idles()


def sleep():
    while True:
        time.sleep(3600)


def serve():
    socket.create_server(("127.0.0.1", 0)).accept()


def prompt():
    _controller, terminal = pty.openpty()
    os.dup2(terminal, 0)
    sys.stdin = os.fdopen(0)
    input("> ")


def idle_sleep(job):
    idle_after(job, sleep)


def idle_server(job):
    idle_after(job, serve if job.rank == 0 else sleep)


def idle_prompt(job):
    idle_after(job, prompt if job.rank == 0 else sleep)


def main():
    name, *ranks = sys.argv[1:]
    globals()[name](Job(int(ranks[0]) if ranks else None))


if __name__ == "__main__":
    main()
