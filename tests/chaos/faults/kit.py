"""The shared code of the faults: the table, the processes under test, waits with deadlines, and the
checks of a promise.

The runner (`src/main.rs`) starts each fault as a separate process, with the folder, ports and
environment of a `Job`, and ends all processes that are left of it. A fault is a function whose
docstring says what goes wrong. It returns a few words about what it saw. It raises `Broken` when
the promise does not hold, and `Unable` when this machine cannot produce the fault.
"""

import contextlib
import ctypes
import glob
import http.client
import inspect
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

FAULTS = {}


class Broken(Exception):
    """The promise does not hold."""


class Unable(Exception):
    """This machine cannot produce the fault."""


class Fault:
    def __init__(self, function, fault, promise, area, chance):
        self.function, self.fault, self.promise, self.area, self.chance = function, fault, promise, area, chance


def promises(promise, chance=False):
    """Registers a fault. With `chance` it uses random moments, and a long run repeats it."""

    def register(function):
        add(function.__name__, inspect.getdoc(function), promise, function, chance)
        return function

    return register


def add(name, fault, promise, function, chance=False):
    """Registers one of several similar faults."""
    name = name.replace("_", "-")
    assert name not in FAULTS, name
    area = inspect.getmodule(inspect.unwrap(getattr(function, "func", function))).__name__
    FAULTS[name] = Fault(function, " ".join(fault.split()), " ".join(promise.split()), area, chance)


# The environment from the runner. Listing the faults does not need it.
DIR = Path(os.environ.get("XPU_CHAOS_DIR", "/nowhere"))
BIN = Path(os.environ.get("XPU_CHAOS_BIN", "/nowhere"))
TREE = Path(__file__).resolve().parents[3]


