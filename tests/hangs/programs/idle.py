"""Programs that are idle, mildly busy or healthy, and long steps that pass. None of them hangs.

    idle.py SCENARIO          starts all processes of SCENARIO
    idle.py SCENARIO HELPER   is one of its helper processes, which has no rank
    idle.py --list            lists the scenarios, with their kind and the seconds to watch them

SCENARIO is a function of this file. Every rank calls it; without ranks the first process does. An
`idle` program works for some seconds and then waits for something from outside. A `healthy` one
works on, with pauses. In one that `passes`, other ranks wait for a long time for a rank that makes
progress.
"""

import asyncio
import concurrent.futures
import http.client
import http.server
import itertools
import json
import os
import pdb
import pty
import queue
import socket
import subprocess
import sys
import threading
import time
import zlib

import waits
from waits import FORK, FORKSERVER, SPAWN, Job, batches_of, die_with_parent, fork, give_batch, libc, map_board, path
from waits import publish, read_published, start, tcp_client, worker

WARM_STEPS = 75
SCENARIOS = {}


def scenario(kind, seconds, ranks=0, helpers=()):
    def register(function):
        SCENARIOS[function.__name__] = (function, kind, seconds, ranks, helpers)
        return function

    return register


def write_truth(**truth):
    if target := os.environ.get("XPU_HANGS_TRUTH"):
        with open(f"{target}.{os.getpid()}", "w") as file:
            json.dump(dict(hang=False, **truth), file)
        os.replace(f"{target}.{os.getpid()}", target)


def passes(pid, place, *causes):
    """Other ranks now wait for the process `pid`, which makes progress in the function `place`."""
    write_truth(culprits=[pid], causes=causes, place=place)


def warm_up(job):
    for _ in range(WARM_STEPS):
        job.train_step()


def use_cpu(seconds):
    """Work of several functions on the CPU."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = " ".join(map(str, range(2000))).encode()
        packed = zlib.compress(text)
        assert len(zlib.decompress(packed)) == len(text)


# Servers of models.


def tensor_parallel_worker(rank, requests):
    """One rank of the model; waits for the engine."""
    job = Job(rank, 2)
    while True:
        requests.recv()
        job.train_step()
        requests.send("tokens")


class Engine:
    """Passes each request on to two workers, the ranks of the model."""

    def __init__(self, context=SPAWN):
        self.pipes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            worker(tensor_parallel_worker, rank, theirs, context=context, name=f"worker-{rank}")
            self.pipes.append(ours)

    def generate(self):
        for pipe in self.pipes:
            pipe.send("prompt")
        return [pipe.recv() for pipe in self.pipes]


def answer_with(generate):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            generate()
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_arguments):
            pass

    return Handler


def serve_http(generate, name="server.port"):
    """Serves requests in threads, forever."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer_with(generate))
    publish(name, server.server_address[1])
    server.serve_forever()


def connect_http(name="server.port"):
    return http.client.HTTPConnection("127.0.0.1", int(read_published(name)))


def get(connection):
    connection.request("GET", "/generate")
    connection.getresponse().read()


def first_user():
    """Sends requests for a while, and ends."""
    connection = connect_http()
    for _ in range(WARM_STEPS):
        get(connection)


@scenario("idle", 30, helpers=("first_user",))
def inference_server(_job):
    """No user sends a request any more; the workers wait for the engine, the engine for HTTP."""
    engine, generation = Engine(), threading.Lock()

    def generate():
        with generation:
            engine.generate()

    serve_http(generate)


def keep_alive_user():
    """Sends requests for a while, then keeps its connection without a request."""
    connection = connect_http()
    for _ in range(WARM_STEPS):
        get(connection)
    while True:
        time.sleep(3600)


@scenario("idle", 30, helpers=("keep_alive_user",))
def keep_alive_client(_job):
    """The client holds an idle keep-alive connection, and a thread of the server reads from it."""
    serve_http(Engine(FORKSERVER).generate)


def rare_user():
    connection = connect_http()
    for _ in range(WARM_STEPS):
        get(connection)
    while True:
        time.sleep(7)
        get(connection)


@scenario("healthy", 40, helpers=("rare_user",))
def rare_requests(_job):
    """A server that has one request every 7 s."""
    serve_http(Engine().generate)


