"""Text as bytes: a corpus that comes with Python, or the user's files.

A byte is a token, so no tokenizer is needed, and losses are in nats per byte.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipefit.errors import DataError

_RULED_LINE = re.compile(r"^[ |+]*([*=~^_+-])\1{2}[*=~^_+|-]*[ |+]*\n", re.MULTILINE)

_PIECE = 1 << 24

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def text(paths: Paths | None = None) -> bytes:
    """The corpus to train on, as bytes.

    Without `paths` it is the prose of `pydoc_data.topics`, the language reference that Python carries for its
    interactive `help()`: about 450 kB of English with some code, without the underlines of its headings. With
    `paths` it is those files, in that order, with a blank line between them.

    Raises:
        DataError: a path is missing, a directory, unreadable or empty; or no path is given in the list.
    """
    if paths is None:
        return _builtin_prose()
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    files = [Path(path) for path in paths]
    if not files:
        raise DataError("data: expected at least one text file, got an empty list; leave it out for the built-in text")
    return b"\n\n".join(b"".join(pieces(file)) for file in files)


def _builtin_prose() -> bytes:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            "data: this Python comes without pydoc_data.topics, the built-in text; give a text file with --data FILE"
        ) from error
    # Underlines of headings and rules of tables are not language, and a model would learn to draw them first.
    prose = (_RULED_LINE.sub("", topics[name]).strip("\n") for name in sorted(topics))
    return "\n\n\n".join(prose).encode()


def pieces(file: Path) -> Iterator[bytes]:
    """The bytes of a file, in pieces of whole lines, so that a large file is never in memory as a whole.

    Raises:
        DataError: it is missing, a directory, unreadable or empty.
    """
    if file.is_dir():
        raise DataError(f"data: {file} is a directory; give the text files themselves, for example {file}/*.txt")
    is_empty = True
    try:
        with file.open("rb") as stream:
            while lines := stream.readlines(_PIECE):
                piece = b"".join(lines)
                is_empty = is_empty and not piece.strip()
                yield piece
    except FileNotFoundError as error:
        raise DataError(f"data: {file} does not exist (looked from {Path.cwd()})") from error
    except OSError as error:
        raise DataError(f"data: {file} cannot be read: {error.strerror or error}") from error
    if is_empty:
        raise DataError(f"data: {file} is empty; a corpus needs at least a few thousand bytes")


def split_corpus(corpus: bytes) -> tuple[bytes, bytes]:
    """Splits a corpus into its first part for training and its last tenth for validation.

    Both parts are contiguous, so no window of the one overlaps a window of the other.

    Raises:
        DataError: the corpus is too short to be split.
    """
    cut = round(len(corpus) * 0.9)
    if not 0 < cut < len(corpus):
        raise DataError(f"data: {len(corpus)} bytes are too few to keep a tenth of them for validation")
    return corpus[:cut], corpus[cut:]


def unigram_entropy(corpus: bytes) -> float:
    """Entropy of the byte frequencies in nats per byte: the loss of the best model that ignores all context.

    >>> round(unigram_entropy(b"abab"), 4)
    0.6931
    """
    if not corpus:
        raise DataError("data: an empty corpus has no entropy")
    total = len(corpus)
    return -sum(count / total * math.log(count / total) for count in Counter(corpus).values())
