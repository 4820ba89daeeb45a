"""A pipeline of stages that run their forward and backward passes by turns (1F1B), with replicas of
the whole pipeline.

Rank = replica x stages + stage. Activations travel on one communicator and gradients on another
one, each on a stream of its own; the replicas of a stage sum their gradients at the end of a step,
and all ranks clip them by their norm. `--spoil KIND@RANK` changes the schedule of that rank in step
7: `lost_send`, `extra_recv`, `wrong_peer`, `small` (half of the activations), `one_less` (a
micro-batch less), `stuck` (its host stays in a forward pass), `no_clip` (leaves the norm out),
`clip_first` (norm before gradients).
"""

import argparse
import os
import signal
import time

import cuda

SPOIL_STEP = 7


def one_f_one_b(stage, stages, micro_batches):
    """The instructions of one stage in one step: F and B by micro-batch."""
    warm_up = min(stages - stage - 1, micro_batches)
    plan = [("F", index) for index in range(warm_up)]
    for index in range(micro_batches - warm_up):
        plan += [("F", warm_up + index), ("B", index)]
    return plan + [("B", index) for index in range(micro_batches - warm_up, micro_batches)]


class Stage:
    def __init__(self, options, rank):
        self.options, self.rank = options, rank
        self.stages = options.stages
        self.stage, replica = rank % self.stages, rank // self.stages
        everybody = cuda.Communicator.create("all", rank, options.stages * options.replicas)
        self.everybody = everybody
        self.down = everybody.split(replica, rank)
        self.up = everybody.split(replica, rank)
        self.same_stage = everybody.split(self.stage, rank)
        self.streams = {"down": cuda.Stream(), "up": cuda.Stream()}
        self.compute = cuda.Stream()
        self.tensor, self.half = cuda.Buffer(1024), cuda.Buffer(512)
        self.weights, self.norm = cuda.Buffer(2048), cuda.Buffer(1)
        self.work = {"F": cuda.Kernel("stage_forward", options.kernel_us), "B": cuda.Kernel("stage_backward", options.kernel_us)}
        self.spoilt = ""

    def transfer(self, way, call, peer, tensor=None):
        getattr(getattr(self, way), call)(tensor or self.tensor, peer, self.streams[way])
        if call == "recv" or self.options.blocking_sends:
            self.streams[way].synchronize()

    def forward(self, index):
        if self.stage > 0:
            self.transfer("down", "recv", self.stage - 1)
            if self.spoilt == "extra_recv" and index == 2:
                self.transfer("down", "recv", self.stage - 1)
        if self.spoilt == "stuck" and index == 1:
            self.look_up()
        self.work["F"].launch(self.compute)
        self.compute.synchronize()
        if self.stage < self.stages - 1 and not (self.spoilt == "lost_send" and index == 1):
            peer = 0 if self.spoilt == "wrong_peer" and index == 1 else self.stage + 1
            self.transfer("down", "send", peer, self.half if self.spoilt == "small" and index == 1 else None)

    def look_up(self):
        """The table of embeddings is on a machine that does not answer."""
        signal.pause()

    def backward(self, _index):
        if self.stage < self.stages - 1:
            self.transfer("up", "recv", self.stage + 1)
        self.work["B"].launch(self.compute)
        self.compute.synchronize()
        if self.stage > 0:
            self.transfer("up", "send", self.stage - 1)

    def step(self, number):
        self.spoilt = next((kind for kind, rank in self.options.spoil if rank == self.rank and number == SPOIL_STEP), "")
        plan = one_f_one_b(self.stage, self.stages, self.options.micro_batches - (self.spoilt == "one_less"))
        for kind, index in plan:
            (self.forward if kind == "F" else self.backward)(index)
        reductions = [(self.same_stage, self.weights), (self.everybody, self.norm)]
        if self.spoilt == "clip_first":
            reductions.reverse()
        for group, tensor in reductions:
            if group is self.everybody and self.spoilt == "no_clip":
                continue
            group.all_reduce(tensor, self.compute)
            self.compute.synchronize()


def spoil(text):
    kind, rank = text.split("@")
    return kind, int(rank)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--kernel-us", type=int, default=400)
    parser.add_argument("--steps", type=int, default=1 << 20)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--blocking-sends", action="store_true", help="use blocking sends, with which such a schedule deadlocks")
    parser.add_argument("--spoil", type=spoil, action="append", default=[])
    options = parser.parse_args()
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stage = Stage(options, int(os.environ["RANK"]))
    for number in range(options.steps):
        stage.step(number)
        time.sleep(options.step_ms / 1000)
    stage.everybody.destroy()


if __name__ == "__main__":
    main()
