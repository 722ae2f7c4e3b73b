"""A drawn schedule: an object with a notebook display, a printed grid, and pictures in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pipefit.cost import CostModel, unit, weighted
from pipefit.draw.caption import title_of
from pipefit.draw.choices import Pricing, others, simulated, spilled, updates_of
from pipefit.draw.draw_options import DrawOptions
from pipefit.draw.grid import grid
from pipefit.draw.page import html
from pipefit.draw.save import save
from pipefit.draw.scene import scene_of
from pipefit.draw.shelf import shelf
from pipefit.draw.svg import svg
from pipefit.ir.instruction import Indices
from pipefit.ir.program import Header, Program
from pipefit.schedules import Schedule, Shape, find
from pipefit.simulate import metrics
from pipefit.spec.arguments import checked
from pipefit.spec.files import JsonObject, write_atomically
from pipefit.spec.options import with_fields
from pipefit.timeline import Timeline

_RHYTHM = 8  # updates, and depths of micro-batches, after which a schedule without flush is certainly steady


@dataclass(frozen=True)
class Drawing:
    """A simulated schedule. Notebooks display it; `print` gives its grid.

    Attributes:
        timeline: the schedule's times.
        cost: the costs of its simulation.
        steady: the same schedule with enough updates for a steady state, where one pass does not give its period.
        pricing: the costs for other programs, for the page's choices.
        how: options of spilling; None: no stage spills.
    """

    timeline: Timeline
    cost: CostModel
    pricing: Pricing
    steady: Program | None = None
    how: DrawOptions | None = None

    @property
    def program(self) -> Program:
        """The program of the timeline."""
        return self.timeline.program

    @cached_property
    def metrics(self) -> JsonObject:
        """The figures of the drawing, as `pipefit draw --json` prints them."""
        return metrics(self.program, self.timeline, self.cost, steady=self.steady)

    def grid(self, width: int | None = None, color: bool | None = None) -> str:
        """The grid for a terminal; see `pipefit.draw.grid`."""
        return grid(self.timeline, width, color)

    def svg(self, **options: Any) -> str:
        """The vector picture; options as for `pipefit.draw.svg`."""
        return svg(self.timeline, **options)

    def html(self, **options: Any) -> str:
        """The interactive page, also with schedules and shapes around this one, at the same costs.

        Args:
            options: the options of `pipefit.draw.html`.
        """
        shape = _shape_key(self.timeline)
        facts = scene_of(self.timeline).facts
        near = []
        if not self._is_mixed:
            offered = others(facts, self.pricing, self.how, self._is_lecture)
            near = [(name, timeline) for name, timeline in offered if _shape_key(timeline) != shape]
            if self._is_lecture and self.how is None:
                options.setdefault("more", shelf())
        options.setdefault("compare", False)
        own = (title_of(self.program.header.schedule), self.timeline)
        return html([own, *near], **options)

    @property
    def _is_mixed(self) -> bool:
        """Returns whether it has replays, or stages that differ in tier or place of step: no other drawing has."""
        header = self.program.header
        if header.spill is None:
            return bool(self.program.recomputed)
        return len(header.spill.stages) < header.num_stages or bool(header.spill.on_host)

    @property
    def _is_lecture(self) -> bool:
        """Returns whether it has the costs of the precomputed drawings."""
        return self.cost == unit(self.program.header, 1, 2)

    def save(self, path: str | Path, **options: Any) -> Path:
        """Writes the drawing; its kind is the suffix of the path, as for `pipefit.draw.save`."""
        if str(path).endswith(".html"):
            return write_atomically(path, self.html(**options))
        return save(self.timeline, path, **options)

    def __str__(self) -> str:
        return self.grid().rstrip("\n")

    def __repr__(self) -> str:
        header = self.program.header
        return f"<Drawing of {header.schedule}: {header.num_ranks} ranks, {header.total_microbatches} micro-batches>"

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'


@checked()
def draw(
    schedule: str | Schedule, num_stages: int, num_microbatches: int, num_chunks: int = 1, **options: Any
) -> Drawing:
    """Draws a schedule under unit costs: the time of a rank per micro-batch, over all its chunks.

    >>> drawing = draw("1f1b", num_stages=4, num_microbatches=8)
    >>> drawing.metrics["makespan"], drawing.metrics["peak_inflight"]
    (33.0, [4.0, 3.0, 2.0, 1.0])

    Args:
        schedule: its name, or the schedule itself.
        num_stages: p, the ranks of the pipeline.
        num_microbatches: m, per weight update. PipeDream's are mini-batches with an update each, unless `num_steps` is
            given.
        num_chunks: v, stages of each rank.
        options: fields of `DrawOptions`, and integers of the schedule, such as `warmup=2`.

    Raises:
        ScheduleError: no such schedule, or a shape that it does not support.
        PlanError: the costs contradict each other.
    """
    own = {one.name: options.pop(one.name) for one in fields(DrawOptions) if one.name in options}
    return drawing_by(schedule, num_stages, num_microbatches, num_chunks, DrawOptions(**own), options)


def drawing_by(
    schedule: str | Schedule,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    asked: DrawOptions,
    options: Mapping[str, int],
) -> Drawing:
    """The drawing of a schedule; see `draw`.

    Args:
        schedule: its name, or the schedule itself.
        num_stages: p.
        num_microbatches: m.
        num_chunks: v.
        asked: how it is drawn.
        options: integers of the schedule.
    """
    made = schedule
    if isinstance(made, str):
        made = find(made)
    per_update, steps = updates_of(made, num_microbatches, asked.num_steps)
    shape = Shape(
        depth=num_stages,
        num_microbatches=per_update,
        num_chunks=num_chunks,
        num_steps=steps,
        replicas=tuple(asked.replicas),
        shard=asked.shard,
        recompute=_replayed(asked.recompute),
        options=dict(options),
    )
    how = None
    slots = asked.slots
    if slots is None and made.spills:
        slots = 2
    if slots is not None:
        how = asked
        shape = spilled(made, shape, slots, how)

    def pricing(header: Header) -> CostModel:
        # The costs are for one copy of a stage.
        share = header.num_stages / header.num_chunks / header.num_ranks
        return weighted(asked.model(header), [share * work for work in asked.stage_work])

    program = made(shape)
    cost = pricing(program.header)
    steady = None
    if not made.is_synchronous:
        steady = made(_long(shape))
    return Drawing(
        timeline=simulated(program, cost, memory=True),
        cost=cost,
        pricing=pricing,
        steady=steady,
        how=how,
    )


def drawing_of(program: Program) -> Drawing:
    """The picture of a program under unit costs: a forward takes 1, a backward 2; see `draw`."""
    pricing = partial(unit, forward=1, backward=2)
    cost = pricing(program.header)
    spill = program.header.spill
    how = None
    if spill:
        names = ("optim_slots", "tier", "activations")
        how = with_fields(DrawOptions, {name: getattr(spill, name) for name in names} | {"keep": bool(spill.keeps)})
    return Drawing(simulated(program, cost, memory=True), cost, pricing, how=how)


def _long(shape: Shape) -> Shape:
    needed = -(-_RHYTHM * shape.depth // shape.num_microbatches)
    return replace(shape, num_steps=max(shape.num_steps, needed, _RHYTHM))


def _shape_key(timeline: Timeline) -> tuple[object, ...]:
    header = timeline.program.header
    return header.schedule, header.placement, header.num_microbatches, header.num_steps, header.spill


def _replayed(recompute: bool | Sequence[int]) -> Indices | None:
    """The stages that replay; None: all."""
    if isinstance(recompute, bool):
        if recompute:
            return None
        return ()
    return tuple(recompute)
