"""Figures of plans."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, sqrt

from msgspec.structs import replace

from pipefit.cost import FREE, of_plan
from pipefit.errors import InfeasibleError
from pipefit.planner.manual import by_hand
from pipefit.planner.plan_figures import idle_share, sent_bytes
from pipefit.planner.transformer import flops_per_iteration, training_days, transformer_of
from pipefit.reproduce.entry import Bench
from pipefit.reproduce.steps import Planned, Python
from pipefit.schedules.catalogue import program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Profile, Topology
from pipefit.timeline.breakdown import breakdown

_DAY_S = 86400
_TOKENS = 2048
"""Tokens of a sequence in PTD-P's models."""


def fits(run: Bench, step: Planned) -> bool:
    """Whether a plan is feasible."""
    try:
        run(step)
    except InfeasibleError:
        return False
    return True


def layers(run: Bench, step: Planned) -> int:
    """Layers of the largest model that fits."""
    return int(run(step))


def rate(run: Bench, step: Planned) -> float:
    """Samples per second."""
    return float(run(step).prediction.throughput)


def one_by_one(run: Bench, step: Planned) -> float:
    """Samples per second of model parallelism: one mini-batch passes all workers before the next begins."""
    profile = step.question.profile
    return profile.microbatch_size / sum(layer.total_s for layer in profile.layers)


def tflops(run: Bench, step: Planned) -> float:
    """TFLOP/s of each device, with the replay counted: 96·B·s·l·h²·(1 + s/6h) + 6·B·s·h·V per update."""
    found = run(step)
    one = flops_per_iteration(transformer_of(found.model), 1, recompute=True)
    return float(found.prediction.throughput * one / found.num_processes / 1e12)


def days(run: Bench, step: Planned, tokens: float) -> float:
    """Days of training on so many tokens."""
    return tokens / _TOKENS / rate(run, step) / _DAY_S


def years(run: Bench, step: Planned, tokens: float) -> float:
    """Years of training on so many tokens."""
    return days(run, step, tokens) / 365


def days_by_formula(run: Bench, step: Planned, tokens: float, parameters: float) -> float:
    """8·T·P/(n·X), with our X."""
    return days_of_slide(run, tokens, parameters, run(step).num_processes, tflops(run, step))


def days_of_slide(run: Bench, tokens: float, parameters: float, devices: int, rate: float) -> float:
    """8·T·P/(n·X), with the X that the slide gives in TFLOP/s."""
    return training_days(parameters, tokens, devices, 0.75e12 * rate)


def memory_gb(run: Bench, step: Planned) -> float:
    """GB of the fullest device."""
    return float(max(run(step).prediction.peak_bytes)) / 1e9


def parameters(run: Bench, step: Planned) -> float:
    """Millions of parameters, of 4 bytes each."""
    return sum(layer.weight_bytes for layer in step.question.profile.layers) / 4e6


def states_gb(run: Bench, step: Planned) -> float:
    """GB of parameters, gradients and states of RMSProp, 4 bytes each."""
    return 12 * parameters(run, step) / 1e3


def activations_gb(run: Bench, step: Planned) -> float:
    """GB of all devices at their peaks, without what `states_gb` counts."""
    return float(sum(run(step).prediction.peak_bytes)) / 1e9 - states_gb(run, step)


def microbatch(run: Bench, step: Planned) -> int:
    """Samples of a micro-batch."""
    return int(run(step).microbatch_size)


def checkpointed_gb(run: Bench, step: Planned, layers: int, checkpoints: float) -> float:
    """GB of a stage of l layers with c checkpoints, for one micro-batch: c·A_input + l/c·A_intermediate."""
    block = step.question.profile.layers[1]
    return (checkpoints * block.output_bytes + layers / checkpoints * block.saved_bytes) / 1e9


def least_checkpoints(run: Bench, step: Planned, layers: int) -> float:
    """The number of checkpoints with the least memory, over √(l·A_intermediate/A_input)."""
    block = step.question.profile.layers[1]
    best = min(range(1, layers + 1), key=lambda count: checkpointed_gb(run, step, layers, count))
    return best / sqrt(layers * block.saved_bytes / block.output_bytes)


def message_mb(run: Bench, step: Planned) -> float:
    """MB of a micro-batch that each device of a rank sends to the next stage, with scatter and gather."""
    width: int = step.options["tensors"][0]
    return step.question.profile.layers[1].output_bytes / width / 1e6


def stage_gb(run: Bench, step: Planned, stage: int) -> float:
    """GB of one stage's device; 0 where there is no such stage."""
    peaks: Sequence[float] = run(step).prediction.peak_bytes
    if stage < len(peaks):
        return peaks[stage] / 1e9
    return 0.0


def stages(run: Bench, step: Planned) -> int:
    """The number of stages."""
    return len(run(step).partition.stages)


def weights_gb(run: Bench, step: Planned) -> float:
    """GB of all weights."""
    return sum(_stage_weights_gb(run, step))


def fullest_weights_gb(run: Bench, step: Planned) -> float:
    """GB of the largest stage's weights."""
    return max(_stage_weights_gb(run, step))


