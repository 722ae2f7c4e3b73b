"""What stages take by themselves: of a part of the model a rank keeps more in its caches than of the whole."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from pipefit.ir.op import Op
from pipefit.profiling.agreed import as_trained
from pipefit.profiling.passes import Step
from pipefit.profiling.payload import cut_off, map_tensors, tensors_of
from pipefit.runtime.collectives import sum_table
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile
from pipefit.stage.split import NamedLayer

__all__ = ["Alone", "ByStage"]

_FEWEST, _MOST, _LEAST_S = 3, 8, 0.03
"""Micro-batches that are timed one after the other."""


class Alone(NamedTuple):
    """Seconds of a stage by itself over those of its layers in a step of the whole model; (forward, backward) each.

    Attributes:
        in_turn: where forwards and backwards take turns.
        in_a_row: where each follows one of the same kind.
    """

    in_turn: tuple[float, float]
    in_a_row: tuple[float, float]


class ByStage:
    """The stages of a plan, each timed on its own ranks, and the whole model beside it; nothing is trained.

    Args:
        step: a micro-batch through the whole model.
        layers: of the whole model; their gradients are overwritten.
        plan: which layers make which stage, and where.
        session: the ranks of the run, all of which must call alike.
    """

    def __init__(self, step: Step, layers: Sequence[NamedLayer], plan: Plan, session: Session) -> None:
        self._step, self._layers, self._session = step, layers, session
        self._stages = [tuple(stage.layers) for stage in plan.partition.stages]
        self._places = [tuple(ranks) for ranks in plan.placement.ranks]
        self._found: dict[int, list[Alone]] = {n: [] for n, ranks in enumerate(self._places) if session.rank in ranks}

    def turn(self) -> None:
        """Measures once more, on all ranks at once."""
        if self._session.is_distributed:
            dist.barrier()
        with as_trained(self._layers):
            times = min(max(math.ceil(_LEAST_S / self._step.plain()), _FEWEST), _MOST)
            whole = [self._step.marked() for _ in range(times)]
            inputs = self._inputs()
            for stage, found in self._found.items():
                layers, x = self._stages[stage], inputs[stage]
                modules = [self._layers[index].module for index in layers]
                own = [(sum(one.forward_s[n] for n in layers), sum(one.backward_s[n] for n in layers)) for one in whole]
                in_turn = [pair for _ in range(times) for pair in _timed(modules, x, 1)]
                in_a_row = _timed(modules, x, times)
                found.append(Alone(_over(in_turn, own), _over(in_a_row, own)))

    def found(self) -> list[Alone]:
        """Of each stage the medians of all turns, and of its ranks the mean; all ranks get the same."""
        table = torch.zeros(len(self._stages), 4, dtype=torch.float64)
        for stage, turns in self._found.items():
            figures = [[*turn.in_turn, *turn.in_a_row] for turn in turns]
            middle = torch.tensor([statistics.median(column) for column in zip(*figures, strict=True)])
            table[stage] = middle / len(self._places[stage])
        return [Alone((a, b), (c, d)) for a, b, c, d in sum_table(self._session, table).tolist()]

    def applied(self, profile: Profile) -> tuple[Profile, dict[Op, list[float]]]:
        """The profile with every layer as its stage has it, and what a stage takes longer, or less, in a row.

        The layers are for forwards and backwards that take turns; seconds in a row are for every stage, by operation.
        """
        layers = list(profile.layers)
        again: dict[Op, list[float]] = {Op.FWD: [], Op.BWD: []}
        for numbers, (in_turn, in_a_row) in zip(self._stages, self.found(), strict=True):
            own = [profile.layers[number] for number in numbers]
            again[Op.FWD].append(sum(layer.forward_s for layer in own) * (in_a_row[0] - in_turn[0]))
            again[Op.BWD].append(sum(layer.backward_s for layer in own) * (in_a_row[1] - in_turn[1]))
            for number, layer in zip(numbers, own, strict=True):
                layers[number] = msgspec.structs.replace(
                    layer,
                    forward_s=layer.forward_s * in_turn[0],
                    backward_input_s=layer.backward_input_s * in_turn[1],
                    backward_weight_s=layer.backward_weight_s * in_turn[1],
                )
        return msgspec.structs.replace(profile, layers=tuple(layers)), again

    def _inputs(self) -> list[Any]:
        """What each stage takes, cut off from the graph that made it."""
        first = {layers[0]: stage for stage, layers in enumerate(self._stages)}
        found: list[Any] = [None] * len(self._stages)
        payload = self._step.payload
        for index, (_, layer) in enumerate(self._step.chain):
            if index in first:
                found[first[index]] = map_tensors(cut_off, payload)
            payload = layer(payload)
        return found


def _timed(modules: Sequence[Any], x: Any, num: int) -> list[tuple[float, float]]:
    """Seconds of some forwards, one after the other, and of their backwards."""
    forward_s, outputs = [], []
    for _ in range(num):
        # Each micro-batch is a message of its own.
        payload = map_tensors(cut_off, x)
        began = time.perf_counter()
        for module in modules:
            payload = module(payload)
        forward_s.append(time.perf_counter() - began)
        roots = [leaf for leaf in tensors_of(payload) if leaf.requires_grad]
        outputs.append((roots, [torch.ones_like(root) for root in roots]))
    del payload, roots
    backward_s = []
    while outputs:
        roots, grads = outputs.pop(0)
        began = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, grads)
        backward_s.append(time.perf_counter() - began)
    return list(zip(forward_s, backward_s, strict=True))


def _over(pairs: Sequence[tuple[float, float]], whole: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Medians over medians, but for the first of each, which follow something else; 1 where there is nothing to do."""
    forward, backward = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    of_forward, of_backward = (statistics.median(column) for column in zip(*whole[1:], strict=True))
    return forward / of_forward if of_forward else 1.0, backward / of_backward if of_backward else 1.0
