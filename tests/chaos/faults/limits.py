"""Little memory, few descriptors, few processes, little disk, namespaces, missing file systems and
other clocks. The job completes, and records what it can."""

import functools
import os
import signal
import subprocess
import time
from pathlib import Path

from kit import (
    COLLECTOR, DIR, LAUNCH, PORT, TIMELINE, VIEWER, Proc, Unable, add, alive, answers, as_user,
    collector, compiled, ends_well, in_shell, judged, launched, must, owner_status, promises,
    rank6, registered, root_needed, silent, status, tail, train, trains, wait_for, work,
)

ENDS = "the job completes, and the launcher prints one line at most"

LIMITS = {
    "descriptors_32": ("The ranks may open 32 descriptors.", "ulimit -n 32"),
    "memory_file_none": ("The ranks may lock no memory.", "ulimit -l 0"),
    "memory_400_mb": ("The ranks have 400 MB of address space.", "ulimit -v 400000"),
    "stack_small": ("The threads of the ranks have stacks of 256 KB.", "ulimit -s 256"),
    "signals_none": ("No signal may be queued: RLIMIT_SIGPENDING is 0.", "ulimit -i 0"),
}


def limited(script):
    bare = work("steps", "--seconds=1", wrap=in_shell(script), launcher=(), env={"XPU_EXAMPLE_RENDEZVOUS": DIR})
    if bare.wait(60) != 0:
        raise Unable(f"the limit ends the job without us too: {tail(bare.err())}")
    ends_well(work("steps", "--seconds=3", wrap=in_shell(script)), lines=1)


for _name, (_fault, _script) in LIMITS.items():
    add(f"limit_{_name}", _fault, ENDS, functools.partial(limited, _script))


def own_collector(script, env=None):
    """Starts a collector under a limit, for the ranks that start later."""
    environment = {"XPU_TIMER_SOCKET": str(DIR / "own.sock"), **(env or {})}
    os.environ.update(environment)
    proc = Proc(["bash", "-c", script + '\nexec "$@"', "bash", COLLECTOR, "node"])
    wait_for(f"the collector answers; {tail(proc.err())}", lambda: answers() or proc.ended(), 30)
    must(not proc.ended(), f"the collector ended: {tail(proc.err())}")
    return proc


@promises("training continues, and the collector judges or reports what is missing")
def collector_with_40_descriptors():
    """The collector may open 40 descriptors, and eight ranks register."""
    own = own_collector("ulimit -n 40")
    job = train("--seconds=4", count=8)
    ends_well(job, count=8, seconds=120)
    must(alive(own.pid), f"the collector ended: {tail(own.err())}")


@promises("the hang is judged, or the collector logs the reason; the job is not disturbed")
def collector_with_little_memory():
    """The collector has 250 MB of address space."""
    own = own_collector("ulimit -v 250000")
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    registered(2)
    wait_for("a verdict, or words", lambda: list(TIMELINE.glob("incident-*/verdict.txt")) or "memory" in own.err() or own.ended(), 60)
    silent(job)
    verdict = list(TIMELINE.glob("incident-*/verdict.txt"))
    must(verdict or "memory" in own.err(), f"neither a verdict nor a word: {tail(own.err())}")
    return "judged" if verdict else tail(own.err())[-80:]


def group(kind, limit, value):
    """Creates a cgroup v1 control group for this fault. `leave` removes it."""
    root_needed()
    root = Path("/sys/fs/cgroup") / kind
    folder = root / f"xpu_chaos_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(value))
    except OSError as error:
        raise Unable(f"no control group of {kind}: {error}") from None
    return folder


def leave(folder):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for pid in (folder / "cgroup.procs").read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)


@promises("training continues, and a new collector starts when there is memory again")
def collector_out_of_memory():
    """The kernel kills the collector, which is out of memory in its own control group."""
    folder = group("memory", "memory.limit_in_bytes", 64 << 20)
    try:
        job = train()
        registered(2)
        pid = collector()
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / "memory.limit_in_bytes").write_text(str(1 << 20))
        trains(job, 2)
        silent(job)
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
        trains(job, 2)
        wait_for("another collector", answers, 60)
    finally:
        leave(folder)


