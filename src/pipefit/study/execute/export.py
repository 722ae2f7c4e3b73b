"""A trial's weights as a file under the user's own names."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView
from pathlib import Path
from typing import Any

from torch import Tensor

from pipefit.checkpoint.tensors import write_tensors
from pipefit.errors import PipefitError
from pipefit.study.execute.cursor import Cursor, read_cursor
from pipefit.study.execute.records import read_record
from pipefit.study.execute.shards import BUFFER, Structure

__all__ = ["export"]


class _Stored(dict[str, Tensor]):
    """A trial's tensors by the user's names; values are read shard by shard while they are walked.

    Items tell names, shapes and types without reading anything: there a tensor is a stand-in.
    """

    def __init__(self, live: Any, cursor: Cursor, structure: Structure) -> None:
        super().__init__()
        self._live, self._cursor = live, cursor
        self._places: list[tuple[int, str]] = []
        self._read: tuple[int, dict[str, Tensor]] = (-1, {})
        homes = {name: shard for shard in range(structure.num_shards) for name in structure.tensors(shard)}
        for shard in range(structure.num_shards):
            stand_ins = structure.state(shard)
            for name, lies in structure.state_names(shard):
                where = lies if lies in homes else BUFFER + name
                self._places.append((homes[where], where))
                self[name] = stand_ins[name]

    def values(self) -> ValuesView[Tensor]:
        """The tensors, each valid until the next."""
        return self._walk()  # type: ignore[return-value]  # walked once, as values are

    def _walk(self) -> Iterator[Tensor]:
        for shard, name in self._places:
            if self._read[0] != shard:
                self._read = (-1, {})
                version = self._cursor.versions[shard]
                self._read = (shard, read_record(self._live.record(shard, version), version).tensors)
            # A copy, so that whoever holds the last one does not hold a whole record while the next is read.
            yield self._read[1][name].clone()


def export(live: Any, path: str) -> str:
    """Writes `path` as safetensors: what `model.load_state_dict` takes. A weight of several names stands under each.

    Raises:
        PipefitError: the trial has no state, or the file cannot be written.
    """
    cursor = read_cursor(live.folder)
    if cursor is None:
        raise PipefitError(f"{live.folder}: there is no state to export")
    structure = live.structure(cursor)
    live.forget()
    tensors = _Stored(live, cursor, structure)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    temporary.unlink(missing_ok=True)
    try:
        write_tensors(temporary, tensors, {"format": "pt"})
        temporary.replace(target)
    except OSError as problem:
        raise PipefitError(f"{target}: cannot be written: {problem.strerror}") from None
    return str(target)
