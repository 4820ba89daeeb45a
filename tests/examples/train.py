"""A data-parallel training loop on the public CUDA and NCCL interfaces, with ways to go wrong.

Every step takes a batch from a loader that reads ahead in worker threads, launches the kernels of a
forward and a backward pass, sums the gradients over all ranks with NCCL, and checks the sum. Rank 0
prints one line every few steps.

Faults (on --fault-rank, at each --fault-step):
    loader   a shard cannot be read: the worker thread blocks in read(2), and the main thread waits
             for its batch
    pause    as loader, but the shard arrives after --pause seconds
    killed   the rank kills itself with SIGKILL
    stopped  the rank stops itself with SIGSTOP
    raise    the rank ends with a Python exception
    skip     the rank leaves the collective out: the sums are silently wrong from here on, and the
             job hangs at its end, where the others wait for one more collective than this rank has
    op       the rank broadcasts where the others sum
    size     the rank sums half as many elements
    task     the rank awaits tasks of asyncio, which await a future that nobody sets
    greenlet the rank joins greenlets of gevent, which wait for an event that nobody sets
    trio     the rank waits for tasks of trio, which wait for an event that nobody sets
    anyio    as trio, with anyio on trio
Faults of the device and of the network come from XPU_SIM_FAULT.
"""

import argparse
import asyncio
import os
import queue
import random
import signal
import sys
import threading
import time

import cuda

ELEMENTS = 1024


class ShardReader(threading.Thread):
    """Reads shards ahead of the training loop and queues one batch for each."""

    def __init__(self, worker, workers, batches, late_shards, delay):
        super().__init__(name=f"shard-reader-{worker}", daemon=True)
        self.shards = range(worker, 1 << 62, workers)
        self.batches = batches
        self.late_shards = late_shards
        self.delay = delay

    def run(self):
        for shard in self.shards:
            self.batches[shard % len(self.batches)].put(self.read_shard(shard))

    def read_shard(self, shard):
        if shard in self.late_shards:
            reading, writing = os.pipe()
            if self.delay:
                threading.Timer(self.delay, os.write, (writing, b"x")).start()
            os.read(reading, 1)  # a shard that never arrives
        return float(shard)


class DataLoader:
    """Batches in the order of the shards, from two worker threads that read ahead."""

    def __init__(self, workers=2, late_shards=(), delay=0.0):
        self.batches = [queue.Queue(maxsize=1) for _ in range(workers)]
        self.next_shard = 0
        for worker in range(workers):
            ShardReader(worker, workers, self.batches, late_shards, delay).start()

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.batches[self.next_shard % len(self.batches)].get()
        self.next_shard += 1
        return batch


