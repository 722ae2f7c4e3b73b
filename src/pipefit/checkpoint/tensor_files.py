"""safetensors files, written tensor by tensor: a checkpoint never needs a second copy of the weights in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipefit.errors import PipefitError
from pipefit.spec.files import JsonObject
from pipefit.spec.sealed import FileEntry, write_file
from pipefit.stage.record_layout import bytes_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
"""Types by their names in a safetensors header."""

_CHUNK_BYTES = 1 << 24
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], values: Iterable[Tensor] | None = None
) -> FileEntry:
    """Writes a new safetensors file and forces it to the disk.

    Args:
        path: must not exist yet.
        tensors: by name; on any device, copied to the host one at a time.
        metadata: of the file.
        values: to write in place of the tensors, which then only give shapes and types; in their order, one at a
            time.

    Returns:
        Its entry, with size and checksum.

    Raises:
        PipefitError: a tensor has a type that the format does not support.
        OSError: the file cannot be written.
    """
    head = header(tensors, metadata)

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        found = map(bytes_of, tensors.values() if values is None else values)
        for _, data in zip(tensors, found, strict=True):
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]
            del data  # before the next is made

    return write_file(path, chunks())


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of the file: its length in 8 bytes, then JSON, padded to a multiple of 8.

    Raises:
        PipefitError: a tensor has a type that the format does not support.
    """
    table: JsonObject = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise PipefitError(
                f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot hold; "
                "keep it out of the model's state (register_buffer(…, persistent=False)), or convert it"
            )
        end = position + math.prod(tensor.shape) * tensor.dtype.itemsize
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
