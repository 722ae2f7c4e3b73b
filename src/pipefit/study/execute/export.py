"""A trial's weights as a file under the user's own names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from pipefit.checkpoint.tensor_files import write_tensors
from pipefit.errors import PipefitError
from pipefit.study.execute.cursor import Cursor, read_cursor
from pipefit.study.execute.records import read_record
from pipefit.study.execute.shards import BUFFER

__all__ = ["export"]


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
    homes = {name: shard for shard in range(structure.num_shards) for name in structure.tensors(shard)}
    stand_ins: dict[str, Tensor] = {}
    places: list[tuple[int, str]] = []
    for shard in range(structure.num_shards):
        alike = structure.state(shard)
        for name, lies in structure.state_names(shard):
            where = lies if lies in homes else BUFFER + name
            places.append((homes[where], where))
            stand_ins[name] = alike[name]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    temporary.unlink(missing_ok=True)
    try:
        write_tensors(temporary, stand_ins, {"format": "pt"}, _stored(live, cursor, places))
        temporary.replace(target)
    except OSError as problem:
        raise PipefitError(f"{target}: cannot be written: {problem.strerror}") from None
    return str(target)


def _stored(live: Any, cursor: Cursor, places: Iterable[tuple[int, str]]) -> Iterator[Tensor]:
    """Tensors by their shard and name, a shard's record in memory at a time."""
    read, tensors = -1, {}
    for shard, name in places:
        if read != shard:
            tensors = {}
            version = cursor.versions[shard]
            read, tensors = shard, read_record(live.record(shard, version), version).tensors
        # A copy, so that whoever holds the last one does not hold a whole record while the next is read.
        yield tensors[name].clone()