def rank6():
    """The dumps of a real hang, by file name."""
    with zipfile.ZipFile(TREE / "tests/fixtures/rank6.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".stacktrace"))
        return {name: archive.read(name) for name in names}

EXAMPLES, PROGRAMS = TREE / "tests/examples", Path(__file__).resolve().parents[1] / "programs"
PORT = int(os.environ.get("XPU_TIMER_BASEPORT", "0"))
TIMELINE, LOGS = DIR / "timeline", DIR / "log"
SEED = int(os.environ.get("XPU_CHAOS_SEED", "0"))
CHANCE = random.Random(SEED)
LAUNCH, COLLECTOR, DUMP = BIN / "xpu_timer_launch", BIN / "xpu_timer_collector", BIN / "xpu_timer_dump"
VIEWER, PRINT_ENV, HOOK = BIN / "xpu_timer_stacktrace_viewer", BIN / "xpu_timer_print_env", BIN / "libxpu_timer_hook.so"
MARK = "XPU_TIMER_LAUNCHED_BY"
TIMEOUT = float(os.environ.get("XPU_TIMER_HANG_TIMEOUT", "3"))
SYSTEM_PYTHON = "/usr/bin/python3"
OTHER_USER = 54321


class Proc:
    """A process whose output goes to files, so that nothing waits for a pipe."""

    count = 0

    def __init__(self, words, env=None, stdin=subprocess.DEVNULL, cwd=None, **options):
        Proc.count += 1
        self.files = [DIR / f"out.{Proc.count}", DIR / f"err.{Proc.count}"]
        self.begun = time.monotonic()
        with open(self.files[0], "wb") as out, open(self.files[1], "wb") as err:
            given = {"stdout": out, "stderr": err, **options}
            environment = {name: str(value) for name, value in {**os.environ, **(env or {})}.items() if value is not None}
            self.popen = subprocess.Popen([str(word) for word in words], env=environment, stdin=stdin, cwd=cwd, **given)
        self.pid = self.popen.pid

    def out(self):
        return self.files[0].read_text(errors="replace")

    def err(self):
        return self.files[1].read_text(errors="replace")

    def ended(self):
        return self.popen.poll() is not None

    def wait(self, seconds=60):
        """Waits for the end. Returns the exit status as a shell shows it."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.popen.args[0]} has not ended within {seconds} s; {tail(self.err())}") from None
        return code if code >= 0 else 128 - code

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def steps(self):
        return self.out().count("step ")


def tail(text):
    return " | ".join(text.strip().splitlines()[-3:])


def must(condition, otherwise):
    if not condition:
        raise Broken(otherwise)


def wait_for(what, condition, seconds=40):
    """Polls until a condition holds, and returns its value."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise Broken(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def stays(what, condition, seconds):
    """Checks repeatedly that a condition holds all the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        must(condition(), f"no longer: {what}")
        time.sleep(0.05)


def launched(*words, wrap=(), **options):
    """Starts a command under xpu_timer_launch, after the words of `wrap`."""
    return Proc([*wrap, LAUNCH, *words], **options)


def ranks(script, *arguments, count=2, wrap=(), launcher=(LAUNCH,), env=None, **options):
    """Starts the ranks of one node, as torchrun does."""
    words = [*wrap, *launcher, sys.executable, EXAMPLES / "run_ranks.py", f"--nproc={count}", script, *arguments]
    return Proc(words, env={"PYTHONPATH": EXAMPLES, **(env or {})}, **options)


def train(*arguments, count=2, **options):
    return ranks(EXAMPLES / "train.py", *arguments, count=count, **options)


def work(mode, *arguments, count=2, **options):
    """Starts ranks of `programs/work.py`, which are healthy in unusual ways."""
    return ranks(PROGRAMS / "work.py", mode, *arguments, count=count, **options)


def trains(job, lines=1):
    """Waits until the job has printed this many more step lines."""
    before = job.steps()
    what = "the job trains"
    wait_for(what, lambda: job.steps() >= before + lines or job.ended(), 60)
    must(job.steps() >= before + lines, f"the job has ended with {job.popen.returncode}: {tail(job.err())}")


def silent(job, lines=0):
    """Checks that nothing is printed into the job except so many lines of the launcher."""
    said = job.err().splitlines()
    must(len(said) <= lines and all("xpu_timer" in line for line in said), f"printed into the job: {tail(job.err())}")


def ends_well(job, count=2, seconds=90, lines=0):
    code = job.wait(seconds)
    must(code == 0, f"the job ended with {code}: {tail(job.err())}")
    must(job.out().count(" done") == count, f"not all ranks came to their end: {tail(job.out())}")
    silent(job, lines)


def processes():
    """Pids of this job, by its marker."""
    marker = f"{MARK}={os.environ.get(MARK)}".encode()
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in Path(path, "environ").read_bytes().split(b"\0"):
                found.append(int(path[6:]))
    return [pid for pid in found if pid != os.getpid()]


def comm(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def words_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def ours():
    """Pids of xpu_timer's processes of this job: collector, helpers and viewer, but not the
    command."""
    return [pid for pid in processes() if comm(pid).startswith("xpu_timer")]


def collectors():
    return [pid for pid in ours() if "node" in words_of(pid)[1:3]]


def answers():
    with contextlib.suppress(Exception):
        return http_get("/health")[0] == 200
    return False


def collector(seconds=30):
    """The pid of the collector, from its status, or else from `/proc`."""
    wait_for("the collector answers", answers, seconds)
    with contextlib.suppress(Exception):
        pid = json.loads(http_get("/status")[1]).get("pid")
        if pid:
            return pid
    pids = collectors()
    must(pids, "no process of the collector is found")
    # A supervisor has the same command line and is the parent.
    children = [pid for pid in pids if status(pid, "PPid") in pids]
    return (children or pids)[0]


def rank_pids():
    """Pids of the ranks: processes whose environment names a rank."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            if any(entry.startswith(b"RANK=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.append(pid)
    return [pid for pid in found if not comm(pid).startswith("xpu_timer")]


def status(pid, key):
    """A number of /proc/PID/status, in its unit; 0 when the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0


def children(pid):
    """Pids of the children of all its threads."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += map(int, Path(path).read_text().split())
    return found


IN_OPEN = 0x20


@contextlib.contextmanager
def executions_of(program):
    """Returns a function that waits until some process executes the program, or for a number of
    seconds. The kernel wakes this process at that moment. On a busy machine, a process that polls
    would get no turn."""
    libc = ctypes.CDLL(None)
    notify = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if notify < 0 or libc.inotify_add_watch(notify, os.fsencode(program), IN_OPEN) < 0:
        raise Unable(f"{program} cannot be watched")

    def wait(seconds):
        if select.select([notify], [], [], seconds)[0]:
            os.read(notify, 4096)

    try:
        yield wait
    finally:
        os.close(notify)


def descriptors(pid):
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def thread_states(pid):
    states = {}
    for path in glob.glob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError):
            states[path.split("/")[4]] = Path(path).read_text().rsplit(")", 1)[1].split()[0]
    return states


def nobody_is_stopped(pids):
    """Checks that no thread stays stopped after the captures have ended."""

    def free():
        return not any(state in "tT" for pid in pids for state in thread_states(pid).values())

    wait_for("every thread runs on", free, 10)