@scenario("idle", 30, helpers=("first_user",))
def server_with_queue(_job):
    """The model runs in the first process; its generation thread waits for requests in a queue."""
    requests = queue.Queue()

    def generate():
        done = threading.Event()
        requests.put(done)
        done.wait()

    def generation_loop():
        job = Job(0, 1)
        while True:
            done = requests.get()
            job.train_step()
            done.set()

    threading.Thread(target=generation_loop, name="generation", daemon=True).start()
    serve_http(generate)


def stream_user():
    connection = tcp_client("engine.port")
    for _ in range(WARM_STEPS):
        connection.sendall(b"prompt\n")
        connection.recv(64)


@scenario("idle", 30, helpers=("stream_user",))
def asyncio_engine(_job):
    """An engine on asyncio streams; after some requests its event loop waits for a connection."""
    engine = Engine()

    async def answer_stream(reader, writer):
        while await reader.readline():
            await asyncio.to_thread(engine.generate)
            writer.write(b"tokens\n")

    async def serve_streams():
        server = await asyncio.start_server(answer_stream, "127.0.0.1", 0)
        publish("engine.port", server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve_streams())


def embed_stage(inbox, outbox):
    job = Job(0, 1)
    while True:
        outbox.put(inbox.get())
        job.train_step()


def decode_stage(inbox, outbox):
    while True:
        outbox.put(inbox.get())


@scenario("idle", 30)
def stages_at_rest(_job):
    """Three processes that are connected by queues have answered everything, and wait for input."""
    texts, vectors, answers = SPAWN.Queue(), SPAWN.Queue(), SPAWN.Queue()
    worker(embed_stage, texts, vectors, context=SPAWN, name="embed")
    worker(decode_stage, vectors, answers, context=SPAWN, name="decode")
    for _ in range(WARM_STEPS):
        texts.put("text")
        answers.get()
    listener = socket.create_server(("127.0.0.1", 0))
    while True:
        listener.accept()


@scenario("idle", 30, ranks=2)
def kept_for_serving(job):
    """The training has ended; every rank keeps the model and waits for HTTP requests."""
    warm_up(job)
    serve_http(job.layers.launch, f"server.{job.rank}.port")


def gradient_client():
    connection = tcp_client("parameters.port")
    for _ in range(WARM_STEPS):
        connection.sendall(bytes(64))
        connection.recv(64)


