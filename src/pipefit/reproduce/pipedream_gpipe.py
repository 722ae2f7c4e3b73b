"""The lecture on PipeDream and GPipe: two paper discussions in one."""

from __future__ import annotations

from typing import Any

from pipefit.reproduce.clusters import COMPUTED
from pipefit.reproduce.entry import GPIPE, PIPEDREAM, Bench, Entry, Picture, Value, curves, drawn, figure
from pipefit.reproduce.measured import ACCURACY
from pipefit.reproduce.questions import QUESTIONS
from pipefit.reproduce.steps import Draw

DECK = "PipeDream and GPipe"

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


ENTRIES = (
    Entry(
        "hardware-pipeline",
        "Traditional hardware pipeline",
        "Five steps of an instruction overlap: five instructions take 9 cycles in place of 25",
        "drawn",
        "slide; n + k − 1 cycles for n instructions in k steps",
        (
            Value("cycles of 5 instructions", figure(Draw("gpipe", 5, 5, backward=0), "makespan"), 9),
            Value("without overlap", figure(Draw("naive", 5, 5, backward=0), "makespan"), 25),
        ),
        (drawn(Draw("gpipe", 5, 5, backward=0), "A pipeline of five steps"),),
        "A forward-only pipeline: backwards take no time.",
    ),
    Entry(
        "naive",
        "Problem of model parallelism, figure 2; naive model parallelism",
        "Model parallelism with 4 workers: one works, three wait",
        "drawn",
        PIPEDREAM + ", figure 2; idle share (K − 1)/K",
        (
            Value("idle share", figure(_NAIVE, "bubble_fraction"), 3 / 4, "%"),
            Value("mini-batches in flight", lambda run: max(run(_NAIVE).metrics["peak_inflight"]), 1),
        ),
        (drawn(_NAIVE),),
    ),
    Entry(
        "gpipe-flushes",
        "Problem of GPipe, figure 3; bubble overhead",
        "GPipe with 4 workers and 4 micro-batches: flushes leave idle time",
        "drawn",
        PIPEDREAM + ", figure 3; " + GPIPE + ", section 2.3: (K − 1)/(M + K − 1)",
        (
            Value("idle share, M = 4", figure(_GPIPE, "bubble_fraction"), 3 / 7, "%"),
            Value("idle share, M = 4·K", bubble(16), 3 / 19, "%"),
            Value("idle share, M = 8·K", bubble(32), 3 / 35, "%"),
        ),
        (drawn(_GPIPE),),
        "The slide calls the bubble negligible from M ≥ 4·K: 15.8 % is left there, and 8.6 % at 8·K.",
    ),
    Entry(
        "pipedream-steady",
        "Main idea of PipeDream, figure 4",
        "PipeDream with 4 workers: start-up, then a steady state without idle time",
        "drawn",
        PIPEDREAM + ", figure 4",
        (
            Value("time per mini-batch, in steady state", figure(_STEADY, "period"), 3),
            Value("in flight at the first stage", lambda run: run(_STEADY).metrics["peak_inflight"][0], 4),
            Value("of that naive model parallelism needs", figure(Draw("naive", 4, 1), "period"), 12),
        ),
        (drawn(_STEADY), drawn(Draw("gpipe", 4, 4, num_steps=3))),
        "A backward takes twice a forward, as in the figure.",
    ),
    Entry(
        "1f1b-rr",
        "Challenge 2: forward/backward scheduling, figure 8",
        "1F1B-RR: 3 workers, 2 stages of costs 2 : 1, the first one replicated",
        "drawn",
        PIPEDREAM + ", figure 8",
        (
            Value("time per mini-batch, in steady state", figure(_ROUND_ROBIN, "period"), 2),
            Value("forward and backward on the same worker", _one_worker_each, True),
            Value("in flight at each input replica", lambda run: run(_ROUND_ROBIN).metrics["peak_inflight"][0], 2),
        ),
        (drawn(_ROUND_ROBIN, "1F1B-RR"),),
        "⌈workers / input replicas⌉ = ⌈3 / 2⌉ = 2 mini-batches in flight.",
    ),
    Entry(
        "weight-stashing",
        "Challenge 3: effective training, figure 9",
        "Weight stashing: versions that mini-batch 5 uses, with arrows",
        "drawn",
        PIPEDREAM + ", figure 9",
        (
            Value("backward uses its forward's version", lambda run: same_version(run, _STASH), True),
            Value(
                "mini-batch 5 uses the same version at all stages",
                lambda run: len({versions_used(run, _STASH, stage, 4)["fwd"] for stage in range(3)}) == 1,
                False,
            ),
            Value("versions kept at the first stage", lambda run: run(_STASH).metrics["weight_versions"][0], 3),
            Value("versions kept at the third stage", lambda run: run(_STASH).metrics["weight_versions"][2], 1),
        ),
        (drawn(_STASH, "Weight stashing", follow=4),),
        "The slide counts mini-batches from 1; the picture's number 4 is the fifth.",
    ),
    Entry(
        "two-level-topology",
        "Challenge 1: work partition, figure 7",
        "Servers of four GPUs: links inside faster than links between",
        "drawn",
        PIPEDREAM + ", figure 7",
        (Value("four GPUs per server, B1 > B2", _two_levels, True),),
        (topology_picture,),
    ),
    Entry(
        "gpipe-timeline",
        "GPipe: enhancing efficiency with pipeline parallelism",
        "Naive model parallelism, then GPipe, over 4 accelerators and 4 micro-batches",
        "drawn",
        GPIPE + ", figure 2",
        (
            Value(
                "times faster than naive, M = 4",
                lambda run: run(Draw("naive", 4, 4)).metrics["makespan"] / run(Draw("gpipe", 4, 4)).metrics["makespan"],
                4 * 4 / 7,
                "×",
            ),
        ),
        (drawn(Draw("naive", 4, 4)), drawn(Draw("gpipe", 4, 4))),
    ),
    Entry(
        "microbatches",
        "GPipe: pipeline parallelism",
        "More micro-batches, less idle time: the bubble by M and K",
        "drawn",
        GPIPE + ", section 2.3: (K − 1)/(M + K − 1)",
        (
            Value("K = 2, M = 8", bubble(8, 2), 1 / 9, "%"),
            Value("K = 8, M = 8", bubble(8, 8), 7 / 15, "%"),
            Value("K = 8, M = 32", bubble(32, 8), 7 / 39, "%"),
        ),
        (
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
    ),
    Entry(
        "rematerialization",
        "GPipe: re-materialization",
        "Each accelerator keeps the outputs at its border, and repeats its forward before the backward",
        "drawn",
        GPIPE + ", section 2.3",
        (
            Value(
                "one forward more per micro-batch",
                lambda run: (
                    sum(i.op.value == "recompute" for _, _, i in run(Draw("gpipe", 4, 4, recompute=True)).program)
                    / sum(i.op.value == "fwd" for _, _, i in run(Draw("gpipe", 4, 4, recompute=True)).program)
                ),
                1,
                why="Each rank's last forward is followed at once by its backward, so pipefit replays 12 of 16.",
            ),
        ),
        (drawn(Draw("gpipe", 4, 4, recompute=True)),),
    ),
    ACCURACY,
    *COMPUTED,
    *QUESTIONS,
)
