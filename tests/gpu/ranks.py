"""Ranks of a PyTorch job whose NCCL runs on a real GPU, and ways in which it hangs.

All ranks may share one device: NCCL refuses that within one host, so each rank names a host of its
own and NCCL connects them through sockets.

    run_ranks.py --nproc 3 ranks.py --fault kernel
    run_ranks.py --nproc 2 ranks.py --variety

Faults, on rank 1 at step 5: `kernel`: a kernel that does not end; `absent`: the rank reads a pipe
that nobody writes; `killed`, `stopped`: it sends itself that signal; `order`: it broadcasts where
the others sum; `size`: it sums half as many elements; `skip`: it leaves out one sum and goes on;
`receive`: it receives what rank 0 never sends; `subgroup`: it stays away from the group of ranks 1
and 2; `lock`: it waits for a lock that its own thread holds; `init`: it never makes its
communicator; `graph`: it does not replay its graph, which sums; `raise`: it raises an exception;
`memory`: it reads memory that is not its own, so its device fails; `segv`: a function in C reads
address 0.
"""

import argparse
import ctypes
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
    """The fault of rank 1, in place of its sum."""
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
    elif fault == "segv":
        ctypes.string_at(0)


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


def variety():
    """Most of what training jobs call: sharded parameters, messages, groups, an aborted group."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True).cuda()
    model = torch.nn.TransformerEncoder(layer, 3)
    for part in model.layers:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(10):
        loss = model(torch.ones(4, 64, 256, device="cuda")).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = [torch.isfinite(loss).item()]

    values, received = torch.full((4096,), float(RANK), device="cuda"), torch.empty(4096, device="cuda")
    for _ in range(5):
        there, here = dist.P2POp(dist.isend, values, (RANK + 1) % SIZE), dist.P2POp(dist.irecv, received, (RANK - 1) % SIZE)
        for work in dist.batch_isend_irecv([there, here]):
            work.wait()
    found.append(received[0].item() == (RANK - 1) % SIZE)

    parts = torch.full((SIZE * 8,), float(RANK), device="cuda")
    dist.all_to_all_single(torch.empty_like(parts), parts)
    dist.reduce_scatter_tensor(torch.empty(8, device="cuda"), parts)
    dist.broadcast_object_list([{"step": 1}] if RANK == 0 else [None])
    dist.all_gather_object([None] * SIZE, RANK)
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as coalesced:
        for _ in range(4):
            dist.all_reduce(values)
    coalesced.wait()

    for _ in range(3):  # communicators come and go
        pair = dist.new_group(list(range(SIZE)))
        dist.all_reduce(values, group=pair)
        torch.cuda.synchronize()
        dist.destroy_process_group(pair)
    aborted = dist.new_group(list(range(SIZE)))
    dist.all_reduce(values, group=aborted)
    torch.cuda.synchronize()
    dist.barrier()
    dist.distributed_c10d._abort_process_group(aborted)
    say(f"rank {RANK} variety {found}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fault")
    parser.add_argument("--variety", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=30))
    if options.fault == "init" and RANK == 1:
        read_shard()
    all_reduce()
    torch.cuda.synchronize()
    say(f"rank {RANK} begins")
    if options.variety:
        variety()
    if options.fault != "graph":
        train(options.steps, options.fault)
    replay(options.steps, options.fault)
    dist.barrier()
    say(f"rank {RANK} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