@scenario("idle", 30, helpers=("gradient_client",))
def parameter_server(_job):
    """All clients of a parameter server have left; it waits in accept."""
    job = Job(0, 1)
    listener = socket.create_server(("127.0.0.1", 0))
    publish("parameters.port", listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        while gradients := connection.recv(64):
            job.train_step()
            connection.sendall(gradients)


# People.


@scenario("idle", 30)
def notebook(_job):
    """A notebook's kernel has trained a model, and waits on its socket for the next cell."""
    ours, theirs = socket.socketpair()

    def notebook_kernel():
        job = Job(0, 1)
        while theirs.recv(64):
            warm_up(job)
            theirs.sendall(b"Out[1]: 0.1")

    fork(notebook_kernel)
    ours.sendall(b"train()")
    ours.recv(64)
    ours.recv(64)  # the user's browser shows no new message


def attach_terminal():
    """Standard input is a terminal from now on; its user does not type."""
    controller, terminal = pty.openpty()
    os.dup2(terminal, 0)
    sys.stdin = os.fdopen(0)
    return controller


@scenario("idle", 25)
def interactive_prompt(_job):
    """A chat program has loaded its model, and waits for a line of its user."""
    job = Job(0, 1)
    _controller = attach_terminal()
    warm_up(job)
    while question := input("> "):
        print(question)


@scenario("idle", 30, ranks=2)
def debugger_prompt(job):
    """Rank 0 stops in pdb after the training, and rank 1 waits for a file that rank 0 would write
    then; no collective is pending."""
    _controller = attach_terminal()
    warm_up(job)
    if job.rank == 0:
        pdb.Pdb(nosigint=True, readrc=False).set_trace()
        publish("continue", "")
    while not os.path.exists(path("continue")):
        time.sleep(0.5)
    job.train()


@scenario("idle", 30, ranks=3)
def paused_by_user(job):
    """The user has paused the training; all ranks poll for the file that resumes it."""
    warm_up(job)

    def wait_while_paused():
        while not os.path.exists(path("resume")):
            time.sleep(1)

    wait_while_paused()
    job.train()


# Waiting for work.


@scenario("idle", 30, ranks=2)
def evaluator_polls(job):
    """An evaluator has evaluated all checkpoints; every rank polls the folder for the next one."""
    publish("checkpoint-1", "")
    for number in itertools.count(1):
        while not os.path.exists(path(f"checkpoint-{number}")):
            time.sleep(0.5)
        warm_up(job)


@scenario("idle", 30, ranks=2)
def evaluator_inotify(job):
    """Every rank of an evaluator waits with inotify for the next checkpoint."""
    folder = os.path.dirname(os.path.abspath(path("checkpoint")))
    warm_up(job)
    os.makedirs(f"{folder}/checkpoints", exist_ok=True)
    watch = libc.inotify_init1(0)
    libc.inotify_add_watch(watch, f"{folder}/checkpoints".encode(), 0x100)  # IN_CREATE

    def wait_for_checkpoint():
        os.read(watch, 4096)

    while True:
        wait_for_checkpoint()
        warm_up(job)


def label_images(tasks, results):
    job = Job(0, 1)
    while True:
        results.put(tasks.get())
        job.train_step()


@scenario("idle", 30)
def queue_consumer(_job):
    """A consumer has emptied its queue, and its producer waits on a socket for new tasks."""
    tasks, results = FORK.Queue(), FORK.Queue()
    worker(label_images, tasks, results, name="labeler")
    for number in range(WARM_STEPS):
        tasks.put(number)
        results.get()
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    receiver.recv(64)


def actor(rank, mailbox):
    job = Job(rank, 2)
    while mailbox.recv(64):
        job.train_step()
        mailbox.sendall(b"done")


@scenario("idle", 30)
def actors_at_rest(_job):
    """Two actors wait for a task on their sockets; only the raylet, which sends itself heartbeats,
    is active."""
    mailboxes = []
    for rank in range(2):
        ours, theirs = socket.socketpair()
        fork(actor, rank, theirs)
        mailboxes.append(ours)
    for _ in range(WARM_STEPS):
        for mailbox in mailboxes:
            mailbox.sendall(b"task")
        for mailbox in mailboxes:
            mailbox.recv(64)
    heartbeat = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    heartbeat.bind(("127.0.0.1", 0))

    def raylet_loop():
        while True:
            heartbeat.sendto(b"alive", heartbeat.getsockname())
            heartbeat.recv(64)
            time.sleep(0.25)

    raylet_loop()


@scenario("healthy", 40, ranks=2)
def cron_loop(job):
    """The job works for one second in every eight."""
    warm_up(job)
    while True:
        time.sleep(7)
        for _ in range(33):
            job.train_step()


@scenario("healthy", 40, ranks=2)
def sleep_between_epochs(job):
    """All ranks sleep for 6 s between two epochs."""
    while True:
        warm_up(job)
        time.sleep(6)


# Training with long steps.


@scenario("healthy", 35, ranks=2)
def long_evaluation(job):
    """All ranks evaluate on the CPU for 9 s, and then train on."""

    def evaluate():
        use_cpu(9)

    while True:
        warm_up(job)
        evaluate()


@scenario("overdue", 35, ranks=2)
def long_evaluation_of_one_rank(job):
    """Rank 0 alone evaluates on the CPU for 10 s, and rank 1 waits in the next collective."""
    warm_up(job)

    def evaluate():
        use_cpu(10)

    if job.rank == 0:
        passes(os.getpid(), "use_cpu", "long_step", "missing_rank")
        evaluate()
    job.train()


def archive_checkpoints(folder):
    """Compresses and writes for 2 s of every 3."""
    for number in itertools.count():
        end = time.monotonic() + 2
        with open(f"{folder}/archive-{number % 2}", "wb") as file:
            while time.monotonic() < end:
                file.write(zlib.compress(bytes(1 << 20)))
        time.sleep(1)


@scenario("healthy", 30, ranks=2)
def checkpoint_writer_busy(job):
    """The training goes on beside a busy child that writes checkpoints."""
    if job.rank == 0:
        folder = os.path.dirname(os.path.abspath(path("archive")))
        worker(archive_checkpoints, folder, context=SPAWN, name="checkpoint-writer")
    job.train()


def generate_source(functions):
    lines = []
    for number in range(functions):
        body = " ".join(f"if (a[{item}] > {number}) a[{item + 1}] += a[{item}] * {number};" for item in range(60))
        lines.append(f"void f{number}(double *a) {{ for (int i = 0; i < 64; ++i) {{ {body} }} }}")
    return "\n".join(lines)


@scenario("passes", 40, ranks=2)
def compile_in_child(job):
    """Rank 1 builds an extension with gcc for 8 s or more, and rank 0 waits in the collective."""
    warm_up(job)

    def build_extension():
        with open(path("extension.c"), "w") as file:
            file.write(generate_source(60))
        begin = time.monotonic()
        while time.monotonic() < begin + 8:
            line = ["gcc", "-O2", "-c", path("extension.c"), "-o", path("extension.o")]
            subprocess.run(line, preexec_fn=die_with_parent, check=True)

    if job.rank == 1:
        passes(os.getpid(), "build_extension", "compile", "long_step")
        build_extension()
    job.train()


def decode_slowly(batches):
    while True:
        for _ in range(5):
            use_cpu(2)
        batches.put(0)


@scenario("passes", 40, ranks=2)
def slow_data_loader(job):
    """The loader of rank 0 decodes each batch for 10 s, and rank 1 waits in the collective."""
    warm_up(job)
    if job.rank != 0:
        return job.train()
    batches = FORK.Queue(1)
    loader = worker(decode_slowly, batches, name="loader-0")
    passes(loader.pid, "use_cpu", "data_loader", "long_step")

    def next_batch():
        batches.get()

    job.train(next_batch)


@scenario("passes", 40, ranks=2)
def slow_download(job):
    """Rank 1 reads 200 KB a second from a mirror for 12 s, and rank 0 waits in the collective."""
    warm_up(job)
    if job.rank != 1:
        return job.train()
    ours, theirs = socket.socketpair()

    def send_file():
        for _ in range(120):
            theirs.sendall(bytes(20_000))
            time.sleep(0.1)

    fork(send_file)
    theirs.close()

    def download_shard():
        with open(path("shard"), "wb") as file:
            while data := ours.recv(4096):
                file.write(data)

    passes(os.getpid(), "download_shard", "long_step", "storage_io", "data_loader", "missing_rank")
    download_shard()
    job.train()


@scenario("healthy", 35, ranks=2)
def one_slow_rank(job):
    """The job runs with a low priority, and rank 1 needs 2 s on the CPU for each of its steps."""
    os.nice(10)
    warm_up(job)

    def augment_batch():
        use_cpu(2)

    job.train(augment_batch if job.rank == 1 else None)


# Processes at rest beside a training.


def square(number):
    return number * number


@scenario("healthy", 25, ranks=2)
def fork_server_at_rest(job):
    """The resource tracker and the fork server of rank 0 wait beside the training."""
    if job.rank == 0:
        with concurrent.futures.ProcessPoolExecutor(1, FORKSERVER, die_with_parent) as executor:
            executor.submit(square, 2).result()
        _lock = FORKSERVER.Lock()
    job.train()


@scenario("healthy", 25, ranks=2)
def pool_at_rest(job):
    """The workers of a pool of rank 1 have nothing to do beside the training."""
    if job.rank == 1:
        _pool = SPAWN.Pool(2, die_with_parent)
        _pool.map(square, range(8))
    job.train()


def sampling_profiler():
    while True:
        time.sleep(3600)


@scenario("healthy", 25, ranks=2, helpers=("sampling_profiler",))
def profiler_sleeps(job):
    """A profiler process sleeps beside the training, and a profiler thread in every rank."""
    threading.Thread(target=threading.Event().wait, name="profiler", daemon=True).start()
    job.train()


def board():
    serve_http(lambda: None, "board.port")


@scenario("healthy", 25, ranks=2)
def board_server(job):
    """A child of rank 0 shows curves over HTTP, and nobody looks at them."""
    if job.rank == 0:
        start("board")
        get(connect_http("board.port"))
    job.train()


def metrics_service():
    """Receives a message now and then, over a socket of its own for each rank."""
    listener = socket.create_server(("127.0.0.1", 0))
    publish("metrics.port", listener.getsockname()[1])

    def receive_metrics(connection):
        while connection.recv(64):
            pass

    while True:
        threading.Thread(target=receive_metrics, args=(listener.accept()[0],), daemon=True).start()


@scenario("healthy", 30, ranks=2, helpers=("metrics_service",))
def metrics_over_socket(job):
    """Every rank sends a metric to a service process in every fifth second."""
    connection = tcp_client("metrics.port")
    sent = [time.monotonic()]

    def log_metrics():
        if time.monotonic() > sent[0] + 5:
            sent[0] = time.monotonic()
            connection.sendall(b"loss 0.1")

    job.train(log_metrics)


def elastic_agent():
    """Starts the ranks, and polls them."""
    ranks = []
    for rank in range(2):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
        program = [sys.executable, os.path.abspath(__file__), sys.argv[1]]
        ranks.append(subprocess.Popen(program, env=environment, preexec_fn=die_with_parent))
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)


