"""Training with sharded parameters: every layer is gathered before its use and its gradients are
scattered after it; two kinds of groups.

Ranks of one node share the parameters, ranks at the same place of the nodes average their shards. A
node has `--node` ranks. An epoch ends with its loss, a table of which rank 0 keeps, and a
checkpoint. `--bug NAME@RANK` begins in the second epoch: a function of machine.py at the place that
`--at` names (load, layer, save), or one of
    swapped            the gradients are scattered before the next layer is gathered
    groups_swapped     it makes its groups before that of all ranks, at the start
    empty_batch        its batch is empty, and it leaves the step out
    one_batch_less     its data set ends one batch earlier
    only_if_first      what the others do with all, it does only when it is rank 0
    root               the table is kept by another rank
    half_precision     it gathers in another type
    longer_shard       its shard has more elements
    swallowed          an exception in the middle of a step is logged, and the next step begins
    extra_gather       it looks at a layer once more
    never_waited       it averages once more, without ever looking at the result
    ends, ends_at_once it leaves with status 0
`--lazy MS@RANK` makes the host of a rank slower by so many milliseconds a step.
"""

import argparse
import os
import random
import signal
import sys
import time

import cuda
import machine

BATCHES, SHARD = 10, 64


def pair(text):
    name, rank = text.split("@")
    return name, int(rank)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1 << 20)
    parser.add_argument("--think-ms", type=float, default=10.0)
    parser.add_argument("--jitter", type=float, default=0.0, help="share of the thinking time that varies from step to step")
    parser.add_argument("--save-seconds", type=float, default=0.0, help="how long rank 0 saves while the others wait")
    parser.add_argument("--report-seconds", type=float, default=0.0, help="how long rank 0 works after the others have left")
    parser.add_argument("--import-seconds", type=float, default=0.0, help="how long odd ranks import modules")
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="how long another process stops all ranks")
    parser.add_argument("--terminate-in", type=int, default=-1, help="the job gets SIGTERM in this epoch, and ends after it")
    parser.add_argument("--bug", type=pair, action="append", default=[])
    parser.add_argument("--lazy", type=pair, action="append", default=[])
    parser.add_argument("--at", choices=["load", "layer", "save"], default="load")
    return parser.parse_args()


options = arguments()
rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
bugs = {name for name, where in options.bug if where == rank}
lazy = sum(float(milliseconds) for milliseconds, where in options.lazy if where == rank)
chance = random.Random(rank)


def groups():
    """The groups of the ranks of this node, and of the ranks with this local rank."""
    node, place = divmod(rank, options.node)
    wanted = [(f"node{node}", place, options.node), (f"place{place}", node, world // options.node)]
    made = {name[:4]: cuda.Communicator.create(name, member, size) for name, member, size in wanted}
    return made["node"], made["plac"]


def come(place, now):
    """The place where a function of machine.py begins."""
    if options.at == place:
        for name in now & machine.NAMES:
            machine.begin(name)


class Step:
    """The data of a step, created once."""

    def __init__(self):
        made = groups() if "groups_swapped" in bugs else None
        self.everybody = cuda.Communicator.create("everybody", rank, world)
        self.mine, self.peers = made or groups()
        self.stream, self.side = cuda.Stream(), cuda.Stream()
        self.shard, self.layer = cuda.Buffer(SHARD), cuda.Buffer(SHARD * options.node)
        self.loss, self.table = cuda.Buffer(1), cuda.Buffer(4)
        self.forward, self.backward = cuda.Kernel("block_forward", 200), cuda.Kernel("block_backward", 300)
        self.gathered = cuda.Event(timing=False)

    def gather(self, bugs_now):
        shard, layer = self.shard, self.layer
        if "half_precision" in bugs_now:
            shard, layer = cuda.Buffer(SHARD * 2, "bf16"), cuda.Buffer(SHARD * 2 * options.node, "bf16")
        if "longer_shard" in bugs_now:
            shard, layer = cuda.Buffer(SHARD + 8), cuda.Buffer((SHARD + 8) * options.node)
        self.mine.all_gather(shard, layer, self.side)
        self.gathered.record(self.side)
        self.stream.wait(self.gathered)

    def scatter(self):
        self.mine.reduce_scatter(self.layer, self.shard, self.side)

    def anybody(self, leave):
        """Whether any rank was terminated."""
        self.loss.fill(1.0 if leave else 0.0)
        self.everybody.all_reduce(self.loss, self.side)
        self.side.synchronize()
        return self.loss.to_list()[0] > 0

    def run(self, now):
        for number in range(options.layers):
            come("layer", now)
            first = number == 0
            if "swapped" in now and first:
                self.scatter()
                self.gather(now)
            else:
                self.gather(now if first else set())
            if "extra_gather" in now and first:
                self.gather(set())
            self.forward.launch(self.stream)
            self.backward.launch(self.stream)
            if "swallowed" in now and first:
                raise FloatingPointError("gradient is not finite")
            if not ("swapped" in now and first):
                self.scatter()
        if "never_waited" in now:
            self.peers.all_reduce(self.loss, cuda.Stream())
        self.peers.all_reduce(self.shard, self.side)
        self.side.synchronize()
        self.stream.synchronize()


def batches(now):
    for number in range(BATCHES - ("one_batch_less" in now)):
        if number == 3:
            come("load", now)
        time.sleep((options.think_ms * (1 + options.jitter * chance.uniform(-1, 1)) + lazy) / 1000)
        yield number


def epoch(step, now):
    for number in batches(now):
        here = now if number == 3 else set()
        if "empty_batch" in here:
            continue
        if "ends" in here:
            sys.exit(0)
        if "ends_at_once" in here:
            os._exit(0)
        try:
            step.run(here)
        except ArithmeticError as problem:
            print(f"rank {rank}: {problem}, the batch is left out", flush=True)
    if "only_if_first" not in now or rank == 0:
        step.everybody.all_reduce(step.loss, step.side)
    step.everybody.reduce(step.table, rank if "root" in now else 0, step.side)
    step.side.synchronize()
    if rank == 0 and options.save_seconds:
        save(options.save_seconds)
    come("save", now)


def save(seconds):
    """Compresses the weights; the others are in the next step already."""
    end, checksum = time.monotonic() + seconds, 1
    while time.monotonic() < end:
        for byte in range(256):
            checksum = (checksum * 31 + byte) % 65521
    return checksum


def report(seconds):
    """Exports the model, when the group is gone."""
    time.sleep(seconds / 2)
    save(seconds / 2)


def main():
    if rank % 2 and options.import_seconds:
        time.sleep(options.import_seconds)
    step = Step()
    leave = []
    signal.signal(signal.SIGTERM, lambda number, _frame: leave.append(number))
    for number in range(options.epochs):
        if number == 1 and rank == 0 and options.pause_seconds:
            machine.pause_all(options.pause_seconds)
        if number == options.terminate_in and rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        epoch(step, bugs if number == 1 else set())
        if options.terminate_in >= 0 and step.anybody(leave):
            break
    for communicator in (step.mine, step.peers, step.everybody):
        communicator.destroy()
    if rank == 0:
        report(options.report_seconds)


if __name__ == "__main__":
    main()
