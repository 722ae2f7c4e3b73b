"""The folder of a study: its definition, a lock against other runs, and the place of trials between turns."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pipefit.spec.files import JsonObject, is_own_folder
from pipefit.spec.lock import locked
from pipefit.spec.sealed import write_sealed
from pipefit.study.results import reread
from pipefit.study.trial import StudyError, StudySpec, Values, plain
from pipefit.units import format_bytes, in_bytes

_FORMAT = "pipefit.study/5"
_CHOSEN = "pipefit.study-chosen/1"
_CURE = "the study cannot be resumed; run it again in another output"
_PATIENCE_S = 2.0
"""Seconds that another run, which was just killed, may take to release the folder."""


class StudyFolder:
    """An open folder; no other run can open it until it is closed.

    Args:
        spec: the study.
        resume: whether the folder must hold this study; else it must not hold any.

    Attributes:
        path: of the folder, as given.
        state: place of trials between turns; absolute, because workers may have another working directory.

    Raises:
        StudyError: the folder holds another study, one that was not to be resumed, or one that runs.
    """

    def __init__(self, spec: StudySpec, resume: bool) -> None:
        self.path = Path(spec.output)
        self.state = _state_folder(spec, self.path.absolute())
        if self.path.exists() and not self.path.is_dir():
            raise StudyError(f"{self.path}: expected a folder for the study, got a file")
        if resume and not self._file.exists():
            raise StudyError(f"{self.path} holds no study to resume")
        _make(self.path)
        self._lock = _lock(self.path)
        try:
            self._open(spec, resume)
        except BaseException:
            self.close()
            raise

    def _open(self, spec: StudySpec, resume: bool) -> None:
        if resume:
            before = reread(self._file, _FORMAT, _CURE)
            given = json.loads(json.dumps(spec.as_dict()))
            for key in ("trials", "stop", "tier"):
                if before.get(key) != given[key]:
                    raise StudyError(f"{self.path} holds another study: its {key} differ; give another output")
            _check_cut(in_bytes(before.get("device_memory"), f"{self._file}: device_memory") or 0.0, spec.device_bytes)
        elif self._file.exists():
            raise StudyError(f"{self.path} holds a study already: resume it (--resume), or give another output")
        elif spec.tier == "disk" and self.state.exists():
            raise StudyError(f"{self.state} is there already, and belongs to no study: give another output")
        elif is_own_folder(self.state):
            self.forget()
        write_sealed(self._file, {"format": _FORMAT, "state": str(self.state), **spec.as_dict()}, indent=1)
        _make(self.logs)
        _make_private(self.state, fresh=not resume)

    @property
    def _file(self) -> Path:
        return self.path / "study.json"

    @property
    def logs(self) -> Path:
        """Output of the workers; absolute."""
        return self.path.absolute() / "logs"

    @property
    def best(self) -> Path:
        """The best trial's weights."""
        return self.path / "best" / "model.safetensors"

    @property
    def free_bytes(self) -> float:
        """Free space for the state of trials."""
        return float(shutil.disk_usage(self.state).free)

    def choose(self, values: Sequence[Values]) -> None:
        """Writes the values that a search has chosen so far."""
        write_sealed(self.path / "chosen.json", {"format": _CHOSEN, "chosen": plain(values)}, indent=1)

    def chosen(self) -> list[JsonObject]:
        """The trials that a search chose in an earlier run."""
        path = self.path / "chosen.json"
        if path.exists():
            return list(reread(path, _CHOSEN, _CURE)["chosen"])
        return []

    def forget(self, trial: str | None = None) -> None:
        """Removes the state of a trial; None: of all."""
        shutil.rmtree(self.state / trial if trial else self.state, ignore_errors=True)

    def close(self) -> None:
        """Lets other runs open it."""
        self._lock.close()


def _check_cut(before: float, now: float) -> None:
    """Refuses less memory than that for which trials were split: shards stay as they are."""
    if now and not 0 < before <= now:
        if before:
            was = f"for {format_bytes(before)} of"
        else:
            was = "without a limit on"
        raise StudyError(
            f"device_memory: the trials of this study were split {was} device memory, {format_bytes(now)} are less; "
            "allow as much, or give another output"
        )


def _make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise StudyError(f"{place}: cannot be made: {problem.strerror}") from None


def _make_private(place: Path, fresh: bool) -> None:
    """Makes a folder that only this user can read or write; a study that resumes may have one of its own there.

    All users of a machine share its shared memory, and the folder's name there can be guessed.
    """
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        if fresh or not is_own_folder(place):
            raise StudyError(
                f"{place}: is there already, and is not a folder that only this user can write to: give another output"
            ) from None
    except OSError as problem:
        raise StudyError(f"{place}: cannot be made: {problem.strerror}") from None


def _lock(path: Path) -> IO[Any]:
    """A locked file."""
    try:
        file = (path / ".lock").open("a")
    except OSError as problem:
        raise StudyError(f"{path}: cannot be written: {problem.strerror}") from None
    deadline = time.monotonic() + _PATIENCE_S
    while not locked(file):
        if time.monotonic() > deadline:
            file.close()
            raise StudyError(f"{path}: another process is running this study; give another output")
        time.sleep(0.05)
    return file


def _state_folder(spec: StudySpec, folder: Path) -> Path:
    if spec.tier == "disk":
        return folder / "state"
    shared = Path("/dev/shm")
    if not shared.is_dir():
        raise StudyError('tier = "host" needs shared memory at /dev/shm, which is missing here; use tier = "disk"')
    return shared / f"pipefit-study-{os.getuid()}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
