"""A run whose layers move by themselves: which ones, how often, and that its numbers stay."""

import re

import pytest
from tests.pipeline import rebalancing_jobs as jobs
from tests.pipeline.rearranging_jobs import momentum, pipeline, plan_of
from tests.pipeline.test_rearrange import assert_same
from tests.testing.equality_models import make

import pipefit as pf
from pipefit.errors import PlanError
from pipefit.pipeline.rebalancing import _counted
from pipefit.runtime.faults import events_of
from pipefit.runtime.launch import launch

OPTIONS = {"threads": 1, "quiet": True, "deadline_s": 60}


@pytest.mark.dist
def test_layers_leave_a_rank_that_becomes_slow_once_and_the_numbers_stay():
    found = launch(jobs.trained, 3, "dropout", 3, True, **OPTIONS)
    expected = jobs.trained("dropout", 1, False).trained
    for run in found:
        assert_same(run.trained, expected)
        before, after = run.counts
        assert before == [3, 3, 2]
        # Layers of 10 s, or 30 s on rank 1: no cut has a slowest stage of less than 40 s.
        assert max(after[0], 3 * after[1], after[2]) == 4
    assert [len(run.lines) for run in found] == [1, 0, 0]
    (line,) = found[0].lines
    assert re.match(r"after step (56|64|72): stages of 3-3-2 layers → stages of .* 3\.0 × .*predicted: ", line)
    (note,) = found[0].notes
    assert note["move"] in line and note["why"] in line and f"after step {note['step']}:" in line
    assert 0.4 < note["gain"] < 0.6 and note["before_s"] > note["after_s"] and note["seconds"] > 0
    (event,) = events_of([note])
    assert note["start"] == 0 and (event.kind, event.step) == ("move", note["step"])


@pytest.mark.dist
def test_a_slow_copy_gets_fewer_micro_batches():
    found = launch(jobs.trained, 2, "plain", 2, True, {"replicas": (2,)}, **OPTIONS)
    expected = jobs.trained("plain", 1, False).trained
    for run in found:
        assert_same(run.trained, expected)
        assert run.counts == [[8], [8]]
        assert run.shares == (3, 1)
    (line,) = found[0].lines
    assert "stages of 8 layers → stages of 8 layers, copies with 3-1 micro-batches; rank 1 takes" in line


@pytest.mark.dist
def test_what_cannot_move_is_refused_at_the_start_or_stays_where_it_is():
    found = launch(jobs.troubled, 2, **OPTIONS)
    for messages, run in found:
        shared, elsewhere = messages
        assert re.match(r"rebalance: layers of this training cannot move while it runs: .*shard='optimizer'", shared)
        assert "layer 4 cannot move: its Counting has an extra state" in elsewhere
        assert run.counts == [[4, 4], [4, 4]] and len(run.trained[0]) == jobs.STEPS
        (line,) = run.lines
        assert "layers no longer move" in line and "momentum of the optimizer was" in line


def test_layers_before_the_first_one_that_trains_are_not_expected_to_go_backward():
    model, _ = make("a frozen first half")
    pipe = pipeline(model, plan_of([4, 4], 2), optimizer=momentum)
    profile = _counted(pipe.given.work, pipe.plan)
    assert [bool(layer.backward_s) for layer in profile.layers] == [False] * 4 + [True] * 4
    assert all(layer.total_s == pytest.approx(3 * layer.forward_s) for layer in profile.layers[4:])


def test_one_process_has_no_other_to_move_layers_to():
    with pytest.raises(PlanError, match=r"rebalance: expected several processes, .* got one"):
        jobs.trained("plain", 2, True)
    assert pf.Parallelism().rebalance is False
