"""Report: all violations in a program, each with its place in the grid."""

from __future__ import annotations

import msgspec

from pipefit.errors import InvalidProgramError
from pipefit.units import counted

RULES = {
    "complete": "each micro-batch is loaded, goes forward once at every stage and backward once at each that is not "
    "frozen; each update steps once",
    "ownership": "every instruction is on the rank that holds its stage and, round-robin or by shares, its micro-batch",
    "dependencies": "what an instruction needs was made on its rank before it",
    "use-after-free": "no value is used after it is consumed, dropped or evicted",
    "messages": "every value that another rank needs is sent to it once and received once, and nothing else is sent",
    "fifo": "the receives of a link are posted in the order of its sends, so that messages need no tags",
    "deadlock": "no cycle of waiting, even when a send waits for its receive and a collective for all its members",
    "collectives": "all members take part in each reduction that is due, in one order, after gradients, before steps",
    "versions": "weights have the version that the header's rule asks for, and are dropped exactly when they are dead",
    "residency": "a spilled value is fetched into a free slot, from a tier with that version, and ends on its tier",
    "sharing": "weights that copies share are whole and new when they are used; gradients are summed before they go",
    "memory": "what a rank holds at once fits its capacity",
}
"""Every rule, and its requirement in one sentence."""


class Violation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One violation.

    Attributes:
        rule: a key of `RULES`.
        rank: the rank of the place; −1 when it belongs to no rank.
        index: the place in the rank's list; −1 when something is missing.
        instruction: its text, "" when index is −1.
        message: the expectation, and the finding in its place.
        excerpt: the grid around it, with a mark.
    """

    rule: str
    rank: int
    index: int
    instruction: str
    message: str
    excerpt: str = ""

    def __str__(self) -> str:
        text = self.rule
        if self.rank >= 0:
            text += f": rank {self.rank}"
            if self.index >= 0:
                text += f"[{self.index}] {self.instruction}"
        text += f": {self.message}"
        if self.excerpt:
            text += f"\n{self.excerpt}"
        return text


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The findings of the verifier. In files: `"format": "pipefit.report/1"`.

    Attributes:
        schedule: the name in the program's header.
        num_instructions: number of instructions checked.
        violations: all findings by rule in the order of `RULES`, then by rank and index.
    """

    schedule: str
    num_instructions: int
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Returns whether there are no violations."""
        return not self.violations

    def __str__(self) -> str:
        if self.ok:
            return f"{self.schedule}: {self.num_instructions} instructions, no violations"
        number = counted(len(self.violations), "violation")
        head = f"{self.schedule}: {number} in {self.num_instructions} instructions"
        return "\n\n".join([head, *map(str, self.violations)])

    def raise_if_bad(self) -> None:
        """Does nothing for a program without violations.

        Raises:
            InvalidProgramError: with all violations.
        """
        if not self.ok:
            raise InvalidProgramError(str(self))
