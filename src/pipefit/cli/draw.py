"""`pipefit draw`: a schedule as a picture, a program, or numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pipefit.cli.answer import Answer
from pipefit.cli.options import (
    Backward,
    Forward,
    InputGradient,
    Json,
    Latency,
    WeightGradient,
    check_suffix,
    check_times,
    count,
    flag,
    help_of,
    pairs,
    whole_numbers,
)
from pipefit.cli.pictures import PICTURES, grid_of, save_picture
from pipefit.cli.programs import figures, updates_to_draw, with_rhythm
from pipefit.errors import PipefitError

__all__ = ["command"]

# Beyond this a picture says nothing, and the answer would take minutes.
_MOST_FORWARDS = 500_000


def command(
    schedule: Annotated[str, help_of("Its name; `pipefit schedules` lists them.")],
    /,
    *,
    stages: Annotated[int, help_of("Positions of the pipeline, p.", "--stages", "-p")],
    microbatches: Annotated[
        int,
        help_of(
            "m, per weight update; PipeDream updates after each one, unless --steps is given.", "--microbatches", "-m"
        ),
    ],
    chunks: Annotated[int, help_of("Stages on each rank, v.", "--chunks", "-v")] = 1,
    forward: Forward = 1,
    backward: Backward = None,
    input_gradient: InputGradient = None,
    weight_gradient: WeightGradient = None,
    latency: Latency = 0,
    steps: Annotated[int | None, help_of("Weight updates to draw.")] = None,
    replicas: Annotated[str | None, help_of("Copies of each stage, such as 2,1.")] = None,
    recompute: Annotated[bool, flag("Replay each forward before its backward.")] = False,
    option: Annotated[list[str] | None, help_of("An option of the schedule as NAME=INTEGER; may be repeated.")] = None,
    warmup: Annotated[int | None, help_of("Short for --option warmup=…")] = None,
    group: Annotated[int | None, help_of("Short for --option group=…")] = None,
    output: Annotated[
        Path | None,
        help_of(
            ".svg, .html or .png for a picture, .trace.json for Perfetto, .pipe for the program.", "--output", "-o"
        ),
    ] = None,
    json: Json = False,
) -> Answer:
    """Draw a schedule, or print its numbers.

    Example: pipefit draw 1f1b -p 4 -m 8 -o 1f1b.html

    Without -o the grid is printed.
    """
    from pipefit.cost import unit
    from pipefit.schedules import Shape, find
    from pipefit.simulate import simulate

    check_suffix(output, PICTURES)
    check_times(forward=forward, backward=backward, input=input_gradient, weight=weight_gradient, latency=latency)
    generator = find(schedule)
    _check_size(
        count("-p", stages)
        * count("-m", microbatches)
        * count("-v", chunks)
        * count("--steps", 1 if steps is None else steps)
    )
    per_update, num_steps = updates_to_draw(schedule, microbatches, steps)
    options = [*(option or []), *_shorthands(warmup=warmup, group=group)]
    shape = Shape(
        depth=stages,
        num_microbatches=per_update,
        num_chunks=chunks,
        num_steps=num_steps,
        replicas=whole_numbers("--replicas", replicas),
        recompute=None if recompute else (),
        options=pairs("--option", options),
    )
    program = generator(shape)
    cost = unit(program.header, forward, backward, input=input_gradient, weight=weight_gradient, latency=latency)
    # The papers' pictures: a message leaves when it is sent, however late its receive is posted.
    timeline = simulate(program, cost, rendezvous=False, memory=output is not None)
    data: dict[str, Any] = {}
    if json:
        steady = None if generator.is_synchronous else generator(with_rhythm(shape))
        data = figures(program, timeline, cost, steady)
        data |= {"num_updates": num_steps, "total_microbatches": program.header.total_microbatches}
        if per_update != microbatches:
            # One number for what the user asked for: m mini-batches, and the time they take in the steady state.
            data |= {"num_microbatches": microbatches, "period": data["period"] * num_steps}
    if output:
        save_picture(timeline, output)
        return Answer(data | {"output": str(output)}, f"wrote {output}")
    return Answer(data, lambda: grid_of(timeline))


def _shorthands(**given: int | None) -> list[str]:
    return [f"{name}={value}" for name, value in given.items() if value is not None]


def _check_size(num_forwards: int) -> None:
    if num_forwards > _MOST_FORWARDS:
        raise PipefitError(
            f"{num_forwards:,} forwards are too many to draw: -p × -m × -v × --steps may reach {_MOST_FORWARDS:,}"
        )
