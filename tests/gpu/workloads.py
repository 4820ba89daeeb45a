"""Healthy programs on one real GPU, each of which prints what it computed, and some that measure.

    workloads.py NAME

The names are those of the functions. A line that begins with MEASURED differs between runs.
"""

import os
import sys
import time


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def transformer(steps=30):
    """A small language model through autocast, fused attention, AdamW and torch.compile."""
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    squared = torch.compile(lambda left, right: ((left - right) ** 2).mean())
    generator = torch.Generator(device="cuda").manual_seed(1)
    batch = torch.randn(16, 256, 512, device="cuda", generator=generator)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = squared(model(batch).float(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(steps):
        loss = step()
    say(f"loss {loss.item():.2f}")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        best = min(best, (time.monotonic() - start) * 50)
    free, total = torch.cuda.mem_get_info()
    say(f"MEASURED ms_a_step {best:.4f}")
    say(f"MEASURED device_mib {(total - free) >> 20}")


def workers():
    """A data loader whose workers are forked after the device is in use, with pinned memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.ones(1).cuda()
    total = torch.zeros(1, device="cuda")
    loader = DataLoader(TensorDataset(torch.arange(4096.0)), batch_size=64, num_workers=3, pin_memory=True)
    for (batch,) in loader:
        total += batch.to("cuda", non_blocking=True).sum()
    say(f"total {total.item()}")


def _add_one(queue, done):
    queue.get().add_(1)
    done.set()


def shared():
    """Another process changes a tensor of this one through CUDA IPC."""
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    values = torch.zeros(8, device="cuda")
    child = context.Process(target=_add_one, args=(queue, done))
    child.start()
    queue.put(values)
    done.wait()
    child.join()
    torch.cuda.synchronize()
    say(f"shared {values.tolist()} {child.exitcode}")


def error():
    """A kernel fails, and the error stays with the device."""
    import torch

    values = torch.zeros(8, device="cuda")
    try:
        values[torch.full((8,), 1 << 40, device="cuda")].sum().item()
    except RuntimeError as problem:
        say(str(problem).splitlines()[0])
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        say(str(problem).splitlines()[0])
    os._exit(7)


def out_of_memory():
    import torch

    try:
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as problem:
        say(str(problem).split(". ")[0])
    say(f"then {torch.ones(4, device='cuda').sum().item()}")


def allocator():
    """The stream-ordered allocator of CUDA, captured graphs and many streams."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import torch

    streams = [torch.cuda.Stream() for _ in range(40)]
    sums = []
    for turn in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                sums.append(torch.full((1024,), float(turn), device="cuda").sum())
    torch.cuda.synchronize()
    say(f"sum {sum(value.item() for value in sums)}")
    graph, values = torch.cuda.CUDAGraph(), torch.zeros(1024, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(50):
            values += 1
    for _ in range(200):
        graph.replay()
    say(f"graph {values[0].item()}")


def profiler():
    """torch's profiler, which is CUPTI's, beside the hook."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    values = torch.ones(512, 512, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(50):
            values = torch.relu(values @ values / 512)
        torch.cuda.synchronize()
    kernels = [event for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    say(f"kernels {len(kernels)} value {values[0, 0].item()}")


def jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(weights, batch):
        loss, gradient = jax.value_and_grad(lambda weights: jnp.mean((batch @ weights - batch) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    weights, batch = jnp.zeros((256, 256)), jnp.ones((64, 256))
    for _ in range(100):
        weights, loss = step(weights, batch)
    say(f"jax {jax.devices()[0].platform} {float(loss):.3f}")


def cupy():
    import cupy

    kernel = cupy.RawKernel(
        'extern "C" __global__ void twice(float* x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2; }', "twice"
    )
    values = cupy.ones(4096, dtype=cupy.float32)
    for _ in range(10):
        kernel((16,), (256,), (values, 4096))
    say(f"cupy {float(values.sum())} {float((values.reshape(64, 64) @ values.reshape(64, 64)).max())}")


def captured(seconds=12):
    """Graphs are captured and replayed for some seconds, by hand and by torch.compile."""
    import torch

    layer = torch.nn.Linear(256, 256, bias=False).cuda()
    torch.nn.init.eye_(layer.weight)
    compiled = torch.compile(lambda values: torch.relu(layer(values)) + 1, mode="reduce-overhead")
    wrong, turn, until = [], 0, time.monotonic() + seconds
    while time.monotonic() < until:
        values, graph = torch.zeros(4096, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                values += 1
        for _ in range(20):
            graph.replay()
        if values[7].item() != 200:
            wrong.append(values[7].item())
        turn += 1
        with torch.no_grad():
            out = compiled(torch.ones((turn % 4 + 1) * 16, 256, device="cuda"))[0, 0].item()
        if out != 2:
            wrong.append(out)
    say(f"captured {wrong[:5]} {turn > 20}")


def green():
    """A green context has a part of the multiprocessors; kernels run in it and beside it."""
    import torch

    values = torch.zeros(4096, device="cuda")
    context = torch.cuda.green_contexts.GreenContext.create(16, 0)
    for _ in range(20):
        context.set_context()
        values = values + 1
        values = values @ torch.eye(4096, device="cuda")
        torch.cuda.synchronize()
        context.pop_context()
        values = values + 1
        torch.cuda.synchronize()
    say(f"green {values[0].item()}")


def segments():
    """Expandable segments: memory of cuMemCreate that is mapped and unmapped."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    total = 0.0
    for turn in range(1, 40):
        values = torch.ones(turn << 18, device="cuda")
        total += values.sum().item()
        del values
        torch.cuda.empty_cache()
    say(f"segments {total}")


def triton():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add(values, out, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(values + at, mask=at < count) + 1, mask=at < count)

    values = torch.zeros(5000, device="cuda")
    for _ in range(100):
        add[(triton.cdiv(5000, 256),)](values, values, 5000, BLOCK=256)
    say(f"triton {values.sum().item()}")


def numba():
    import warnings

    warnings.filterwarnings("ignore")
    import numpy

    numpy.row_stack = numpy.vstack  # numba imports it, and newer versions of NumPy do not have it
    from numba import cuda

    @cuda.jit
    def add(values):
        at = cuda.grid(1)
        if at < values.size:
            values[at] += 1

    values = cuda.to_device(numpy.zeros(4096, dtype=numpy.float32))
    for _ in range(100):
        add[16, 256](values)
    say(f"numba {float(values.copy_to_host().sum())}")


def generate():
    """A small random language model of transformers generates with a static cache."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=512
    )
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    out = model.generate(torch.arange(16, device="cuda")[None], max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0)
    say(f"generated {out[0, -8:].tolist()}")


def profiled(steps=40):
    """A training in bfloat16 under torch's profiler, whose trace goes to PROFILE."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(1024, 8, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(16, 512, 1024, device="cuda", dtype=torch.bfloat16)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        time.sleep(0.02)

    for _ in range(100):  # the collector has found the process, and asks for all kernels
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            step()
    record.export_chrome_trace(os.environ["PROFILE"])
    for _ in range(100):
        step()
    say("profiled")


def attention(seconds=14):
    """Flash attention forward and backward for some seconds; events say how fast they are."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (4, 16, 4096, 128)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    flop = 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
    rates, until = [], time.monotonic() + seconds
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        while time.monotonic() < until:
            begin.record()
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            middle.record()
            out.backward(out)
            end.record()
            end.synchronize()
            rates.append((flop / begin.elapsed_time(middle) / 1e9, 2 * flop / middle.elapsed_time(end) / 1e9))
    forward, backward = (sorted(rate)[len(rates) // 2] for rate in zip(*rates))
    say(f"MEASURED forward_tflops {forward:.1f}")
    say(f"MEASURED backward_tflops {backward:.1f}")


def lightning():
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch, _index):
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lightning.seed_everything(0, verbose=False)
    model = Model()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(256, 64)), batch_size=16)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(accelerator="gpu", devices=1, max_epochs=5, **quiet).fit(model, data)
    say(f"lightning {model.layer.weight.abs().sum().item():.3f}")


def launches():
    """Small kernels, as fast as the host can launch them."""
    import torch

    values = torch.zeros(16, device="cuda")
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.monotonic_ns()
        for _ in range(1000):
            values.add_(1)
        best = min(best, (time.monotonic_ns() - start) / 1000)
        torch.cuda.synchronize()
    say(f"sum {values.sum().item()}")
    say(f"MEASURED ns_a_launch {best:.0f}")


def matmul(seconds=14):
    """Products of one size for some seconds; events say how fast they are."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    until = time.monotonic() + seconds
    rates = []
    while time.monotonic() < until:
        start.record()
        for _ in range(20):
            left @ right
        end.record()
        end.synchronize()
        rates.append(20 * 2 * 8192**3 / start.elapsed_time(end) / 1e9)
    say(f"MEASURED matmul_tflops {sorted(rates)[len(rates) // 2]:.1f}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
