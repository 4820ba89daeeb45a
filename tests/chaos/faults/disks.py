"""Disks that become read-only, stop answering, or fill up while an incident is open. No incident is
lost, nothing waits."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cluster import free_port, of, reachable
from kit import (
    CHANCE, COLLECTOR, DIR, LOGS, TIMELINE, Broken, Proc, Unable, add, collector, ends_well, in_shell, kill9, must,
    owner_status, promises, registered, silent, train, wait_for, work,
)

KEPT = "the collector serves the verdict, and writes it once a disk accepts it"


class Space:
    """The mount namespace of a job, entered from outside."""

    def __init__(self, job):
        self.pid = job.pid

    def runs(self, script, check=True):
        words = ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "bash", "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
        if check:
            must(done.returncode == 0, f"{script}: {done.stderr}")
        return done

    def path(self, path):
        return Path(f"/proc/{self.pid}/root{path}")

    def remounts(self, folder, how):
        """Remounts a folder. The kernel refuses read-only while a file is open for writing, so this
        repeats."""
        wait_for(f"{folder} is {how}", lambda: self.runs(f"mount -o remount,{how} {folder}", check=False).returncode == 0, 20)


def hangs(wrap, at=40, **options):
    return train("--fault=loader", "--fault-rank=1", f"--fault-step={at}", wrap=wrap, **options)


def mounted(*folders, options="size=64m"):
    return in_shell("; ".join(f"mount -t tmpfs -o {options} none {folder}" for folder in folders), "--mount")


def served(seconds=60):
    """Waits for an incident with a verdict in the collector's status, and returns it."""

    def told():
        with contextlib.suppress(OSError, Broken, ValueError):
            return [one for one in owner_status()["incidents"] if one.get("cause")]
        return None

    return wait_for("the status has the verdict", told, seconds)[0]


def whole(space, roots, seconds=60, dumps=2):
    """Waits for a folder with the verdict of the hang and this many dumps, and returns it."""

    def found():
        for root in roots:
            for path in space.path(root).rglob("verdict.json"):
                with contextlib.suppress(OSError, ValueError):
                    if json.loads(path.read_text())["culprits"] == [1] and len(list(path.parent.glob("*.stacktrace"))) >= dumps:
                        return path.parent
        return None

    return wait_for(f"the verdict is written, with {dumps} dumps", found, seconds)


def temporary():
    return Path(os.environ["TMPDIR"])


def read_only(before, both):
    fallback = temporary() / f"xpu_timer-{os.getuid()}"
    fallback.mkdir(mode=0o700)
    # The collector's lock is beside this folder.
    fallback = fallback / "timeline"
    fallback.mkdir(mode=0o700)
    folders = [TIMELINE, fallback] if both else [TIMELINE]
    job = hangs(mounted(*folders, options="size=64m,mode=700"), 60)
    space = Space(job)
    registered(2)
    if not before:
        wait_for("the incident has begun", lambda: owner_status()["incidents"], 60)
        time.sleep(CHANCE.uniform(0, 1.5))
    for folder in folders:
        space.remounts(folder, "ro")
    one = served()
    if both:
        time.sleep(2)
        for folder in folders:
            space.remounts(folder, "rw")
    # When nothing can be written, only the verdict is kept.
    folder = whole(space, [TIMELINE, temporary()], dumps=0 if both else 2)
    silent(job, 2)
    return f"{one['cause']}, written to {'the folder' if str(TIMELINE) in str(folder) else 'the other folder'}"


for _name, _before, _both, _fault in [
    ("before", True, False, "The incident disk is remounted read-only before the hang."),
    ("before_both", True, True, "Every disk is remounted read-only before the hang, and later read-write."),
    ("during", False, False, "The incident disk is remounted read-only at a random moment of the incident."),
    ("during_both", False, True, "Every disk is remounted read-only at a random moment of the incident, and later read-write."),
]:
    add(f"disk_read_only_{_name}", _fault, KEPT, functools.partial(read_only, _before, _both), not _before)


