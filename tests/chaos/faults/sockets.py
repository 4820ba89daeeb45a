"""Foreign processes and invalid messages on the collector's socket. The job's ranks are served as
before."""

import array
import os
import re
import resource
import socket
import sys
import threading
import time
from pathlib import Path

from kit import (
    CHANCE, DIR, EXAMPLES, SYSTEM_PYTHON, TREE, Proc, alive, as_user, collector, connect,
    descriptors, incidents, launched, log_text, must, owner_status, promises, registered,
    root_needed, silent, socket_path, status, stays, tail, train, trains, wait_for, works_still,
)

SERVED = "the collector survives, and the next hang is judged"
HUGE = 4_000_000_000


def varint(number):
    number &= (1 << 64) - 1
    text = b""
    while number > 127:
        text += bytes([number & 127 | 128])
        number >>= 7
    return text + bytes([number])


def field(number, value):
    """Encodes one field of a message: numbers as varints, other values with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def version(name):
    """A constant of the crate `proto`."""
    texts = [path.read_text() for path in (TREE / "proto/src").rglob("*.rs")]
    found = [number for text in texts for number in re.findall(rf"pub const {name}: u32 = (\d+);", text)]
    assert len(found) == 1, f"{name} is in proto/src {len(found)} times"
    return int(found[0])


# Read at the start, so that even the list of faults fails where a name is wrong.
PROTOCOL_VERSION = version("PROTOCOL_VERSION")
RING_VERSION = version("VERSION")


def rank_info(rank, world, job):
    return field(1, rank) + field(2, world) + field(3, rank) + field(6, job) + field(9, os.getpid())


def hello(rank, world, job="mine", timeline="", kill=False):
    parts = field(1, PROTOCOL_VERSION) + field(2, RING_VERSION)
    parts += field(3, rank_info(rank, world, job))
    parts += field(4, 3000) + field(6, 1000) + field(7, timeline or str(DIR / "timeline")) + field(8, int(kill))
    return field(1, parts)


def say(peer, packet, fds=()):
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    peer.sendmsg([packet], control)


def memory_file(size, content=b""):
    fd = os.memfd_create("ring")
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    return fd


def served(attack, grows_kb=64 << 10):
    """Attacks the collector while a job trains, and limits the growth of its memory."""
    job = train()
    registered(2)
    path, pid = socket_path(), collector()
    before = status(pid, "VmRSS")
    kept = attack(path)
    trains(job, 2)
    silent(job)
    must(alive(pid), f"the collector is gone; {tail(log_text())}")
    grown = status(pid, "VmRSS") - before
    must(grown < grows_kb, f"the collector grew by {grown} kB")
    kept.clear() if kept else None
    works_still()
    return f"grew by {grown} kB"


@promises(SERVED)
def socket_garbage():
    """Two thousand packets of random bytes, of all sizes, arrive."""

    def attack(path):
        for _ in range(100):
            peer = connect(path)
            for _ in range(20):
                try:
                    peer.send(CHANCE.randbytes(CHANCE.choice([1, 2, 7, 100, 4000, 60000])))
                except OSError:
                    break

    return served(attack)


@promises(SERVED)
def socket_cut_messages():
    """Every prefix of a valid Hello arrives, and Hello with each of its bytes changed."""

    def attack(path):
        whole = hello(0, 2)
        for cut in range(len(whole)):
            for packet in (whole[:cut], whole[:cut] + bytes([whole[cut] ^ 0xFF]) + whole[cut + 1 :]):
                peer = connect(path)
                try:
                    say(peer, packet or b"\0")
                except OSError:
                    pass
                peer.close()

    return served(attack)


@promises("memory depends only on the ranks that exist; " + SERVED)
def socket_world_of_billions():
    """A process sends Hello with WORLD_SIZE=4000000000 and signals a hang."""

    def attack(path):
        peers = []
        for rank in (0, 5, HUGE - 1):
            peer = connect(path)
            say(peer, hello(rank, HUGE, "huge"), [memory_file(1 << 20)])
            say(peer, field(2, field(2, 10_000_000_000)))
            peers.append(peer)
        time.sleep(3)
        return peers

    return served(attack)


@promises("memory depends only on the ranks that exist, and the hang of the job is judged")
def world_of_billions():
    """A launched rank has WORLD_SIZE=4000000000 in its environment, and one of its kernels never
    ends."""
    program = DIR / "one.py"
    program.write_text("import cuda\ncuda.set_device(0)\nk = cuda.Kernel('k', 100)\n"
                       "for _ in range(400):\n    k.launch()\n    cuda.synchronize()\n")
    env = {"RANK": "0", "WORLD_SIZE": str(HUGE), "LOCAL_RANK": "0", "PYTHONPATH": EXAMPLES,
           "XPU_SIM_FAULT": "stuck_kernel:rank=0,n=100"}
    job = launched(sys.executable, program, env=env)
    registered(1)
    pid, most = collector(), 0
    end = time.monotonic() + 60
    while time.monotonic() < end and not incidents():
        most = max(most, status(pid, "VmHWM"))
        must(most < 300 << 10, f"the collector has {most} kB")
        time.sleep(0.05)
    must(incidents(), "its hang is not judged")
    silent(job)
    works_still()
    return f"at most {most} kB"


@promises(SERVED)
def socket_descriptors():
    """Hello carries descriptors that are not rings: a FIFO, a folder, devices, a socket, an empty
    and a huge memfd."""

    def attack(path):
        fifo = DIR / "fifo"
        os.mkfifo(fifo)
        opened = [os.open(fifo, os.O_RDWR), os.open("/tmp", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY),
                  os.open("/dev/null", os.O_RDONLY), socket.socket().detach(), memory_file(0), memory_file(1 << 40),
                  memory_file(4096, os.urandom(4096)), os.open("/proc/kmsg", os.O_RDONLY | os.O_NONBLOCK)]
        peers = []
        for index, fd in enumerate(opened):
            peer = connect(path)
            say(peer, hello(index, 64, f"odd{index}"), [fd])
            peers.append(peer)
        time.sleep(2)
        return peers

    return served(attack)


@promises(SERVED)
def socket_many_descriptors():
    """Each packet carries two hundred descriptors."""

    def attack(path):
        before = descriptors(collector())
        for _ in range(20):
            peer = connect(path)
            try:
                say(peer, hello(0, 2, "many"), [1] * 200)
            except OSError:
                pass
            peer.close()
        wait_for("no descriptor is kept", lambda: descriptors(collector()) <= before + 20, 20)

    return served(attack)


@promises(SERVED)
def socket_ring_that_shrinks():
    """A ring is truncated to 0 bytes while the collector reads it."""

    def attack(path):
        peer = connect(path)
        ring = memory_file(8 << 20, os.urandom(1 << 20))
        say(peer, hello(0, 2, "shrinks"), [ring])
        say(peer, field(2, field(2, 10_000_000_000)))
        for _ in range(40):
            os.ftruncate(ring, 0)
            time.sleep(0.02)
            os.ftruncate(ring, 8 << 20)
            time.sleep(0.02)
        return [peer]

    return served(attack)


@promises(SERVED)
def socket_connections():
    """Two thousand connections send nothing."""

    def attack(path):
        peers = []
        for _ in range(2000):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.setblocking(False)
            try:
                peer.connect(path)
            except OSError:
                time.sleep(0.001)
            peers.append(peer)
        return peers

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    return served(attack)


@promises(SERVED)
def socket_flood_of_signals():
    """A foreign process signals twenty thousand false hangs of its own job."""

    def attack(path):
        peer = connect(path)
        say(peer, hello(0, 2, "liar"), [memory_file(1 << 20)])
        for _ in range(20000):
            try:
                say(peer, field(2, field(2, 10_000_000_000)))
                say(peer, field(3, field(1, 7)))
            except OSError:
                break
        return [peer]

    return served(attack)


@promises("the signal counts only for that process, and no rank of another job is ended")
def socket_hang_of_a_stranger():
    """A foreign process that claims the job's name and XPU_TIMER_HANG_KILL signals a hang."""
    job = train()
    registered(2)
    path = socket_path()
    stranger = os.fork()
    if stranger == 0:
        peer = connect(path)
        say(peer, hello(7, 8, "", kill=True), [memory_file(1 << 20)])
        say(peer, field(2, field(2, 100_000_000_000)))
        time.sleep(1000)
    stays("the job trains", lambda: not job.ended(), 8)
    trains(job)
    silent(job)


