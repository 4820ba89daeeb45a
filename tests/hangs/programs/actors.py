"""Actors, sweeps, launchers and other jobs on the simulated device whose processes have no rank
variables, or not in the environment that they were started with.

    actors.py SCENARIO     works until the trouble of the scenario begins, in step TROUBLE
    actors.py --list       one line for each scenario: NAME hang|passes|idle|healthy SECONDS
"""

import argparse
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time

import cuda
from servers import (
    TROUBLE,
    Wire,
    Worker,
    back_off,
    blame,
    blame_nobody,
    die_with_parent,
    encode_in_background,
    encode_prompts,
    freeze,
    gather_inputs,
    healthy,
    idle,
    in_thread,
    join_prefetch,
    key_value_store,
    listen_tcp,
    lock_cache_folder,
    main,
    next_image,
    outlive_parent,
    pad_batch,
    passes,
    raise_error,
    report_progress,
    run_out_of_memory,
    scenario,
    scratch,
    set_title,
    start,
    wait_for_sampler,
    write_trace,
)


def trouble_of(name):
    return globals()[name] if name else None


# Actors that a daemon starts and gives their tasks.


class Raylet:
    """The daemon of a node: starts actors, forwards tasks to them, and keeps their objects."""

    def __init__(self):
        self.actors, self.objects, self.changed = {}, set(), threading.Condition()

    def serve(self, wire):
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self.handle(wire, wire.recv())

    def handle(self, wire, message):
        match message:
            case {"register": rank}:
                with self.changed:
                    self.actors[rank] = wire
                    self.changed.notify_all()
            case {"submit": rank, "step": step}:
                with self.changed:
                    self.changed.wait_for(lambda: rank in self.actors)
                self.actors[rank].send({"step": step})
            case {"put": key}:
                with self.changed:
                    self.objects.add(key)
                    self.changed.notify_all()
            case {"get": key, "timeout": timeout}:
                with self.changed:
                    found = self.changed.wait_for(lambda: key in self.objects, timeout)
                wire.send({"found": found})
            case {"lease": _}:
                grant_lease()


def grant_lease():
    """The whole daemon is stopped."""
    blame(["process_stopped"], "grant_lease")
    os.kill(os.getpid(), signal.SIGSTOP)


def raylet(path, actors, odd, trouble):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    for rank in range(int(actors)):
        start("ray_actor", path, rank, actors, trouble if rank == int(odd) else "")
    set_title("raylet")
    daemon = Raylet()
    while True:
        in_thread(daemon.serve, Wire(listener.accept()[0]))


def ray_actor(path, rank, actors, trouble=""):
    rank = int(rank)
    wire = Wire.connect(path)
    wire.send({"register": rank})
    set_title("ray::Learner")
    learner = Worker("learners", rank, int(actors), trouble_of(trouble))
    learner.raylet = path
    while True:
        step = next_task(wire)
        learner.execute_model(step)
        wire.send({"put": f"{rank}/{step}"})


def next_task(wire):
    return wire.recv()["step"]


def get(wire, key, timeout=0.5):
    """As ray.get, in pieces."""
    while True:
        wire.send({"get": key, "timeout": timeout})
        if wire.recv()["found"]:
            return


def start_raylet(actors, odd, trouble):
    path = scratch("raylet")
    start("raylet", path, actors, odd, trouble)
    while True:
        with contextlib.suppress(OSError):
            return Wire.connect(path)
        time.sleep(0.01)


def drive(trouble, odd=1, actors=4, steps=1 << 30):
    """The driver: one task for each actor, and then their results."""
    wire = start_raylet(actors, odd, trouble)
    for step in range(1, steps):
        for rank in range(actors):
            wire.send({"submit": rank, "step": step})
        for rank in range(actors):
            get(wire, f"{rank}/{step}")
        time.sleep(0.02)


def get_weights(learner):
    """The actor asks for an object that nobody makes."""
    blame(["missing_rank"], "get_weights")
    wire = Wire.connect(learner.raylet)
    wire.send({"get": "weights/-1", "timeout": None})
    wire.sock.recv(1)


