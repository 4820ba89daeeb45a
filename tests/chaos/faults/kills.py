"""Processes of xpu_timer are killed, stopped or starved. The job is not disturbed, and no incident
is lost."""

import os
import signal
import subprocess
import time

from kit import (
    CHANCE, COLLECTOR, DUMP, TIMELINE, VIEWER, Proc, Unable, alive, answers, children, collector,
    collectors, comm, executions_of, incident, judged, kill9, launched, must, nobody_is_stopped, ours,
    owner_status, promises, rank_pids, registered, silent, train, trains, wait_for,
)

TRAINS = "training continues, and nothing is printed into the job"


@promises(TRAINS, chance=True)
def collector_killed_while_training():
    """SIGKILL ends the collector at a random moment."""
    job = train()
    registered(2)
    time.sleep(CHANCE.uniform(0, 1))
    kill9(collector())
    trains(job, 3)
    silent(job)


@promises("a new collector starts, the ranks register again, and the hang is judged", chance=True)
def collector_killed_then_a_hang():
    """SIGKILL ends the collector, and the job hangs before a new one starts."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=40")
    registered(2)
    old = collector()
    time.sleep(CHANCE.uniform(0, 0.3))
    kill9(old)
    judged([1], seconds=80)
    must(collector() != old, "the old one is still there")
    silent(job)
    return "judged by the next collector"


@promises("no thread of the job stays stopped, and the next collector writes the incident", chance=True)
def collector_killed_during_a_dump():
    """SIGKILL ends the collector while it captures and judges."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    registered(2)
    pid = collector()
    wait_for("the job hangs", lambda: list(TIMELINE.glob("incident-*")), 40)
    time.sleep(CHANCE.uniform(0, 1.5))
    kill9(pid)
    nobody_is_stopped(rank_pids())
    judged([1], seconds=80)
    silent(job)


