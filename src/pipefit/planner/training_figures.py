"""Figures of a whole training from a plan: tokens per second, share of the peak, days, device hours, costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.errors import PlanError
from pipefit.planner.plan_figures import replays_of
from pipefit.planner.transformer import (
    flops_per_iteration,
    is_transformer,
    num_parameters,
    transformer_of,
)
from pipefit.spec import Plan, Topology
from pipefit.spec.counted import Counted
from pipefit.units import format_count

_CONVENTION = "model FLOP, forward and backward once: products and whole attention; no replay"


@dataclass(frozen=True)
class _Work:
    """A model's work.

    Attributes:
        parameters: each once.
        active: those that a token uses.
        tokens: of a sample; 0: it is no text.
        flops: of a sample, forward and backward.
        again: FLOP of a sample that a replay of all blocks adds.
        attention: share of these in attention.
        element_bytes: of the numbers in products.
    """

    parameters: float
    active: float
    tokens: int
    flops: float
    again: float
    attention: float
    element_bytes: int

    @classmethod
    def of(cls, plan: Plan, counted: Counted | None) -> _Work | None:
        """The work of a plan's model; None: it is not known."""
        if counted is not None:
            blocks = [kernel for layer in counted.at(1)[1:-1] for kernel in layer.forward]
            again = sum(kernel.model_flops for kernel in blocks)
            cores = sum(kernel.model_flops for kernel in blocks if kernel.kind == "attention")
            share = cores / again
            return cls(
                counted.num_parameters,
                counted.num_active,
                counted.sequence,
                counted.flops,
                again,
                share,
                counted.element_bytes,
            )
        if not is_transformer(plan.model):
            return None
        gpt = transformer_of(plan.model)
        flops = flops_per_iteration(gpt, 1)
        again = flops_per_iteration(gpt, 1, recompute=True) - flops
        scores = 2 * gpt.hidden * gpt.sequence
        parameters = num_parameters(gpt)
        share = scores / (gpt.matrices + scores)
        return cls(parameters, parameters, gpt.sequence, flops, again, share, gpt.bytes)


def training(
    plan: Plan,
    topology: Topology,
    tokens: float | None = None,
    *,
    counted: Counted | None = None,
    price: float | None = None,
) -> dict[str, float | str]:
    """Tokens per second, FLOP/s, fraction of the peak, days and costs of a training, as predicted.

    Args:
        plan: for a model named "gpt:layers=…" or "llama:layers=…", or for a counted one.
        topology: with the device's peak.
        tokens: to train on.
        counted: the model's layers.
        price: of a device hour.

    Raises:
        PlanError: the model's samples have no tokens.
    """
    work = _Work.of(plan, counted)
    if work is None or plan.prediction is None:
        return {}
    devices = plan.num_processes
    rate = plan.prediction.throughput
    found: dict[str, float | str] = {"parameters": work.parameters}
    if work.active < work.parameters:
        found["active_parameters"] = work.active
    if work.tokens:
        found["tokens_per_s"] = rate * work.tokens
        found["tokens_per_s_per_device"] = rate * work.tokens / devices
    # Where devices differ, the fraction is that of their peaks together.
    typed = topology.for_elements(work.element_bytes)
    every = typed.devices[:devices] or (typed.device,)
    peak = sum(device.flops for device in every) / len(every)
    used = rate * work.flops / devices
    if peak:
        found |= {"model_flops_per_device": used, "mfu": used / peak, "mfu_convention": _CONVENTION}
        replays = replays_of(plan, inside=1.0, attention=work.attention)
        share = sum(replays) / len(replays)
        if share:
            found["hfu"] = (used + share * rate * work.again / devices) / peak
    if tokens is None:
        return found
    if not work.tokens:
        raise PlanError(f"tokens: samples of {plan.model} have none; leave it out")
    seconds = tokens / (rate * work.tokens)
    hours = seconds / 3600 * devices
    found |= {"tokens": tokens, "training_days": seconds / 86400, "device_hours": hours}
    if price is not None:
        found["cost"] = hours * price
    return found


def training_lines(found: Mapping[str, Any]) -> list[str]:
    """The figures of `training` in words."""
    if not found:
        return []
    words = f"{format_count(found['parameters'])} parameters"
    if "active_parameters" in found:
        words += f", of which a token uses {format_count(found['active_parameters'])}"
    lines = [words]
    if "mfu" in found:
        lines[0] += f"; {found['model_flops_per_device'] / 1e12:.4g} TFLOP/s per device, {found['mfu']:.1%} of its peak"
        if "hfu" in found:
            lines[0] += f" ({found['hfu']:.1%} with replays)"
        lines.append(f"peak: {found['mfu_convention']}")
    if "tokens_per_s" in found:
        each = format_count(found["tokens_per_s_per_device"])
        lines.append(f"{format_count(found['tokens_per_s'])} tokens/s, {each} per device")
    if "tokens" in found:
        hours = format_count(found["device_hours"])
        words = f"{format_count(found['tokens'])} tokens: {found['training_days']:.4g} days, {hours} device hours"
        if "cost" in found:
            words += f", which cost {format_count(found['cost'])}"
        lines.append(words)
    return lines
