"""The table of all trials of faults: each test counts its trials, and the run ends by printing them."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

COLUMNS = ("tried", "ended well", "named the culprit", "resumed to the bit")
_NAME = "trials"


@pytest.fixture
def trial(record_property: Callable[[str, object], None]) -> Iterator[Callable[..., None]]:
    """Counts a trial: `trial("a flipped byte in a plan", well=True, named=True)`; None: the column does not apply.

    A trial that did not end well is counted, too; the test fails at the end and names the first ones.
    """
    counts: dict[str, list[list[int]]] = defaultdict(lambda: [[0, 0] for _ in COLUMNS])
    bad: list[str] = []

    def count(fault: str, what: object, *, well: bool, named: bool | None = None, resumed: bool | None = None) -> None:
        for cell, value in zip(counts[fault], (True, well, named, resumed), strict=True):
            if value is not None:
                cell[0] += value
                cell[1] += 1
        if False in (well, named, resumed):
            bad.append(f"{fault}: {what}: well={well} named={named} resumed={resumed}")

    yield count
    record_property(_NAME, dict(counts))
    assert not bad, f"{len(bad)} trials failed, the first: " + "\n".join(bad[:5])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of the trials that were counted, here or in other processes of the run."""
    total: dict[str, list[list[int]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, counts in getattr(report, "user_properties", ()):
                for fault, cells in counts.items() if name == _NAME and report.when == "teardown" else ():
                    for sum_, cell in zip(total.setdefault(fault, [[0, 0] for _ in COLUMNS]), cells, strict=True):
                        sum_[0] += cell[0]
                        sum_[1] += cell[1]
    if total:
        terminalreporter.section("faults")
        for line in _lines(total):
            terminalreporter.write_line(line)


def _lines(total: dict[str, list[list[int]]]) -> list[str]:
    width = max(map(len, total))
    lines = ["  ".join([" " * width, *COLUMNS])]
    for fault, cells in sorted(total.items()):
        shown = [str(done) if of else "–" for done, of in cells]
        row = (text.rjust(len(name)) for text, name in zip(shown, COLUMNS, strict=True))
        lines.append("  ".join([fault.ljust(width), *row]))
    return lines
