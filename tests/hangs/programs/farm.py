"""A master that hands out work to the other ranks over MPI, and sums what all have done after every
round (mpi4py).

`--wrong NAME@RANK` begins in round 6 on that rank: a function of troubles.py, `no_answer` (a worker
keeps its result), `no_sum`, or `quits`.
"""

import argparse
import time

import troubles
from mpi4py import MPI

WORK, RESULT = 11, 12
WRONG_ROUND = 6


def hand_out(comm, round_):
    for worker in range(1, comm.Get_size()):
        comm.send({"round": round_, "worker": worker}, dest=worker, tag=WORK)
    return sum(comm.recv(source=worker, tag=RESULT) for worker in range(1, comm.Get_size()))


def work(comm, wrong):
    task = comm.recv(source=0, tag=WORK)
    result = sum(task["worker"] * number for number in range(20000))
    if wrong != "no_answer":
        comm.send(result, dest=0, tag=RESULT)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1 << 20)
    parser.add_argument("--wrong", default="@-1")
    options = parser.parse_args()
    wrong, culprit = options.wrong.split("@")
    comm = MPI.COMM_WORLD
    for round_ in range(options.rounds):
        now = wrong if comm.Get_rank() == int(culprit) and round_ == WRONG_ROUND else ""
        if now in troubles.NAMES:
            troubles.begin(now)
        if now == "quits":
            raise SystemExit("out of budget")
        done = hand_out(comm, round_) if comm.Get_rank() == 0 else work(comm, now)
        if now != "no_sum":
            comm.allreduce(done)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