def request_lease(learner):
    Wire.connect(learner.raylet).send({"lease": 1})
    with contextlib.closing(Wire.connect(learner.raylet).sock) as sock:
        sock.recv(1)


@scenario
def ray_actor_sampler():
    """Actor 2 waits for a condition that nobody notifies; driver and raylet stay polite."""
    drive(wait_for_sampler, odd=2)


@scenario
def ray_actor_killed():
    """Actor 1 is killed; the raylet has no message for the driver about it."""
    drive(run_out_of_memory)


@scenario
def ray_actor_gil():
    """A thread of actor 3 keeps the GIL in an extension."""
    drive(encode_in_background, odd=3)


@scenario
def ray_missing_object():
    """Actor 1 gets an object that no task makes."""
    drive(get_weights)


@scenario
def ray_raylet_stopped():
    """The raylet is stopped while actor 0 asks it for a lease; driver and actors wait for it."""
    drive(request_lease, odd=0)


@scenario
def ray_actor_sleeps():
    """Actor 0 sleeps for weeks before a retry."""
    drive(back_off, odd=0)


@idle
def ray_idle():
    """The cells of the notebook have run; all actors wait for tasks."""
    blame_nobody()
    drive("", steps=TROUBLE)
    time.sleep(1 << 20)


# A parameter server, and actors that push to it.


class ParameterServer:
    """Reader threads put the pushes into a queue; the main thread applies them."""

    def __init__(self, listener, actors, drop=None, extension=None, polite=False):
        self.drop, self.extension, self.polite = drop, extension, polite
        self.pushes, self.wires = queue.Queue(), [Wire(listener.accept()[0]) for _ in range(actors)]
        for wire in self.wires:
            in_thread(self.read_pushes, wire, name="reader")

    def read_pushes(self, wire):
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                push = wire.recv()
                if (push["step"], push["rank"]) == (TROUBLE, self.drop):
                    blame(["host_lock", "missing_rank", "unknown"], "gather_pushes")
                else:
                    self.pushes.put(push)

    def gather_pushes(self):
        for _ in self.wires:
            while True:
                with contextlib.suppress(queue.Empty):
                    self.pushes.get(timeout=0.5 if self.polite else None)
                    break

    def run(self):
        for step in itertools.count(1):
            self.gather_pushes()
            if step == TROUBLE and self.extension:
                self.extension(self)
            for wire in self.wires:
                wire.send({"weights": step})


def parameter_server(path, actors, drop, extension, polite):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)
    drop = int(drop) if drop else None
    ParameterServer(listener, int(actors), drop, trouble_of(extension), bool(polite)).run()


def push_gradients(path, rank, trouble=""):
    """An actor with a device of its own, and no communicator."""
    rank = int(rank)
    while not os.path.exists(path):
        time.sleep(0.01)
    wire = Wire.connect(path)
    actor = Worker(f"actor{rank}", 0, 1, device=rank)
    for step in itertools.count(1):
        actor.execute_model(step)
        if step == TROUBLE and trouble:
            trouble_of(trouble)(actor)
        wire.send({"step": step, "rank": rank})
        pull_weights(wire)
        time.sleep(0.02)


def pull_weights(wire):
    return wire.recv()


def serve_parameters(odd=None, trouble="", drop="", extension="", polite=""):
    path = scratch("parameters")
    processes = [start("parameter_server", path, 4, drop, extension, polite)]
    processes += [start("push_gradients", path, rank, trouble if rank == odd else "") for rank in range(4)]
    for process in processes:
        process.wait()


def aggregate(_server):
    """An extension sums the gradients, and keeps the GIL while it waits for a lock."""
    blame(["gil_deadlock"], "aggregate")
    mutex, program = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    program.pthread_mutex_lock(mutex)
    program.pthread_mutex_lock(mutex)


@scenario
def parameters_push_dropped():
    """The server takes a push of actor 1 for stale, and waits for another; all actors wait."""
    serve_parameters(drop="1")


@scenario
def parameters_server_gil():
    """The server holds its GIL in an extension that waits for its own mutex."""
    serve_parameters(extension=aggregate)


