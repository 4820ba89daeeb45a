"""Ranks whose kernels reduce over all devices by themselves, without a collective library: each
kernel sets a flag in memory that the devices share, and busy-waits for the flags of its peers.

Faults (on --fault-rank, at --fault-step):
    late     the rank reads a pipe that nobody writes, instead of launching
    branch   the rank leaves the reduction out and waits for its next batch
    signal   the rank leaves out a kernel on a second stream, for which the next rank's device waits
    flag     the devices wait for a flag that no rank sets
    kernel   a kernel before the reduction never ends
"""

import argparse
import os
import queue
import time

import cuda


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--step-ms", type=float, default=20.0, help="host work of a step")
    parser.add_argument("--fault", choices=["late", "branch", "signal", "flag", "kernel"])
    parser.add_argument("--fault-rank", type=int, default=2)
    parser.add_argument("--fault-step", type=int, default=20)
    parser.add_argument("--name", default="_ZN4vllm26cross_device_reduce_1stageIfLi4EEEvPNS_8RankDataEii")
    parser.add_argument("--nccl", action="store_true", help="the ranks also have an NCCL communicator")
    return parser.parse_args()


def read_shard():
    os.read(os.pipe()[0], 1)  # a shard that never arrives


def next_batch():
    queue.Queue().get()


class Worker:
    """One rank: its kernels and two streams."""

    def __init__(self, options, rank, size):
        flags = f"flags={os.environ['XPU_EXAMPLE_RENDEZVOUS']}/flags"
        self.main, self.side = cuda.Stream(), cuda.Stream()
        self.forward = cuda.Kernel("forward_layer", 200)
        self.reduce = cuda.Kernel(options.name, 50, f"{flags} sets={rank} awaits=0..{size}")
        following = (rank + 1) % size
        self.put = cuda.Kernel("_ZN4c10d16symmetric_memoryL17put_signal_kernelEPPj", 10, f"{flags} sets={size + rank}")
        awaited = f"{flags} awaits={size + following}..{size + following + 1}"
        self.wait = cuda.Kernel("_ZN4c10d16symmetric_memoryL18wait_signal_kernelEPPj", 10, awaited)
        self.never = cuda.Kernel("multimem_all_reduce_kernel", 10, f"{flags} awaits={2 * size}..{2 * size + 1}")
        self.stuck = cuda.Kernel("stuck_kernel", 3_600_000_000)

    def step(self, fault, all_fault):
        self.forward.launch(self.main)
        if fault != "signal":
            self.put.launch(self.side)
        if fault == "late":
            read_shard()
        if fault == "branch":
            next_batch()
        if fault == "kernel":
            self.stuck.launch(self.main)
        if all_fault == "flag":
            self.never.launch(self.main)
        self.wait.launch(self.main)
        self.reduce.launch(self.main)
        self.main.synchronize()


def main():
    options = parse()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = cuda.Communicator.create("world", rank, size) if options.nccl else None
    worker = Worker(options, rank, size)
    for step in range(options.steps):
        time.sleep(options.step_ms / 1e3)
        all_fault = options.fault if step == options.fault_step else None
        worker.step(all_fault if rank == options.fault_rank else None, all_fault)
        if rank == 0 and step % 5 == 0:
            print(f"step {step}", flush=True)
    worker.main.synchronize()
    if world:
        world.destroy()


if __name__ == "__main__":
    main()
