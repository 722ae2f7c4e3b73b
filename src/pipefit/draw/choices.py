"""The other drawings of a page: the same schedule in other shapes, other schedules in its shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from pipefit.cost import CostModel
from pipefit.draw.caption import title_of
from pipefit.draw.draw_options import DrawOptions
from pipefit.draw.scene import Facts
from pipefit.draw.shelf import MICROBATCHES, STAGES, on_shelf
from pipefit.errors import PlanError, ScheduleError
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.spill import Spill
from pipefit.schedules import Schedule, Shape, find, names
from pipefit.simulate import simulate
from pipefit.timeline import Timeline

_DOUBLE_UPDATES = 3  # the first two of double buffering only fill it
_MOST_FORWARDS = 1000  # of all drawings made for the choices of a page: a tenth of a second
_COPIES_COST = 3  # the factor by which a drawing takes longer with copies and replays
Pricing = Callable[[Header], CostModel]


class Wish(NamedTuple):
    """A drawing to offer: its schedule and shape; 0 slots: nothing spills."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    slots: int = 0


def others(facts: Facts, pricing: Pricing, how: DrawOptions | None, is_lecture: bool) -> list[tuple[str, Timeline]]:
    """The drawings of a page in addition to its first one and the shelf's, as many as take no noticeable time.

    Args:
        facts: of the drawing.
        pricing: the costs of other programs.
        how: options of spilling; None: no stage spills.
        is_lecture: whether it has the costs of the shelf.
    """
    if how is None:
        wishes = _plain(facts, is_lecture)
    elif find(facts.schedule).spills:
        wishes = _one_device(facts)
    else:
        wishes = _spilled_pipelines(facts)
    found = []
    left = _MOST_FORWARDS
    for wish in dict.fromkeys(wishes):
        cost = wish.stages * wish.microbatches * wish.chunks
        if wish.slots:
            cost *= _COPIES_COST
        if cost > left:
            continue
        left -= cost
        drawing = drawn(wish, pricing, how or DrawOptions())
        if drawing:
            found.append(drawing)
    return found


def _plain(facts: Facts, is_lecture: bool) -> Iterator[Wish]:
    """The other schedules in the drawing's shape; then, where its costs are not those of the shelf, other shapes."""
    shape = facts.depth, facts.num_microbatches, facts.num_chunks
    chunks = sorted({1, facts.num_chunks}, reverse=True)
    for name, several in product(over_ranks(), chunks):
        if not (is_lecture and on_shelf(*shape[:2], several)):
            yield Wish(name, *shape[:2], several)
    if not is_lecture:
        for other in product(STAGES, MICROBATCHES, chunks):
            if other != shape:
                yield Wish(facts.schedule, *other)


def _one_device(facts: Facts) -> Iterator[Wish]:
    """Other numbers of slots, then of micro-batches and of stages, the nearest shapes first."""
    own = (facts.num_stages, facts.num_microbatches)

    def distance(shape: tuple[int, int]) -> float:
        stages, microbatches = shape
        return abs(math.log2(stages / own[0])) + abs(math.log2(microbatches / own[1]))

    near = sorted(product((2, 4, 8, 16), (1, 2, 4, 8, 16)), key=distance)
    for (stages, microbatches), slots in product([own, *near], (1, 2, 3)):
        yield Wish(facts.schedule, stages, microbatches, 1, slots)


def _spilled_pipelines(facts: Facts) -> Iterator[Wish]:
    """Other numbers of slots, none among them; then other schedules, then other shapes."""
    shape = facts.depth, facts.num_microbatches, facts.num_chunks
    for slots in (0, *range(1, facts.num_chunks + 1)):
        yield Wish(facts.schedule, *shape, slots)
    for name, slots in product(over_ranks(), (facts.slots, 0)):
        made = find(name)
        chunks = 1
        if made.chunks:
            chunks = facts.num_chunks
        if made.is_synchronous and name != facts.schedule:
            yield Wish(name, *shape[:2], chunks, slots)
    for stages, count in product(STAGES, MICROBATCHES):
        yield Wish(facts.schedule, stages, count, facts.num_chunks, facts.slots)


def drawn(wish: Wish, pricing: Pricing, how: DrawOptions) -> tuple[str, Timeline] | None:
    """The drawing of a wish; None where the shape is not supported."""
    try:
        made = find(wish.name)
        per_update, steps = updates_of(made, wish.microbatches, None)
        shape = Shape(wish.stages, per_update, wish.chunks, steps)
        if wish.slots:
            shape = spilled(made, shape, wish.slots, how)
        program = made(shape)
        cost = pricing(program.header)
    except (PlanError, ScheduleError):  # PlanError: costs that stand for another number of stages
        return None
    return title_of(wish.name), simulated(program, cost, memory=False)


def spilled(made: Schedule, shape: Shape, slots: int, how: DrawOptions) -> Shape:
    """A shape with all stages on another tier, and so many slots on each rank."""
    num_stages = made(shape).header.num_stages
    every = tuple(range(num_stages))
    spill = Spill.of(num_stages, slots, how.optim_slots, how.tier, how.activations)
    if how.step_on == "host":
        spill = replace(spill, optim_slots=0, on_host=every)
    if how.keep:
        spill = replace(spill, keeps=every)
    return replace(shape, spill=spill, prefetch=how.prefetch)


def over_ranks() -> list[str]:
    """All schedules over ranks; the two baselines of pipelines come last."""
    found = [name for name in names() if not find(name).spills]
    return sorted(found, key=lambda name: name in ("naive", "data-parallel"))


def simulated(program: Program, cost: CostModel, memory: bool) -> Timeline:
    """Simulates as in the papers' pictures: a message starts when it is sent, even if its receive is posted later."""
    return simulate(program, cost, rendezvous=False, memory=memory)


def updates_of(schedule: Schedule, num_microbatches: int, num_steps: int | None) -> tuple[int, int]:
    """Micro-batches per update, and updates: within one update no asynchronous schedule would show its versions."""
    if num_steps is not None:
        return num_microbatches, num_steps
    if schedule.weights in (WeightRule.STASH, WeightRule.VERTICAL):
        return 1, num_microbatches
    if schedule.weights is WeightRule.DOUBLE:
        return num_microbatches, _DOUBLE_UPDATES
    return num_microbatches, 1
