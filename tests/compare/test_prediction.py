"""Predictions are held against measurements of the same moment: the pace of the machine, and costs over turns."""

import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipefit.calibrate import overhead as calibrate
from pipefit.calibrate.by_stage import ByStage
from pipefit.calibrate.pace import WAITS_S, Pace
from pipefit.calibrate.prediction import predict
from pipefit.calibrate.spread import Spread
from pipefit.compare.prediction import Foretold, Turn
from pipefit.cost import USUAL, of_plan
from pipefit.ir.op import Op
from pipefit.planner import by_hand
from pipefit.profiling.agreed import merged
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.schedules import find
from pipefit.simulate import simulate
from pipefit.spec import Layer, Profile, Topology
from pipefit.stage.split import named_layers

ALONE = Session(0, 1, None, Progress())


def test_a_turn_is_held_against_the_prediction_at_its_own_pace():
    """One in which others had the machine is slow in both."""
    foretold = Foretold(step_s=(1.0, 2.0, 9.0))
    assert foretold.over([1.1, 2.2, 9.9]) == pytest.approx(1 / 1.1)
    assert foretold.median_s == 2
    assert Turn((1.0, 1.2), (2.0, 1.4)).pace == pytest.approx((1.5, 1.3))


def test_taking_the_pace_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = torch.randn(8, 4), torch.randn(8, 4)
    pace = Pace(named_layers(model), batch, 4, ALONE, nn.functional.mse_loss)
    (seconds,) = pace.microbatch_s()
    assert 0 < seconds < 1 and len(pace.waking_s()) == len(WAITS_S)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert type(model[1]) is nn.BatchNorm1d


def test_profiles_of_several_times_are_merged_layer_by_layer():
    def profile(seconds, split_s, saved_bytes):
        layer = Layer("a", seconds, seconds, seconds, 4, saved_bytes, 6, split_s=split_s, step_s=seconds)
        return Profile("m", 1, (layer,), loss_s=seconds, optimizer_s=seconds)

    found = [profile(1, 3, 5), profile(2, None, 7), profile(9, 5, 6)]
    mean, middle = merged(found), merged(found, statistics.median)
    assert mean.layers == (Layer("a", 4, 4, 4, 4, 7, 6, split_s=4, step_s=4),) and mean.loss_s == mean.optimizer_s == 4
    assert middle.layers == (Layer("a", 2, 2, 2, 4, 7, 6, split_s=4, step_s=2),) and middle.loss_s == 2


def test_costs_are_the_medians_of_turns_each_at_its_pace():
    turns = [USUAL._replace(host_s={"fwd": seconds}, taking_s=2 * seconds) for seconds in (2e-5, 3e-5, 9e-4)]
    assert calibrate._medians(turns) == USUAL._replace(host_s={"fwd": 3e-5}, taking_s=6e-5)
    slow = turns[0].scaled(0.5)
    assert slow.host_s == {"fwd": 1e-5} and slow.overhead_s == USUAL.overhead_s / 2
    assert slow.copy_s_per_byte == USUAL.copy_s_per_byte


def test_a_forward_that_takes_a_message_takes_longer_than_the_first_stages():
    profile = Profile("m", 1, tuple(Layer(f"l{k}", 1, 1, 1, 0, 0, 4) for k in range(2)))
    layers = named_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    plan = by_hand(len(layers), num_ranks=2, schedule="naive", num_microbatches=3, stages=[1, 1])
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)

    def makespan_s(taking_s: float) -> float:
        cost = of_plan(profile, plan, links, state_per_weight=0.0, runtime=USUAL._replace(taking_s=taking_s))
        return simulate(program_of(plan), cost).makespan_s

    assert makespan_s(0.5) - makespan_s(0.0) == pytest.approx(0.5 * 3)


def test_a_stage_that_has_waited_takes_longer_and_one_that_has_not_does_not():
    """Naive on two ranks: all but the last stage's backward, which follows its forward at once, come after a wait."""
    profile = Profile("m", 1, tuple(Layer(f"l{k}", 1, 1, 1, 0, 0, 4) for k in range(2)))
    layers = named_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    plan = by_hand(len(layers), num_ranks=2, schedule="naive", num_microbatches=3, stages=[1, 1])
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    program, cost = program_of(plan), of_plan(profile, plan, links, state_per_weight=0.0)
    before, after = predict(program, cost), predict(program, cost, waking=[(1.0, 0.5)])
    took = {key: after.by_kind()[key].median_s - item.median_s for key, item in before.by_kind().items()}
    assert took["fwd", 1] == pytest.approx(0.5) and took["bwd", 0] == pytest.approx(0.5)
    assert took["bwd", 1] < 1e-3 and took["fwd", 0] < 1e-3


def test_what_follows_its_like_takes_as_much_less_as_is_said():
    """gpipe: of four forwards and backwards on each rank the last three follow another; naive: none does."""
    profile = Profile("m", 1, tuple(Layer(f"l{k}", 1, 1, 1, 0, 0, 4) for k in range(2)))
    layers = named_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    less = {}
    for schedule in ("gpipe", "naive"):
        plan = by_hand(len(layers), num_ranks=2, schedule=schedule, num_microbatches=4, stages=[1, 1])
        program, cost = program_of(plan), of_plan(profile, plan, links, state_per_weight=0.0)
        before = predict(program, cost).by_kind()
        after = predict(program, cost, again={Op.FWD: [-0.5, -0.25], Op.BWD: [0.0, 1.0]}).by_kind()
        less[schedule] = [
            before[op, stage].total_s - after[op, stage].total_s for op in ("fwd", "bwd") for stage in (0, 1)
        ]
    assert less["gpipe"] == pytest.approx([1.5, 0.75, 0, -3]) and less["naive"] == pytest.approx([0, 0, 0, 0])


