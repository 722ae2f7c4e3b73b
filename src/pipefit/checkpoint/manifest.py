"""The manifest of a checkpoint: written last, it names every file with its checksum, and has a checksum too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from pipefit.errors import PipefitError, check_figures
from pipefit.spec.files import JsonObject, decode
from pipefit.spec.sealed import FileEntry, read_sealed

MANIFEST = "manifest.json"
FORM = "pipefit.checkpoint/1"
_STEP = re.compile(r"step-(\d{6,})(?:\.(\d+))?")


class Optimization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of one stage's optimizer and learning-rate schedule, without their tensors.

    Attributes:
        optimizer: name of its class.
        groups: [{"parameters": names, "options": {…}}].
        values: the optimizer's states per parameter that are not tensors, by parameter and key.
        scheduler: name of the schedule's class; "" without one.
        schedule: its state.
    """

    optimizer: str
    groups: list[JsonObject]
    values: dict[str, JsonObject]
    scheduler: str = ""
    schedule: Any = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a checkpoint.

    Attributes:
        step: weight updates done.
        ordinal: micro-batches seen, which seeds the next one's random numbers.
        world: ranks that wrote it.
        seed: the seed of the model's random numbers.
        schedule, plan: the schedule's name and a digest of the plan.
        files: all of them.
        aliases: further names of tied weights, each with the name it is saved under.
        optimization: the optimization of each stage.
        extra: the caller's data.
        loss_scale: its value and history; None: the loss was not scaled.
        position: in the loader of the training data; None: there is none.
    """

    step: int
    ordinal: int
    world: int
    seed: int
    schedule: str
    plan: str
    files: list[FileEntry]
    aliases: dict[str, str]
    optimization: list[Optimization]
    extra: JsonObject
    loss_scale: JsonObject | None = None
    position: JsonObject | None = None

    def __post_init__(self) -> None:
        check_figures(self, PipefitError, step=0, ordinal=0, world=1)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        PipefitError: there is none (the checkpoint was never finished), or it is damaged, or of another format.
    """
    path = directory / MANIFEST
    try:
        data = read_sealed(path, FORM)
    except (FileNotFoundError, IsADirectoryError):
        raise PipefitError(f"{directory}: no {MANIFEST}, so this is not a finished checkpoint") from None
    manifest = decode("checkpoint", data, Manifest, PipefitError, str(path))
    named = _STEP.fullmatch(directory.resolve().name)
    if named and int(named[1]) != manifest.step:
        raise PipefitError(f"{path}: is of step {manifest.step}, but its folder is {named[0]}; was it moved there?")
    return manifest


def step_name(step: int, attempt: int = 0) -> str:
    """The name of a checkpoint's directory; a second one of the same step gets a number, nothing is overwritten."""
    return f"step-{step:06d}" + (f".{attempt}" if attempt else "")


def step_of(path: Path) -> int:
    """The number of steps in the name of a checkpoint's directory; 0: it is none."""
    if match := _STEP.fullmatch(path.name):
        return int(match[1])
    return 0


def candidates(directory: Path) -> list[Path]:
    """The checkpoints inside a run's directory, newest step first."""
    found = []
    for path in directory.iterdir():
        if (match := _STEP.fullmatch(path.name)) and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found, reverse=True)]
