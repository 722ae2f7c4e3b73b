"""Program: the instructions of every rank in order; the one object that is proved, simulated, drawn and run."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import msgspec

from pipefit.errors import ScheduleError, check_figures
from pipefit.ir.instruction import Groups, Indices, Instruction, StageAt
from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.ir.spill import Spill
from pipefit.spec.plan import COMING_AND_GOING, SHARDS, Shard

T = TypeVar("T")

MOST_STAGES = 4096
"""Most stages, and most ranks, of a program from a file."""

MOST_FORWARDS = 500_000
"""Most forwards of a program from a file or a drawing: beyond this an answer takes minutes."""


class WeightRule(enum.StrEnum):
    """The version of a stage's weights that a micro-batch uses. Micro-batches and updates count from 0.

    FLUSH: the version its own update starts from: synchronous training.
    STASH: the newest version on its rank when its forward starts; its backward uses the same (PipeDream).
    VERTICAL: the version the first trained stage had when the micro-batch entered it, at every stage (PipeDream,
        vertical sync).
    DOUBLE: max(update − 1, 0): one update behind, never more than two versions (PipeDream-2BW).
    """

    FLUSH = "flush"
    STASH = "stash"
    VERTICAL = "vertical-sync"
    DOUBLE = "double-buffered"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The claims of a program about itself, which the verifier checks.

    Attributes:
        schedule: the generator's name.
        placement: `placement[s][i]` is the rank of replica i of stage s; micro-batch k goes to replica k mod R_s, or to
            one by `shares`.
        num_microbatches: per weight update of a synchronous schedule, over all replicas.
        num_steps: number of updates in the program, in units of `num_microbatches`.
        weights: the rule for weight versions.
        updates: micro-batches per update, for each stage (over all its replicas).
        ties: groups of stages that share a weight.
        clip: the norm of all gradients is known before each step, to clip them or to skip an update that is not finite.
        commit: all ranks meet when their gradients are complete, before any of them steps: a step is made by all that
            are left, or by none.
        shard: what the replicas of a stage share. "optimizer": each steps a part of the weights, and the new parts are
            gathered; "gradients": whole gradients are also freed once each replica has the sum of its part; "weights":
            whole weights are also gathered before they are used, and freed after.
        shard_slots: stages of a rank whose whole gradients (and weights, where these are shared) are there at once.
        tensor: processes that share each rank's stages by tensor parallelism; all of them run the rank's list.
        pieces: messages are split over these processes: each sends its part, the receiver gathers (scatter/gather).
        spill: stages that are kept on another tier (None: all stay on their device).
        frozen: number of stages at the beginning in which nothing trains: they have forwards only. The last stage, with
            the loss, never counts.
        shares: micro-batches of each replica per weight update, where replicas of unequal speed take unequal parts;
            (): round-robin.
    """

    schedule: str
    placement: Groups
    num_microbatches: int
    num_steps: int
    weights: WeightRule
    updates: Indices
    ties: Groups = ()
    clip: bool = False
    commit: bool = False
    shard: Shard = "none"
    shard_slots: int = 2
    tensor: int = 1
    pieces: bool = False
    spill: Spill | None = None
    frozen: int = 0
    shares: Indices = ()

    def __post_init__(self) -> None:
        placement = self.placement
        ties = self.ties
        num_stages = len(placement)
        if not placement or not all(ranks and _are_distinct(ranks) for ranks in placement):
            raise ScheduleError(f"placement: every stage needs distinct ranks, got {placement}")
        check_figures(self, ScheduleError, num_microbatches=1, num_steps=1, shard_slots=1)
        if not self.schedule.isprintable():
            raise ScheduleError(f"schedule: expected a name that prints, got {self.schedule!r}")
        if self.tensor < 1 or (self.pieces and self.tensor == 1):
            raise ScheduleError(
                f"tensor: expected at least 1, and at least 2 where values travel in pieces; got {self.tensor}"
            )
        if len(self.updates) != num_stages or min(self.updates) < 1:
            raise ScheduleError(f"updates: expected one count ≥ 1 for each of {num_stages} stages, got {self.updates}")
        if any(not 0 <= stage < num_stages for tie in ties for stage in tie):
            raise ScheduleError(f"ties: no such stage in {ties}")
        if any(len(tie) < 2 or not _are_distinct(tie) for tie in ties):
            raise ScheduleError(f"ties: a group needs at least two distinct stages, got {ties}")
        if not _are_distinct([tie[0] for tie in ties]):
            raise ScheduleError(f"ties: a group is known by its first stage, so no two may begin alike, got {ties}")
        self._check_shard()
        self._check_commit()
        if self.spill:
            spilled = self.spill.stages
            if not 0 <= spilled[0] <= spilled[-1] < num_stages:
                raise ScheduleError(f"spill: no such stage in {spilled}")
        if not 0 <= self.frozen < num_stages:
            raise ScheduleError(
                f"frozen: expected fewer than the {num_stages} stages (the last one has the loss), got {self.frozen}"
            )
        if self.shares:
            self._check_shares()
        if any(min(tie) < self.frozen for tie in ties):
            raise ScheduleError(
                f"ties: a weight that stages share trains, but stages below {self.frozen} are frozen, got {ties}"
            )

    def _check_shares(self) -> None:
        if self.weights is not WeightRule.FLUSH:
            raise ScheduleError(
                f"shares: {self.schedule} updates without a flush, so its replicas take micro-batches in turn; use a "
                "schedule that flushes, such as 1f1b"
            )
        if self.shard in COMING_AND_GOING:
            raise ScheduleError(
                f'shares: replicas that share their {self.shard} take equally many micro-batches; use shard="optimizer"'
            )
        copies = {len(ranks) for ranks in self.placement}
        adds_up = sum(self.shares) == self.num_microbatches
        is_for_all = copies == {len(self.shares)}
        if min(self.shares) < 1 or not adds_up or not is_for_all:
            raise ScheduleError(
                f"shares: expected micro-batches of each of {max(copies)} replicas, as many at every stage: numbers of "
                f"at least 1 that add up to {self.num_microbatches}, got {list(self.shares)}"
            )

    def _check_shard(self) -> None:
        if self.shard not in SHARDS:
            known = ", ".join(SHARDS)
            raise ScheduleError(f"shard: expected one of {known}, got {self.shard!r}")
        if self.shard not in COMING_AND_GOING:
            return
        if self.weights is not WeightRule.FLUSH:
            raise ScheduleError(
                f"{self.schedule}: {self.shard} are shared only where updates wait for each other; this schedule "
                'keeps several versions of the weights: use a synchronous one, or shard="optimizer"'
            )
        if self.spill:
            raise ScheduleError(
                f"{self.schedule}: a stage that is kept on another tier cannot share its {self.shard} too; "
                "spill it, or share them with its copies"
            )

    def _check_commit(self) -> None:
        if not self.commit:
            return
        if self.weights is not WeightRule.FLUSH or self.num_steps > 1:
            raise ScheduleError(f"{self.schedule}: a program that commits its step has one, with a flush")
        if self.shard != "none" or self.spill:
            raise ScheduleError(
                f"{self.schedule}: after the barrier that commits a step no rank needs another one; stages that are "
                "spilled, or share something with their copies, do"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return 1 + max(rank for ranks in self.placement for rank in ranks)

    @property
    def num_processes(self) -> int:
        """Number of processes that run it: process t·rank + j is the j-th of the t that share a rank."""
        return self.num_ranks * self.tensor

    @property
    def num_chunks(self) -> int:
        """Maximum number of stages on one rank."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    @cached_property
    def _spilled(self) -> frozenset[int]:
        if self.spill is None:
            return frozenset()
        return frozenset(self.spill.stages)

    def is_spilled(self, stage: int) -> bool:
        """Returns whether a stage is kept on another tier and fetched when it is needed."""
        return stage in self._spilled

    def is_optim_spilled(self, stage: int) -> bool:
        """Returns whether the optimizer's states of a stage are fetched and evicted too."""
        if self.spill is None or not self.spill.optim_slots:
            return False
        return self.is_spilled(stage) and not self.steps_on_host(stage)

    def steps_on_host(self, stage: int) -> bool:
        """Returns whether a stage steps on the host, where its weights and its optimizer's states are."""
        return self.spill is not None and stage in self.spill.on_host

    def keeps_states(self, stage: int) -> bool:
        """Returns whether the optimizer's states of a stage stay on its device."""
        return not self.is_optim_spilled(stage) and not self.steps_on_host(stage)

    @property
    def moves_values(self) -> bool:
        """Returns whether weights or gradients of some stages come and go, on another tier or among their replicas."""
        return self.spill is not None or self.shard in COMING_AND_GOING

    def is_sharded(self, stage: int) -> bool:
        """Returns whether each replica of a stage steps a part of its weights."""
        return self.shard != "none" and len(self.placement[stage]) > 1

    def is_resident(self, stage: int) -> bool:
        """Returns whether whole weights of a stage are on each of its ranks when a program starts, and when it ends."""
        return not (self.is_spilled(stage) or self.shares_weights(stage))

    def shares_gradients(self, stage: int) -> bool:
        """Returns whether each replica of a stage keeps only its part of the summed gradients."""
        return self.shard in COMING_AND_GOING and len(self.placement[stage]) > 1

    def shares_weights(self, stage: int) -> bool:
        """Returns whether each replica of a stage keeps only its part of the weights."""
        return self.shard == "weights" and len(self.placement[stage]) > 1

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of the whole program."""
        return self.num_microbatches * self.num_steps

    @property
    def last_stage(self) -> int:
        """The stage that has the loss."""
        return len(self.placement) - 1

    def rank_of(self, stage: int, mb: int) -> int:
        """The rank that runs a stage for a micro-batch: round-robin, or by the shares of the replicas."""
        ranks = self.placement[stage]
        if self.shares:
            return ranks[self._turns[mb % len(self._turns)]]
        return ranks[mb % len(ranks)]

    @cached_property
    def _turns(self) -> Indices:
        """The replica of each micro-batch of an update: those of each replica are spread evenly.

        >>> Header("1f1b", ((0, 1),), 4, 1, WeightRule.FLUSH, (4,), shares=(3, 1))._turns
        (0, 0, 0, 1)
        """
        places = []
        for replica, share in enumerate(self.shares):
            places += [((index + 1) / share, replica) for index in range(share)]
        places.sort()
        return tuple(replica for _, replica in places)

    def stages_of(self, rank: int) -> Indices:
        """The stages of a rank, starting from the input."""
        return self._stages_by_rank.get(rank, ())

    @cached_property
    def _stages_by_rank(self) -> dict[int, Indices]:
        found: dict[int, Indices] = {}
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                found[rank] = (*found.get(rank, ()), stage)
        return found

    def update_of(self, stage: int, mb: int) -> int:
        """The index of the update that a micro-batch's gradient belongs to, at a stage."""
        return mb // self.updates[stage]

    def num_updates(self, stage: int) -> int:
        """Number of updates that the stage makes in the program; an incomplete last one counts too. Frozen: none."""
        if stage < self.frozen:
            return 0
        return -(-self.total_microbatches // self.updates[stage])

    def microbatches_of(self, stage: int, rank: int) -> Sequence[int]:
        """The micro-batches that a rank runs for a stage, in order."""
        ranks = self.placement[stage]
        if self.shares:
            return [mb for mb in range(self.total_microbatches) if self.rank_of(stage, mb) == rank]
        return range(ranks.index(rank), self.total_microbatches, len(ranks))


def _are_distinct(numbers: Sequence[int]) -> bool:
    return len(set(numbers)) == len(numbers)


def check_size(header: Header) -> None:
    """Refuses the header of a program that is too large to be read or made for a user's file.

    Raises:
        ScheduleError: with the limit.
    """
    forwards = header.num_stages * header.total_microbatches
    counts = [
        ("stages", header.num_stages, MOST_STAGES),
        ("ranks", header.num_ranks, MOST_STAGES),
        ("forwards", forwards, MOST_FORWARDS),
    ]
    for noun, count, limit in counts:
        if count > limit:
            raise ScheduleError(f"{count:,} {noun} are too many: a program may have {limit:,}")


class Program(msgspec.Struct, frozen=True, dict=True):
    """A header and, for each rank, the instructions it issues in order.

    An instruction of the compute lane waits for the values it needs, runs, and only then does the rank issue the
    next one. Instructions of the other lanes are issued and complete asynchronously: a `recv` posts a buffer, a
    `send` or `reduce` starts a transfer, and an instruction that needs the value waits for it.
    """

    header: Header
    ranks: tuple[tuple[Instruction, ...], ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranks))

    def __iter__(self) -> Iterator[tuple[int, int, Instruction]]:
        for rank, instructions in enumerate(self.ranks):
            for index, instruction in enumerate(instructions):
                yield rank, index, instruction

    def once(self, key: object, make: Callable[[], T]) -> T:
        """A result that follows from the program; it is made at its first use and kept with the program."""
        known = self.__dict__.setdefault("_known", {})
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    @cached_property
    def recomputed(self) -> frozenset[StageAt]:
        """The (stage, micro-batch) pairs whose forward saves nothing because a recompute follows."""
        replay = Op.RECOMPUTE
        return frozenset((i.stage, i.mb) for _, _, i in self if i.op is replay)

    @property
    def order(self) -> tuple[tuple[str, ...], ...]:
        """The compute instructions of each rank in short form: "F0.3" is the forward of stage 0 on micro-batch 3."""
        return tuple(tuple(i.short for i in instructions if i.op in COMPUTE_OPS) for instructions in self.ranks)

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the program: ranks compare it before they start."""
        encoder = msgspec.msgpack.Encoder()
        return hashlib.sha256(encoder.encode(self)).hexdigest()[:16]

    def with_ranks(self, ranks: list[list[Instruction]]) -> Program:
        """A program with this header and other instructions."""
        return Program(self.header, tuple(map(tuple, ranks)))
