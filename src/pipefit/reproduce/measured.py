"""Runs of this machine: small models, with the weights of a slow network's proportions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path

from pipefit.errors import InfeasibleError
from pipefit.reproduce.entry import Bench
from pipefit.reproduce.steps import Verb

_STUDY = """format = "pipefit.study/1"
name = "sharp"
output = "{folder}/study"
workers = 2
model = "mlp"
data = "digits"
batch = 64
microbatches = 4
steps = 20
options = {{layers = 8, width = 512}}
shards = 4
[grid]
lr = [1e-2, 3e-3, 1e-3, 3e-4]
"""

MODELS: Mapping[str, tuple[str, str, float]] = {
    "digits": ("mlp", "layers=4,width=1024", 0.5),
    "text": ("gpt", "layers=2,hidden=128,context=64", 3.3),
}
"""Model, options and target loss for each of the data."""

_EVERY = 10


@cache
def folder() -> Path:
    """A new private folder of temporary files; it stays, because the commands that are shown name it."""
    return Path(tempfile.mkdtemp(prefix="pipefit-reproduce-"))


def study_file() -> str:
    """The file of a study of four models of four shards on two workers, in the folder of temporary files."""
    path = folder() / "study.toml"
    path.write_text(_STUDY.format(folder=folder()), encoding="utf-8")
    return str(path)


def _trained(data: str, schedule: str) -> Verb:
    model, options, _ = MODELS[data]
    return Verb(
        "train",
        model=model,
        option=options,
        data=data,
        ranks=2,
        schedule=schedule,
        microbatches=4,
        batch=32,
        steps=40,
        evaluate_every=_EVERY,
        warmup=0,
        lr=1e-3,
        output=str(folder() / f"{data}-{schedule}"),
    )


def course(run: Bench, data: str, schedule: str) -> list[tuple[float, float]]:
    """Seconds of training and held-out loss at each evaluation."""
    from pipefit.run.curves import figures_of

    step = _trained(data, schedule)
    run(step)
    entries = figures_of(Path(step.options["output"]) / "metrics.jsonl")
    seconds = {entry["step"]: entry["seconds"] for entry in entries if "seconds" in entry}
    return [(seconds[entry["step"]], entry["held_out_loss"]) for entry in entries if "held_out_loss" in entry]


def time_to(run: Bench, data: str, schedules: Sequence[str]) -> float:
    """Seconds to the target loss under the fastest of some schedules, or infinity."""
    _, _, target = MODELS[data]
    found = [inf]
    for schedule in schedules:
        found += [seconds for seconds, loss in course(run, data, schedule) if loss <= target]
    return min(found)


_COMPARED = {"gpt": ("layers=4,hidden=256,context=64", 32), "convnet": ("layers=8,channels=64", 128)}
"""Options and batch of the models that are compared."""


def _compared(model: str) -> Verb:
    options, batch = _COMPARED[model]
    return Verb(
        "compare",
        model=model,
        option=options,
        ranks=2,
        batch=batch,
        microbatches=(1, 2, 4, 8),
        strategies="accumulate,naive,gpipe",
        steps=4,
        repeats=2,
        limit=10,
    )


def measured_rate(run: Bench, strategy: str, microbatches: int, model: str = "gpt") -> float:
    """Measured samples per second of a small model."""
    for row in run(_compared(model))["rows"]:
        if row["strategy"] == strategy and row["num_microbatches"] == microbatches:
            return float(row["samples_per_s"])
    raise InfeasibleError(f"{strategy} with {microbatches} micro-batches was not measured")
