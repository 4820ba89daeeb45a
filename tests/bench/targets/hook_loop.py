"""A loop of data-parallel training steps on the simulated device, run in blocks on demand.

A step launches 400 kernels, reduces 4 buckets of gradients over all ranks, waits for the device, and then spends 40 ms on the host.
That time comes on top of what the launches take, so that nothing of what the hook adds is hidden in it.

Whoever measures listens at the socket LOOP_CONTROL. Each line from there is a block: how many steps, and the microseconds that each is
to be burdened with on top. The answer is the milliseconds of a step of this rank, wall time and processor time.
"""

import os
import socket
import time

import cuda

KERNELS, BUCKETS, HOST_S, WARM_UP = 400, 4, 0.04, 5


def main():
    try:
        # What else the machine does has to wait, for this job as for the one that it is compared with. All threads inherit it.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        pass
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
        end = time.monotonic() + burden_s
        while time.monotonic() < end:
            pass
        reduce()
        time.sleep(HOST_S)

    for _ in range(WARM_UP):
        step(0)
    control = socket.socket(socket.AF_UNIX)
    control.connect(os.environ["LOOP_CONTROL"])
    lines = control.makefile("rw")
    for line in lines:
        steps, burden_us = map(int, line.split())
        # All ranks begin together.
        reduce()
        start, used = time.monotonic(), time.process_time()
        for _ in range(steps):
            step(burden_us / 1e6)
        wall, processor = time.monotonic() - start, time.process_time() - used
        print(wall * 1000 / steps, processor * 1000 / steps, file=lines, flush=True)
    world.destroy()


if __name__ == "__main__":
    main()
