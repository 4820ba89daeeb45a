"""PyTorch jobs on the CPU (gloo) that hang in a collective, a transfer, the store, or a helper.

    waits_gloo.py SCENARIO    starts the ranks of SCENARIO
    waits_gloo.py --list      lists the scenarios

SCENARIO is a function of this file, which every rank calls. All ranks train; then, after
`TROUBLE_STEP` steps, the trouble begins. The process that is to blame writes the truth into the
file XPU_HANGS_TRUTH just before.
"""

import ctypes
import datetime
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

TROUBLE_STEP = 40
FOREVER = datetime.timedelta(hours=1)
FORK = multiprocessing.get_context("fork")
SCENARIOS = {}
if "RANK" in os.environ:
    # gloo looks up the host name otherwise, which a container may not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)


def scenario(ranks=2):
    def register(function):
        SCENARIOS[function.__name__] = (function, ranks)
        return function

    return register


def die_with_parent():
    """PR_SET_PDEATHSIG"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def path(name):
    return os.path.join(os.environ.get("XPU_EXAMPLE_RENDEZVOUS", "."), name)


def blame(pids, causes, place):
    if target := os.environ.get("XPU_HANGS_TRUTH"):
        truth = {"hang": True, "culprits": list(pids), "causes": list(causes), "place": place}
        with open(f"{target}.{os.getpid()}", "w") as file:
            json.dump(truth, file)
        os.replace(f"{target}.{os.getpid()}", target)


def stand(trouble, *causes):
    """This process alone is to blame; it stays in the function `trouble` from now on."""
    blame([os.getpid()], causes, trouble.__name__)
    trouble()


def back_off():
    """The remote shard is gone, but the code retries forever."""
    while not os.path.exists(path("shard-that-nobody-writes")):
        time.sleep(1)


def wait_for_quota():
    threading.Event().wait()


def evict_entries():
    """Takes a lock that is not reentrant twice."""
    entries_lock = threading.Lock()
    with entries_lock:
        with entries_lock:
            return


def ask_licence_server():
    """The server accepts the connection in its backlog and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(listener.getsockname()).recv(1)


class Job:
    def __init__(self):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), self.world, self.rank == 0, FOREVER)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=FOREVER)
        self.model = torch.nn.Linear(64, 64)
        self.store.set(f"pid.{self.rank}", str(os.getpid()))

    def pid(self, rank):
        return int(self.store.get(f"pid.{rank}"))

    def train_step(self):
        self.model(torch.rand(256, 64)).sum().backward()
        dist.all_reduce(self.model.weight.grad)
        self.model.zero_grad()
        time.sleep(0.04)

    def warm_up(self):
        for _ in range(TROUBLE_STEP):
            self.train_step()

    def train(self, trouble=None):
        """Trains forever; the trouble comes before one of the steps."""
        self.warm_up()
        if trouble:
            trouble()
        while True:
            self.train_step()


# Collectives that do not fit.


@scenario(ranks=3)
def root_differs(job):
    """Rank 2 broadcasts from another root than ranks 0 and 1."""

    def sync_weights():
        if job.rank == 2:
            blame([os.getpid()], ["op_mismatch"], "sync_weights")
        dist.broadcast(torch.zeros(1 << 16), src=2 if job.rank == 2 else 0)

    job.train(sync_weights)


@scenario(ranks=3)
def recv_instead_of_gather(job):
    """Ranks 0 and 2 gather the losses, and rank 1 waits for a tensor from rank 0 instead."""

    def gather_losses():
        if job.rank == 1:
            blame([os.getpid()], ["op_mismatch", "p2p_unmatched", "missing_rank"], "gather_losses")
            return dist.recv(torch.zeros(8), 0)
        dist.gather(torch.zeros(8), [torch.zeros(8) for _ in range(job.world)] if job.rank == 0 else None)

    job.train(gather_losses)


@scenario(ranks=3)
def scatter_root_absent(job):
    """Ranks 1 and 2 wait in scatter for the root, rank 0, which takes its own lock twice."""

    def scatter_batches():
        if job.rank == 0:
            stand(evict_entries, "host_lock", "missing_rank")
        dist.scatter(torch.zeros(8), src=0)

    job.train(scatter_batches)


@scenario(ranks=3)
def object_collective_absent(job):
    """Ranks 0 and 1 gather objects, and rank 2 waits for its licence server."""

    def gather_metrics():
        if job.rank == 2:
            stand(ask_licence_server, "missing_rank")
        dist.all_gather_object([None] * job.world, {"loss": 0.1})

    job.train(gather_metrics)