def _stage_weights_gb(run: Bench, step: Planned) -> list[float]:
    profile = step.question.profile
    found = []
    for stage in run(step).partition.stages:
        found.append(sum(profile.layers[index].weight_bytes for index in stage.layers) / 1e9)
    return found


def weights_per_second(run: Bench, step: Planned) -> float:
    """Bytes of a model's weights over the seconds of its computation."""
    layers = step.question.profile.layers
    return sum(layer.weight_bytes for layer in layers) / sum(layer.total_s for layer in layers)


def sums_mb(run: Bench, step: Planned) -> float:
    """MB per sample of a ring all-reduce of all weights over the devices, each with a mini-batch."""
    profile = step.question.profile
    count = step.question.topology.num_devices
    trained_bytes = sum(layer.wgrad_bytes for layer in profile.layers)
    return 2 * (count - 1) / count * trained_bytes / profile.microbatch_size / 1e6


def pipeline_mb(run: Bench, model: str) -> float:
    """MB per sample of PipeDream's plan on four devices, or where that is data parallelism, of the best pipeline."""
    common = {"method": "pipedream", "memory": "64 GB"}
    free = Planned(model, "pcie-4x1", **common, cost="paper")
    straight = Planned(model, "pcie-4", **common, straight=True)
    return min(_sent_mb(run, step) for step in (free, straight) if stages(run, step) > 1)


def _sent_mb(run: Bench, step: Planned) -> float:
    return sent_bytes(run(step), step.question.profile, step.question.topology) / 1e6


def stalls(run: Bench, step: Planned) -> float:
    """The share of the devices' time without work."""
    found = run(step)
    question = step.question
    return idle_share(found, question.profile, question.topology, found.prediction.period_s)


def share(run: Bench, step: Planned, purpose: str) -> float:
    """The share of an update's time that one of its purposes takes."""
    found = run(step)
    question = step.question
    cost = of_plan(question.profile.at(found.microbatch_size), found, question.topology, runtime=FREE)
    return breakdown(simulate(program_of(found), cost))[purpose]


def replicas(run: Bench, step: Planned) -> str:
    """The replicas of the stages, as PipeDream writes them: "15-1"; "straight" without any."""
    found = run(step)
    counts = [stage.replicas * found.data for stage in found.partition.stages]
    if len(counts) > 1 and set(counts) == {1}:
        return "straight"
    return "-".join(map(str, counts))


def speedup(run: Bench, step: Planned) -> float:
    """Times the throughput of data parallelism, both simulated: both sum gradients after their backwards."""
    found = run(step)
    question = step.question
    if found.schedule == "data-parallel":
        return 1.0
    text = f"simulate(plan) over simulate(data parallelism), of {step.command}"
    profile = question.profile.at(found.microbatch_size)
    return float(run(Python(text, lambda: _speedup(found, profile, question.topology))))


def speedup_by_hand(run: Bench, step: Planned, layers: Sequence[int], devices: Sequence[int]) -> float:
    """Times the throughput of data parallelism, of stages that are given instead of planned."""
    question = step.question
    profile = question.profile.at(question.options["microbatch_sizes"][0])
    plan = stages_by_hand(profile, layers, devices)
    text = (
        f"simulate(stages of {layers} layers on {devices} devices) over simulate(data parallelism), of {step.command}"
    )
    return float(run(Python(text, lambda: _speedup(plan, profile, question.topology))))


def _speedup(plan: Plan, profile: Profile, topology: Topology) -> float:
    plain_s = minibatch_s(data_parallel(profile, topology), profile, topology)
    return plain_s / minibatch_s(plan, profile, topology)


def minibatch_s(plan: Plan, profile: Profile, topology: Topology) -> float:
    """Seconds per mini-batch of a plan without flushes, or of data parallelism, in a simulation of its program.

    They are the difference of a longer and a shorter program, so that neither the fill nor the drain counts.
    """
    cost = of_plan(profile.at(plan.microbatch_size), plan, topology, runtime=FREE)
    round_of = lcm(*(stage.replicas for stage in plan.partition.stages))
    steps = round_of * -(-32 // round_of)
    shorter = simulate(program_of(plan, num_steps=2 * steps), cost, contention=True)
    longer = simulate(program_of(plan, num_steps=3 * steps), cost, contention=True)
    return float(longer.makespan_s - shorter.makespan_s) / (steps * plan.num_microbatches)


def data_parallel(profile: Profile, topology: Topology) -> Plan:
    """Data parallelism over all devices: a mini-batch of the profile's size on each, and a sum of gradients."""
    count = topology.num_devices
    made = by_hand(len(profile), num_ranks=count, schedule="data-parallel", num_microbatches=count)
    return replace(made, microbatch_size=profile.microbatch_size)


def stages_by_hand(profile: Profile, layers: Sequence[int], devices: Sequence[int]) -> Plan:
    """PipeDream's schedule over stages of so many layers, each on so many devices."""
    made = by_hand(
        len(profile),
        num_ranks=sum(devices),
        schedule="pipedream",
        num_microbatches=1,
        stages=layers,
        replicas=devices,
    )
    return replace(made, microbatch_size=profile.microbatch_size)
