"""Namespaces, missing file systems, other clocks: the job trains to its end, and what can be recorded is."""

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

ENDS = "the job trains to its end, and the launcher says two lines at most"
RUNS = "the command runs as without it, and the launcher says two lines at most"
JUDGED = "training is not disturbed, and the hang is judged"

SPACES = {
    "proc_gone": ("/proc is hidden by an empty file system", "mount -t tmpfs none /proc", ("--mount",), "command"),
    "hidepid": ("/proc shows only one's own processes", "mount -t proc -o hidepid=2 none /proc", ("--mount", "--pid", "--fork"), "ends"),
    "tmp_gone": ("/tmp cannot be written", "mount -o remount,bind,ro / 2>/dev/null; unset TMPDIR; mount -t tmpfs -o ro none /var/tmp", ("--mount",), "command"),
    "shm_gone": ("/dev/shm is read-only", "mount -t tmpfs -o ro none /dev/shm", ("--mount",), "command"),
    "dev_null_gone": ("/dev has nothing but null and zero", "mount -t tmpfs none /mnt && mknod /mnt/null c 1 3 && mknod /mnt/zero c 1 5 && mknod /mnt/urandom c 1 9 && mkdir -p /mnt/shm && mount -t tmpfs none /mnt/shm && mount --move /mnt /dev", ("--mount",), "ends"),
    "sys_gone": ("/sys is empty", "mount -t tmpfs none /sys", ("--mount",), "ends"),
    "pid": ("the job has a PID namespace of its own", "mount -t proc none /proc", ("--mount", "--pid", "--fork"), "judged"),
    "net": ("the job has a network namespace without any interface", ":", ("--net",), "ends"),
    "ipc": ("the job has IPC and UTS namespaces of its own", "hostname $(printf 'x%.0s' $(seq 60))", ("--ipc", "--uts"), "judged"),
    "user": ("the job has a user namespace of its own", ":", ("--user", "--map-root-user"), "ends"),
    "cgroup": ("the job has a cgroup namespace of its own", ":", ("--cgroup",), "judged"),
    "clock_ahead": ("the monotonic clock of the job is a year ahead", ":", ("--time", "--monotonic", "31536000", "--fork"), "judged"),
    "clock_behind": ("the monotonic clock of the job is behind that of the machine", ":", ("--time", "--boottime", "100000", "--fork"), "judged"),
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
    add(f"space_{_name}", _row[0], {"ends": ENDS, "judged": JUDGED, "command": RUNS}[_row[3]], functools.partial(within, _name))


@promises(ENDS)
def space_root_read_only():
    """The root is read-only, and so is every folder but the one of the job's rendezvous."""
    script = f"mount --make-rprivate /; mount -t tmpfs none /mnt; mount --bind {DIR}/rendezvous /mnt; mount -o remount,bind,ro /; export XPU_EXAMPLE_RENDEZVOUS=/mnt"
    job = train("--steps=60", wrap=in_shell(script, "--mount"))
    ends_well(job, lines=2)
    return job.err().strip()[-120:] or "silent"


@promises("the command runs in the other root as without it, and one line at most is said")
def space_chroot():
    """The command is chroot into a folder that has neither the hook nor /proc."""
    root_needed()
    program = compiled("static", "#include <stdio.h>\nint main(void) { puts(\"inside\"); return 3; }", "-static")
    root = DIR / "root"
    root.mkdir()
    subprocess.run(["cp", program, root / "inside"], check=True)
    job = launched("chroot", root, "/inside")
    must((job.wait(30), job.out()) == (3, "inside\n"), f"{job.out()} {job.err()}")
    silent(job, 2)


@promises("the job is one with the user's own collector, and says what it cannot use in two lines at most")
def space_another_user():
    """An ordinary user's job on a node where root has a collector."""
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
    """A collector whose CLOCK_REALTIME jumps; it reads it through the C library, so a preloaded function can change it."""
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


@promises("every hang is judged, and no record of one is removed")
def clock_of_the_day_jumps():
    """The clock of the day jumps a day ahead, and then two days back, between hangs."""
    clock_jump(0, 86400, -86400)


@promises("the hang is judged, and its record stays")
def clock_of_the_day_is_1970():
    """The clock of the day says 1970, as on a machine without a battery."""
    now = int(time.time())
    clock_jump(-now + 1000)


@promises("the hang is judged, and its record stays")
def clock_of_the_day_is_2200():
    """The clock of the day says the year 2200."""
    clock_jump(7_258_118_400 - int(time.time()))