@scenario
def parameters_actor_killed():
    """Actor 2 is killed; the server asks its queue with a timeout, and waits for one more push."""
    serve_parameters(2, run_out_of_memory, polite="yes")


@scenario
def parameters_actor_flock():
    """Actor 3 locks its replay folder twice; the server and the other actors wait."""
    serve_parameters(3, lock_cache_folder)


# Actors in a ring of sockets, as gloo makes one.


def ring_actor(rank, size, trouble=""):
    rank, size = int(rank), int(size)
    left, right = connect_ring(rank, size)
    actor = Worker(f"actor{rank}", 0, 1, device=rank)
    for step in itertools.count(1):
        actor.execute_model(step)
        if step == TROUBLE and trouble:
            trouble_of(trouble)(actor)
        all_reduce(left, right, rank, size)
        time.sleep(0.02)


def connect_ring(rank, size):
    """Each listens on a port that a file tells, and connects to its right neighbour."""
    listener = listen_tcp()
    folder = os.environ["XPU_EXAMPLE_RENDEZVOUS"]
    with open(f"{folder}/ring.{rank}.new", "w") as file:
        file.write(str(listener.getsockname()[1]))
    os.rename(f"{folder}/ring.{rank}.new", f"{folder}/ring.{rank}")
    neighbour = f"{folder}/ring.{(rank + 1) % size}"
    while not os.path.exists(neighbour):
        time.sleep(0.01)
    with open(neighbour) as file:
        right = socket.create_connection(("127.0.0.1", int(file.read())))
    right.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener.accept()[0], right


def all_reduce(left, right, rank, size):
    part = bytes([rank]) * 1024
    for _ in range(2 * size - 2):
        right.sendall(part)
        part = left.recv(1024, socket.MSG_WAITALL)


def start_ring(odd, trouble):
    for rank in range(4):
        start("ring_actor", rank, 4, trouble if rank == odd else "")
    report_progress()


@scenario
def ring_actor_prefetch():
    """Actor 1 joins a thread that never ends; the ring of sockets waits for it."""
    start_ring(1, join_prefetch)


@scenario
def ring_actor_stopped():
    """Actor 2 is stopped by a signal; its neighbours wait in their sockets."""
    start_ring(2, freeze)


@scenario
def ring_actor_pool():
    """Actor 0 waits for a pool of threads that wait for each other."""
    start_ring(0, gather_inputs)


# Reinforcement learning: rollout actors with queues, and two learners.


def rollout(actor, trajectories, trouble, commands=None, weights=0):
    """Plays on its own device; with `weights`, it takes new ones on each command."""
    die_with_parent()
    set_title(f"rollout-{actor}")
    policy = Worker(f"rollout{actor}", 0, 1, device=4 + actor)
    group = cuda.Communicator.create("weights", 1 + actor, weights) if weights else None
    for step in itertools.count(1):
        if group:
            take_command(commands)
        policy.execute_model(step)
        trajectories.put([step] * 64)
        if step == TROUBLE and trouble and trouble(policy, trajectories):
            continue
        if group:
            group.broadcast(policy.hidden, 0, policy.stream)
            policy.stream.synchronize()


def take_command(commands):
    return commands.recv()


def learner(rank, trajectories, trouble, commands=(), weights=0):
    die_with_parent()
    set_title(f"learner-{rank}")
    worker = Worker("learners", rank, 2, trouble)
    group = cuda.Communicator.create("weights", 0, weights) if weights and rank == 0 else None
    for step in itertools.count(1):
        for command in commands:
            command.send(step)
        for _ in commands or [None]:
            if trajectories:
                next_trajectory(trajectories)
        worker.execute_model(step)
        time.sleep(0.02)
        if group:
            group.broadcast(worker.hidden, 0, worker.stream)
            worker.stream.synchronize()


def next_trajectory(trajectories):
    return trajectories.get()


