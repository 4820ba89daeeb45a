"""Small programs of real frameworks, for `cargo xtask frameworks`.

    FRAMEWORKS_MODE=healthy|hang programs.py NAME

Each trains or serves a tiny random model for some steps of a second. In a hang, one process stays
in a function of this file forever, in step TROUBLE. Before that it writes its pid and the name of
the function to the file FRAMEWORKS_TRUTH.
"""

import json
import os
import socket
import sys
import threading
import time

RANKS = 3
CULPRIT = 1
STEPS = 20
TROUBLE = 4
HANG = os.environ["FRAMEWORKS_MODE"] == "hang"


# The trouble.


def fetch_shard():
    """Reads from a server that does not answer."""
    here, _there = socket.socketpair()
    blame()
    here.recv(1)


def take_lock():
    """Takes a lock that it holds."""
    lock = threading.Lock()
    lock.acquire()
    blame()
    lock.acquire()


def poll_flag():
    """Polls for a file that nobody writes."""
    blame()
    while not os.path.exists("/nonexistent/flag"):
        time.sleep(0.2)


def blame():
    path = os.environ["FRAMEWORKS_TRUTH"]
    place = sys._getframe(1).f_code.co_name
    with open(path + ".new", "w") as file:
        json.dump({"pid": os.getpid(), "place": place}, file)
    os.replace(path + ".new", path)


def work(step, rank, trouble):
    """A second of work in each step."""
    time.sleep(0.9)
    hang(step, rank, trouble)


def hang(step, rank, trouble):
    if HANG and step == TROUBLE and rank == CULPRIT:
        trouble()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# The frameworks.


def ray():
    """Actors on gloo, which get each step from the driver."""
    import ray

    class Trainer:
        def __init__(self, rank, port):
            self.rank, self.port = rank, port

        def join(self):
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{self.port}", rank=self.rank, world_size=RANKS
            )

        def step(self, step):
            import torch
            import torch.distributed as dist

            work(step, self.rank, fetch_shard)
            gradient = torch.ones(1000)
            dist.all_reduce(gradient)
            return float(gradient[0])

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = free_port()
    actors = [ray.remote(num_cpus=0)(Trainer).remote(rank, port) for rank in range(RANKS)]
    ray.get([actor.join.remote() for actor in actors])
    for step in range(STEPS):
        assert ray.get([actor.step.remote(step) for actor in actors]) == [RANKS] * RANKS
    ray.shutdown()


class Model:
    """A tiny model and its random data."""

    @staticmethod
    def make():
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def make_dataset(rank, trouble=None):
    """Random samples; `trouble` occurs in the process that loads those of step TROUBLE."""
    import torch

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return STEPS * RANKS

        def __getitem__(self, index):
            if trouble and index // RANKS == TROUBLE:
                work(TROUBLE, rank, trouble)
            return torch.full((8,), float(index)), torch.ones(1)

    return Samples()


def lightning():
    """Lightning's own launcher, DDP on gloo, TensorBoard and a checkpoint at the end."""
    import pytorch_lightning as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model.make()

        def training_step(self, batch, index):
            work(index, self.global_rank, take_lock)
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    loader = torch.utils.data.DataLoader(make_dataset(0), batch_size=1, num_workers=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        log_every_n_steps=1,
        logger=pl.loggers.TensorBoardLogger("logs"),
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader)


def accelerate():
    """A loop of accelerate under its launcher, whose data loader worker hangs."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = Model.make()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    samples = make_dataset(accelerator.process_index, fetch_shard)
    loader = torch.utils.data.DataLoader(samples, batch_size=1, num_workers=1, prefetch_factor=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        time.sleep(0.9)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach())


def transformers():
    """The Trainer with a random Llama under torchrun."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, arguments, state, control, **others):
            work(state.global_step, arguments.process_index, poll_flag)

    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return STEPS * RANKS

        def __getitem__(self, index):
            tokens = torch.arange(16) % 32
            return {"input_ids": tokens, "labels": tokens}

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=2, **sizes)
    arguments = TrainingArguments(
        "model", use_cpu=True, max_steps=STEPS, per_device_train_batch_size=1, report_to=[], logging_steps=5
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens(), callbacks=[Steps()]).train()


