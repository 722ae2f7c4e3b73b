"""Sequences of tokens in a mapped file: 5 bytes per token, and no more memory than the system has to spare."""

from __future__ import annotations

import contextlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from pipefit.errors import DataError

IGNORED = -100
"""The label of a token that the loss ignores."""


class Tokens(NamedTuple):
    """A sequence of token ids, and the label of each: its id, or -100 where it is not learned."""

    ids: list[int]
    labels: list[int]


class TokenTable(Sequence[Tokens]):
    """Sequences of tokens: an array of all ids, one of the marks of learned tokens, and the bounds of each sequence.

    A slice shares the arrays. An item is a copy as Python integers.

    Args:
        ids: all tokens, (tokens,) int32.
        learned: whether the loss counts a token, (tokens,) bool.
        starts: first token of each sequence, (sequences,) int64.
        ends: the token after the last of each sequence, (sequences,) int64.
    """

    def __init__(self, ids: np.ndarray, learned: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self._ids = ids
        self._learned = learned
        self._starts = starts
        self._ends = ends

    @classmethod
    def of(cls, samples: Iterable[Tokens]) -> TokenTable:
        """The table of some sequences."""
        with TokenWriter() as writer:
            for sample in samples:
                writer.add(sample)
            return writer.table()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, which: Any) -> Any:
        """A sequence by its number, or the table of a slice."""
        if isinstance(which, slice):
            return TokenTable(self._ids, self._learned, self._starts[which], self._ends[which])
        ids = self.ids(which)
        return Tokens(ids.tolist(), self.labels(which).tolist())

    def ids(self, number: int) -> np.ndarray:
        """The tokens of a sequence, (length,) int32."""
        return self._ids[self._starts[number] : self._ends[number]]

    def labels(self, number: int) -> np.ndarray:
        """The labels of a sequence, (length,) int32."""
        learned = self._learned[self._starts[number] : self._ends[number]]
        return np.where(learned, self.ids(number), np.int32(IGNORED))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, (sequences,) int64."""
        return self._ends - self._starts

    @property
    def highest(self) -> int:
        """The largest token."""
        return int(self._ids.max(initial=0))


class TokenWriter:
    """Writes sequences to files without a name, which the system removes with the process.

    Files of tokens are in the folder for temporary files (`TMPDIR`), so a text may be larger than the memory.
    """

    def __init__(self) -> None:
        self._ids, self._learned = _new_file(), _new_file()
        self._starts, self._ends = array("q"), array("q")
        self._num_tokens = 0

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        """Closes the files; a table keeps them mapped."""
        self._ids.close()
        self._learned.close()

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._num_tokens

    def add(self, tokens: Tokens) -> None:
        """Adds a sequence.

        Raises:
            DataError: the folder for temporary files is full.
        """
        self._starts.append(self._num_tokens)
        ids = np.array(tokens.ids, np.int32)
        learned = np.array(tokens.labels, np.int32) != IGNORED
        with _writing():
            self._ids.write(ids.tobytes())
            self._learned.write(learned.tobytes())
        self._num_tokens += len(ids)
        self._ends.append(self._num_tokens)

    def pack(self, first: int, start: int, context: int) -> None:
        """Replaces sequences by others of `context` tokens, which follow each other without gaps.

        The last may be shorter, but not a single token, which predicts nothing.

        Args:
            first: number of the first sequence to replace; all later ones are replaced too.
            start: its first token.
            context: tokens of a new sequence.
        """
        count = self._num_tokens - start
        if count > 1:
            starts = range(start, self._num_tokens - 1, context)
        else:
            starts = range(start, self._num_tokens)
        del self._starts[first:], self._ends[first:]
        self._starts.extend(starts)
        self._ends.extend(min(begin + context, self._num_tokens) for begin in starts)

    def __len__(self) -> int:
        """Sequences so far."""
        return len(self._starts)

    def lengths(self, first: int) -> Iterator[int]:
        """Tokens of each sequence from number `first` on."""
        for number in range(first, len(self)):
            yield self._ends[number] - self._starts[number]

    def table(self) -> TokenTable:
        """The table of all sequences; nothing can be added afterwards."""
        ids = self._mapped(self._ids, np.int32)
        learned = self._mapped(self._learned, np.bool_)
        return TokenTable(ids, learned, np.array(self._starts, np.int64), np.array(self._ends, np.int64))

    def _mapped(self, file: IO[bytes], kind: type[Any]) -> np.ndarray:
        with _writing():
            file.flush()
        if self._num_tokens == 0:
            return np.zeros(0, kind)
        return np.memmap(file, kind, "r", shape=(self._num_tokens,))


def _new_file() -> IO[bytes]:
    with _writing():
        return tempfile.TemporaryFile(prefix="pipefit-tokens-", buffering=1 << 20)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """The context in which tokens are written.

    Raises:
        DataError: the folder for temporary files is full.
    """
    try:
        yield
    except OSError as problem:
        raise DataError(
            f"data: tokens cannot be written to {tempfile.gettempdir()}: {problem.strerror or problem}; set TMPDIR to "
            "a folder with more room (5 bytes per token)"
        ) from None
