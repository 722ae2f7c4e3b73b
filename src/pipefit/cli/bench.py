"""`pipefit bench`: overhead of the executor and accuracy of predictions on this machine."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Counts, Json, verb
from pipefit.errors import PipefitError, nearest
from pipefit.units import columns

_ABOUT: Final = {
    "lean": "overhead of the executor: µs per micro-batch and stage, next to torch's schedules and a bare loop",
    "prediction": "measured next to predicted for every schedule, each rank on a core of its own",
}


@verb()
def command(
    name: Annotated[str | None, Parameter(help="Which; without one, a list.")] = None,
    *,
    repeats: Count | None = None,
    microbatches: Annotated[Counts, "-m"] = (),
    json: Json = False,
) -> Answer:
    """Measure pipefit itself on this machine.

    Example: pipefit bench lean

    Ranks share this machine with whatever else runs on it: compare figures of one run with each other.

    Args:
        repeats: Repetitions, alternating; default: the benchmark's own.
        microbatches: Numbers of micro-batches per update; lean takes the first.
    """
    if name is None:
        return Answer({"benchmarks": _ABOUT}, "\n".join(columns(list(_ABOUT.items()))))
    if name not in _ABOUT:
        raise PipefitError(f"unknown benchmark {name!r}; {nearest(name, _ABOUT)}")
    return _lean(repeats, microbatches) if name == "lean" else _prediction(repeats, microbatches)


def _lean(repeats: int | None, counts: tuple[int, ...]) -> Answer:
    from pipefit.compare.lean import lean

    num = counts[0] if counts else 16
    rows = lean(num, repeats=repeats or 15)
    lines = [f"µs per micro-batch and stage, {num} micro-batches, two ranks; median, and the least of all repetitions"]
    lines += [f"{row.name:<18} {row.num_stages} stages {row.microseconds:8.0f} {row.least:8.0f}" for row in rows]
    return Answer({"num_microbatches": num, "rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _prediction(repeats: int | None, counts: tuple[int, ...]) -> Answer:
    from pipefit.cli.compare import table
    from pipefit.compare.accuracy import accuracy

    results = accuracy(repeats, counts)
    return Answer({"comparisons": [one.as_dict() for one in results]}, lambda: "".join(table(one) for one in results))