def deepspeed():
    """ZeRO 2 on the CPU, under DeepSpeed's launcher."""
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    deepspeed.init_distributed("gloo")
    model = Model.make()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for step in range(STEPS):
        loss = engine(torch.ones(1, 8)).mean()
        engine.backward(loss)
        engine.step()
        work(step, torch.distributed.get_rank(), fetch_shard)


def jax():
    """One process for each device, with collectives on gloo, started by this one."""
    import multiprocessing

    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=jax_process, args=(rank, port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a process failed")


def jax_process(rank, port):
    import jax
    import jax.numpy
    from jax.experimental.multihost_utils import process_allgather

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, rank)
    for step in range(STEPS):
        work(step, rank, take_lock)
        assert process_allgather(jax.numpy.ones(10)).sum() == 10 * RANKS


def jax_mpi():
    """Ranks of PyPI's Open MPI, which reduce arrays of JAX by mpi4jax."""
    import jax.numpy
    import mpi4jax
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    reduce = jax.jit(lambda array: mpi4jax.allreduce(array, op=MPI.SUM, comm=world))
    for step in range(STEPS):
        work(step, world.rank, take_lock)
        assert reduce(jax.numpy.ones(10)).block_until_ready().sum() == 10 * world.size


def mpi4py():
    """Ranks of PyPI's Open MPI."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    gradient = numpy.ones(1000)
    for step in range(STEPS):
        work(step, world.rank, fetch_shard)
        world.Allreduce(MPI.IN_PLACE, gradient)
        world.allgather({"step": step})


def torchft():
    """Three replica groups of one rank each, under a lighthouse; each has its own store."""
    import subprocess

    from torchft._torchft import LighthouseServer

    if "REPLICA" in os.environ:
        return torchft_replica(int(os.environ["REPLICA"]))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=RANKS, join_timeout_ms=60000)
    shared = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "RANK": "0", "WORLD_SIZE": "1"}
    replicas = [
        subprocess.Popen([sys.executable, *sys.argv], env=shared | {"REPLICA": str(replica)})
        for replica in range(RANKS)
    ]
    if any([replica.wait() for replica in replicas]):
        sys.exit("a replica failed")
    lighthouse.shutdown()


def torchft_replica(replica):
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = Model.make()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(minutes=5)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=RANKS,
        timeout=timedelta(minutes=5),
        quorum_timeout=timedelta(minutes=5),
        replica_id=f"replica-{replica}",
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    model, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        work(step, replica, poll_flag)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    manager.shutdown(wait=False)


def torchtitan():
    """The debug model of Llama 3 with FSDP2 on the simulated device, and random tokens."""
    from dataclasses import dataclass

    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_rank, **others):
            self.rank = dp_rank

        def __iter__(self):
            for step in range(STEPS):
                work(step, self.rank, fetch_shard)
                tokens = torch.randint(2048, (1, 65))
                positions = torch.arange(64).unsqueeze(0)
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    write_tokenizer("tokenizer")
    config = llama3_debugmodel()
    # The others need a compiler, cuDNN, or numbers that a kernel computed.
    ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = "tokenizer"
    config.dataloader = Tokens.Config()
    config.validator.enable = False
    config.checkpoint.enable = False
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, 64, STEPS
    config.metrics.log_freq = 1000
    trainer = config.build()
    trainer.train()
    trainer.close()


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models

    os.makedirs(folder, exist_ok=True)
    words = {f"w{index}": index for index in range(2048)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(os.path.join(folder, "tokenizer.json"))


def vllm():
    """Two workers of vLLM's engine on the CPU, tensor parallel on gloo."""
    from vllm import LLM, SamplingParams
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaConfig(
        vocab_size=2048,
        num_attention_heads=2,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=128,
        **sizes,
    ).save_pretrained("model")
    engine = LLM(
        "model",
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=2,
        enforce_eager=True,
        max_model_len=128,
        worker_extension_cls="programs.Extension",
    )
    for step in range(STEPS):
        engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, detokenize=False))
        engine.collective_rpc("step", args=(step,))


