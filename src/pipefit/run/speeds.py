"""The speed of pipelines against one process, where `pipefit compare` has measured it into the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipefit.errors import PipefitError
from pipefit.spec.files import JsonObject, read_json

FILE = "compare.json"
"""The figures that `pipefit compare -o FOLDER` writes."""
_QUIET = 0.9
"""The share of the time for which one thread computes on a quiet machine, at least."""
_ONE_PROCESS = {"one-thread": "one process, one thread", "all-threads": "one process, all cores"}


class Speeds(NamedTuple):
    """Strategies of training the same batches, measured side by side.

    Attributes:
        rows: the name of each strategy, its samples per second, and its factor over the fastest single process.
        verdict: whether a pipeline helped, in a sentence.
        method: how it was measured.
    """

    rows: list[tuple[str, float, float]]
    verdict: str
    method: str


def speeds_of(folder: Path, config: JsonObject) -> Speeds | None:
    """The speeds in a folder; None: they were not measured, or without a single process, or for another training.

    Args:
        folder: of a run.
        config: the options of the run.

    Raises:
        PipefitError: the file is not that of a comparison.
    """
    path = folder / FILE
    if not path.exists():
        return None
    data = read_json(path)
    try:
        if data["format"] != "pipefit.comparison/1":
            raise KeyError("format")
        if data["batch"] != config["batch"] or data["model"].partition("(")[0] != config["model"]:
            return None
        return _speeds(data)
    except (KeyError, TypeError, ValueError) as problem:
        raise PipefitError(
            f"{path}: expected the figures of `pipefit compare`, got {problem!r}; measure again"
        ) from None


def _speeds(data: JsonObject) -> Speeds | None:
    rates = {_name(row): float(row["samples_per_s"]) for row in data["rows"]}
    alone = {name: rate for name, rate in rates.items() if name in _ONE_PROCESS.values()}
    others = {name: rate for name, rate in rates.items() if name not in alone}
    if not alone or not others:
        return None
    first = max(alone, key=alone.__getitem__)
    best = max(others, key=others.__getitem__)
    factor = others[best] / alone[first]
    if factor > 1:
        verdict = f"the pipeline helped: {best} is {factor:.2f} × as fast as {first}"
    else:
        verdict = f"the pipeline did not help here: {best} is {factor:.2f} × as fast as {first}"
    share = min((row["utilisation"][0] for row in data["rows"] if row["strategy"] == "one-thread"), default=1.0)
    if share < _QUIET:
        verdict += (
            f"; but other programs left one thread a core for {share:.0%} of the time: measure on a quiet machine"
        )
    method = f"{data['num_ranks']} processes of one thread; {data['batch']} samples per update; medians of "
    method += f"{data['repeats']} alternating repetitions"
    return Speeds([(name, rate, rate / alone[first]) for name, rate in rates.items()], verdict, method)


def _name(row: JsonObject) -> str:
    strategy = row["strategy"]
    if strategy in _ONE_PROCESS:
        return _ONE_PROCESS[strategy]
    return f"{strategy}, {row['num_microbatches']} micro-batches"
