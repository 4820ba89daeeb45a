"""Ranks of a PyTorch job whose NCCL runs on a real GPU, and ways in which it hangs.

All ranks may share one device: NCCL refuses that within one host, so each rank names a host of its
own and NCCL connects them through sockets.

    run_ranks.py --nproc 3 ranks.py --fault kernel

Faults, on rank 1 at step 5: `kernel`: a kernel that does not end; `absent`: the rank reads a pipe
that nobody writes; `killed`, `stopped`: it sends itself that signal; `order`: it broadcasts where
the others sum; `size`: it sums half as many elements; `skip`: it leaves out one sum and goes on;
`receive`: it receives what rank 0 never sends; `subgroup`: it stays away from the group of ranks 1
and 2; `lock`: it waits for a lock that its own thread holds; `init`: it never makes its
communicator; `graph`: it does not replay its graph, which sums; `raise`: it raises an exception;
`memory`: it reads memory that is not its own, so its device fails.
"""

import argparse
import datetime
import os
import signal
import sys
import threading

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["NCCL_HOSTID"] = str(RANK)
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

ENDLESS = 1 << 60  # clock cycles of torch's own busy kernel: decades


def say(line):
    """Prints a line in one write, so that the lines of the ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read_shard():
    reading, _writing = os.pipe()
    os.read(reading, 1)


def wait_for_own_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def all_reduce(count=1024, group=None):
    values = torch.full((count,), float(RANK)).cuda()  # filled on the host: a simulated device fills nothing
    dist.all_reduce(values, group=group)
    return values


def go_wrong(fault):
    """What rank 1 does at the step of the fault, in place of its sum."""
    if fault == "kernel":
        torch.cuda._sleep(ENDLESS)
        all_reduce()
    elif fault == "absent":
        read_shard()
    elif fault == "lock":
        wait_for_own_lock()
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("the loss is not a number")
    elif fault == "order":
        dist.broadcast(torch.zeros(1024, device="cuda"), src=0)
    elif fault == "size":
        all_reduce(512)
    elif fault == "receive":
        dist.recv(torch.zeros(64, device="cuda"), src=0)
    elif fault == "memory":
        torch.zeros(8, device="cuda")[torch.full((8,), 1 << 40, device="cuda")]
        torch.cuda.synchronize()


def train(steps, fault):
    mine = fault if RANK == 1 else None
    group = dist.new_group([1, 2]) if SIZE > 2 else None
    if group is not None and RANK in (1, 2):
        all_reduce(group=group)
    layer = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    for step in range(steps):
        layer(torch.ones(64, 256, device="cuda")).sum().backward()
        if fault == "subgroup" and step == 5 and RANK in (1, 2):
            read_shard() if RANK == 1 else all_reduce(group=group)
        if step == 5 and mine not in (None, "skip", "subgroup", "graph"):
            go_wrong(mine)
        elif not (step == 5 and mine == "skip"):
            values = all_reduce()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if fault != "skip" and not (step == 5 and mine) and values[0].item() != SIZE * (SIZE - 1) / 2:
            raise ArithmeticError(f"step {step}: the sum is {values[0].item()}")
        if RANK == 0 and step % 5 == 0:
            say(f"step {step}")
    if fault == "skip":
        dist.all_gather_into_tensor(torch.zeros(SIZE, device="cuda"), torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()


def replay(steps, fault):
    values = torch.zeros(256, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values += 1
        dist.all_reduce(values)
    for step in range(steps):
        if RANK == 1 and step == 5 and fault == "graph":
            read_shard()
        graph.replay()
        torch.cuda.synchronize()
    say(f"rank {RANK} replayed {steps}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fault")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=30))
    if options.fault == "init" and RANK == 1:
        read_shard()
    all_reduce()
    torch.cuda.synchronize()
    say(f"rank {RANK} begins")
    if options.fault != "graph":
        train(options.steps, options.fault)
    replay(options.steps, options.fault)
    dist.barrier()
    say(f"rank {RANK} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
