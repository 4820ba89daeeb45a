"""Ranks of a PyTorch job on the (simulated) GPU with ProcessGroupNCCL: parts that train or
communicate, then perhaps a fault.

    run_ranks.py --nproc 4 torch_cuda.py --parts ddp fsdp2 --fault ddp --fault-rank 2

What NCCL moves is right and is checked; the kernels of a simulated device compute nothing, so
losses mean nothing, and all_gather_object, which takes a maximum on the device, cannot be used.
Faults, on --fault-rank, in the middle of the steps: `ddp`, `fsdp2`: it does not reach a step;
`tensor_parallel`: it stays away from its tensor-parallel group, on which the others wait in a
chain; `pipeline`: it does not send what the next stage receives; `skip`: it leaves out one
all_reduce and goes on; `shapes`: it leaves out one bucket of another size; `exception`: it raises;
`once`: as `ddp`, but only before the first restart; `sharded`: it does not reach a step of FSDP
over tensor parallelism; `objects`: it stays away from an all_gather_object on gloo; `checkpoint`:
its part of a checkpoint cannot be written.
"""

import argparse
import datetime
import gc
import os
import signal
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
PARTS = ["ddp", "autocast", "fsdp1", "fsdp2", "graph", "collectives", "point_to_point", "groups", "compiled", "measured"]
PARTS += ["sharded", "objects", "checkpoint"]
FAULTS = ["ddp", "fsdp2", "tensor_parallel", "pipeline", "skip", "shapes", "exception", "once", "sharded", "objects", "checkpoint"]


def say(line):
    """Prints a line in one write, so that the lines of the ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def wait_for_shard():
    """The fault: this rank leaves its collectives."""
    signal.pause()


def full(count, value):
    """Filled on the host, because a kernel would fill nothing."""
    return torch.full((count,), float(value)).cuda()


def check(what, tensor, expected):
    torch.cuda.synchronize()
    found = tensor.cpu().tolist()
    if found != expected:
        raise ArithmeticError(f"{what}: {found}, not {expected}")


def model():
    # The first bucket of gradients takes 1 MiB: each of these layers fills one.
    layers = [torch.nn.Linear(64, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 64)]
    return torch.nn.Sequential(*layers).cuda()


def train(network, options, part, autocast=False):
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(options.steps):
        if step == options.steps // 2 and part in options.faults:
            if options.fault == "exception":
                raise ValueError("the loss is not a number")
            wait_for_shard()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = network(torch.ones(32, 64).cuda()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


def ddp(options):
    train(DistributedDataParallel(model()), options, "ddp")


def autocast(options):
    train(DistributedDataParallel(model()), options, "autocast", autocast=True)


def fsdp1(options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    train(FullyShardedDataParallel(model()), options, "fsdp1")


def fsdp2(options):
    from torch.distributed.fsdp import fully_shard

    network = model()
    for layer in (network[0], network[2]):
        fully_shard(layer)
    fully_shard(network)
    train(network, options, "fsdp2")


def graph(options):
    values = full(256, 1)
    # NCCL connects at its first use, which a capture forbids.
    dist.all_reduce(values)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        dist.all_reduce(values)
    for _ in range(options.steps):
        captured.replay()
    check("a captured all_reduce", values[:1], [float(SIZE ** (1 + options.steps))])


def collectives(options):
    total = SIZE * (SIZE + 1) / 2
    for _ in range(options.steps):
        values = full(4, RANK + 1)
        dist.all_reduce(values)
        check("all_reduce", values, [total] * 4)
        dist.broadcast(values := full(4, RANK), src=1)
        check("broadcast", values, [1.0] * 4)
        dist.reduce(values := full(4, RANK + 1), dst=2)
        check("reduce", values, [total if RANK == 2 else RANK + 1.0] * 4)
        dist.all_gather_into_tensor(gathered := full(SIZE, -1), full(1, RANK))
        check("all_gather_into_tensor", gathered, [float(rank) for rank in range(SIZE)])
        dist.reduce_scatter_tensor(part := full(2, -1), full(2 * SIZE, RANK + 1))
        check("reduce_scatter_tensor", part, [total] * 2)
        dist.all_to_all_single(received := full(SIZE, -1), full(SIZE, RANK))
        check("all_to_all_single", received, [float(rank) for rank in range(SIZE)])
        dist.gather(full(1, RANK), parts := [full(1, -1) for _ in range(SIZE)] if RANK == 0 else None, dst=0)
        if RANK == 0:
            check("gather", torch.cat([part.cpu() for part in parts]), [float(rank) for rank in range(SIZE)])
        dist.scatter(part := full(1, -1), [full(1, rank) for rank in range(SIZE)] if RANK == 1 else None, src=1)
        check("scatter", part, [float(RANK)])
        dist.barrier()


def point_to_point(options):
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for _ in range(options.steps):
        token = full(2, -1)
        if RANK % 2 == 0:
            dist.isend(full(2, RANK), right).wait()
        else:
            dist.irecv(token, left).wait()
            check("irecv", token, [float(left)] * 2)
        token = full(2, -1)
        both = [dist.P2POp(dist.isend, full(2, RANK), right), dist.P2POp(dist.irecv, token, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        check("batch_isend_irecv", token, [float(left)] * 2)


def mesh():
    """Ranks in rows of two: the tensor-parallel groups are the rows, the data-parallel ones the
    columns."""
    grid = init_device_mesh("cuda", (SIZE // 2, 2), mesh_dim_names=("dp", "tp"))
    return grid["tp"].get_group(), grid["dp"].get_group()


def groups(options):
    tensor_parallel, data_parallel = mesh()
    halves = [dist.new_group(list(range(half, SIZE, 2))) for half in range(2)]
    row, column = range(RANK // 2 * 2, RANK // 2 * 2 + 2), range(RANK % 2, SIZE, 2)
    for _ in range(options.steps):
        for group, members in ((tensor_parallel, row), (data_parallel, column), (halves[RANK % 2], column)):
            dist.all_reduce(values := full(2, RANK), group=group)
            check("the sum of a group", values, [float(sum(members))] * 2)


def compiled(options):
    """A function through Inductor, which launches by itself, and a kernel of Triton's own."""
    import triton

    from torch_kernel import double

    function = torch.compile(lambda left, right: torch.nn.functional.gelu(left * 2 + right).sum(-1))
    values, result = torch.ones(64, 256).cuda(), torch.ones(1024).cuda()
    for _ in range(options.steps):
        function(values, values)
        double[(triton.cdiv(1024, 128),)](result, 1024, BLOCK=128)
    torch.cuda.synchronize()


