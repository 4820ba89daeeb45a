"""Folders and files that are missing, full, linked, foreign or read-only, and disks that become
read-only, stop answering, or fill up while an incident is open. No incident is lost, no data leaks,
nothing waits."""

import contextlib
import functools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster import free_port, of, reachable
from kit import (
    CHANCE, COLLECTOR, DIR, LOGS, OTHER_USER, SYSTEM_PYTHON, TIMELINE, Broken, Proc, Unable, add,
    as_user, authorized, collector, connect, ends_well, http_get, in_shell, judged, kill9, launched,
    must, owner_status, promises, registered, root_needed, silent, socket_path, tail, train, trains,
    unshared, wait_for, work,
)

FALLBACK = "training continues, one line at most names the folder that is used instead, and the verdict is written there"


def verdicts(*roots):
    return [path for root in roots for path in Path(root).rglob("verdict.txt")]


def elsewhere(script, *namespaces):
    """Makes the timeline folder unusable, and checks that the verdict is written to another one."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", wrap=in_shell(script, *namespaces))
    root = f"/proc/{job.pid}/root" if namespaces else ""
    temporary = os.environ["TMPDIR"]
    wait_for("a verdict", lambda: verdicts(f"{root}{temporary}", f"{root}{TIMELINE}", f"{root}{DIR}/x"), 60)
    silent(job, 1)
    return job.err().strip()[-140:] or "silent"


FOLDERS = {
    "missing": ("is missing and can be created", f"export XPU_TIMER_TIMELINE_PATH={DIR}/x/y/z", ()),
    "file": ("is a file", f"rmdir {TIMELINE}; : > {TIMELINE}", ()),
    "dangling": ("is a link to nowhere", f"rmdir {TIMELINE}; ln -s /nowhere/at/all {TIMELINE}", ()),
    "loop": ("is a link to itself", f"rmdir {TIMELINE}; ln -s {TIMELINE} {TIMELINE}", ()),
    "read_only": ("is on a read-only file system", f"mount -t tmpfs none {TIMELINE}; mount -o remount,ro {TIMELINE}", ("--mount",)),
    "device": ("is a device", "export XPU_TIMER_TIMELINE_PATH=/dev/null", ()),
    "too_long": ("has a name that is too long", "export XPU_TIMER_TIMELINE_PATH=/tmp/$(head -c 5000 /dev/zero | tr '\\0' t)", ()),
    "proc": ("is in /proc", "export XPU_TIMER_TIMELINE_PATH=/proc/1", ()),
}

for _name, (_fault, _script, _spaces) in FOLDERS.items():
    add(f"folder_{_name}", f"The timeline folder {_fault}.", FALLBACK, functools.partial(elsewhere, _script, *_spaces))


@promises("folders have mode 0700 and files 0600, unless XPU_TIMER_FILE_MODE is set")
def file_modes():
    """A collector that was started with umask 0 writes a hang."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", wrap=in_shell("umask 0"))
    folder, _ = judged([1])
    wait_for("the report", (folder / "report.html").exists, 30)
    wrong = []
    for path in [folder, *folder.rglob("*"), *LOGS.glob("xpu_timer*"), *Path(os.environ["TMPDIR"]).rglob("*")]:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077:
            wrong.append(f"{path.name} {stat.S_IMODE(mode):o}")
    must(not wrong, f"others may: {' '.join(sorted(wrong)[:6])}")
    silent(job)


@promises("another user can read no incident file and no log")
def file_of_another_user():
    """Another user tries to read all files in the folders."""
    os.chmod(DIR, 0o755)
    os.chmod(TIMELINE, 0o755)
    os.chmod(LOGS, 0o755)
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    judged([1])
    script = f"""
import os
seen = []
for root in ({str(TIMELINE)!r}, {str(LOGS)!r}):
    for folder, _, names in os.walk(root):
        for name in names:
            try: open(os.path.join(folder, name), 'rb').read(1); seen.append(name)
            except OSError: pass
print(seen)"""
    proc = Proc([*as_user(), SYSTEM_PYTHON, "-c", script])
    must(proc.wait(20) == 0 and proc.out().strip() == "[]", proc.out()[:200] + tail(proc.err()))


