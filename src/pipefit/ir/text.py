"""Programs as text: one instruction a line, for people, diffs and golden files. `parse(dump(p)) == p`."""

from __future__ import annotations

import re
from pathlib import Path

from pipefit.errors import PipefitError, ProgramError, nearest
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import OP_SPEC, Kind, Op, Reduction
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.spill import Spill
from pipefit.spec.files import read_text, write_atomically

_FORMAT = "format pipefit.program/1"
_KINDS = sorted({*map(str, Kind), *map(str, Reduction)})
_PREFIX = {"stage": "s", "mb": "m", "version": "w", "slot": "@"}


def dump(program: Program) -> str:
    """The text of a program."""
    header = program.header
    lines = [
        _FORMAT,
        f"schedule {header.schedule}",
        f"microbatches {header.num_microbatches}",
        f"steps {header.num_steps}",
        f"weights {header.weights.value}",
        f"placement {' '.join('+'.join(map(str, ranks)) for ranks in header.placement)}",
        f"updates {' '.join(map(str, header.updates))}",
    ]
    lines += [f"tie {' '.join(map(str, tie))}" for tie in header.ties]
    lines += ["clip"] if header.clip else []
    lines += ["sharded"] if header.sharded else []
    lines += [f"tensor {header.tensor}{' pieces' * header.pieces}"] if header.tensor > 1 else []
    lines += [_spill_line(header.spill)] if header.spill else []
    for rank, instructions in enumerate(program.ranks):
        lines += ["", f"rank {rank}", *(f"  {instruction}" for instruction in instructions)]
    return "\n".join(lines) + "\n"


def parse(text: str, where: str = "program") -> Program:
    """The program of a text.

    Raises:
        ProgramError: with `where`, the line number, what was expected and what came.
    """
    fields: dict[str, list[str]] = {}
    ties: list[tuple[int, ...]] = []
    ranks: list[list[Instruction]] = []
    lines = text.splitlines()
    if not lines or lines[0].strip() != _FORMAT:
        raise ProgramError(f"{where}:1: expected {_FORMAT!r}, got {lines[0].strip() if lines else 'nothing'!r}")
    for number, line in enumerate(lines[1:], 2):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            if words[0] == "rank":
                if words[1:] != [str(len(ranks))]:
                    raise ProgramError(f"expected 'rank {len(ranks)}', got {line.strip()!r}")
                ranks.append([])
            elif ranks:
                ranks[-1].append(parse_instruction(" ".join(words)))
            elif words[0] == "tie":
                ties.append(tuple(map(int, words[1:])))
            else:
                fields[words[0]] = words[1:]
        except ValueError as problem:
            raise ProgramError(f"{where}:{number}: {problem}") from None
    return Program(_header(fields, tuple(ties), where), tuple(map(tuple, ranks)))


def _header(fields: dict[str, list[str]], ties: tuple[tuple[int, ...], ...], where: str) -> Header:
    expected = ("schedule", "microbatches", "steps", "weights", "placement", "updates")
    missing = [name for name in expected if name not in fields]
    unknown = sorted(set(fields) - {*expected, "clip", "sharded", "spill", "tensor"})
    if missing or unknown:
        raise ProgramError(f"{where}: header lines missing: {missing or 'none'}; unknown: {unknown or 'none'}")
    try:
        return Header(
            schedule=" ".join(fields["schedule"]),
            num_microbatches=int(fields["microbatches"][0]),
            num_steps=int(fields["steps"][0]),
            weights=WeightRule(fields["weights"][0]),
            placement=tuple(tuple(map(int, ranks.split("+"))) for ranks in fields["placement"]),
            updates=tuple(map(int, fields["updates"])),
            ties=ties,
            clip="clip" in fields,
            sharded="sharded" in fields,
            tensor=int(fields.get("tensor", ["1"])[0]),
            pieces=fields.get("tensor", [])[1:] == ["pieces"],
            spill=_spill(fields["spill"]) if "spill" in fields else None,
        )
    except (ValueError, IndexError) as problem:
        raise ProgramError(f"{where}: header: {problem}") from None


def _spill_line(spill: Spill) -> str:
    """How a header says what is spilled: "spill host weights 2 optim 2 stages 0 1 2"."""
    stages = " ".join(map(str, spill.stages))
    parked = " activations" if spill.activations else ""
    some = (("on-host", spill.on_host), ("keeps", spill.keeps))
    lists = "".join(f" {word} {' '.join(map(str, those))}" for word, those in some if those)
    return f"spill {spill.tier} weights {spill.weights_slots} optim {spill.optim_slots} stages {stages}{parked}{lists}"


def _spill(words: list[str]) -> Spill:
    if words[1:6:2] != ["weights", "optim", "stages"]:
        raise ValueError(f"expected 'spill TIER weights N optim N stages S …', got {' '.join(words)!r}")
    optim = int(words[4])
    some: dict[str, tuple[int, ...]] = {}
    for word in ("keeps", "on-host"):
        if word in words:
            place = words.index(word)
            words, some[word] = words[:place], tuple(map(int, words[place + 1 :]))
    activations = words[-1] == "activations"
    stages = tuple(map(int, words[6:-1] if activations else words[6:]))
    on_host, keeps = some.get("on-host", ()), some.get("keeps", ())
    return Spill(words[0], int(words[2]), optim, optim > 0, stages, activations, on_host, keeps)


def parse_instruction(text: str) -> Instruction:
    """One instruction from its text.

    >>> parse_instruction("send s1 m5 act >2")
    Instruction(op=<Op.SEND: 'send'>, stage=1, mb=5, version=-1, kind='act', peer=2, tier='', slot=-1)

    Raises:
        ProgramError: unknown operation, or operands that are not the ones `OP_SPEC` names.
    """
    word, *operands = text.split()
    if word not in OP_SPEC:
        raise ProgramError(f"unknown operation {word!r}; {nearest(word, [op.value for op in Op])}")
    op = Op(word)
    fields = OP_SPEC[op].fields
    if len(operands) != len(fields):
        raise ProgramError(f"{word} takes {' '.join(fields) or 'no operands'}, got {' '.join(operands) or 'none'!r}")
    values = {field: _operand(op, field, operand) for field, operand in zip(fields, operands, strict=True)}
    return Instruction(op, **values)  # type: ignore[arg-type]


def _operand(op: Op, field: str, text: str) -> int | str:
    if field == "kind":
        if text not in _KINDS:
            raise ProgramError(f"{op.value}: unknown kind {text!r}; {nearest(text, _KINDS)}")
        return text
    if field == "tier":
        return text
    prefix = _PREFIX.get(field) or (">" if op is Op.SEND else "<")
    match = re.fullmatch(re.escape(prefix) + r"(\d+|\*)", text)
    if match is None or (match.group(1) == "*" and field == "peer"):
        raise ProgramError(f"{op.value}: expected {field} as {prefix}0, {prefix}1, …, got {text!r}")
    return -1 if match.group(1) == "*" else int(match.group(1))


def save(program: Program, path: str | Path) -> Path:
    """Writes a `.pipe` file, atomically."""
    return write_atomically(path, dump(program))


def load(path: str | Path) -> Program:
    """Reads a `.pipe` file.

    Raises:
        ProgramError: with the file and the line.
    """
    try:
        return parse(read_text(path, ProgramError), str(path))
    except ProgramError:
        raise
    except PipefitError as problem:
        raise ProgramError(f"{path}: {problem}") from None
