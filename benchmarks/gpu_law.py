"""Measures the parts of transformer blocks on one GPU, next to the seconds that the law of `pipefit plan` predicts.

Each part is a process of its own with a deadline. What it has measured until then counts, and a trial that fails is a
line with its error.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from pipefit.cost.kernels import kernels_s
from pipefit.cost.roofline import pass_s, product_s
from pipefit.models.gpt import Block
from pipefit.planner.computed_profile import transformer_profile
from pipefit.planner.machines import load_topology
from pipefit.planner.transformer import Transformer, transformer_of
from pipefit.profiling.analytic import gradients_of, like
from pipefit.profiling.counting import KernelCount, pretended
from pipefit.profiling.tensors import tensors_of
from pipefit.spec import Device

Way = Callable[[], object]

SHAPES = {
    "llama-3-8b": "llama:layers=1,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,sequence=8192",
    "llama-13b": "llama:layers=1,hidden=5120,heads=40,ffn=13824,sequence=2048",
    "gpt-6144": "gpt:layers=1,hidden=6144,heads=64,sequence=2048,attention=flash,dropout=0",
    "gpt-12288": "gpt:layers=1,hidden=12288,heads=96,sequence=2048,attention=flash,dropout=0",
}
TINY = {
    "llama-tiny": "llama:layers=1,hidden=64,heads=4,kv_heads=2,ffn=96,vocab=256,sequence=32",
    "gpt-tiny": "gpt:layers=1,hidden=64,heads=4,vocab=256,sequence=32,attention=flash,dropout=0",
}
DEADLINES_S = {"parts": 38.0, "blocks": 45.0, "blocking": 15.0, "compiled": 110.0}
SECONDS = {"parts": 0.06, "blocks": 1.0, "blocking": 0.1, "compiled": 1.0}
"""For how long a work is repeated: blocks until the GPU is as warm as in training, and its clock as slow."""

_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_MARGIN_S = 4.0
"""Seconds before a deadline after which no trial begins."""

_LEFT_BYTES = 8 << 30
"""Memory that trials may leave in cycles of references."""

_SMALL_KERNELS = 200
_QUEUED_CYCLES = 20_000_000
"""Cycles of a GPU, about 11 ms, for which it waits, so that it does not have to wait for the host later."""


@dataclass(frozen=True)
class Trial:
    """Works that are timed one after the other, and the seconds that the law predicts for them."""

    ways: Mapping[str, Way]
    law_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where trials run.

    Attributes:
        device: of torch.
        machine: the device of the law.
        seconds: each work is repeated for about so long.
        until: the time by `time.monotonic` after which no trial begins.
    """

    device: torch.device
    machine: Device
    seconds: float
    until: float

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device).requires_grad_(grad)


# ---- time ----------------------------------------------------------------------------------------------------------


def _rounds(ways: Sequence[Way], count: int, device: torch.device) -> list[list[float]]:
    """The seconds of each work in so many rounds."""
    if device.type != "cuda" or os.environ.get(_BLOCKING) == "1":
        return [[_by_clock(way) for way in ways] for _ in range(count)]
    marks = []
    torch.cuda._sleep(_QUEUED_CYCLES)
    for _ in range(count):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(ways) + 1)]
        events[0].record()
        for way, event in zip(ways, events[1:], strict=True):
            way()
            event.record()
        marks.append(events)
    torch.cuda.synchronize()
    return [[a.elapsed_time(b) / 1e3 for a, b in pairwise(events)] for events in marks]


def _by_clock(way: Way) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def medians(ways: Sequence[Way], place: Place) -> list[float]:
    """The median seconds of each work, after a warm-up."""
    _rounds(ways, 2, place.device)
    first = sum(_rounds(ways, 1, place.device)[0])
    count = min(max(int(place.seconds / first), 5), 200)
    found = _rounds(ways, count, place.device)
    return [median(column) for column in zip(*found, strict=True)]


