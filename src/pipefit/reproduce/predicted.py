"""Figures of plans and drawings that several lectures ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import lcm
from typing import Any

from msgspec.structs import replace

from pipefit.cost import FREE, of_plan
from pipefit.planner.manual import by_hand
from pipefit.reproduce.entry import Bench
from pipefit.reproduce.steps import Draw, Planned, Python, Step
from pipefit.schedules.catalogue import program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Profile, Topology


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


def minibatch_s(plan: Plan, profile: Profile, topology: Topology) -> float:
    """Seconds per mini-batch of a plan without flushes, or of data parallelism, in a simulation of its program.

    They are the difference of a longer and a shorter program, so that neither the fill nor the drain counts.
    """
    cost = of_plan(profile.at(plan.microbatch_size), plan, topology, runtime=FREE)
    round_of = lcm(*(stage.replicas for stage in plan.partition.stages))
    steps = round_of * -(-32 // round_of)
    shorter, longer = (simulate(program_of(plan, num_steps=n * steps), cost, contention=True) for n in (2, 3))
    return float(longer.makespan_s - shorter.makespan_s) / (steps * plan.num_microbatches)


def data_parallel(profile: Profile, topology: Topology) -> Plan:
    """Data parallelism over all devices: a mini-batch of the profile's size on each, and a sum of gradients."""
    count = topology.num_devices
    made = by_hand(len(profile), num_ranks=count, schedule="data-parallel", num_microbatches=count)
    return replace(made, microbatch_size=profile.microbatch_size)


def stages_by_hand(profile: Profile, layers: Sequence[int], replicas: Sequence[int]) -> Plan:
    """PipeDream's schedule over stages of so many layers, each on so many devices."""
    made = by_hand(
        len(profile),
        num_ranks=sum(replicas),
        schedule="pipedream",
        num_microbatches=1,
        stages=layers,
        replicas=replicas,
    )
    return replace(made, microbatch_size=profile.microbatch_size)


def _speedup(plan: Plan, profile: Profile, topology: Topology) -> float:
    plain_s = minibatch_s(data_parallel(profile, topology), profile, topology)
    return plain_s / minibatch_s(plan, profile, topology)


def speedup(run: Bench, step: Planned) -> float:
    """Times the throughput of data parallelism, both simulated: both sum gradients after their backwards."""
    found, question = run(step), step.question
    if found.schedule == "data-parallel":
        return 1.0
    text = f"simulate(plan) over simulate(data parallelism), of {step.command}"
    profile = question.profile.at(found.microbatch_size)
    return float(run(Python(text, lambda: _speedup(found, profile, question.topology))))


def speedup_by_hand(run: Bench, step: Planned, layers: Sequence[int], replicas: Sequence[int]) -> float:
    """Times the throughput of data parallelism, of stages that are given instead of planned."""
    question = step.question
    profile = question.profile.at(question.options["microbatch_sizes"][0])
    plan = stages_by_hand(profile, layers, replicas)
    text = (
        f"simulate(stages of {layers} layers on {replicas} devices) over simulate(data parallelism), of {step.command}"
    )
    return float(run(Python(text, lambda: _speedup(plan, profile, question.topology))))


def falls(figure: Callable[[Bench, Any], float], steps: Sequence[Step], most: float = 1.0) -> Callable[[Bench], bool]:
    """Whether a figure falls from one plan to the next, each at most `most` times the one before."""

    def make(run: Bench) -> bool:
        found = [figure(run, step) for step in steps if run.fits(step)]
        return len(found) > 1 and all(b <= most * a for a, b in pairwise(found))

    return make
