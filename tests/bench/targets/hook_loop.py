"""A loop of data-parallel training steps on the simulated device; prints the milliseconds of a step of rank 0, and those of processor time.

A step launches 400 kernels, reduces 4 buckets of gradients over all ranks, waits for the device, and then spends 40 ms on the host.
That time comes on top of what the launches take, so that nothing of what the hook adds is hidden in it.
"""

import os
import time

import cuda

KERNELS, BUCKETS, HOST_S, WARM_UP, STEPS = 400, 4, 0.04, 5, 40


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = cuda.Communicator.create("world", rank, world_size)
    stream = cuda.Stream()
    kernels = [cuda.Kernel(f"layer_{number % 40}", 1) for number in range(KERNELS)]
    buckets = [cuda.Buffer(256) for _ in range(BUCKETS)]
    for buffer in buckets:
        buffer.fill(1.0)
    start = used = 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            start, used = time.monotonic(), time.process_time()
        for kernel in kernels:
            kernel.launch(stream)
        for buffer in buckets:
            world.all_reduce(buffer, stream)
        stream.synchronize()
        time.sleep(HOST_S)
    if rank == 0:
        wall, processor = time.monotonic() - start, time.process_time() - used
        print(f"ms a step {wall * 1000 / STEPS} {processor * 1000 / STEPS}", flush=True)
    world.destroy()


if __name__ == "__main__":
    main()
