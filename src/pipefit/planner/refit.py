"""A profile corrected by a measured run: the measured time of a stage is split among its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec

from pipefit.errors import PlanError
from pipefit.ir.instruction import Indices
from pipefit.ir.op import Op
from pipefit.planner.plan_figures import at_size_of
from pipefit.spec import Plan, Profile
from pipefit.timeline import Timeline, by_kind


def refit(profile: Profile, plan: Plan, measured: Timeline) -> Profile:
    """The profile with its seconds scaled so that each stage takes its measured time.

    For every stage and kind of instruction the median of the measured times is compared with the sum of the profile's
    layers; the layers of a stage keep their proportions. Backwards in one piece scale both halves alike, the loss and
    the optimizer's step are taken over as measured. The same factors are applied at the profile's other micro-batch
    sizes. Bytes stay.

    Raises:
        PlanError: the run was of another partition, or simulated times are missing.
    """
    stages = plan.partition.stages
    num_layers = plan.partition.num_layers
    num_stages = measured.program.header.num_stages
    if num_stages != len(stages) or num_layers != len(profile):
        raise PlanError(
            f"refit: the trace has {num_stages} stages, the plan {len(stages)} with {num_layers} layers, the profile "
            f"{len(profile)} layers; they must belong together"
        )
    figures = at_size_of(plan, profile)
    times = {}
    loss_s = None
    steps = {}
    for (op, place), item in by_kind(measured).items():
        times[op, place] = item.median_s
        if op == Op.STEP.value:
            steps[place] = item.median_s
        if op == Op.LOSS.value and loss_s is None:
            loss_s = item.median_s
    if not any(op == Op.FWD.value for op, _ in times):
        raise PlanError("refit: the trace holds no forward")
    factors: dict[int, dict[str, float]] = {}
    for index, stage in enumerate(stages):
        own = _factors(figures.replaying(stage.replays), stage.layers, stage.tensor, times, index)
        factors |= dict.fromkeys(stage.layers, own)
    layer_steps = _steps(figures, [stage.layers for stage in stages], steps)

    def corrected(one: Profile) -> Profile:
        layers = []
        for index, layer in enumerate(one.layers):
            changed = {}
            for name, factor in factors[index].items():
                seconds = getattr(layer, name)
                if seconds is not None:
                    changed[name] = seconds * factor
            if steps:
                changed["step_s"] = layer_steps[index]
            layers.append(msgspec.structs.replace(layer, **changed))
        new_loss_s = one.loss_s
        if loss_s is not None and figures.loss_s:
            new_loss_s *= loss_s / figures.loss_s
        elif not figures.loss_s:
            new_loss_s = loss_s or 0.0
        optimizer_s = one.optimizer_s
        if steps:
            optimizer_s = sum(steps.values())
        return msgspec.structs.replace(
            one,
            layers=tuple(layers),
            source=f"{one.source}; refitted to a measured run".lstrip("; "),
            step_s=None,
            computed_for=None,
            loss_s=new_loss_s,
            optimizer_s=optimizer_s,
        )

    others = tuple(map(corrected, profile.others))
    return msgspec.structs.replace(corrected(profile), others=others)


def _steps(profile: Profile, stages: Sequence[Indices], steps: Mapping[int, float]) -> dict[int, float]:
    """Each stage's measured step, split among its layers as their own steps are, else as their weights are."""
    found = dict.fromkeys(range(len(profile)), 0.0)
    for stage, layers in enumerate(stages):
        shares = [profile.layers[index].step_s for index in layers]
        if not any(shares):
            shares = [profile.layers[index].wgrad_bytes for index in layers]
        for index, share in zip(layers, shares, strict=True):
            if share:
                found[index] = steps.get(stage, 0.0) * share / sum(shares)
    return found


def _factors(
    profile: Profile, layers: Indices, tensor: int, times: dict[tuple[str, int], float], stage: int
) -> dict[str, float]:
    """The factor of each field of the stage's layers."""
    factors: dict[str, float] = {}
    measured_by = [
        (Op.FWD, ("forward_s",)),
        (Op.BWD, ("backward_input_s", "backward_weight_s")),
        (Op.BWD_INPUT, ("backward_input_s", "split_input_s")),
        (Op.BWD_WEIGHT, ("backward_weight_s", "split_s")),
    ]
    for op, fields in measured_by:
        if (op.value, stage) not in times:
            continue
        expected = 0.0
        for layer, field in product(layers, fields):
            expected += (getattr(profile.layers[layer], field) or 0.0) / tensor
        if expected:
            factors |= dict.fromkeys(fields, times[op.value, stage] / expected)
    return factors