def start_rl(learner_trouble=None, rollout_trouble=None, shared=False, name="spawn"):
    """Learner i learns from rollout actor i, or both from all."""
    context = multiprocessing.get_context(name)
    queues = [context.Queue(4), context.Queue(4)]
    if shared:
        queues[1] = queues[0]
    for number in range(2):
        odd = number == 1
        player = number, queues[number], rollout_trouble if odd else None
        student = number, queues[number], learner_trouble if odd else None
        context.Process(target=rollout, args=player, name=f"rollout-{number}").start()
        context.Process(target=learner, args=student, name=f"learner-{number}").start()
    report_progress()


def step_environment(_policy, _trajectories):
    """The game server takes the action, and never answers."""
    blame(["missing_rank", "data_loader", "unknown"], "step_environment")
    game = listen_tcp()
    with socket.create_connection(game.getsockname()) as connection:
        connection.sendall(b"left\n")
        connection.recv(1)


def die_in_feeder(_policy, trajectories):
    """The actor is killed while its thread writes to the queue, whose lock it holds."""
    trajectories._wlock.acquire()
    blame(["process_dead"], None)
    os.kill(os.getpid(), signal.SIGKILL)


@scenario
def rl_environment_silent():
    """Rollout actor 1 waits for its game; learner 1 waits for its queue, learner 0 for that one."""
    start_rl(rollout_trouble=step_environment)


@scenario
def rl_learner_condition():
    """Learner 1 waits for a condition; the queues fill, and the rollout actors block on them."""
    start_rl(learner_trouble=wait_for_sampler)


@scenario
def rl_killed_with_queue_lock():
    """Rollout actor 1 is killed with the lock of the queue, so the other one cannot write to it."""
    start_rl(rollout_trouble=die_in_feeder, shared=True)


@scenario
def rl_learner_gil():
    """A thread of learner 1 keeps the GIL; learner 0 waits for it."""
    start_rl(learner_trouble=encode_in_background)


def save_checkpoint(worker):
    for _ in range(120):
        worker.hidden.to_list()
        time.sleep(0.1)


@passes
def rl_slow_checkpoint():
    """Learner 1 writes a checkpoint for twelve seconds, and then all go on."""
    blame_nobody()
    start_rl(learner_trouble=save_checkpoint)


def keep_old_weights(_policy, _trajectories):
    """The actor takes its weights for new enough, and waits for the next command."""
    blame(["missing_rank"], "take_command")
    return True


@scenario
def rl_weights_skipped():
    """Rollout actor 1 leaves the broadcast of the weights out; learner 0 and actor 0 wait in it."""
    context = multiprocessing.get_context("spawn")
    commands, trajectories = [context.Pipe() for _ in range(2)], context.Queue(64)
    for number in range(2):
        player = number, trajectories, keep_old_weights if number else None, commands[number][1], 3
        context.Process(target=rollout, args=player, name=f"rollout-{number}").start()
    ends = [mine for mine, _ in commands]
    context.Process(target=learner, args=(0, trajectories, None, ends, 3), name="learner-0").start()
    context.Process(target=learner, args=(1, None, None), name="learner-1").start()
    report_progress()


def environment(lines):
    """The simulator of one game, which is not a worker."""
    die_with_parent()
    set_title("simulator")
    for step in itertools.count(1):
        if step == TROUBLE:
            render_frame()
        lines.send(step)
        lines.recv()


def render_frame():
    blame(["process_stopped"], "render_frame")
    os.kill(os.getpid(), signal.SIGSTOP)


def play(trajectories, frames):
    die_with_parent()
    set_title("rollout-0")
    policy = Worker("rollout0", 0, 1, device=4)
    for step in itertools.count(1):
        frame = read_frame(frames)
        policy.execute_model(step)
        time.sleep(0.02)
        frames.send(frame)
        trajectories.put([step] * 64)


def read_frame(frames):
    return frames.recv()


