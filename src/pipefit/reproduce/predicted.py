"""Figures of plans and drawings that several lectures ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from pipefit.reproduce.entry import Bench
from pipefit.reproduce.steps import Draw, Planned, Step


def gpt_plan(layers: int, hidden: int, heads: int, devices: int, batch: int, t: int, p: int, **more: Any) -> Planned:
    """The plan of a GPT on A100s, its widths given; it replays layers and waits for messages, as PTD-P's runs."""
    wishes = {"schedules": ["1f1b"], "microbatch_sizes": [1]} | more
    wishes |= {"recompute": "layer", "blocking": True} | ({"method": "ptdp"} if t <= 8 else {})
    name = f"gpt:layers={layers},hidden={hidden},heads={heads}"
    return Planned(name, f"dgx-a100-{devices}", global_batch=batch, tensors=[t], depths=[p], **wishes)


def period(run: Bench, step: Draw) -> float:
    """Time from update to update of a drawn schedule, in forwards."""
    return float(run(step).metrics["period"])


def rate(run: Bench, step: Step) -> float:
    """Samples per second of a plan."""
    return float(run(step).prediction.throughput)


def tflops(run: Bench, step: Planned) -> float:
    """TFLOP/s of each device, with the replay counted: 96·B·s·l·h²·(1 + s/6h) + 6·B·s·h·V per update."""
    from pipefit.planner.computed_profile import gpt_of
    from pipefit.planner.ptdp import flops_per_iteration

    found = run(step)
    one = flops_per_iteration(gpt_of(found.model), 1, recompute=True)
    return float(found.prediction.throughput * one / found.num_processes / 1e12)


def sent(run: Bench, step: Planned) -> float:
    """MB that travel per sample."""
    from pipefit.planner.plan_figures import sent_bytes

    return sent_bytes(run(step), step.question.profile, step.question.topology) / 1e6


def memory_gb(run: Bench, step: Planned) -> float:
    """GB of the fullest device."""
    return max(run(step).prediction.peak_bytes) / 1e9


def stalls(run: Bench, step: Planned) -> float:
    """The share of the devices' time without work."""
    from pipefit.planner.plan_figures import idle_share

    found, question = run(step), step.question
    return idle_share(found, question.profile, question.topology, found.prediction.period_s)


def replicas(run: Bench, step: Step) -> str:
    """The replicas of the stages, as PipeDream writes them: "15-1"; "straight" without any."""
    counts = [stage.replicas * run(step).data for stage in run(step).partition.stages]
    return "straight" if len(counts) > 1 and set(counts) == {1} else "-".join(map(str, counts))


def speedup(run: Bench, step: Step) -> float | str:
    """Times the throughput of plain data parallelism; in words where that does not fit."""
    found = run(step)
    if found.schedule == "data-parallel":
        return 1.0
    ahead = found.prediction.speedup_over_data_parallel
    return "data parallelism does not fit" if ahead is None else float(ahead)


def falls(figure: Callable[[Bench, Any], float], steps: Sequence[Step], most: float = 1.0) -> Callable[[Bench], bool]:
    """Whether a figure falls from one plan to the next, each at most `most` times the one before."""

    def make(run: Bench) -> bool:
        found = [figure(run, step) for step in steps if run.fits(step)]
        return len(found) > 1 and all(b <= most * a for a, b in pairwise(found))

    return make
