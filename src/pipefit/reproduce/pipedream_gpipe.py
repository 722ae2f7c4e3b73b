"""The lecture on PipeDream and GPipe: two paper discussions in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.reproduce.entry import Bench, Made, Picture, curves, drawn, figure
from pipefit.reproduce.steps import Draw

_NAIVE, _GPIPE = Draw("naive", 4, 2), Draw("gpipe", 4, 4, num_steps=2)
_STEADY = Draw("pipedream", 4, 12)
_ROUND_ROBIN = Draw("pipedream", 2, 8, replicas=(2, 1), stage_work=(2, 1), forward=1, backward=1)
_STASH = Draw("pipedream", 3, 8)


def versions_used(run: Bench, step: Draw, stage: int, microbatch: int) -> dict[str, int]:
    """The weight versions of a mini-batch's forward and backward, by letter."""
    boxes = run(step).program
    uses = {i.op.value: i.version for _, _, i in boxes if (i.stage, i.mb) == (stage, microbatch) and i.version >= 0}
    return {name: version for name, version in uses.items() if name in ("fwd", "bwd")}


def same_version(run: Bench, step: Draw) -> bool:
    """Whether every backward uses the version of its forward."""
    header = run(step).program.header
    places = [(stage, mb) for stage in range(header.num_stages) for mb in range(header.total_microbatches)]
    return all(len(set(versions_used(run, step, *place).values())) == 1 for place in places)


def _one_worker_each(run: Bench) -> bool:
    """Whether each mini-batch's forward and backward are on one worker."""
    ranks: dict[Any, set[int]] = {}
    for rank, _, i in run(_ROUND_ROBIN).program:
        if i.op.value in ("fwd", "bwd"):
            ranks.setdefault((i.stage, i.mb), set()).add(rank)
    return all(len(found) == 1 for found in ranks.values())


def bubble(microbatches: int, stages: int = 4) -> Any:
    """The bubble of GPipe as the share of an update, simulated."""
    return figure(Draw("gpipe", stages, microbatches), "bubble_fraction")


def topology_picture(run: Bench) -> Picture:
    """Devices in servers, and the links of each level."""
    from pipefit.draw.chart import plotted
    from pipefit.planner.machines import load_topology

    machine = load_topology("pcie-4x4")
    inner, outer = machine.levels
    words = [f"B{k}: {level.bandwidth_bytes_per_s / 1e9:g} GB/s" for k, level in enumerate(machine.levels, 1)]

    def draw(figure: Any) -> None:
        from matplotlib.patches import Rectangle

        axes = figure.add_subplot()
        for server in range(outer.width):
            left = server * (inner.width + 1)
            box = {"fill": False, "linestyle": "--", "edgecolor": "#dd9a1c", "linewidth": 2}
            axes.add_patch(Rectangle((left - 0.4, -0.2), inner.width - 0.2, 1.4, **box))
            axes.plot([left, left + inner.width - 1], [0.2, 0.2], color="#2b8580")
            for device in range(inner.width):
                axes.add_patch(Rectangle((left + device - 0.25, 0.4), 0.5, 0.5, color="#2b8580"))
                axes.plot([left + device] * 2, [0.2, 0.4], color="#2b8580")
            middle = left + (inner.width - 1) / 2
            axes.plot([middle, middle], [-0.8, 0.2], color="#2960a6")
            axes.text(left, 1.0, words[0], fontsize=10)
        axes.plot([1.5, (outer.width - 1) * (inner.width + 1) + 1.5], [-0.8, -0.8], color="#2960a6")
        axes.text(1.6, -1.15, words[1], fontsize=10)
        axes.set(xlim=(-0.8, outer.width * (inner.width + 1) - 0.6), ylim=(-1.4, 1.5))
        axes.axis("off")

    text = f"{outer.width} servers of {inner.width} devices; {words[0]} inside, {words[1]} between"
    return Picture("A two-level topology", lambda: plotted(draw, 900, 260, "A two-level topology: pcie-4x4"), text)


def _two_levels(run: Bench) -> bool:
    from pipefit.planner.machines import load_topology

    inner, outer = load_topology("pcie-4x4").levels
    return inner.width == 4 and inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s


MADE: Mapping[str, Made] = {
    "hardware-pipeline": Made(
        (figure(Draw("gpipe", 5, 5, backward=0), "makespan"), figure(Draw("naive", 5, 5, backward=0), "makespan")),
        drawn(Draw("gpipe", 5, 5, backward=0), "A pipeline of five steps"),
    ),
    "naive": Made((figure(_NAIVE, "bubble_fraction"), figure(_NAIVE, "peak_inflight", max)), drawn(_NAIVE)),
    "gpipe-flushes": Made((figure(_GPIPE, "bubble_fraction"), bubble(16), bubble(32)), drawn(_GPIPE)),
    "pipedream-steady": Made(
        (
            figure(_STEADY, "period"),
            lambda run: run(_STEADY).metrics["peak_inflight"][0],
            figure(Draw("naive", 4, 1), "period"),
        ),
        drawn(_STEADY),
        drawn(Draw("gpipe", 4, 4, num_steps=3)),
    ),
    "1f1b-rr": Made(
        (figure(_ROUND_ROBIN, "period"), _one_worker_each, lambda run: run(_ROUND_ROBIN).metrics["peak_inflight"][0]),
        drawn(_ROUND_ROBIN, "1F1B-RR"),
    ),
    "weight-stashing": Made(
        (
            lambda run: same_version(run, _STASH),
            lambda run: len({versions_used(run, _STASH, stage, 4)["fwd"] for stage in range(3)}) == 1,
            lambda run: run(_STASH).metrics["weight_versions"][0],
            lambda run: run(_STASH).metrics["weight_versions"][2],
        ),
        drawn(_STASH, "Weight stashing", follow=4),
    ),
    "two-level-topology": Made((_two_levels,), topology_picture),
    "gpipe-timeline": Made(
        (lambda run: run(Draw("naive", 4, 4)).metrics["makespan"] / run(Draw("gpipe", 4, 4)).metrics["makespan"],),
        drawn(Draw("naive", 4, 4)),
        drawn(Draw("gpipe", 4, 4)),
    ),
    "microbatches": Made(
        (bubble(8, 2), bubble(8, 8), bubble(32, 8)),
        curves(
            "Bubble of GPipe",
            "micro-batches M",
            "idle share",
            (1, 2, 4, 8, 16, 32, 64),
            {f"K = {k}": lambda run, m, k=k: bubble(m, k)(run) for k in (2, 4, 8)},
            {f"K = {k}": [(k - 1) / (m + k - 1) for m in (1, 2, 4, 8, 16, 32, 64)] for k in (2, 4, 8)},
            log_x=True,
        ),
    ),
    "rematerialization": Made(
        (
            lambda run: (
                sum((i.op.value == "recompute" for _, _, i in run(Draw("gpipe", 4, 4, recompute=True)).program))
                / sum((i.op.value == "fwd" for _, _, i in run(Draw("gpipe", 4, 4, recompute=True)).program))
            ),
        ),
        drawn(Draw("gpipe", 4, 4, recompute=True)),
    ),
}
