"""Jobs that hang with XPU_TIMER_HANG_KILL=1. The verdict names the culprits, and all ranks end
within ten seconds."""

import functools
import os
import signal
import time

from kit import (
    CHANCE, DIR, PORT, TIMEOUT, add, alive, http_get, incident, judged, must, promises, rank_pids,
    ranks, registered, silent, train, trains, wait_for,
)

PROMISE = "the verdict names the culprits, all ranks are ended within ten seconds of it, and the launcher's exit status is not 0"

# Arguments of train.py, the fault of the simulated device, the culprits, and the text of the fault.
HANGS = {
    "loader": (["--fault=loader", "--fault-rank=1"], "", [1], "A shard of the data loader never arrives."),
    "skipped": (["--fault=skip", "--fault-rank=1", "--steps=40"], "", [1], "A rank skips a collective."),
    "raised": (["--fault=raise", "--fault-rank=1"], "", [1], "A rank ends with an exception, and the others wait."),
    "killed": (["--fault=killed", "--fault-rank=1"], "", [1], "A rank is killed, and the others wait."),
    "stopped": (["--fault=stopped", "--fault-rank=1"], "", [1], "A signal stops a rank."),
    "operation": (["--fault=op", "--fault-rank=0"], "", None, "A rank calls a different operation."),
    "size": (["--fault=size", "--fault-rank=1"], "", None, "A rank sums fewer elements."),
    "stuck_kernel": ([], "stuck_kernel:rank=1,n=100", [1], "A kernel never ends."),
    "network": ([], "stall:bytes=100000", [], "The network stops moving bytes."),
    "never_joins": ([], "init_skip:rank=1", [1], "A rank never enters the communicator."),
}


def ended(name):
    arguments, device, culprits, _ = HANGS[name]
    env = {"XPU_TIMER_HANG_KILL": "1", "XPU_SIM_FAULT": device or None}
    job = train("--fault-step=15", *arguments, env=env)
    folder, verdict = incident(1, 80)
    said = (folder / "verdict.json").stat().st_mtime
    must(culprits is None or verdict["culprits"] == culprits, f"culprits {verdict['culprits']}: {verdict['sentence']}")
    limit = max(1.0, 10 - (time.time() - said))
    wait_for("all ranks are ended within 10 s of the verdict", lambda: not any(map(alive, rank_pids())), limit)
    took = time.time() - said
    must(job.wait(20) != 0, "the job ended with status 0")
    return f"{verdict['cause']}, ended {took:.1f} s after the verdict"


for _name, _row in HANGS.items():
    add(f"ended_{_name}", _row[3], PROMISE, functools.partial(ended, _name))


@promises(PROMISE)
def ended_before_its_first_device_call():
    """A rank hangs before its first device call, while the others wait for it to create their
    communicator."""
    script = DIR / "late.py"
    script.write_text('''
import os, threading
if os.environ["RANK"] == "1": threading.Event().wait()
import cuda
cuda.set_device(0)
cuda.Communicator.create("world")
''')
    job = ranks(script, env={"XPU_TIMER_HANG_KILL": "1"})
    folder, verdict = judged([1])
    limit = max(1.0, 10 - (time.time() - (folder / "verdict.json").stat().st_mtime))
    wait_for("all ranks are ended within 10 s of the verdict", lambda: not any(map(alive, rank_pids())), limit)
    must(job.wait(20) != 0, "the job ended with status 0")
    return verdict["cause"]


@promises("XPU_TIMER_COMMON_HANG is 0 before the hang, and 1 for every culprit and victim after the verdict")
def metric_of_a_hang():
    """A rank hangs forever, and the metrics are read all the time."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=60")
    registered(2)

    def levels():
        page = http_get("/metrics", port=PORT + 1)[1]
        return sorted(line.split()[-1] for line in page.splitlines() if line.startswith("XPU_TIMER_COMMON_HANG{"))

    must(set(levels()) <= {"0"}, f"raised before the hang: {levels()}")
    judged([1])
    wait_for("1 for both ranks", lambda: levels() == ["1", "1"], 15)
    return "0, then 1 for both ranks"


@promises("both hangs are judged, each in its own folder")
def second_hang_after_the_first():
    """A job hangs, recovers, and hangs again."""
    train("--fault=pause", "--fault-rank=0", "--fault-step", "10", "30", f"--pause={TIMEOUT + 4}")
    first, second = incident(1, 60)[0], incident(2, 90)[0]
    must(first != second, "one folder")
    return "two folders"


@promises("the hang is judged, and the dead rank is named", chance=True)
def rank_killed_at_any_moment():
    """SIGKILL ends a rank at a random moment."""
    job = train("--jitter=0.5")
    trains(job)
    time.sleep(CHANCE.uniform(0, 1))
    pids = [pid for pid in rank_pids() if alive(pid)]
    victims = [pid for pid in pids if b"RANK=1" in open(f"/proc/{pid}/environ", "rb").read().split(b"\0")]
    os.kill(victims[0], signal.SIGKILL)
    _, verdict = judged([1])
    silent(job, 0)
    return verdict["cause"]


@promises("the verdict names the rank as stopped")
def rank_stopped_by_somebody():
    """SIGSTOP stops one rank."""
    job = train()
    trains(job)
    victim = [pid for pid in rank_pids() if b"RANK=0" in open(f"/proc/{pid}/environ", "rb").read().split(b"\0")][0]
    os.kill(victim, signal.SIGSTOP)
    _, verdict = judged([0], ["process_stopped"])
    return verdict["cause"]