class Trainer:
    """One model replica: buffers, kernels, a compute and a communication stream."""

    def __init__(self, rank, world_size):
        self.rank = rank
        self.world_size = world_size
        self.world = cuda.Communicator.create("world", rank, world_size)
        self.compute = cuda.Stream()
        self.gradients = cuda.Buffer(ELEMENTS)
        self.forward = [cuda.Kernel(f"forward_layer_{layer}", 200) for layer in range(4)]
        self.backward = [cuda.Kernel(f"backward_layer_{layer}", 300) for layer in range(4)]
        self.optimizer = cuda.Kernel("adamw_step", 200)

    def train_step(self, batch, fault=None):
        for kernel in self.forward:
            kernel.launch(self.compute)
        for kernel in self.backward:
            kernel.launch(self.compute)
        self.gradients.fill(batch + self.rank)
        if fault == "op":
            self.world.broadcast(self.gradients, 0, self.compute)
        elif fault == "size":
            self.world.all_reduce(cuda.Buffer(ELEMENTS // 2), self.compute)
        elif fault != "skip":
            self.world.all_reduce(self.gradients, self.compute)
        self.optimizer.launch(self.compute)
        self.compute.synchronize()
        return self.gradients.to_list()[0]

    def check(self, batch, total):
        expected = batch * self.world_size + self.world_size * (self.world_size - 1) / 2
        if total != expected:
            raise ArithmeticError(f"sum of the gradients is {total}, not {expected}")


async def receive_labels(arrived):
    """Waits for labels that nobody sends."""
    await arrived


async def gather_labels():
    arrived = asyncio.get_running_loop().create_future()
    await asyncio.gather(*[asyncio.create_task(receive_labels(arrived), name=f"labels-{shard}") for shard in range(3)])


async def nurse_labels():
    """As gather_labels, with trio."""
    import trio

    async def receive_labels(arrived):
        await arrived.wait()

    async with trio.open_nursery() as nursery:
        arrived = trio.Event()
        for shard in range(3):
            nursery.start_soon(receive_labels, arrived, name=f"labels-{shard}")


async def group_labels():
    """As gather_labels, with anyio."""
    import anyio

    async def receive_labels(arrived):
        await arrived.wait()

    async with anyio.create_task_group() as group:
        arrived = anyio.Event()
        for shard in range(3):
            group.start_soon(receive_labels, arrived, name=f"labels-{shard}")


def join_labels():
    """As gather_labels, with greenlets."""
    import gevent.event

    def beat():
        while True:  # gevent ends a program in which nothing can happen any more
            gevent.sleep(0.1)

    def receive(arrived):
        arrived.wait()

    gevent.spawn(beat)
    arrived = gevent.event.Event()
    gevent.joinall([gevent.spawn(receive, arrived) for _ in range(3)])


def save_model(rank):
    """Rank 0 writes the model and the others wait for it."""
    model = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "model")
    if rank == 0:
        with open(model + ".part", "w") as file:
            file.write("weights")
        os.rename(model + ".part", model)
    while not os.path.exists(model):
        time.sleep(0.01)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--step-ms", type=float, default=20.0, help="host work of a step")
    parser.add_argument("--jitter", type=float, default=0.0, help="share of it by which the time of a step varies at random")
    parser.add_argument("--fault", choices=["loader", "pause", "killed", "stopped", "raise", "skip", "op", "size", "task", "greenlet", "trio", "anyio"])
    parser.add_argument("--fault-rank", type=int, default=2)
    parser.add_argument("--fault-step", type=int, nargs="+", default=[30])
    parser.add_argument("--pause", type=float, default=10.0)
    return parser.parse_args()


def main():
    options = parse()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    fault = options.fault if rank == options.fault_rank else None
    late_shards = options.fault_step if fault in ("loader", "pause") else ()
    loader = DataLoader(late_shards=late_shards, delay=options.pause if fault == "pause" else 0.0)
    trainer = Trainer(rank, world_size)
    start = time.monotonic()
    for step, batch in enumerate(loader):
        # All ranks must leave at the same step, so the clock of one of them cannot decide alone.
        if step >= options.steps or (step % 50 == 0 and time_is_up(trainer, start, options.seconds)):
            break
        if step in options.fault_step:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raise":
                raise ValueError("a bad sample")
            if fault == "task":
                asyncio.run(gather_labels())
            if fault == "greenlet":
                join_labels()
            if fault == "trio":
                import trio

                trio.run(nurse_labels)
            if fault == "anyio":
                import anyio

                anyio.run(group_labels, backend="trio")
        total = trainer.train_step(batch, fault if step in options.fault_step else None)
        if options.fault != "skip":    # as in real training, where the right sum is unknown
            trainer.check(batch, total)
        time.sleep(options.step_ms / 1000 * random.uniform(1 - options.jitter, 1 + options.jitter))
        if rank == 0 and step % 10 == 0:
            say(f"step {step} sum {total}")
    save_model(rank)
    trainer.world.destroy()
    say(f"rank {rank} done")


def say(line):
    """Prints a line in one write, so that the lines of the ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def time_is_up(trainer, start, seconds):
    if seconds == float("inf"):
        return False
    votes = cuda.Buffer(1)
    votes.fill(1.0 if time.monotonic() - start > seconds else 0.0)
    trainer.world.all_reduce(votes, trainer.compute)
    trainer.compute.synchronize()
    return votes.to_list()[0] > 0


if __name__ == "__main__":
    main()
