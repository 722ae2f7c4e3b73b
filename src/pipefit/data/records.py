"""Texts for models with a tokenizer: records of files as token ids with labels, in padded or packed batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.data.arrays import ArrayBatches
from pipefit.data.corpus import text
from pipefit.errors import DataError

IGNORED = -100
"""The label of a token that the loss ignores."""

_FIELDS = "'text', 'prompt' and 'completion', or 'messages'"
_LENGTHS = 32
"""Padded lengths are multiples of this, so that few shapes occur."""


class Tokens(NamedTuple):
    """A sequence of token ids, and the label of each: its id, or -100 where it is not learned."""

    ids: list[int]
    labels: list[int]


class TokenBatches(ArrayBatches):
    """Batches of token sequences as transformers takes them, in shuffled epochs.

    A batch is a dict of input_ids, attention_mask and labels, each (batch, length) int64; sequences are padded at their
    end to the longest of the batch, rounded up to a multiple of 32, but to no more than the context.

    Args:
        samples: at least one.
        batch: sequences per batch.
        padding: the id of padding.
        context: maximum number of tokens in a sequence.
        seed: of the orders.
        ragged: as in `ArrayBatches`.
    """

    def __init__(
        self, samples: Sequence[Tokens], batch: int, padding: int, context: int, seed: int = 0, ragged: bool = False
    ) -> None:
        lengths = torch.tensor([len(sample.ids) for sample in samples])
        super().__init__(lengths, lengths, batch, seed, ragged)
        self._samples, self._padding, self._context = samples, padding, context

    def longest_at(self, index: int) -> int:
        """Number of the longest sample in batch number `index`."""
        rows = self.rows_at(index)
        return int(rows[self._x[rows].argmax()])

    def batch_at(self, index: int) -> Any:
        """Batch number `index`, counted over all epochs, without moving the position."""
        rows = [self._samples[row] for row in self.rows_at(index).tolist()]
        longest = max(len(row.ids) for row in rows)
        length = max(min(-(-longest // _LENGTHS) * _LENGTHS, self._context), longest)

        def table(parts: Iterator[list[int]], filler: int) -> Tensor:
            return torch.tensor([part + [filler] * (length - len(part)) for part in parts])

        return {
            "input_ids": table((row.ids for row in rows), self._padding),
            "attention_mask": table(([1] * len(row.ids) for row in rows), 0),
            "labels": table((row.labels for row in rows), IGNORED),
        }


def token_samples(paths: Sequence[Path] | None, tokenizer: Any, context: int, packed: bool = False) -> list[Tokens]:
    """The sequences of some files.

    Args:
        paths: `.jsonl` or `.parquet` with records, of which each is a sequence; any other file is text, which is
            packed. None: the built-in text.
        tokenizer: of transformers.
        context: maximum number of tokens in a sequence.
        packed: records follow each other without padding; they are split into sequences of `context` tokens, which
            attend across the ends of records.

    Raises:
        DataError: a file is missing, empty or malformed, or a record lacks its fields or is too long.
    """
    if paths is None:
        return _packed([_plain(tokenizer, text().decode())], context)
    found: list[Tokens] = []
    for path in paths:
        if path.suffix not in (".jsonl", ".parquet"):
            content = text(path).decode("utf-8", "replace")
            found += _packed([_plain(tokenizer, content)], context)
            continue
        records = [_tokens(record, tokenizer, where) for record, where in _records(path)]
        if not records:
            raise DataError(f"data: {path} has no records")
        long = next((k for k, record in enumerate(records) if len(record.ids) > context), None)
        if long is not None and not packed:
            raise DataError(
                f"data: record {long + 1} of {path} has {len(records[long].ids)} tokens, more than the context of "
                f"{context}; give a larger --context, or --pack, which splits records"
            )
        found += _packed(records, context) if packed else records
    return found


def _records(path: Path) -> Iterator[tuple[Any, str]]:
    """Records of a file, each with its place for messages."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise DataError(f"data: {path} needs pyarrow: pip install pyarrow") from None
        try:
            rows = parquet.read_table(path).to_pylist()
        except (ArrowException, OSError) as problem:
            raise DataError(f"data: {path} cannot be read: {problem}") from None
        yield from ((row, f"row {number} of {path}") for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(text(path).decode("utf-8", "replace").splitlines(), 1):
        where = f"line {number} of {path}"
        if not line.strip():
            continue
        try:
            yield json.loads(line), where
        except ValueError as problem:
            raise DataError(f"data: {where} is not JSON: {problem}") from None


def _tokens(record: Any, tokenizer: Any, where: str) -> Tokens:
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return _plain(tokenizer, record["text"])
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            asked = tokenizer(record["prompt"])["input_ids"]
            given = tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + _end(tokenizer)
            return Tokens(asked + given, [IGNORED] * len(asked) + given)
        if isinstance(record.get("messages"), list):
            return _chat(record["messages"], tokenizer, where)
    fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise DataError(f"data: {where}: expected {_FIELDS}, got {fields or 'nothing'}")


def _plain(tokenizer: Any, words: str) -> Tokens:
    # A tokenizer warns about a long text, though it is split afterwards.
    ids = tokenizer(words, verbose=False)["input_ids"] + _end(tokenizer)
    return Tokens(ids, ids)


def _chat(messages: list[Any], tokenizer: Any, where: str) -> Tokens:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"data: {where} has 'messages', but the model's tokenizer has no chat template")
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    except Exception as problem:
        raise DataError(f"data: {where}: the chat template cannot use its messages: {problem}") from None
    return Tokens(ids, ids)


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _packed(records: Sequence[Tokens], context: int) -> list[Tokens]:
    """Sequences of `context` tokens; the last may be shorter, but not a single token, which predicts nothing."""
    ids, labels = (list(chain.from_iterable(parts)) for parts in zip(*records, strict=True))
    starts = range(0, len(ids) - 1, context) if len(ids) > 1 else range(len(ids))
    return [Tokens(ids[start : start + context], labels[start : start + context]) for start in starts]