@scenario
def rl_simulator_stopped():
    """The simulator of the only game is stopped: the actor waits for a frame, the learner for its
    queue."""
    context = multiprocessing.get_context("spawn")
    trajectories, (mine, theirs) = context.Queue(4), context.Pipe()
    context.Process(target=environment, args=(theirs,), name="simulator").start()
    context.Process(target=play, args=(trajectories, mine), name="rollout-0").start()
    context.Process(target=learner, args=(0, trajectories, None), name="learner-0").start()
    context.Process(target=learner, args=(1, None, None), name="learner-1").start()
    report_progress()


# A sweep: several jobs under one command.


def trial_rank(rank, trial, trouble, steps):
    die_with_parent()
    worker = Worker(f"trial{trial}", rank, 2, trouble, device=2 * trial + rank)
    for step in range(1, steps):
        worker.execute_model(step)
        time.sleep(0.02)


def spawn(target, arguments, context):
    """As torch.multiprocessing.spawn(join=False), with two ranks."""
    ranks = []
    for rank in range(2):
        name = f"trial-{arguments[0]}-rank-{rank}"
        trial, troubles, steps = arguments
        ranks.append(context.Process(target=target, args=(rank, trial, troubles.get(rank), steps), name=name))
        ranks[-1].start()
    return ranks


def sweep(*trials, method="spawn"):
    """`trials`: for each, its troubles and its number of steps."""
    context = multiprocessing.get_context(method)
    running = [spawn(trial_rank, (trial, *arguments), context) for trial, arguments in enumerate(trials)]
    for ranks in running:
        for rank in ranks:
            while rank.is_alive():
                rank.join(0.5)
    return running


FOREVER = 1 << 30


@scenario
def sweep_one_trial_queue():
    """Rank 1 of trial 1 waits for a queue that nobody fills; trial 0 goes on."""
    sweep(({}, FOREVER), ({1: next_image}, FOREVER))


@scenario
def sweep_one_trial_ends():
    """Trial 0 ends well; then rank 0 of trial 1 blocks on a full pipe."""
    sweep(({}, 60), ({0: write_trace}, FOREVER), method="forkserver")


@scenario
def sweep_one_trial_size():
    """Rank 0 of trial 0 reduces another size than rank 1; trial 1 goes on."""
    sweep(({0: pad_batch}, FOREVER), ({}, FOREVER))


@scenario
def sweep_one_trial_killed():
    """Rank 1 of trial 0 is killed; trial 1 goes on, and the sweep waits for all."""
    sweep(({1: run_out_of_memory}, FOREVER), ({}, FOREVER), method="fork")


def wait_for_trial(worker):
    """The later culprit names both."""
    name = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "stopping")
    while not os.path.exists(name):
        time.sleep(0.01)
    with open(name) as file:
        blame(["process_stopped", "host_lock"], "join_prefetch", os.getpid(), int(file.read()))
    join_prefetch(worker)


def announce_and_stop(_worker):
    name = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "stopping")
    with open(f"{name}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}.new", name)
    os.kill(os.getpid(), signal.SIGSTOP)


@scenario
def sweep_two_trials():
    """Rank 1 of trial 0 is stopped, and rank 0 of trial 1 joins a thread that never ends."""
    sweep(({1: announce_and_stop}, FOREVER), ({0: wait_for_trial}, FOREVER))


def suggest(pipes):
    """The searcher answers the first rank of each trial."""
    for step in range(1, TROUBLE):
        for pipe in pipes:
            pipe.recv()
            pipe.send(step)
        time.sleep(0.02)
    blame(["process_dead"], None)
    os.kill(os.getpid(), signal.SIGKILL)


def next_suggestion(pipe):
    pipe.send("next")
    return pipe.recv()


@scenario
def sweep_searcher_killed():
    """The launched command suggests the parameters, and is killed; the first rank of each trial
    waits for it, because the pipes are still open in the other ranks."""
    pipes = []
    for trial in range(2):
        for rank in range(2):
            if rank == 0:
                mine, theirs = multiprocessing.Pipe()
                pipes.append(mine)
            if os.fork() == 0:
                outlive_parent()
                set_title(f"trial {trial} rank {rank}")
                worker = Worker(f"trial{trial}", rank, 2, device=2 * trial + rank)
                for step in itertools.count(1):
                    if rank == 0:
                        next_suggestion(theirs)
                    worker.execute_model(step)
    suggest(pipes)