@promises("nothing is written to the planted folder and links, the other user can read nothing, and the command reports the reason")
def fetch_into_a_shared_folder():
    """Incidents are fetched into a world-writable folder. In it, another user has already created
    the incident's folder with links to a precious file, or a link to a folder of the caller."""
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    folder, _ = judged([1])
    name = folder.name.removeprefix("incident-")
    precious, ours = DIR / "precious", DIR / "ours"
    precious.write_text("precious")
    ours.mkdir()

    def fetch(plant):
        shared = Path(tempfile.mkdtemp(dir=DIR))
        shared.chmod(0o1777)
        copy = shared / folder.name
        plant(copy)
        proc = Proc([COLLECTOR, "incidents", "fetch", name, shared])
        return proc.wait(60), copy, proc.err()

    def squat(copy):
        root_needed()
        copy.mkdir()
        copy.chmod(0o777)
        for end in ("part", "new"):
            (copy / f".verdict.txt.{end}").symlink_to(precious)
            os.lchown(copy / f".verdict.txt.{end}", OTHER_USER, OTHER_USER)
        os.chown(copy, OTHER_USER, OTHER_USER)

    def link(copy):
        copy.symlink_to(ours)
        os.lchown(copy, OTHER_USER, OTHER_USER)

    code, copy, said = fetch(lambda copy: None)
    must(code == 0 and (copy / "verdict.txt").is_file(), f"nothing is fetched: {said}")
    modes = {oct(path.stat().st_mode & 0o777) for path in copy.iterdir()} | {oct(copy.stat().st_mode & 0o777)}
    must(modes == {"0o600", "0o700"}, f"modes {modes}")
    for plant in (squat, link):
        code, copy, said = fetch(plant)
        must(code == 1 and ("user" in said or "link" in said), f"{plant.__name__}: status {code}, {said}")
        must(precious.read_text() == "precious", "the precious file is written over")
        must(not list(ours.iterdir()), "the folder behind the link is written to")
    return said.strip()[-80:]


@promises("the target of the link is not touched")
def log_is_a_link():
    """Another user has put links to a precious file in place of the logs."""
    precious = DIR / "precious"
    precious.write_text("precious")
    for name in ("xpu_timer_collector.log", "xpu_timer_hook.log", "xpu_timer.log"):
        (LOGS / name).symlink_to(precious)
    job = train("--seconds=2")
    ends_well(job, lines=1)
    must(precious.read_text() == "precious", "it was written")


@promises("the target of the link is not touched, and the incident is written")
def latest_is_a_link():
    """`latest` in the timeline folder is a link to a foreign folder."""
    precious = DIR / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    (TIMELINE / "latest").symlink_to(precious)
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    wait_for("a verdict", lambda: list(TIMELINE.glob("incident-*/verdict.txt")), 60)
    must((precious / "file").read_text() == "precious" and len(list(precious.iterdir())) == 1, "it was written")


@promises("the incident is written there or elsewhere, and training continues")
def folder_removed():
    """The timeline folder is removed while the job trains."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=40")
    registered(2)
    shutil.rmtree(TIMELINE)
    wait_for("a verdict", lambda: verdicts(TIMELINE, os.environ["TMPDIR"]), 60)
    silent(job)


@promises("training continues, and the hang is judged")
def log_folder_removed():
    """The log folder is removed while the job trains."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=40")
    registered(2)
    shutil.rmtree(LOGS)
    judged([1])
    silent(job)


@promises("the logs stay below 64 MB, and the job completes")
def log_flood():
    """Forty thousand invalid packets arrive, with XPU_TIMER_LOG=trace."""
    job = train("--seconds=3", env={"XPU_TIMER_LOG": "trace"})
    registered(2)
    path = socket_path()
    for _ in range(2000):
        peer = connect(path)
        for _ in range(20):
            try:
                peer.send(b"\xff" * 2000)
            except OSError:
                break
        peer.close()
    size = sum(path.stat().st_size for path in LOGS.glob("*"))
    must(size < 64 << 20, f"the logs have {size >> 20} MB")
    ends_well(job)
    return f"{size >> 10} kB"