@promises("the verdict is written without pictures, and the collector keeps working")
def viewer_out_of_memory():
    """The viewer may use 12 MB when the collector runs it."""
    viewer = DIR / "bin"
    viewer.mkdir()
    for program in (LAUNCH, COLLECTOR, LAUNCH.parent / "libxpu_timer_hook.so"):
        (viewer / program.name).symlink_to(program)
    script = viewer / VIEWER.name
    script.write_text(f'#!/bin/sh\nulimit -v 12000\nexec {VIEWER} "$@"\n')
    script.chmod(0o755)
    own = own_collector("cd /", {"PATH": f"{viewer}:{os.environ['PATH']}"})
    own.popen.kill()
    own.popen.wait()
    copy = viewer / "xpu_timer_collector"
    copy.unlink()
    subprocess.run(["cp", COLLECTOR, copy], check=True)
    Path(os.environ["XPU_TIMER_SOCKET"]).unlink(missing_ok=True)
    second = Proc([copy, "node"])
    wait_for("the collector answers", answers, 30)
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    wait_for("a verdict", lambda: list(TIMELINE.glob("incident-*/verdict.txt")), 60)
    wait_for("the incident is finished", lambda: (TIMELINE / "latest").exists(), 40)
    must(alive(second.pid), f"the collector ended: {tail(second.err())}")


@promises("the viewer writes all files, or ends with the reason on stderr: with status 1, or by SIGABRT when an allocation fails")
def viewer_alone_out_of_memory():
    """The viewer has 8 MB for a folder of 1,024 ranks."""
    folder = dumps(1024)
    proc = Proc(["sh", "-c", f"ulimit -v 8000; exec {VIEWER} --path {folder}"])
    code = proc.wait(60)
    must(code in (0, 1, 128 + signal.SIGABRT), f"status {code}: {tail(proc.err())}")
    must((folder / "report.html").exists() if code == 0 else "memory" in proc.err(), f"status {code}: {tail(proc.err())}")
    return f"status {code}"


def dumps(count):
    """Creates a folder of dumps from the dumps of a real hang."""
    folder = DIR / "dumps"
    folder.mkdir()
    files = list(rank6().values())
    for rank in range(count):
        (folder / f"{rank:05}-{count:05}.stacktrace").write_bytes(files[rank % len(files)])
    return folder


@promises(ENDS)
def process_table_full():
    """An ordinary user reaches the limit of processes and threads while the job trains."""
    user = 54322
    DIR.chmod(0o777)
    for path in (DIR / "timeline", DIR / "log", DIR / "rendezvous", Path(os.environ["TMPDIR"])):
        path.chmod(0o777)
    program = readable_by_others()
    script = f"ulimit -u 12; exec {program}/xpu_timer_launch sh -c 'echo one; true; echo done'"
    for index in range(6):
        proc = Proc([*as_user(user), "bash", "-c", script], env={"XPU_TIMER_BASEPORT": PORT})
        code = proc.wait(40)
        must(code == 0 and proc.out() == "one\ndone\n", f"status {code}: {proc.out()!r} {tail(proc.err())}")
        must(len(proc.err().splitlines()) <= 2, f"it says {proc.err()!r}")


def readable_by_others():
    """Copies the installed programs to a folder that other users can read."""
    folder = DIR / "installed"
    folder.mkdir()
    names = ["xpu_timer_launch", "xpu_timer_collector", "xpu_timer_stacktrace_viewer", "xpu_timer_dump", "xpu_timer_print_env",
             "libxpu_timer_hook.so"]
    for name in names:
        subprocess.run(["cp", LAUNCH.parent / name, folder / name], check=True)
    DIR.chmod(0o755)
    return folder


