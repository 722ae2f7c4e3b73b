"""The outcome of a model of the zoo, and its form in a file: a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

EXACT, REFUSED, WRONG, RAW, LATE, SLOW, BROKEN = (
    "exact", "refused", "wrong", "raw error", "accepted, then refused", "too slow", "does not run in torch"
)  # fmt: skip
WORST_FIRST = (WRONG, LATE, RAW, SLOW, REFUSED, BROKEN, EXACT)


@dataclass
class Result:
    """The outcome of a model.

    Attributes:
        name: of the model.
        outcome: one of the words above.
        detail: the message of an error, or what differs.
        layers: of its cut.
        seconds: for all of it.
        by_hand: whether a person could cut it.
        why: the reason, if not.
    """

    name: str
    outcome: str
    detail: str = ""
    layers: int = 0
    seconds: float = 0.0
    by_hand: bool = True
    why: str = ""

    @property
    def group(self) -> str:
        """The library, or "hand"."""
        return self.name.split("/")[0]


def worst(results: list[Result]) -> Result:
    """The worst of several outcomes of a model."""
    return min(results, key=lambda one: WORST_FIRST.index(one.outcome))


def line(result: Result) -> str:
    """A result as a line of JSON."""
    return json.dumps(asdict(result))


def read(text: str) -> Result:
    """A result that `line` wrote."""
    return Result(**json.loads(text))


def read_lines(path: Path) -> dict[str, Result]:
    """The last result of each model in a file; none if there is no file."""
    texts = path.read_text().splitlines() if path.exists() else []
    return {result.name: result for result in map(read, texts)}
