"""Namespaces, missing file systems and other clocks. The job completes, and records what it can."""

import functools
import os
import signal
import subprocess
import time

from kit import (
    COLLECTOR, DIR, TIMELINE, Proc, add, alive, answers, as_user, compiled, ends_well, in_shell,
    judged, launched, must, promises, registered, root_needed, silent, tail, train, wait_for,
)
from limits import readable_by_others

ENDS = "the job completes, and the launcher prints two lines at most"
RUNS = "the command runs as without the launcher, which prints two lines at most"
JUDGED = "training is not disturbed, and the hang is judged"

SPACES = {
    "proc_gone": ("/proc is hidden by an empty file system", "mount -t tmpfs none /proc", ("--mount",), "command"),
    "hidepid": ("/proc shows only the processes of its user", "mount -t proc -o hidepid=2 none /proc", ("--mount", "--pid", "--fork"), "ends"),
    "tmp_gone": ("/tmp cannot be written", "mount -o remount,bind,ro / 2>/dev/null; unset TMPDIR; mount -t tmpfs -o ro none /var/tmp", ("--mount",), "command"),
    "shm_gone": ("/dev/shm is read-only", "mount -t tmpfs -o ro none /dev/shm", ("--mount",), "command"),
    "dev_null_gone": ("/dev has only null, zero, urandom and shm", "mount -t tmpfs none /mnt && mknod /mnt/null c 1 3 && mknod /mnt/zero c 1 5 && mknod /mnt/urandom c 1 9 && mkdir -p /mnt/shm && mount -t tmpfs none /mnt/shm && mount --move /mnt /dev", ("--mount",), "ends"),
    "sys_gone": ("/sys is empty", "mount -t tmpfs none /sys", ("--mount",), "ends"),
    "pid": ("the job has a PID namespace of its own", "mount -t proc none /proc", ("--mount", "--pid", "--fork"), "judged"),
    "net": ("the job has a network namespace without any interface", ":", ("--net",), "ends"),
    "ipc": ("the job has IPC and UTS namespaces of its own", "hostname $(printf 'x%.0s' $(seq 60))", ("--ipc", "--uts"), "judged"),
    "user": ("the job has a user namespace of its own", ":", ("--user", "--map-root-user"), "ends"),
    "cgroup": ("the job has a cgroup namespace of its own", ":", ("--cgroup",), "judged"),
    "clock_ahead": ("the monotonic clock of the job is a year ahead", ":", ("--time", "--monotonic", "31536000", "--fork"), "judged"),
    "clock_behind": ("the boot-time clock of the job is 100,000 s ahead", ":", ("--time", "--boottime", "100000", "--fork"), "judged"),
}


def within(name):
    _, script, spaces, what = SPACES[name]
    wrap = in_shell(script, *spaces)
    if what == "command":
        job = launched("sh", "-c", "echo fine; exit 3", wrap=wrap)
        must((job.wait(40), job.out()) == (3, "fine\n"), f"{job.out()} {tail(job.err())}")
        silent(job, 2)
        return job.err().strip()[-120:] or "silent"
    if what == "ends":
        job = train("--steps=60", wrap=wrap)
        ends_well(job, lines=2)
        return job.err().strip()[-120:] or "silent"
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", wrap=wrap)
    _, verdict = judged([1])
    silent(job, 1)
    return verdict["cause"]


for _name, _row in SPACES.items():
    add(f"space_{_name}", f"{_row[0][0].upper()}{_row[0][1:]}.", {"ends": ENDS, "judged": JUDGED, "command": RUNS}[_row[3]], functools.partial(within, _name))


@promises(ENDS)
def space_root_read_only():
    """The root file system is read-only, except the folder of the job's rendezvous."""
    script = f"mount --make-rprivate /; mount -t tmpfs none /mnt; mount --bind {DIR}/rendezvous /mnt; mount -o remount,bind,ro /; export XPU_EXAMPLE_RENDEZVOUS=/mnt"
    job = train("--steps=60", wrap=in_shell(script, "--mount"))
    ends_well(job, lines=2)
    return job.err().strip()[-120:] or "silent"


@promises("the command runs in the other root as without the launcher, which prints one line at most")
def space_chroot():
    """The command is chroot into a folder without the hook and without /proc."""
    root_needed()
    program = compiled("static", "#include <stdio.h>\nint main(void) { puts(\"inside\"); return 3; }", "-static")
    root = DIR / "root"
    root.mkdir()
    subprocess.run(["cp", program, root / "inside"], check=True)
    job = launched("chroot", root, "/inside")
    must((job.wait(30), job.out()) == (3, "inside\n"), f"{job.out()} {job.err()}")
    silent(job, 1)


@promises("the job has a collector of its own user, and the launcher prints two lines at most about what it cannot use")
def space_another_user():
    """An ordinary user runs a job on a node where root has a collector."""
    train()
    registered(2)
    programs = readable_by_others()
    temporary = DIR / "theirs"
    temporary.mkdir()
    temporary.chmod(0o1777)
    job = Proc([*as_user(), programs / "xpu_timer_launch", "sh", "-c", "echo fine"],
               env={"TMPDIR": temporary, "XPU_TIMER_TIMELINE_PATH": temporary / "timeline", "XPU_TIMER_LOGGING_DIR": temporary})
    must(job.wait(40) == 0 and job.out() == "fine\n", tail(job.err()))
    silent(job, 2)
    return job.err().strip()[-120:] or "silent"


SHIM = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
static long offset(void) {
    char text[32] = {0};
    int fd = syscall(SYS_openat, AT_FDCWD, getenv("CLOCK_OFFSET_FILE"), O_RDONLY, 0);
    if (fd < 0) return 0;
    syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int code = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += offset();
    return code;
}
"""


def clock_jump(*offsets):
    """Starts a collector whose CLOCK_REALTIME jumps. A preloaded function changes the clock, which
    it reads through the C library."""
    shim = compiled("shim.so", SHIM, "-shared", "-fPIC", "-ldl")
    file = DIR / "offset"
    file.write_text("0")
    os.environ["XPU_TIMER_SOCKET"] = str(DIR / "own.sock")
    own = Proc([COLLECTOR, "node"], env={"LD_PRELOAD": shim, "CLOCK_OFFSET_FILE": file})
    wait_for("the collector answers", answers, 30)
    count = 0
    for offset in offsets:
        file.write_text(str(offset))
        count += 1
        folder = DIR / f"jump{count}"
        folder.mkdir()
        job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_EXAMPLE_RENDEZVOUS": folder})
        wait_for(f"verdict {count}", lambda: len(list(TIMELINE.glob("incident-*/verdict.txt"))) >= count, 60)
        silent(job)
        job.signal(signal.SIGTERM)
        job.wait(20)
    must(len(list(TIMELINE.glob("incident-*/verdict.txt"))) == count, "a record is gone")
    must(alive(own.pid), f"the collector ended: {tail(own.err())}")


@promises("every hang is judged, and no record is removed")
def clock_of_the_day_jumps():
    """Between hangs, the wall clock jumps one day ahead, and then two days back."""
    clock_jump(0, 86400, -86400)


@promises("the hang is judged, and its record stays")
def clock_of_the_day_is_1970():
    """The wall clock shows 1970, as on a machine without a battery."""
    now = int(time.time())
    clock_jump(-now + 1000)


@promises("the hang is judged, and its record stays")
def clock_of_the_day_is_2200():
    """The wall clock shows the year 2200."""
    clock_jump(7_258_118_400 - int(time.time()))
