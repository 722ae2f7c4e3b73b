"""Each schedule's drawing, and its laws."""

import inspect
from itertools import product

import pytest
from tests.golden import FOLDER, SHAPES
from tests.grids import columns, grid

from pipefit.errors import ScheduleError
from pipefit.ir import Op
from pipefit.ir.liveness import peak_inflight, weight_versions
from pipefit.ir.text import dump
from pipefit.schedules import Shape, find, generate, names
from pipefit.verify import verify

ONE_F_ONE_B = """
F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
.  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .
.  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .
"""

GRIDS = {
    "naive": (
        Shape(3, 2),
        """
        F0 .  .  .  .  B0 F1 .  .  .  .  B1
        .  F0 .  .  B0 .  .  F1 .  .  B1 .
        .  .  F0 B0 .  .  .  .  F1 B1 .  .
        """,
    ),
    "data-parallel": (
        Shape(3, 6),
        """
        F0 B0 F3 B3
        F1 B1 F4 B4
        F2 B2 F5 B5
        """,
    ),
    "gpipe": (
        Shape(3, 4),
        """
        F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
        .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
        .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
        """,
    ),
    "1f1b": (
        Shape(3, 4),
        """
        F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
        """,
    ),
    "pipedream": (Shape(3, 1, num_steps=5), ONE_F_ONE_B),
    "pipedream-vertical-sync": (Shape(3, 1, num_steps=5), ONE_F_ONE_B),
    "pipedream-2bw": (
        Shape(3, 2, num_steps=3),
        """
        F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
        .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .
        """,
    ),
    "interleaved": (
        Shape(2, 4, num_chunks=2),
        """
        F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 .    B2.2 .    B2.3 B0.2 B0.3
        .    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 .
        """,
    ),
    "breadth-first": (
        Shape(2, 4, num_chunks=2),
        """
        F0.0 F0.1 F0.2 F0.3 F2.0 F2.1 F2.2 F2.3 .    .    B2.0 B2.1 B2.2 B2.3 B0.0 B0.1 B0.2 B0.3
        .    F1.0 F1.1 F1.2 F1.3 F3.0 F3.1 F3.2 F3.3 B3.0 B3.1 B3.2 B3.3 B1.0 B1.1 B1.2 B1.3 .
        """,
    ),
    "zb-h1": (
        Shape(3, 4),
        """
        F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ),
    "zb-h2": (
        Shape(3, 5),
        """
        F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
        """,
    ),
    "zb-v": (
        Shape(2, 3, num_chunks=2),
        """
        F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 I0.1 W0.1 I0.2 W0.2 W3.2 .
        .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 I1.1 I2.2 I1.2 W1.1 W1.2 W2.1 W2.2
        """,
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_is_the_one_that_is_drawn(name):
    shape, drawn = GRIDS[name]
    assert columns(generate(name, shape)) == [line.split() for line in drawn.split("\n") if line.strip()]


@pytest.mark.parametrize("name", GRIDS)
def test_the_docstring_draws_the_same_grid(name):
    shape, _ = GRIDS[name]
    text = inspect.getdoc(find(name).order)
    lines = [line.split("rank")[0].split() for line in text.splitlines() if line.startswith("    ")]
    assert lines == columns(generate(name, shape))
    assert "   rank 0" in text and grid(generate(name, shape)).splitlines()[0].split("rank")[0] in text


def test_every_schedule_of_the_house_is_drawn_and_has_a_golden_program():
    assert set(names()[:13]) == {*GRIDS, "spilled"} == {schedule for schedule, _ in SHAPES.values()}


def test_the_docstring_of_spilled_draws_its_work_and_its_lanes_of_copies():
    (instructions,) = generate("spilled", Shape(3, 2)).ranks
    letters = {Op.FETCH: "f", Op.EVICT: "e", Op.STEP: "S"}
    moved = [i for i in instructions if i.kind == "weights"]
    work = [i for i in instructions if i.op in (Op.FWD, Op.BWD, Op.STEP)]
    expected = [
        [".", *(f"{letters[i.op]}{i.stage}" if i.op is Op.STEP else i.short for i in work), "."],
        *([f"{letters[op]}{i.stage}" for i in moved if i.op is op] for op in (Op.FETCH, Op.EVICT)),
    ]
    lines = [line for line in inspect.getdoc(find("spilled").order).splitlines() if line.startswith("    ")]
    ends = ("compute", "to the device", "back")
    assert [line.removesuffix(end).split() for line, end in zip(lines, ends, strict=True)] == expected


@pytest.mark.parametrize("name", SHAPES)
def test_the_golden_program_is_what_is_generated(name):
    schedule, shape = SHAPES[name]
    assert (FOLDER / f"{name}.pipe").read_text() == dump(generate(schedule, shape)), "meant? python -m tests.golden"


def test_no_golden_program_is_left_over():
    assert {path.stem for path in FOLDER.glob("*.pipe")} == set(SHAPES)


def inflight(program):
    return [round(peak_inflight(program, rank), 9) for rank in range(len(program.ranks))]


@pytest.mark.parametrize(("p", "m"), [*product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8, 16))])
def test_activations_in_flight_follow_the_laws(p, m):
    ranks = range(p)
    assert inflight(generate("naive", Shape(p, m))) == [1] * p
    assert inflight(generate("gpipe", Shape(p, m))) == [m] * p
    assert inflight(generate("1f1b", Shape(p, m))) == [min(p - r, m) for r in ranks]
    twice = generate("1f1b", Shape(p, m, options={"warmup": 2}))
    assert inflight(twice) == [min(2 * (p - r) - 1, m) for r in ranks]
    assert inflight(generate("breadth-first", Shape(p, m, num_chunks=2))) == [m] * p
    assert inflight(generate("zb-h1", Shape(p, m))) == [min(p, m)] * p
    assert inflight(generate("zb-h2", Shape(p, m))) == [min(2 * p - 1, m)] * p
    assert inflight(generate("zb-v", Shape(p, m, num_chunks=2))) == [min(p, m)] * p


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_a_stage_with_fewer_replicas_than_the_first_puts_no_weight_half_off(name):
    """Its warm-up is then longer than the first stage's, and weight halves were put off by a negative number."""
    assert verify(generate(name, Shape(depth=4, num_microbatches=2, replicas=(2, 1, 1, 2)))).ok


@pytest.mark.parametrize(("p", "v", "laps"), [*product((2, 3, 4), (2, 3), (2, 3))])
def test_activations_in_flight_of_interleaved_follow_the_law(p, v, laps):
    program = generate("interleaved", Shape(p, laps * p, num_chunks=v))
    assert inflight(program) == [round(((v - 1) * p + 2 * (p - 1 - r) + 1) / v, 9) for r in range(p)]


@pytest.mark.parametrize(("p", "m", "more"), [(4, 8, {}), (3, 4, {"replicas": (2, 2, 2)}), (2, 5, {"num_steps": 2})])
def test_interleaved_with_one_chunk_is_1f1b(p, m, more):
    program = generate("interleaved", Shape(p, m, **more))
    assert program.ranks == generate("1f1b", Shape(p, m, **more)).ranks
    if not more:
        assert inflight(program) == [4, 3, 2, 1]


@pytest.mark.parametrize(("p", "v", "laps"), [*product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3))])
def test_the_bubble_of_loops_shrinks_by_the_number_of_chunks(p, v, laps):
    m = laps * p
    for name in ("interleaved", "breadth-first"):
        assert len(columns(generate(name, Shape(p, m, num_chunks=v)))[0]) == 2 * (m * v + p - 1)


