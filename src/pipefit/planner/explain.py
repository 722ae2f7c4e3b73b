"""A plan in words: its stages, their memory, its prediction, and why every other candidate lost."""

from __future__ import annotations

from pipefit.planner.computed_profile import gpt_settings
from pipefit.planner.holdings import replayed
from pipefit.planner.ptdp import Gpt, mfu, num_parameters, training_days
from pipefit.planner.space import Config
from pipefit.spec import Plan, Profile, SpillSpec, Topology
from pipefit.units import columns, counted, format_bytes, format_seconds


def explain(plan: Plan, profile: Profile | None = None) -> str:
    """The plan as text of several lines.

    Args:
        plan: to explain.
        profile: of the model, for the seconds and weights of each stage.
    """
    lines = [f"{plan.model or 'plan'}: {plan.schedule} by {plan.method.removeprefix('by ')}, {_counts(plan)}", ""]
    lines += columns(_stages(plan, profile), right=True)
    prediction = plan.prediction
    if prediction is not None:
        rate = f"{prediction.throughput:.4g} samples/s"
        lines += ["", f"predicted: {format_seconds(prediction.period_s)} per update, {rate}"]
        if prediction.minibatch_s != prediction.period_s:
            lines[-1] += f", {format_seconds(prediction.minibatch_s)} per mini-batch"
        ahead = prediction.speedup_over_data_parallel
        # For data parallelism the ratio would say nothing.
        lines[-1] += f", {ahead:.2f} × plain data parallelism" if ahead and plan.schedule != "data-parallel" else ""
    lines += spill_lines(plan)
    losers = [candidate for candidate in plan.candidates if candidate.why_lost]
    if losers:
        lines += ["", "why the others lost:"]
        lines += [f"  {candidate.summary}: {candidate.why_lost}" for candidate in losers]
    return "\n".join(lines)


def training(plan: Plan, topology: Topology, tokens: float | None = None) -> dict[str, float | str]:
    """FLOP/s, fraction of the peak and days of training a GPT, as predicted.

    Args:
        plan: for a model named "gpt:layers=…".
        topology: with the device's peak.
        tokens: to train on.
    """
    if not plan.model.startswith("gpt:") or plan.prediction is None:
        return {}
    gpt, rate = Gpt(**gpt_settings(plan.model)), plan.prediction.throughput
    found: dict[str, float | str] = {"parameters": num_parameters(gpt)}
    peak = topology.device.flops
    if peak:
        used, every = (mfu(gpt, rate, plan.num_processes, peak, recompute=each) for each in (False, True))
        found |= {
            "model_flops_per_device": used * peak,
            "mfu": used,
            "mfu_convention": "model FLOP: forward and backward once, 72·B·s·l·h²·(1 + s/6h) + head; no replay",
        }
        again = _replayed(plan, gpt)
        if again:
            found["hfu"] = used + again * (every - used)
    if tokens is not None:
        found |= {"tokens": tokens, "training_days": tokens / (rate * gpt.sequence) / 86400}
        if peak:
            found["training_days_6TP"] = training_days(num_parameters(gpt), tokens, plan.num_processes, used * peak)
    return found


