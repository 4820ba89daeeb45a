"""Starts the ranks of one node, as torchrun does, and waits for all of them.

    run_ranks.py --nproc 4 train.py --steps 100

Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. SIGTERM and SIGINT go on to the ranks. A
rank that ends does not end the others: that is what the hang tests need. The exit status is 1 when
any rank failed.
"""

import argparse
import os
import signal
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    ranks = []
    for rank in range(options.nproc):
        environment = dict(
            os.environ,
            RANK=str(rank),
            WORLD_SIZE=str(options.nproc),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(options.nproc),
        )
        command = [sys.executable, options.script, *options.arguments]
        ranks.append(subprocess.Popen(command, env=environment))

    def forward(number, _frame):
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    return 1 if any([rank.wait() != 0 for rank in ranks]) else 0


if __name__ == "__main__":
    sys.exit(main())
