"""Ranks of an MPI job in Python (mpi4py): rounds of collectives with checked results, then one rank
is missing.

    mpirun -n 4 python3 mpi_train.py --fault allreduce --fault-rank 2

Faults, on --fault-rank: it stays away from the collective of that name; `recv` and `wait`: it never
sends what the rank before it receives. Without a fault all rounds are run and the job ends.
"""

import argparse
import time

import numpy
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK = COMM.Get_rank()
SIZE = COMM.Get_size()


def train_step(step):
    """Sums gradients, agrees on a loss, and passes a token round."""
    gradients = numpy.full(1024, float(RANK + step))
    total = numpy.empty_like(gradients)
    COMM.Allreduce(gradients, total, op=MPI.SUM)
    if total[0] != SIZE * step + SIZE * (SIZE - 1) / 2:
        raise ArithmeticError(f"sum of the gradients is {total[0]}")
    losses = COMM.allgather({"rank": RANK, "loss": step})
    if [entry["rank"] for entry in losses] != list(range(SIZE)):
        raise ArithmeticError(f"losses are {losses}")
    token = COMM.sendrecv(("token", RANK), dest=(RANK + 1) % SIZE, source=(RANK - 1) % SIZE)
    if token != ("token", (RANK - 1) % SIZE):
        raise ArithmeticError(f"the token is {token}")
    COMM.Barrier()


def evaluate_forever():
    """The fault: this rank leaves its collectives."""
    while True:
        time.sleep(0.5)


def receive(source, wait):
    if wait:
        request = COMM.irecv(source=source, tag=5)
        return request.wait()
    return COMM.recv(source=source, tag=5)


def fail(fault, culprit):
    if RANK == culprit:
        evaluate_forever()
    elif fault == "allreduce":
        COMM.allreduce(RANK)
    elif fault == "Allreduce":
        COMM.Allreduce(numpy.zeros(8), numpy.zeros(8))
    elif fault == "bcast":
        COMM.bcast(None, root=culprit)
    elif fault == "gather":
        COMM.allgather(RANK)
    elif fault in ("recv", "wait") and RANK == (culprit - 1) % SIZE:
        receive(culprit, fault == "wait")
    COMM.Barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    faults = ["allreduce", "Allreduce", "bcast", "barrier", "gather", "recv", "wait"]
    parser.add_argument("--fault", choices=faults)
    parser.add_argument("--fault-rank", type=int, default=2)
    options = parser.parse_args()
    for step in range(options.steps):
        train_step(step)
    if options.fault:
        fail(options.fault, options.fault_rank)
    # One write, so that the lines of the ranks do not mix.
    print(f"rank {RANK} done\n", end="", flush=True)


if __name__ == "__main__":
    main()
