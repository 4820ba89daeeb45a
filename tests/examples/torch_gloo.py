"""Ranks of a PyTorch job on the CPU (gloo): rounds of collectives with checked results, then one
rank is missing.

    run_ranks.py --nproc 4 torch_gloo.py --fault all_reduce --fault-rank 2

Faults, on --fault-rank: it stays away from the collective of that name; `recv`: it never sends what
the rank before it receives; `recv_any`: as `recv`, without a name; `send`: it never receives a
large message; `group`: it skips an all_reduce of its half of the job; `init`: it never joins
(rank 0 would be the host of the store); `new_group`: it stays away from the making of another
group; `store`: it never sets the key that the others wait for; `store_barrier`: it never sets its
own key, and the others wait for the keys of all ranks; `store_step`: it waits for the key of
another step; `size`, `dtype`: its all_reduce differs from that of the others; `once`: as
all_reduce, but only before the first restart. Without a fault all rounds are run and the job ends.
"""

import argparse
import os
import signal

# gloo looks up the host name otherwise, which a container may not know.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])


def check(what, found, expected):
    if found != expected:
        raise ArithmeticError(f"{what} is {found}, not {expected}")


def train_step(step, group):
    """Every kind of collective of gloo, with known results."""
    gradients = torch.full((1024,), float(RANK + step))
    pending = dist.all_reduce(gradients, async_op=True)
    flags = torch.tensor([RANK])
    dist.broadcast(flags, src=1)
    pending.wait()
    check("the sum", gradients[0].item(), SIZE * step + SIZE * (SIZE - 1) / 2)
    check("the flag", flags.item(), 1)
    parts = [torch.zeros(4) for _ in range(SIZE)]
    dist.all_gather(parts, torch.full((4,), float(RANK)))
    check("the parts", [part[0].item() for part in parts], [float(rank) for rank in range(SIZE)])
    losses = [None] * SIZE
    dist.all_gather_object(losses, {"rank": RANK, "loss": step})
    check("the losses", [entry["rank"] for entry in losses], list(range(SIZE)))
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    token = torch.tensor([-1])
    sending = dist.isend(torch.tensor([RANK]), right)
    dist.recv(token, left)
    sending.wait()
    check("the token", token.item(), left)
    own = torch.tensor([RANK])
    dist.all_reduce(own, group=group)
    check("the sum of a half", own.item(), RANK % 2 * 2 + 2)
    dist.barrier()


def rarer_collectives():
    """The ten collectives of the whole job before the first step."""
    parts = [torch.zeros(2) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(torch.full((2,), float(RANK)), parts, dst=1)
    check("what was gathered", [part[0].item() for part in parts or []], list(map(float, range(SIZE))) if parts else [])
    piece = torch.zeros(3)
    dist.scatter(piece, [torch.full((3,), float(rank)) for rank in range(SIZE)] if RANK == 2 else None, src=2)
    check("the piece", piece[0].item(), float(RANK))
    total = torch.ones(5)
    dist.reduce(total, dst=3)
    check("the total", RANK != 3 or total[0].item() == SIZE, True)
    swapped = torch.zeros(SIZE)
    dist.all_to_all_single(swapped, torch.full((SIZE,), float(RANK)))
    check("what was swapped", swapped.tolist(), list(map(float, range(SIZE))))
    for reduction in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        dist.all_reduce(torch.ones(7), op=reduction)
    dist.broadcast_object_list([RANK], src=0)
    dist.barrier()
    dist.barrier()
    if RANK == 0:
        for _ in range(SIZE - 1):
            token = torch.tensor([-1])
            sender = dist.recv(token)
            check("who sent", token.item(), sender)
    else:
        dist.send(torch.tensor([RANK]), 0)


def evaluate_forever():
    """The fault: this rank leaves its collectives."""
    signal.pause()


def reduce_unequally(fault, differs):
    """gloo ends the process that receives more bytes than it expects. The others keep running."""
    size, dtype = 64, torch.float32
    if differs and fault == "size":
        size = 4096
    elif differs:
        dtype = torch.float64
    try:
        dist.all_reduce(torch.ones(size, dtype=dtype))
    except RuntimeError:
        evaluate_forever()


def fail(fault, culprit, group):
    store = dist.distributed_c10d._get_default_store()
    if fault in ("size", "dtype"):
        reduce_unequally(fault, RANK == culprit)
    elif fault == "store_step":
        store.wait([f"step/{17 if RANK == culprit else 18}"])
    elif RANK == culprit:
        evaluate_forever()
    elif fault in ("all_reduce", "once"):
        dist.all_reduce(torch.ones(4096))
    elif fault == "broadcast":
        dist.broadcast(torch.ones(16), src=culprit)
    elif fault == "all_gather_object":
        dist.all_gather_object([None] * SIZE, RANK)
    elif fault == "monitored_barrier":
        dist.monitored_barrier()
    elif fault == "recv" and RANK == (culprit - 1) % SIZE:
        dist.recv(torch.zeros(16), culprit)
    elif fault == "recv_any" and RANK == (culprit - 1) % SIZE:
        dist.recv(torch.zeros(16))
    elif fault == "send" and RANK == (culprit - 1) % SIZE:
        dist.send(torch.zeros(1 << 24), culprit)
    elif fault == "group":
        dist.all_reduce(torch.ones(16), group=group)
    elif fault == "new_group":
        dist.new_group(list(range(SIZE)))
    elif fault == "store":
        store.wait([f"from {culprit}"])
    elif fault == "store_barrier":
        store.set(f"done.{RANK}", "1")
        store.wait([f"done.{rank}" for rank in range(SIZE)])
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    collectives = ["all_reduce", "broadcast", "barrier", "all_gather_object", "monitored_barrier"]
    others = ["recv", "recv_any", "send", "group", "init", "new_group", "once"]
    stores = ["store", "store_barrier", "store_step"]
    parser.add_argument("--fault", choices=[*collectives, *others, *stores, "size", "dtype"])
    parser.add_argument("--fault-rank", type=int, default=2)
    options = parser.parse_args()
    fault = options.fault
    if fault == "once" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        fault = None
    if fault == "init" and RANK == options.fault_rank:
        evaluate_forever()
    dist.init_process_group("gloo", rank=RANK, world_size=SIZE)
    halves = [dist.new_group(list(range(half, SIZE, 2))) for half in range(2)]
    group = halves[RANK % 2]
    rarer_collectives()
    for step in range(options.steps):
        train_step(step, group)
    if fault:
        fail(fault, options.fault_rank, group)
    dist.barrier()
    # One write, so that the lines of the ranks do not mix.
    print(f"rank {RANK} done\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
