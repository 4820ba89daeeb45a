"""A rank of a PyTorch job on the CPU. In the first attempt the last rank does not come to a collective."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def stay_away():
    signal.pause()


for step in range(50):
    total = torch.ones(8)
    dist.all_reduce(total)
    assert total[0].item() == SIZE, total
    if step == 20 and RANK == SIZE - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        stay_away()
dist.barrier()
print(f"rank {RANK} done\n", end="", flush=True)
dist.destroy_process_group()
