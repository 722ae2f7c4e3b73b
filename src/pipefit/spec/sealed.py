"""Files with checksums: small JSON documents with their own, and entries that name other files with theirs.

Data that must survive a crash is committed in this order, by checkpoints, disk tiers and studies alike:

    new files, each forced to disk ─► the ranks agree ─► a document that names them replaces the last one atomically
                                                      ─► its folder is forced to disk

Until the document is in place, the previous state is valid; nothing that the last document names is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipefit.errors import PipefitError
from pipefit.spec.files import JsonObject, parse_json, read_limited, write_atomically

_FORMAT = re.compile(r'"format": ?"([^"\n]*)"')
_CHECKSUM = re.compile(r'(?:,\n +|, )"checksum": "([0-9a-f]{64})"(\n?)}\n\Z')


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a commit.

    Attributes:
        name: inside the folder of the document that names it.
        num_bytes: its size.
        checksum: its SHA-256, in hexadecimal digits.
    """

    name: str
    num_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if "/" in self.name or self.name in ("", ".", ".."):
            raise PipefitError(f"file name {self.name!r}: expected one like 'rank-0.safetensors'")

    def check(self, folder: Path) -> None:
        """Compares the file with this entry.

        Raises:
            PipefitError: it is missing or damaged.
        """
        path = folder / self.name
        if path.is_symlink() or not path.is_file():
            raise PipefitError(f"{path}: missing")
        if (size := path.stat().st_size) != self.num_bytes:
            raise PipefitError(f"{path}: has {size} bytes, expected {self.num_bytes}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.checksum:
                raise PipefitError(f"{path}: damaged (it does not have its checksum)")


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a new file and forces it to disk.

    Args:
        path: must not exist yet.
        chunks: its content.

    Raises:
        OSError: the file cannot be written.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, size, digest.hexdigest())


def seal(data: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON text that ends with the checksum of all text before it.

    Args:
        data: JSON data with its "format" first.
        indent: 1 for people, None for speed.
    """
    text = json.dumps(data, indent=indent)
    if indent is None:
        return f'{text[:-1]}, "checksum": "{_checksum(text)}"}}\n'
    return f'{text[:-2]},\n{" " * indent}"checksum": "{_checksum(text)}"\n}}\n'


def _checksum(text: str) -> str:
    return hashlib.sha256(f"{text}\n".encode()).hexdigest()


def write_sealed(path: Path, data: Mapping[str, Any], *, indent: int | None = None, durable: bool = True) -> None:
    """Replaces a document atomically.

    Args:
        path: of the document.
        data: JSON data with its "format" first.
        indent: see `seal`.
        durable: whether it also survives a power cut; else only the death of the process, which needs no waiting.

    Raises:
        PipefitError: the folder is missing, or the disk is full.
    """
    write_atomically(path, seal(data, indent), durable=durable)


def read_sealed(path: Path, form: str, error: type[PipefitError] = PipefitError) -> JsonObject:
    """The data of a document that `write_sealed` wrote.

    Args:
        path: of the document.
        form: the format it must have, such as "pipefit.checkpoint/1".
        error: the exception to raise.

    Raises:
        PipefitError: of kind `error`: it cannot be read, is damaged, or of another version.
        FileNotFoundError: there is none.
    """
    try:
        content = read_limited(path, error)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    text = content.decode(errors="replace")
    if found := _FORMAT.search(text):
        name = found[1]
    else:
        name = ""
    if name != form and name.partition("/")[0] == form.partition("/")[0]:
        raise error(f"{path}: has format {name}, this version of pipefit reads {form}")
    end = _CHECKSUM.search(text)
    if end:
        body = f"{text[: end.start()]}{end[2]}}}"
    else:
        body = ""
    if end is None or end[1] != _checksum(body):
        raise error(f"{path}: damaged (it does not have the checksum it states)")
    data: JsonObject = parse_json(body, error, str(path))
    if data.get("format") != form:
        raise error(f"{path}: format: expected {form!r}, got {data.get('format')!r}; is this another kind of file?")
    return data
