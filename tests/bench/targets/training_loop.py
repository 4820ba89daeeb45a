"""A loop of training steps on the simulated device, in blocks, on request of the benchmark.

Usage: training_loop.py kernels | torch

The benchmark listens at the socket LOOP_CONTROL. Each line that it sends is a block: the number of
steps, and the microseconds of additional load in each. The response is the milliseconds of a step
of this rank, wall time and CPU time.

A step ends with 40 ms on the host. This time is added to that of the launches, so it hides no cost
of the hook.
"""

import os
import socket
import sys
import time

HOST_S, WARM_UP = 0.04, 5
KERNELS, BUCKETS = 400, 4
LAYERS, WIDTH = 24, 16


def before_others():
    """Gives this job, and the one that it is compared with, priority over all other processes.

    All threads inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        pass


def burden(seconds):
    """Keeps a processor busy for some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def serve(meet, step):
    """Warms up, and runs `step(burden_s)` as often as requested, until the connection is closed.

    All ranks begin a block together, with `meet()`.
    """
    for _ in range(WARM_UP):
        step(0)
    control = socket.socket(socket.AF_UNIX)
    control.connect(os.environ["LOOP_CONTROL"])
    lines = control.makefile("rw")
    for line in lines:
        steps, burden_us = map(int, line.split())
        meet()
        start, used = time.monotonic(), time.process_time()
        for _ in range(steps):
            step(burden_us / 1e6)
        wall, processor = time.monotonic() - start, time.process_time() - used
        print(wall * 1000 / steps, processor * 1000 / steps, file=lines, flush=True)


def launch_kernels(rank, world_size, local_rank):
    """Data-parallel steps that call the device directly.

    A step launches 400 kernels, reduces 4 buckets of gradients over all ranks, and waits for the
    device.
    """
    import cuda

    before_others()
    cuda.set_device(local_rank)
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
        burden(burden_s)
        reduce()
        time.sleep(HOST_S)

    serve(reduce, step)
    world.destroy()


def train_with_torch(rank, world_size, local_rank):
    """Steps of DistributedDataParallel on PyTorch's CUDA build.

    A step is a forward and a backward pass of 24 layers, the reduction of their gradients over all
    ranks, and AdamW; torch decides what it launches.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    before_others()
    torch.set_num_threads(1)
    torch.cuda.set_device(local_rank)
    store = dist.FileStore(os.environ["LOOP_CONTROL"] + ".store", world_size)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    network = DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    batch = torch.ones(32, WIDTH).cuda()

    def meet():
        dist.barrier(device_ids=[local_rank])
        torch.cuda.synchronize()

    def step(burden_s):
        loss = network(batch).sum()
        burden(burden_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        time.sleep(HOST_S)

    serve(meet, step)
    dist.destroy_process_group()


def main():
    train = {"kernels": launch_kernels, "torch": train_with_torch}[sys.argv[1]]
    train(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


if __name__ == "__main__":
    main()