@scenario("healthy", 25)
def agent_polls(job):
    """An elastic agent polls its two healthy ranks."""
    if job:
        return job.train()
    start("elastic_agent").wait()


def rollout_actor(rollouts):
    """Plays slowly: one rollout takes 6 s, partly on the CPU and partly asleep."""
    for count in itertools.count():
        if count >= WARM_STEPS:
            for _ in range(12):
                use_cpu(0.1)
                time.sleep(0.4)
        rollouts.put(count)


@scenario("healthy", 40)
def slow_rollouts(_job):
    """A learner waits 6 s for each rollout of its actor, which is alive."""
    rollouts = SPAWN.Queue(1)
    worker(rollout_actor, rollouts, context=SPAWN, name="actor")
    learner = Job(0, 1)

    def wait_for_rollout():
        rollouts.get()

    learner.train(wait_for_rollout)


def board_front_end():
    """Gives a batch for each request. After the first requests, its thread waits for users."""
    board, requests = map_board(), queue.Queue()
    for number in range(WARM_STEPS):
        requests.put(number)
    users = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=users.accept, daemon=True).start()
    for batch in itertools.count(1):
        requests.get()
        give_batch(board, batch, range(2))


@scenario("idle", 30, ranks=2, helpers=("board_front_end",))
def workers_poll_a_board(job):
    """Two workers poll shared memory for batches of a front end, which has no more requests."""
    job.train(batches_of(job.rank))


