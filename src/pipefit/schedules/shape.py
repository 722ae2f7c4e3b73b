"""Shape: the integers from which a schedule is generated."""

from __future__ import annotations

from itertools import count as count_from

import msgspec

from pipefit.errors import ScheduleError, check_figures
from pipefit.ir.instruction import Groups, Indices
from pipefit.ir.program import MOST_STAGES, Header, WeightRule
from pipefit.ir.spill import Spill
from pipefit.spec.arguments import check_fields
from pipefit.spec.plan import Shard


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The integers for which a schedule is generated.

    Attributes:
        depth: positions of the pipeline, p; the number of ranks when no stage is replicated.
        num_microbatches: per weight update, m.
        num_chunks: stages per rank, v.
        num_steps: weight updates in the program.
        replicas: copies of each stage (empty: one each). All alike: ranks are numbered pipeline by pipeline; otherwise
            stage by stage.
        placement: ranks of each stage; (): the default of the layout.
        recompute: stages that replay their forward; None: all.
        inside: stages that replay inside their backward, and how: "layer" or "selective".
        ties: groups of stages that share a weight.
        clip: the norm of all gradients is needed before each step.
        commit: all ranks meet before any of them steps.
        shard, shard_slots: what the replicas of a stage share, and how many stages are whole at once: see `Header`.
        ahead: compute instructions between posting a receive and needing it.
        tensor: processes that share each rank by tensor parallelism.
        pieces: each of them sends its part of a message, and the receiver gathers.
        spill: stages that are kept on the host or on disk, and the slots into which they are fetched (None: none).
        prefetch: stages ahead that a spilled one is fetched (None: as soon as a slot is free).
        frozen: stages at the beginning in which nothing trains.
        shares: micro-batches of each replica per weight update; (): round-robin.
        options: integers particular to the schedule.
    """

    depth: int
    num_microbatches: int
    num_chunks: int = 1
    num_steps: int = 1
    replicas: Indices = ()
    placement: Groups = ()
    recompute: Indices | None = ()
    inside: dict[int, str] = {}
    ties: Groups = ()
    clip: bool = False
    commit: bool = False
    shard: Shard = "none"
    shard_slots: int = 2
    ahead: int = 1
    tensor: int = 1
    pieces: bool = False
    spill: Spill | None = None
    prefetch: int | None = None
    frozen: int = 0
    shares: Indices = ()
    options: dict[str, int] = {}

    def __post_init__(self) -> None:
        check_fields(self, ScheduleError)
        check_figures(
            self, ScheduleError, depth=1, num_microbatches=1, num_chunks=1, num_steps=1, ahead=0, prefetch=0, tensor=1
        )

    def header(self, schedule: str, layout: str, weights: WeightRule, spills: bool = False) -> Header:
        """The header of this shape's program under a schedule; one that `spills` spills all stages by default."""
        placement = self.placement or placement_of(self.depth, self.num_chunks, layout, self.replicas)
        num_stages = len(placement)
        copies = list(map(len, placement))
        if weights is WeightRule.VERTICAL and len(set(copies)) > 1:
            raise ScheduleError(
                f"{schedule}: all stages need equally many replicas (their versions advance together), got {copies}"
            )
        updates = [self.num_microbatches] * num_stages
        if weights in (WeightRule.STASH, WeightRule.VERTICAL):
            # Replicas average the gradients of their consecutive mini-batches before each step.
            updates = [self.num_microbatches * count for count in copies]
        spill = self.spill
        if spill is None and spills:
            spill = Spill.of(num_stages)
        own = {name: getattr(self, name) for name in Header.__struct_fields__ if hasattr(self, name)}
        own |= {"placement": placement, "spill": spill}
        header = Header(schedule, weights=weights, updates=tuple(updates), **own)
        self._refuse_replicas_without_work(header, max(copies))
        self._refuse_updates_that_differ(header)
        return header

    def _refuse_replicas_without_work(self, header: Header, most: int) -> None:
        """Every replica needs a micro-batch in every update: it takes part in the reduction of gradients."""
        if header.weights in (WeightRule.FLUSH, WeightRule.DOUBLE):
            if self.num_microbatches < most:
                raise ScheduleError(
                    f"{header.schedule}: {self.num_microbatches} micro-batches cannot reach {most} replicas of a "
                    f"stage; use at least {most} micro-batches, or fewer replicas"
                )
            return

        def works(num_steps: int) -> bool:
            for count, ranks in zip(header.updates, header.placement, strict=True):
                rest = num_steps * self.num_microbatches % count
                if 0 < rest < len(ranks):
                    return False
            return True

        if not works(self.num_steps):
            wanted = str(next(filter(works, count_from(self.num_steps))))
            below = next(filter(works, range(self.num_steps, 0, -1)), None)
            if below:
                wanted = f"{below} or {wanted}"
            raise ScheduleError(
                f"{header.schedule}: {self.num_steps} steps of {self.num_microbatches} micro-batches leave replicas of "
                f"a stage without one in the last update; use {wanted} steps"
            )

    def _refuse_updates_that_differ(self, header: Header) -> None:
        """Stages that share a weight, and all stages under clipping, must step together."""
        together = [(tie, "a tied weight") for tie in self.ties]
        if self.clip:
            together.append((tuple(range(header.num_stages)), "clipping by the global norm"))
        for stages, why in together:
            counts = [header.updates[stage] for stage in stages]
            if len(set(counts)) > 1:
                raise ScheduleError(
                    f"{header.schedule}: {why} needs stages that step together, but stages {list(stages)} step once in "
                    f"{counts} micro-batches; give them equally many replicas"
                )


def placement_of(depth: int, num_chunks: int, layout: str, replicas: Indices = ()) -> Groups:
    """The ranks of each stage.

    Layouts: "loop" (stage s on position s mod p; linear when there is one chunk), "wave" (down and up again, a V for
    two chunks), "replicas" (one stage, a copy on every rank), or "single" (all stages on one rank).

    >>> placement_of(2, 2, "loop")
    ((0,), (1,), (0,), (1,))
    >>> placement_of(2, 2, "wave")
    ((0,), (1,), (1,), (0,))
    >>> placement_of(2, 1, "loop", (2, 1)), placement_of(2, 1, "loop", (2, 2))
    (((0, 1), (2,)), ((0, 2), (1, 3)))
    """
    if layout == "replicas":
        return (tuple(range(depth)),)
    given = list(replicas)
    if len(given) > 1 and len(given) != depth:
        raise ScheduleError(f"replicas: expected one count per stage ({depth}), got {given}")
    counts = given or [1]
    if len(counts) == 1:
        counts *= depth
    if min(counts) < 1 or max(counts) > MOST_STAGES:
        raise ScheduleError(f"replicas: expected counts from 1 to {MOST_STAGES}, got {given}")
    is_uniform = len(set(counts)) == 1
    if layout == "single":
        if not is_uniform:
            raise ScheduleError(f"replicas: expected the same number for all stages of a rank, got {given}")
        return (tuple(range(counts[0])),) * depth * num_chunks
    positions = []
    start = 0
    for position, count in enumerate(counts):
        if is_uniform:
            ranks = range(position, depth * count, depth)
        else:
            ranks = range(start, start + count)
            start += count
        positions.append(tuple(ranks))
    result: list[Indices] = []
    for lap in range(num_chunks):
        if layout == "wave" and lap % 2 == 1:
            result += reversed(positions)
        else:
            result += positions
    return tuple(result)
