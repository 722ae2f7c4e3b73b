"""`pipefit simulate`: predicted times and memory of a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Counts, Json, Picture, ProfileName, TopologyName, UnitCosts, verb
from pipefit.cli.programs import check_forwards, figures, read_source, save_timeline, time_text
from pipefit.units import columns, format_bytes

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
    costs: UnitCosts,
    steps: Count = 1,
    repeats: Count = 1,
    contention: bool = False,
    output: Picture = None,
    json: Json = False,
) -> Answer:
    """Predict the time and memory of a program or a plan.

    Example: pipefit simulate plan.json --profile model.profile.json --topology local:2 -o plan.html

    With a profile, times are seconds and memory is bytes. Without one they are units of --forward and micro-batches of
    a rank's layers.

    Args:
        path: A program (.pipe) or a plan (.json).
        layers: Layers of each stage, like 3,3, which a .pipe file does not contain.
        steps: Weight updates of a plan's program.
        repeats: Passes over the program, without a barrier between them.
        contention: Messages on one link queue, as they always do with a profile.
        output: .svg, .html or .png for a picture, .trace.json for Perfetto.
    """
    from pipefit.simulate import simulate
    from pipefit.timeline.breakdown import breakdown
    from pipefit.verify.sense import refuse_malformed

    source = read_source(path, steps, profile, topology, layers)
    refuse_malformed(source.program)
    header = source.program.header
    check_forwards(header.num_stages, header.total_microbatches, repeats)
    cost = source.cost(costs)
    # On real links messages queue once both sides are ready; the unit costs of the papers do not include this.
    real = contention or source.profile is not None
    timeline = simulate(source.program, cost, repeats=repeats, contention=real, rendezvous=real)
    ranks = range(len(source.program.ranks))
    data = figures(source.program, timeline, cost) | {
        "unit": "s" if source.profile else "",
        "breakdown": breakdown(timeline),
        "busy": [timeline.busy_s(rank) for rank in ranks],
        "peak_bytes" if source.profile else "peak_memory": [timeline.peak_bytes(rank) for rank in ranks],
    }
    save_timeline(timeline, output, seconds=source.profile is not None)
    return Answer(data, lambda: _table(data, timeline), output=output)


def _table(data: dict[str, Any], timeline: Timeline) -> str:
    makespan = timeline.makespan_s
    peaks = data.get("peak_bytes")
    real = bool(data["unit"])
    lines = [
        f"{data['schedule']}: {data['num_stages']} stages on {data['num_ranks']} ranks, "
        f"{data['num_microbatches']} micro-batches per update",
        f"makespan         {time_text(makespan, real)}",
        f"period           {time_text(data['period'], real)}   (steady state, no barrier between steps)",
        f"bubble           {data['bubble_fraction']:.1%} of the makespan, {data['bubble_over_ideal']:.1%} over ideal",
        f"messages         {data['messages']}",
    ]
    if real:
        shares = (f"{name} {share:.1%}" for name, share in data["breakdown"].items())
        lines.append(f"time of a step   {', '.join(shares)}")
    if any(data["kept_inputs"]):
        kept = data["kept_inputs"]
    else:
        kept = []
    more = ["inputs kept"] * bool(kept) + ["peak memory"] * bool(peaks)
    rows = [["rank", "busy", "idle", "versions", "in flight", *more]]
    for rank, busy in enumerate(data["busy"]):
        if makespan:
            idle = 1 - busy / makespan
        else:
            idle = 0.0
        row = [str(rank), time_text(busy, real), f"{idle:.1%}", str(data["weight_versions"][rank])]
        row += [f"{data['peak_inflight'][rank]:.3g}", *([str(kept[rank])] if kept else [])]
        rows.append([*row, *([format_bytes(peaks[rank])] if peaks else [])])
    return "\n".join([*lines, "", *columns(rows, right=True)])
