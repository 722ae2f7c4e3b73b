"""Texts for models with a tokenizer: records of files as token ids with labels, in padded or packed batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipefit.data.arrays import ArrayBatches
from pipefit.data.chats import chat_tokens, of_sharegpt
from pipefit.data.corpus import pieces, text
from pipefit.data.token_table import IGNORED, Tokens, TokenTable, TokenWriter
from pipefit.errors import DataError

_FIELDS = "'text', 'prompt' and 'completion', 'instruction' and 'output', 'messages', or 'conversations'"
_LENGTHS = 32
"""Padded lengths are multiples of this, so that few shapes occur."""


class TokenBatches(ArrayBatches):
    """Batches of token sequences as transformers takes them, in shuffled epochs.

    A batch is a dict of input_ids, attention_mask and labels, each (batch, length) int64; sequences are padded at their
    end to the longest of the batch, rounded up to a multiple of 32, but to no more than the context.

    Args:
        samples: at least one.
        batch: sequences per batch.
        padding: the id of padding.
        context: maximum number of tokens in a sequence.
        seed: the seed of the orders.
        ragged: as in `ArrayBatches`.
    """

    def __init__(
        self, samples: TokenTable, batch: int, padding: int, context: int, seed: int = 0, ragged: bool = False
    ) -> None:
        lengths = torch.from_numpy(samples.lengths)
        super().__init__(lengths, lengths, batch, seed, ragged)
        self._samples = samples
        self._padding = padding
        self._context = context

    def longest_at(self, index: int) -> int:
        """Number of the longest sample in batch number `index`."""
        rows = self.rows_at(index)
        return int(rows[self._x[rows].argmax()])

    def batch_at(self, index: int) -> Any:
        """Batch number `index`, counted over all epochs, without moving the position."""
        rows = self.rows_at(index)
        longest = int(self._x[rows].max())
        length = max(min(-(-longest // _LENGTHS) * _LENGTHS, self._context), longest)
        ids = np.full((len(rows), length), self._padding, np.int64)
        labels = np.full((len(rows), length), IGNORED, np.int64)
        for place, row in enumerate(rows.tolist()):
            own = self._samples.ids(row)
            ids[place, : len(own)] = own
            labels[place, : len(own)] = self._samples.labels(row)
        mask = torch.arange(length) < self._x[rows][:, None]
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": mask.long(),
            "labels": torch.from_numpy(labels),
        }


def token_samples(
    paths: Sequence[Path] | None, tokenizer: Any, context: int, packed: bool = False, learns_all: bool = False
) -> TokenTable:
    """The sequences of some files, read piece by piece into a mapped file.

    Args:
        paths: `.jsonl` or `.parquet` with records, of which each is a sequence; any other file is text, which is
            packed. None: the built-in text.
        tokenizer: a tokenizer of transformers.
        context: maximum number of tokens in a sequence.
        packed: records follow each other without padding; they are split into sequences of `context` tokens, which
            attend across the ends of records.
        learns_all: whether prompts are learned too, not only completions and the assistant's answers.

    Raises:
        DataError: a file is missing, empty or malformed, or a record lacks its fields, has nothing to learn or is too
            long.
    """
    with TokenWriter() as writer:
        if paths is None:
            writer.add(_plain(tokenizer, text().decode()))
            writer.pack(0, 0, context)
        for path in paths or ():
            first = len(writer)
            start = writer.num_tokens
            is_text = path.suffix not in (".jsonl", ".parquet")
            for sample in _text_of(path, tokenizer) if is_text else _samples_of(path, tokenizer, learns_all):
                writer.add(sample)
            if len(writer) == first:
                raise DataError(f"data: {path} has no records")
            if is_text or packed:
                writer.pack(first, start, context)
            _check_lengths(writer, first, path, context)
        return writer.table()


def _check_lengths(writer: TokenWriter, first: int, path: Path, context: int) -> None:
    """Refuses a record of more than `context` tokens."""
    for number, length in enumerate(writer.lengths(first), 1):
        if length > context:
            raise DataError(
                f"data: record {number} of {path} has {length} tokens, more than the context of {context}; give a "
                "larger --context, or --pack, which splits records"
            )


def _text_of(path: Path, tokenizer: Any) -> Iterator[Tokens]:
    """The tokens of a file of text, by pieces; special tokens are only at its beginning and its end."""
    is_first = True
    for piece in pieces(path):
        words = piece.decode("utf-8", "replace")
        ids = tokenizer(words, verbose=False, add_special_tokens=is_first)["input_ids"]
        yield Tokens(ids, ids)
        is_first = False
    yield Tokens(_end(tokenizer), _end(tokenizer))


def _samples_of(path: Path, tokenizer: Any, learns_all: bool) -> Iterator[Tokens]:
    for record, where in _records(path):
        sample = _tokens(record, tokenizer, where, learns_all)
        if all(label == IGNORED for label in sample.labels):
            raise DataError(f"data: {where} has nothing to learn: no completion, and no answer of an assistant")
        yield sample


def _records(path: Path) -> Iterator[tuple[Any, str]]:
    """Records of a file, each with its place for messages."""
    if path.suffix == ".parquet":
        yield from _rows(path)
        return
    lines = (line for piece in pieces(path) for line in piece.splitlines())
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {path}"
        if not line.strip():
            continue
        try:
            yield json.loads(line.decode("utf-8", "replace")), where
        except ValueError as problem:
            raise DataError(f"data: {where} is not JSON: {problem}") from None


def _rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Records of a Parquet file, a group of rows at a time."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"data: {path} needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in file.iter_batches():
                for row in group.to_pylist():
                    number += 1
                    yield row, f"row {number} of {path}"
    except (ArrowException, OSError) as problem:
        raise DataError(f"data: {path} cannot be read: {problem}") from None


def _tokens(record: Any, tokenizer: Any, where: str, learns_all: bool) -> Tokens:
    """The sequence of a record, by the fields that it has."""
    if isinstance(record, dict):
        given = record
    else:
        given = {}
    words = {name for name, value in given.items() if isinstance(value, str)}
    if "text" in words:
        return _plain(tokenizer, given["text"])
    if {"prompt", "completion"} <= words:
        return _answered(given["prompt"], given["completion"], tokenizer, learns_all)
    if {"instruction", "output"} <= words:
        return _instructed(given, tokenizer, where, learns_all)
    if isinstance(given.get("messages"), list):
        return chat_tokens(given["messages"], tokenizer, where, learns_all)
    if isinstance(given.get("conversations"), list):
        return chat_tokens(of_sharegpt(given["conversations"], where), tokenizer, where, learns_all)
    if isinstance(record, dict):
        fields = ", ".join(map(str, given))
    else:
        fields = type(record).__name__
    raise DataError(f"data: {where}: expected {_FIELDS}, got {fields or 'nothing'}")


def _answered(prompt: str, completion: str, tokenizer: Any, learns_all: bool) -> Tokens:
    asked = tokenizer(prompt)["input_ids"]
    given = tokenizer(completion, add_special_tokens=False)["input_ids"] + _end(tokenizer)
    if learns_all:
        labels = asked
    else:
        labels = [IGNORED] * len(asked)
    return Tokens(asked + given, labels + given)


def _instructed(record: dict[str, Any], tokenizer: Any, where: str, learns_all: bool) -> Tokens:
    """A record of Alpaca: a conversation for a tokenizer with a chat template, else in Alpaca's own words."""
    parts = [record["instruction"], record.get("input") or ""]
    if getattr(tokenizer, "chat_template", None):
        asked = "\n\n".join(filter(None, parts))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
        return chat_tokens(messages, tokenizer, where, learns_all)
    headed = [f"### {name}:\n{part}\n\n" for name, part in zip(("Instruction", "Input"), parts, strict=True) if part]
    return _answered("".join(headed) + "### Response:\n", record["output"], tokenizer, learns_all)


def _plain(tokenizer: Any, words: str) -> Tokens:
    # A tokenizer warns about a long text, though it is split afterwards.
    ids = tokenizer(words, verbose=False)["input_ids"] + _end(tokenizer)
    return Tokens(ids, ids)


def _end(tokenizer: Any) -> list[int]:
    if tokenizer.eos_token_id is None:
        return []
    return [tokenizer.eos_token_id]