# ---- the law -------------------------------------------------------------------------------------------------------


def counted(work: Callable[..., Any], inputs: Sequence[Tensor], machine: Device) -> dict[str, float]:
    """Seconds of a work, forward and backward, by the kernels that it runs on tensors without memory."""
    counter = KernelCount([])
    with pretended(), torch.enable_grad():
        given = like(list(inputs))
        with counter:
            output = work(*given)
        forward = counter.take()
        leaves = [leaf for leaf in given if leaf.requires_grad]
        backward, _ = gradients_of(counter, tensors_of(output), leaves, [])
    return {"forward": kernels_s(machine, forward), "backward": kernels_s(machine, backward)}


def _counted_block(make: Callable[[str], nn.Module], given: Sequence[Tensor], machine: Device) -> dict[str, float]:
    """The same of a block, whose gradients are added to those before."""
    counter = KernelCount([])
    with pretended(), torch.enable_grad():
        block = make("cpu")
        inputs = like(list(given))
        with counter:
            output = block(*inputs)
        forward = counter.take()
        ways = gradients_of(counter, tensors_of(output), inputs[:1], list(block.parameters()))
    return {"forward": kernels_s(machine, forward), "backward": kernels_s(machine, [*ways[0], *ways[1]])}


# ---- parts ---------------------------------------------------------------------------------------------------------


def differentiated(work: Callable[..., Any], inputs: Sequence[Tensor], place: Place, law: bool = True) -> Trial:
    """A work and its backward."""
    found: dict[str, Any] = {}
    leaves = [leaf for leaf in inputs if leaf.requires_grad]

    def forward() -> None:
        found["output"] = tensors_of(work(*inputs))

    forward()
    seeds = [torch.randn_like(output) for output in found["output"]]

    def backward() -> None:
        torch.autograd.grad(found.pop("output"), leaves, seeds)

    law_s = {}
    if law:
        law_s = counted(work, inputs, place.machine)
    return Trial({"forward": forward, "backward": backward}, law_s)


def _product(place: Place, m: int, n: int, k: int) -> Trial:
    """A linear layer of m tokens: its output, and the gradients of its input and of its weight."""
    x = place.random(m, k)
    weight = place.random(n, k)
    grad = place.random(m, n)
    ways = {
        "forward": lambda: F.linear(x, weight),
        "of input": lambda: grad @ weight,
        "of weight": lambda: grad.t() @ x,
    }
    shapes = {"forward": (m, n, k), "of input": (m, k, n), "of weight": (n, k, m)}
    return Trial(ways, {name: product_s(place.machine, *shape) for name, shape in shapes.items()})


def _core(place: Place, model: Transformer, backend: SDPBackend | None, kv_heads: int) -> Trial:
    """The core of attention, causal."""
    width = model.hidden // model.heads
    heads = (model.heads, kv_heads, kv_heads)
    inputs = [place.random(1, count, model.sequence, width, grad=True) for count in heads]

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = nullcontext() if backend is None else sdpa_kernel(backend)
        with context:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < model.heads)

    trial = differentiated(work, inputs, place, law=False)
    whole = [place.random(1, model.heads, model.sequence, width, grad=True) for _ in heads]
    law_s = counted(partial(F.scaled_dot_product_attention, is_causal=True), whole, place.machine)
    return Trial(trial.ways, law_s)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def _head(place: Place, model: Transformer) -> Trial:
    """The loss on given logits: conversion, softmax, and their gradients."""
    logits = place.random(model.sequence, model.vocab, grad=True)
    targets = torch.randint(model.vocab, (model.sequence,), device=place.device)
    return differentiated(_loss, [logits, targets], place)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


def _own_norm(place: Place, model: Transformer) -> Trial:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(model.hidden)

    def work(x: Tensor, weight: Tensor) -> Any:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    inputs = [place.random(1, model.sequence, model.hidden, grad=True), place.random(model.hidden, grad=True)]
    return differentiated(work, inputs, place)


