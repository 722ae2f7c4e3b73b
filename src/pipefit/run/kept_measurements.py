"""Measurements that later runs of the same model on the same machine use again, in private files.

    a run ─► is its file there? ─yes─► the figures of the file
                    │no
                    └► measures ─► was the machine quiet? ─yes─► its file

A file's name is the checksum of everything that the figures depend on: the model and its example, the machines and
their ranks, and the versions of pipefit and torch. A damaged file counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from pipefit.errors import PipefitError
from pipefit.parallel.alike import described
from pipefit.pipeline.facts import structure_of
from pipefit.profiling.measure import description
from pipefit.profiling.workload import Workload
from pipefit.run.config import num_cores
from pipefit.runtime.collectives import exchange, from_first
from pipefit.runtime.outliving import kept
from pipefit.runtime.session import Session
from pipefit.spec.files import JsonObject, is_own_folder
from pipefit.spec.sealed import read_sealed, write_sealed

T = TypeVar("T")

_FORM = "pipefit.measurements/1"
_MADE_AT = "made_at"


class KeptMeasurements:
    """The measurements of one model on the ranks of a run. Every rank makes the same calls.

    Args:
        facts: JSON data of everything that the figures depend on.
        session: the ranks of the run; rank 0 reads and writes.
        path: of the file; None: nothing is kept.
        again: use nothing that was kept, and replace it.

    Attributes:
        path: as given.
        made_at: seconds since 1970 at which the used figures were kept; 0: none were there.
    """

    def __init__(self, facts: JsonObject, session: Session, path: Path | None, again: bool = False) -> None:
        self.path = path
        self._facts = facts
        self._session = session
        self._kept: JsonObject = {}
        self._new: JsonObject = {}
        if not again:
            self._kept = from_first(session, self._read)
        self.made_at = float(self._kept.get(_MADE_AT, 0.0))

    @property
    def is_new(self) -> bool:
        """Returns whether anything was measured that the file does not have."""
        return bool(self._new)

    def take(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """The kept figures of a name, those of an earlier start of this run, or new ones.

        Args:
            name: of the figures.
            kind: of the figures; JSON data by msgspec.
            measure: returns them, the same on every rank.
        """
        found = self.find(name, kind)
        if found is None:
            found = kept(self._session, name, kind, measure)
            self.add(name, found)
        return found

    def find(self, name: str, kind: type[T]) -> T | None:
        """The kept figures of a name; None: there are none."""
        if name not in self._kept:
            return None
        try:
            return msgspec.convert(self._kept[name], kind)
        except msgspec.ValidationError:  # of a pipefit that is being changed
            return None

    def add(self, name: str, figures: Any) -> None:
        """Adds new figures; `save` keeps them."""
        self._new[name] = msgspec.to_builtins(figures, enc_hook=dict)  # the hook is for read-only mappings

    def save(self) -> None:
        """Writes the file, if there are new figures; a full or read-only disk only means that nothing is kept."""
        if self._new and self.path is not None and self._session.rank == 0:
            data = {"format": _FORM, **self._kept, **self._new, "of": self._facts, _MADE_AT: time.time()}
            with contextlib.suppress(PipefitError):
                write_sealed(self.path, data, durable=False)

    def _read(self) -> JsonObject:
        if self.path is None:
            return {}
        try:
            return read_sealed(self.path, _FORM)
        except (PipefitError, FileNotFoundError):
            return {}


def facts_of_measurement(work: Workload, optimizer: str, sizes: list[int], session: Session) -> JsonObject:
    """Everything that measurements of a model's layers on the ranks of a run depend on.

    Args:
        work: the model and its training.
        optimizer: its name; its settings do not change the seconds of a step.
        sizes: of the micro-batches.
        session: the ranks of the run.
    """
    here = [platform.node(), description(work.device, work.half), num_cores()]
    ranks = exchange(session, here)
    hosts = [host for host, *_ in ranks]
    if len(set(hosts)) == 1:
        hosts = []  # the links are those inside a machine, whatever its name
    return {
        "pipefit": sys.modules["pipefit"].__version__,
        "torch": torch.__version__,
        "model": work.model,
        "structure": structure_of(work),
        "example": described(work.example),
        "optimizer": optimizer,
        "clips": work.clips,
        "microbatch_sizes": sizes,
        "ranks": [rest for _, *rest in ranks],
        "hosts": hosts,
    }


def file_of(facts: JsonObject) -> Path | None:
    """The file of some facts in the folder for caches that the user names, else in a private one of temporary files.

    None: the private folder is another user's, or cannot be made.
    """
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "pipefit" / f"{name}.json"
    folder = Path(tempfile.gettempdir()) / f"pipefit-measurements-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if is_own_folder(folder):
        return folder / f"{name}.json"
    return None
