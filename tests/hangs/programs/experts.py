"""Attention over parts of a context, which travel round a ring, then a mixture of experts, whose
tokens travel all to all.

The ranks of a block of `--block` share one context and one set of experts; those with the same
place in their blocks sum their gradients. Every exchange is one group of sends and receives, those
to itself included, as PyTorch's all_to_all makes them. `--spoil KIND@RANK` changes what that rank
does in step 7: `no_recv` (leaves a receive out of an exchange), `more_tokens` (sends more than its
peer expects), `wrong_neighbour` (sends its part of the context past the next rank), `drops` (takes
part in no exchange of tokens), `largest` (a maximum where the others sum), `slow_expert` (its
kernel does not end); or at the start: `other_size` (counts one rank more), `no_split`, or `no_id`
(rank 0 makes no unique id).
"""

import argparse
import os
import time

import cuda

SPOIL_STEP = 7


class Block:
    def __init__(self, options, rank, size):
        self.options, self.rank, self.size = options, rank, size
        self.spoilt = ""
        if options.spoil == "no_id" and rank == 0:
            self.think()
        everybody = cuda.Communicator.create("all", rank, size + (self.starts_with("other_size")), timeout=600)
        if self.starts_with("no_split"):
            self.think()
        self.peers = everybody.split(rank // options.block, rank)
        self.same_place = everybody.split(rank % options.block, rank)
        self.stream = cuda.Stream()
        self.context, self.more = cuda.Buffer(256), cuda.Buffer(512)
        self.gradients = cuda.Buffer(1024)
        self.kernels = {"attention": cuda.Kernel("attend", 1500), "expert": cuda.Kernel("expert", 2000)}

    def starts_with(self, kind):
        return self.options.spoil == kind and self.options.spoilt_rank == self.rank

    def think(self):
        while True:
            time.sleep(0.2)

    def ring(self):
        count, own = self.peers.size, self.peers.rank
        to, source = (own + 1) % count, (own - 1) % count
        if self.spoilt == "wrong_neighbour":
            to = (to + 1) % count
        for _ in range(count - 1):
            self.kernels["attention"].launch(self.stream)
            with cuda.group():
                self.peers.send(self.context, to, self.stream)
                self.peers.recv(self.context, source, self.stream)

    def all_to_all(self):
        with cuda.group():
            for peer in range(self.peers.size):
                beside = peer == (self.peers.rank + 1) % self.peers.size
                self.peers.send(self.more if self.spoilt == "more_tokens" and beside else self.context, peer, self.stream)
                if not (self.spoilt == "no_recv" and beside):
                    self.peers.recv(self.context, peer, self.stream)

    def step(self):
        self.ring()
        if self.spoilt != "drops":
            self.all_to_all()
            name, kernel = "expert", self.kernels["expert"]
            if self.spoilt == "slow_expert":
                kernel = cuda.Kernel(name, 1e9)
            kernel.launch(self.stream)
            self.all_to_all()
        op = "max" if self.spoilt == "largest" else "sum"
        self.same_place.all_reduce(self.gradients, self.stream, op)
        self.stream.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--spoil", default="@-1")
    options = parser.parse_args()
    options.spoil, spoilt_rank = options.spoil.split("@")
    options.spoilt_rank = int(spoilt_rank)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    block = Block(options, rank, size)
    for step in range(options.steps):
        block.spoilt = options.spoil if step == SPOIL_STEP and rank == options.spoilt_rank else ""
        block.step()


if __name__ == "__main__":
    main()
