"""Processes, messages and connections that come and go without end. Memory, descriptors, threads
and files stay flat."""

import contextlib
import resource
import signal
import socket
import subprocess
import threading
import time

from cluster import free_port
from kit import (
    COLLECTOR, DIR, LOGS, PORT, TIMELINE, Proc, Unable, alive, collector, connect, descriptors,
    http_get, judged, log_text, must, owner_status, promises, registered, silent, socket_path,
    status, tail, train, trains, wait_for, works_still,
)
from sockets import field, hello, memory_file, say, served, varint

FLAT = "memory, descriptors, threads and files of the collector stay flat, and the next hang is judged"


def figures(pid):
    return {"kB": status(pid, "VmRSS"), "descriptors": descriptors(pid), "threads": status(pid, "Threads"),
            "files": sum(1 for root in (TIMELINE, LOGS) for _ in root.rglob("*"))}


GROWTH = {"kB": 6000, "descriptors": 6, "threads": 4, "files": 6}


def flat(pid, before, growth=GROWTH):
    """Checks that, after some seconds of rest, no figure exceeds its earlier value by more than
    noise."""
    over = lambda: {key: (before[key], now) for key, now in figures(pid).items() if now > before[key] + growth[key]}
    end = time.monotonic() + 25
    while over() and time.monotonic() < end:
        time.sleep(0.2)
    must(not over(), f"grew: {over()}")
    return f"{before}, then {figures(pid)}"


def attacked(attack, warm, times):
    """Compares the figures after `warm` and after `times` rounds of an attack while a job trains.
    """
    job = train()
    registered(2)
    path, pid = socket_path(), collector()
    for _ in range(warm):
        attack(path)
    time.sleep(2)
    before = figures(pid)
    for _ in range(times):
        attack(path)
    trains(job, 2)
    silent(job)
    must(alive(pid), f"the collector is gone; {tail(log_text())}")
    seen = flat(pid, before)
    must(len(owner_status()["ranks"]) <= 4, f"{len(owner_status()['ranks'])} ranks are known")
    works_still()
    return seen


@promises(FLAT)
def one_rank_registers_five_thousand_times():
    """Five thousand times, a process connects, registers as a rank with a ring, and disconnects
    without Goodbye."""
    ring = memory_file(1 << 20)

    def attack(path):
        with contextlib.suppress(OSError):
            peer = connect(path)
            say(peer, hello(0, 2, "again"), [ring])
            peer.close()

    return attacked(attack, 1000, 4000)


@promises(FLAT)
def ranks_of_five_thousand_jobs():
    """Five thousand times, a process registers as a rank of a new job, and sends Goodbye every
    second time."""
    ring = memory_file(1 << 20)
    turn = [0]

    def attack(path):
        turn[0] += 1
        with contextlib.suppress(OSError):
            peer = connect(path)
            say(peer, hello(turn[0] % 7, 8, f"job-{turn[0]}"), [ring])
            if turn[0] % 2:
                say(peer, field(5, b""))
            peer.close()

    return attacked(attack, 1000, 4000)


