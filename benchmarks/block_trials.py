"""The trials of `gpu_law.py`: parts of transformer blocks and whole ones, with the seconds that the law predicts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from pipefit.cost.kernels import kernels_s
from pipefit.cost.roofline import pass_s, product_s
from pipefit.models.gpt import Block
from pipefit.planner.computed_profile import transformer_profile
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
BLOCKING = "CUDA_LAUNCH_BLOCKING"
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


def rounds(ways: Sequence[Way], count: int, device: torch.device) -> list[list[float]]:
    """The seconds of each work in so many rounds."""
    if device.type != "cuda" or os.environ.get(BLOCKING) == "1":
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
    rounds(ways, 2, place.device)
    first = sum(rounds(ways, 1, place.device)[0])
    count = min(max(int(place.seconds / first), 5), 200)
    found = rounds(ways, count, place.device)
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
    """Seconds of a block likewise; its weights' gradients are added to earlier ones."""
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
