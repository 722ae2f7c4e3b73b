"""The table of all trials of faults: each test counts its trials, and the run ends by printing them."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator

import pytest

COLUMNS = ("ended well", "named the culprit", "same numbers")
_NAME = "trials"
Cells = list[list[int]]
"""For each column the trials that did it, and those to which it applies."""


_OUTCOME = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps the outcome of a test for its fixtures."""
    report = yield
    item.stash[_OUTCOME] = report.outcome
    return report


@pytest.fixture
def trial(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Callable[..., None]]:
    """Counts a trial: `trial("a flipped byte in a plan", well=True, named=True)`; None: the column does not apply.

    A trial that did not end well is counted, too; the test fails at the end and names the first ones. It also fails
    where not one trial was counted: then nothing has been shown.
    """
    counts: dict[str, Cells] = defaultdict(_zeros)
    bad: list[str] = []

    def count(fault: str, what: object, *, well: bool, named: bool | None = None, resumed: bool | None = None) -> None:
        for cell, value in zip(counts[fault], (well, named, resumed), strict=True):
            if value is not None:
                cell[0] += value
                cell[1] += 1
        if False in (well, named, resumed):
            bad.append(f"{fault}: {what}: well={well} named={named} resumed={resumed}")

    yield count
    if request.node.stash[_OUTCOME] == "passed":
        assert counts, "not one trial was counted"
    record_property(_NAME, dict(counts))
    assert not bad, f"{len(bad)} trials failed, the first: " + "\n".join(bad[:5])


def _zeros() -> Cells:
    return [[0, 0] for _ in COLUMNS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the trials that were counted, here or in other processes of the run, and what was not tried."""
    total: dict[str, Cells] = defaultdict(_zeros)
    missing = []
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if outcome == "skipped":
                missing.append(_not_tried(report))
                continue
            for name, counts in getattr(report, "user_properties", ()):
                if name == _NAME and report.when == "teardown":
                    _add(total, counts)
    if not total and not missing:
        return
    terminalreporter.section("faults")
    for line in [*_lines(total), *sorted(missing)]:
        terminalreporter.write_line(line)


def _add(total: dict[str, Cells], counts: dict[str, Cells]) -> None:
    for fault, cells in counts.items():
        for cell, (done, of) in zip(total[fault], cells, strict=True):
            cell[0] += done
            cell[1] += of


def _not_tried(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return f"NOT TRIED  {report.nodeid.rpartition('/')[2]}: {reason.removeprefix('Skipped: ')}"


def _lines(total: dict[str, Cells]) -> list[str]:
    width = max(map(len, total), default=0)
    lines = ["  ".join([" " * width, *(name.rjust(_WIDTH) for name in COLUMNS)])]
    for fault, cells in sorted(total.items()):
        shown = [f"{done}/{of}" if of else "–" for done, of in cells]
        lines.append("  ".join([fault.ljust(width), *(text.rjust(_WIDTH) for text in shown)]))
    return lines


_WIDTH = max(map(len, COLUMNS))