def sharded(options):
    """Tensor parallelism within rows of ranks, and FSDP over the columns."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid = init_device_mesh("cuda", (SIZE // 2, 2), mesh_dim_names=("dp", "tp"))
    network = model()
    parallelize_module(network, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(network, mesh=grid["dp"])
    train(network, options, "sharded")


def objects(options):
    """Python objects between the steps, through a group of gloo beside that of NCCL."""
    group = dist.new_group(backend="gloo")
    for step in range(options.steps):
        if step == options.steps // 2 and "objects" in options.faults:
            wait_for_shard()
        losses = [None] * SIZE
        dist.all_gather_object(losses, {"rank": RANK, "loss": "x" * RANK}, group=group)
        if losses != [{"rank": rank, "loss": "x" * rank} for rank in range(SIZE)]:
            raise ArithmeticError(f"the losses are {losses}")
        received = [{"step": step}] if RANK == 0 else [None]
        dist.broadcast_object_list(received, src=0, group=group)
        if received != [{"step": step}]:
            raise ArithmeticError(f"what rank 0 sent is {received}")
        dist.monitored_barrier(group)
        dist.all_reduce(values := full(4, 1))
        check("all_reduce", values, [float(SIZE)] * 4)


def checkpoint(options):
    """Checkpoints that are written beside the training, each rank its part; with the fault one
    rank's is a pipe that nobody reads."""
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    network = model()
    fully_shard(network)
    group = dist.new_group(backend="gloo")
    folder = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "checkpoint")
    if "checkpoint" in options.faults:
        os.makedirs(folder, exist_ok=True)
        os.mkfifo(os.path.join(folder, f"__{RANK}_0.distcp"))
    dist.barrier()
    saving = checkpoint.async_save({"model": network.state_dict()}, checkpoint_id=folder, process_group=group)
    train(network, options, "beside a checkpoint")
    saving.result()


