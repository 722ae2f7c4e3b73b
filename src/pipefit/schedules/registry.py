"""Schedules by name: built-in ones, schedules of other packages, and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack, overload

from pipefit.errors import ScheduleError, look_up
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.passes.build import build
from pipefit.schedules.shape import Shape
from pipefit.spec.arguments import checked

NO_HALVES = (
    "each of the two halves of a backward would replay every layer; use stage or selective, or a schedule of whole "
    "backwards such as 1f1b"
)


@dataclass(frozen=True)
class Task:
    """The input of an order function: a header to read, and the micro-batches to cover.

    A synchronous schedule is asked once for each step; an asynchronous one for the whole program.
    """

    header: Header
    span: range
    depth: int
    options: dict[str, int]

    @property
    def num_ranks(self) -> int:
        """Number of ranks that need an order."""
        return self.header.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.header.num_stages

    def stages_of(self, rank: int) -> Indices:
        """The stages of a rank, starting from the input."""
        return self.header.stages_of(rank)

    def microbatches_of(self, stage: int, rank: int) -> list[int]:
        """The micro-batches of the span that a rank runs for a stage."""
        return [mb for mb in self.header.microbatches_of(stage, rank) if mb in self.span]

    def one_stage_each(self) -> Iterator[tuple[int, list[int]]]:
        """The stage of each rank, where a rank has one, and the rank's micro-batches."""
        for rank in range(self.num_ranks):
            (stage,) = self.stages_of(rank)
            yield stage, self.microbatches_of(stage, rank)


Orders = Iterator[list[Instruction]]
"""The forwards and backwards of each rank."""

Order = Callable[[Task], Iterable[Iterable[Instruction]]]
Ahead = Callable[[int, int, int, int], Indices]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A named generator: a callable from a `Shape` to a `Program`. Each is equal to itself only.

    Attributes:
        name: the name by which users request it.
        order: the forwards and backwards of each rank.
        weights: its rule for weight versions.
        layout: placement of stages on ranks; see `placement_of`.
        chunks: whether it supports several stages per rank.
        options: its integer options and their defaults.
        check: raises ScheduleError for a shape that it does not support.
        ahead: the forwards of each stage of a rank before its first backward, from depth, micro-batches, chunks and
            rank, with the usual options; at most as many backwards follow its last forward, and with one stage never
            more are in flight. None: only the program shows them, so that bounds of times are weaker.
        flushes: whether the ranks are idle at the end of an update, so that little is lost when they all meet there.
        spills: whether it is made for stages on the host or on disk. It then spills all of them, and replays forwards
            except of stages that keep their saved tensors, unless the shape gives other settings.
    """

    name: str
    order: Order
    weights: WeightRule = WeightRule.FLUSH
    layout: str = "loop"
    chunks: bool = False
    options: dict[str, int] = field(default_factory=dict)
    check: Callable[[Shape], None] | None = None
    ahead: Ahead | None = None
    flushes: bool = True
    spills: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Returns whether every micro-batch of an update uses the weights the update starts from."""
        return self.weights is WeightRule.FLUSH

    @property
    def summary(self) -> str:
        """One line about it."""
        return (self.order.__doc__ or self.name).strip().splitlines()[0]

    def __call__(self, shape: Shape) -> Program:
        """The program of a shape.

        Raises:
            ScheduleError: the shape is not supported; the message names the nearest supported one.
        """
        for option, value in sorted(shape.options.items()):
            look_up(option, self.options, f"{self.name} has no option", ScheduleError)
            if value < 0:
                raise ScheduleError(f"{self.name}: {option}: expected a whole number of at least 0, got {value!r}")
        if shape.num_chunks > 1 and not self.chunks:
            raise ScheduleError(
                f"{self.name} has one stage per rank, got {shape.num_chunks} chunks; use interleaved or breadth-first"
            )
        if self.check:
            self.check(shape)
        header = shape.header(self.name, self.layout, self.weights, self.spills)
        self._refuse_placement(header)
        span = range(header.total_microbatches)
        size = len(span)
        if self.is_synchronous:
            size = shape.num_microbatches
        options = {**self.options, **shape.options}
        ranks: list[list[Instruction]] = [[] for _ in range(header.num_ranks)]
        for start in span[::size]:
            task = Task(header, span[start : start + size], shape.depth, options)
            order = list(self.order(task))
            for rank, listed in enumerate(ranks):
                listed += order[rank]
        self._refuse_inside(header, ranks, shape.inside)
        recompute = shape.recompute
        if self.spills and header.spill and recompute == ():
            keeps = header.spill.keeps
            recompute = tuple(stage for stage in range(header.num_stages) if stage not in keeps)
        return build(header, ranks, recompute=recompute, ahead=shape.ahead, prefetch=shape.prefetch)

    def _refuse_inside(self, header: Header, ranks: list[list[Instruction]], inside: dict[int, str]) -> None:
        """Each half of a backward would replay all layers; tensors of stages that come and go cannot be kept so."""
        for stage, kind in inside.items():
            if header.is_spilled(stage):
                raise ScheduleError(f"recompute {kind}: stage {stage} is spilled; use stage (or none, and keep) there")
            halves = [i for listed in ranks for i in listed if i.op is Op.BWD_INPUT and i.stage == stage]
            if kind == "layer" and halves:
                raise ScheduleError(f"{self.name}: recompute layer: {NO_HALVES}")

    def _refuse_placement(self, header: Header) -> None:
        most = 1
        expected = "one stage"
        if self.chunks:
            most = header.num_stages
            expected = "at least one stage"
        for rank in range(header.num_ranks):
            stages = header.stages_of(rank)
            if not 1 <= len(stages) <= most:
                raise ScheduleError(
                    f"{self.name}: placement: expected {expected} on every rank from 0 on, "
                    f"rank {rank} has {list(stages)}"
                )