@scenario(ranks=3)
def broadcast_objects_absent(job):
    """Rank 0, which broadcasts a list of objects, retries forever before it does."""

    def share_config():
        if job.rank == 0:
            stand(back_off, "missing_rank")
        dist.broadcast_object_list([None, None], src=0)

    job.train(share_config)


@scenario(ranks=3)
def monitored_barrier_absent(job):
    """Ranks 0 and 1 are in a monitored barrier, and rank 2 waits for an event of its own."""

    def check_ranks():
        if job.rank == 2:
            stand(wait_for_quota, "host_lock", "missing_rank")
        dist.monitored_barrier(timeout=FOREVER)

    job.train(check_ranks)


@scenario(ranks=3)
def all_to_all_absent(job):
    """Tokens go from all ranks to all ranks; rank 1 is stopped by SIGSTOP before it takes part."""

    def dispatch_tokens():
        if job.rank == 1:
            blame([os.getpid()], ["process_stopped"], "dispatch_tokens")
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_to_all_single(torch.zeros(job.world * 8), torch.zeros(job.world * 8))

    job.train(dispatch_tokens)


@scenario(ranks=3)
def barrier_skipped(job):
    """Rank 1 leaves out the barrier at the end of the epoch, and is in the next step."""

    def end_epoch():
        if job.rank == 1:
            return blame([os.getpid()], ["missing_rank", "op_mismatch"], "train_step")
        dist.barrier()

    job.train(end_epoch)


# Groups.


@scenario(ranks=3)
def new_group_on_subset(job):
    """Ranks 0 and 1 make a group of theirs. Rank 2, which must also call new_group, trains on."""

    def make_group():
        if job.rank == 2:
            return
        blame([job.pid(2)], ["comm_init", "missing_rank", "op_mismatch"], "train_step")
        dist.new_group([0, 1], FOREVER)

    job.train(make_group)


@scenario(ranks=3)
def subgroup_member_absent(job):
    """Rank 0 waits in a group of two for rank 1, which reads from an empty pipe; rank 2 waits for
    both in the next collective."""
    group = dist.new_group([0, 1], FOREVER)

    def read_schedule():
        reading, writing = os.pipe()
        os.read(reading, writing)

    def reduce_in_group():
        if job.rank == 1:
            stand(read_schedule, "storage_io", "missing_rank")
        if job.rank == 0:
            dist.all_reduce(torch.zeros(8), group=group)

    job.train(reduce_in_group)


@scenario(ranks=3)
def groups_in_two_orders(job):
    """Rank 1 uses two groups in the wrong order."""
    groups = [dist.new_group([0, 1, 2], FOREVER) for _ in range(2)]

    def reduce_groups():
        if job.rank == 1:
            blame([os.getpid()], ["order_mismatch"], "reduce_groups")
        for group in groups[::-1] if job.rank == 1 else groups:
            dist.all_reduce(torch.zeros(8), group=group)

    job.train(reduce_groups)


# Transfers.


@scenario(ranks=2)
def isend_unpaired(job):
    """Rank 0 waits for a large isend that rank 1 never receives, because it waits in the next
    collective: rank 0 sends once too often."""

    def send_activations():
        blame([os.getpid()], ["p2p_unmatched"], "send_activations")
        dist.isend(torch.zeros(1 << 24), 1).wait()

    job.train(send_activations if job.rank == 0 else None)


@scenario(ranks=3)
def irecv_unpaired(job):
    """Rank 1 waits for an irecv from rank 2, which never sends: rank 1 receives once too often."""

    def receive_activations():
        blame([os.getpid()], ["p2p_unmatched"], "receive_activations")
        dist.irecv(torch.zeros(8), 2).wait()

    job.train(receive_activations if job.rank == 1 else None)


@scenario(ranks=2)
def tag_off_by_one(job):
    """Rank 1 receives with the wrong tag in one step."""
    halo = torch.zeros(1 << 20)

    def exchange_halo(tag=7):
        if job.rank == 0:
            dist.isend(halo, 1, tag=7).wait()
        else:
            dist.recv(halo, 0, tag=tag)

    for _ in range(TROUBLE_STEP):
        exchange_halo()
        job.train_step()
    if job.rank == 1:
        blame([os.getpid()], ["p2p_unmatched"], "exchange_halo")
    exchange_halo(tag=8)
    job.train()


@scenario(ranks=3)
def receives_in_ring(job):
    """Every rank receives from its left before it sends to its right: all are to blame."""

    def rotate_blocks():
        if job.rank == 0:
            blame([job.pid(rank) for rank in range(job.world)], ["p2p_cycle"], "rotate_blocks")
        dist.recv(torch.zeros(8), (job.rank - 1) % job.world)
        dist.send(torch.zeros(8), (job.rank + 1) % job.world)

    job.train(rotate_blocks)


