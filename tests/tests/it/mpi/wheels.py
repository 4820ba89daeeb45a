"""Four ranks of mpi4py; rank 2 stays away from the call that is named.

`bcast` and `gather` send objects of Python by the small letters of mpi4py. The other calls are
those of a ring, where each rank has its two neighbours.
"""

import sys
import time
from array import array

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
LEFT, RIGHT = (RANK + 3) % 4, (RANK + 1) % 4
OWN, FOUND = array("d", [RANK] * 4), array("d", [-1] * 8)
HALVES, PLACES, BYTES, TYPES = [2, 2], [0, 2], [0, 16], [MPI.DOUBLE] * 2


def stay_away():
    while True:
        time.sleep(0.5)


def objects(call):
    for turn in range(10):
        assert WORLD.allreduce(RANK) == 6
        assert WORLD.bcast({"turn": turn} if RANK == 1 else None, root=1) == {"turn": turn}
        assert WORLD.gather("x" * RANK, root=0) == (["", "x", "xx", "xxx"] if RANK == 0 else None)
        assert WORLD.allgather((RANK, turn))[3] == (3, turn)
        assert WORLD.scatter([1, 2, 3, 4] if RANK == 2 else None, root=2) == RANK + 1
        assert WORLD.sendrecv([RANK], dest=RIGHT, source=LEFT) == [LEFT]
        WORLD.barrier()
    if RANK == 2:
        stay_away()
    getattr(WORLD, call)(RANK, root=1)
    WORLD.barrier()


def exchange():
    WORLD.Isendrecv(OWN, RIGHT, 3, FOUND, LEFT, 3).Wait()
    assert FOUND[0] == LEFT


def prepared(call):
    """What starts such a collective on the ring, and waits for it."""
    ring = WORLD.Create_cart([4], periods=[True])
    both = [[OWN, HALVES, PLACES, MPI.DOUBLE], [FOUND, HALVES, PLACES, MPI.DOUBLE]]
    buffers = {
        "allgather": [OWN, FOUND],
        "allgatherv": [OWN, [FOUND, [4, 4], [0, 4], MPI.DOUBLE]],
        "alltoall": [OWN, memoryview(FOUND)[:4]],
        "alltoallv": both,
        "alltoallw": [[OWN, HALVES, BYTES, TYPES], [FOUND, HALVES, BYTES, TYPES]],
    }
    request = getattr(ring, f"Neighbor_{call}_init")(*buffers[call])

    def start():
        request.Start()
        request.Wait()
        assert FOUND[0] == LEFT

    return start


def shown():
    """What shows a window to the rank on the left, writes into that of the rank on the right, and
    asks until both are done.
    """
    window = MPI.Win.Create(FOUND, disp_unit=8, comm=WORLD)
    group = WORLD.Get_group()
    left, right = group.Incl([LEFT]), group.Incl([RIGHT])

    def turn():
        window.Post(left)
        window.Start(right)
        window.Put(OWN, RIGHT)
        window.Complete()
        while not window.Test():
            time.sleep(0.001)
        assert FOUND[0] == LEFT

    return turn


def neighbours(call):
    turn = {"exchange": lambda: exchange, "window": shown}.get(call, lambda: prepared(call))()
    for _ in range(10):
        turn()
    if RANK == 2:
        stay_away()
    turn()
    WORLD.Barrier()


def main():
    call = sys.argv[1]
    if call in ("bcast", "gather"):
        objects(call)
    else:
        neighbours(call)


main()
