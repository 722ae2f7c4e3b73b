"""A plan in words: its stages, their memory, its prediction, and why every other candidate lost."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from pipefit.cost import speeds_of
from pipefit.planner.computed_profile import gpt_of
from pipefit.planner.plan_figures import replays_of
from pipefit.planner.ptdp import mfu, num_parameters, training_days
from pipefit.spec import Candidate, Plan, Profile, SpillSpec, Topology
from pipefit.units import counted, format_bytes, format_count, format_seconds, table, wrapped


def explain(
    plan: Plan,
    profile: Profile | None = None,
    width: int | None = None,
    every: bool = False,
    topology: Topology | None = None,
) -> str:
    """The plan as text of several lines.

    Args:
        plan: to explain.
        profile: of the model, for the seconds and weights of each stage.
        width: characters of a line; None: those of the terminal, or 100 where there is none.
        every: all candidates that lost, in place of the best of the five next families.
        topology: of the machine, for the seconds on devices that differ; None: those of the profile's device.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    if plan.method == plan.schedule:
        by = ""
    else:
        by = f" by {plan.method.removeprefix('by ')}"
    title = f"{plan.model or 'plan'}: {plan.schedule}{by}, {_counts(plan)}"
    lines = [title, "", *table(_stages(plan, profile, topology), width)]
    prediction = plan.prediction
    if prediction is not None:
        rate = f"{prediction.throughput:.4g} samples/s"
        lines += ["", f"predicted: {format_seconds(prediction.period_s)} per update, {rate}"]
        if prediction.minibatch_s != prediction.period_s:
            lines[-1] += f", {format_seconds(prediction.minibatch_s)} per mini-batch"
        lines[-1] += _over_data_parallel(plan)
    lines += spill_lines(plan)
    if any(candidate.why_lost for candidate in plan.candidates):
        lines += ["", *compared_lines(plan.candidates, width, every)]
    return "\n".join(part for line in lines for part in (wrapped(line, width, "  ") if len(line) > width else [line]))


def _over_data_parallel(plan: Plan) -> str:
    """Throughput as a multiple of that of plain data parallelism, or the reason why that does not fit."""
    if plan.prediction:
        ahead = plan.prediction.speedup_over_data_parallel
    else:
        ahead = None
    if plan.schedule == "data-parallel":
        return ""
    if ahead:
        return f", {ahead:.2f} × plain data parallelism"
    plain = [each for each in plan.candidates if each.family == "data parallel" and each.throughput is None]
    if plain:
        return f"; plain data parallelism does not fit: {plain[0].why_lost}"
    return ""


_MOST = 5
"""Families of candidates that lost in a table without all of them."""
_SIGNS = {"estimated": "~", "at best": "≤"}
"""Marks of throughputs that are not simulated."""


def compared_lines(candidates: Sequence[Candidate], width: int, every: bool) -> list[str]:
    """The winner and those that lost as a table, the fastest first, and what it leaves out."""
    ranked = sorted(candidates, key=lambda each: (bool(each.why_lost), -(each.throughput or 0)))
    shown = ranked
    if not every:
        best: dict[str, Candidate] = {}
        for each in ranked:
            best.setdefault(each.family, each)
        first = [*best.values()][: _MOST + 1]
        rest = [*best.values()][_MOST + 1 :]
        shown = first + [each for each in rest if each.family == "data parallel"]
    rows = [["plan", "samples/s", "slower", "idle", "sent/sample", "memory"], *map(_row, shown)]
    used = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = table(list(zip(*used, strict=True)), width)
    signs = {each.basis for each in shown}
    notes = [f"{sign} {basis}" for basis, sign in _SIGNS.items() if basis in signs]
    notes += ["slower: share of the winner's throughput that is lost"]
    notes += ["idle: share of the devices' time without work"] * any(each.idle is not None for each in shown)
    lines += ["", *wrapped("; ".join(notes), width, "  ")]
    unfit = sum(each.throughput is None for each in ranked if each not in shown)
    left = len(ranked) - len(shown)
    if unfit:
        words = f", {unfit} of them too large"
    else:
        words = ""
    return lines + wrapped(f"{left} more{words} (--all, in Python every=True)", width) * bool(left)


