"""Healthy jobs and jobs that hang, alone, restarted and beside others.

With XPU_TIMER_HANG_KILL=1, no rank of a healthy job may ever be ended. If a job hangs, the verdict
names the culprits, and all ranks end within ten seconds.
"""

import functools
import os
import signal
import subprocess
import sys
import time

from kit import (
    CHANCE, DIR, EXAMPLES, PORT, SYSTEM_PYTHON, TIMELINE, TIMEOUT, Unable, add, alive, authorized, ends_well, http_get,
    incident, incidents, judged, launched, must, promises, rank_pids, ranks, registered, silent,
    stays, tail, train, trains, wait_for, work,
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


@promises("the job completes, nothing is printed into it, and its timeline has stacks")
def stacks_of_passing_threads():
    """The Python stacks of all launches are wanted, and threads that launch live for a moment."""
    job = work("passing_threads", env={"XPU_TIMER_DUMP_STACK_COUNT": "1000000", "XPU_TIMER_BRACKET": "all"})
    registered(2)

    def stacks():
        """The ranks whose timeline names the function that launches."""
        http_get("/timeline?seconds=60", method="POST", headers=authorized())
        return {path.name for path in TIMELINE.rglob("*.ops") if b"launches_briefly" in path.read_bytes()}

    wait_for("both timelines have stacks", lambda: job.ended() or len(stacks()) == 2, 30)
    must(len(stacks()) == 2, f"stacks are missing: {tail(job.err())}")
    ends_well(job)


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


# Several jobs, restarts and elastic agents. A hang belongs to its own job.

APART = "the verdict is about the job that hangs, and no rank of the other job is named or ended"


def rendezvous(name):
    folder = DIR / name
    folder.mkdir(exist_ok=True)
    return {"XPU_EXAMPLE_RENDEZVOUS": folder}


def two(kill, more=None):
    """Runs two jobs with the same name and ranks. The second one hangs."""
    first = train(env={**rendezvous("first"), **kill, **(more or {})})
    trains(first)
    second = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={**rendezvous("second"), **kill, **(more or {})})
    _, verdict = judged([1])
    victims = verdict["victims"]
    must(victims in ([0], []), f"victims {victims}: {verdict['sentence']}")
    trains(first, 3)
    silent(first)
    return second, verdict


@promises(APART)
def two_jobs_of_one_name():
    """Two jobs with one name and no MASTER_PORT run on a node, and one of them hangs."""
    two({}, {"XPU_TIMER_JOB": "same"})


@promises(APART)
def two_jobs_without_a_name():
    """Two jobs without a name run on a node, and one of them hangs."""
    two({})


@promises(APART)
def two_jobs_of_one_name_with_kill():
    """Two jobs with one name and XPU_TIMER_HANG_KILL=1 run on a node, and one of them hangs."""
    second, _ = two({"XPU_TIMER_HANG_KILL": "1", "XPU_TIMER_JOB": "same"})
    must(second.wait(30) != 0, "the hung job ended with status 0")


@promises(APART)
def two_jobs_of_one_port():
    """Two jobs have one name and one MASTER_PORT, and the second one starts and hangs while the
    first one runs."""
    two({}, {"MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1", "XPU_TIMER_JOB": "same"})


@promises(APART)
def two_jobs_of_two_launchers_at_once():
    """Two jobs with one name start at the same moment, and each hangs at a different rank."""
    kill = {"XPU_TIMER_JOB": "same"}
    train("--fault=loader", "--fault-rank=0", "--fault-step=15", env={**rendezvous("first"), **kill})
    train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={**rendezvous("second"), **kill})
    wait_for("two verdicts", lambda: len(incidents()) >= 2, 80)
    named = sorted(tuple(verdict["culprits"]) for _, verdict in incidents()[:2])
    must(named == [(0,), (1,)], f"culprits {named}")


@promises("the hang is judged while the other job ends")
def one_job_ends_another_hangs():
    """A job completes while another job with its name hangs."""
    first = train("--steps=200", env=rendezvous("first"))
    train("--fault=loader", "--fault-rank=1", "--fault-step=15", env=rendezvous("second"))
    judged([1])
    ends_well(first)


@promises("each start is a job of its own: there is no incident, and the runs that are not killed complete")
def restarts():
    """A job is started six times in a row; every other time its ranks are killed."""
    for index in range(6):
        folder = rendezvous(f"run{index}")
        if index % 2:
            ends_well(train("--steps=20", env=folder))
        else:
            job = train(env=folder)
            trains(job)
            for pid in rank_pids():
                os.kill(pid, signal.SIGKILL)
            job.wait(20)
    must(not [verdict for _, verdict in incidents() if verdict["culprits"]], f"{incidents()[:1]}")


@promises("the second verdict names the rank of the second attempt")
def restart_after_a_hang():
    """XPU_TIMER_HANG_KILL ends a hung job. It is started again and hangs at a different rank."""
    kill = {"XPU_TIMER_HANG_KILL": "1"}
    first = train("--fault=loader", "--fault-rank=0", "--fault-step=15", env={**rendezvous("first"), **kill})
    judged([0])
    must(first.wait(30) != 0, "status 0")
    second = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={**rendezvous("second"), **kill})
    judged([1], count=2)
    must(second.wait(30) != 0, "status 0")


@promises("no rank of the healthy job is ended")
def kill_beside_a_healthy_job():
    """Two jobs with different names have XPU_TIMER_HANG_KILL=1, and one of them hangs."""
    healthy = train(env={**rendezvous("well"), "XPU_TIMER_JOB": "well", "XPU_TIMER_HANG_KILL": "1"})
    trains(healthy)
    hung = train("--fault=loader", "--fault-rank=1", "--fault-step=15",
                 env={**rendezvous("hung"), "XPU_TIMER_JOB": "hung", "XPU_TIMER_HANG_KILL": "1"})
    judged([1])
    must(hung.wait(30) != 0, "status 0")
    trains(healthy, 3)
    silent(healthy)


@promises("the hung job is not ended")
def kill_is_of_one_job():
    """A job without XPU_TIMER_HANG_KILL hangs beside a job that has it."""
    asks = train(env={**rendezvous("asks"), "XPU_TIMER_HANG_KILL": "1"})
    trains(asks)
    hung = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env=rendezvous("hung"))
    judged([1])
    stays("the hung job is there", lambda: not hung.ended(), 5)
    trains(asks)


@promises("both ranks are known, and the hang is judged")
def rank_known_late():
    """No variable names the ranks; only their communicator does."""
    script = DIR / "late.py"
    script.write_text('''
import os, sys, time
rank, size = int(sys.argv[1]), 2
import cuda
cuda.set_device(rank)
world, stream, buffer = cuda.Communicator.create("w", rank, size), cuda.Stream(), cuda.Buffer(64)
for step in range(100000):
    if rank == 1 and step == 20: time.sleep(1000)
    world.all_reduce(buffer, stream); stream.synchronize(); time.sleep(0.02)
''')
    both = [launched(sys.executable, script, str(rank), env={"PYTHONPATH": EXAMPLES}) for rank in range(2)]
    _, verdict = incident(1, 60)
    must(verdict["culprits"] == [1], f"{verdict['culprits']}: {verdict['sentence']}")
    del both
