"""One rank of a torch gloo job in which rank 0 never enters the fourth all_reduce."""

import os
import queue
import sys
import threading

# Gloo looks up the host name otherwise, which a chroot does not know.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist


def wait_for_batch(batches):
    return batches.get()


def next_batch(batches, depth=12):
    """The frames that a data loader puts between the training loop and its queue."""
    return next_batch(batches, depth - 1) if depth else wait_for_batch(batches)


def reader(batches, wanted):
    for _ in range(wanted):
        batches.put(torch.ones(8, 16))
    threading.Event().wait()


def train(rank, model, batches):
    # Large enough that torch starts all of its worker threads.
    torch.ones(1 << 20).exp().sum()
    for step in range(4):
        if rank == 0 and step == 3:
            print("ready", flush=True)
            next_batch(batches)
        loss = model(next_batch(batches)).sum()
        loss.backward()
        for parameter in model.parameters():
            if rank != 0 and step == 3:
                print("ready", flush=True)
            dist.all_reduce(parameter.grad)


def main(rank, world, rendezvous):
    torch.set_num_threads(8)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    batches = queue.Queue()
    threading.Thread(target=reader, args=(batches, 3 if rank == 0 else 4), name="reader", daemon=True).start()
    train(rank, torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16)), batches)


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