@promises("the ranks complete, and the hook works without its thread if none can be created")
def process_group_full():
    """The control group of a rank allows no further thread at the first device call."""
    # The collector stays outside, because its threads come and go. The group has the rank, bash,
    # the launcher's program and the processes of the simulated device.
    own_collector("true")
    folder = group("pids", "pids.max", 30)
    try:
        script = f"echo $$ > {folder}/cgroup.procs"
        job = work("steps", "--seconds=3", "--crowded", count=1, wrap=in_shell(script))
        wait_for("there is no room", lambda: "crowded by" in job.out() or job.ended(), 30)
        ends_well(job, count=1, lines=1)
    finally:
        leave(folder)
    return job.out().splitlines()[0]


def without_room(options, fills, frees):
    """Hangs a job while neither the timeline folder nor its fallback has space. Later both have
    space."""
    folders = [TIMELINE, Path(os.environ["TMPDIR"])]
    mounts = "; ".join(f"mount -t tmpfs -o {options} none {folder}; cd {folder}; {fills}; cd /" for folder in folders)
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=20", wrap=in_shell(mounts, "--mount"))
    inside = [Path(f"/proc/{job.pid}/root{folder}") for folder in folders]
    registered(2)
    shown = wait_for("the status has the verdict", lambda: [one for one in owner_status()["incidents"] if one.get("cause")], 60)
    before = [path for folder in inside for path in folder.rglob("verdict.txt") if path.stat().st_size]
    for folder in inside:
        for path in folder.glob(frees):
            path.unlink()

    def written():
        # When TMPDIR has no space, the launcher picks another fallback folder.
        path = next((one["path"] for one in owner_status()["incidents"] if one.get("path")), None)
        places = inside + ([Path(f"/proc/{job.pid}/root{path}")] if path else [])
        return any("data_loader" in path.read_text() for folder in places for path in folder.rglob("verdict.txt"))

    wait_for("the verdict is written", written, 60)
    silent(job, 2)
    return f"served as {shown[0]['cause']}, " + ("written at once" if before else "then written")


@promises("the collector serves the verdict, and writes it once there is space")
def disk_full():
    """Every disk for incidents is full when the job hangs, and has space later."""
    return without_room("size=2m", "head -c 2097152 /dev/zero > fills 2>/dev/null", "fills")


@promises("the collector serves the verdict, and writes it once there are inodes")
def inodes_none():
    """Every disk for incidents is short of inodes when the job hangs, and has enough later."""
    return without_room("size=8m,nr_inodes=26", "for i in $(seq 20); do : > f$i; done 2>/dev/null", "f[0-9]*")


@promises("memory, descriptors and threads of the collector stay flat")
def short_commands():
    """Three hundred short commands are launched and end while a job trains."""
    job = train()
    registered(2)
    pid = collector()

    def figures():
        return status(pid, "VmRSS"), len(os.listdir(f"/proc/{pid}/fd")), status(pid, "Threads")

    subprocess.run(["sh", "-c", f"for i in $(seq 100); do {LAUNCH} true; done"], check=True, stderr=subprocess.DEVNULL)
    before = figures()
    subprocess.run(["sh", "-c", f"for i in $(seq 200); do {LAUNCH} true; done"], check=True, stderr=subprocess.DEVNULL)
    wait_for("the connections are closed", lambda: figures()[1] <= before[1] + 4, 20)
    after = figures()
    must(after[0] < before[0] + 4096 and after[2] <= before[2] + 2, f"kB, descriptors, threads: {before}, then {after}")
    trains(job)
    return f"kB, descriptors, threads: {before}, then {after}"


# Namespaces, missing file systems and other clocks.

COMPLETES = "the job completes, and the launcher prints two lines at most"
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
    add(f"space_{_name}", f"{_row[0][0].upper()}{_row[0][1:]}.", {"ends": COMPLETES, "judged": JUDGED, "command": RUNS}[_row[3]], functools.partial(within, _name))


@promises(COMPLETES)
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