def _rotation(place: Place, model: Transformer) -> Trial:
    width = model.hidden // model.heads
    both = [place.random(1, heads, model.sequence, width, grad=True) for heads in (model.heads, model.keys)]
    tables = [place.random(1, model.sequence, width) for _ in range(2)]
    return differentiated(_rotated, [*both, *tables], place)


def _passes(model: Transformer) -> Iterator[tuple[str, Callable[[Place], Trial]]]:
    """The operations between products."""
    s = model.sequence
    h = model.hidden

    def of(work: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[Place], Trial]:
        return lambda place: differentiated(work, [place.random(*shape, grad=True) for shape in shapes], place)

    if model.gated:
        yield "norm of transformers", partial(_own_norm, model=model)
        yield "norm of torch", of(lambda x, weight: F.rms_norm(x, (h,), weight), (1, s, h), (h,))
        yield "rotation of transformers", partial(_rotation, model=model)
        yield "silu and product", of(lambda gate, up: F.silu(gate) * up, (1, s, model.wide), (1, s, model.wide))
    else:
        yield "norm", of(lambda x, w, b: F.layer_norm(x, (h,), w, b), (1, s, h), (h,), (h,))
        yield "gelu", of(lambda x: F.gelu(x, approximate="tanh"), (1, s, model.wide))
    yield "residual", of(torch.add, (1, s, h), (1, s, h))
    yield "loss", partial(_head, model=model)


def _constants(place: Place, size: int) -> Iterator[tuple[str, Callable[[], Trial]]]:
    """The constants of the device: rates of one large product, of memory, of random numbers; time of a kernel."""

    def streamed() -> Trial:
        source = place.random(size * size * 8)
        target = torch.empty_like(source)
        moved = source.nbytes
        ways: dict[str, Way] = {
            "copy": lambda: target.copy_(source),
            "fill": lambda: target.fill_(1.0),
            "scale": lambda: torch.mul(source, 2.0, out=target),
            "sum": source.sum,
            "dropout": lambda: torch.native_dropout(source, 0.1, True),
        }
        sizes = {"copy": 2 * moved, "fill": moved, "scale": 2 * moved, "sum": moved, "dropout": 2.5 * moved}
        return Trial(ways, {name: pass_s(place.machine, count) for name, count in sizes.items()})

    def small() -> Trial:
        x = place.random(128)
        return Trial({"add": lambda: x.add_(1.0)}, {"add": place.machine.kernel_s})

    yield f"product of {size}³", partial(_product, place, size, size, size)
    yield "memory", streamed
    yield "a small kernel", small


