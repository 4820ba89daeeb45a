"""Foreign processes and invalid messages on the collector's socket, and foreign clients and invalid
requests on its ports. The collector serves its jobs as before, and nobody reads the data of others.
"""

import array
import functools
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from kit import (
    CHANCE, DIR, DUMP, EXAMPLES, PORT, PRINT_ENV, SYSTEM_PYTHON, TIMELINE, TREE, Proc, add, alive,
    as_user, authorized, collector, connect, descriptors, http_get, incidents, judged, launched,
    log_text, must, owner_status, promises, rank_pids, ranks, registered, root_needed, silent,
    socket_path, status, stays, tail, train, trains, wait_for, works_still,
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
           "XPU_SIM_FAULT": "stuck_kernel:rank=0,n=100", "XPU_TIMER_BRACKET": "all"}
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


# Foreign clients and invalid requests on the ports.

PORTS_SERVED = "the collector survives and answers, training continues, and the next hang is judged"


def raw(port, text, seconds=3):
    """Sends bytes, and returns the answer up to the end of the connection or the timeout."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as peer:
        answer = b""
        try:
            peer.sendall(text)
            while len(answer) < 1 << 20 and (part := peer.recv(65536)):
                answer += part
        except OSError:
            pass
        return answer


def ports_served(attack, grows_kb=64 << 10):
    job = train()
    registered(2)
    pid = collector()
    before = status(pid, "VmRSS")
    kept = attack()
    trains(job, 2)
    silent(job)
    must(alive(pid), f"the collector is gone; {tail(log_text())}")
    grown = status(pid, "VmRSS") - before
    must(grown < grows_kb, f"the collector grew by {grown} kB")
    works_still()
    del kept
    return f"grew by {grown} kB"


GARBAGE = {
    "random": ("random bytes", lambda: os.urandom(5000)),
    "binary_line": ("a line that never ends", lambda: b"GET /" + b"a" * 300_000),
    "headers_endless": ("headers that never end", lambda: b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 60_000),
    "header_huge": ("a header of one megabyte", lambda: b"GET /status HTTP/1.1\r\nX: " + b"z" * 1_000_000 + b"\r\n\r\n"),
    "length_lies": ("a Content-Length larger than memory", lambda: b"POST /dump HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n"),
    "length_negative": ("two different values of Content-Length, one negative", lambda: b"POST /dump HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\nContent-Length: 5\r\n\r\nhello"),
    "chunks_bad": ("chunks with invalid lengths", lambda: b"POST /dump HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n"),
    "version_bad": ("an unknown HTTP version", lambda: b"GET /status HTTP/9.9\r\n\r\n"),
    "http2": ("the preface of HTTP/2", lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(500)),
    "tls": ("a TLS handshake", lambda: bytes.fromhex("16030100c8010000c40303") + os.urandom(189)),
    "connect": ("CONNECT to another host", lambda: b"CONNECT 10.0.0.1:22 HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n"),
    "absolute": ("a request for an absolute URL of another host", lambda: b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: x\r\n\r\n"),
    "pipelined": ("two thousand requests in one packet", lambda: b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000),
}


def garbage(name):
    text = GARBAGE[name][1]

    def attack():
        for port in (PORT, PORT + 1):
            for _ in range(5):
                raw(port, text(), 2)

    return ports_served(attack)


for _name, _row in GARBAGE.items():
    add(f"web_{_name}", f"Both ports receive {_row[0]}.", PORTS_SERVED, functools.partial(garbage, _name))

PATHS = ["/incidents/../../../../etc/passwd", "/incidents/..%2f..%2f..%2fetc%2fpasswd", "/incidents/%2e%2e/%2e%2e/etc/passwd",
         "/incidents//etc/passwd", "/incidents/x%00y", "/incidents/" + "a" * 5000, "/incidents/%ff%fe", "/incidents/.", "/incidents/..",
         "/incidents/latest/../../../log/xpu_timer_collector.log", "//", "/%", "/status?" + "a=b&" * 5000, "/incidents/..\\..\\etc"]


@promises("no file outside the incident folders is served; " + PORTS_SERVED)
def web_paths():
    """Requests name paths outside the folder, in every spelling."""

    def attack():
        for port in (PORT, PORT + 1):
            for path in PATHS:
                answer = raw(port, b"GET " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                must(b"root:" not in answer and b"listening on" not in answer, f"{path} serves a file")

    return ports_served(attack)


@promises("the connections are closed in time, and the owner is served meanwhile")
def web_half_open():
    """Six hundred connections to each port send half a request."""
    job = train()
    registered(2)
    pid = collector()
    peers = []
    for index in range(1200):
        peer = socket.socket()
        peer.settimeout(0.2)
        try:
            peer.connect(("127.0.0.1", PORT + index % 2))
            peer.send(b"GET /sta")
        except OSError:
            pass
        peers.append(peer)
    code, _ = http_get("/health", timeout=15)
    must(code == 200, "the owner is not served")
    code, _ = http_get("/metrics", port=PORT + 1, timeout=15)
    must(code == 200, "the metrics are not served")
    trains(job)
    wait_for("the half-open ones are closed", lambda: descriptors(pid) < 400, 60)
    works_still()
    for peer in peers:
        peer.close()


@promises("the connections are closed in time, and the owner is served meanwhile")
def web_slow_headers():
    """Forty connections send one header each second."""
    train()
    registered(2)
    peers = [socket.create_connection(("127.0.0.1", PORT + index % 2), timeout=5) for index in range(40)]
    ended = []

    def trickles(peer):
        try:
            peer.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n")
            for _ in range(60):
                peer.sendall(b"X-A: b\r\n")
                time.sleep(1)
        except OSError:
            ended.append(peer)

    threads = [threading.Thread(target=trickles, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    time.sleep(1)
    must(http_get("/health", timeout=15)[0] == 200, "the owner is not served")
    wait_for("the slow ones are closed", lambda: len(ended) == 40, 50)


@promises("the collector grows by no more than its buffers, and others are served meanwhile")
def web_slow_reader():
    """Thirty clients request pages and never read them."""
    job = train()
    registered(2)
    pid = collector()
    before = status(pid, "VmRSS")
    peers = []
    for index in range(30):
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        peer.connect(("127.0.0.1", PORT + index % 2))
        page = b"/metrics" if index % 2 else b"/status"
        peer.setblocking(False)
        try:
            peer.send((b"GET " + page + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") * 400)
        except OSError:
            pass
        peers.append(peer)
    time.sleep(2)
    must(http_get("/health", timeout=15)[0] == 200, "the owner is not served")
    grown = status(pid, "VmRSS") - before
    must(grown < 64 << 10, f"the collector grew by {grown} kB")
    trains(job)
    return f"grew by {grown} kB"


@promises("the record of the hang stays, the number of folders stays limited, and training continues")
def web_flood_of_dumps():
    """After a hang, eight threads send POST /dump about a hundred times."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_KEEP_INCIDENTS": "3"})
    folder, _ = judged([1])
    codes = []

    def asks():
        for _ in range(12):
            try:
                codes.append(http_get("/dump", "POST", timeout=20, headers=authorized())[0])
            except OSError:
                codes.append(0)

    threads = [threading.Thread(target=asks) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    must((folder / "verdict.txt").exists(), f"the record of the hang is gone; answers {sorted(set(codes))}")
    must(http_get("/health")[0] == 200, "the owner is not served")
    silent(job)
    return f"answers {sorted(set(codes))}, {len(list(TIMELINE.glob('incident-*')))} folders"


def as_stranger(script):
    """Runs a Python script as another user. Returns its output and errors."""
    proc = Proc([*as_user(), SYSTEM_PYTHON, "-c", "import http.client\n"
                 "def ask(method, path, port, **more):\n"
                 "    c = http.client.HTTPConnection('127.0.0.1', port, timeout=10); c.request(method, path, **more)\n"
                 "    a = c.getresponse(); return a.status, a.read().decode()\n" + script])
    proc.wait(60)
    return proc.out(), proc.err()


@promises("the control port answers its owner and root only")
def web_another_user():
    """Another user requests the status, the incidents and their files."""
    train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    folder, _ = judged([1])
    name = folder.name.split("-", 1)[1]
    for path in ("/status", "/incidents", f"/incidents/{name}", "/slow_ranks"):
        out, err = as_stranger(f"print(ask('GET', {path!r}, {PORT}))")
        must(not out.startswith("(200"), f"{path} answers {out[:120]}")
    must(http_get("/status", headers=authorized())[0] == 200, "the owner is refused")


@promises("every local user can read the metrics, so that Prometheus and DLRover can scrape them")
def web_metrics_for_everybody():
    """Another user reads /metrics."""
    train()
    registered(2)
    out, err = as_stranger(f"print(ask('GET', '/metrics', {PORT + 1}))")
    must(out.startswith("(200") and "XPU_TIMER_COMMON_HANG" in out, f"{out[:100]} {tail(err)}")


@promises("no dump is made, and the job is not captured")
def web_dump_by_another_user():
    """Another user requests a dump."""
    train()
    registered(2)
    out, _ = as_stranger(f"print(ask('POST', '/dump', {PORT}))")
    must(not out.startswith("(200"), f"answers {out[:120]}")
    time.sleep(1)
    must(not list(TIMELINE.glob("incident-*")), "a dump was made")


@promises("a page of another origin gets nothing through the owner's browser, and makes no dump")
def web_from_a_browser():
    """A browser sends a request with another host's name and origin, or from the page of another
    local program."""
    train()
    registered(2)
    for host, origin in (("evil.example", "http://evil.example"), (f"localhost:{PORT}", "http://localhost:8888")):
        headers = {"Host": host, "Origin": origin, "Sec-Fetch-Site": "cross-site"}
        code, text = http_get("/dump", "POST", headers=headers)
        must(code != 200, f"a dump for a page of {origin}: {text[:100]}")


@promises("training continues, the launcher prints one line at most, and the hang is judged")
def port_taken():
    """Another program listens on the control port and on the metrics port."""
    listeners = [socket.create_server(("127.0.0.1", PORT + index)) for index in range(2)]
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    judged([1])
    silent(job, 1)
    del listeners
    return job.err().strip()[-100:]


def shows_no_secret(secret, folder):
    """Checks status, logs, metrics, all incident files, and all commands that show a process for
    the secret."""
    wait_for("the report", lambda: (folder / "report.html").exists(), 30)
    shown = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shown |= {"/status": http_get("/status")[1], "the log": log_text(), "/metrics": http_get("/metrics", port=PORT + 1)[1]}
    commands = {"xpu_timer_dump": [DUMP, "--children"], "its JSON": [DUMP, "--children", "--json"], "print_env": [PRINT_ENV]}
    for name, words in commands.items():
        words = [str(word) for word in [*words, "--pid", rank_pids()[0]]]
        shown[name] = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
        must("train.py" in shown[name], f"{name} says nothing of the process: {shown[name][:200]}")
    leaks = [name for name, text in shown.items() if secret in (text if isinstance(text, str) else text.decode(errors="replace"))]
    must(not leaks, f"named in {', '.join(leaks)}")


@promises("the status, the logs and the incident files contain no secret")
def web_no_secrets():
    """The ranks have secrets in their environment."""
    secret = "s3cr3t-token-value"
    train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"AWS_SECRET_ACCESS_KEY": secret, "PASSWORD": secret})
    folder, _ = judged([1])
    shows_no_secret(secret, folder)


@promises("the status, the logs, the incident files and the commands that show a process contain no secret")
def web_no_secrets_of_commands():
    """The ranks and their children have secrets in their arguments: options, assignments, headers,
    scripts and URLs."""
    secret = "s3cr3t-t0ken-value"
    arguments = [f"--api-key={secret}", "--hf-token", secret, f"wandb.password=two {secret}", f"redis://me:{secret}@host/0"]
    arguments += ["-H", f"Authorization: Bearer {secret}", f'{{"client_secret": "{secret}"}}', f"https://host/x?a=1&sig={secret}"]
    program = DIR / "train.py"
    program.write_text(
        "import runpy, subprocess, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"subprocess.Popen(['sh', '-c', 'export DB_PASSWORD={secret}; sleep 600; true'])\n"
        "sys.argv = [sys.argv[0], '--fault=loader', '--fault-rank=1', '--fault-step=15']\n"
        f"runpy.run_path({str(EXAMPLES / 'train.py')!r}, run_name='__main__')\n"
    )
    ranks(program, *arguments, env={"XPU_TIMER_WEBHOOK": f"http://127.0.0.1:9/services/{secret}"})
    folder, _ = judged([1])
    shows_no_secret(secret, folder)
