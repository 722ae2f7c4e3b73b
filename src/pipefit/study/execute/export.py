"""A trial's weights as a file under the user's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pipefit.checkpoint.tensors import write_tensors
from pipefit.errors import PipefitError
from pipefit.study.execute.cursor import read_cursor
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
    found: dict[str, Tensor] = {}
    for shard in range(structure.num_shards):
        found |= read_record(live.record(shard, cursor.versions[shard]), cursor.versions[shard]).tensors
    tensors: dict[str, Tensor] = {}
    for shard in range(structure.num_shards):
        for name, lies in structure.state_names(shard):
            tensors[name] = found[lies] if lies in found else found[BUFFER + name]
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
