"""The words of a picture: title, counts, tooltips."""

from __future__ import annotations

from pipefit.draw.axes import label_number, time_scale
from pipefit.draw.look import FAMILIES
from pipefit.draw.scene import Box, Scene
from pipefit.ir.instruction import Indices
from pipefit.units import format_seconds

TITLES = {
    "naive": "Naive model parallelism",
    "data-parallel": "Data parallelism",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved 1F1B",
    "breadth-first": "Breadth-first",
    "pipedream": "PipeDream",
    "pipedream-vertical-sync": "PipeDream, vertical sync",
    "pipedream-2bw": "PipeDream-2BW",
    "zb-h1": "Zero-bubble H1",
    "zb-h2": "Zero-bubble H2",
    "zb-v": "Zero-bubble V",
    "spilled": "Spilled execution (Hydra)",
}


def title_of(schedule: str) -> str:
    """A schedule's name as its paper writes it."""
    return TITLES.get(schedule, schedule)


def stages_words(stages: Indices) -> str:
    """The stages of a rank, for the edge of a picture.

    >>> stages_words((0, 4)), stages_words((0, 4, 8, 12, 16))
    ('stages 0, 4', 'stages 0, 4 … 16')
    """
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) > 4:
        return f"stages {stages[0]}, {stages[1]} … {stages[-1]}"
    return "stages " + ", ".join(map(str, stages))


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.17948)
    '17.9 %'
    """
    return f"{100 * share:.1f} %"


def duration(seconds: float, unit: str) -> str:
    """A time for people: with its unit, or without one when it counts abstract units."""
    if unit:
        return format_seconds(seconds)
    return label_number(seconds)


def counts(scene: Scene) -> str:
    """The shape: "p = 8 · m = 32 · v = 2"."""
    facts = scene.facts
    parts = [f"p = {facts.depth}", f"m = {facts.num_microbatches}"]
    if facts.num_chunks > 1:
        parts.append(f"v = {facts.num_chunks}")
    if scene.num_ranks != facts.depth:
        parts.append(f"{scene.num_ranks} ranks")
    if facts.num_steps > 1:
        parts.append(f"{facts.num_steps} updates")
    if facts.spill:
        parts.append(facts.spill)
    return " · ".join(parts)


def peak_words(scene: Scene, rank: int) -> str:
    """The micro-batches in flight on a rank at most, and the inputs that it keeps for replays: "1 + 7"."""
    peak = label_number(scene.facts.peak_inflight[rank])
    kept = scene.facts.kept_inputs[rank]
    if kept:
        return f"{peak} + {kept}"
    return peak


def measures(scene: Scene) -> str:
    """The line of results: bubble, makespan, peak."""
    facts = scene.facts
    peaks = " ".join(map(label_number, facts.peak_inflight))
    parts = [
        f"bubble {percent(facts.bubble_fraction)}",
        f"over ideal {percent(facts.bubble_over_ideal)}",
        f"makespan {duration(facts.makespan_s, scene.unit)}",
        f"peak in flight {peaks}",
    ]
    if any(facts.kept_inputs):
        parts.append("inputs kept for replays " + " ".join(map(str, facts.kept_inputs)))
    if max(facts.weight_versions, default=1) > 1:
        parts.append("weight versions " + " ".join(map(str, facts.weight_versions)))
    return " · ".join(parts)


def describe(box: Box, scene: Scene) -> str:
    """The tooltip of a cell: instruction, place and times."""
    factor, unit = time_scale(scene.scale_s, scene.unit)
    start = label_number(box.start_s * factor)
    end = label_number(box.end_s * factor)
    what = f"{box.short} {FAMILIES[box.letter].name}, stage {box.stage}"
    if box.mb >= 0:
        what += f", micro-batch {box.mb}"
    return f"{what}, weights {box.version}, rank {box.rank}, {start} to {end} {unit}".strip()
