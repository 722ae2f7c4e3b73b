"""Predicted and counted memory of ranks that share gradients or weights: `python -m tests.pipeline.sharing_memory`.

Counted are the tensors that live before an update, and what torch's profiler records of its allocator during it.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from tests.pipeline import memory_jobs as jobs
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pipefit as pf
from pipefit.calibrate.tensor_shard import profile_of_shard
from pipefit.cost import of_plan
from pipefit.ir.program import Program
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.planner import by_hand
from pipefit.profiling import profile_layers
from pipefit.profiling.workload import Workload
from pipefit.runtime.launch import launch
from pipefit.runtime.microbatches import feed_of
from pipefit.runtime.session import current
from pipefit.simulate import simulate
from pipefit.spec import Plan, Profile, Topology
from pipefit.stage.split import named_layers

WIDE = {"hidden_size": 192, "intermediate_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": WIDE,
    "GPT2LMHeadModel": {"n_embd": 192},
    "BertForMaskedLM": WIDE,
}
LEVELS = ("gradients", "weights")

SHAPES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "1 stage × 2": {"schedule": "1f1b", "replicas": (2,)},
        "breadth-first, 4 stages of a rank × 2": {"schedule": "breadth-first", "num_chunks": 4, "replicas": (2,)},
    },
    4: {
        "1 stage × 4": {"schedule": "1f1b", "replicas": (4,)},
        "breadth-first, 4 stages of a rank × 4": {"schedule": "breadth-first", "num_chunks": 4, "replicas": (4,)},
        "1f1b, 2 stages × 2": {"schedule": "1f1b", "replicas": (2, 2)},
        "gpipe, 2 stages × 2": {"schedule": "gpipe", "replicas": (2, 2)},
        "breadth-first, 2 × 3 stages × 2": {"schedule": "breadth-first", "num_chunks": 3, "replicas": (2, 2)},
        "1 stage × 2, tensor width 2": {"schedule": "1f1b", "replicas": (2,), "tensor": 2},
        "breadth-first, 4 stages of a rank × 2, tensor width 2": {
            "schedule": "breadth-first", "num_chunks": 4, "replicas": (2,), "tensor": 2},
    },
}  # fmt: skip
MICROBATCHES = 8


def plan_of(layers: int, ranks: int, shape: dict[str, Any], level: str) -> Plan:
    """The plan of a shape."""
    num_ranks = ranks // width_of(shape)
    return by_hand(layers, num_ranks=num_ranks, num_microbatches=MICROBATCHES, shard=level, **shape)


def width_of(shape: dict[str, Any]) -> int:
    """The processes of a rank."""
    width: int = shape.get("tensor", 1)
    return width


@cache
def _proven(name: str) -> Any:
    jobs.MODELS[name] = {**jobs.MODELS[name], **MODELS[name]}
    return pf.cut(jobs.model(name), example=jobs.batch(name, 2))


def layers_of(name: str) -> Any:
    """The layers of a model whose weights are not small next to its messages; it is cut once in a process."""
    return copy.deepcopy(_proven(name))


def counted(name: str, shape: dict[str, Any], level: str) -> tuple[float, Program]:
    """The most bytes of this rank in a later step, and the program."""
    gc.collect()
    others = _storages()
    made = layers_of(name)
    whole = jobs.batch(name)
    plan = plan_of(len(made), dist.get_world_size(), shape, level)
    pipe = pf.Pipeline(made, loss=made.loss, optimizer=jobs.adamw, plan=plan)
    pipe.step(whole, whole)
    pipe.step(whole, whole)
    feed = feed_of((whole, whole), MICROBATCHES, jobs.SAMPLES, "train")
    gc.collect()
    held = sum(size for address, size in _storages().items() if address not in others)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        pipe.engine.run(pipe.program, feed)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    program = pipe.program
    pipe.close()
    return held + max(accumulate(event.nbytes() for event in events)), program


def _storages() -> dict[int, int]:
    """The bytes of the memory of all tensors that are alive, by its address."""
    found = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _profile(name: str, shape: dict[str, Any]) -> tuple[Profile, int, float]:
    """The measured profile of a model, its number of layers, and the bytes of states for each byte of weights."""
    made = layers_of(name)
    layers = named_layers(made)
    count = len(layers)
    state = state_per_weight(layers, jobs.adamw)
    if width_of(shape) > 1:
        whole = jobs.batch(name)
        work = Workload(layers, made.loss, jobs.adamw, torch.device("cpu"), (whole, whole))
        plan = plan_of(count, dist.get_world_size(), shape, "weights")
        return profile_of_shard(work, plan, current(), Topology.local(plan.num_processes)), count, state
    x = jobs.batch(name, jobs.SAMPLES // MICROBATCHES)
    return profile_layers(layers, x, made.loss, x, repeats=1, warmup=0, optimizer=jobs.adamw), count, state


def both(name: str, shapes: list[dict[str, Any]], levels: Sequence[str]) -> list[tuple[float, float]]:
    """Of each shape, all of one tensor width, and level the predicted peak of this process, and the counted one."""
    count = dist.get_world_size()
    seen, num_layers, state = _profile(name, shapes[0])
    found = []
    for shape in shapes:
        for level in levels:
            most, program = counted(name, shape, level)
            plan = plan_of(num_layers, count, shape, level)
            cost = of_plan(seen, plan, Topology.local(count), state_per_weight=state)
            timeline = simulate(program, cost, repeats=2)
            found.append((timeline.peak_bytes(current().rank // plan.tensor), most))
    return found


def several(asked: list[tuple[str, list[dict[str, Any]], Sequence[str]]]) -> list[tuple[float, float]]:
    """`both` of several models, with their shapes and levels."""
    return [pair for one in asked for pair in both(*one)]


def main(models: list[str]) -> None:
    """Prints a line for each model, shape and level, and the largest difference."""
    worst = 0.0
    for count, shapes in SHAPES.items():
        for name, width in product(models or list(MODELS), (1, 2)):
            own = {label: shape for label, shape in shapes.items() if width_of(shape) == width}
            if not own or (width > 1 and name not in jobs.SHARED):
                continue
            ranks = launch(both, count, name, list(own.values()), LEVELS, threads=1, quiet=True, deadline_s=600)
            labels = [f"{shape}, {level}" for shape in own for level in LEVELS]
            for number, label in enumerate(labels):
                line = f"{name:20} {label:65}"
                for rank in range(count):
                    predicted, most = ranks[rank][number]
                    error = 100 * (predicted / most - 1)
                    worst = max(worst, abs(error))
                    line += f" {predicted / 1e3:6.0f} {most / 1e3:6.0f} {error:+5.1f} %"
                print(line, flush=True)
    print(f"at most {worst:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
