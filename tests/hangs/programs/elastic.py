"""A job of PyTorch on gloo under an elastic agent that starts its ranks again when one has failed.

    elastic.py --ranks 3 --plan fail@1:0,stop@2:1     starts torchrun, whose ranks train

A plan is NAME@RANK:ATTEMPT, several with a comma: in step 12 of that attempt the rank ends with
status 1 (fail), is killed (kill), or begins a function of troubles.py.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

WRONG_STEP = 12


def train(options):
    # gloo looks up the host name otherwise, which a container may not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    import troubles

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    world = int(os.environ["WORLD_SIZE"])
    plans = [plan.replace(":", "@").split("@") for plan in options.plan.split(",") if plan]
    mine = {name for name, where, when in plans if (int(where), int(when)) == (rank, attempt)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weights = torch.zeros(128)
    for step in range(options.steps):
        if step == WRONG_STEP:
            for name in mine:
                if name == "fail":
                    sys.exit(1)
                if name == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                troubles.begin(name)
        update = torch.full((128,), 1.0 / world)
        dist.all_reduce(update)
        weights += update
        losses = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(losses, weights[:1])
        time.sleep(0.03)
    dist.barrier()
    dist.destroy_process_group()


def start(options):
    # Debian's torchrun cannot make the store that it prefers, because that needs libuv; a file does
    # as well.
    store = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "agents")
    words = [f"--nproc_per_node={options.ranks}", "--nnodes=1", "--max_restarts=3", "--rdzv_backend=c10d", "--rdzv_id=elastic"]
    # Without --redirects, its default values for that are invalid on Python 3.11.
    words += ["--rdzv_conf=store_type=file,last_call_timeout=2", f"--rdzv_endpoint={store}", "--monitor_interval=1", "--redirects=1", "--tee=1"]
    words += [__file__, f"--plan={options.plan}", f"--steps={options.steps}"]
    environment = dict(os.environ, PYTHONWARNINGS="ignore", LOGLEVEL="CRITICAL", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1 << 20)
    parser.add_argument("--plan", default="")
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return train(options)
    return start(options)


if __name__ == "__main__":
    sys.exit(main())
