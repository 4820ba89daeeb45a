"""A loop of data-parallel training steps on the simulated device, in blocks.

A step launches 400 kernels, reduces 4 buckets of gradients over all ranks, waits for the device,
and then spends 40 ms on the host. This time is added to that of the launches, so it hides no cost
of the hook.
"""

import os
import time

import blocks
import cuda

KERNELS, BUCKETS, HOST_S, WARM_UP = 400, 4, 0.04, 5


def main():
    blocks.before_others()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = cuda.Communicator.create("world", rank, world_size)
    stream = cuda.Stream()
    kernels = [cuda.Kernel(f"layer_{number % 40}", 1) for number in range(KERNELS)]
    buckets = [cuda.Buffer(256) for _ in range(BUCKETS)]
    for buffer in buckets:
        buffer.fill(1.0)

    def reduce():
        for buffer in buckets:
            world.all_reduce(buffer, stream)
        stream.synchronize()

    def step(burden_s):
        for kernel in kernels:
            kernel.launch(stream)
        blocks.burden(burden_s)
        reduce()
        time.sleep(HOST_S)

    for _ in range(WARM_UP):
        step(0)
    blocks.serve(reduce, step)
    world.destroy()


if __name__ == "__main__":
    main()
