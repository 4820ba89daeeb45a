"""How ranks end: a framework calls hooks of the user's code, and errors are reported to callbacks.

`--end NAME@RANK` lets that rank go wrong in step 14:
    in_except        the handler tells a service that does not listen
    in_finally       `finally` flushes a log into a pipe that nobody reads
    in_destructor    the framework's destructor ends the communicator during an exception
    in_exit_handler  an exit handler ends the communicator
    exit_and_thread  an exception has ended the main thread, and another thread still runs
    exit_and_pool    the exit handler of a pool waits for its task
    exit_and_child   the exit handler of multiprocessing waits for its child
    post_mortem      a debugger's prompt at an unattended terminal
    tries_again      repeats a step that never works
    thread_failed    the thread that prepares batches ends by an exception
    thread_left      it ends by SystemExit, which is not reported
    killed_by_alarm  a forgotten timer ends the process
    interrupted      SIGTERM, and its handler saves to a pipe without a reader
    raises           an uncaught exception
    aborts_group     it aborts its communicator, reports success and waits to be ended
    skips_to_end     the exception is reported, and the rank enters the final barrier
"""

import argparse
import atexit
import concurrent.futures
import multiprocessing
import os
import pdb
import pty
import signal
import socket
import sys
import threading
import time

import cuda

GOES_WRONG_IN = 14


class Prepared:
    """A thread prepares the batch of the next step."""

    def __init__(self, ending):
        self.ending, self.batch, self.step = ending, None, 0
        self.wanted, self.there = threading.Event(), threading.Event()
        self.wanted.set()
        threading.Thread(target=self.prepare, name="prepare-batches", daemon=True).start()

    def prepare(self):
        while True:
            self.wanted.wait()
            self.wanted.clear()
            if self.step == GOES_WRONG_IN and self.ending == "thread_failed":
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "shard is damaged")
            if self.step == GOES_WRONG_IN and self.ending == "thread_left":
                sys.exit(1)
            self.step += 1
            self.batch = [self.step] * 8
            self.there.set()

    def next(self):
        self.there.wait()
        self.there.clear()
        self.wanted.set()
        return self.batch


class Framework:
    def __init__(self, ending, rank, world):
        self.ending, self.rank = ending, rank
        self.group = cuda.Communicator.create("framework", rank, world)
        self.stream = cuda.Stream()
        self.gradients, self.vote = cuda.Buffer(300), cuda.Buffer(1)
        self.kernel = cuda.Kernel("fused_mlp", 400)
        self.prepared = Prepared(ending)

    def __del__(self):
        if self.ending == "in_destructor":
            self.group.destroy()

    def fit(self, steps):
        try:
            for step in range(steps):
                self.training_step(step, self.prepared.next())
        except ValueError as problem:
            self.on_exception(problem)
        finally:
            if self.ending == "in_finally":
                flush_log()
        self.barrier()

    def training_step(self, step, batch):
        time.sleep(0.012)
        self.kernel.launch(self.stream)
        if step == GOES_WRONG_IN:
            go_wrong(self)
        self.group.all_reduce(self.gradients, self.stream)
        self.stream.synchronize()
        return sum(batch)

    def on_exception(self, problem):
        if self.ending == "in_except":
            tell_service(problem)
        if self.ending == "post_mortem":
            _controller, terminal = pty.openpty()
            os.dup2(terminal, 0)
            sys.stdin = os.fdopen(0)
            pdb.post_mortem(problem.__traceback__)
        while self.ending == "tries_again":
            time.sleep(5)
        if self.ending == "skips_to_end":
            return
        raise problem

    def barrier(self):
        """All ranks reach the end of the training."""
        self.group.broadcast(self.vote, 0, self.stream)
        self.stream.synchronize()
        self.group.destroy()


def go_wrong(framework):
    ending = framework.ending
    if ending == "exit_and_thread":
        threading.Thread(target=forever, name="heartbeats").start()
    if ending == "exit_and_pool":
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="upload").submit(forever)
    if ending == "exit_and_child":
        multiprocessing.get_context("fork").Process(target=forever).start()
    if ending == "in_exit_handler":
        atexit.register(framework.group.destroy)
    if ending == "killed_by_alarm":
        signal.alarm(1)
        time.sleep(100000)
    if ending == "interrupted":
        signal.signal(signal.SIGTERM, lambda _number, _frame: flush_log())
        os.kill(os.getpid(), signal.SIGTERM)
    if ending == "aborts_group":
        cuda.nccl.ncclCommAbort(framework.group.handle)
        while True:
            time.sleep(60)
    if ending not in ("", "thread_failed", "thread_left"):
        raise ValueError("loss is nan")


def forever():
    while True:
        time.sleep(1000)


def flush_log():
    _reading, writing = os.pipe()
    os.write(writing, bytes(1 << 20))


def tell_service(problem):
    listener = socket.create_server(("127.0.0.1", 0))
    service = socket.create_connection(listener.getsockname())
    service.sendall(str(problem).encode())
    service.recv(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1 << 20)
    parser.add_argument("--end", default="@-1")
    options = parser.parse_args()
    ending, culprit = options.end.split("@")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.excepthook = lambda _problem: None
    Framework(ending if rank == int(culprit) else "", rank, world).fit(options.steps)


if __name__ == "__main__":
    main()
