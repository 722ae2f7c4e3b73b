"""Programs as text: one instruction per line, for people, diffs and golden files. `parse(dump(p)) == p`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pipefit.errors import PipefitError, ProgramError, ScheduleError, nearest
from pipefit.ir.collector import collector_paused
from pipefit.ir.instruction import PREFIX, Groups, Indices, Instruction, arrow
from pipefit.ir.op import OP_SPEC, Kind, Op, Reduction
from pipefit.ir.program import Header, Program, WeightRule, check_size
from pipefit.ir.spill import Spill
from pipefit.spec.files import read_text, write_atomically

_FORMAT = "format pipefit.program/1"
_KINDS = sorted({*map(str, Kind), *map(str, Reduction)})
_NUMBER = r"[0-9]{1,15}"
MOST_MISSING = 1000
"""Forwards and steps that may be missing in the lists of a file; the verifier reports each of them."""


def dump(program: Program) -> str:
    """The text of a program."""
    lines = [_FORMAT]
    header = program.header
    for name, (field, write, _) in _LINES.items():
        if getattr(header, field) != _USUAL.get(field):
            lines.append(f"{name} {write(header)}".rstrip())
    for rank, instructions in enumerate(program.ranks):
        lines += ["", f"rank {rank}"]
        lines += [f"  {instruction}" for instruction in instructions]
    return "\n".join(lines) + "\n"


@collector_paused()
def parse(text: str, where: str = "program") -> Program:
    """The program of a text.

    Raises:
        ProgramError: with `where`, the line number, the expected text and the actual one.
    """
    fields: _Fields = {"ties": ()}
    named = set()
    ranks: list[list[Instruction]] = []
    this: list[Instruction] = []
    lines = text.splitlines()
    first = "nothing"
    if lines:
        first = lines[0].strip()
    if first != _FORMAT:
        raise ProgramError(f"{where}:1: expected {_FORMAT!r}, got {first!r}")
    for number, line in enumerate(lines[1:], 2):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if words[0] == "rank":
                if words[1:] != [str(len(ranks))]:
                    raise ProgramError(f"expected 'rank {len(ranks)}', got {line.strip()!r}")
                this = []
                ranks.append(this)
            elif ranks:
                this.append(_instruction(words))
            elif words[0] in named and words[0] != "tie":
                raise ProgramError(f"the header has a line {words[0]!r} already")
            elif words[0] in _LINES:
                _, _, read = _LINES[words[0]]
                found = read(words[1:])
                if words[0] == "tie":
                    fields |= {"ties": fields["ties"] + found["ties"]}
                else:
                    fields |= found
                named.add(words[0])
            else:
                raise ProgramError(f"unknown header line {words[0]!r}; {nearest(words[0], _LINES)}")
        except (ValueError, IndexError) as problem:
            raise ProgramError(f"{where}:{number}: {problem}") from None
    missing = [name for name in _REQUIRED if name not in named]
    if missing:
        raise ProgramError(f"{where}: header lines missing: {missing}")
    try:
        return Program(Header(**fields), tuple(map(tuple, ranks)))
    except ValueError as problem:
        raise ProgramError(f"{where}: header: {problem}") from None


def _check_lists(header: Header, num_listed: int) -> None:
    """Refuses a header that asks for far more than the lists hold, before anything is built for it."""
    due = header.num_stages * header.total_microbatches
    due += sum(header.num_updates(stage) * len(ranks) for stage, ranks in enumerate(header.placement))
    if due > num_listed + MOST_MISSING:
        raise ScheduleError(
            f"its header asks for {due:,} forwards and steps ({header.num_stages} stages, {header.num_microbatches} "
            f"micro-batches, {header.num_steps} steps), but the lists have only {num_listed:,} instructions"
        )


def _whole(word: str) -> int:
    """A whole number of a header."""
    if not re.fullmatch(_NUMBER, word):
        raise ProgramError(f"expected a whole number of at most 15 digits, got {word[:40]!r}")
    return int(word)


def _only(words: list[str]) -> str:
    """The word of a header's line that takes one."""
    if len(words) != 1:
        raise ProgramError(f"expected one word after the name of the line, got {' '.join(words) or 'none'!r}")
    return words[0]


def _numbers(words: Iterable[str]) -> Indices:
    return tuple(map(_whole, words))