@pytest.mark.parametrize(("p", "m"), [*product((1, 2, 3, 4), (1, 2, 3, 5, 8))])
def test_a_flush_takes_m_plus_p_minus_one_pairs(p, m):
    for name in ("gpipe", "1f1b"):
        assert len(columns(generate(name, Shape(p, m)))[0]) == 2 * (m + p - 1)
    assert len(columns(generate("naive", Shape(p, m)))[0]) == 2 * m * p


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_live_versions_follow_the_laws(n):
    def alive(name, m, steps):
        program = generate(name, Shape(n, m, num_steps=steps))
        return [weight_versions(program, rank) for rank in range(n)]

    assert alive("pipedream", 1, 3 * n) == [n - s for s in range(n)]
    assert alive("pipedream-vertical-sync", 1, 3 * n) == [n] * n
    assert alive("pipedream-2bw", n, 5) == [2] * n
    assert alive("1f1b", n, 3) == [1] * n


def used(program, op=Op.BWD):
    """The version each (stage, micro-batch) uses."""
    return {(i.stage, i.mb): i.version for own in program.ranks for i in own if i.op is op}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_versions_are_those_of_the_delayed_gradient_formulas(n):
    steps = 3 * n
    stash = used(generate("pipedream", Shape(n, 1, num_steps=steps)))
    vertical = used(generate("pipedream-vertical-sync", Shape(n, 1, num_steps=steps)))
    for s, t in product(range(n), range(steps)):
        # w(t+1) = w(t) - nu * grad f(w_1 at t-n+1, ..., w_n at t): delay min(t, n-1-s) at stage s, n-1 everywhere.
        assert stash[s, t] == max(t - (n - 1 - s), 0)
        assert vertical[s, t] == max(t - (n - 1), 0)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 3), (4, 8)])
def test_double_buffering_is_one_update_behind(n, m):
    program = generate("pipedream-2bw", Shape(n, m, num_steps=4))
    for (_, mb), version in used(program).items():
        assert version == max(mb // m - 1, 0)  # micro-batches from 1: max(floor((k - 1) / m) - 1, 0)
    assert used(program) == used(program, Op.FWD)


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_double_buffering_needs_as_many_microbatches_as_ranks_but_one(p):
    assert generate("pipedream-2bw", Shape(p, p - 1, num_steps=4))
    if p > 2:
        with pytest.raises(ScheduleError, match=f"use {p - 1} or more"):
            generate("pipedream-2bw", Shape(p, p - 2, num_steps=4))


def test_replicas_share_minibatches_in_turn_and_stay_in_flight_as_the_paper_says():
    program = generate("pipedream", Shape(3, 1, num_steps=12, replicas=(1, 2, 1)))
    assert program.header.placement == ((0,), (1, 2), (3,))
    assert {i.mb % 2 for i in program.ranks[1] if i.op is Op.FWD} == {0}
    workers, before = 4, {0: 0, 1: 1, 2: 1, 3: 3}
    copies = {0: 1, 1: 2, 2: 2, 3: 1}
    for rank in range(4):
        assert peak_inflight(program, rank) == (workers - 1 - before[rank]) // copies[rank] + 1


def test_a_ragged_last_group_holds_no_more_than_a_full_one():
    for p, v, m in product((2, 3, 4), (2, 3), range(1, 10)):
        full = -(-m // p) * p
        ragged, whole = (inflight(generate("interleaved", Shape(p, count, num_chunks=v))) for count in (m, full))
        assert all(few <= many for few, many in zip(ragged, whole, strict=True))


def test_schedules_of_the_house_come_in_the_order_that_users_read():
    assert names()[:4] == ["naive", "data-parallel", "gpipe", "1f1b"]


def test_an_unknown_schedule_suggests_the_nearest():
    with pytest.raises(ScheduleError, match="did you mean interleaved"):
        find("interleave")
