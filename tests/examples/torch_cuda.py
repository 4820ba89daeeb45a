"""Ranks of a PyTorch job on the (simulated) GPU: DDP, FSDP, bf16 autocast, a CUDA graph with a captured all_reduce, NCCL.

    run_ranks.py --nproc 4 torch_cuda.py --fault all_reduce --fault-rank 2

The kernels of a simulated device compute nothing, so losses mean nothing here; what NCCL sums is right. Fault, on --fault-rank:
`all_reduce`: it skips one and waits for a shard that does not come; `step`: the same inside the DDP loop.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
PARTS = ["ddp", "autocast", "fsdp", "graph"]


def say(line):
    """Prints a line in one write, so that the lines of the ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def model():
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)]
    return torch.nn.Sequential(*layers).cuda()


def wait_for_shard():
    """What a rank does that has lost the others."""
    while True:
        time.sleep(0.5)


def check_sum():
    values = torch.full((1024,), float(RANK + 1)).cuda()
    dist.all_reduce(values)
    torch.cuda.synchronize()
    found, expected = values.cpu()[7].item(), SIZE * (SIZE + 1) / 2
    if found != expected:
        raise ArithmeticError(f"the sum is {found}, not {expected}")


def train(network, steps, fault_step=None, autocast=False):
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(steps):
        if step == fault_step:
            wait_for_shard()
        batch = torch.ones(32, 64).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = network(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


def ddp(options):
    fault = options.fault == "step" and RANK == options.fault_rank
    train(DistributedDataParallel(model()), options.steps, options.steps // 2 if fault else None)


def autocast(options):
    train(DistributedDataParallel(model()), options.steps, autocast=True)


def fsdp(options):
    from torch.distributed.fsdp import fully_shard

    network = model()
    fully_shard(network)
    train(network, options.steps)


def graph(options):
    values = torch.ones(256).cuda()
    dist.all_reduce(values)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        dist.all_reduce(values)
    for _ in range(options.steps):
        captured.replay()
    torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--fault", choices=["all_reduce", "step"])
    parser.add_argument("--fault-rank", type=int, default=2)
    options = parser.parse_args()
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    check_sum()
    for part in options.parts:
        globals()[part](options)
        dist.barrier()
        say(f"rank {RANK} {part}")
    if options.fault == "all_reduce" and RANK == options.fault_rank:
        wait_for_shard()
    check_sum()
    say(f"rank {RANK} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
