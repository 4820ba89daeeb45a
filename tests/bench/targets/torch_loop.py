"""A loop of DistributedDataParallel on PyTorch's CUDA build and the simulated device, in blocks.

A step is a forward and a backward pass of 24 layers, the reduction of their gradients over all
ranks, and AdamW; torch decides what it launches. Then it spends 40 ms on the host, in addition to
the time of the launches.
"""

import os
import time

import blocks

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, HOST_S, WARM_UP = 24, 16, 0.04, 5


def main():
    blocks.before_others()
    torch.set_num_threads(1)
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
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
        blocks.burden(burden_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        time.sleep(HOST_S)

    for _ in range(WARM_UP):
        step(0)
    blocks.serve(meet, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
