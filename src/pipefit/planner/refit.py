"""A profile corrected by a measured run: the measured time of a stage is split among its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipefit.errors import PlanError
from pipefit.ir.op import Op
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
    if measured.program.header.num_stages != len(stages) or plan.partition.num_layers != len(profile):
        raise PlanError(
            f"refit: the trace has {measured.program.header.num_stages} stages, the plan {len(stages)} with "
            f"{plan.partition.num_layers} layers, the profile {len(profile)} layers; they must belong together"
        )
    if plan.microbatch_size:
        figures = profile.at(plan.microbatch_size)
    else:
        figures = profile
    times = {key: item.median_s for key, item in by_kind(measured).items()}
    if not any(op == Op.FWD.value for op, _ in times):
        raise PlanError("refit: the trace holds no forward")
    factors: dict[int, dict[str, float]] = {}
    for index, stage in enumerate(stages):
        factors |= dict.fromkeys(
            stage.layers, _factors(figures.replaying(stage.replays), stage.layers, stage.tensor, times, index)
        )
    loss = [seconds for (op, _), seconds in times.items() if op == Op.LOSS.value]
    if loss and figures.loss_s:
        loss_factor = loss[0] / figures.loss_s
    else:
        loss_factor = 1.0
    steps = {stage: seconds for (op, stage), seconds in times.items() if op == Op.STEP.value}
    layer_steps = _steps(figures, [stage.layers for stage in stages], steps)

    def corrected(one: Profile) -> Profile:
        layers = []
        for index, layer in enumerate(one.layers):
            before = ((name, getattr(layer, name), factor) for name, factor in factors[index].items())
            changed = {name: seconds * factor for name, seconds, factor in before if seconds is not None}
            if steps:
                changed |= {"step_s": layer_steps[index]}
            layers.append(msgspec.structs.replace(layer, **changed))
        return msgspec.structs.replace(
            one,
            layers=tuple(layers),
            source=f"{one.source}; refitted to a measured run".lstrip("; "),
            step_s=None,
            computed_for=None,
            loss_s=one.loss_s * loss_factor if figures.loss_s else (loss[0] if loss else 0.0),
            optimizer_s=sum(steps.values()) if steps else one.optimizer_s,
        )

    return msgspec.structs.replace(corrected(profile), others=tuple(corrected(other) for other in profile.others))


def _steps(profile: Profile, stages: Sequence[tuple[int, ...]], steps: Mapping[int, float]) -> dict[int, float]:
    """Each stage's measured step, split among its layers as their own steps are, else as their weights are."""
    found = dict.fromkeys(range(len(profile)), 0.0)
    for stage, layers in enumerate(stages):
        shares = [profile.layers[index].step_s for index in layers]
        if not any(shares):
            shares = [profile.layers[index].wgrad_bytes for index in layers]
        for index, share in zip(layers, shares, strict=True):
            if share:
                found[index] = steps.get(stage, 0.0) * share / sum(shares)
            else:
                found[index] = 0.0
    return found


def _factors(
    profile: Profile, layers: tuple[int, ...], tensor: int, times: dict[tuple[str, int], float], stage: int
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
        expected = sum(getattr(profile.layers[layer], field) or 0.0 for layer in layers for field in fields) / tensor
        if expected:
            factors |= dict.fromkeys(fields, times[op.value, stage] / expected)
    return factors
