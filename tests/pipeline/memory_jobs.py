"""Models of transformers over two ranks: bytes of tensors that live, counted by their storages, and predicted ones."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pipefit as pf
from pipefit.calibrate.tensor_shard import profile_of_shard
from pipefit.cost import of_plan
from pipefit.cost.tensor import tensor_shard
from pipefit.models import build
from pipefit.pipeline.layer_sizes import sizes_of, state_per_weight
from pipefit.planner import by_hand
from pipefit.profiling import profile_layers
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.workload import Workload
from pipefit.runtime.microbatches import feed_of
from pipefit.runtime.session import current
from pipefit.simulate import simulate
from pipefit.spec import Profile, Tier, Topology
from pipefit.spec.plan import Recompute
from pipefit.spec.profile import WORK
from pipefit.stage.precision import half_of
from pipefit.stage.split import named_layers

SMALL = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
         "num_attention_heads": 4, "pad_token_id": 0}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
OLD = {"vocab_size": 512, "n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 64}
SAMPLES = 16
LENGTH = 48
MICROBATCHES = 4

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**GROUPED},
    "MistralForCausalLM": {**GROUPED},
    "Qwen2ForCausalLM": {**GROUPED, "tie_word_embeddings": False},
    "GPT2LMHeadModel": {**OLD, "tie_word_embeddings": False},
    "GPTNeoXForCausalLM": {**SMALL},
    "Phi3ForCausalLM": {**GROUPED},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 24},
    "BertForMaskedLM": {**SMALL, "tie_word_embeddings": False},
    "OPTForCausalLM": {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 96, "tie_word_embeddings": False},
    "ViTForImageClassification": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
                                  "num_attention_heads": 4, "image_size": 32, "patch_size": 4},
}  # fmt: skip

PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "1f1b, stages replayed": {"schedule": "1f1b", "recompute": "stage"},
    "1f1b, layers replayed": {"schedule": "1f1b", "recompute": "layer"},
    "gpipe": {"schedule": "gpipe"},
    "gpipe, stages replayed": {"schedule": "gpipe", "recompute": "stage"},
}
TENSOR: dict[str, dict[str, Any]] = {
    "1f1b, tensor 2": {"schedule": "1f1b", "tensor": 2},
    "1f1b, tensor 2, layers replayed": {"schedule": "1f1b", "tensor": 2, "recompute": "layer"},
}
"""Plans of ranks of two processes, for the models that bring a plan for tensor parallelism."""
SHARED = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM"]
SPILLED = {
    "spilled, one stage at a time": ("spilled", "none"),
    "spilled, breadth-first": ("breadth-first", "none"),
    "spilled, saved tensors kept": ("breadth-first", "all"),
}
"""Programs of one rank that visit three stages, each from the host's memory: schedule and `keep`."""


def copied(payload: Any, device: torch.device, what: str) -> Any:
    """A micro-batch that is loaded into memory of its own, as on a GPU; on a CPU it is the user's batch."""
    return pytree.tree_map_only(Tensor, torch.clone, payload)


