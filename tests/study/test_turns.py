"""A step cut into turns."""

import itertools
import re
import subprocess
import sys

import pytest

from pipefit.ir.op import Op
from pipefit.ir.values import CONSUMES, MAKES
from pipefit.study.picture import picture, trace
from pipefit.study.simulation import TrialCost, simulate_study
from pipefit.study.turns import step_program, turns_of
from pipefit.verify import verify

SHAPES = [(1, 1), (1, 3), (2, 1), (3, 2), (5, 4)]


@pytest.mark.parametrize("own_slots", [False, True], ids=["one slot", "a slot each"])
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize(("shards", "mbs"), SHAPES)
def test_between_two_turns_the_device_holds_nothing(shards, mbs, clip, own_slots):
    program = step_program(shards, mbs, clip, shards if own_slots else 1)
    assert not verify(program).violations
    turns = turns_of(program)
    assert turns[0].first == 0 and turns[-1].end == len(program.ranks[0])
    assert all(a.end == b.first for a, b in itertools.pairwise(turns))
    for turn in turns:
        held = set()
        instructions = program.ranks[0][turn.first : turn.end]
        assert instructions[0].op is Op.FETCH and instructions[0].kind == "weights"
        for i in instructions:
            held = (held - set(CONSUMES[i.op](i, program, 0))) | set(MAKES[i.op](i, program, 0))
        moving = {"weights", "optim", "wgrad", "saved"}
        assert not [value for value in held if value.kind in moving], turn
    # Of data, what stays is what no later turn needs; the norm is a number, and goes with the turn.
    later = {(i.kind, i.stage, i.version) for i in program.ranks[0] if i.op is Op.FETCH}
    evicted = {(i.kind, i.stage, i.version) for i in program.ranks[0] if i.op is Op.EVICT}
    assert {key for key in later if key[0] in ("act", "grad", "input")} <= evicted


def test_two_shards_in_turns_are_the_grid_of_the_docstring():
    program = step_program(2, 2)
    letters = {Op.FETCH: "fetch", Op.FWD: "F", Op.BWD: "B", Op.STEP: "S", Op.DROP: "drop", Op.EVICT: "evict"}
    told = []
    for turn in turns_of(program):
        words = []
        for i in program.ranks[0][turn.first : turn.end]:
            if i.op in (Op.FWD, Op.BWD):
                words.append(f"{letters[i.op]}{i.stage}.{i.mb}")
            elif i.op is Op.STEP:
                words.append(f"S{i.stage}")
            elif i.op is Op.DROP or (i.op in (Op.FETCH, Op.EVICT) and i.kind == "weights"):
                words.append(f"{letters[i.op]} {i.stage}")
        told.append(" ".join(words))
    grid = "fetch 0 F0.0 F0.1 drop 0 | fetch 1 F1.0 B1.0 F1.1 B1.1 S1 evict 1 | fetch 0 B0.0 B0.1 S0 evict 0"
    assert " | ".join(told) == grid and grid in step_program.__doc__


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


def test_the_picture_has_a_box_for_every_turn_and_names_every_trial():
    outcome = simulate_study([TrialCost((0.5, 0.25), 3, 0.1), TrialCost((1.0,), 2, 0.1)], 2)
    drawn = picture(outcome, ["a<b", "c"], 2, title="mine & yours")
    boxes = re.findall('id="LineCollection_.*?</g>', drawn, re.S)
    assert len(re.findall("<path ", "".join(boxes))) == len(outcome.turns) == 10
    assert "a&lt;b" in drawn and "lower bound" in drawn
    slices = [e for e in trace(outcome, ["a", "c"])["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 10


def test_what_plans_a_study_works_with_torch_blocked():
    code = """
import sys; sys.modules["torch"] = None
import pipefit.study.board, pipefit.study.file, pipefit.study.picture, pipefit.study.results, pipefit.study.trial_search
import pipefit.study.simulation
import pipefit.study.turns, pipefit
pipefit.study, pipefit.Study, pipefit.Trial
print(pipefit.study.simulation.simulate_study([], 2).makespan_s)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "0.0", done.stderr