@promises("the hang is one incident, and the next collector finishes its folder", chance=True)
def collector_killed_while_the_viewer_draws():
    """SIGKILL ends the collector after it has written the verdict, while the viewer draws."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    registered(2)
    pid = collector()
    with executions_of(VIEWER) as wait_for_one:
        end = time.monotonic() + 40
        while time.monotonic() < end and not list(TIMELINE.glob("incident-*/verdict.json")):
            wait_for_one(0.2)
        kill9(pid)
    judged([1], seconds=80)
    folders = list(TIMELINE.glob("incident-*"))
    must(len(folders) == 1, f"{folders}")
    silent(job)


@promises("the written verdict stays, and the next collector lists the incident")
def collector_killed_after_the_verdict():
    """SIGKILL ends the collector right after a verdict."""
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    folder, _ = judged([1])
    kill9(collector())
    must((folder / "verdict.txt").stat().st_size > 0, "no verdict")
    wait_for("another collector", answers, 60)
    listed = wait_for("it lists the incident", lambda: owner_status()["incidents"], 30)
    must(any(folder.name.split("-", 1)[1] in str(one) for one in listed), f"the old incident is not listed: {listed}")


@promises(TRAINS + "; the last collector works")
def collector_killed_again_and_again():
    """SIGKILL ends the collector five times in a row."""
    job = train()
    registered(2)
    for _ in range(5):
        for pid in collectors():
            kill9(pid)
        time.sleep(0.4)
    trains(job, 2)
    silent(job)


@promises(TRAINS)
def everything_killed():
    """SIGKILL ends all processes of xpu_timer at once, including its helpers."""
    job = train()
    registered(2)
    for pid in ours():
        kill9(pid)
    trains(job, 3)
    silent(job)


@promises("the folder has its verdict, and training continues", chance=True)
def viewer_killed():
    """SIGKILL ends the viewer while it draws an incident."""
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    registered(2)
    parents, killed = ours(), set()
    with executions_of(VIEWER) as wait_for_one:
        end = time.monotonic() + 40
        while time.monotonic() < end and not (TIMELINE / "latest").exists():
            wait_for_one(0.2)
            # At this moment the process still has the name of the collector's thread.
            for _ in range(100):
                viewers = [child for parent in parents for child in children(parent)]
                for viewer in [child for child in viewers if comm(child).startswith("xpu_timer_stack")]:
                    kill9(viewer)
                    killed.add(viewer)
    folder = wait_for("a verdict", lambda: list(TIMELINE.glob("incident-*/verdict.txt")), 30)[0]
    must("1" in folder.read_text(), "an empty verdict")
    incident(1, 40)
    if not killed:
        raise Unable("the viewer was never met")
    return f"killed {len(killed)} times"


@promises(TRAINS)
def collector_stopped():
    """SIGSTOP stops the collector for several timeouts. Then SIGCONT continues it."""
    job = train()
    registered(2)
    pids = ours()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    trains(job, 3)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    trains(job, 2)
    wait_for("it answers again", answers, 20)
    silent(job)


@promises("no thread of the job stays stopped, and the collector judges once it is continued", chance=True)
def collector_stopped_during_a_dump():
    """SIGSTOP stops the collector at a random moment of a dump."""
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    registered(2)
    pid = collector()
    wait_for("the job hangs", lambda: list(TIMELINE.glob("incident-*")), 40)
    time.sleep(CHANCE.uniform(0, 1.2))
    os.kill(pid, signal.SIGSTOP)
    nobody_is_stopped(rank_pids())
    os.kill(pid, signal.SIGCONT)
    judged([1])


@promises("the captured processes continue at once", chance=True)
def dump_killed():
    """SIGKILL ends xpu_timer_dump --force-ptrace at random moments, forty times."""
    job = train()
    trains(job)
    for _ in range(40):
        dump = subprocess.Popen([DUMP, "--all", "--force-ptrace"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(CHANCE.uniform(0, 0.05))
        dump.kill()
        dump.wait()
    nobody_is_stopped(rank_pids())
    trains(job, 2)


@promises("no captured thread stays stopped for longer than ten seconds", chance=True)
def dump_stopped():
    """SIGSTOP stops xpu_timer_dump --force-ptrace at random moments, and no SIGCONT follows."""
    job = train()
    trains(job)
    dumps = []
    for _ in range(15):
        dumps.append(subprocess.Popen([DUMP, "--all", "--force-ptrace"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(CHANCE.uniform(0, 0.04))
        dumps[-1].send_signal(signal.SIGSTOP)
    try:
        nobody_is_stopped(rank_pids())
        trains(job, 2)
    finally:
        for dump in dumps:
            dump.kill()
            dump.wait()


@promises("the next launch works like a first one", chance=True)
def launcher_killed():
    """SIGKILL ends the launcher at random moments of its start, thirty times."""
    for _ in range(30):
        one = launched("true")
        time.sleep(CHANCE.uniform(0, 0.06))
        kill9(one.pid)
        one.popen.wait()
    last = launched("sh", "-c", "echo here; exit 4")
    must((last.wait(30), last.out()) == (4, "here\n"), f"{last.out()} {last.err()}")
    silent(last)


@promises("one collector serves all of them, and no launcher prints anything")
def forty_launchers_at_once():
    """Forty launchers start at the same moment on a node without a collector."""
    jobs = [launched("sh", "-c", "echo $XPU_TIMER_COLLECTOR_PID") for _ in range(40)]
    seen = set()
    for job in jobs:
        must(job.wait(60) == 0, job.err())
        silent(job)
        seen.add(job.out().strip())
    must(len(seen) == 1, f"collectors {seen}")


@promises("the second collector reports the first one and ends, and the first one keeps working")
def second_collector():
    """A second collector is started on a node where one already listens."""
    job = train()
    registered(2)
    first = collector()
    second = Proc([COLLECTOR, "node"])
    second.wait(20)
    must(second.err().strip(), "it says nothing")
    must(collector() == first, "the first one is gone")
    trains(job)


@promises("the collector ends, its socket is removed or free, and training continues")
def collector_terminated():
    """The collector gets SIGTERM."""
    job = train()
    registered(2)
    pid = collector()
    os.kill(pid, signal.SIGTERM)
    wait_for("it ends", lambda: not alive(pid), 20)
    trains(job, 2)
    silent(job)