class Extension:
    """A method of each worker of vLLM. The culprit's next forward pass does not return."""

    def step(self, step):
        work(step, self.rank, self.break_model)

    def break_model(self):
        self.model_runner.model.forward = lambda *inputs, **others: fetch_shard()

def helpers():
    """Ranks with processes that serve them and rest: of W&B, joblib, Inductor and Python itself."""
    import joblib
    import multiprocessing
    import torch
    import torch.distributed as dist
    import wandb
    from torch._inductor.async_compile import AsyncCompile

    dist.init_process_group("gloo")
    run = wandb.init(mode="offline", project="helpers")
    joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(number) for number in range(4))
    process = multiprocessing.get_context("forkserver").Process(target=abs, args=(1,))
    process.start()
    process.join()
    AsyncCompile.warm_pool()
    for step in range(STEPS):
        run.log({"step": step})
        work(step, dist.get_rank(), take_lock)
        dist.all_reduce(torch.ones(1000))
    run.finish()


def zeromq():
    """Ranks that fetch each batch over ZeroMQ."""
    import zmq

    def serve(answer):
        with zmq.Context() as context, context.socket(zmq.REP) as requests:
            requests.bind("ipc://batches")
            while True:
                requests.send_json(answer(*requests.recv_json()))

    def client():
        requests = zmq.Context.instance().socket(zmq.REQ)
        requests.connect("ipc://batches")

        def fetch(*batch):
            requests.send_json(batch)
            return requests.recv_json()

        return fetch

    train_from_server(serve, client)


def grpc():
    """Ranks that fetch each batch over gRPC."""
    import grpc
    from concurrent import futures

    def serve(answer):
        def fetch(request, _context):
            return json.dumps(answer(*json.loads(request))).encode()

        server = grpc.server(futures.ThreadPoolExecutor(RANKS))
        methods = {"fetch": grpc.unary_unary_rpc_method_handler(fetch)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("batches", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with open("port.new", "w") as file:
            file.write(str(port))
        os.replace("port.new", "port")
        server.wait_for_termination()

    def client():
        while not os.path.exists("port"):
            time.sleep(0.1)
        with open("port") as file:
            channel = grpc.insecure_channel(f"127.0.0.1:{file.read()}")
        call = channel.unary_unary("/batches/fetch")
        return lambda *batch: json.loads(call(json.dumps(batch).encode()))

    train_from_server(serve, client)


def train_from_server(serve, client):
    """Starts a server and three ranks. In a hang, the server never answers one request."""
    import multiprocessing
    import subprocess
    import torch
    import torch.distributed as dist

    def answer(step, rank):
        hang(step, rank, take_lock)
        return [step] * 8

    if "RANK" not in os.environ:
        server = multiprocessing.get_context("fork").Process(target=serve, args=(answer,), daemon=True)
        server.start()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run(torchrun + ["--local-addr=127.0.0.1"] + sys.argv, check=True)
        server.terminate()
        return
    dist.init_process_group("gloo")
    fetch = client()
    for step in range(STEPS):
        time.sleep(0.9)
        dist.all_reduce(torch.tensor(fetch(step, dist.get_rank())))


if __name__ == "__main__":
    # DeepSpeed's launcher adds an option of its own.
    globals()[next(word for word in sys.argv[1:] if not word.startswith("--"))]()
    print("done")
    # Otherwise PyTorch may abort the process: a thread of gloo that frees a tensor while the
    # interpreter ends must not take the GIL.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
