"""Copies that take unequal parts of the micro-batches compute what one process computes."""

from typing import Any

import pytest
from tests.pipelines import grouped
from tests.testing.equality_models import make

from pipefit.errors import ScheduleError
from pipefit.ir import text
from pipefit.planner import by_hand
from pipefit.schedules import Shape, generate, program_of
from pipefit.testing import check
from pipefit.verify import verify

CASES: list[tuple[str, str, int, tuple[int, ...], dict[str, Any]]] = [
    ("data-parallel", "batch norm", 1, (3, 1), {"clip_norm": 0.05}),
    ("data-parallel", "dropout", 1, (4, 2, 1), {"batch_size": [9, 9, 8]}),
    ("gpipe", "tied ends", 2, (3, 1), {"recompute": True}),
    ("1f1b", "batch norm", 2, (1, 4), {"clip_norm": 0.05, "recompute": "layer"}),
    ("1f1b", "a frozen first half with batch norms", 2, (3, 2), {}),
    ("interleaved", "plain", 2, (5, 2), {"chunks": 2}),
    ("breadth-first", "tied neighbours", 2, (3, 1), {"chunks": 2}),
    ("zb-h1", "a skip over stages", 2, (3, 1), {}),
    ("zb-v", "convolutions", 2, (2, 1), {"chunks": 2}),
]


@pytest.mark.parametrize(("name", "model", "depth", "shares", "more"), CASES, ids=[f"{c[0]} {c[3]}" for c in CASES])
def test_unequal_shares_are_exact(
    name: str, model: str, depth: int, shares: tuple[int, ...], more: dict[str, Any]
) -> None:
    layers, example = make(model)
    copies = len(shares)
    spread = {"num_ranks": depth * copies, "shares": shares, "num_microbatches": sum(shares)}
    if name != "data-parallel":
        spread["replicas"] = (copies,)
    result = check(layers, **grouped(example=example, schedule=name, steps=3, **spread, **more))
    assert result.equal, result


def test_a_program_with_shares_comes_back_from_its_text_and_no_other_split_is_accepted() -> None:
    program = generate("1f1b", Shape(2, 4, replicas=(2,), shares=(3, 1)))
    written = text.dump(program)
    assert "shares 3 1\n" in written and text.parse(written) == program
    assert not verify(program).violations
    other = text.parse(written.replace("shares 3 1", "shares 1 3"))
    assert {finding.rule for finding in verify(other).violations} >= {"ownership", "messages"}


@pytest.mark.parametrize(
    ("schedule", "shares", "says"),
    [
        ("pipedream-2bw", (3, 1), "use a schedule that flushes"),
        ("1f1b", (3, 2), "add up to 4, got \\[3, 2\\]"),
        ("1f1b", (4, 0), "at least 1"),
        ("1f1b", (2, 1, 1), "each of 2 replicas"),
    ],
)
def test_shares_that_cannot_be_are_refused(schedule: str, shares: tuple[int, ...], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        generate(schedule, Shape(2, 4, replicas=(2,), shares=shares))


def test_a_plan_whose_shares_do_not_fit_its_copies_is_refused() -> None:
    plan = by_hand(4, num_ranks=2, schedule="1f1b", num_microbatches=4, shares=(3, 1))
    with pytest.raises(ScheduleError, match="each of 1 replicas"):
        program_of(plan)