def _row(each: Candidate) -> list[str]:
    """A candidate's cells; the reason stands where there is no figure."""
    if each.slower is not None or not each.why_lost:
        summary = each.summary
    else:
        summary = f"{each.summary}: {each.why_lost}"
    if each.throughput is None:
        rate = "does not fit"
    else:
        rate = f"{_SIGNS.get(each.basis, '')}{each.throughput:.4g}"
    return [
        summary,
        rate,
        f"{each.slower:.1%}" if each.slower is not None and each.why_lost else "",
        f"{each.idle:.1%}" if each.idle is not None else "",
        format_bytes(each.sent_bytes) if each.sent_bytes is not None else "",
        format_bytes(each.peak_bytes) if each.peak_bytes is not None else "",
    ]


def training(plan: Plan, topology: Topology, tokens: float | None = None) -> dict[str, float | str]:
    """FLOP/s, fraction of the peak and days of training a GPT, as predicted.

    Args:
        plan: for a model named "gpt:layers=…".
        topology: with the device's peak.
        tokens: to train on.
    """
    if not plan.model.startswith("gpt:") or plan.prediction is None:
        return {}
    gpt = gpt_of(plan.model)
    rate = plan.prediction.throughput
    found: dict[str, float | str] = {"parameters": num_parameters(gpt)}
    # Where devices differ, the fraction is that of their peaks together.
    peaks = [device.flops for device in topology.devices[: plan.num_processes] or (topology.device,)]
    peak = sum(peaks) / len(peaks)
    if peak:
        used, every = (mfu(gpt, rate, plan.num_processes, peak, recompute=each) for each in (False, True))
        found |= {
            "model_flops_per_device": used * peak,
            "mfu": used,
            "mfu_convention": "model FLOP: forward and backward once, 72·B·s·l·h²·(1 + s/6h) + head; no replay",
        }
        attention = gpt.sequence / (6 * gpt.hidden + gpt.sequence)
        again = sum(replays_of(plan, inside=1.0, attention=attention)) / len(plan.partition.stages)
        if again:
            found["hfu"] = used + again * (every - used)
    if tokens is not None:
        found |= {"tokens": tokens, "training_days": tokens / (rate * gpt.sequence) / 86400}
        if peak:
            found["training_days_6TP"] = training_days(num_parameters(gpt), tokens, plan.num_processes, used * peak)
    return found


def training_lines(found: Mapping[str, Any]) -> list[str]:
    """The figures of `training` in words."""
    if not found:
        return []
    words = f"{format_count(found['parameters'])} parameters"
    if "mfu" in found:
        words += f"; {found['model_flops_per_device'] / 1e12:.4g} TFLOP/s per device, {found['mfu']:.1%} of its peak"
        if "hfu" in found:
            words += f" ({found['hfu']:.1%} with replays)"
    lines = [words]
    if "tokens" in found:
        lines.append(f"{format_count(found['tokens'])} tokens: {found['training_days']:.4g} days")
    return lines


def run_command(plan: Plan, topology: Topology, path: str) -> str:
    """The command that runs a plan on several machines, started on each of them; "": there is one machine only.

    Args:
        plan: whose stages are consecutive layers, as `pipefit train` runs them.
        topology: its innermost level, or the one with cores, is a machine.
        path: of the plan's file.
    """
    each = topology.tier_shares(plan.num_processes)
    layers = [layer for stage in plan.partition.stages for layer in stage.layers]
    if plan.num_processes <= each or layers != sorted(layers):
        return ""
    model = "MODEL"
    if plan.model.startswith("gpt:"):
        sizes = {"context" if name == "sequence" else name: size for name, size in gpt_of(plan.model).__dict__.items()}
        model = "gpt --option " + ",".join(f"{name}={size}" for name, size in sizes.items())
    if plan.microbatch_size:
        batch = f" --batch {plan.num_microbatches * plan.microbatch_size}"
    else:
        batch = ""
    return (
        f"torchrun --nnodes={plan.num_processes // each} --nproc-per-node={each} --rdzv-backend=c10d "
        f"--rdzv-endpoint=HOST:29500 -m pipefit train --plan {path}{batch} --model {model}"
    )


