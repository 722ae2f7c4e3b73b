"""`pipefit draw`: a schedule as a picture, a program, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

from pipefit.cli.answer import Answer, Text
from pipefit.cli.options import Count, Json, Pairs, Picture, verb
from pipefit.cli.programs import check_forwards
from pipefit.draw.draw_options import DrawOptions
from pipefit.errors import PipefitError
from pipefit.spec.files import JsonObject

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
    asked: DrawOptions,
    option: Pairs | None = None,
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
        follow: Arrows from this micro-batch's forwards and backwards to the weight versions that they use.
        option: An option of the schedule as NAME=INTEGER; may be repeated.
        output: .svg, .html or .png for a picture, .trace.json for Perfetto, .pipe for the program.
    """
    from pipefit.draw.drawing import drawing_by

    given = cast(Any, option or {})
    check_forwards(stages, chunks, microbatches, asked.num_steps or 1)
    drawing = drawing_by(schedule, stages, microbatches, chunks, asked, given)
    if follow is not None and (output is None or output.suffix not in (".svg", ".png")):
        raise PipefitError("--follow draws arrows into pictures: give -o with a name that ends in .svg or .png")
    text: Text = drawing.grid
    if output is not None:
        text = ""
        arrows = {}
        if follow is not None:
            arrows["follow"] = follow
        drawing.save(output, **arrows)
    data = {}
    if json:
        data = _figures(drawing, microbatches)
    return Answer(data, text, output=output)


def check_name(words: Sequence[str]) -> None:
    """Refuses an unknown schedule; its name says more about a typo than the options that are missing.

    Raises:
        ScheduleError: the first word is no option, and no schedule.
    """
    from pipefit.schedules import find

    if words and not words[0].startswith("-"):
        find(words[0])


def _figures(drawing: Drawing, num_microbatches: int) -> JsonObject:
    """The figures of a drawing, for the requested micro-batches."""
    header = drawing.program.header
    data = drawing.metrics | {"num_updates": header.num_steps, "total_microbatches": header.total_microbatches}
    if header.num_microbatches != num_microbatches:
        # Mini-batches with an update each: their number, and the time all of them take in the steady state.
        data |= {"num_microbatches": num_microbatches, "period": data["period"] * header.num_steps}
    return data
