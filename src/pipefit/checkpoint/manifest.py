"""The manifest of a checkpoint: written last, it names every file with its checksum, and vouches for itself."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from pipefit.checkpoint.tensors import checksum_of
from pipefit.errors import PipefitError
from pipefit.spec.files import decode, encode, read_text

__all__ = [
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "Optimization",
    "candidates",
    "read_manifest",
    "step_name",
    "verify_file",
]

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})(?:\.(\d+))?")
_FILE = re.compile(r"rank-\d+\.safetensors")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint: its name inside the directory, size in bytes, SHA-256."""

    name: str
    num_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.name):
            raise PipefitError(f"file name {self.name!r}: expected one like 'rank-0.safetensors'")


class Optimization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one stage's optimizer and learning-rate schedule held beside tensors.

    Attributes:
        optimizer: name of its class.
        groups: [{"parameters": names, "options": {…}}].
        values: what the optimizer keeps per parameter that is not a tensor, by parameter and key.
        scheduler: name of the schedule's class; "" without one.
        schedule: its state.
    """

    optimizer: str
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]
    scheduler: str = ""
    schedule: Any = None

    @property
    def names(self) -> list[str]:
        """The parameters it trains."""
        return [name for group in self.groups for name in group["parameters"]]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds.

    Attributes:
        step: weight updates done.
        ordinal: micro-batches seen, which seeds the next one's random numbers.
        world: ranks that wrote it.
        seed: of the model's random numbers.
        schedule, plan: the schedule's name and a digest of the plan.
        files: all of them.
        aliases: further names of tied weights, each with the name it is saved under.
        optimization: of each stage.
        extra: the caller's own data, such as the position in the training data.
        loss_scale: its value and how it came to be; None: the loss was not scaled.
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
    extra: dict[str, Any]
    loss_scale: dict[str, Any] | None = None

    def to_text(self) -> str:
        """JSON that ends with the checksum of all before it."""
        data = encode("checkpoint", self)
        return _text({**data, "checksum": _checksum(data)})


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(_text(data).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        PipefitError: there is none (the checkpoint was never finished), or it is damaged, or of another format.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise PipefitError(f"{directory}: no {MANIFEST}, so this is no finished checkpoint")
    text = read_text(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        raise PipefitError(f"{path}: damaged (not JSON)") from None
    body = {k: v for k, v in data.items() if k != "checksum"} if isinstance(data, dict) else {}
    if not body or data.get("checksum") != _checksum(body) or _text(data) != text:
        raise PipefitError(f"{path}: damaged (it does not have the checksum it states)")
    return decode("checkpoint", body, Manifest, PipefitError, str(path))


def verify_file(directory: Path, entry: FileEntry) -> None:
    """Holds a file to its size and checksum.

    Raises:
        PipefitError: it is missing or damaged.
    """
    path = directory / entry.name
    if path.is_symlink() or not path.is_file():
        raise PipefitError(f"{path}: missing")
    if (size := path.stat().st_size) != entry.num_bytes:
        raise PipefitError(f"{path}: has {size} bytes, the manifest says {entry.num_bytes}")
    if checksum_of(path) != entry.checksum:
        raise PipefitError(f"{path}: damaged (its checksum is not the manifest's)")


def step_name(step: int, attempt: int = 0) -> str:
    """The name of a checkpoint's directory; a second one of the same step gets a number, nothing is overwritten."""
    return f"step-{step:06d}" + (f".{attempt}" if attempt else "")


def candidates(directory: Path) -> list[Path]:
    """The checkpoints inside a run's directory, newest step first."""
    found = []
    for path in directory.iterdir():
        if (match := _STEP.fullmatch(path.name)) and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found, reverse=True)]
