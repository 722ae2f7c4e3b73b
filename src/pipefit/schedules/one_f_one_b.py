"""One forward, one backward: 1F1B (PipeDream-Flush), and the asynchronous schedules that never flush."""

from __future__ import annotations

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Indices, Instruction, bwd, fwd
from pipefit.ir.program import Header, WeightRule
from pipefit.schedules.registry import Orders, Task, schedule
from pipefit.schedules.shape import Shape


def alternate(forwards: list[Instruction], backwards: list[Instruction], warmup: int) -> list[Instruction]:
    """Some forwards first, then one forward and one backward alternating, then the backwards that are left."""
    order = forwards[:warmup]
    ahead = forwards[warmup:]
    for forward, backward in zip(ahead, backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(ahead) :]


def num_warmup(header: Header, stage: int) -> int:
    """Forwards of a replica of a stage before its first 1F1B pair: ⌊(N − 1 − Σ_{t<s} R_t) / R_s⌋ for N workers.

    Without replicas this is p − 1 − s.
    Source: PipeDream (SOSP 2019) §3.2.
    """
    before = sum(len(header.placement[earlier]) for earlier in range(stage))
    workers = sum(map(len, header.placement))
    return (workers - 1 - before) // len(header.placement[stage])


def _warmup_in_reach(shape: Shape) -> None:
    warmup = shape.options.get("warmup", 1)
    most = max(2, shape.num_microbatches * shape.num_steps)
    if not 0 <= warmup <= most:
        raise ScheduleError(
            f"warmup: expected 0 to {most} times the depth below the rank (1: as few in flight as keep ranks busy; "
            f"2: hides latency; with {most} all micro-batches are in flight), got {warmup}"
        )


def _one_f_one_b(task: Task) -> Orders:
    for stage, mbs in task.one_stage_each():
        warmup = task.options["warmup"] * num_warmup(task.header, stage)
        forwards = [fwd(stage, mb) for mb in mbs]
        backwards = [bwd(stage, mb) for mb in mbs]
        yield alternate(forwards, backwards, warmup)


def _ahead(p: int, m: int, v: int, rank: int) -> Indices:
    return (min(p - rank, m),)


@schedule(name="1f1b", options={"warmup": 1}, check=_warmup_in_reach, ahead=_ahead)
def _flush(task: Task) -> Orders:
    """1F1B, also called PipeDream-Flush: as little as possible in flight, a flush at the end.

        F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3   rank 0
        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .    rank 1
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .    rank 2

    F forward, B backward, digits micro-batches; drawn for f = b.
    Time (m+p−1)(f+b) as GPipe, with only min(p−r, m) micro-batches of activations on rank r. Option `warmup` = 2
    doubles the depth of the warm-up, which hides a latency of up to (f+b)/2.
    Source: PipeDream-2BW (ICML 2021) §3.2; Megatron-LM (SC 2021) §2.2.1.
    """
    return _one_f_one_b(task)


def _ahead_of_many(p: int, m: int, v: int, rank: int) -> Indices:
    """The micro-batches of one update are followed by those of the next."""
    return (p - rank,)


@schedule(
    name="pipedream", weights=WeightRule.STASH, options={"warmup": 1}, check=_warmup_in_reach, ahead=_ahead_of_many
)
def _pipedream(task: Task) -> Orders:
    """PipeDream: 1F1B without flush; every mini-batch steps, its backward uses the weights its forward used.

        F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4   rank 0: three versions of its weights
        .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .    rank 1: two
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .    rank 2: one

    F forward, B backward and step, digits mini-batches; drawn for f = b. On rank 0, F3 and so B3 use the weights
    that B0 made, which at B3 are two steps old. No bubble beyond the first fill and last drain; stage s of n keeps n−s
    versions; gradients are up to n−1−s steps old.
    Source: PipeDream (SOSP 2019) §3.2–3.3.
    """
    return _one_f_one_b(task)


@schedule(
    name="pipedream-vertical-sync",
    weights=WeightRule.VERTICAL,
    options={"warmup": 1},
    check=_warmup_in_reach,
    ahead=_ahead_of_many,
)
def _vertical_sync(task: Task) -> Orders:
    """PipeDream with vertical sync: a mini-batch uses the same version at every stage, the one it used at stage 0.

        F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4   rank 0: F3 and B3 use version 1
        .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .    rank 1: F3 and B3 use version 1
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .    rank 2: F3 and B3 use version 1

    F forward, B backward and step, digits mini-batches; drawn for f = b. The order is PipeDream's; every stage keeps n
    versions.
    Source: PipeDream (SOSP 2019) §3.3.
    """
    return _one_f_one_b(task)


def _enough_for_double_buffering(shape: Shape) -> None:
    """Two versions suffice if all of a replica's micro-batches in flight belong to two consecutive updates."""
    _warmup_in_reach(shape)
    header = shape.header("pipedream-2bw", "loop", WeightRule.DOUBLE)
    depth = shape.options.get("warmup", 1)
    needed = max(len(ranks) * depth * num_warmup(header, stage) for stage, ranks in enumerate(header.placement))
    if shape.num_microbatches < needed:
        raise ScheduleError(
            f"pipedream-2bw: two weight versions suffice for {shape.depth} stages only with at least {needed} "
            f"micro-batches per update, got {shape.num_microbatches}; use {needed} or more"
        )


@schedule(
    name="pipedream-2bw",
    weights=WeightRule.DOUBLE,
    options={"warmup": 1},
    check=_enough_for_double_buffering,
    ahead=_ahead_of_many,
)
def _double_buffered(task: Task) -> Orders:
    """PipeDream-2BW: 1F1B without flush, gradients coalesced over m micro-batches, two versions of the weights.

        F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5   rank 0
        .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .    rank 1
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .    rank 2

    F forward, B backward, digits micro-batches; drawn for f = b and m = 2: updates end with B1, B3 and B5; 0 to 3 use
    version 0, then 4 and 5 version 1.
    W(t+1) = W(t) − ν·∇f(W(t−1)): every gradient is exactly one update old, at every stage.
    Source: PipeDream-2BW (ICML 2021) §3.1.
    """
    return _one_f_one_b(task)