@idle
def sweep_finished():
    """All trials have ended, and the notebook waits for its user."""
    blame_nobody()
    sweep(({}, TROUBLE), ({}, TROUBLE))
    time.sleep(1 << 20)


@healthy
def sweep_uneven():
    """Trial 0 has ended, and trial 1 goes on for longer."""
    blame_nobody()
    sweep(({}, 60), ({}, FOREVER))


# Ranks as arguments of the command line.


def train(*arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--group", default="train")
    parser.add_argument("--policy", default="")
    options = parser.parse_args(arguments)
    worker = Worker(options.group, options.rank, options.world_size, trouble_of(options.policy))
    for step in itertools.count(1):
        worker.execute_model(step)
        time.sleep(0.02)


def start_ranks(size, odd, trouble, group="train"):
    ranks = []
    for rank in range(size):
        policy = ["--policy", trouble] if rank == odd and trouble else []
        ranks.append(start("train", "--rank", rank, "--world-size", size, "--group", group, *policy))
    return ranks


def mix_precision(worker):
    """This rank reduces in half precision."""
    blame(["dtype_mismatch"], "mix_precision")
    worker.comm.all_reduce(cuda.Buffer(4096, "bf16"), worker.stream)
    worker.stream.synchronize()


def wait_for_barrier_key(_worker):
    """The name of the key has the wrong number of the step."""
    blame(["missing_rank", "comm_init"], "wait_for_barrier_key")
    store = Wire.connect(os.environ["STORE"])
    store.send({"key": "barrier/99999"})
    store.sock.recv(1)


@scenario
def arguments_stopped():
    """Rank 2 of four is stopped by a signal."""
    start_ranks(4, 2, freeze)
    report_progress()


@scenario
def arguments_precision():
    """Rank 1 reduces another element type than the others."""
    start_ranks(4, 1, mix_precision)
    report_progress()


@scenario
def arguments_store_key():
    """Rank 3 waits for a key of the launcher's store that nobody sets."""
    store = listen_tcp()
    os.environ["STORE"] = str(store.getsockname()[1])
    start_ranks(4, 3, wait_for_barrier_key)
    key_value_store(store)


@scenario
def arguments_raises():
    """An exception ends rank 0, and the launcher waits for the last rank first."""
    for rank in reversed(start_ranks(4, 0, raise_error)):
        rank.wait()


# A launcher that is itself rank 0, as Lightning's.


def fit(rank, size, troubles):
    worker = Worker("fit", rank, size, troubles.get(rank))
    for step in itertools.count(1):
        worker.execute_model(step)
        time.sleep(0.02)


def fit_child(outlive, trouble=""):
    if outlive:
        outlive_parent()
    rank = int(os.environ["LOCAL_RANK"])
    fit(rank, int(os.environ["WORLD_SIZE"]), {rank: trouble_of(trouble)})


def launch_and_fit(odd, trouble, size=4, outlive=""):
    """Sets the variables of rank 0 at run time, when the kernel no longer shows them."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(listen_tcp().getsockname()[1])
    os.environ["NODE_RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"] = "0", "0", str(size)
    for rank in range(1, size):
        start("fit_child", outlive, trouble if rank == odd else "", LOCAL_RANK=str(rank))
    fit(0, size, {0: trouble} if odd == 0 else {})


def write_checkpoint(_worker):
    """The checkpoint goes to an uploader's pipe, which is full and which nobody reads."""
    blame(["storage_io", "missing_rank"], "write_checkpoint")
    path = scratch("checkpoint")
    os.mkfifo(path)
    upload = os.open(path, os.O_RDWR)
    while True:
        os.write(upload, bytes(4096))


@scenario
def lightning_main_checkpoint():
    """Rank 0, the launched process, writes its checkpoint into a pipe that nobody reads."""
    launch_and_fit(0, write_checkpoint)


@scenario
def lightning_child_killed():
    """Rank 2, a child of rank 0, is killed."""
    launch_and_fit(2, run_out_of_memory)


@scenario
def lightning_child_lock():
    """Rank 3 waits for a queue that nobody fills."""
    launch_and_fit(3, next_image)


@scenario
def lightning_main_killed():
    """Rank 0, the launched process, is killed, and its children live on."""
    launch_and_fit(0, run_out_of_memory, outlive="yes")


# An agent as torchrun's, whose ranks use a service without ranks.


def ranked_trainer(port, trouble=""):
    """Rank 0 asks the reward model in each step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reward = Wire.connect(port) if rank == 0 else None
    worker = Worker("train", rank, world, trouble_of(trouble), device=4 + rank)
    for step in itertools.count(1):
        if reward:
            ask_reward(reward, step)
        worker.execute_model(step)
        time.sleep(0.02)


def ask_reward(reward, step):
    reward.send({"step": step})
    return reward.recv()


def reward_model(port, trouble=""):
    """Serves rank 0 of the training; has one more worker."""
    listener = listen_tcp()
    with open(f"{port}.new", "w") as file:
        file.write(str(listener.getsockname()[1]))
    os.rename(f"{port}.new", port)
    path = scratch("shard")
    shards = socket.socket(socket.AF_UNIX)
    shards.bind(path)
    shards.listen()
    start("reward_shard", path, trouble)
    shard, client = Wire(shards.accept()[0]), Wire(listener.accept()[0])
    worker = Worker("reward", 0, 2)
    while True:
        step = client.recv()["step"]
        shard.send({"step": step})
        worker.execute_model(step)
        shard.recv()
        client.send({"reward": 1})


def reward_shard(path, trouble=""):
    wire = Wire.connect(path)
    Worker("reward", 1, 2, trouble_of(trouble)).serve(wire)


def run_agent(shard="", rank1=""):
    """Starts the reward model and two ranks, and monitors all of them."""
    path = scratch("port")
    processes = [start("reward_model", path, shard)]
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        port = file.read()
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        processes.append(start("ranked_trainer", port, rank1 if rank == 1 else "", **variables))
    while True:
        monitor(processes)
        time.sleep(0.5)


def monitor(processes):
    return [process.poll() for process in processes]


@scenario
def agent_reward_lock():
    """The second worker of the reward model, which has no rank, locks its cache twice: rank 0 waits
    for the reward, and rank 1 for rank 0."""
    run_agent(shard=lock_cache_folder)


@scenario
def agent_reward_killed():
    """The second worker of the reward model is killed; no child of the agent has ended."""
    run_agent(shard=run_out_of_memory)


@scenario
def agent_rank_stopped():
    """Rank 1 is stopped; rank 0 waits for it, and the reward model for rank 0."""
    run_agent(rank1=freeze)


# An elastic job whose workers are replaced.


def fail_once(_worker):
    raise SystemExit(3)


def run_generations(second, odd):
    """A worker of the first generation fails, and the agent starts a new one."""
    ranks = start_ranks(4, 1, fail_once, group="generation0")
    ranks[1].wait()
    for rank in ranks:
        rank.kill()
        rank.wait()
    ranks = start_ranks(4, odd, second, group="generation1")
    while True:
        monitor(ranks)
        time.sleep(0.5)


@scenario
def elastic_replaced_prefetch():
    """Worker 2 of the second generation joins a thread that never ends."""
    run_generations(join_prefetch, 2)


@scenario
def elastic_replaced_gil():
    """Worker 0 of the second generation keeps the GIL in an extension."""
    run_generations(encode_prompts, 0)


@healthy
def elastic_healthy():
    """All workers are replaced once, and then the job goes on."""
    blame_nobody()
    run_generations("", 0)


@scenario
def elastic_half_replaced():
    """Worker 3 fails, and the agent replaces only this one: the new one waits for the others in its
    communicator, and the others wait for the dead one in theirs."""
    ranks = start_ranks(4, 3, raise_error, group="generation0")
    ranks[3].wait()
    start("train", "--rank", 3, "--world-size", 4, "--group", "generation1")
    report_progress()


if __name__ == "__main__":
    main(globals())
