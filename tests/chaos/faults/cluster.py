"""Faults of the cluster collector and of the network. A node then works as if it had no cluster
collector."""

import contextlib
import http.server
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

from kit import (
    CHANCE, COLLECTOR, DIR, TIMELINE, Proc, alive, http_get, judged, kill9, log_text, must,
    plain_text, promises, registered, silent, status, tail, train, trains, wait_for,
)

ALONE = "training continues, nothing is printed into the job, and the node judges its own hang"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def cluster(port=None):
    port = port or free_port()
    folder = DIR / "cluster"
    folder.mkdir(exist_ok=True)
    proc = Proc([COLLECTOR, "cluster", "--listen", f"127.0.0.1:{port}"],
                env={"XPU_TIMER_TIMELINE_PATH": folder, "XPU_TIMER_COLLECTOR": None})
    wait_for(f"the cluster collector listens: {tail(proc.err())}", lambda: reachable(port) or proc.ended(), 20)
    must(not proc.ended(), tail(proc.err()))
    return proc, port


def reachable(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def of(port):
    return {"XPU_TIMER_COLLECTOR": f"http://127.0.0.1:{port}"}


def hangs(port, at=15, **options):
    return train("--fault=loader", "--fault-rank=1", f"--fault-step={at}", env=of(port), **options)


def written(seconds=80):
    found = wait_for("a verdict at the node or the cluster", lambda: [path for root in (TIMELINE, DIR / "cluster") for path in Path(root).rglob("verdict.json")], seconds)
    verdict = json.loads(found[0].read_text())
    must(verdict["culprits"] == [1], f"{verdict['culprits']}: {verdict['sentence']}")
    return found[0]


@promises(ALONE)
def cluster_missing():
    """XPU_TIMER_COLLECTOR names a port without a listener."""
    job = hangs(free_port())
    written()
    silent(job, 1)


@promises(ALONE)
def cluster_silent():
    """The process that listens at XPU_TIMER_COLLECTOR accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = hangs(server.getsockname()[1])
        written()
        silent(job, 1)


@promises(ALONE)
def cluster_nonsense():
    """The process that listens at XPU_TIMER_COLLECTOR answers with random bytes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serves():
        while True:
            peer, _ = server.accept()
            with contextlib.suppress(OSError):
                peer.sendall(os.urandom(20000))
                peer.close()

    threading.Thread(target=serves, daemon=True).start()
    job = hangs(server.getsockname()[1])
    written()
    silent(job, 1)


@promises(ALONE, chance=True)
def cluster_killed():
    """SIGKILL ends the cluster collector at a random moment of a hang."""
    own, port = cluster()
    job = hangs(port, 30)
    registered(2)
    time.sleep(CHANCE.uniform(0, 5))
    kill9(own.pid)
    written()
    silent(job)


@promises(ALONE)
def cluster_stopped():
    """SIGSTOP stops the cluster collector before a hang."""
    own, port = cluster()
    job = hangs(port, 40)
    registered(2)
    own.signal(signal.SIGSTOP)
    written(100)
    silent(job)


@promises("the restarted cluster collector or the node has the verdict")
def cluster_restarted():
    """The cluster collector is killed and restarted before a hang."""
    own, port = cluster()
    job = hangs(port, 60)
    registered(2)
    kill9(own.pid)
    own.wait(10)
    cluster(port)
    written()
    silent(job)


@promises("the cluster collector survives, and the hang of its job is judged")
def cluster_garbage():
    """The port of the cluster collector receives random bytes, half-open connections and
    handshakes."""
    own, port = cluster()
    kept = []
    for text in [os.urandom(5000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(3000), b"GET /" + b"a" * 200000, bytes.fromhex("16030100c8010000c40303") + os.urandom(189)] * 20:
        with contextlib.suppress(OSError):
            peer = socket.create_connection(("127.0.0.1", port), 3)
            peer.sendall(text)
            kept.append(peer)
    job = hangs(port)
    written()
    must(alive(own.pid), tail(own.err()))
    must(status(own.pid, "VmRSS") < 300 << 10, f"it has {status(own.pid, 'VmRSS')} kB")
    silent(job)


@promises("it refuses to listen beyond loopback, and names what is missing")
def cluster_without_a_token():
    """The cluster collector is started to listen on all addresses, without TLS and a token."""
    proc = Proc([COLLECTOR, "cluster", "--listen", f"0.0.0.0:{free_port()}"])
    must(proc.wait(20) != 0, "it listens")
    must("token" in proc.err().lower() or "tls" in proc.err().lower() or "cert" in proc.err().lower(), proc.err())


@promises("a page of another origin gets nothing through the owner's browser, makes no dump and joins no cluster")
def cluster_from_a_browser():
    """A page whose host name resolves to loopback sends requests to the cluster collector, also
    with the content type of gRPC."""
    _, port = cluster()
    must(http_get("/status", port=port)[0] == 200, "its owner gets no answer")
    must(http_get("/status", port=port, headers={"Host": "127.0.0.2:1"})[0] == 200, "another address of loopback gets no answer")
    for kind in ("text/plain", "application/grpc", "application/grpc-web+proto"):
        for headers in ({"Host": f"evil.example:{port}"}, {"Origin": "http://evil.example"}):
            for method, path in (("GET", "/status"), ("GET", "/incidents"), ("GET", "/metrics"), ("POST", "/dump"), ("POST", JOIN)):
                body = b"\0\0\0\0\0" if method == "POST" else None
                code, text = http_get(path, method, port, {**headers, "Content-Type": kind}, body=body)
                must(code == 403 or kind.startswith("application/grpc") and not text, f"{path} as {kind} with {headers}: {code} {text[:80]}")


JOIN = "/xpu_timer.v1.Cluster/Join"


@promises("the node sends nothing, reports this, and works alone")
def cluster_beyond_loopback_without_tls():
    """XPU_TIMER_COLLECTOR is an http:// URL of another host."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_COLLECTOR": "http://192.0.2.1:18890"})
    written()
    silent(job, 1)


@promises(ALONE)
def cluster_name_unknown():
    """XPU_TIMER_COLLECTOR names an unknown host."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_COLLECTOR": "https://no.such.host.invalid:18890"})
    written()
    silent(job, 1)