@promises("the connection is refused, and nothing of it is kept")
def socket_of_another_user():
    """Another user connects to the socket, if the permissions of its folder allow it."""
    job = train()
    registered(2)
    path = socket_path()
    script = f"import socket; s = socket.socket(1, 5); s.settimeout(5); s.connect({path!r}); print(s.recv(100))"
    proc = Proc([*as_user(), SYSTEM_PYTHON, "-c", script])
    proc.wait(20)
    must("Permission" in proc.err() or proc.out().strip() in ("b''", ""), f"it is welcomed: {proc.out()} {tail(proc.err())}")
    must(len(owner_status()["ranks"]) == 2, "it is a rank")
    trains(job)


@promises("training continues, and the launcher prints one line at most")
def socket_squatted():
    """Another user has already created the socket folder."""
    root_needed()
    folder = Path(os.environ["TMPDIR"]) / f"xpu_timer-{os.getuid()}"
    folder.mkdir(mode=0o777)
    os.chown(folder, 54321, 54321)
    os.chmod(folder, 0o777)
    job = train("--seconds=3")
    code = job.wait(60)
    must(code == 0, tail(job.err()))
    silent(job, 1)
    return job.err().strip()[-120:] or "silent"


@promises("the launcher prints one line at most, and no rank sends it anything")
def socket_of_a_liar():
    """Another user's program listens at the path of the collector's socket and sends Welcome."""
    root_needed()
    place = DIR / "liar"
    place.mkdir()
    place.chmod(0o777)
    os.chmod(DIR, 0o755)
    path = place / "s"
    script = f"""
import socket, time
s = socket.socket(1, 5); s.bind({str(path)!r}); s.listen(50)
import os; os.chmod({str(path)!r}, 0o777)
while True:
    c, _ = s.accept()
    try:
        c.send(bytes([10, 2, 8, 1])); c.settimeout(3); print(c.recv(4000), flush=True)
    except OSError: pass
"""
    liar = Proc([*as_user(), SYSTEM_PYTHON, "-c", script])
    wait_for("it listens", path.exists, 10)
    job = train("--seconds=3", env={"XPU_TIMER_SOCKET": path})
    must(job.wait(60) == 0, tail(job.err()))
    silent(job, 1)
    must(b"mine" not in liar.out().encode() and "train.py" not in liar.out(), f"a rank told it: {liar.out()[:200]}")
    return job.err().strip()[-100:]


def trains_under(answers, seconds):
    """Trains a job while `answers` handles each connection to a listener in place of the collector.
    """
    path = DIR / "other"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(100)

    def accepts():
        while True:
            peer, _ = listener.accept()
            answers(peer)

    threading.Thread(target=accepts, daemon=True).start()
    job = train(f"--seconds={seconds}", env={"XPU_TIMER_SOCKET": path})
    must(job.wait(60) == 0, tail(job.err()))
    silent(job, 1)


@promises("training continues, and nothing is printed into the job")
def socket_deaf():
    """The collector sends Welcome and never reads."""
    kept = []

    def welcomes(peer):
        peer.send(bytes([10, 2, 8, 1]))
        kept.append(peer)

    trains_under(welcomes, 4)


@promises("training continues, and nothing is printed into the job")
def socket_that_answers_nonsense():
    """The process that listens at the socket answers with random bytes."""

    def answers_nonsense(peer):
        for _ in range(5):
            try:
                peer.send(os.urandom(CHANCE.choice([1, 10, 1000, 50000])), socket.MSG_DONTWAIT)
            except OSError:
                break
        peer.close()

    trains_under(answers_nonsense, 3)