@promises("training continues, and the same collector judges the hang")
def socket_file_removed():
    """The collector's socket is removed, as cleaners of /tmp do."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=60")
    registered(2)
    for path in Path(os.environ["TMPDIR"]).rglob("*.sock"):
        path.unlink()
    judged([1])
    silent(job)


@promises("the next launch finds or starts a collector, and prints one line at most")
def temporary_folder_emptied():
    """Everything in the temporary folder is removed while the job trains."""
    job = train()
    registered(2)
    for path in Path(os.environ["TMPDIR"]).iterdir():
        shutil.rmtree(path, ignore_errors=True)
    trains(job, 2)
    second = launched("sh", "-c", "echo fine")
    must(second.wait(40) == 0 and second.out() == "fine\n", second.err())
    silent(second, 1)
    silent(job)


def on_a_dead_file_system(env_of, lines=1):
    """Runs a job whose variables name paths on a file system that does not answer."""
    if not Path("/dev/fuse").exists():
        raise Unable("no /dev/fuse")
    mount = DIR / "dead"
    mount.mkdir()
    holder = DIR / "holder.py"
    holder.write_text(f'''
import os, subprocess, sys
fd = os.open("/dev/fuse", os.O_RDWR)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
data = f"fd={{fd}},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
if libc.mount(b"dead", {str(mount).encode()!r}, b"fuse", 0, data) != 0: sys.exit(77)
os.execvp(sys.argv[1], sys.argv[1:])
''')
    job = train("--seconds=3", wrap=[*unshared("--mount"), sys.executable, holder], env=env_of(mount))
    code = job.wait(60)
    if code == 77:
        raise Unable("FUSE cannot be mounted here")
    must(code == 0, f"status {code}: {tail(job.err())}")
    silent(job, lines)


@promises("each of the two costs one line on stderr, and the job completes")
def fuse_that_does_not_answer():
    """XPU_TIMER_CONFIG and the token are on a file system that does not answer."""
    on_a_dead_file_system(lambda mount: {"XPU_TIMER_CONFIG": mount / "config.ini", "XPU_TIMER_COLLECTOR_TOKEN_FILE": mount / "token"}, lines=2)


@promises("it costs one line on stderr, and the job completes")
def temporary_folder_that_does_not_answer():
    """TMPDIR is on a file system that does not answer."""
    on_a_dead_file_system(lambda mount: {"TMPDIR": mount / "tmp"})


@promises("it costs one line on stderr, and the job completes")
def socket_that_does_not_answer():
    """XPU_TIMER_SOCKET is on a file system that does not answer."""
    on_a_dead_file_system(lambda mount: {"XPU_TIMER_SOCKET": mount / "socket"})


@promises("a file that a variable names is opened only if it is a regular file, and the command runs")
def config_socket():
    """XPU_TIMER_CONFIG names a socket, and then devices and files of /proc."""
    path = DIR / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    for name in (path, "/dev/vda", "/dev/full", "/proc/kmsg", "/proc/self/mem"):
        job = launched("sh", "-c", "echo fine", env={"XPU_TIMER_CONFIG": name})
        must(job.wait(20) == 0 and job.out() == "fine\n", f"{name}: {tail(job.err())}")
        silent(job, 1)


@promises("the folder of the hang outlives those of the dumps on demand")
def retention():
    """With XPU_TIMER_KEEP_INCIDENTS=2, five dumps on demand follow a hang."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_KEEP_INCIDENTS": "2"})
    folder, _ = judged([1])
    for _ in range(5):
        try:
            http_get("/dump", "POST", timeout=40, headers=authorized())
        except OSError:
            pass
        time.sleep(0.3)
    must((folder / "verdict.txt").exists(), "the record of the hang is gone")
    silent(job)


# Disks that become read-only, stop answering, or fill up while an incident is open.

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

    def judged():
        with contextlib.suppress(OSError, Broken, ValueError):
            return [one for one in owner_status()["incidents"] if one.get("cause")]
        return None

    return wait_for("the status has the verdict", judged, seconds)[0]


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
