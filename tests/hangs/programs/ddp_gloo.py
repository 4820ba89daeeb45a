"""A classifier trained by PyTorch's DistributedDataParallel on gloo, with a DataLoader and its
worker processes.

Every 8 steps the accuracy is gathered on all ranks, every 16 rank 0 saves a checkpoint. `--wrong
NAME@RANK` makes something go wrong there at step 20: a function of troubles.py, or `loader` (the
data set reads a pipe that stays empty), `no_metric` (leaves the accuracy out), `short_epoch` (its
epoch has fewer steps), `rank0_barrier` (waits in a barrier of its own), `other_dst` (sums the
accuracy up on another rank).
"""

import argparse
import os
import time

# gloo looks up the host name otherwise, which a container may not know.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
import troubles
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WRONG_STEP = 20


class Samples(Dataset):
    def __init__(self, wrong, batch):
        self.wrong, self.from_index = wrong, WRONG_STEP * batch

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if index >= self.from_index and self.wrong == "loader":
            reading, _writing = os.pipe()
            os.read(reading, 1)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(32, generator=generator), index % 10


def save_checkpoint(model, path):
    torch.save(model.state_dict(), path)


def gather_accuracy(correct, world):
    parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(parts, correct)
    return sum(part.item() for part in parts) / world


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1 << 20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--wrong", default="@-1")
    options = parser.parse_args()
    wrong, culprit = options.wrong.split("@")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wrong = wrong if rank == int(culprit) else ""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['XPU_EXAMPLE_RENDEZVOUS']}/gloo", rank=rank, world_size=world)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(DataLoader(Samples(wrong, options.batch), batch_size=options.batch, num_workers=options.workers))
    for step in range(options.steps):
        inputs, labels = next(loader)
        if step == WRONG_STEP and wrong in troubles.NAMES:
            troubles.begin(wrong)
        if step == WRONG_STEP and wrong == "short_epoch":
            break
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        correct = (model(inputs).argmax(1) == labels).float().mean().reshape(1)
        if step == WRONG_STEP and wrong == "rank0_barrier":
            dist.barrier()
        if step % 8 == 4 and not (wrong == "no_metric" and step == WRONG_STEP):
            gather_accuracy(correct, world)
            dist.reduce(correct, dst=rank if wrong == "other_dst" and step == WRONG_STEP else 0)
        if step % 16 == 0 and rank == 0:
            save_checkpoint(model, os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "model.pt"))
        time.sleep(options.step_ms / 1000)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
