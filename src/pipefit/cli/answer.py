"""The answer of a verb: data for programs, text for people, an exit code. Nothing else reaches standard output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

FINE, FINDING, USAGE, INTERNAL_ERROR = 0, 1, 2, 70
"""Exit codes: all is well; a finding (or a run that failed); bad input; a mistake of pipefit itself."""


@dataclass(frozen=True)
class Answer:
    """The result of a verb.

    Attributes:
        data: the JSON object of `--json`.
        text: what is printed without it; a function where making the text costs something.
        code: exit code.
        output: the file that was written, or a list of them; None or empty: none.
    """

    data: Mapping[str, Any]
    text: str | Callable[[], str]
    code: int = FINE
    output: Path | Sequence[Path] | None = None

    def show(self, wants_json: bool) -> str:
        """The text for standard output."""
        if wants_json:
            return as_json({**self.data, "output": self.output} if self.output else self.data)
        text = self.text() if callable(self.text) else self.text
        written = [self.output] if isinstance(self.output, Path) else self.output or []
        return "\n".join([*filter(None, [text]), *(f"wrote {path}" for path in written)])


def as_json(data: Mapping[str, Any]) -> str:
    """One line of strict JSON: infinities and NaN, which JSON has no word for, become null."""
    return msgspec.json.format(msgspec.json.encode(data, enc_hook=_plain), indent=0).decode()


def _plain(value: Any) -> Any:
    """A value for JSON of one that JSON does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    return float(value) if hasattr(value, "__float__") else str(value)
