"""Plans of many models on many machines, computed ahead for a page that cannot plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from pipefit.errors import PipefitError
from pipefit.planner import plan
from pipefit.planner.machines import load_topology, read_profile
from pipefit.planner.transformer import num_parameters, transformer_of
from pipefit.run.observer import Say
from pipefit.spec.files import JsonObject

_COLUMNS = ("summary", "throughput", "peak_bytes", "slower", "basis")


def plan_grid(models: Mapping[str, str], machines: Sequence[str], batches: Sequence[int], say: Say) -> JsonObject:
    """The plans of every model on every machine with every batch, and facts about the models.

    Args:
        models: transformers by their sizes, under the names that readers see.
        machines: names or files of topologies.
        batches: samples of an update.
        say: called with the name of each cell before it is planned.
    """
    facts = {name: _facts(text) for name, text in models.items()}
    cells = []
    for name, machine, batch in product(models, machines, batches):
        say(f"{name} on {machine}, batch {batch}")
        cells.append({"model": name, "machine": machine, "batch": batch, **_cell(models[name], machine, batch)})
    return {"models": facts, "cells": cells}


def _facts(text: str) -> JsonObject:
    """The profile, the tokens of a sample and the parameters of a model."""
    model = transformer_of(text)
    return {"profile": text, "sequence": model.sequence, "parameters": num_parameters(model)}


def _cell(text: str, machine: str, batch: int) -> JsonObject:
    topology = load_topology(machine)
    facts = {"devices": topology.num_devices, "capacity": topology.device.memory_bytes}
    try:
        made = plan(read_profile(text, topology, 1), topology, global_batch=batch)
    except PipefitError as problem:
        return {**facts, "why": str(problem)}
    assert made.prediction is not None
    plans = []
    for each in made.candidates:
        if each.throughput:
            plans.append({name: getattr(each, name) for name in _COLUMNS})
    return {**facts, "plans": plans, "memory": made.prediction.peak_bytes}