def kill9(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def incidents():
    """The finished incidents, oldest first, each as folder and verdict."""
    latest = os.path.realpath(TIMELINE / "latest")
    found = []
    for folder in sorted(glob.glob(str(TIMELINE / "incident-*"))):
        with contextlib.suppress(OSError, ValueError):
            verdict = json.loads(Path(folder, "verdict.json").read_text())
            # Captures without a hang, which the hang made incidents, are older than the hang.
            if verdict["status"] != "mild":
                found.append((Path(folder), verdict))
        if os.path.realpath(folder) == latest:
            return found
    return []


def incident(count=1, seconds=60):
    found = wait_for(f"incident {count} is written; {log_tail()}", lambda: incidents()[count - 1 :], seconds)
    return found[0]


def judged(culprits, causes=None, count=1, seconds=60):
    """Waits for an incident whose verdict names these ranks."""
    folder, verdict = incident(count, seconds)
    must(verdict["culprits"] == culprits, f"culprits {verdict['culprits']}: {verdict['sentence']}")
    must(causes is None or verdict["cause"] in causes, f"{verdict['cause']}: {verdict['sentence']}")
    return folder, verdict


def log_text():
    return "".join(Path(path).read_text(errors="replace") for path in glob.glob(str(LOGS / "*")) if os.path.isfile(path))


def log_tail():
    return tail(log_text())


def http_get(path, method="GET", port=None, headers=(), timeout=10, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port or PORT, timeout=timeout)
    try:
        connection.request(method, path, headers=dict(headers), body=body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def authorized():
    """The headers that the owner's clients send if the collector has a token file."""
    for path in glob.glob(str(Path(os.environ.get("TMPDIR", "/tmp")) / f"xpu_timer-{os.getuid()}" / "*")):
        if "token" in path and os.path.isfile(path):
            return {"Authorization": "Bearer " + Path(path).read_text().strip()}
    return {}


def owner_status():
    code, text = http_get("/status", headers=authorized())
    must(code == 200, f"/status answers its owner with {code}: {text[:100]}")
    return json.loads(text)


def registered(count):
    """Waits until this many ranks are registered."""

    def known():
        with contextlib.suppress(OSError, ValueError, Broken, http.client.HTTPException):
            return len(owner_status()["ranks"]) >= count
        return False

    wait_for(f"{count} ranks are registered; {log_tail()}", known, 60)


def socket_path():
    """The collector's socket, as a launched command sees it."""
    shows = launched("sh", "-c", "echo $XPU_TIMER_SOCKET")
    must(shows.wait(30) == 0, shows.err())
    return shows.out().strip()


def connect(path):
    """Connects to the collector's socket and reads its first message."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10)
    peer.connect(path)
    peer.recv(65536)
    return peer


def works_still(culprit=0, count=2, seconds=60, **options):
    """Checks that the node still judges a hang correctly after the fault."""
    before = len(incidents())
    job = train("--fault=loader", f"--fault-rank={culprit}", "--fault-step=5", count=count, **options)
    _, verdict = incident(before + 1, seconds)
    must(verdict["culprits"] == [culprit], f"afterwards: culprits {verdict['culprits']}: {verdict['sentence']}")
    job.signal(signal.SIGTERM)
    return job


def unshared(*flags):
    """Words that run a command in its own namespaces. Raises `Unable` if that is not allowed."""
    words = ["unshare", *flags, "--"]
    if subprocess.run([*words, "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
        raise Unable(f"namespaces cannot be made here: {' '.join(flags)}")
    return words


def in_shell(script, *namespaces):
    """Words that run a script before the command, in its own namespaces: `mount -t tmpfs none /tmp;
    exec "$@"`."""
    shell = ["bash", "-c", script + '\nexec "$@"', "bash"]
    return [*unshared(*namespaces), *shell] if namespaces else shell


def compiled(name, source, *flags):
    path = DIR / name
    Path(f"{path}.c").write_text(source)
    made = subprocess.run(["gcc", "-w", "-o", path, f"{path}.c", *flags], capture_output=True, text=True)
    if made.returncode != 0:
        raise Unable(f"gcc: {tail(made.stderr)}")
    return path


def plain_text(text, where):
    """Checks that a text has no control character except line breaks and tabs, no escape and no
    direction mark."""
    found = re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
    must(not found, f"{where} shows {found and hex(ord(found[0]))}")


def root_needed():
    if os.getuid() != 0:
        raise Unable("needs root")


def as_user(user=OTHER_USER):
    """Words that run a command as another user."""
    root_needed()
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


PR_SET_CHILD_SUBREAPER = 36


def subreaper():
    """Makes orphans of this fault children of this process, so that it can end them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all():
    """Ends every process that this fault has started, including those without its marker."""
    end = time.monotonic() + 8
    while time.monotonic() < end:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for pid in children:
            kill9(int(pid))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
