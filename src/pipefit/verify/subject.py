"""The subject of the rules: a program whose instructions are all well-formed, its graph, and an index of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipefit.ir.graph import Graph, dependency_graph
from pipefit.ir.instruction import StageAt
from pipefit.ir.op import Op
from pipefit.ir.program import Header, Program
from pipefit.ir.values import CONSUMES, Value
from pipefit.ir.values import Rule as ValueRule

Places = dict[tuple[int, Value], list[int]]
"""Numbers of instructions by rank and value."""

ByOperation = dict[Op, defaultdict[StageAt, list[int]]]


class Finding(NamedTuple):
    """A finding of a rule.

    Attributes:
        rule: its name.
        rank: the rank of the place; −1 when it belongs to no rank.
        position: the index in the rank's list; −1 when something is missing.
        message: the expectation, and the finding in its place.
    """

    rule: str
    rank: int
    position: int
    message: str


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Subject:
    """A program under proof.

    Attributes:
        program: without malformed instructions.
        graph: its dependencies.
        kept: for each of its instructions, the index in the given program.
        places: for each operation, the numbers of its instructions by stage and micro-batch, or, where it has none,
            version; a loss is the last stage's, a step on the host is a step.
    """

    program: Program
    graph: Graph
    kept: list[list[int]]
    places: ByOperation

    @classmethod
    def of(cls, program: Program, kept: list[list[int]]) -> Subject:
        """The subject of a program."""
        graph = dependency_graph(program)
        places: ByOperation = {op: defaultdict(list) for op in Op}
        places[Op.HOST_STEP] = places[Op.STEP]
        loss = Op.LOSS
        last = program.header.last_stage
        for number, i in enumerate(graph.instructions):
            stage = i.stage
            if i.op is loss:
                stage = last
            at = i.mb
            if at < 0:
                at = i.version
            places[i.op][stage, at].append(number)
        return cls(program, graph, kept, places)

    def each(self, *ops: Op) -> Iterator[tuple[int, int, int]]:
        """The stage, the micro-batch or version, and the number of every instruction of these operations."""
        for op in ops:
            for (stage, at), numbers in self.places[op].items():
                for number in numbers:
                    yield stage, at, number

    @cached_property
    def gone(self) -> Places:
        """The places at which values were consumed."""
        return self.places_of(CONSUMES)

    @property
    def header(self) -> Header:
        """The program's header."""
        return self.program.header

    def place(self, number: int) -> tuple[int, int]:
        """The rank of an instruction, and its index in the given program."""
        rank, index = self.graph.place(number)
        return rank, self.kept[rank][index]

    def at(self, rule: str, number: int, message: str) -> Finding:
        """A finding about an instruction."""
        rank, index = self.place(number)
        return Finding(rule, rank, index, message)

    def where(self, number: int) -> str:
        """An instruction and its place, for messages."""
        rank, index = self.place(number)
        return f"rank {rank}[{index}] {self.graph.instructions[number]}"

    def places_of(self, rules: Mapping[Op, ValueRule]) -> Places:
        """The instructions that make (or need, or consume) each value, in order, by its rank and the value."""
        found = defaultdict(list)
        for number, i in enumerate(self.graph.instructions):
            rank = self.graph.ranks[number]
            for value in rules[i.op](i, self.program, rank):
                found[rank, value].append(number)
        return found


Rule = Callable[[Subject], Iterator[Finding]]
