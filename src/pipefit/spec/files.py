"""Files of the data types: each has `"format": "pipefit.<noun>/1"`, is checked when read, and written atomically."""

from __future__ import annotations

import ctypes
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipefit.errors import PipefitError

T = TypeVar("T")

JsonObject = dict[str, Any]
"""An object of JSON as data: its values are numbers, texts, lists and further objects."""

_HERE = -100
_EXCHANGE = 2
"""Arguments of Linux's renameat2: paths are relative to this process's folder; both names stay, exchanged."""

MOST_BYTES = 256 << 20
"""Largest size of a text file that is read: parsed data takes several times as much memory."""


def encode(noun: str, value: msgspec.Struct) -> JsonObject:
    """A struct as plain JSON data, its format first."""
    return {"format": f"pipefit.{noun}/1", **msgspec.to_builtins(value)}


def decode(noun: str, data: object, kind: type[T], error: type[PipefitError], where: str) -> T:
    """Plain JSON data as a checked struct.

    Raises:
        PipefitError: of kind `error`, with `where` and the path inside the data.
    """
    if not isinstance(data, dict):
        raise error(f"{where}: expected a JSON object with format pipefit.{noun}/1, got {type(data).__name__}")
    check_format(noun, data.get("format"), error, where)
    body = {key: item for key, item in data.items() if key != "format"}
    with as_mistakes(error, where):
        return msgspec.convert(body, kind)


@contextmanager
def as_mistakes(error: type[PipefitError], where: str) -> Iterator[None]:
    """The context in which what is wrong with data is a user's error of kind `error`, with its file and its place."""
    try:
        yield
    except (msgspec.ValidationError, PipefitError) as problem:
        raise error(f"{where}: {said(problem)}") from None


def check_format(noun: str, found: object, error: type[PipefitError], where: str) -> None:
    """Refuses data of another type or version, or without a format."""
    expected = f"pipefit.{noun}/1"
    if found == expected:
        return
    hint = "is this another kind of file?"
    if found is None:
        hint = "every file needs one"
    elif str(found).startswith(f"pipefit.{noun}/"):
        hint = f"this pipefit reads version 1 of a {noun}"
    raise error(f"{where}: format: expected {expected!r}, got {'none' if found is None else repr(found)}; {hint}")


def said(problem: Exception) -> str:
    """A message of msgspec with the path inside the data first: "layers[2].forward_s: missing"."""
    text, _, at = str(problem).partition(" - at `$")
    path = at.rstrip("`").removeprefix(".")
    if found := re.fullmatch(r"Object (missing required|contains unknown) field `(.+)`", text):
        path = f"{path}.{found[2]}" if path else found[2]
        text = "missing" if "missing" in found[1] else "unknown field"
    if text.startswith("Expected "):
        text = text[0].lower() + text[1:]
    for word, plain in _PLAIN.items():
        text = text.replace(f"`{word}`", plain)
    text = text.replace("expected a whole number, got a number", "expected a whole number, got a fraction")
    if path:
        return f"{path}: {text}"
    return text


_PLAIN = {
    "float": "a number", "int": "a whole number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "nothing",
}  # fmt: skip


def read_text(path: str | Path, error: type[PipefitError] = PipefitError) -> str:
    """The text of a file without its byte order mark; a missing, too large or undecodable file is a user's error."""
    path = Path(path)
    try:
        return read_limited(path, error).decode("utf-8-sig")
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except IsADirectoryError:
        raise error(f"{path}: expected a file, got a directory") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path}: cannot be read: not UTF-8 text at byte {problem.start}") from None


def read_limited(path: Path, error: type[PipefitError] = PipefitError) -> bytes:
    """The bytes of a file; more than `MOST_BYTES` are a user's error of kind `error`. Devices without an end too."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise error(f"{path}: expected at most {MOST_BYTES >> 20} MiB, got more; is this another kind of file?")
    return data


def parse_toml(text: str, error: type[PipefitError], where: str) -> JsonObject:
    """TOML text as data; a mistake in it is a user's error of kind `error`, with line and column."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: not TOML: {_reason(problem)}") from None


def parse_json(text: str | bytes, error: type[PipefitError], where: str) -> Any:
    """JSON text as data; a mistake in it is a user's error of kind `error`, with line and column."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: not JSON: {_reason(problem)}") from None


def _reason(problem: Exception) -> str:
    """The reason why a text cannot be parsed, without Python's advice for its own settings."""
    if isinstance(problem, RecursionError):
        return "lists or tables are nested too deeply"
    if "integer string conversion" in str(problem):
        return "a number has too many digits"
    return str(problem)


def read_json(path: str | Path, error: type[PipefitError] = PipefitError) -> Any:
    """The JSON data of a file; a mistake in it is a user's error of kind `error`, with line and column."""
    return parse_json(read_text(path, error), error, str(path))


def write_json(path: str | Path, data: object) -> Path:
    """Writes JSON data atomically, for people to read too."""
    return write_atomically(path, json.dumps(data, indent=1) + "\n")


def write_atomically(path: str | Path, content: str | bytes, *, durable: bool = True) -> Path:
    """Writes a whole file or nothing: to a temporary file in the same folder first, which is then renamed.

    Args:
        path: of the file.
        content: of the file.
        durable: whether it also survives a power cut: file and folder are forced to disk. Else nothing waits for it.

    Raises:
        PipefitError: the folder is missing, or the path is a directory, or the disk is full.
    """
    path = Path(path)
    if isinstance(content, str):
        payload = content.encode()
    else:
        payload = content
    if path.is_dir():
        raise PipefitError(f"{path}: expected a file to write, got a directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(payload)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            if durable or not _exchanged(temporary, path):
                Path(temporary).replace(path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as problem:
        raise PipefitError(f"{path}: cannot be written: {problem.strerror}") from None
    return path


def _exchanged(temporary: str, path: Path) -> bool:
    """Exchanges the names of two files and removes the old one; False: the system cannot, or there is no old one.

    It is as atomic as a replacement. But after a replacement ext4 starts to write the new file and waits for the disk,
    some milliseconds each time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_HERE, os.fsencode(temporary), _HERE, os.fsencode(path), _EXCHANGE):
        return False
    Path(temporary).unlink()
    return True


def is_own_folder(place: Path) -> bool:
    """Returns whether a path is a folder, not a link, that belongs to this user and that no other can write to."""
    try:
        found = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def sync_folder(place: Path) -> None:
    """Forces a directory's entries to the disk: only then is a rename durable."""
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
