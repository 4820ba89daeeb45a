"""Small jobs of PyTorch on gloo, written without knowledge of the judge's rules.

    blind_gloo.py JOB RANK

JOB is a function of this file. Its trouble begins on that rank in step 9.
"""

import ctypes
import datetime
import gc
import os
import socket
import sys
import threading
import time

# gloo looks up the host name otherwise, which a container may not know.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist

TROUBLE_STEP = 9
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MINE = RANK == int(sys.argv[2])


def steps():
    """The numbers of the steps, each with whether the trouble begins in it on this rank; after
    each, gradients are summed."""
    gradients = torch.ones(64)
    for step in range(1 << 20):
        yield step, MINE and step == TROUBLE_STEP
        dist.all_reduce(gradients)


def group_without_one():
    """All ranks but one create another group of all ranks; the one continues."""
    for step, here in steps():
        if step == TROUBLE_STEP and not here:
            dist.new_group(list(range(SIZE)))


def pair_for_half():
    """One rank sums with its neighbour what it should sum with every second rank."""
    halves = [dist.new_group(list(range(start, SIZE, 2))) for start in (0, 1)]
    pairs = [dist.new_group([first, first + 1]) for first in range(0, SIZE, 2)]
    for step, here in steps():
        if step >= TROUBLE_STEP:
            dist.all_reduce(torch.ones(4), group=pairs[RANK // 2] if here else halves[RANK % 2])


def objects():
    """One rank gathers its metrics as an object."""
    for _step, here in steps():
        if here:
            dist.all_gather_object([None] * SIZE, {"loss": 1.0})


def lost_of_batch():
    """A batch of sends and receives round a ring, in which one send is missing."""
    received = torch.zeros(16)
    for _step, here in steps():
        right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        sends = [] if here else [dist.P2POp(dist.isend, torch.ones(16), right)]
        for work in dist.batch_isend_irecv([*sends, dist.P2POp(dist.irecv, received, left)]):
            work.wait()


def from_anybody():
    """Rank 0 receives from any rank, and no rank sends."""
    for _step, here in steps():
        if here:
            dist.recv(torch.zeros(4))


def keeps_interpreter():
    """A thread waits in a C function that does not release the GIL."""
    for _step, here in steps():
        if here:
            threading.Thread(target=ctypes.PyDLL(None).pause, name="waiter", daemon=True).start()
            time.sleep(1)


def collects_garbage():
    """A rank repeatedly collects garbage on a large heap."""
    for _step, here in steps():
        if here:
            heap = [[number] for number in range(1 << 22)]
            while heap:
                gc.collect()


def other_port():
    """One rank looks for the store of the job at a port without a listener."""
    ports_file = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "ports")
    if RANK == 0:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        with open(f"{ports_file}.new", "w") as file:
            file.write(" ".join(str(each.getsockname()[1]) for each in sockets))
        for each in sockets:
            each.close()
        os.rename(f"{ports_file}.new", ports_file)
    while not os.path.exists(ports_file):
        time.sleep(0.01)
    with open(ports_file) as file:
        right, wrong = file.read().split()
    begin(f"tcp://127.0.0.1:{wrong if MINE else right}")
    for _step, _here in steps():
        pass


def begin(store):
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=SIZE, timeout=datetime.timedelta(hours=1))


if __name__ == "__main__":
    job = globals()[sys.argv[1]]
    if job is not other_port:
        begin(f"file://{os.environ['XPU_EXAMPLE_RENDEZVOUS']}/gloo")
    job()