# The store.


@scenario(ranks=3)
def store_key_of_stuck_rank(job):
    """Rank 0 waits for a key of the store that rank 2 sets after it has its quota, which never
    comes; rank 1 waits for both."""

    def wait_for_shards():
        job.store.get("shards")

    def publish_shards():
        stand(wait_for_quota, "host_lock", "missing_rank")
        job.store.set("shards", "1")

    job.train({0: wait_for_shards, 2: publish_shards}.get(job.rank))


@scenario(ranks=2)
def store_key_misspelled(job):
    """Rank 1 waits for a key that nobody sets."""

    def wait_for_dataset():
        job.store.wait(["dataset-raedy"], FOREVER)

    job.train((lambda: stand(wait_for_dataset, "missing_rank", "comm_init")) if job.rank == 1 else None)


@scenario(ranks=3)
def final_store_barrier(job):
    """The training is over, and ranks 0 and 2 wait for a key of rank 1 in the store; rank 1 waits
    for a lock on the checkpoint that it has already taken."""

    def save_checkpoint():
        for _ in range(2):
            fcntl.flock(os.open(path("checkpoint.lock"), os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)

    job.warm_up()
    if job.rank == 1:
        stand(save_checkpoint, "storage_io", "teardown", "missing_rank", "host_lock")
    job.store.set(f"done.{job.rank}", "1")
    job.store.wait([f"done.{rank}" for rank in range(job.world)], FOREVER)


# DistributedDataParallel, and children.


@scenario(ranks=2)
def uneven_inputs(job):
    """Rank 1 has fewer batches than rank 0, and waits for the next epoch in a retry loop, while
    rank 0 reduces its gradients."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    batches = TROUBLE_STEP if job.rank == 1 else 1 << 20
    for _ in range(batches):
        model(torch.rand(256, 64)).sum().backward()
        time.sleep(0.04)
    stand(back_off, "missing_rank")


@scenario(ranks=2)
def recv_beside_gradients(job):
    """Rank 1 waits for a score that rank 0 never sends; rank 0 reduces its gradients."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))

    def receive_score():
        dist.recv(torch.zeros(8), 0)

    for step in range(1 << 20):
        if job.rank == 1 and step == TROUBLE_STEP:
            stand(receive_score, "p2p_unmatched", "missing_rank")
        model(torch.rand(256, 64)).sum().backward()
        time.sleep(0.04)


@scenario(ranks=2)
def child_inherits_group(job):
    """Rank 1 waits for its forked child, which hangs in a collective of the process group that it
    inherited, because the threads of gloo do not exist in the child."""

    def reduce_in_child():
        die_with_parent()
        blame([os.getpid()], ["missing_rank", "host_lock"], "reduce_in_child")
        dist.all_reduce(torch.zeros(8))

    def evaluate_in_child():
        child = FORK.Process(target=reduce_in_child, name="evaluation")
        child.start()
        child.join()

    job.train(evaluate_in_child if job.rank == 1 else None)


def load_batches(batches):
    die_with_parent()
    for number in range(TROUBLE_STEP):
        batches.put(number)
    time.sleep(0.2)
    stand(evict_entries, "data_loader", "host_lock")


@scenario(ranks=3)
def loader_behind_rank(job):
    """Rank 0 waits for its loader process, which takes its own lock twice."""
    if job.rank != 0:
        return job.train()
    batches = FORK.Queue(2)
    FORK.Process(target=load_batches, args=(batches,), name="loader-0", daemon=True).start()

    def next_batch():
        return batches.get()

    while True:
        next_batch()
        job.train_step()


@scenario(ranks=3)
def rank_killed(job):
    """Rank 2 is killed by the kernel, and the others wait for a key that it would set."""

    def publish_result():
        blame([os.getpid()], ["process_dead"], None)
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_result():
        job.store.wait(["result"], FOREVER)

    job.warm_up()
    publish_result() if job.rank == 2 else wait_for_result()


def launch(size):
    """Starts the ranks of a scenario, as torchrun does, and waits for them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(size):
        variables = dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, MASTER_PORT=port)
        environment = dict(os.environ, **{key: str(value) for key, value in variables.items()})
        program = [sys.executable, os.path.abspath(__file__), sys.argv[1]]
        ranks.append(subprocess.Popen(program, env=environment, preexec_fn=die_with_parent))
    for rank in ranks:
        rank.wait()


def main():
    name = sys.argv[1]
    if name == "--list":
        for listed in SCENARIOS:
            print(listed, "hang 0")
    elif "RANK" in os.environ:
        SCENARIOS[name][0](Job())
    else:
        launch(SCENARIOS[name][1])


if __name__ == "__main__":
    main()