def measured(options):
    """Batches of a data loader through DDP in half precision, and collectives whose sizes are
    known, in a type that nothing else has. In the last batch the rank says what it has counted
    itself, and rests forever."""
    from torch.utils.data import DataLoader, TensorDataset

    network = DistributedDataParallel(model())
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE

    def own(count):
        return torch.ones(count, dtype=torch.float64).cuda()

    loader = DataLoader(TensorDataset(torch.ones(32 * options.steps, 64)), batch_size=32, num_workers=1)
    for step, (batch,) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = network(batch.cuda()).sum()
        loss.backward()
        dist.all_reduce(own(32768))
        dist.broadcast(own(32768), src=1)
        dist.reduce(own(32768), dst=2)
        dist.all_gather_into_tensor(own(8192 * SIZE), own(8192))
        dist.reduce_scatter_tensor(own(8192), own(8192 * SIZE))
        dist.all_to_all_single(own(8192 * SIZE), own(8192 * SIZE))
        both = [dist.P2POp(dist.isend, own(32768), right), dist.P2POp(dist.irecv, own(32768), left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        torch.cuda.synchronize()
        if step == options.steps - 1:
            gc.collect()
            gc.disable()
            collected = sum(generation["collections"] for generation in gc.get_stats())
            say(f"rank {RANK} counted {collected} {step + 1}")
            wait_for_shard()


def lose(options):
    """The faults outside of a training loop."""
    fault, mine = options.fault, RANK == options.fault_rank
    if fault == "tensor_parallel":
        tensor_parallel, data_parallel = mesh()
        for step in range(options.steps):
            if mine and step == options.steps // 2:
                wait_for_shard()
            dist.all_reduce(full(64, 1), group=tensor_parallel)
            dist.all_reduce(full(32, 1), group=data_parallel)
            torch.cuda.synchronize()
    elif fault == "pipeline":
        for step in range(options.steps):
            if RANK > 0:
                dist.recv(full(64, 0), RANK - 1)
            if mine and step == options.steps // 2:
                wait_for_shard()
            if RANK < SIZE - 1:
                dist.send(full(64, 1), RANK + 1)
            torch.cuda.synchronize()
    elif fault in ("skip", "shapes"):
        for step in range(options.steps):
            for bucket in (64, 32):
                left_out = mine and step == options.steps // 2 and (fault == "skip" or bucket == 32)
                if not (left_out and (fault == "shapes" or bucket == 64)):
                    dist.all_reduce(full(64 if fault == "skip" else bucket, 1))
            torch.cuda.synchronize()
        dist.all_gather_into_tensor(full(SIZE, 0), full(1, 1))
        torch.cuda.synchronize()


def join(options):
    """All ranks meet before the first call of the device. Otherwise a slow start of one rank would
    make the others wait in NCCL."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    settings = {"device_id": torch.device("cuda", int(os.environ["LOCAL_RANK"]))}
    if options.timeout:
        settings["timeout"] = datetime.timedelta(seconds=options.timeout)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, SIZE, RANK == 0, wait_for_workers=True)
        settings.update(store=store, rank=RANK, world_size=SIZE)
    dist.init_process_group("nccl", **settings)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--fault-rank", type=int, default=2)
    parser.add_argument("--timeout", type=int, help="seconds until torch's own watchdog ends the rank; default 600")
    options = parser.parse_args()
    if options.fault == "once" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        options.fault = None
    in_training = {"ddp": "ddp", "exception": "ddp", "once": "ddp"}.get(options.fault, options.fault)
    options.faults = [in_training] if RANK == options.fault_rank else []
    join(options)
    for part in options.parts:
        globals()[part](options)
        say(f"rank {RANK} {part}")
    lose(options)
    dist.barrier()
    torch.cuda.synchronize()
    say(f"rank {RANK} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
