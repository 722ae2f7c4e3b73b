"""`pipefit draw`: a schedule as a picture, a program, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Counts, Figures, Json, Picture, UnitCosts, pairs, verb
from pipefit.cli.programs import check_forwards
from pipefit.errors import PipefitError, ScheduleError, nearest

if TYPE_CHECKING:
    from pipefit.draw.drawing import Drawing


@verb()
def command(
    schedule: str,
    /,
    *,
    stages: Annotated[Count, Parameter(alias="-p")],
    microbatches: Annotated[Count, Parameter(alias="-m")],
    chunks: Annotated[Count, Parameter(alias="-v")] = 1,
    costs: UnitCosts,
    steps: Count | None = None,
    replicas: Counts = (),
    stage_work: Figures = (),
    recompute: bool = False,
    slots: int | None = None,
    optim_slots: int = 1,
    tier: Literal["host", "disk"] = "host",
    prefetch: int | None = None,
    activations: bool = False,
    step_on: Literal["device", "host"] = "device",
    keep: bool = False,
    option: list[str] | None = None,
    warmup: int | None = None,
    group: int | None = None,
    follow: int | None = None,
    output: Picture = None,
    json: Json = False,
) -> Answer:
    """Draw a schedule, or print its numbers.

    Example: pipefit draw 1f1b -p 4 -m 8 -o 1f1b.html

    Without -o the grid is printed.

    Args:
        schedule: Its name; `pipefit schedules` lists them.
        stages: Positions of the pipeline, p.
        microbatches: micro-batches per weight update; PipeDream updates after each one, unless --steps is given.
        chunks: Stages on each rank, v.
        steps: Weight updates to draw.
        replicas: Copies of each stage, such as 2,1.
        stage_work: Cost of each stage in --forward and --backward, such as 2,1.
        follow: Arrows from this micro-batch's forwards and backwards to the weight versions that they use.
        recompute: Replay each forward before its backward.
        slots: Spill all stages, with so many slots on each rank; default: 2 for `spilled`, no spilling for others.
        optim_slots: Slots for optimizer states; 0: these stay.
        tier: Tier of spilled stages.
        prefetch: Fetch a stage so many visits ahead; 0: when it is needed. Default: as soon as a slot is free.
        activations: Inputs of spilled stages wait on the tier too, until their replay.
        step_on: Place of the step of stages on the host.
        keep: Spilled stages keep their activations on the device, and replay nothing.
        option: An option of the schedule as NAME=INTEGER; may be repeated.
        warmup: Short for --option warmup=…
        group: Short for --option group=…
        output: .svg, .html or .png for a picture, .trace.json for Perfetto, .pipe for the program.
    """
    from pipefit.draw.drawing import draw

    short = [f"{name}={value}" for name, value in (("warmup", warmup), ("group", group)) if value is not None]
    options = _options(schedule, pairs("--option", [*(option or []), *short]))
    check_forwards(stages, chunks, microbatches, steps or 1)
    drawing = draw(
        schedule,
        stages,
        microbatches,
        chunks,
        num_steps=steps,
        replicas=replicas,
        stage_work=stage_work,
        recompute=recompute,
        slots=slots,
        optim_slots=optim_slots,
        tier=tier,
        prefetch=prefetch,
        activations=activations,
        step_on=step_on,
        keep=keep,
        **asdict(costs),
        **options,
    )
    if json:
        data = _figures(drawing, microbatches)
    else:
        data = {}
    if follow is not None and (output is None or output.suffix not in (".svg", ".png")):
        raise PipefitError("--follow draws arrows into pictures: give -o with a name that ends in .svg or .png")
    if output:
        drawing.save(output, **({} if follow is None else {"follow": follow}))
    return Answer(data, "" if output else drawing.grid, output=output)


def check_name(words: Sequence[str]) -> None:
    """Refuses an unknown schedule; its name says more about a typo than the options that are missing.

    Raises:
        ScheduleError: the first word is no option, and no schedule.
    """
    from pipefit.schedules import find

    if words and not words[0].startswith("-"):
        find(words[0])


def _figures(drawing: Drawing, num_microbatches: int) -> dict[str, Any]:
    """The figures of a drawing, for the requested micro-batches."""
    header = drawing.program.header
    data = drawing.metrics | {"num_updates": header.num_steps, "total_microbatches": header.total_microbatches}
    if header.num_microbatches != num_microbatches:
        # Mini-batches with an update each: their number, and the time all of them take in the steady state.
        data |= {"num_microbatches": num_microbatches, "period": data["period"] * header.num_steps}
    return data


def _options(schedule: str, given: dict[str, int]) -> dict[str, int]:
    """Checks the options of the schedule: any other would be taken as an argument of the drawing."""
    from pipefit.schedules import find

    known = find(schedule).options
    for name in given:
        if name not in known:
            if known:
                hint = nearest(name, known)
            else:
                hint = "it has no options"
            raise ScheduleError(f"{schedule} has no option {name!r}; {hint}")
    return given
