"""A step cut into turns."""

import itertools
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from pipefit.ir.op import Op
from pipefit.study.picture import picture, trace
from pipefit.study.simulation import TrialCost, simulate_study
from pipefit.study.turns import replays, step_program, turns_of
from pipefit.verify import verify

SHAPES = [(1, 1), (1, 3), (2, 1), (3, 2), (5, 4)]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("shards", "mbs"), SHAPES)
def test_turns_cover_the_program_in_order_and_hand_on_exactly_what_later_ones_take(shards, mbs, clip):
    program = step_program(shards, mbs, clip)
    assert not verify(program).violations
    turns = turns_of(program)
    assert turns[0].first == 0 and turns[-1].end == len(program.ranks[0])
    assert all(a.end == b.first for a, b in itertools.pairwise(turns))
    left = set()
    for turn in turns:
        loads = {(i.stage, i.mb) for i in replays(program, turn)}
        assert {v for v in turn.takes if v.kind != "input"} <= left
        assert {(v.stage, v.at) for v in turn.takes if v.kind == "input"} == loads
        left |= set(turn.leaves)
    taken = {value for turn in turns for value in turn.takes}
    assert left <= taken


@pytest.mark.parametrize(("shards", "mbs"), SHAPES)
def test_a_step_of_s_shards_has_2s_minus_1_turns_and_clipping_adds_one_for_each_shard_but_the_first(shards, mbs):
    plain, clipped = turns_of(step_program(shards, mbs)), turns_of(step_program(shards, mbs, clip=True))
    up_and_down = [*range(shards - 1), *reversed(range(shards))]
    assert [turn.stage for turn in plain] == up_and_down
    assert [turn.stage for turn in clipped] == up_and_down + list(range(1, shards))
    for turns in (plain, clipped):
        assert sorted(turn.stage for turn in turns if turn.steps) == list(range(shards))


def test_the_last_shard_turns_around_at_once_and_replays_nothing():
    program = step_program(3, 2)
    ops = [(i.op, i.stage) for i in program.ranks[0]]
    assert (Op.RECOMPUTE, 2) not in ops and ops.count((Op.RECOMPUTE, 0)) == 2
    assert [str(i) for i in program.ranks[0]][-2:] == ["step s0 w0", "drop s0 w0"]


def test_the_picture_has_a_box_for_every_turn_and_names_every_trial():
    outcome = simulate_study([TrialCost((0.5, 0.25), 3, 0.1), TrialCost((1.0,), 2, 0.1)], 2)
    drawn = picture(outcome, ["a<b", "c"], 2, title="mine & yours")
    svg = "{http://www.w3.org/2000/svg}"
    boxes = [e for e in ElementTree.fromstring(drawn).iter(f"{svg}rect") if e.find(f"{svg}title") is not None]
    assert len(boxes) == len(outcome.turns) == 10
    assert "a&lt;b" in drawn and "lower bound" in drawn
    slices = [e for e in trace(outcome, ["a", "c"])["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 10


def test_what_plans_a_study_works_with_torch_blocked():
    code = """
import sys; sys.modules["torch"] = None
import pipefit.study.board, pipefit.study.file, pipefit.study.picture, pipefit.study.results, pipefit.study.search
import pipefit.study.turns, pipefit
pipefit.study, pipefit.Study, pipefit.Trial
print(pipefit.Study.simulate([], 2).makespan_s)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "0.0", done.stderr
