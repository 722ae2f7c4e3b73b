"""State that moves when a run goes on by another plan: each process gets what it lacks from one that has it.

    process      layers before      layers now
       0             0 1 2              0 1          layer 2 ──► process 1: weights, buffers, states of its optimizer
       1             3 4                2 3 4        nothing else is sent

A parameter with several names moves once, under the first of them. Every process derives the same list of moves, and
walks it in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipefit.checkpoint.optim import optimizer_tensors, parameter_and_key
from pipefit.runtime.collectives import receive, send
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.stage.record_layout import name_of
from pipefit.stage.split import NamedLayer

WEIGHT = ""
"""The key of a weight or buffer itself among the tensors that move with it."""

Belongings = dict[str, dict[str, Tensor]]
"""Weights and buffers by their first names: each with the states of its optimizer, and what else moves with it."""

Forms = dict[str, dict[str, tuple[list[int], str, str]]]
"""Shape, type and kind of device of each tensor of some belongings, as JSON data."""


class Move(NamedTuple):
    """A weight or buffer that moves.

    Attributes:
        name: the first of its names.
        source: the process that sends it; None: no process has it.
        target: the process that lacks it.
    """

    name: str
    source: int | None
    target: int


def named_tensors(layer: NamedLayer) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a layer under all their names, also buffers that a `state_dict` leaves out."""
    yield from layer.module.named_parameters(prefix=layer.prefix, remove_duplicate=False)
    yield from layer.module.named_buffers(prefix=layer.prefix, remove_duplicate=False)


def first_names(layers: Iterable[NamedLayer]) -> dict[str, str]:
    """Each name of a parameter or buffer of a model, with the first name of the same parameter."""
    first: dict[int, str] = {}
    found = {}
    for layer in layers:
        for name, tensor in named_tensors(layer):
            found[name] = name
            if isinstance(tensor, torch.nn.Parameter):
                found[name] = first.setdefault(id(tensor), name)
    return found


def moves_of(
    layers: Sequence[NamedLayer], before: Sequence[Collection[int]], now: Sequence[Collection[int]], tensor: int = 1
) -> list[Move]:
    """The moves from one assignment of layers to another, in an order that is the same on every process.

    Args:
        layers: of the whole model.
        before: the layers that each process has.
        now: the layers that each process will have.
        tensor: processes of each rank, of which each has its parts of the weights.
    """
    first = first_names(layers)
    of_layer = {layer.index: dict.fromkeys(first[name] for name, _ in named_tensors(layer)) for layer in layers}
    held = [{name for layer in own for name in of_layer[layer]} for own in before]
    found = []
    for target, wanted in enumerate(now):
        lacking = dict.fromkeys(name for layer in sorted(wanted) for name in of_layer[layer])
        for name in lacking:
            if name not in held[target]:
                alike = range(target % tensor, len(held), tensor)
                having = [process for process in alike if name in held[process]]
                nearest = min(having, key=lambda process: abs(process - target), default=None)
                found.append(Move(name, nearest, target))
    return found


def belongings_of(
    workers: Iterable[Worker], first: Mapping[str, str], others: Sequence[Mapping[str, Tensor]]
) -> Belongings:
    """What this process has; of several copies of a weight in one process, the first.

    Args:
        workers: of this process.
        first: see `first_names`.
        others: further tensors that belong to weights, by the weights' first names.
    """
    found: Belongings = {}
    for worker in workers:
        for index, stage in worker.stages.items():
            for layer in stage.layers:
                for name, tensor in named_tensors(layer):
                    found.setdefault(first[name], {}).setdefault(WEIGHT, tensor)
            for name, tensor in optimizer_tensors(worker, index, all_ties=True):
                weight, key = parameter_and_key(name)
                found[first[weight]].setdefault(key, tensor)
    for number, table in enumerate(others):
        for weight in table.keys() & found.keys():
            found[weight][other_key(number)] = table[weight]
    return found


def other_key(number: int) -> str:
    """The key of a further tensor that belongs to a weight."""
    return f"/{number}"


def is_state(key: str) -> bool:
    """Returns whether a key of belongings is that of an optimizer's state."""
    return key != WEIGHT and not key.startswith("/")


def forms_of(belongings: Belongings, names: Collection[str]) -> Forms:
    """The forms of the tensors of some weights."""
    found: Forms = {}
    for name in names:
        found[name] = {}
        for key, tensor in belongings[name].items():
            dtype = name_of(tensor.dtype)
            found[name][key] = list(tensor.shape), dtype, tensor.device.type
    return found


def exchange_tensors(
    session: Session, moves: Sequence[Move], mine: Belongings, places: Mapping[str, Tensor], forms: Sequence[Forms]
) -> Belongings:
    """Sends and receives; returns what has arrived.

    Both ends of a move wait for it. As all walk the moves in one order, no two processes wait for each other.

    Args:
        session: the processes of the run.
        moves: of all processes; those without a source are left out.
        mine: what this process has.
        places: the memory of the weights that will arrive, by first name.
        forms: of what each process sends.
    """
    arrived: Belongings = {}
    for name, source, target in moves:
        if source == session.rank:
            for tensor in mine[name].values():
                send(session, tensor.detach(), target)
        elif source is not None and target == session.rank:
            arrived[name] = {}
            for key, (shape, dtype, device) in forms[source][name].items():
                place = places[name]
                if key != WEIGHT:
                    on = "cpu" if device == "cpu" else place.device
                    place = torch.empty(shape, dtype=getattr(torch, dtype), device=on)
                receive(session, place.detach(), source)
                arrived[name][key] = place
    return arrived
