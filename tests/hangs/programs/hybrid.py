"""A training loop with tensor, pipeline and data parallelism on the public CUDA and NCCL
interfaces, and ways to go wrong.

Ranks count through the tensor-parallel group first, then the pipeline, then the data-parallel
replicas, as Megatron does it. A fault is NAME@RANK[+RANK...][:PLACE][:STEP]. NAME is a function of
faults.py, run at PLACE; or one of the faults of collectives:
    skip       the rank leaves out one collective of the group PLACE (tp, dp or world)
    op         it broadcasts where the others sum
    size       it sums half as many elements
    dtype      it sums another type
    order      it enters the groups dp and world in the opposite order
    unsent     it does not send its activations to the next stage
    unreceived it does not receive them
    cycle      it and its neighbour both receive before they send
PLACE of the others is start, load, forward, backward, optimizer, checkpoint, evaluate or end. STEP
is 12 unless given.
"""

import argparse
import os
import random
import sys
import time

import cuda
import faults

ELEMENTS = 256
IN_COLLECTIVES = {"skip", "op", "size", "dtype", "order", "unsent", "unreceived", "cycle"}


class Fault:
    def __init__(self, text):
        who, *rest = text.split(":")
        self.name, ranks = who.split("@")
        self.ranks = {int(rank) for rank in ranks.split("+")}
        self.place = rest[0] if rest else ("dp" if self.name in IN_COLLECTIVES else "forward")
        self.step = int(rest[1]) if len(rest) > 1 else 12


class Faults:
    """The groups of this rank."""

    def __init__(self, faults_of_all, rank):
        self.mine = [fault for fault in faults_of_all if rank in fault.ranks]

    def at(self, place, step=None):
        for fault in self.mine:
            if fault.name not in IN_COLLECTIVES and fault.place == place and step in (None, fault.step):
                faults.run(fault.name)

    def has(self, name, step, place=None):
        return any((f.name, f.step) == (name, step) and place in (None, f.place) for f in self.mine)


class DataLoader:
    """Batches that are read on demand."""

    def __init__(self, trouble):
        self.trouble = trouble
        self.step = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.step += 1
        return self.read_shard(self.step)

    def read_shard(self, step):
        self.trouble.at("load", step)
        return float(step)