@promises(KEPT, chance=True)
def disk_full_on_and_off():
    """While an incident is open, every disk repeatedly fills up and has space again. In the end it
    has space."""
    folders = [TIMELINE, temporary()]
    job = hangs(mounted(*folders, options="size=2m"), 60)
    space = Space(job)
    registered(2)
    wait_for("the incident has begun", lambda: owner_status()["incidents"], 60)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for folder in folders:
            space.runs(f"head -c 2097152 /dev/zero > {folder}/fills", check=False)
        time.sleep(CHANCE.uniform(0, 0.5))
        for folder in folders:
            space.runs(f"rm {folder}/fills")
        time.sleep(CHANCE.uniform(0, 0.2))
    one = served()
    # Files that found no space are dropped. The verdict is kept.
    folder = whole(space, folders, dumps=0)
    must(len(list(space.path(TIMELINE).glob("incident-*"))) <= 1, "several folders")
    silent(job, 2)
    return one["cause"]


DEAD = '''
import ctypes, os, subprocess, sys
folders, words = sys.argv[1].split(":"), sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
for folder in folders:
    fd = os.open("/dev/fuse", os.O_RDWR)
    os.set_inheritable(fd, True)
    data = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"dead", folder.encode(), b"fuse", 0, data) != 0: sys.exit(77)
os.execvp(words[0], words)
'''


def dead(*folders):
    """Words that run a command in which these folders are file systems that never answer."""
    if not Path("/dev/fuse").exists():
        raise Unable("no /dev/fuse")
    holder = DIR / "dead.py"
    holder.write_text(DEAD)
    return [sys.executable, holder, ":".join(map(str, folders))]


# /tmp is the next candidate for the socket folder, so the job gets its own.
OWN_TMP = f"mount --bind {DIR} /mnt; mount -t tmpfs none /tmp; mkdir -p {DIR}; mount --bind /mnt {DIR}; mkdir -p {os.environ.get('TMPDIR')}"


def dies(space, *folders):
    """Makes these folders stop answering. Returns the process to pass to `revives`."""
    holder = subprocess.Popen(
        ["nsenter", f"--mount=/proc/{space.pid}/ns/mnt", *map(str, dead(*folders)), "sleep", "1000"], stdin=subprocess.DEVNULL)
    for folder in folders:
        wait_for(f"{folder} is dead", lambda: f" {folder} fuse " in Path(f"/proc/{space.pid}/mounts").read_text(), 10)
    return holder


def revives(space, holder, *folders):
    for folder in folders:
        space.runs(f"umount -l {folder}")
    holder.kill()
    holder.wait()


INSTEAD = "the job completes, two lines at most name the folder that is used instead, and a hang is judged"


def tmpdir_dead(name):
    wrap = [*in_shell(OWN_TMP, "--mount"), *dead(temporary())]
    linked = DIR / "linked"
    linked.symlink_to(temporary())
    env = {"TMPDIR": linked if name == "link" else temporary()}
    job = train("--seconds=3", wrap=wrap, env=env)
    ends_well(job, lines=2)
    second = hangs(wrap, 15, env={**env, "XPU_EXAMPLE_RENDEZVOUS": made("second")})
    whole(Space(second), [TIMELINE])
    silent(second, 2)
    return job.err().strip()[-140:] or "silent"


add("tmpdir_dead", "TMPDIR is a file system that does not answer.", INSTEAD, functools.partial(tmpdir_dead, "folder"))
add("tmpdir_dead_behind_a_link", "TMPDIR is a link into a file system that does not answer.", INSTEAD,
    functools.partial(tmpdir_dead, "link"))


def made(name):
    folder = DIR / name
    folder.mkdir()
    return folder


@promises(KEPT)
def disk_dies():
    """The incident disk stops answering before the hang, and answers again later."""
    job = hangs(mounted(TIMELINE), 60)
    space = Space(job)
    registered(2)
    holder = dies(space, TIMELINE)
    one = served(90)
    revives(space, holder, TIMELINE)
    whole(space, [TIMELINE, temporary()], 90)
    silent(job, 2)
    return one["cause"]


@promises(KEPT, chance=True)
def disk_dies_during_an_incident():
    """The incident disk stops answering at a random moment of an incident, and answers again later.
    """
    job = hangs(mounted(TIMELINE), 60)
    space = Space(job)
    registered(2)
    wait_for("the incident has begun", lambda: owner_status()["incidents"], 60)
    time.sleep(CHANCE.uniform(0, 1.5))
    holder = dies(space, TIMELINE)
    one = served(90)
    revives(space, holder, TIMELINE)
    whole(space, [TIMELINE, temporary()], 90)
    silent(job, 2)
    return one["cause"]