class _Rests(torch.autograd.Function):
    """A forward takes 2 ms, or 10 ms after a backward; a backward 4 ms."""

    after_backward = True

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.010 if _Rests.after_backward else 0.002)
        _Rests.after_backward = False
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.004)
        _Rests.after_backward = True
        return grad


class _Resting(nn.Linear):
    def forward(self, x):
        return _Rests.apply(super().forward(x))


def test_a_stage_by_itself_is_timed_in_turn_and_in_a_row():
    model = nn.Sequential(nn.Linear(4, 4), _Resting(4, 4))
    layers = named_layers(model)
    plan = by_hand(len(layers), num_ranks=1, schedule="naive", num_microbatches=4, stages=[2])
    pace = Pace(layers, (torch.randn(8, 4), torch.randn(8, 4)), 2, ALONE, nn.functional.mse_loss)
    stages = ByStage(pace.step, layers, plan, ALONE)
    stages.turn()
    ((in_turn, in_a_row),) = stages.found()
    assert in_turn == pytest.approx((1, 1), rel=0.3) and in_a_row == pytest.approx((0.2, 1), rel=0.4)


def test_a_stage_whose_first_layer_works_in_place_is_timed_as_any_other():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    layers, batch = named_layers(model), (torch.randn(8, 4), torch.randn(8, 4))
    plan = by_hand(len(layers), num_ranks=2, schedule="gpipe", num_microbatches=4, stages=[1, 2])
    pace = Pace(layers, batch, 2, ALONE, nn.functional.mse_loss)
    stages = ByStage(pace.step, layers, plan, Session(1, 1, None, Progress()))
    stages.turn()
    assert min(*stages.found()[1].in_turn, *stages.found()[1].in_a_row) > 0


def program_of(plan):
    from pipefit.schedules.from_plan import shape_of

    return find(plan.schedule)(shape_of(plan, num_steps=1))


def test_a_profile_at_another_pace_has_all_its_seconds_scaled_and_no_bytes():
    layer = Layer("a", 1, 2, 3, 4, 5, 6, grad_bytes=7, spread_s=8, step_s=9)
    profile = Profile("m", 1, (layer,), step_s=3, loss_s=1, optimizer_s=10)
    slow = profile.scaled(2)
    assert slow.layers == (Layer("a", 2, 4, 6, 4, 5, 6, grad_bytes=7, spread_s=16, step_s=18),)
    assert (slow.step_s, slow.loss_s, slow.optimizer_s) == (6, 2, 20)
    assert slow.whole_over_sum == profile.whole_over_sum == 3 / 7


def test_what_is_drawn_from_a_spread_varies_by_the_root_of_its_length():
    spread = Spread()
    assert spread.draws(0)(3.0) == 3.0
    spread.add([1.0, 1.0, 1.0, 1.4])
    draws, again = spread.draws(1), spread.draws(1)
    found = [draws(1.1) for _ in range(400)]
    assert {round(one, 9) for one in found} == {1.0, 1.4}
    assert found == [again(1.1) for _ in range(400)]
    assert statistics.fmean(found) == pytest.approx(1.1, rel=0.02)
    long = {spread.draws(seed)(4.4) for seed in range(30)}
    assert sorted(round(one - 4.4, 9) for one in long) == [-0.2, 0.6]


def test_ranks_that_wait_for_each_other_lose_by_every_delay_of_either():
    profile = Profile("m", 1, tuple(Layer(f"l{k}", 1, 1, 1, 0, 0, 4) for k in range(2)))
    layers = named_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    spread = Spread()
    spread.add([1.0, 1.0, 1.0, 1.0, 2.0])

    def lost(schedule: str) -> float:
        plan = by_hand(len(layers), num_ranks=2, schedule=schedule, num_microbatches=8, stages=[1, 1])
        program, cost = program_of(plan), of_plan(profile, plan, links, state_per_weight=0.0)
        drawn = statistics.fmean(predict(program, cost, vary=spread.draws(seed)).makespan_s for seed in range(60))
        return drawn / predict(program, cost).makespan_s

    assert lost("naive") == pytest.approx(1, abs=0.02)
    assert 1.05 < lost("gpipe") < 1.3


def test_what_messages_cost_is_found_in_passes_that_were_simulated_with_it():
    profile = Profile("m", 1, tuple(Layer(f"l{k}", 1e-3, 1e-3, 1e-3, 0, 0, 4) for k in range(2)))
    layers = named_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    plan = by_hand(len(layers), num_ranks=2, schedule="1f1b", num_microbatches=16, stages=[1, 1])
    links = Topology.local(2, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    told = USUAL._replace(host_s={"load": 0.0})
    program, cost = (
        program_of(plan),
        of_plan(profile, plan, links, state_per_weight=0.0, runtime=told._replace(arrival_s=3e-4)),
    )
    whole = predict(program, cost, calibrate._RUN)
    kinds_s = {key: item.median_s for key, item in whole.by_kind().items()}
    pipe = calibrate._Pipe(SimpleNamespace(layers=layers, plan=plan, program=program), [], [], Spread())
    pipe.runs.append(calibrate._Run(whole.makespan_s / calibrate._RUN, 0.0, kinds_s))
    assert pipe.arrival_s(0, told, profile, links) == pytest.approx(3e-4, rel=0.1)