def relayed(port, pumps):
    """Starts a relay to a port, in which `pumps` forwards data from one side to the other. Returns
    the relay's port."""
    server = socket.create_server(("127.0.0.1", 0))

    def relays():
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=pumps, args=(one, other), daemon=True).start()

    threading.Thread(target=relays, daemon=True).start()
    return server.getsockname()[1]


@promises("node and cluster collector keep working, and the node or both judge the hang")
def cluster_partition():
    """At the moment of the hang, the network between node and cluster collector drops all data."""
    own, port = cluster()
    cut = threading.Event()

    def pumps(one, other):
        with contextlib.suppress(OSError):
            while part := one.recv(65536):
                if cut.is_set():
                    time.sleep(1000)
                other.sendall(part)

    job = hangs(relayed(port, pumps), 60)
    registered(2)
    trains(job, 2)
    cut.set()
    written(100)
    must(alive(own.pid), tail(own.err()))
    silent(job)


@promises("the hang is judged over the slow link")
def cluster_over_a_bad_link():
    """All data between node and cluster collector arrives late, in pieces of at most 200 bytes."""
    own, port = cluster()

    def pumps(one, other):
        with contextlib.suppress(OSError):
            while part := one.recv(200):
                time.sleep(0.002)
                other.sendall(part)

    job = hangs(relayed(port, pumps))
    written(100)
    silent(job)


@promises("the verdict is written, and the collector ends as usual")
def webhook_dead():
    """The server at XPU_TIMER_WEBHOOK accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = train("--fault=loader", "--fault-rank=1", "--fault-step=15",
                    env={"XPU_TIMER_WEBHOOK": f"http://127.0.0.1:{server.getsockname()[1]}/hook"})
        judged([1])
        silent(job)


@promises("the log contains neither the token nor the password of the webhook")
def webhook_secret():
    """XPU_TIMER_WEBHOOK contains a secret and cannot be reached, with XPU_TIMER_LOG=trace."""
    hook = f"http://user:s3cr3tpass@127.0.0.1:{free_port()}/T0KEN-s3cr3t"
    env = {"XPU_TIMER_WEBHOOK": hook, "XPU_TIMER_LOG": "trace"}
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env=env)
    judged([1])
    wait_for("the webhook is tried", lambda: "webhook" in log_text(), 20)
    time.sleep(2)
    must("s3cr3t" not in log_text(), "the log has the secret")
    silent(job)


@promises("the webhook receives plain text on one line")
def webhook_text():
    """The job's name contains a mention, line breaks, escapes and direction marks, and the verdict
    goes to a webhook."""
    posts = []

    class Chat(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(self.rfile.read(int(self.headers["content-length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    chat = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=chat.serve_forever, daemon=True).start()
    name = "<!channel> @here\nxpu_timer: job other: forged\x1b[2J\u202e\u2066x"
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15",
                env={"XPU_TIMER_WEBHOOK": f"http://127.0.0.1:{chat.server_port}/x", "XPU_TIMER_JOB": name})
    judged([1])
    wait_for("the verdict is posted", lambda: posts, 20)
    plain_text(posts[0], "the body")
    text = json.loads(posts[0])["text"]
    plain_text(text, "the text")
    must("\n" not in text, f"a forged line: {text!r}")
    must("<" not in text and "@" not in text, f"a mention: {text!r}")
    silent(job)