@promises("training continues, nothing is printed into the job, and the hang is judged")
def log_folder_dies():
    """The log folder stops answering while the job trains."""
    job = hangs(mounted(LOGS), 60, env={"XPU_TIMER_LOG": "debug"})
    space = Space(job)
    registered(2)
    holder = dies(space, LOGS)
    one = served(90)
    whole(space, [TIMELINE])
    silent(job)
    holder.kill()
    return one["cause"]


def dies_and_the_collector_too(job, folder):
    """Once both ranks are registered, makes the folder stop answering and kills the collector."""
    space = Space(job)
    registered(2)
    holder = dies(space, folder)
    kill9(collector())
    return space, holder


@promises("the job completes, and nothing waits")
def log_folder_dies_and_the_job_ends():
    """The log folder stops answering, the collector is killed so that the ranks have something to
    log, and the job ends."""
    job = train("--seconds=6", wrap=mounted(LOGS))
    _, holder = dies_and_the_collector_too(job, LOGS)
    ends_well(job, seconds=40)
    holder.kill()


@promises("training continues, nothing is printed into the job, and a new collector judges the hang")
def log_folder_dies_and_the_collector_is_killed():
    """The log folder stops answering, the collector is killed, and the job hangs."""
    job = hangs(mounted(LOGS), 150)
    space, holder = dies_and_the_collector_too(job, LOGS)
    served(90)
    whole(space, [TIMELINE])
    silent(job)
    holder.kill()


@promises("a new collector judges the hang and serves the verdict")
def disk_dies_and_the_collector_is_killed():
    """The incident disk stops answering, the collector is killed, and the job hangs."""
    job = hangs(mounted(TIMELINE), 150)
    _, holder = dies_and_the_collector_too(job, TIMELINE)
    served(90)
    silent(job)
    holder.kill()


@promises("all ranks are ended within ten seconds of the verdict")
def disk_dies_and_the_ranks_are_ended():
    """The incident disk stops answering, and the job hangs with XPU_TIMER_HANG_KILL=1."""
    job = hangs(mounted(TIMELINE), 60, env={"XPU_TIMER_HANG_KILL": "1"})
    space = Space(job)
    registered(2)
    holder = dies(space, TIMELINE)
    wait_for("the job is ended", job.ended, 60)
    silent(job)
    holder.kill()


@promises("the hang is judged, and the log continues when there is space again")
def log_folder_full():
    """The log disk is full, and has space later."""
    job = hangs(mounted(LOGS, options="size=1m"), 60, env={"XPU_TIMER_LOG": "debug"})
    space = Space(job)
    registered(2)
    space.runs(f"head -c 2097152 /dev/zero > {LOGS}/fills", check=False)
    whole(space, [TIMELINE])
    space.runs(f"rm {LOGS}/fills")
    size = lambda: sum(path.stat().st_size for path in space.path(LOGS).glob("*"))
    before = size()

    second = work("steps", "--seconds=1", env={"XPU_EXAMPLE_RENDEZVOUS": made("second")})
    wait_for("the log goes on", lambda: size() > before, 20)
    silent(second)
    silent(job)


@promises("the incident is written, and the files in the target of the link are not touched")
def timeline_becomes_a_link():
    """While the job trains, the timeline folder is replaced by a link to a folder with other files.
    """
    job = hangs([], 60)
    registered(2)
    precious = made("precious")
    (precious / "incident-of-mine").write_text("precious")
    TIMELINE.rename(DIR / "moved")
    TIMELINE.symlink_to(precious)
    wait_for("a verdict", lambda: [path for root in (precious, DIR / "moved", temporary()) for path in root.rglob("verdict.txt")], 60)
    must((precious / "incident-of-mine").read_text() == "precious", "a file is gone")
    silent(job)


@promises("all ranks are ended, on the verdict of the cluster collector or of the node")
def cluster_disk_dies():
    """The disk of the cluster collector stops answering, and a job with XPU_TIMER_HANG_KILL=1
    hangs."""
    folder = made("cluster")
    port = free_port()
    own = Proc([*mounted(folder), COLLECTOR, "cluster", "--listen", f"127.0.0.1:{port}"],
               env={"XPU_TIMER_TIMELINE_PATH": folder, "XPU_TIMER_COLLECTOR": None})
    wait_for("the cluster collector listens", lambda: reachable(port), 20)
    job = hangs([], 60, env={**of(port), "XPU_TIMER_HANG_KILL": "1"})
    registered(2)
    holder = dies(Space(own), folder)
    wait_for("the job is ended", job.ended, 90)
    silent(job)
    holder.kill()