def _replayed(plan: Plan, gpt: Gpt) -> float:
    """The share of the blocks' forward FLOP that is replayed: of stages, none where the backward follows at once."""
    stages, chunks, size = plan.partition.stages, plan.num_chunks, plan.microbatch_size
    config = Config(plan.schedule, plan.data, len(stages) // chunks, 1, chunks, size, plan.num_microbatches)
    attention = gpt.sequence / (6 * gpt.hidden + gpt.sequence)
    of_stages = replayed(config) if any(stage.is_replayed for stage in stages) else (0.0,) * len(stages)
    shares = (
        {"stage": share, "layer": 1.0, "selective": attention}.get(str(stage.recompute), 0.0)
        for share, stage in zip(of_stages, stages, strict=True)
    )
    return sum(shares) / len(stages)


def _counts(plan: Plan) -> str:
    size = f" of {plan.microbatch_size}" if plan.microbatch_size else ""
    frozen = f" (the first{f' {plan.frozen}' if plan.frozen > 1 else ''} frozen)" if plan.frozen else ""
    words = [
        counted(len(plan.partition.stages), "stage") + frozen,
        counted(plan.num_microbatches, "micro-batch", "micro-batches") + f"{size} per update",
    ]
    words += [f"{plan.num_chunks} chunks per rank"] * (plan.num_chunks > 1)
    words += [f"{plan.data} copies"] * (plan.data > 1)
    words += [f"tensor width {plan.partition.stages[0].tensor}"] * (plan.partition.stages[0].tensor > 1)
    words += ["sharded optimizer"] * plan.sharded_optimizer
    return ", ".join(words)


def _stages(plan: Plan, profile: Profile | None) -> list[list[str]]:
    head = ["stage", "layers", "ranks", "recompute", "peak per rank"]
    rows = [head + (["forward", "backward", "weights"] if profile else [])]
    figures = profile.at(plan.microbatch_size) if profile and plan.microbatch_size else profile
    for index, (stage, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
        replays = stage.recompute if index >= plan.frozen and stage.recompute != "none" else "no"
        row = [str(index), _layers(stage.layers), _ranks(ranks), str(replays)]
        peaks = plan.prediction.peak_bytes if plan.prediction else ()
        row.append(format_bytes(max(peaks[rank] for rank in ranks)) if peaks else "")
        if figures:
            layers = [figures.layers[layer] for layer in stage.layers]
            row += [format_seconds(sum(layer.forward_s for layer in layers) / stage.tensor)]
            row += [format_seconds(sum(layer.backward_s for layer in layers) / stage.tensor)]
            row += [format_bytes(sum(layer.weight_bytes for layer in layers) / stage.tensor)]
        rows.append(row)
    return rows


def _layers(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}…{layers[-1]}"
    return f"{len(layers)} from {layers[0]} on"


def _ranks(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} … {ranks[-1]} ({len(ranks)})"


def spill_lines(plan: Plan) -> list[str]:
    """Spilled stages, slots and limits in words; nothing for a plan that does not spill."""
    spill = plan.spill
    if spill is None:
        return []
    num_stages, num_ranks = len(plan.partition.stages), plan.placement.num_ranks
    stay = "" if spill.on_host else "; the optimizer's states stay on the device"
    states = f", {spill.optim_slots} for states" if spill.optim_slots else stay
    each = f", on each of {num_ranks} ranks" if num_ranks > 1 else ""
    lines = [
        f"spilled to the {spill.tier}: {len(spill.stages) or num_stages} stages through "
        f"{spill.weights_slots} slots for weights{states}{each}",
        f"steps: {_steps_words(spill, num_stages)}",
    ]
    if spill.keeps:
        rest = "" if len(spill.keeps) == num_stages else "; the others replay their forwards"
        lines.append(f"activations: {len(spill.keeps)} of {num_stages} stages keep theirs{rest}")
    if spill.activations:
        lines.append("activations: inputs of stages wait on the tier until their replay")
    if spill.peak_bytes:
        share = spill.peak_bytes / spill.device_bytes
        lines.append(
            f"device memory: {format_bytes(spill.peak_bytes)} of {format_bytes(spill.device_bytes)} ({share:.0%})"
            f"{', the fullest' if each else ''}"
        )
    if spill.limit_s and plan.prediction is not None:
        reached = spill.limit_s / plan.prediction.period_s
        lines.append(
            f"limit: {format_seconds(spill.limit_s)} per update, {spill.binds} binds; {reached:.0%} of it reached"
        )
    if spill.resident_s and plan.prediction is not None:
        speed = spill.resident_s / plan.prediction.period_s
        whole = "devices which hold the whole model between them" if each else "a device which holds the whole model"
        lines.append(f"speed: {speed:.0%} of that of {whole}")
    return lines


def _steps_words(spill: SpillSpec, num_stages: int) -> str:
    if spill.tier != "host":
        return "on the device, for a step on the host would have to read from the disk just the same"
    if not spill.on_host:
        return "on the device"
    if len(spill.on_host) == num_stages:
        return "on the host, where the optimizer's states stay"
    stages = ", ".join(map(str, spill.on_host))
    return f"of stages {stages} on the host, where the optimizer's states stay, of the others on the device"
