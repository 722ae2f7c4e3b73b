"""`pipefit simulate`: when everything in a program happens, and how much memory it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pipefit.cli.answer import Answer
from pipefit.cli.options import (
    PICTURES,
    Backward,
    Copy,
    Count,
    Counts,
    Forward,
    InputGradient,
    Json,
    Latency,
    ProfileName,
    TopologyName,
    WeightGradient,
    ending,
    verb,
)
from pipefit.cli.programs import figures, read_source, save_timeline

if TYPE_CHECKING:
    from pipefit.timeline import Timeline


@verb()
def command(
    path: Path,
    /,
    *,
    profile: ProfileName = None,
    topology: TopologyName = None,
    layers: Counts = (),
    forward: Forward = 1,
    backward: Backward = None,
    input_gradient: InputGradient = None,
    weight_gradient: WeightGradient = None,
    latency: Latency = 0,
    copy: Copy = 2,
    steps: int = 1,
    repeats: Count = 1,
    contention: bool = False,
    output: Annotated[Path | None, "-o", ending(*PICTURES)] = None,
    json: Json = False,
) -> Answer:
    """Predict the time and memory of a program or a plan.

    Example: pipefit simulate plan.json --profile model.profile.json --topology local:2 -o plan.html

    With a profile, times are seconds and memory is bytes. Without one they are units of --forward and micro-batches of
    a rank's layers.

    Args:
        path: A program (.pipe) or a plan (.json).
        layers: Layers of each stage, like 3,3: a .pipe file does not say them.
        steps: Weight updates of a plan's program.
        repeats: Passes over the program, without a barrier between them.
        contention: Messages on one link take turns, as they do with a profile.
        output: .svg, .html or .png for a picture, .trace.json for Perfetto.
    """
    from pipefit.simulate import simulate

    source = read_source(path, steps, profile, topology, layers)
    cost = source.cost(forward, backward, input=input_gradient, weight=weight_gradient, latency=latency, copy=copy)
    # On real links messages take turns, once both sides are ready; the unit costs of the papers know no such thing.
    real = contention or source.profile is not None
    timeline = simulate(source.program, cost, repeats=repeats, contention=real, rendezvous=real)
    data = figures(source.program, timeline, cost)
    data |= {
        "unit": "s" if source.profile else "",
        "busy": [timeline.busy_s(rank) for rank in range(len(source.program.ranks))],
        "peak_bytes" if source.profile else "peak_memory": [
            max((size for _, size in samples), default=0.0) for samples in timeline.memory
        ],
    }
    if output:
        save_timeline(timeline, output, seconds=source.profile is not None)
        data |= {"output": str(output)}
    return Answer(data, lambda: _table(data, timeline))


def _table(data: dict[str, Any], timeline: Timeline) -> str:
    from pipefit.units import format_bytes, format_seconds

    in_seconds = data["unit"] == "s"

    def seconds(value: float) -> str:
        return format_seconds(value) if in_seconds else f"{value:.6g}"

    makespan = timeline.makespan_s
    lines = [
        f"{data['schedule']}: {data['num_stages']} stages on {data['num_ranks']} ranks, "
        f"{data['num_microbatches']} micro-batches per update",
        f"makespan         {seconds(makespan)}",
        f"period           {seconds(data['period'])}   (steady state, no barrier between steps)",
        f"bubble           {data['bubble_fraction']:.1%} of the makespan, {data['bubble_over_ideal']:.1%} over ideal",
        f"messages         {data['messages']}",
        "",
        "rank      busy       idle   versions  in flight" + ("  peak memory" if in_seconds else ""),
    ]
    for rank, busy in enumerate(data["busy"]):
        idle = 1 - busy / makespan if makespan else 0.0
        line = (
            f"{rank:>4}  {seconds(busy):>8}  {idle:>8.1%}  {data['weight_versions'][rank]:>9}"
            f"  {data['peak_inflight'][rank]:>9.3g}"
        )
        lines.append(line + (f"  {format_bytes(data['peak_bytes'][rank]):>11}" if in_seconds else ""))
    if "output" in data:
        lines += ["", f"wrote {data['output']}"]
    return "\n".join(lines)