@promises("the collector grows by at most 150 MB, and the next hang is judged")
def a_thousand_ranks_at_once():
    """A process keeps a thousand registered connections open, each with a ring and a job of its
    own."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)

    def attack(path):
        peers = []
        for index in range(1000):
            with contextlib.suppress(OSError):
                peer = connect(path)
                say(peer, hello(index % 8, 8, f"job-{index}"), [memory_file(1 << 20)])
                peers.append(peer)
        time.sleep(3)
        return peers

    return served(attack, 150 << 10)


@promises("the collector survives, and the next hang is judged")
def lengths_that_lie():
    """Message fields claim lengths of 2^31 to 2^64 bytes, nest ten thousand deep, or repeat tens of
    thousands of times."""

    def attack(path):
        texts = []
        for number in range(1, 12):
            for length in (1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
                texts += [varint(number << 3 | 2) + varint(length) + b"x" * 50, field(1, varint(number << 3 | 2) + varint(length))]
        deep = b""
        for _ in range(10000):
            deep = field(1, deep)[:60000]
        texts += [deep, field(1, field(3, field(6, "j") * 20000)[:60000]), b"\x0b" * 60000, field(1, b"\x08" * 50000)]
        texts += [field(number, b"\x0a\x00" * 30000) for number in range(1, 8)]
        for text in texts:
            for first in (False, True):
                with contextlib.suppress(OSError):
                    peer = connect(path)
                    if first:
                        say(peer, hello(3, 4, "odd"), [memory_file(1 << 20)])
                    say(peer, text)
                    peer.close()

    return served(attack)


@promises("the collector grows by no more than its buffers, and scrapes and the owner are served meanwhile")
def slow_readers_of_everything():
    """Sixty readers of each page and file read one byte a second, with keep-alive and pipelined
    requests."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15")
    folder, _ = judged([1])
    pid = collector()
    name = folder.name.split("-", 1)[1]
    pages = ["/status", "/incidents", f"/incidents/{name}", f"/incidents/{name}/report.html", f"/incidents/{name}/verdict.txt",
             f"/incidents/{name}/py_stack.svg", "/slow_ranks", "/health"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    before = status(pid, "VmRSS")
    peers = []
    for _ in range(60):
        for port, paths in ((PORT, pages), (PORT + 1, ["/metrics"])):
            for page in paths:
                peer = socket.socket()
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                peer.settimeout(5)
                with contextlib.suppress(OSError):
                    peer.connect(("127.0.0.1", port))
                    peer.sendall(f"GET {page} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 20)
                    peers.append(peer)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.setblocking(False)
                peer.recv(1)
        owner_status()
        must(http_get("/metrics", port=PORT + 1)[0] == 200, "no metrics")
        time.sleep(1)
    grown = status(pid, "VmRSS") - before
    must(grown < 60 << 10, f"the collector grew by {grown} kB")
    must(alive(pid), "the collector is gone")
    job.signal(signal.SIGTERM)
    for peer in peers:
        peer.close()
    works_still()
    return f"grew by {grown} kB, {len(peers)} readers"


@promises("the cluster collector grows by no more than its buffers, and judges the hang of a job")
def cluster_with_half_open_tls():
    """A cluster collector with 400 descriptors gets a thousand half-open TLS handshakes, renewed
    all the time."""
    folder = DIR / "tls"
    folder.mkdir()
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", folder / "key.pem", "-out",
         folder / "cert.pem"], capture_output=True)
    if made.returncode != 0:
        raise Unable("no openssl")
    (folder / "token").write_text("a" * 64)
    port = free_port()
    (DIR / "cluster").mkdir()
    own = Proc(["bash", "-c", 'ulimit -n 400; exec "$@"', "bash", COLLECTOR, "cluster", "--listen", f"127.0.0.1:{port}"],
               env={"XPU_TIMER_TIMELINE_PATH": DIR / "cluster", "XPU_TIMER_CLUSTER_CERT_FILE": folder / "cert.pem",
                    "XPU_TIMER_CLUSTER_KEY_FILE": folder / "key.pem", "XPU_TIMER_COLLECTOR_TOKEN_FILE": folder / "token"})
    wait_for(f"it listens: {tail(own.err())}", lambda: "listening" in own.err() or own.ended(), 20)
    must(not own.ended(), own.err())
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    hello_start = bytes.fromhex("16030100c8010000c40303")
    over, most = threading.Event(), [0]

    def floods():
        peers = []
        while not over.is_set():
            peer = socket.socket()
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                peer.connect(("127.0.0.1", port))
            peers.append(peer)
            time.sleep(0.004)
            with contextlib.suppress(OSError):
                peer.send(hello_start)
            if len(peers) > 1000:
                peers.pop(0).close()
            most[0] = max(most[0], status(own.pid, "VmRSS")) if len(peers) % 50 == 0 else most[0]

    flood = threading.Thread(target=floods, daemon=True)
    flood.start()
    time.sleep(5)
    env = {"XPU_TIMER_COLLECTOR": f"https://localhost:{port}", "XPU_TIMER_COLLECTOR_TOKEN_FILE": folder / "token",
           "XPU_TIMER_COLLECTOR_CA_FILE": folder / "cert.pem"}
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=60", env=env)
    try:
        wait_for(f"a verdict at the cluster; {tail(own.err())}", lambda: list((DIR / "cluster").glob("incident-*/verdict.json")), 90)
    finally:
        over.set()
    must(alive(own.pid), tail(own.err()))
    must(most[0] < 200 << 10, f"it had {most[0]} kB")
    silent(job)
    return f"at most {most[0]} kB"