def board_tokenizer():
    board = map_board()
    for batch in itertools.count(1):
        if batch % WARM_STEPS == 0:
            use_cpu(6)
        give_batch(board, batch, range(2))


@scenario("healthy", 40, ranks=2, helpers=("board_tokenizer",))
def board_with_a_slow_tokenizer(job):
    """The ranks poll shared memory for batches. Every 75th takes the tokenizer 6 s."""
    job.train(batches_of(job.rank))


@scenario("healthy", 25, ranks=2)
def many_short_children(job):
    """Rank 0 runs a short command before every step."""

    def read_driver_version():
        subprocess.run(["cat", "/proc/version"], stdout=subprocess.DEVNULL, check=True)

    job.train(read_driver_version if job.rank == 0 else None)


@scenario("healthy", 25, ranks=2)
def ends_normally(job):
    """The job trains for some seconds more, and ends."""
    for _ in range(4):
        warm_up(job)
    job.comm.destroy()


def main():
    name, *helper = sys.argv[1:]
    if name == "--list":
        for listed, (_, kind, seconds, _, _) in SCENARIOS.items():
            print(listed, kind, seconds)
        return
    function, _, _, ranks, helpers = SCENARIOS[name]
    if helper:
        globals()[helper[0]]()
    elif "RANK" in os.environ:
        function(Job())
    else:
        write_truth()
        if ranks:
            waits.launch(ranks, helpers)
        else:
            for helper in helpers:
                start(helper)
            function(None)


if __name__ == "__main__":
    main()
