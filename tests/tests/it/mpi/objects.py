"""Objects of Python between four ranks, by the small letters of mpi4py; rank 2 stays away from the call that is named."""

import sys
import time

from mpi4py import MPI


def stay_away():
    while True:
        time.sleep(0.5)


def main():
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    for turn in range(10):
        assert comm.allreduce(rank) == 6
        assert comm.bcast({"turn": turn} if rank == 1 else None, root=1) == {"turn": turn}
        assert comm.gather("x" * rank, root=0) == (["", "x", "xx", "xxx"] if rank == 0 else None)
        assert comm.allgather((rank, turn))[3] == (3, turn)
        assert comm.scatter([1, 2, 3, 4] if rank == 2 else None, root=2) == rank + 1
        assert comm.sendrecv([rank], dest=(rank + 1) % 4, source=(rank + 3) % 4) == [(rank + 3) % 4]
        comm.barrier()
    if rank == 2:
        stay_away()
    getattr(comm, sys.argv[1])(rank, root=1)
    comm.barrier()


main()
