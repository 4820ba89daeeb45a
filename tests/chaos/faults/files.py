"""Folders and files that are missing, full, linked, foreign or read-only. No incident is lost, no
data leaks, nothing waits."""

import functools
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path

from kit import (
    COLLECTOR, DIR, LOGS, OTHER_USER, SYSTEM_PYTHON, TIMELINE, Proc, Unable, add, as_user,
    authorized, connect, ends_well, http_get, in_shell, judged, launched, must, promises,
    registered, root_needed, silent, socket_path, tail, train, trains, unshared, wait_for,
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
