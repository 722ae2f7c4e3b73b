"""A plan in words: its stages, their memory, its prediction, and why every other candidate lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence

from pipefit.cost import speeds_of
from pipefit.ir.instruction import Indices
from pipefit.planner.candidate import LESS_SHARED
from pipefit.planner.plan_figures import at_size_of
from pipefit.planner.transformer import transformer_of
from pipefit.spec import Candidate, Plan, Profile, SpillSpec, Topology
from pipefit.spec.plan import Figures
from pipefit.units import counted, format_bytes, format_seconds, table, wrapped


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
    by = ""
    if plan.method != plan.schedule:
        by = f" by {plan.method.removeprefix('by ')}"
    title = f"{plan.model or 'plan'}: {plan.schedule}{by}, {_counts(plan)}"
    lines = [title, "", *table(_stages(plan, profile, topology), width)]
    prediction = plan.prediction
    if prediction is not None:
        rate = f"{prediction.throughput:.4g} samples/s"
        lines += ["", f"predicted: {format_seconds(prediction.period_s)} per update, {rate}"]
        if prediction.minibatch_s != prediction.period_s:
            lines[-1] += f", {format_seconds(prediction.minibatch_s)} per mini-batch"
        lines[-1] += _over_data_parallel(plan) + _less_shared(plan)
    lines += spill_lines(plan)
    if any(candidate.why_lost for candidate in plan.candidates):
        lines += ["", *compared_lines(plan.candidates, width, every)]
    parts = []
    for line in lines:
        if len(line) > width:
            parts += wrapped(line, width, "  ")
        else:
            parts.append(line)
    return "\n".join(parts)


def _over_data_parallel(plan: Plan) -> str:
    """Throughput as a multiple of that of plain data parallelism, or the reason why that does not fit."""
    if plan.schedule == "data-parallel":
        return ""
    if plan.prediction and plan.prediction.speedup_over_data_parallel:
        return f", {plan.prediction.speedup_over_data_parallel:.2f} × plain data parallelism"
    for each in plan.candidates:
        if each.family == "data parallel" and each.throughput is None:
            return f"; plain data parallelism does not fit: {each.why_lost}"
    return ""


def _less_shared(plan: Plan) -> str:
    """The reason why copies do not share less, where memory requires it."""
    for each in plan.candidates:
        if each.family.endswith(LESS_SHARED):
            return f"; if copies shared less, {each.why_lost}"
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
        fastest = list(best.values())
        plain = [each for each in fastest[_MOST + 1 :] if each.family == "data parallel"]
        shown = fastest[: _MOST + 1] + plain
    head = ["plan", "samples/s", "slower", "idle", "sent/sample", "memory"]
    lines = used_columns(head, map(_row, shown), width)
    signs = {each.basis for each in shown}
    notes = []
    for basis, sign in _SIGNS.items():
        if basis in signs:
            notes.append(f"{sign} {basis}")
    notes.append("slower: share of the winner's throughput that is lost")
    if any(each.idle is not None for each in shown):
        notes.append("idle: share of the devices' time without work")
    lines += ["", *wrapped("; ".join(notes), width, "  ")]
    left = [each for each in ranked if each not in shown]
    unfit = sum(each.throughput is None for each in left)
    words = ""
    if unfit:
        words = f", {unfit} of them too large"
    if left:
        lines += wrapped(f"{len(left)} more{words} (--all, in Python every=True)", width)
    return lines


def used_columns(head: list[str], rows: Iterable[list[str]], width: int) -> list[str]:
    """A table without its empty columns."""
    used = []
    for column in zip(head, *rows, strict=True):
        if any(column[1:]):
            used.append(column)
    return table(list(zip(*used, strict=True)), width)


def _row(each: Candidate) -> list[str]:
    """A candidate's cells; the reason stands where there is no figure."""
    summary = each.summary
    slower = ""
    if each.why_lost and each.slower is None:
        summary += f": {each.why_lost}"
    elif each.why_lost:
        slower = f"{each.slower:.1%}"
    rate = "does not fit"
    if each.throughput is not None:
        rate = f"{_SIGNS.get(each.basis, '')}{each.throughput:.4g}"
    idle = ""
    if each.idle is not None:
        idle = f"{each.idle:.1%}"
    return [summary, rate, slower, idle, _bytes(each.sent_bytes), _bytes(each.peak_bytes)]


def _bytes(size: float | None) -> str:
    if size is None:
        return ""
    return format_bytes(size)


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
        gpt = transformer_of(plan.model)
        sizes = {"layers": gpt.layers, "hidden": gpt.hidden, "heads": gpt.heads, "vocab": gpt.vocab}
        sizes["context"] = gpt.sequence
        words = [f"{name}={size}" for name, size in sizes.items()]
        model = "gpt --option " + ",".join(words)
    batch = ""
    if plan.microbatch_size:
        batch = f" --batch {plan.num_microbatches * plan.microbatch_size}"
    return (
        f"torchrun --nnodes={plan.num_processes // each} --nproc-per-node={each} --rdzv-backend=c10d "
        f"--rdzv-endpoint=HOST:29500 -m pipefit train --plan {path}{batch} --model {model}"
    )


