"""The order of pipelines that have lost a rank: as its docstring draws it, proved for every placement, at the bound."""

import inspect
from itertools import product

import pytest
from tests.grids import columns

from pipefit.ir.liveness import peak_inflight
from pipefit.schedules import Shape, find, names
from pipefit.verify import verify

DRAWN = """
F0 F1 F2 F3 .  I0 I1 I2 I3 W0 W1 W2 W3
.  F0 .  F2 I0 W0 I2 W2 .  .  .  .  .
.  .  F0 I0 F2 I2 W0 W2 .  .  .  .  .
.  .  F1 .  F3 I1 W1 I3 W3 .  .  .  .
.  .  .  F1 I1 F3 I3 W1 W3 .  .  .  .
"""

PLACEMENTS = {
    "a copy of the first stage is lost": ((0,), (1, 3), (2, 4)),
    "a copy of the last stage is lost": ((0, 3), (1, 4), (2,)),
    "a copy of two chunks is lost": ((2,), (0, 3), (1, 4), (2,), (0, 3), (1, 4)),
    "chunks in a V": ((0, 2), (1,), (1,), (0, 2)),
    "a stage was given to a neighbour": ((0,), (0,), (0, 1), (2,)),
    "one rank is left": ((0,), (0,), (0,)),
}


def test_the_grid_is_the_one_that_is_drawn() -> None:
    program = find("patched")(Shape(3, 4, placement=((0,), (1, 3), (2, 4))))
    assert columns(program) == [line.split() for line in DRAWN.strip().splitlines()]
    text = inspect.getdoc(find("patched").order)
    lines = [line.split("rank")[0].split() for line in text.splitlines() if line.startswith("    ")]
    assert lines == columns(program)


def test_it_is_for_a_given_placement_and_not_among_those_that_plans_are_searched_with() -> None:
    assert "patched" not in names()


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_and_option_is_proved_and_holds_no_more_than_it_may(placement) -> None:
    """Shared weights and clipping add reductions in which ranks wait for each other."""
    ties = ((0, len(placement) - 1),)
    for held, eager, split in product((0, 1, 2), (0, 1), (0, 1)):
        options = {"held": held, "eager": eager, "split": split}
        shape = Shape(len(placement), 7, placement=placement, options=options, ties=ties, clip=True)
        program = find("patched")(shape)
        report = verify(program)
        assert not report.violations, report
        peaks = [peak_inflight(program, rank) for rank in range(len(program.ranks))]
        assert not held or max(peaks) <= held + 1e-9
