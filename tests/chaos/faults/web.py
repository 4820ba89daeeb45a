"""Foreign clients and invalid requests on the ports. The collector serves its jobs, and nobody
reads the data of others."""

import functools
import os
import socket
import subprocess
import threading
import time

from kit import (
    DIR, DUMP, EXAMPLES, PORT, PRINT_ENV, SYSTEM_PYTHON, TIMELINE, Proc, add, alive, as_user,
    authorized, collector, descriptors, http_get, judged, log_text, must, owner_status,
    promises, rank_pids, ranks, registered, silent, status, tail, train, trains, wait_for,
    works_still,
)

SERVED = "the collector survives and answers, training continues, and the next hang is judged"


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


def served(attack, grows_kb=64 << 10):
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

    return served(attack)


for _name, _row in GARBAGE.items():
    add(f"web_{_name}", f"Both ports receive {_row[0]}.", SERVED, functools.partial(garbage, _name))

PATHS = ["/incidents/../../../../etc/passwd", "/incidents/..%2f..%2f..%2fetc%2fpasswd", "/incidents/%2e%2e/%2e%2e/etc/passwd",
         "/incidents//etc/passwd", "/incidents/x%00y", "/incidents/" + "a" * 5000, "/incidents/%ff%fe", "/incidents/.", "/incidents/..",
         "/incidents/latest/../../../log/xpu_timer_collector.log", "//", "/%", "/status?" + "a=b&" * 5000, "/incidents/..\\..\\etc"]


@promises("no file outside the incident folders is served; " + SERVED)
def web_paths():
    """Requests name paths outside the folder, in every spelling."""

    def attack():
        for port in (PORT, PORT + 1):
            for path in PATHS:
                answer = raw(port, b"GET " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                must(b"root:" not in answer and b"listening on" not in answer, f"{path} serves a file")

    return served(attack)


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
    told = [name for name, text in shown.items() if secret in (text if isinstance(text, str) else text.decode(errors="replace"))]
    must(not told, f"named in {', '.join(told)}")


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