REGISTRY: dict[str, Schedule] = {}


class Facts(TypedDict, total=False):
    """The arguments of `schedule`: a name, and the attributes of a `Schedule`."""

    name: str
    weights: WeightRule | str
    layout: Literal["loop", "wave", "replicas", "single"]
    chunks: bool
    options: dict[str, int]
    check: Callable[[Shape], None]
    ahead: Ahead
    flushes: bool
    spills: bool


@overload
def schedule(order: Order) -> Schedule: ...


@overload
def schedule(**facts: Unpack[Facts]) -> Callable[[Order], Schedule]: ...


@checked()
def schedule(order: Order | None = None, **facts: Unpack[Facts]) -> Callable[[Order], Schedule] | Schedule:
    """Registers a schedule: a function from a `Task` to each rank's list of forwards and backwards.

    Loads, losses, weight versions, optimizer steps, reductions and messages are added by passes; proof, simulation,
    picture and run need no further code.

    >>> from pipefit.ir import bwd, fwd
    >>> @schedule
    ... def one_by_one(task):
    ...     "One micro-batch at a time."
    ...     for rank in range(task.num_ranks):
    ...         yield [op(rank, mb) for mb in task.span for op in (fwd, bwd)]
    >>> one_by_one(Shape(depth=2, num_microbatches=2)).order
    (('F0.0', 'B0.0', 'F0.1', 'B0.1'), ('F1.0', 'B1.0', 'F1.1', 'B1.1'))
    >>> del REGISTRY["one-by-one"]  # the name is free again
    """

    def register(function: Order) -> Schedule:
        own = {"name": getattr(function, "__name__", "schedule").replace("_", "-"), "weights": "flush"} | facts
        own["weights"] = look_up(own["weights"], {rule.value: rule for rule in WeightRule}, "unknown rule of weights")
        made = Schedule(order=function, **own)
        REGISTRY[made.name] = made
        return made

    if order is None:
        return register
    return register(order)