class Trainer:
    def __init__(self, options, rank, world):
        self.options, self.rank = options, rank
        self.trouble = Faults(options.fault, rank)
        self.trouble.at("start")
        tp, pp = options.tp, options.pp
        self.stage = rank // tp % pp
        self.replica = rank // (tp * pp)
        self.world = cuda.Communicator.create("world", rank, world)
        self.tp = self.world.split(rank // tp, rank) if tp > 1 else None
        self.pp = self.world.split(self.replica * tp + rank % tp, rank) if pp > 1 else None
        self.dp = self.world.split(rank % (tp * pp), rank) if options.dp > 1 else None
        self.stream = cuda.Stream()
        self.activations, self.gradients = cuda.Buffer(ELEMENTS), cuda.Buffer(ELEMENTS)
        self.norm = cuda.Buffer(1)
        self.layer = cuda.Kernel("transformer_layer", options.kernel_us)
        self.update = cuda.Kernel("adamw_step", options.kernel_us)
        self.loader = DataLoader(self.trouble)
        self.pace = random.Random(rank)

    def all_reduce(self, name, buffer, step):
        group = getattr(self, name)
        if group is None or self.trouble.has("skip", step, name):
            return
        if self.trouble.has("op", step, name):
            group.broadcast(buffer, 0, self.stream)
        elif self.trouble.has("size", step, name):
            group.all_reduce(cuda.Buffer(max(buffer.count // 2, 2)), self.stream)
        elif self.trouble.has("dtype", step, name):
            group.all_reduce(cuda.Buffer(buffer.count, "i32"), self.stream)
        else:
            group.all_reduce(buffer, self.stream)

    def exchange(self, sender, receiver, step):
        """One transfer between neighbouring stages, as this stage takes part in it."""
        if self.stage == sender and not self.trouble.has("unsent", step):
            self.pp.send(self.activations, receiver, self.stream)
        if self.stage == receiver and not self.trouble.has("unreceived", step):
            self.pp.recv(self.activations, sender, self.stream)

    def forward(self, step):
        if self.pp and self.trouble.has("cycle", step):
            other = self.stage - 1 if self.stage else self.stage + 1
            self.pp.recv(self.activations, other, self.stream)
            self.pp.send(self.activations, other, self.stream)
        if self.stage > 0:
            self.exchange(self.stage - 1, self.stage, step)
        for _ in range(self.options.layers):
            self.layer.launch(self.stream)
            self.all_reduce("tp", self.activations, step)
        self.trouble.at("forward", step)
        if self.stage < self.options.pp - 1:
            self.exchange(self.stage, self.stage + 1, step)

    def backward(self, step):
        if self.stage < self.options.pp - 1:
            self.exchange(self.stage + 1, self.stage, step)
        for _ in range(self.options.layers):
            self.layer.launch(self.stream)
            self.all_reduce("tp", self.activations, step)
        self.trouble.at("backward", step)
        if self.stage > 0:
            self.exchange(self.stage, self.stage - 1, step)

    def optimizer_step(self, step):
        self.trouble.at("optimizer", step)
        groups = [("dp", self.gradients), ("world", self.norm)]
        if self.trouble.has("order", step):
            groups.reverse()
        for name, buffer in groups:
            if name != "world" or self.options.norm:
                self.all_reduce(name, buffer, step)
        self.update.launch(self.stream)
        self.stream.synchronize()

    def save_checkpoint(self, step):
        self.trouble.at("checkpoint", step)

    def evaluate(self, step):
        self.trouble.at("evaluate", step)
        end = time.monotonic() + self.options.evaluate_seconds
        if self.rank == 0:
            while time.monotonic() < end:
                pass

    def train(self):
        start = time.monotonic()
        for step, _batch in enumerate(self.loader):
            if step >= self.options.steps or step % 10 == 0 and self.over(start):
                break
            self.forward(step)
            self.backward(step)
            self.optimizer_step(step)
            if step % 4 == 0:
                self.save_checkpoint(step)
                self.evaluate(step)
            self.pause(step)
        self.trouble.at("end")
        self.world.destroy()

    def pause(self, step):
        """Host work between steps, optionally uneven."""
        seconds = self.options.step_ms / 1000
        if self.options.uneven:
            seconds *= self.pace.uniform(0.2, 3.0)
        if step and self.options.long_every and step % self.options.long_every == 0:
            seconds += self.options.long_seconds
        time.sleep(seconds)

    def over(self, start):
        """All ranks leave at the same step, so they vote on it."""
        if self.options.seconds == float("inf"):
            return False
        self.norm.fill(1.0 if time.monotonic() - start > self.options.seconds else 0.0)
        self.world.all_reduce(self.norm, self.stream)
        self.stream.synchronize()
        return self.norm.to_list()[0] > 0


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--norm", action="store_true", help="sum the norm of the gradients over all ranks in every step")
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--kernel-us", type=int, default=200)
    parser.add_argument("--uneven", action="store_true", help="vary the host work from rank to rank and from step to step")
    parser.add_argument("--long-every", type=int, default=0, help="number of steps from one long step of all ranks to the next")
    parser.add_argument("--long-seconds", type=float, default=0.0)
    parser.add_argument("--evaluate-seconds", type=float, default=0.0, help="how long rank 0 evaluates, every four steps")
    parser.add_argument("--fault", type=Fault, action="append", default=[])
    return parser.parse_args()


def main():
    options = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.tp * options.pp * options.dp != world:
        sys.exit(f"tp {options.tp} x pp {options.pp} x dp {options.dp} is not the world of {world}")
    cuda.set_device(int(os.environ["LOCAL_RANK"]) % cuda.device_count())
    trainer = Trainer(options, rank, world)
    try:
        trainer.train()
    except ValueError as problem:
        # Like torch: it prints the exception, and the communicators end before the process.
        print(f"rank {rank}: {problem}", file=sys.stderr, flush=True)
        trainer.world.destroy()
        raise


if __name__ == "__main__":
    main()
