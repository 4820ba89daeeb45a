"""Processes of xpu_timer are killed, stopped or starved. The job is not disturbed, and no incident
is lost."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

from cluster import cluster, relayed
from kit import (
    CHANCE, COLLECTOR, DIR, DUMP, EXAMPLES, LAUNCH, TIMELINE, VIEWER, Proc, Unable, alive, answers,
    children, collector, collectors, comm, executions_of, http_get, incident, judged, kill9,
    launched, must, nobody_is_stopped, ours, owner_status, promises, rank_pids, registered, silent,
    status, tail, train, trains, wait_for, words_of,
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


# Collectors, supervisors and cluster collectors are killed at random moments, also several at once,
# during hangs.


def supervisor():
    with contextlib.suppress(Exception):
        return owner_status().get("supervisor")
    return None


def killable():
    """Pids of xpu_timer's processes except the supervisor, which has to restart the collector."""
    keepers = set()
    for pid in collectors():
        if status(pid, "PPid") not in collectors():
            keepers.add(pid)
    return [pid for pid in ours() if pid not in keepers and not comm(pid).startswith("xpu_timer_launc")]


def hangs(at=40, **options):
    return train("--fault=loader", "--fault-rank=1", f"--fault-step={at}", **options)


def finished():
    """Folders with the verdict of the hang and the report."""
    found = []
    for folder in TIMELINE.glob("incident-*"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads((folder / "verdict.json").read_text())["culprits"] == [1] and (folder / "report.html").exists():
                found.append(folder)
    return found


def metric(line="XPU_TIMER_COMMON_HANG"):
    with contextlib.suppress(OSError):
        port = int(os.environ["XPU_TIMER_BASEPORT"]) + 1
        return [float(one.rsplit(" ", 1)[1]) for one in http_get("/metrics", port=port)[1].splitlines() if one.startswith(line + "{")]
    return []


@promises("the hang is one incident with a complete folder, and XPU_TIMER_COMMON_HANG is 1 for both ranks", chance=True)
def anything_killed_at_any_moment():
    """SIGKILL ends random processes of xpu_timer at six random moments, from before the timeout
    until after the verdict."""
    job = hangs(20)
    registered(2)
    begun, killed = time.monotonic(), []
    for at in sorted(CHANCE.uniform(0, 9) for _ in range(6)):
        time.sleep(max(0, begun + at - time.monotonic()))
        pids = killable()
        if pids:
            pid = CHANCE.choice(pids)
            killed.append(f"{at:.1f}:{comm(pid)}")
            kill9(pid)
    wait_for(f"the incident is whole, after {killed}", finished, 60)
    wait_for(f"COMMON_HANG is 1 for both, after {killed}", lambda: metric() == [1.0, 1.0], 30)
    must(len(owner_status()["incidents"]) == 1, f"{owner_status()['incidents']}")
    must(len(list(TIMELINE.glob("incident-*"))) == 1, f"{list(TIMELINE.glob('incident-*'))} after {killed}")
    silent(job)
    return " ".join(killed)


@promises("all ranks are ended within ten seconds of the verdict, and only once the verdict proves a hang", chance=True)
def collector_killed_before_it_ends_the_ranks():
    """SIGKILL ends the collector three times around the verdict, with XPU_TIMER_HANG_KILL=1."""
    job = hangs(20, env={"XPU_TIMER_HANG_KILL": "1"})
    registered(2)
    wait_for("the incident has begun", lambda: list(TIMELINE.glob("incident-*")), 40)
    for _ in range(3):
        time.sleep(CHANCE.uniform(0, 1.2))
        for pid in set(collectors()) & set(killable()):
            kill9(pid)
    wait_for("the job is ended", job.ended, 60)
    wait_for("the incident is whole", finished, 30)
    silent(job)


@promises("a new supervisor starts each time, and then restarts the collector", chance=True)
def supervisor_killed_then_the_collector():
    """SIGKILL ends the supervisor, and then the collector, four times. The job hangs in the end."""
    job = hangs(400)
    registered(2)
    for _ in range(4):
        first = wait_for("a supervisor", supervisor, 20)
        kill9(first)
        wait_for("another supervisor", lambda: supervisor() not in (None, first), 10)
        time.sleep(CHANCE.uniform(0, 0.3))
        old = collector()
        kill9(old)
        wait_for("another collector", lambda: answers() and collector() != old, 10)
    judged([1], seconds=80)
    silent(job)


@promises("the collector restarts after a growing pause, and the hang is judged", chance=True)
def collector_killed_as_soon_as_it_is_there():
    """For ten seconds, SIGKILL ends each collector as soon as it starts."""
    job = hangs(60)
    registered(2)
    killed = set()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for pid in set(collectors()) & set(killable()) - killed:
            time.sleep(CHANCE.uniform(0, 0.05))
            kill9(pid)
            killed.add(pid)
        time.sleep(0.01)
    begun = time.monotonic()
    wait_for(f"the collector answers after {len(killed)} kills", answers, 60)
    back = time.monotonic() - begun
    judged([1], seconds=80)
    silent(job)
    return f"killed {len(killed)} times, back after {back:.1f} s"


@promises("the next launch starts a collector, the ranks register again, and their hang is judged")
def both_killed_then_another_launch():
    """SIGKILL ends the collector and its supervisor at once. The job hangs, and then a command is
    launched."""
    job = hangs(100)
    registered(2)
    pids = ours()
    # Both are stopped first, so that neither restarts the other.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    trains(job)
    time.sleep(7)
    if answers():
        raise Unable("one of them was quicker")
    other = launched("sleep", "100")
    judged([1], seconds=80)
    silent(job)
    silent(other)


@promises("one collector serves all of them, and the hang is judged once", chance=True)
def launchers_race_the_supervisor():
    """While twenty launchers start, SIGKILL ends the collector, and the third time also its
    supervisor."""
    job = hangs(300)
    registered(2)
    for turn in range(3):
        jobs = []
        for index in range(20):
            jobs.append(launched("sleep", "3"))
            if index == 5 + turn:
                for pid in ours() if turn == 2 else [collector()]:
                    # A launcher may have become its command since it was listed.
                    if any("xpu_timer_collector" in word for word in words_of(pid)[:1]):
                        kill9(pid)
        for one in jobs:
            code = one.wait(60)
            must(code == 0, f"turn {turn}: status {code}: {one.err()}")
            silent(one, 1)
    wait_for("one collector and one supervisor", lambda: len(collectors()) <= 2, 20)
    judged([1], seconds=80)
    must(len(finished()) == 1, f"{finished()}")
    silent(job)


@promises("the hang is judged")
def collector_with_64_descriptors_and_a_hang():
    """The collector may open 64 descriptors, and eight ranks hang."""
    return few(64, 8)


def few(count, ranks):
    os.environ["XPU_TIMER_SOCKET"] = str(DIR / "own.sock")
    own = Proc(["bash", "-c", f'ulimit -n {count}; exec "$@"', "bash", COLLECTOR, "node"])
    wait_for("the collector answers", answers, 30)
    job = hangs(30, count=ranks)
    _, verdict = judged([1], seconds=120)
    must(verdict["victims"] == [rank for rank in range(ranks) if rank != 1], f"victims {verdict['victims']}")
    must(alive(own.pid), tail(own.err()))
    silent(job)
    return verdict["confidence"]


class Node:
    """One node of a multi-node job, with its own collector, folder and ports."""

    def __init__(self, name, port, world, url):
        self.name, self.port, self.world = name, port, world
        self.folder = DIR / name
        for part in ("timeline", "log", "tmp"):
            (self.folder / part).mkdir(parents=True)
        self.env = {
            "POD_NAME": name, "XPU_TIMER_BASEPORT": port, "XPU_TIMER_TIMELINE_PATH": self.folder / "timeline",
            "XPU_TIMER_LOGGING_DIR": self.folder / "log", "TMPDIR": self.folder / "tmp", "XPU_TIMER_COLLECTOR": url,
            "MASTER_ADDR": "head.example", "MASTER_PORT": "29500", "WORLD_SIZE": world, "XPU_TIMER_JOB": "wide",
            "PYTHONPATH": EXAMPLES,
        }

    def trains(self, *ranks, at=60):
        words = [LAUNCH, sys.executable, EXAMPLES / "train.py", "--fault=loader", "--fault-rank=1", f"--fault-step={at}"]
        return [Proc(words, env={**self.env, "RANK": rank, "LOCAL_RANK": index, "LOCAL_WORLD_SIZE": len(ranks)}) for index, rank in enumerate(ranks)]

    def status(self):
        with contextlib.suppress(Exception):
            return json.loads(http_get("/status", port=self.port)[1])
        return {}


def two_ports():
    """Finds two adjacent free ports for a node collector. Returns the first."""
    while True:
        port = random.randrange(23100, 23900, 2)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
            return port


def wide(url, at=60):
    nodes = [Node("a", two_ports(), 4, url), Node("b", two_ports(), 4, url)]
    procs = nodes[0].trains(0, 1, at=at) + nodes[1].trains(2, 3, at=at)
    for node in nodes:
        wait_for(f"ranks are registered at {node.name}", lambda: len(node.status().get("ranks", [])) >= 2, 60)
    return nodes, procs


def whole_at_cluster(seconds=100):
    """Waits for incident folders of the cluster collector whose verdict names all four ranks."""

    def found():
        whole = []
        for path in (DIR / "cluster").glob("incident-*/verdict.json"):
            with contextlib.suppress(OSError, ValueError):
                verdict = json.loads(path.read_text())
                if verdict["culprits"] == [1] and verdict["victims"] == [0, 2, 3]:
                    whole.append(path.parent)
        return whole

    return wait_for("the cluster has one verdict of all four ranks", found, seconds)


@promises("the restarted cluster collector has one incident of the job, with all ranks", chance=True)
def cluster_killed_with_an_open_incident():
    """SIGKILL ends the cluster collector at random moments of an incident of two nodes. It is
    restarted at once or a little later."""
    own, port = cluster()
    nodes, procs = wide(f"http://127.0.0.1:{port}")
    wait_for("the incident has begun", lambda: any(node.status().get("incidents") for node in nodes), 60)
    times = []
    for _ in range(CHANCE.choice([1, 2, 3])):
        times.append(f"{CHANCE.uniform(0, 3):.1f}")
        time.sleep(float(times[-1]))
        kill9(own.pid)
        own.wait(10)
        time.sleep(CHANCE.choice([0, 0.3, 2.5]))
        own, port = cluster(port)
    folders = whole_at_cluster()
    time.sleep(3)
    must(len(whole_at_cluster(1)) == 1, f"{folders} {[path.name for path in (DIR / 'cluster').iterdir()]}")
    for proc in procs:
        silent(proc)
    return f"killed after {' '.join(times)} s"


@promises("the hang is one incident at the cluster collector, with all ranks", chance=True)
def uplink_flaps():
    """While an incident is open, the connections of both nodes to the cluster collector are cut
    again and again."""
    own, port = cluster()
    calm, peers = threading.Event(), []

    def pumps(one, other):
        peers.extend((one, other))
        with contextlib.suppress(OSError):
            while part := one.recv(65536):
                other.sendall(part)
        for peer in (one, other):
            with contextlib.suppress(OSError):
                peer.close()

    nodes, procs = wide(f"http://127.0.0.1:{relayed(port, pumps)}")
    end = time.monotonic() + 14
    cuts = 0
    while time.monotonic() < end:
        time.sleep(CHANCE.uniform(0.05, 0.8))
        for peer in peers[:]:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        peers.clear()
        cuts += 1
    folders = whole_at_cluster()
    must(len(folders) == 1, f"{folders}")
    must(alive(own.pid), tail(own.err()))
    for proc in procs:
        silent(proc)
    return f"cut {cuts} times"


@promises("the hang is one incident at the cluster collector, with all ranks", chance=True)
def node_collectors_killed_with_a_cluster():
    """SIGKILL ends the collector of one of two nodes at four random moments of an incident."""
    own, port = cluster()
    nodes, procs = wide(f"http://127.0.0.1:{port}")
    begun, done = time.monotonic(), []
    for at in sorted(CHANCE.uniform(0, 9) for _ in range(4)):
        time.sleep(max(0, begun + at - time.monotonic()))
        node = CHANCE.choice(nodes)
        pid = node.status().get("pid")
        if pid:
            kill9(pid)
            done.append(f"{node.name}@{at:.1f}")
    folders = whole_at_cluster()
    must(len(folders) == 1, f"{folders} after {done}")
    for proc in procs:
        silent(proc)
    return " ".join(done)
