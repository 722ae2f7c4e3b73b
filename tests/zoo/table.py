"""The manual's page of the zoo from its results; `python -m tests.zoo.table` writes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.zoo.outcome import BROKEN, EXACT, LATE, RAW, REFUSED, SLOW, WRONG, Result, read_lines

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "runs" / "zoo.jsonl", ROOT / "docs" / "zoo.md"
GROUPS = ("hand", "timm", "torchvision", "diffusers", "torch_geometric", "torchaudio", "transformers")
MOST_WORDS = 260


def counts(results: Sequence[Result]) -> str:
    """One row for each library: the number of models of each outcome."""
    columns = (EXACT, REFUSED, WRONG, RAW, LATE, SLOW)
    head = ["models of", "tried", *columns, "exact, of those that a person could cut"]
    rows = [_row(head), _row(["---"] * len(head))]
    for group in (*GROUPS, "all"):
        those = [one for one in results if group in (one.group, "all") and one.outcome != BROKEN]
        possible = [one for one in those if one.by_hand]
        exact = sum(one.outcome == EXACT for one in possible)
        share = f"{exact} of {len(possible)}, {100 * exact / len(possible):.0f} %" if possible else ""
        numbers = [sum(one.outcome == outcome for one in those) for outcome in columns]
        rows.append(_row([f"**{group}**" if group == "all" else group, len(those), *numbers, share]))
    return "\n".join(rows)


def refused(results: Sequence[Result]) -> str:
    """Each model that is refused, with its message."""
    return _messages([one for one in results if one.outcome == REFUSED])


def failed(results: Sequence[Result]) -> str:
    """Each model that ends in another way than exact or refused, with what happened."""
    return _messages([one for one in results if one.outcome in (WRONG, RAW, LATE, SLOW)], with_outcome=True)


def impossible(results: Sequence[Result]) -> str:
    """The models that a person could not cut, with the reason."""
    rows = [_row(["model", "reason", "outcome"]), _row(["---"] * 3)]
    rows += [_row([one.name, one.why, one.outcome]) for one in results if not one.by_hand and one.outcome != BROKEN]
    return "\n".join(rows)


def exact(results: Sequence[Result]) -> str:
    """The names of the models that train exactly."""
    lines = []
    for group in GROUPS:
        names = [one.name.removeprefix(f"{group}/") for one in results if one.group == group and one.outcome == EXACT]
        if names:
            lines.append(f"- **{group}**: {'; '.join(names)}")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "counts": counts,
    "refused": refused,
    "failed": failed,
    "impossible": impossible,
    "exact": exact,
}
_PLACE = re.compile(r"(<!-- zoo: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, results: Sequence[Result]) -> str:
    """Returns the page with its tables made anew."""
    return _PLACE.sub(lambda match: f"{match[1]}{TABLES[match[2]](results)}\n{match[3]}", page)


def _messages(results: Sequence[Result], *, with_outcome: bool = False) -> str:
    if not results:
        return "None."
    head = ["model", "outcome", "message"] if with_outcome else ["model", "message"]
    rows = [_row(head), _row(["---"] * len(head))]
    for one in results:
        words = f"`{_short(one.detail)}`" if one.detail else ""
        rows.append(_row([one.name, one.outcome, words] if with_outcome else [one.name, words]))
    return "\n".join(rows)


def _short(message: str) -> str:
    """A message on one line, without paths of the machine, the advice that ends all of them, and marks of a table."""
    text = " ".join(message.split()).replace("`", "'").replace("|", "/")
    text = re.sub(r"(/[\w.~-]+)+/(?=[\w.-]+)", "", text)
    text = re.sub(r"\. Give cuts=\[.*", "", text).replace(" (in two processes)", "")
    return text if len(text) <= MOST_WORDS else f"{text[: MOST_WORDS - 1]}…"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    found = sorted(read_lines(RESULTS).values(), key=lambda one: (GROUPS.index(one.group), one.name))
    PAGE.write_text(filled(PAGE.read_text(), found))
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(found)} models\n")
