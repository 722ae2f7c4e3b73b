"""The unit costs of the papers: seconds per rank and micro-batch, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import mul
from typing import Any

from pipefit.cost.model import CostModel
from pipefit.errors import PlanError
from pipefit.ir.program import Header
from pipefit.spec.options import setting
from pipefit.spec.plan import Figures
from pipefit.spec.topology import Tier


@dataclass(frozen=True)
class UnitCosts:
    """Costs of a program whose model is not known; see `unit`."""

    forward: float = setting(1, "Time of a forward, per rank and micro-batch: a chunk costs 1/v.", typed="time")
    backward: float | None = setting(None, "Time of a full backward; default: input + weight, or 2.", typed="time")
    input: float | None = setting(None, "Time of a backward's input-gradient half.", typed="time")
    weight: float | None = setting(None, "Time of a backward's weight-gradient half.", typed="time")
    latency: float = setting(0, "Time of a message between ranks.", typed="time")
    copy: float = setting(2, "Time of moving all stages of a rank to or from their tier.", typed="time")

    def model(self, header: Header) -> CostModel:
        """These costs of a program."""
        costs = {one.name: getattr(self, one.name) for one in fields(UnitCosts)}
        return unit(header, **costs)


def unit(
    header: Header,
    forward: float = 1,
    backward: float | None = None,
    *,
    input: float | None = None,
    weight: float | None = None,
    latency: float = 0,
    copy: float = 2,
) -> CostModel:
    """Unit costs: a rank spends `forward` and `backward` on a micro-batch over all its stages.

    A stage costs forward·num_ranks/num_stages: a chunk costs 1/v, and the one stage of data parallelism costs p times
    as much; a frozen stage has no backward. Saved activations are counted in micro-batches of a rank's layers; nothing
    else has a size.

    Args:
        header: the header of the program.
        forward: seconds per rank and micro-batch.
        backward: the time of a full backward; default input + weight, or 2.
        input: its half for the gradient of the input; default: backward − weight, or half.
        weight: its other half.
        latency: seconds of a message.
        copy: seconds of moving the weights, or the states, of all stages of a rank to or from their tier; a step on
            the host takes twice as long.

    Raises:
        PlanError: backward is not input + weight.
    """
    input, weight = _halves(backward, input, weight)
    num_stages = header.num_stages

    def every(total: float) -> Figures:
        return (_divide(total * header.num_ranks, num_stages),) * num_stages

    def trained(total: float) -> Figures:
        return (0,) * header.frozen + every(total)[header.frozen :]

    tiers: tuple[Tier, ...] = ()
    if header.spill is not None:
        # Every copy of a stage that is spilled takes as long.
        rates = (math.inf,) * 3
        tiers = (Tier(header.spill.tier, *rates, latency_s=every(copy)[0]),)
    return CostModel(
        forward_s=every(forward),
        backward_input_s=trained(input),
        backward_weight_s=trained(weight),
        host_step_s=every(2 * copy),
        saved_bytes=tuple(1 / len(header.stages_of(ranks[0])) for ranks in header.placement),
        latency_s=latency,
        tiers=tiers,
        tensor=header.tensor,
    )


def weighted(cost: CostModel, work: Sequence[float]) -> CostModel:
    """Costs of stages that differ: those of each stage times its work.

    Args:
        cost: in which all stages cost the same.
        work: the work of each stage relative to the others; (): all the same.

    Raises:
        PlanError: not one figure for each stage, or a figure that is not above 0.
    """
    if not work:
        return cost
    if len(work) != cost.num_stages:
        raise PlanError(f"work of the stages: expected a figure for each of {cost.num_stages} stages, got {len(work)}")
    if not all(0 < share < math.inf for share in work):
        raise PlanError(f"work of the stages: expected finite figures above 0, got {', '.join(map(str, work))}")
    each: dict[str, Any] = {}
    for name in ("forward_s", "recompute_s", "backward_input_s", "backward_weight_s"):
        each[name] = tuple(map(mul, work, getattr(cost, name)))
    return replace(cost, **each)


def _halves(backward: float | None, input: float | None, weight: float | None) -> tuple[float, float]:
    if backward is None:
        if input is None:
            input = 1
        if weight is None:
            weight = 1
        return input, weight
    if input is None:
        input = _divide(backward, 2)
        if weight is not None:
            input = backward - weight
    if weight is None:
        weight = backward - input
    if input + weight != backward:
        raise PlanError(f"expected backward = input + weight, got {backward} and {input} + {weight}")
    return input, weight


def _divide(a: float, b: int) -> float:
    """A / b; an integer where both are and b divides a, so that whole costs give whole times."""
    if isinstance(a, int) and a % b == 0:
        return a // b
    return a / b
