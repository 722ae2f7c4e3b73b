"""Figures of drawn schedules: their metrics, and facts of their programs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from msgspec.structs import replace

from pipefit.ir import Program
from pipefit.planner.machines import load_topology
from pipefit.reproduce.entry import Bench
from pipefit.reproduce.steps import Draw, Python
from pipefit.schedules import Shape, generate
from pipefit.verify import verify


def metric(run: Bench, step: Draw, name: str, at: int | str | None = None) -> Any:
    """A figure of a schedule by its name in `pipefit draw --json`.

    Args:
        run: runs steps.
        step: draws.
        name: the figure's.
        at: the rank whose figure is meant, or "max"; None: it is one figure.
    """
    found = run(step).metrics[name]
    if at == "max":
        return max(found)
    if at is None:
        return found
    return found[at]


def s_per_microbatch(run: Bench, step: Draw) -> float:
    """Time of a micro-batch in the steady state, in forwards."""
    metrics = run(step).metrics
    return float(metrics["period"]) / float(metrics["num_microbatches"])


def count(run: Bench, step: Draw, operation: str) -> int:
    """Instructions of one operation."""
    return sum(instruction.op.value == operation for _, _, instruction in run(step).program)


def instructions(run: Bench, step: Draw) -> int:
    """Instructions of all workers."""
    return len(list(run(step).program))


def fetches(run: Bench, step: Draw) -> int:
    """Fetches of weights."""
    program = run(step).program
    return sum(i.op.value == "fetch" and i.kind == "weights" for _, _, i in program)


def replays_per_forward(run: Bench, step: Draw) -> float:
    """Forwards that are replayed, over all forwards."""
    return count(run, step, "recompute") / count(run, step, "fwd")


def saved_samples(run: Bench, step: Draw, layers: int, samples: int) -> float:
    """Samples × layers whose activations a device holds at its peak, from the simulated program."""
    metrics = run(step).metrics
    of_microbatch = samples / metrics["num_microbatches"]
    saved = max(metrics["peak_inflight"])
    kept = max(metrics["kept_inputs"])
    return float(saved * of_microbatch * layers / metrics["num_stages"] + kept * of_microbatch)


def versions_by_rank(run: Bench, step: Draw) -> str:
    """Versions of the weights on every rank."""
    return " ".join(map(str, run(step).metrics["weight_versions"]))


def same_version(run: Bench, step: Draw) -> bool:
    """Whether every backward uses the version of its forward."""
    return all(len(set(used.values())) == 1 for used in versions_used(run(step).program).values())


def same_everywhere(run: Bench, step: Draw, microbatch: int | None = None) -> bool:
    """Whether all stages use the same version in the forward of one micro-batch, or of each."""
    forward = defaultdict(set)
    for (_, number), used in versions_used(run(step).program).items():
        forward[number].add(used["fwd"])
    chosen = forward.values() if microbatch is None else [forward[microbatch]]
    return all(len(found) == 1 for found in chosen)


def follows_2bw(run: Bench, step: Draw) -> bool:
    """Whether micro-batch k, from 1, uses version max(⌊(k − 1)/m⌋ − 1, 0) at every stage."""
    program = run(step).program
    count = program.header.num_microbatches
    return all(used["fwd"] == max(number // count - 1, 0) for (_, number), used in versions_used(program).items())


def versions_used(program: Program) -> dict[tuple[int, int], dict[str, int]]:
    """The versions of the weights that forward and backward use, by stage and micro-batch."""
    found: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for _, _, i in program:
        if i.op.value in ("fwd", "bwd") and i.version >= 0:
            found[i.stage, i.mb][i.op.value] = i.version
    return found


def one_worker_each(run: Bench, step: Draw) -> bool:
    """Whether each mini-batch's forward and backward are on one worker."""
    ranks = defaultdict(set)
    for rank, _, i in run(step).program:
        if i.op.value in ("fwd", "bwd"):
            ranks[i.stage, i.mb].add(rank)
    return all(len(found) == 1 for found in ranks.values())


def rule_broken_by_newest_weights(run: Bench) -> str:
    """The first rule that PipeDream breaks if its backwards use the newest weights."""
    report = run(Python("verify(pipedream with backwards on the newest weights)", _tampered))
    return str(report.violations[0].rule)


def _tampered() -> Any:
    program = generate("pipedream", Shape(4, 1, num_steps=8))
    ranks = []
    for instructions in program.ranks:
        ranks.append(tuple(replace(i, version=i.mb) if i.op.value == "bwd" else i for i in instructions))
    return verify(Program(program.header, tuple(ranks)))


def has_fast_servers(run: Bench, machine: str, width: int) -> bool:
    """Whether servers have so many devices, with faster links inside than between them."""
    inner, outer = load_topology(machine).levels
    return inner.width == width and inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s