def parts(place: Place, shapes: Mapping[str, str], size: int) -> Iterator[tuple[str, str, Callable[[], Trial]]]:
    """Trials of the parts of blocks."""
    for name, make in _constants(place, size):
        yield "device", name, make
    for label, text in shapes.items():
        model = transformer_of(text)
        tokens = model.sequence
        products = {
            "qkv": (model.qkv, model.hidden),
            "attention's output": (model.hidden, model.hidden),
            "up": (model.up, model.hidden),
            "down": (model.hidden, model.wide),
            "head": (model.vocab, model.hidden),
        }
        if model.gated:
            products["keys"] = (model.hidden * model.keys // model.heads, model.hidden)
            products["gate"] = (model.wide, model.hidden)
        for name, (n, k) in products.items():
            yield label, f"product: {name}", partial(_product, place, tokens, n, k)
        backends = {
            "by torch's choice": None,
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
        for name, backend in backends.items():
            yield label, f"attention: {name}", partial(_core, place, model, backend, model.heads)
        if model.keys < model.heads:
            grouped = partial(_core, place, model, SDPBackend.FLASH_ATTENTION, model.keys)
            yield label, "attention: flash, grouped keys", grouped
        for name, made in _passes(model):
            yield label, name, partial(made, place)


# ---- blocks --------------------------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """A block of transformers' Llama, with torch's fused attention."""

    def __init__(self, model: Transformer) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        super().__init__()
        config = LlamaConfig(
            hidden_size=model.hidden,
            intermediate_size=model.wide,
            num_attention_heads=model.heads,
            num_key_value_heads=model.keys,
            num_hidden_layers=1,
            vocab_size=model.vocab,
            attn_implementation="sdpa",
        )
        self.layer = LlamaDecoderLayer(config, 0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.layer(x, position_embeddings=(cos, sin))


def _block_of(model: Transformer) -> Callable[[str], nn.Module]:
    def make(device: str) -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                if model.gated:
                    return LlamaBlock(model)
                return Block(model.hidden, model.heads, 0.0)
        finally:
            torch.set_default_dtype(torch.float32)

    return make


def _inputs_of(place: Place, model: Transformer) -> list[Tensor]:
    inputs = [place.random(1, model.sequence, model.hidden, grad=True)]
    if model.gated:
        inputs += [place.random(1, model.sequence, model.hidden // model.heads) for _ in range(2)]
    return inputs


def _laws(place: Place, model: Transformer, inputs: Sequence[Tensor], fused: bool) -> dict[str, float]:
    """Seconds of a block by its sizes, and by its counted module."""
    sized = transformer_profile(
        Transformer(**{**vars(model), "fused_norms": int(fused or not model.gated)}), 1, place.machine
    ).layers[1]
    found = {"forward": sized.forward_s, "backward": sized.backward_s}
    by_kernels = _counted_block(_block_of(model), inputs, place.machine)
    return found | {f"{name}, counted": seconds for name, seconds in by_kernels.items()}


def _block(place: Place, model: Transformer, compiled: bool, backend: str, replay: bool = False) -> Trial:
    """A whole block, forward and backward, with its gradients added up."""
    inputs = _inputs_of(place, model)
    block: Callable[..., Any] = _block_of(model)(str(place.device))
    if compiled:
        block = torch.compile(block, dynamic=False, fullgraph=True, backend=backend)
    found: dict[str, Any] = {}
    seed = torch.randn_like(inputs[0])

    def forward() -> None:
        if replay:
            found["output"] = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            found["output"] = block(*inputs)

    def backward() -> None:
        found.pop("output").backward(seed)

    law_s = _laws(place, model, inputs, compiled)
    if replay:
        law_s["backward"] += law_s["forward"]
        law_s["backward, counted"] += law_s["forward, counted"]
    return Trial({"forward": forward, "backward": backward}, law_s)


def _steps(place: Place, model: Transformer) -> Trial:
    """AdamW of a block's parameters, with master weights, and the clipping before it."""
    counts = [parameter.numel() for parameter in _block_of(model)("meta").parameters()]
    parameters = [nn.Parameter(place.random(count, dtype=torch.float32)) for count in counts]
    for parameter in parameters:
        parameter.grad = place.random(parameter.numel(), dtype=torch.float32)
    cuda = place.device.type == "cuda"
    fused = torch.optim.AdamW(parameters, 1e-4, fused=cuda)
    plain = torch.optim.AdamW(parameters, 1e-4, foreach=True)
    half = [parameter.detach().bfloat16() for parameter in parameters]
    ways: dict[str, Way] = {
        "fused": fused.step,
        "foreach": plain.step,
        "clipping": lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True),
        "to 2 bytes": lambda: torch._foreach_copy_(half, [parameter.detach() for parameter in parameters]),
    }
    moved = {"fused": 28, "clipping": 12, "to 2 bytes": 6}
    return Trial(ways, {name: pass_s(place.machine, size * sum(counts)) for name, size in moved.items()})


def blocks(place: Place, shapes: Mapping[str, str]) -> Iterator[tuple[str, str, Callable[[], Trial]]]:
    """Trials of whole blocks as eager torch runs them, and of their optimizer."""
    for label, text in shapes.items():
        model = transformer_of(text)
        yield label, "block", partial(_block, place, model, False, "")
        yield label, "block, replayed", partial(_block, place, model, False, "", True)
        yield label, "adamw", partial(_steps, place, model)


def blocking(place: Place, shapes: Mapping[str, str]) -> Iterator[tuple[str, str, Callable[[], Trial]]]:
    """Trials of blocks by the host's clock, in a process in which every launch waits for its kernel."""
    small = place.random(128)

    def many() -> None:
        for _ in range(_SMALL_KERNELS):
            small.add_(1.0)

    yield "device", f"{_SMALL_KERNELS} small kernels", lambda: Trial({"add": many})
    for label, text in shapes.items():
        if not transformer_of(text).gated:
            yield label, "block, every launch waits", partial(_block, place, transformer_of(text), False, "")


def compiled(place: Place, shapes: Mapping[str, str]) -> Iterator[tuple[str, str, Callable[[], Trial]]]:
    """Trials of blocks under `torch.compile`."""
    backend = "inductor" if place.device.type == "cuda" else "aot_eager"
    models = {label: transformer_of(text) for label, text in shapes.items()}
    first, model = next(iter(models.items()))

    def loss() -> Trial:
        work = torch.compile(_loss, dynamic=False, backend=backend)
        logits = place.random(model.sequence, model.vocab, grad=True)
        targets = torch.randint(model.vocab, (model.sequence,), device=place.device)
        trial = differentiated(work, [logits, targets], place, law=False)
        return Trial(trial.ways, counted(_loss, [logits, targets], place.machine))

    for label, each in models.items():
        yield label, "compiled block", partial(_block, place, each, True, backend)
        if label == first:
            yield label, "compiled loss", loss


# ---- what a process measures ---------------------------------------------------------------------------------------


def kernels_of(ways: Iterable[Way], most: int = 40) -> list[dict[str, Any]]:
    """The kernels of some works, run once, by torch's profiler: those that take longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for way in ways:
            way()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    found = [(event.key[:160], event.count, event.self_device_time_total / 1e6) for event in events[:most]]
    return [{"kernel": name, "count": count, "seconds": seconds} for name, count, seconds in found if seconds]


def state_of_the_gpu() -> str:
    """Clocks, power and temperature, as nvidia-smi reports them."""
    fields = "name,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"nvidia-smi: {problem}"


def sustained(ways: Sequence[Way], place: Place, seconds: float) -> dict[str, Any]:
    """A work for some seconds: the first and the last tenth of its repetitions, and the clocks meanwhile."""
    first_s = sum(medians(ways, place))
    count = max(int(seconds / first_s), 10)
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f"sleep {0.7 * seconds:.2f}; exec nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    found = [sum(each) for each in _rounds(ways, count, place.device)]
    clocks, _ = process.communicate(timeout=10)
    tenth = max(count // 10, 3)
    return {
        "first_s": median(found[:tenth]),
        "last_s": median(found[-tenth:]),
        "rounds": count,
        "clocks": clocks.strip(),
    }


def measure(part: str, place: Place, shapes: Mapping[str, str], size: int) -> Iterator[dict[str, Any]]:
    """The figures of a part's trials, one after the other."""
    cuda = place.device.type == "cuda"
    makers = {"parts": partial(parts, size=size), "blocks": blocks, "blocking": blocking, "compiled": compiled}
    for label, name, make in makers[part](place, shapes):
        row: dict[str, Any] = {"part": part, "model": label, "name": name}
        if time.monotonic() > place.until:
            yield row | {"failed": "not measured: no time was left"}
            continue
        start = time.monotonic()
        try:
            trial = make()
            found = medians(list(trial.ways.values()), place)
            row["measured_s"] = dict(zip(trial.ways, found, strict=True))
            row["law_s"] = dict(trial.law_s)
            yield row | {"took_s": time.monotonic() - start}
            if cuda and name in ("block", "compiled block"):
                yield row | {"name": f"{name}: kernels", "kernels": kernels_of(trial.ways.values())}
            if cuda and name == f"product of {size}³":
                yield row | {
                    "name": f"{name}: sustained",
                    "sustained": sustained(list(trial.ways.values()), place, 2.0),
                }
        except Exception as problem:
            yield row | {"failed": f"{type(problem).__name__}: {problem}"[:600]}
        trial = None
        if cuda and torch.cuda.memory_allocated() > _LEFT_BYTES:
            gc.collect()  # slow: it visits all of torch's and transformers' objects
            torch.cuda.empty_cache()


# ---- all parts -----------------------------------------------------------------------------------------------------


def _place(tiny: bool, part: str) -> Place:
    until = time.monotonic() + DEADLINES_S[part] - _MARGIN_S
    kind = "H100"
    if tiny:
        device = torch.device("cpu")
        seconds = 0.001
    else:
        device = torch.device("cuda", 0)
        seconds = SECONDS[part]
        kind = "H200" if "H200" in torch.cuda.get_device_name() else "H100"
    machine = replace(load_topology(f"1x{kind}").device, memory_bytes=0.0)
    return Place(device, machine, seconds, until)


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """A row for people: measured, predicted, and predicted over measured."""
    head = f"{row['model']:12}{row['name']:32}"
    if "failed" in row:
        return [f"{head}{row['failed']}"]
    if "kernels" in row:
        listed = [
            f"    {each['seconds'] * 1e3:9.3f} ms {each['count']:4} × {each['kernel']}" for each in row["kernels"]
        ]
        return [head, *listed]
    if "sustained" in row:
        return [f"{head}{row['sustained']}"]
    found = []
    for way, seconds in row["measured_s"].items():
        laws = {name: law for name, law in row["law_s"].items() if name in (way, f"{way}, counted")}
        ratios = "  ".join(f"law {law * 1e3:9.4f} ms, × {law / seconds:.3f}" for law in laws.values())
        found.append(f"{head}{way:12}{seconds * 1e3:10.4f} ms  {ratios}")
    return found


def run_part(part: str, tiny: bool) -> list[dict[str, Any]]:
    """The rows of a part, from a process of its own."""
    deadline_s = DEADLINES_S[part]
    command = [sys.executable, "-m", "benchmarks", "gpu-law", "--part", part]
    if tiny:
        command.append("--tiny")
    environment = dict(os.environ)
    if part == "blocking":
        environment[_BLOCKING] = "1"
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        problem = ""
        try:
            if process.wait(timeout=deadline_s):
                problem = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"not done after {deadline_s:g} s"
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(line) for line in output if line.startswith("{") and line.endswith("}\n")]
        if problem:
            row = {"part": part, "model": part, "name": "", "failed": f"{problem}; {errors.read()[-1500:]}"}
            rows.append(row)
    return rows


def main(part: str = "", output: Path = Path("gpu-law.json"), only: str = "", tiny: bool = False) -> int:
    """Measures all parts, prints them, and writes them to a file.

    Args:
        part: Only this part, in this process; its rows go to standard output as JSON.
        output: File of the rows.
        only: Names of parts, separated by commas; default: parts, blocks, blocking, compiled.
        tiny: Tiny sizes on the CPU, to try this command.
    """
    if not tiny and not torch.cuda.is_available():
        print("gpu-law: needs a CUDA device, and torch sees none here; --tiny tries it on the CPU", file=sys.stderr)
        return 2
    if part:
        place = _place(tiny, part)
        shapes, size = (TINY, 64) if tiny else (SHAPES, 8192)
        for row in measure(part, place, shapes, size):
            print(json.dumps(row), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    machine = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not tiny:
        machine["gpu"] = state_of_the_gpu()
    print(machine, flush=True)
    for name in only.split(",") if only else DEADLINES_S:
        start = time.monotonic()
        found = run_part(name, tiny)
        rows += found
        print("\n".join(line for row in found for line in lines_of(row)))
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")
    return int(any("failed" in row for row in rows))