def _counts(plan: Plan) -> str:
    stages = counted(len(plan.partition.stages), "stage")
    if plan.frozen == 1:
        stages += " (the first frozen)"
    elif plan.frozen:
        stages += f" (the first {plan.frozen} frozen)"
    microbatches = counted(plan.num_microbatches, "micro-batch", "micro-batches")
    if plan.microbatch_size:
        microbatches += f" of {plan.microbatch_size}"
    words = [stages, f"{microbatches} per update"]
    if plan.num_chunks > 1:
        words.append(f"{plan.num_chunks} chunks per rank")
    if plan.data > 1:
        words.append(f"{plan.data} copies")
    if plan.shares:
        words.append(f"which take {'-'.join(map(str, plan.shares))} micro-batches")
    if plan.tensor > 1:
        words.append(f"tensor width {plan.tensor}")
    if plan.shard != "none":
        words.append(f"sharded {plan.shard}")
    return ", ".join(words)


def _stages(plan: Plan, profile: Profile | None, topology: Topology | None) -> list[list[str]]:
    head = ["stage", "layers", "ranks", "replay", "memory"]
    figures = None
    if profile:
        head += ["forward", "backward", "weights"]
        figures = at_size_of(plan, profile)
    rows = [head]
    speeds: Figures = ()
    if topology:
        if profile:
            topology = topology.for_elements(profile.element_bytes)
        speeds = speeds_of(topology, plan.tensor)
    peaks: Figures = ()
    if plan.prediction:
        peaks = plan.prediction.peak_bytes
    for index, (stage, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
        replays = "no"
        if index >= plan.frozen and stage.replays != "none":
            replays = stage.replays
        memory = ""
        if peaks:
            memory = format_bytes(max(peaks[rank] for rank in ranks))
        row = [str(index), _layers(stage.layers), _ranks(ranks), replays, memory]
        if figures:
            layers = [figures.layers[layer] for layer in stage.layers]
            own = [1.0]
            if speeds:
                own = [speeds[rank] for rank in ranks]
            forward_s = sum(layer.forward_s for layer in layers)
            backward_s = sum(layer.backward_s for layer in layers)
            weights, _ = figures.weights_of(stage.layers)
            row.append(_own_times(forward_s / stage.tensor, own))
            row.append(_own_times(backward_s / stage.tensor, own))
            row.append(format_bytes(weights / stage.tensor))
        rows.append(row)
    return rows


def _own_times(seconds: float, speeds: Sequence[float]) -> str:
    """The seconds on devices of these speeds: of the fastest to the slowest, where they differ."""
    fastest = format_seconds(seconds / max(speeds))
    slowest = format_seconds(seconds / min(speeds))
    if fastest == slowest:
        return fastest
    return f"{fastest}…{slowest}"


def _layers(layers: Indices) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        if len(layers) == 1:
            return f"{layers[0]}"
        return f"{layers[0]}…{layers[-1]}"
    return f"{len(layers)} from {layers[0]} on"


def _ranks(ranks: Indices) -> str:
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
    states = ""
    if spill.optim_slots:
        states = f", {spill.optim_slots} for states"
    elif not spill.on_host:
        states = "; the optimizer's states stay on the device"
    each = ""
    if num_ranks > 1:
        each = f", on each of {num_ranks} ranks"
    lines = [
        f"spilled to the {spill.tier}: {len(spill.stages) or num_stages} stages through "
        f"{spill.weights_slots} slots for weights{states}{each}",
        f"steps: {_steps_words(spill, num_stages)}",
    ]
    if spill.keeps:
        rest = ""
        if len(spill.keeps) < num_stages:
            rest = "; the others replay their forwards"
        lines.append(f"activations: {len(spill.keeps)} of {num_stages} stages keep theirs{rest}")
    if spill.activations:
        lines.append("activations: inputs of stages wait on the tier until their replay")
    if spill.peak_bytes:
        share = spill.peak_bytes / spill.device_bytes
        memory = f"{format_bytes(spill.peak_bytes)} of {format_bytes(spill.device_bytes)} ({share:.0%})"
        if each:
            memory += ", the fullest"
        lines.append(f"device memory: {memory}")
    if spill.limit_s and plan.prediction is not None:
        reached = spill.limit_s / plan.prediction.period_s
        lines.append(
            f"limit: {format_seconds(spill.limit_s)} per update, {spill.binds} binds; {reached:.0%} of it reached"
        )
    if spill.resident_s and plan.prediction is not None:
        speed = spill.resident_s / plan.prediction.period_s
        whole = "a device which holds the whole model"
        if each:
            whole = "devices which hold the whole model between them"
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
