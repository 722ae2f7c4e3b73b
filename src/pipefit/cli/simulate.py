"""`pipefit simulate`: predicted times and memory of a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Json, Simulated, verb
from pipefit.cli.programs import SourceOptions, check_forwards, read_source, save_timeline, time_text
from pipefit.cost.unit_costs import UnitCosts
from pipefit.spec.files import JsonObject
from pipefit.units import columns, format_bytes

if TYPE_CHECKING:
    from pipefit.timeline import Timeline


@verb()
def command(
    path: Path,
    /,
    *,
    given: SourceOptions,
    costs: UnitCosts,
    repeats: Count = 1,
    output: Simulated = None,
    json: Json = False,
) -> Answer:
    """Predict the time and memory of a program or a plan.

    Example: pipefit simulate plan.json --profile model.profile.json --topology local:2 -o plan.html

    With a profile, times are seconds and memory is bytes. Without one they are units of --forward and micro-batches of
    a rank's layers.

    Args:
        path: A program (.pipe) or a plan (.json).
        repeats: Passes over the program, without a barrier between them.
        output: .svg, .html or .png for a picture, .trace.json for Perfetto, .pickle for torch's page memory_viz.
    """
    from pipefit.simulate import metrics, simulate
    from pipefit.timeline.breakdown import breakdown
    from pipefit.verify.sense import refuse_malformed

    source = read_source(path, given)
    program = source.program
    has_profile = source.profile is not None
    refuse_malformed(program)
    check_forwards(program.header.num_stages, program.header.total_microbatches, repeats)
    cost = source.cost(costs)
    # On real links messages queue once both sides are ready; the unit costs of the papers do not include this.
    timeline = simulate(program, cost, repeats=repeats, contention=has_profile, rendezvous=has_profile)
    ranks = range(len(program.ranks))
    data = metrics(program, timeline, cost)
    data |= {"unit": "", "breakdown": breakdown(timeline), "busy": list(map(timeline.busy_s, ranks))}
    peaks = list(map(timeline.peak_bytes, ranks))
    if has_profile:
        data |= {"unit": "s", "peak_bytes": peaks}
    else:
        data["peak_memory"] = peaks
    save_timeline(timeline, output, cost=cost, seconds=has_profile)
    return Answer(data, lambda: _table(data, timeline), output=output)


def _table(data: JsonObject, timeline: Timeline) -> str:
    makespan = timeline.makespan_s
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
    idle = [0.0] * len(data["busy"])
    if makespan:
        idle = [1 - busy / makespan for busy in data["busy"]]
    table = {
        "rank": map(str, range(len(idle))),
        "busy": [time_text(busy, real) for busy in data["busy"]],
        "idle": [f"{share:.1%}" for share in idle],
        "versions": map(str, data["weight_versions"]),
        "in flight": [f"{peak:.3g}" for peak in data["peak_inflight"]],
    }
    if any(data["kept_inputs"]):
        table["inputs kept"] = map(str, data["kept_inputs"])
    if real:
        table["peak memory"] = map(format_bytes, data["peak_bytes"])
    rows = [list(table), *zip(*table.values(), strict=True)]
    return "\n".join([*lines, "", *columns(rows, right=True)])