class Living(TorchDispatchMode):
    """Bytes of the storages that operations return, until the last tensor of each is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.most = 0

    def note(self, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                if address and address not in self.sizes:
                    self.sizes[address] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, address)
        self.most = max(self.most, self.now)

    def gone(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(pytree.tree_leaves(result))
        return result


def model(name: str) -> nn.Module:
    # Here, so that only the ranks load it.
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    made: nn.Module = kind(kind.config_class(**MODELS[name]))
    return made.train()


@cache
def _proven(name: str) -> Any:
    return pf.cut(model(name), example=batch(name, 4))


def layers_of(name: str) -> Any:
    """The layers of a model, as they are before any training; it is cut once in a process."""
    return copy.deepcopy(_proven(name))


def batch(name: str, samples: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name.startswith("ViT"):
        pixels = torch.randn(samples, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(2, (samples,), generator=generator)}
    words = torch.randint(1, 512, (samples, LENGTH), generator=generator)
    return {"input_ids": words, "labels": words.clone()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def plan(layers: int, **shape: Any) -> pf.spec.Plan:
    return by_hand(layers, num_microbatches=MICROBATCHES, **{"num_ranks": 2, **shape})


def counted(name: str, shape: dict[str, Any], precision: str) -> int:
    """The most bytes of tensors of this rank in a later step."""
    made = layers_of(name)
    whole = batch(name)
    pipe = pf.Pipeline(made, loss=made.loss, optimizer=adamw, plan=plan(len(made), **shape), precision=precision)
    return in_a_step(pipe, whole, whole)


def in_a_step(pipe: pf.Pipeline, x: Any, y: Any) -> int:
    """The most bytes of tensors of this rank in a step after the first two."""
    pipe.step(x, y)
    pipe.step(x, y)
    worker = pipe.workers[0]
    feed = feed_of((x, y), MICROBATCHES, 8, "train")
    gc.collect()
    count = Living()
    if worker.spilling is not None:
        count.note([worker.spilling.arena.slot("weights", 0).bytes])
    for stage in worker.stages.values():
        for layer in stage.layers:
            count.note(layer.module.parameters())
            count.note(layer.module.buffers())
    for optimizer in worker.optimizers.values():
        count.note(pytree.tree_leaves(list(optimizer.state.values())))
    del stage, layer, optimizer
    with count, patch("pipefit.runtime.handlers.on_device", copied):
        pipe.engine.run(pipe.program, feed)
    # What was sent in a pass is let go at its end.
    assert not any(getattr(pipe.engine.transports[0], "_open", {}).values())
    return count.most


def measured(example: tuple[Any, Any], layers: Any, loss: Any, precision: str) -> Profile:
    """The profile of the layers, measured in this process only."""
    work = Workload(layers, loss, adamw, torch.device("cpu"), example, half=half_of(precision))
    alone = replace(current(), rank=0, num_ranks=1)
    return agreed_profile(work, [SAMPLES // MICROBATCHES], alone, repeats=1, warmup=0)


def predicted(name: str, shapes: list[dict[str, Any]], precision: str) -> list[list[float]]:
    """The most bytes of each rank, by profile, costs and simulation."""
    made = layers_of(name)
    layers = named_layers(made)
    plans = [plan(len(made), **shape) for shape in shapes]
    whole = batch(name)
    local = Topology.local(plans[0].num_processes)
    if plans[0].tensor == 1:
        profile = measured((whole, whole), layers, made.loss, precision)
    else:
        work = Workload(layers, made.loss, adamw, torch.device("cpu"), (whole, whole), half=half_of(precision))
        profile = profile_of_shard(work, plans[0], current(), local)
    found = []
    for chosen in plans:
        state = state_per_weight(layers, adamw)
        cost = of_plan(profile, chosen, local, state_per_weight=state)
        timeline = simulate(pf.schedules.program_of(chosen), cost, repeats=2)
        found.append([timeline.peak_bytes(rank) for rank in range(chosen.num_processes // chosen.tensor)])
    return found


def both(name: str, shapes: list[dict[str, Any]], precision: str) -> tuple[list[list[float]], list[int]]:
    """The predicted bytes of both ranks of a model by plan (on rank 0), and the counted ones of this rank."""
    guess: list[list[float]] = []
    # Processes that share a rank measure their shards together.
    if current().rank == 0 or "tensor" in shapes[0]:
        guess = predicted(name, shapes, precision)
    return guess, [counted(name, shape, precision) for shape in shapes]


def several(name: str, groups: list[tuple[list[dict[str, Any]], str]]) -> tuple[list[Any], list[list[float]]]:
    """`both` of one model, for several groups of plans and their precision; and `scaled_work`."""
    return [both(name, *group) for group in groups], scaled_work()


def scaled_work() -> list[list[float]]:
    """Of each layer of a GPT over two processes the work of a shard: scaled over measured."""
    torch.manual_seed(0)
    made = build("gpt", layers=2, hidden=128, heads=4, vocab=512, context=64)
    layers = named_layers(made.layers)
    words = torch.randint(512, (8, 64))
    chosen = by_hand(len(layers), num_ranks=1, schedule="gpipe", num_microbatches=2, tensor=2)
    work = Workload(layers, made.loss, adamw, torch.device("cpu"), (words, words))
    measured = profile_of_shard(work, chosen, current(), Topology.local(2))
    whole = profile_layers(layers, words[:4], made.loss, words[:4], repeats=1, warmup=0, optimizer=adamw)
    scaled = tensor_shard(whole, 2, Topology.local(2))
    return [
        [getattr(one, name) / getattr(other, name) for name in WORK]
        for one, other in zip(scaled.layers, measured.layers, strict=True)
    ]


def spilled(name: str, precision: str, schedule: str, keep: str) -> tuple[float, int]:
    """The predicted and the counted bytes of one rank whose three stages are in the host's memory."""
    made = layers_of(name)
    layers = named_layers(made)
    whole = batch(name)
    profile = measured((whole, whole), layers, made.loss, precision)
    state = state_per_weight(layers, adamw)
    sizes = sizes_of(layers, adamw, 1)
    pipe = pf.Pipeline(
        made,
        loss=made.loss,
        optimizer=adamw,
        microbatches=MICROBATCHES,
        schedule=schedule,
        parallelism=pf.Parallelism(ranks=1, chunks=3),
        precision=precision,
        spill=pf.Spilled(host_memory="1 GiB", step_on="device", keep=keep),
    )
    most = in_a_step(pipe, whole, whole)
    local = msgspec.structs.replace(Topology.local(1), tiers=(Tier("host", 1e12, 1e9, 1e9),))
    cost = of_plan(profile, pipe.plan, local, state_per_weight=state, sizes=sizes)
    guess = simulate(pipe.program, cost, repeats=2).peak_bytes(0)
    pipe.close()
    return guess, most


def resident(options: dict[str, Any], precision: str, recompute: Recompute) -> tuple[float, int]:
    """The predicted and the counted bytes of one rank with a whole GPT, whose layers are used as they are."""
    torch.manual_seed(0)
    bundle = build("gpt", **options)
    example = bundle.example(SAMPLES, 0)
    profile = measured(example, named_layers(bundle.layers), bundle.loss, precision)
    pipe = pf.Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=adamw,
        microbatches=MICROBATCHES,
        parallelism=pf.Parallelism(ranks=1, recompute=recompute),
        precision=precision,
    )
    state = state_per_weight(named_layers(bundle.layers), adamw)
    cost = of_plan(profile, pipe.plan, Topology.local(1), state_per_weight=state)
    return simulate(pipe.program, cost, repeats=2).peak_bytes(0), in_a_step(pipe, *example)


def capped(name: str, options: dict[str, Any], cap: float, precision: str, schedule: str) -> tuple[float, int]:
    """The predicted and the counted bytes of one rank whose plan was made for a cap."""
    torch.manual_seed(0)
    bundle = build(name, **options)
    example = bundle.example(SAMPLES, 0)
    pipe = pf.Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=adamw,
        microbatches=MICROBATCHES,
        schedule=schedule,
        example=example,
        precision=precision,
        spill=pf.Spilled(cap, step_on="device"),
    )
    assert pipe.plan.spill is not None and pipe.plan.prediction is not None
    most = in_a_step(pipe, *example)
    pipe.close()
    return pipe.plan.prediction.peak_bytes[0], most
