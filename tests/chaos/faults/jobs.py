"""Several jobs, restarts and elastic agents. A hang belongs to its own job."""

import os
import signal
import sys

from kit import (
    DIR, EXAMPLES, ends_well, incident, incidents, judged, launched, must, promises, rank_pids,
    silent, stays, train, trains, wait_for,
)

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
