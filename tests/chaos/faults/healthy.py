"""Healthy jobs with XPU_TIMER_HANG_KILL=1. No rank of them may ever be ended."""

import functools
import os
import signal
import subprocess
import sys

from kit import (
    DIR, EXAMPLES, PORT, SYSTEM_PYTHON, TIMEOUT, Unable, add, ends_well, http_get, incident, launched,
    must, promises, rank_pids, registered, silent, stays, tail, train, trains, wait_for, work,
)

KILL = {"XPU_TIMER_HANG_KILL": "1", "XPU_TIMER_IDLE_TIMEOUT": str(TIMEOUT)}
NEVER = "with XPU_TIMER_HANG_KILL=1 the job completes with status 0, and nothing is printed into it"

MODES = {
    "shards": "All ranks read shards and copy them to the device for several timeouts.",
    "weights": "All ranks load weights for several timeouts.",
    "evaluate": "All ranks evaluate on the CPU in Python.",
    "evaluate_in_c": "All ranks spend seconds at a time inside one C function.",
    "checkpoint": "All ranks write a checkpoint with fsync.",
    "checkpoint_from_device": "All ranks slowly copy from the device and write.",
    "memset_sync": "The ranks call memset and synchronize in a loop.",
    "synchronize": "The ranks only synchronize an idle device.",
    "copies": "The ranks copy to and from the device, and launch no kernel and no collective.",
    "long_step": "The ranks work on the host for two timeouts between two collectives.",
    "long_sleep": "All ranks sleep between two collectives for longer than the timeout.",
    "compile": "All ranks run a compiler for several timeouts.",
    "collect_garbage": "All ranks collect garbage for several timeouts.",
    "server": "An inference server gets no requests for several timeouts.",
    "notebook": "The user of a notebook pauses for longer than the timeout.",
    "debugger": "The ranks sleep at a prompt, and no rank waits for another one.",
    "download": "All ranks read from a peer that sends a little at a time.",
    "busy_loaders": "The main threads wait for worker processes that compute.",
    "uneven": "One rank evaluates for half the timeout while the others wait for it in a collective.",
    "threads": "Each rank has two hundred sleeping threads and one that copies.",
    "forks": "The ranks start short processes all the time.",
    "pool_of_one": "Rank 0 waits for a pool of worker processes while the others wait for it in a collective.",
    "child_of_one": "Rank 0 waits for a program that compresses while the others wait for it in a collective.",
    "thread_of_one": "Rank 0 waits for a thread that evaluates while the others wait for it in a collective.",
    "download_of_one": "Rank 0 receives a little at a time while the others wait for it in a collective.",
    "timed_download_of_one": "Rank 0 receives with a timeout while the others wait for it in a collective.",
    "downloads_in_threads_of_one": "Rank 0 waits for threads that receive while the others wait for it in a collective.",
    "asynchronous_download_of_one": "Rank 0 receives in an event loop while the others wait for it in a collective.",
    "upload_of_one": "Rank 0 sends to a slow peer while the others wait for it in a collective.",
    "copies_of_one": "Rank 0 copies from its device while the others wait for it in a collective.",
    "posted_receive": "A receive stays pending for the whole job, which keeps training in steps of almost a timeout.",
    "slow_pipeline": "The ranks of a pipeline work one after the other, each for most of a timeout.",
    "steps": "The ranks train in plain steps.",
}
# The number of ranks, if the fault needs more than two.
COUNTS = {"slow_pipeline": 4}


def well(mode):
    count = COUNTS.get(mode, 2)
    job = work(mode, env=KILL, count=count)
    ends_well(job, count)
    return "ran to its end"


for _mode, _fault in MODES.items():
    add(f"well_{_mode}", _fault, NEVER, functools.partial(well, _mode))


@promises("no rank is ended for a hang that resolves between the timeout and the verdict")
def well_late_shard():
    """A shard arrives after the timeout and before the verdict; the two samples are four seconds
    apart."""
    late = {**KILL, "XPU_TIMER_SAMPLE_INTERVAL": "5"}
    job = train("--fault=pause", "--fault-rank=0", "--fault-step=10", f"--pause={TIMEOUT + 2}", "--steps=40", env=late)
    ends_well(job)
    return "the shard came, the job ended well"


@promises("no rank is ended, and the job runs on after SIGCONT")
def well_stopped_as_a_whole():
    """SIGSTOP stops all ranks of a job for three timeouts. Then they are continued."""
    job = train(env=KILL)
    trains(job)
    pids = rank_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stays("the ranks are there", lambda: all(os.path.exists(f"/proc/{pid}") for pid in pids), 3 * TIMEOUT)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    trains(job, 2)
    silent(job)
    return "trains on"


@promises("a rank that is silent because it gets no processor does not count as hung, and no rank is ended")
def well_on_an_overloaded_machine():
    """Sixteen busy processes compete with the ranks for the processors."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(16)]
    try:
        ends_well(work("steps", "--seconds=8", env={**KILL, "XPU_TIMER_HANG_TIMEOUT": "8"}), seconds=120)
    finally:
        for hog in hogs:
            hog.kill()
    return "ran to its end"


@promises("the idle time of a server is not a hang, and its first request is served")
def well_server_wakes_up():
    """A server is idle for three timeouts, then works again."""
    job = work("notebook", env=KILL)
    ends_well(job)
    return "idle, then well"


@promises("a real elastic job that is healthy completes")
def well_torchrun():
    """torchrun starts four ranks on gloo, with XPU_TIMER_HANG_KILL=1."""
    probe = subprocess.run([SYSTEM_PYTHON, "-c", "import torch.distributed"], capture_output=True)
    if probe.returncode != 0:
        raise Unable("Debian's python3-torch is not installed")
    script = EXAMPLES / "torch_gloo.py"
    # torch 1.13 on Python 3.11 does not find the values 0 and 3 of these two options, and 0 is the
    # default.
    output = ["--redirects=1", "--tee=2", f"--log_dir={DIR / 'torchrun'}"]
    words = [SYSTEM_PYTHON, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=4", f"--master_port={PORT + 4}", *output, script]
    job = launched(*words, env={**KILL, "GLOO_SOCKET_IFNAME": "lo"})
    must(job.wait(120) == 0, tail(job.err()))
    return "ran to its end under torchrun"


@promises("XPU_TIMER_COMMON_HANG returns to 0 when the incident resolves, and no rank is ended")
def well_metric_returns_to_zero():
    """A rank continues only after the verdict, without XPU_TIMER_HANG_KILL."""
    def level():
        code, page = http_get("/metrics", port=PORT + 1)
        lines = [line for line in page.splitlines() if line.startswith("XPU_TIMER_COMMON_HANG")]
        must(code == 200 and lines, "the page has no line of XPU_TIMER_COMMON_HANG")
        return max(float(line.split()[-1]) for line in lines)

    job = train("--fault=pause", "--fault-rank=0", "--fault-step=10", f"--pause={TIMEOUT + 8}")
    registered(2)
    must(level() == 0, "it is raised before anything hangs")
    incident()
    wait_for("the metric is raised", lambda: level() == 1, 10)
    wait_for("the metric is lowered", lambda: level() == 0, 40)
    trains(job)
    silent(job)
    return "0, 1 and 0 again"