def _counts(plan: Plan) -> str:
    if plan.microbatch_size:
        size = f" of {plan.microbatch_size}"
    else:
        size = ""
    if plan.frozen:
        frozen = f" (the first{f' {plan.frozen}' if plan.frozen > 1 else ''} frozen)"
    else:
        frozen = ""
    words = [
        counted(len(plan.partition.stages), "stage") + frozen,
        counted(plan.num_microbatches, "micro-batch", "micro-batches") + f"{size} per update",
    ]
    words += [f"{plan.num_chunks} chunks per rank"] * (plan.num_chunks > 1)
    words += [f"{plan.data} copies"] * (plan.data > 1)
    words += [f"tensor width {plan.partition.stages[0].tensor}"] * (plan.partition.stages[0].tensor > 1)
    words += ["sharded optimizer"] * plan.sharded_optimizer
    return ", ".join(words)


def _stages(plan: Plan, profile: Profile | None, topology: Topology | None) -> list[list[str]]:
    head = ["stage", "layers", "ranks", "replay", "memory"]
    rows = [head + (["forward", "backward", "weights"] if profile else [])]
    figures = profile.at(plan.microbatch_size) if profile and plan.microbatch_size else profile
    if topology:
        speeds = speeds_of(topology, plan.tensor)
    else:
        speeds = ()
    for index, (stage, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
        if index >= plan.frozen and stage.recompute != "none":
            replays = stage.recompute
        else:
            replays = "no"
        row = [str(index), _layers(stage.layers), _ranks(ranks), str(replays)]
        if plan.prediction:
            peaks = plan.prediction.peak_bytes
        else:
            peaks = ()
        row.append(format_bytes(max(peaks[rank] for rank in ranks)) if peaks else "")
        if figures:
            layers = [figures.layers[layer] for layer in stage.layers]
            if speeds:
                own = [speeds[rank] for rank in ranks]
            else:
                own = [1.0]
            row.append(_own_times(sum(layer.forward_s for layer in layers) / stage.tensor, own))
            row.append(_own_times(sum(layer.backward_s for layer in layers) / stage.tensor, own))
            row += [format_bytes(sum(layer.weight_bytes for layer in layers) / stage.tensor)]
        rows.append(row)
    return rows


def _own_times(seconds: float, speeds: Sequence[float]) -> str:
    """The seconds on devices of these speeds: of the fastest to the slowest, where they differ."""
    fastest = format_seconds(seconds / max(speeds))
    slowest = format_seconds(seconds / min(speeds))
    if fastest == slowest:
        return fastest
    return f"{fastest}…{slowest}"


def _layers(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        if len(layers) == 1:
            return f"{layers[0]}"
        return f"{layers[0]}…{layers[-1]}"
    return f"{len(layers)} from {layers[0]} on"


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} … {ranks[-1]} ({len(ranks)})"


def spill_lines(plan: Plan) -> list[str]:
    """Spilled stages, slots and limits in words; nothing for a plan that does not spill."""
    spill = plan.spill
    if spill is None:
        return []
    num_stages = len(plan.partition.stages)
    num_ranks = plan.placement.num_ranks
    if spill.on_host:
        stay = ""
    else:
        stay = "; the optimizer's states stay on the device"
    if spill.optim_slots:
        states = f", {spill.optim_slots} for states"
    else:
        states = stay
    if num_ranks > 1:
        each = f", on each of {num_ranks} ranks"
    else:
        each = ""
    lines = [
        f"spilled to the {spill.tier}: {len(spill.stages) or num_stages} stages through "
        f"{spill.weights_slots} slots for weights{states}{each}",
        f"steps: {_steps_words(spill, num_stages)}",
    ]
    if spill.keeps:
        if len(spill.keeps) == num_stages:
            rest = ""
        else:
            rest = "; the others replay their forwards"
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