def _spaced(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _spill_words(spill: Spill) -> str:
    """The words of a `Spill`: "host weights 2 optim 2 stages 0 1 2"."""
    text = f"{spill.tier} weights {spill.weights_slots} optim {spill.optim_slots} stages {_spaced(spill.stages)}"
    if spill.activations:
        text += " activations"
    if spill.on_host:
        text += f" on-host {_spaced(spill.on_host)}"
    if spill.keeps:
        text += f" keeps {_spaced(spill.keeps)}"
    return text


def _spill(words: list[str]) -> Spill:
    if words[1:6:2] != ["weights", "optim", "stages"]:
        raise ValueError(f"expected 'spill TIER weights N optim N stages S …', got {' '.join(words)!r}")
    words, keeps = _cut_off("keeps", words)
    words, on_host = _cut_off("on-host", words)
    activations = words[-1] == "activations"
    if activations:
        words.pop()
    tier, _, weights_slots, _, optim_slots, _, *stages = words
    return Spill(tier, _whole(weights_slots), _whole(optim_slots), _numbers(stages), activations, on_host, keeps)


def _cut_off(word: str, words: list[str]) -> tuple[list[str], Indices]:
    """The words before one, and the numbers after it."""
    if word not in words:
        return words, ()
    place = words.index(word)
    return words[:place], _numbers(words[place + 1 :])


_REQUIRED = ("schedule", "microbatches", "steps", "weights", "placement", "updates")
_Fields = dict[str, Any]
"""Some fields of a header, by their names."""
_Line = tuple[str, Callable[[Header], str], Callable[[list[str]], _Fields]]
"""A line of a header: its field, how it is written, and read. It is left out where the field has its default."""


def _line(field: str, write: Callable[[Any], str], read: Callable[[list[str]], Any]) -> _Line:
    """A line of one field."""
    return field, lambda header: write(getattr(header, field)), lambda words: {field: read(words)}


def _number(field: str) -> _Line:
    return _line(field, str, lambda words: _whole(_only(words)))


def _flag(field: str) -> _Line:
    """A line without words, which is there or not."""

    def read(words: list[str]) -> bool:
        if words:
            raise ProgramError(f"{field} takes no words, got {' '.join(words)!r}; without it, leave out the line")
        return True

    return _line(field, lambda value: "", read)


def _placement_words(placement: Iterable[Indices]) -> str:
    return " ".join("+".join(map(str, ranks)) for ranks in placement)


def _read_placement(words: list[str]) -> Groups:
    return tuple(_numbers(ranks.split("+")) for ranks in words)


def _tensor_words(header: Header) -> str:
    if header.pieces:
        return f"{header.tensor} pieces"
    return str(header.tensor)


def _read_tensor(words: list[str]) -> _Fields:
    has_pieces = words[1:] == ["pieces"]
    if has_pieces:
        words = words[:1]
    return {"tensor": _whole(_only(words)), "pieces": has_pieces}


def _sharded_words(header: Header) -> str:
    if header.shard == "optimizer":
        return "optimizer"
    return f"{header.shard} {header.shard_slots}"


def _read_sharded(words: list[str]) -> _Fields:
    # Files of older versions have the word alone.
    found: _Fields = {"shard": "optimizer"}
    if words:
        found["shard"] = words[0]
    if len(words) > 1:
        found["shard_slots"] = _whole(_only(words[1:]))
    return found


_LINES = {
    "schedule": _line("schedule", str, " ".join),
    "microbatches": _number("num_microbatches"),
    "steps": _number("num_steps"),
    "weights": _line("weights", str, lambda words: WeightRule(_only(words))),
    "placement": _line("placement", _placement_words, _read_placement),
    "updates": _line("updates", _spaced, _numbers),
    # Each tie has a line.
    "tie": _line("ties", lambda ties: "\ntie ".join(map(_spaced, ties)), lambda words: (_numbers(words),)),
    "clip": _flag("clip"),
    "commit": _flag("commit"),
    "sharded": ("shard", _sharded_words, _read_sharded),
    "tensor": ("tensor", _tensor_words, _read_tensor),
    "spill": _line("spill", _spill_words, _spill),
    "frozen": _number("frozen"),
    "shares": _line("shares", _spaced, _numbers),
}
_USUAL = dict(zip(reversed(Header.__struct_fields__), reversed(Header.__struct_defaults__), strict=False))
"""The default of each field that has one."""


def parse_instruction(text: str) -> Instruction:
    """One instruction from its text.

    >>> parse_instruction("send s1 m5 act >2")
    Instruction(op=<Op.SEND: 'send'>, stage=1, mb=5, version=-1, kind='act', peer=2, tier='', slot=-1)

    Raises:
        ProgramError: an unknown operation, or operands other than `OP_SPEC` names.
    """
    return _instruction(text.split())


def _instruction(words: list[str]) -> Instruction:
    name = words[0]
    if name not in _FORMS:
        raise ProgramError(f"unknown operation {name!r}; {nearest(name, _FORMS)}")
    op, operands = _FORMS[name]
    if len(words) != len(operands) + 1:
        fields = OP_SPEC[op].fields
        given = words[1:]
        raise ProgramError(f"{name} takes {' '.join(fields) or 'no operands'}, got {' '.join(given) or 'none'!r}")
    values = _ABSENT.copy()
    try:
        for word, (place, field, prefix) in zip(words[1:], operands, strict=True):
            values[place] = _operand(field, prefix, word)
    except ProgramError as problem:
        raise ProgramError(f"{name}: {problem}") from None
    return Instruction(op, *values)


@cache
def _operand(field: str, prefix: str, word: str) -> int | str:
    """An operand of an instruction from its word; a prefix is the letter before a number."""
    if field == "kind" and word not in _KINDS:
        raise ProgramError(f"unknown kind {word!r}; {nearest(word, _KINDS)}")
    if not prefix:
        return word
    number = word.removeprefix(prefix)
    if number != word:
        if number == "*" and field != "peer":
            return -1
        if re.fullmatch(_NUMBER, number):
            return int(number)
    raise ProgramError(f"expected {field} as {prefix}0, {prefix}1, …, got {word!r}")


_FIELDS = Instruction.__struct_fields__[1:]
_ABSENT = list(Instruction.__struct_defaults__)
# Each operation by its word, with the place, the field and the prefix of each operand.
_FORMS: dict[str, tuple[Op, list[tuple[int, str, str]]]] = {}
for _op, _spec in OP_SPEC.items():
    _prefixes = dict(PREFIX, peer=arrow(_op))
    _operands = [(_FIELDS.index(name), name, _prefixes.get(name, "")) for name in _spec.fields]
    _FORMS[_op.value] = _op, _operands


def save(program: Program, path: str | Path) -> Path:
    """Writes a `.pipe` file, atomically."""
    return write_atomically(path, dump(program))


def load(path: str | Path) -> Program:
    """Reads a `.pipe` file.

    Raises:
        ProgramError: with the file and the line.
    """
    try:
        program = parse(read_text(path, ProgramError), str(path))
        check_size(program.header)
        _check_lists(program.header, len(program))
        return program
    except ProgramError:
        raise
    except PipefitError as problem:
        raise ProgramError(f"{path}: {problem}") from None
