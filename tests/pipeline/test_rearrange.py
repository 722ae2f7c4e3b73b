"""A training that goes on by another plan has the numbers of one that stays."""

import dataclasses

import pytest
import torch
from tests.pipeline import rearranging_jobs as jobs
from torch import nn

import pipefit as pf
from pipefit.checkpoint.moving import Move
from pipefit.errors import ModelError, PipefitError, PlanError
from pipefit.pipeline.rearrange import _checked_sources, rearrange
from pipefit.runtime.launch import launch

ONE = [jobs.plan_of([8], 1)] * 2


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name], value, rtol=1e-11, atol=1e-14), name


MODELS = [
    "batch norm",
    "tied neighbours",
    "a tied weight that is frozen",
    "an integer mask beside activations",
    "convolutions",
    "a frozen first half with batch norms",
    "a weight that nothing reaches",
    "attention, batch norm and dropout",
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_goes_on_by_another_cut_schedule_and_number_of_copies(name):
    plans = [
        jobs.plan_of([3, 5], 2),
        jobs.plan_of([1, 2, 2, 3], 2, "interleaved", num_chunks=2),
        jobs.plan_of([5, 3], 3, replicas=(1, 2)),
    ]
    assert_same(jobs.trained(name, plans), jobs.trained(name, ONE[:1] * len(plans)))


@pytest.mark.dist
def test_a_process_leaves_and_the_copies_of_its_stage_go_on(tmp_path):
    name, place = "attention, batch norm and dropout", str(tmp_path / "store")
    gone, *found = launch(jobs.lose_a_copy, 4, name, 0, [[1], [0, 2]], place, threads=1, quiet=True, deadline_s=60)
    assert gone is None
    for trained, sent_bytes, same in found:
        assert_same(trained, jobs.trained(name, ONE))
        assert sent_bytes == 0
        assert same == [True, True]


@pytest.mark.dist
def test_layers_move_between_processes_with_all_their_state(tmp_path):
    found = launch(jobs.several_moves, 3, str(tmp_path), threads=1, quiet=True, deadline_s=90)
    for name in jobs.MOVED:
        expected = jobs.trained(name, ONE[:1] * jobs.NUM_PLANS)
        for models, _ in found:
            assert_same(models[name], expected)
    # The average of the weights, and a hook of the user on a weight that moves.
    trained, averages, _ = jobs.with_average(ONE[:1])
    for _, (mine, own, _) in found:
        assert_same(mine, trained)
        assert_same((mine[0], own), (trained[0], averages))
    facts = [facts for _, (_, _, facts) in found]
    # Thirty weights and five biases, with two states and an average each, and a counter of steps for both.
    assert [own["sent_bytes"] for own in facts] == [35 * 8 * (1 + 2 + 1) + 2 * 4, 0, 0]
    assert [own["held"].index(True) for own in facts] == [0, 2, 5]
    assert [own["held"].count(True) for own in facts] == [2, 3, 2]
    assert [own["num_freed"] for own in facts] == [2 * 3, 0, 0]
    # A checkpoint that is saved afterwards.
    model, example = jobs.make("tied neighbours")
    one = jobs.pipeline(model, ONE[0], optimizer=jobs.decaying)
    one.load(tmp_path)
    losses = [one.step(*example(jobs.SAMPLES, step)) for step in (4, 5)]
    expected = jobs.trained("tied neighbours", ONE[:1] * 3)
    assert_same((losses, one.state_dict()), (expected[0][-3:-1], expected[1]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "precision",
    [
        pf.Precision("bf16", loss_scale=8.0),
        pytest.param(pf.Precision("fp32", compile="aot_eager"), marks=pytest.mark.slow),
    ],
)
def test_half_copies_the_loss_scale_and_compiled_layers_are_as_after_a_resume(precision, tmp_path):
    """Stages send in half precision, so another cut has other roundings: the reference is a checkpoint by this plan."""

    def begun():
        torch.manual_seed(0)
        model, example = jobs.make("plain")
        pipe = jobs.pipeline(model.float(), jobs.plan_of([3, 5], 2), optimizer=jobs.decaying, precision=precision)
        return pipe, [(x.float(), y) for x, y in (example(jobs.SAMPLES, step) for step in range(4))]

    def ended(pipe, data):
        scale = pipe.loss_scale and pipe.loss_scale.state()
        return pipe.fit(data[2:]), pipe.state_dict(), scale

    other = jobs.plan_of([1, 4, 3], 4, "gpipe", replicas=(1, 2, 1))
    pipe, data = begun()
    pipe.fit(data[:2])
    pipe.save(tmp_path)
    scale = pipe.loss_scale
    rearrange(pipe, other)
    assert pipe.loss_scale is scale
    losses, weights, scale = ended(pipe, data)
    model = jobs.make("plain")[0].float()
    resumed = jobs.pipeline(model, other, optimizer=jobs.decaying, precision=precision)
    resumed.load(tmp_path)
    expected = ended(resumed, data)
    assert (losses, scale) == (expected[0], expected[2])
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


@torch.no_grad()
def drawn(prefix, module):
    for parameter in module.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)


drawn.is_complete = True


def test_a_tied_weight_from_the_meta_device_stays_tied():
    def trained(meta, plans):
        model, example = jobs.make("tied ends")
        if meta:
            model = model.to("meta")
            model[-1].weight = model[0].weight  # `to` has replaced it in each
        else:
            drawn("", model)
        model.initialise_layer = drawn
        pipe = jobs.pipeline(model, plans[0], optimizer=jobs.decaying)
        losses = []
        for step, plan in enumerate(plans):
            rearrange(pipe, plan)
            losses.append(pipe.step(*example(jobs.SAMPLES, step)))
        return losses, pipe.state_dict()

    plans = [jobs.plan_of(counts, len(counts)) for counts in ([3, 5], [2, 3, 3], [7, 1], [8])]
    assert_same(trained(True, plans), trained(False, ONE[:1] * len(plans)))


REFUSED = [
    ({"schedule": "pipedream"}, "pipedream is asynchronous"),
    ({"replicas": (2,), "shard": "optimizer"}, "shard='optimizer'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_done_is_refused_and_changes_nothing(options, message):
    expected = jobs.trained("plain", ONE)
    del expected[0][jobs.EACH :: jobs.EACH + 1]  # evaluations
    torch.manual_seed(0)
    model, example = jobs.make("plain")
    pipe = jobs.pipeline(model, jobs.plan_of([4, 4], 2), optimizer=jobs.decaying)
    losses = [pipe.step(*example(jobs.SAMPLES, step)) for step in range(2)]
    with pytest.raises(PlanError, match=message):
        rearrange(pipe, jobs.plan_of([4, 4], 2 * len(options), **options))
    losses += [pipe.step(*example(jobs.SAMPLES, step)) for step in (2, 3)]
    assert_same((losses, pipe.state_dict()), expected)


class Counting(nn.Linear):
    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        pass


def test_a_layer_whose_state_is_elsewhere_stays_where_it_is():
    torch.manual_seed(0)
    model, example = jobs.make("plain")
    model[4] = Counting(4, 6).double()
    pipe = jobs.pipeline(model, jobs.plan_of([4, 4], 2), optimizer=jobs.momentum)
    rearrange(pipe, jobs.plan_of([4, 4], 2, "gpipe"))
    pipe.step(*example(jobs.SAMPLES, 0))
    session = dataclasses.replace(pipe.session)
    with pytest.raises(PipefitError, match="layer 4 cannot move: its Counting has an extra state"):
        _checked_sources(pipe, session, [], {4}, False)


def test_a_buffer_that_neither_a_process_nor_the_memory_has_is_not_made_up():
    """No state holds it, and the model was made without memory: a process that never ran its layer has no value."""
    model, _ = jobs.make("plain")
    model[4].register_buffer("mask", torch.ones(1), persistent=False)
    pipe = jobs.pipeline(model, jobs.plan_of([4, 4], 2), optimizer=jobs.momentum)
    model[4].mask = model[4].mask.to("meta")
    with pytest.raises(PipefitError, match=r"no process that is left has 4\.mask"):
        _checked_sources(pipe, pipe.session, [Move("4.mask", None, 0)], {4}, False)


def test_groups_of_an_optimizer_that_cannot_be_joined_are_refused():
    torch.manual_seed(0)
    model, example = jobs.make("plain")
    pipe = jobs.pipeline(model, jobs.plan_of([4, 4], 2), optimizer=jobs.momentum)
    pipe.step(*example(jobs.SAMPLES, 0))
    first, second = (worker.optimizers[stage] for stage, worker in enumerate(pipe.workers))
    first.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ModelError, match=r"momentum of the optimizer was 0.5 for 0.0.weight and 0.9 for 4.weight"):
        rearrange(pipe, jobs.plan_of([5, 3], 2))
    assert [worker.optimizers[stage] for stage, worker in enumerate(pipe.workers)] == [first, second]
    pipe.step(*example(jobs.SAMPLES, 1))
    rearrange(pipe, jobs.plan_of([4, 2, 2], 3))
    found = [one for worker in pipe.workers for one in worker.optimizers.values()]
    assert found[:2] == [first, second]
    assert [one.param_groups[0]["momentum"] for one in found] == [0.5, 0.9, 0.9]


def test_an_optimizer_that_the_user_holds_steps_the_weights_that_its_process_has_now():
    torch.manual_seed(0)
    model, example = jobs.make("plain")
    pipe = jobs.pipeline(model, jobs.plan_of([4, 4], 2), optimizer=jobs.momentum)
    pipe.step(*example(jobs.SAMPLES, 0))
    held = [optimizer for worker in pipe.workers for optimizer in worker.optimizers.values()]
    calls = []
    held[0].register_step_post_hook(lambda *_: calls.append(1))
    rearrange(pipe, jobs.plan_of([6, 2], 2))
    for optimizer in held:
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[0]["momentum"] = 0.0
    before = pipe.state_dict()
    pipe.step(*example(jobs.SAMPLES, 1))
    after = pipe.state_dict()
    assert calls == [1]
    assert all(torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.dist
@pytest.mark.parametrize(("name", "every"), [("attention, batch norm and dropout", 1), ("tied ends", 2)])
def test_a_stage_without_a_copy_comes_from_the_memory_of_the_machine(name, every, tmp_path):
    place = str(tmp_path / "store")
    launched = launch(jobs.lose_a_stage, 3, name, place, every, threads=1, quiet=True, deadline_s=60, recover=1)
    *found, gone = launched
    assert gone is None
    expected = jobs.trained(name, ONE[:1] * 3)
    for trained, problem, here in found:
        if every == 1:
            losses = [loss for index, loss in enumerate(expected[0]) if index % 3 != 2]
            assert trained[0] == pytest.approx(losses[:5], rel=1e-12)
            assert here == range(2)
        else:
            # The last copy is of the step before: the processes that are left cannot go on.
            assert "no copy of step 3 in the memory of this machine" in problem
