"""Runs of this machine: small models, with the weights of a slow network's proportions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipefit.reproduce.entry import Bench, Made, curves
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

WAYS = {"synchronous": "1f1b", "PipeDream": "pipedream", "data parallelism": "data-parallel"}
MODELS = {"digits": ("mlp", "layers=4,width=1024", 40, 0.5), "text": ("gpt", "layers=2,hidden=128,context=64", 40, 3.3)}
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


def _trained(data: str, way: str) -> Verb:
    model, options, steps, _ = MODELS[data]
    return Verb(
        "train", model=model, option=options, data=data, ranks=2, schedule=WAYS[way], microbatches=4, batch=32,
        steps=steps, evaluate_every=_EVERY, warmup=0, lr=1e-3, output=str(folder() / f"{data}-{WAYS[way]}"),
    )  # fmt: skip


def _course(run: Bench, data: str, way: str) -> list[tuple[float, float]]:
    """Seconds of training and held-out loss at each evaluation."""
    step = _trained(data, way)
    run(step)
    text = (Path(step.options["output"]) / "metrics.jsonl").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    seconds = {entry["step"]: entry["seconds"] for entry in entries if "seconds" in entry}
    return [(seconds[entry["step"]], entry["held_out_loss"]) for entry in entries if "held_out_loss" in entry]


def _time_to(run: Bench, data: str, way: str) -> float:
    """Seconds to the target loss, or infinity."""
    target = MODELS[data][-1]
    return next((seconds for seconds, loss in _course(run, data, way) if loss <= target), float("inf"))


MADE: Mapping[str, Made] = {
    "accuracy-over-time": Made(
        (
            *(lambda run, data=data, way=way: _time_to(run, data, way) for data in MODELS for way in WAYS),
            lambda run: (
                min(_time_to(run, "digits", way) for way in ("PipeDream", "synchronous"))
                < _time_to(run, "digits", "data parallelism")
            ),
        ),
        *(
            curves(
                f"Held-out loss on {data}, every {_EVERY} updates",
                "seconds",
                "nats",
                (),
                {},
                courses={way: lambda run, data=data, way=way: _course(run, data, way) for way in WAYS},
            )
            for data in MODELS
        ),
    ),
}
