"""Ranks on the public CUDA and NCCL interfaces that end in every way, some of them right after
their first device call.

    run_ranks.py --nproc 4 ends.py --how exit --code 3
    ends.py --method fork --nproc 4 --how killed

Every rank sums twice. On --rank, at --moment `start` (after its first device call), `made` (after
the creation of the communicator) or `between` (the two sums), it goes: `exit` by sys.exit, `raise`
by an exception, `_exit` by os._exit, which runs no handler, `killed` and `abort` by a signal,
`stay` not at all. Without --how all ranks end as they should, `--how _exit` without a --rank lets
all leave at once after the first sum. With --method the program starts its ranks itself, as
torch.multiprocessing does.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import urllib.request


def wait_for_shard():
    signal.pause()


def known():
    """Waits until the collector knows this process. One that ends in the first milliseconds after
    its first device call may go before the hook's thread has had its turn to say hello, above all
    on a busy machine."""
    status = f"http://127.0.0.1:{os.environ['XPU_TIMER_BASEPORT']}/status"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(status, timeout=10) as answer:
            if any(rank["pid"] == os.getpid() for rank in json.load(answer)["ranks"]):
                return
        time.sleep(0.02)
    raise TimeoutError("the collector does not know this rank")


def go(options):
    if options.rank is not None or options.how == "raise":
        known()
    if options.how == "exit":
        sys.exit(options.code)
    if options.how == "_exit":
        os._exit(options.code)
    if options.how == "raise":
        raise ValueError("a bad sample")
    if options.how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.how == "abort":
        os.abort()
    if options.how == "stay":
        wait_for_shard()


def train(rank, options):
    # Only the rank loads the simulated device: a forked child cannot use that of its parent.
    import cuda

    def moment(name):
        if options.how and options.rank in (rank, None) and name == options.moment:
            go(options)

    cuda.set_device(rank)
    gradients = cuda.Buffer(64)
    moment("start")
    world = cuda.Communicator.create("world")
    stream = cuda.Stream()
    moment("made")
    for _ in range(2):
        world.all_reduce(gradients, stream)
        stream.synchronize()
        moment("between")
    sys.stdout.write(f"rank {rank} done\n")
    sys.stdout.flush()


def child(rank, options):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.nproc), LOCAL_WORLD_SIZE=str(options.nproc))
    train(rank, options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["exit", "raise", "_exit", "killed", "abort", "stay"])
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--rank", type=int, help="the rank that ends; default: all ranks")
    parser.add_argument("--moment", choices=["start", "made", "between"], default="between")
    parser.add_argument("--method", choices=["fork", "spawn", "forkserver"])
    parser.add_argument("--nproc", type=int, default=4)
    options = parser.parse_args()
    if options.method is None:
        return train(int(os.environ["RANK"]), options)
    context = multiprocessing.get_context(options.method)
    ranks = [context.Process(target=child, args=(rank, options)) for rank in range(options.nproc)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
