"""Four ranks in a ring, each with its two neighbours; rank 2 stays away from the call that is named."""

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
    """What shows a window to the rank on the left, writes into that of the rank on the right, and asks until both are done."""
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


def main():
    call = sys.argv[1]
    turn = {"exchange": lambda: exchange, "window": shown}.get(call, lambda: prepared(call))()
    for _ in range(10):
        turn()
    if RANK == 2:
        stay_away()
    turn()
    WORLD.Barrier()


main()
