"""Data-parallel training as a first script is written: one function, one communicator for
everything.

Every epoch has batches of gradients in two buckets, the loss of some steps summed on all ranks, the
rate that rank 0 decides, and a barrier. `--trouble NAME@RANK[+RANK...]` lets something go wrong
there in the third epoch.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import cuda
import troubles


def train(rank, world, options):
    mine = {name for name, ranks in options.trouble if rank in ranks}
    cuda.set_device(int(os.environ["LOCAL_RANK"]))
    comm = cuda.Communicator.create("plain", rank, world)
    compute, comms = cuda.Stream(), cuda.Stream()
    buckets = [cuda.Buffer(512), cuda.Buffer(128)]
    loss, rate, flag = cuda.Buffer(1), cuda.Buffer(2), cuda.Buffer(1)
    ready = cuda.Event(timing=False)
    forward, backward, step_kernel = (cuda.Kernel(name, 150) for name in ("mlp_fwd", "mlp_bwd", "sgd_step"))
    try:
        for epoch in range(options.epochs + ("one_more_epoch" in mine)):
            now = mine if epoch == 2 else set()
            batches = options.batches - 3 if "fewer_batches" in now else options.batches
            for batch in range(batches):
                here = now if batch == 5 else set()
                for name in here & troubles.NAMES:
                    troubles.begin(name)
                if "keeps_lock" in here or "wants_lock" in now and batch == 6:
                    lock_index()
                if "raises" in here:
                    raise RuntimeError("loss is not finite")
                time.sleep(options.step_ms / 1000)
                forward.launch(compute)
                backward.launch(compute)
                ready.record(compute)
                comms.wait(ready)
                for bucket in buckets:
                    if "other_dtype" in here:
                        bucket = cuda.Buffer(bucket.count, "f64")
                    comm.all_reduce(bucket, comms)
                if batch % 10 == 5 and "no_loss" not in here:
                    comm.all_reduce(loss, comms)
                if "extra_barrier" in here:
                    comm.all_reduce(flag, comms)
                    comms.synchronize()
                comm.broadcast(rate, rank if "other_root" in here else 0, comms)
                comms.synchronize()
                step_kernel.launch(compute)
                compute.synchronize()
            if rank == 0 and options.validate_seconds:
                validate(options)
            if rank == 0 and options.save_seconds:
                save(options)
            if rank == 1 and epoch == 1 and options.compile_seconds:
                compile_kernels(options)
            comm.all_reduce(flag, comms)
            comms.synchronize()
    finally:
        if "raises" in mine:
            # A summary over all ranks that no other rank calls at this moment.
            comm.all_gather(loss, cuda.Buffer(world), comms)
            comms.synchronize()
    comm.destroy()


def validate(options):
    """Rank 0 looks at its validation set, while the others are at the end of the epoch."""
    end = time.monotonic() + options.validate_seconds
    correct = 0
    while time.monotonic() < end:
        correct += score(correct)
    return correct


def save(options):
    """Rank 0 writes a checkpoint to a slow disk."""
    end = time.monotonic() + options.save_seconds
    with open(os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "plain.ckpt"), "wb") as file:
        while time.monotonic() < end:
            file.write(bytes(1 << 16))
            time.sleep(0.02)


def compile_kernels(options):
    """Rank 1 has a new shape."""
    compiler = os.path.join(tempfile.mkdtemp(), "ptxas")
    shutil.copy(shutil.which("yes"), compiler)
    compiles = subprocess.Popen([compiler], stdout=subprocess.DEVNULL)
    threading.Timer(options.compile_seconds, compiles.kill).start()
    compiles.wait()


def lock_index():
    """Takes the lock of the cache's index, and keeps it."""
    index = os.open(os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "index.lock"), os.O_CREAT | os.O_RDWR)
    fcntl.flock(index, fcntl.LOCK_EX)


def score(sample):
    return sum(number % 7 for number in range(2000 + sample % 3)) % 2


def trouble(text):
    name, ranks = text.split("@")
    return name, {int(rank) for rank in ranks.split("+")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1 << 20)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--validate-seconds", type=float, default=0.0)
    parser.add_argument("--save-seconds", type=float, default=0.0)
    parser.add_argument("--compile-seconds", type=float, default=0.0)
    parser.add_argument("--start-seconds", type=float, default=0.0, help="how much later the last rank starts")
    parser.add_argument("--trouble", type=trouble, action="append", default=[])
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == world - 1:
        time.sleep(options.start_seconds)
    train(rank, world, options)


if __name__ == "__main__":
    sys.exit(main())
