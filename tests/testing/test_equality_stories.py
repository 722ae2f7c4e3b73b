"""Facts behind the equality of a pipeline and one process, and that the check would notice if they were not so."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.pipelines import case_of, grouped
from tests.testing.equality_models import TOKENS, Twin, make, vectors
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.errors import ModelError, PipefitError
from pipefit.ir.graph import FEW_SENDS
from pipefit.models import build
from pipefit.planner import by_hand
from pipefit.runtime.local import LocalTransport
from pipefit.spec.options import Updates
from pipefit.testing import Case, Outcome, check, compare, expected, make_pipeline, run_pipeline, tolerance_of
from pipefit.testing.equality import layer_counts


def task_of(model: nn.Sequential, example: Any, *, steps: int = 2, size: int = 9, **options: Any) -> Case:
    given = {"num_ranks": 3, "schedule": "1f1b", "num_microbatches": 4, **options}
    counts = layer_counts(len(model), given["num_ranks"], given["schedule"], given.get("num_chunks", 1))
    return case_of(model=model, batches=[example(size, step) for step in range(steps)], counts=counts, **given)


def named(name: str, **options: Any) -> Case:
    return task_of(*make(name), **options)


def only(table: dict[int, dict[str, Tensor]], name: str) -> Tensor:
    (value,) = (tensors[name] for tensors in table.values() if name in tensors)
    return value


# ---- batch norm and dropout ------------------------------------------------------------------------------------------


def test_running_statistics_of_the_first_batch_norm_equal_those_of_one_big_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    task = task_of(model, vectors, steps=1)
    whole = copy.deepcopy(model[0])
    whole(task.batches[0][0])
    weights = run_pipeline(task).weights[0]
    torch.testing.assert_close(weights["0.running_mean"], whole.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights["0.running_var"], whole.running_var, rtol=1e-12, atol=1e-12)
    assert weights["0.num_batches_tracked"] == 1


def test_a_recompute_counts_batch_norm_once() -> None:
    kept, replayed = (run_pipeline(named("batch norm", steps=3, recompute=r)).weights for r in (False, True))
    for rank, table in kept.items():
        for name, value in table.items():
            assert torch.equal(value, replayed[rank][name]), name
    assert only(replayed, "1.num_batches_tracked") == 3


class Witness(nn.Dropout):
    """Remembers its masks; copies of it remember in one place."""

    seen: list[Tensor] = []  # noqa: RUF012  (meant: shared by all copies)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        Witness.seen.append(out.detach() != 0)
        return out


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_masks_are_equal_for_any_number_of_ranks(recompute: bool) -> None:
    masks = []
    for num_ranks in (1, 2, 3, 4):
        Witness.seen = []
        model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), Witness(0.5), nn.Linear(16, 3)).double()
        run_pipeline(task_of(model, vectors, num_ranks=num_ranks, schedule="naive", recompute=recompute))
        masks.append(Witness.seen)
    for other in masks[1:]:
        assert len(other) == len(masks[0]) and all(map(torch.equal, other, masks[0]))
    different = {tuple(mask.flatten().tolist()) for mask in masks[0]}
    assert len(different) == 8, "each of 2 × 4 micro-batches draws a mask of its own"


# ---- tied weights ----------------------------------------------------------------------------------------------------


def descend_plainly(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def test_the_optimizer_steps_once_for_a_weight_that_two_stages_of_a_rank_share() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    model = nn.Sequential(Twin(weight), nn.Linear(4, 4), Twin(weight), nn.Linear(4, 3)).double()
    shape = {"num_ranks": 2, "num_chunks": 2, "schedule": "interleaved", "num_microbatches": 2}
    task = task_of(model, vectors, steps=1, optimizer=descend_plainly, **shape)
    worker = make_pipeline(task).workers[0]
    assert list(worker.stages) == [0, 2]
    held = [parameter for optimizer in worker.optimizers.values() for parameter in optimizer.param_groups[0]["params"]]
    assert len(held) == 1
    outcome = run_pipeline(task)
    moved = model[0].weight - 0.5 * outcome.gradients[0]["0.weight"]
    torch.testing.assert_close(outcome.weights[0]["0.weight"], moved, rtol=0, atol=1e-15)
    assert torch.equal(outcome.weights[0]["2.weight"], outcome.weights[0]["0.weight"])


def test_both_ends_of_a_tied_weight_stay_equal_to_the_bit() -> None:
    outcome = run_pipeline(named("tied ends", steps=4))
    assert torch.equal(outcome.weights[0]["0.weight"], outcome.weights[2]["7.weight"])
    assert not torch.equal(outcome.weights[0]["0.weight"], make("tied ends")[0][0].weight)


@pytest.mark.parametrize("schedule", ["1f1b", "data-parallel", "pipedream-2bw"])
def test_a_tied_weight_counts_once_in_the_norm_that_clips(schedule: str) -> None:
    task = named("tied ends", steps=1, schedule=schedule, clip_norm=1e-3)
    pipe = make_pipeline(task)
    pipe.fit(task.batches, steps=1)
    model = copy.deepcopy(task.model)
    x, y = task.batches[0]
    nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert model[0].weight.grad.norm() > 0.1 * norm, "the tied weight matters here"
    for run in pipe.engine.executions:
        assert float(run.norms[0].sum().sqrt()) == pytest.approx(float(norm), rel=1e-12)


# ---- what needs no gradient ------------------------------------------------------------------------------------------


def test_a_stage_whose_output_needs_no_gradient_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[tuple[str, int], set[int]] = {}
    send = LocalTransport.send

    def spy(self: LocalTransport, instruction: Any, message: Any) -> None:
        sent.setdefault((instruction.kind, instruction.stage), set()).add(len(message.leaves))
        send(self, instruction, message)

    monkeypatch.setattr(LocalTransport, "send", spy)
    run_pipeline(named("a frozen beginning", num_ranks=3))  # layers 0 to 2 are frozen: all of stage 0
    assert sent == {("act", 0): {1}, ("act", 1): {1}, ("grad", 1): {1}}


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("1f1b", 3), ("zb-h1", 2), ("pipedream-2bw", 3)])
def test_a_frozen_stage_builds_no_graph_keeps_nothing_and_does_not_run_ahead(schedule: str, num_ranks: int) -> None:
    task = named("a frozen first half", num_ranks=num_ranks, schedule=schedule, num_microbatches=12, size=12)
    pipe = make_pipeline(task)
    waiting: list[int] = []
    mailbox = pipe.engine.transports[0].mailbox

    def forward(module: nn.Module, given: Any, output: Tensor) -> None:
        assert not torch.is_grad_enabled() and not output.requires_grad
        waiting.append(sum(key[0] == 1 for key in mailbox.messages))

    pipe.workers[0].stages[0].layers[-1].module.register_forward_hook(forward)
    pipe.fit(task.batches)
    assert len(waiting) == 24 and max(waiting) <= FEW_SENDS + 3, "some are posted, the others may be under way"
    assert not any(run.values for run in pipe.engine.executions if run.compiled.rank == 0)
    assert all(parameter.grad is None for parameter in pipe.workers[0].stages[0].layers[0].module.parameters())


def test_stages_whose_batch_norms_gather_averages_are_not_frozen() -> None:
    frozen = [
        make_pipeline(named(name, num_ranks=2)).plan.frozen
        for name in ("plain", "a frozen first half", "a frozen first half with batch norms")
    ]
    assert frozen == [0, 1, 0]


def test_a_plan_for_fewer_layers_than_the_model_has_is_refused() -> None:
    """It once ended in a KeyError."""
    plan = by_hand(7, num_ranks=2, schedule="1f1b", num_microbatches=2)
    with pytest.raises(ModelError, match="the partition has 7 layers, the model has 8"):
        Pipeline(make("plain")[0], loss=nn.functional.mse_loss, optimizer=descend_plainly, plan=plan)


def test_integers_travel_forward_and_nothing_comes_back_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, set[tuple[torch.dtype, ...]]] = {}
    send = LocalTransport.send

    def spy(self: LocalTransport, instruction: Any, message: Any) -> None:
        sent.setdefault(instruction.kind, set()).add(tuple(leaf.dtype for leaf in message.leaves))
        send(self, instruction, message)

    monkeypatch.setattr(LocalTransport, "send", spy)
    run_pipeline(named("an integer mask beside activations"))
    (forward,) = sent["act"]
    assert sorted(map(str, forward)) == ["torch.bool", "torch.float64", "torch.int64"]
    assert sent["grad"] == {(torch.float64,)}


def test_a_model_in_which_nothing_trains_still_has_a_loss() -> None:
    model, example = make("batch norm")
    model.requires_grad_(False)
    result = check(model, **grouped(example=example, num_ranks=3))
    assert result.equal, result


# ---- a run goes on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_evaluation_between_steps_changes_nothing(recompute: bool) -> None:
    model, example = make("batch norm")
    model.insert(2, nn.Dropout(0.3))
    task = task_of(model, example, steps=4, recompute=recompute)
    pipe = make_pipeline(task)
    losses = []
    for x, y in task.batches:
        pipe.evaluate([(x, y)])
        losses.append(pipe.step(x, y))
        pipe.evaluate([(x[:5], y[:5])])
    wanted = expected(task)
    assert losses == pytest.approx(wanted.losses, rel=1e-12)
    state = pipe.state_dict()
    for name, value in wanted.weights[0].items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_evaluation_gives_the_loss_of_the_model_in_evaluation_mode() -> None:
    model, example = make("batch norm")
    task = task_of(model, example, steps=2)
    pipe = make_pipeline(task)
    pipe.fit(task.batches)
    trained = copy.deepcopy(task.model)
    trained.load_state_dict(pipe.state_dict())
    x, y = example(11, 99)
    with torch.no_grad():
        wanted = float(nn.functional.cross_entropy(trained.eval()(x), y))
    assert pipe.evaluate([(x[:7], y[:7]), (x[7:], y[7:])]) == pytest.approx(wanted, rel=1e-12)


def test_an_evaluation_builds_no_graph() -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            graphs.append(torch.is_grad_enabled())
            return super().forward(x)

    graphs: list[bool] = []
    loss = nn.functional.mse_loss
    pipe = Pipeline([Looks(3, 3), Looks(3, 3)], loss=loss, optimizer=torch.optim.SGD, stages=2, microbatches=1)
    pipe.evaluate([(torch.randn(2, 3), torch.randn(2, 3))])
    assert graphs == [False, False]


def test_momentum_and_learning_rates_go_on_from_one_call_to_the_next() -> None:
    def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)

    task = named("dropout", steps=5, scheduler=scheduled)
    pipe = make_pipeline(task)
    losses = [*pipe.fit(task.batches[:2]), pipe.step(*task.batches[2]), *pipe.fit(task.batches[3:])]
    assert losses == pytest.approx(expected(task).losses, rel=1e-12)


def test_a_batch_norm_that_several_stages_share_is_refused() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared, nn.Linear(4, 3)).double()
    with pytest.raises(ModelError, match="batch norm"):
        make_pipeline(task_of(model, vectors, num_ranks=2))
    assert check(model, **grouped(example=vectors, num_ranks=2, stages=(3, 1))).equal, "within one stage it is fine"


# ---- the check notices -----------------------------------------------------------------------------------------------


def verdict(got: Outcome, task: Case, dtype: torch.dtype = torch.float64) -> Any:
    return compare(got, expected(task), tolerance_of(dtype))


def test_a_wrongly_scaled_loss_is_found_and_the_first_weight_is_named() -> None:
    task = named("plain")
    doubled = dataclasses.replace(task, loss=lambda output, target: 2 * task.loss(output, target))
    result = verdict(run_pipeline(doubled), task)
    assert not result.equal
    assert result.first_difference == "0.0.weight"
    assert result.loss_diff == pytest.approx(1, abs=0.1) and result.grad_diff > 0.5 and result.weight_diff > 1e-3


def test_gradients_of_micro_batches_weighted_alike_though_their_sizes_differ_are_found() -> None:
    task = named("plain", size=9)
    result = verdict(run_pipeline(dataclasses.replace(task, updates=Updates(weigh=lambda target: 1.0))), task)
    assert not result.equal and result.first_difference == "0.0.weight"


def test_one_lost_micro_batch_is_found() -> None:
    task = named("plain")

    def forgetful(output: Tensor, target: Tensor) -> Tensor:
        forgetful.calls += 1
        return task.loss(output, target) * (0.0 if forgetful.calls == 2 else 1.0)

    forgetful.calls = 0
    assert not verdict(run_pipeline(dataclasses.replace(task, loss=forgetful)), task).equal


def changed(outcome: Outcome, rank: int, name: str, by: float) -> Outcome:
    """The outcome, with one entry of one rank's weight moved."""
    table = {key: value.clone() for key, value in outcome.weights[rank].items()}
    table[name].view(-1)[0] += by
    return dataclasses.replace(outcome, weights={**outcome.weights, rank: table})


def test_a_ninth_digit_in_one_weight_is_found_and_named() -> None:
    task = named("plain")
    outcome = run_pipeline(task)
    assert verdict(outcome, task).equal
    result = verdict(changed(outcome, 1, "3.0.bias", 1e-9), task)
    assert not result.equal and result.first_difference == "3.0.bias" and result.grad_diff < 1e-14


def test_a_copy_that_went_its_own_way_is_named_with_its_rank() -> None:
    task = dataclasses.replace(named("plain", schedule="data-parallel"), counts=(8,))
    result = verdict(changed(run_pipeline(task), 2, "6.weight", 1e-6), task)
    assert result.first_difference == "6.weight (rank 2)"


def test_not_a_number_is_a_difference() -> None:
    task = named("plain")
    result = verdict(changed(run_pipeline(task), 0, "0.0.weight", float("nan")), task)
    assert not result.equal and result.first_difference == "0.0.weight"


def test_a_weight_that_no_rank_has_is_a_difference() -> None:
    task = named("plain")
    outcome = run_pipeline(task)
    fewer = {rank: {k: v for k, v in table.items() if k != "7.bias"} for rank, table in outcome.weights.items()}
    assert verdict(dataclasses.replace(outcome, weights=fewer), task).first_difference == "7.bias"
    fewer = {rank: {k: v for k, v in table.items() if k != "7.bias"} for rank, table in outcome.gradients.items()}
    assert verdict(dataclasses.replace(outcome, gradients=fewer), task).first_difference == "7.bias"


def test_only_a_loss_that_differs_is_named_as_such() -> None:
    task = named("plain")
    outcome = run_pipeline(task)
    result = verdict(dataclasses.replace(outcome, losses=[outcome.losses[0], outcome.losses[1] + 1e-6]), task)
    assert not result.equal and result.first_difference == "the loss"


# ---- how it is used --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("model", ["plain", "batch norm", "tied ends", "convolutions"])
def test_single_precision_is_equal_to_rounding(model: str, schedule: str) -> None:
    net, example = make(model)
    result = check(net, **grouped(example=example, num_ranks=3, schedule=schedule, dtype=torch.float32))
    assert result.equal and result.tolerance == 1e-4, result


def test_a_check_takes_a_built_in_model_with_its_loss_and_data() -> None:
    bundle = build("gpt", layers=2, hidden=16, heads=2, vocab=TOKENS, context=8)
    result = check(bundle, **grouped(num_ranks=2, num_microbatches=2, steps=2))
    assert result.equal and set(result.as_dict()) == {
        "equal", "loss_diff", "grad_diff", "weight_diff", "first_difference", "tolerance", "num_norms"
    }  # fmt: skip


def test_a_check_leaves_the_model_as_it_was() -> None:
    model, example = make("batch norm")
    before = copy.deepcopy(model.state_dict())
    check(model.float(), **grouped(example=example, num_ranks=2))
    assert type(model[1]) is nn.BatchNorm1d and model[0].weight.dtype is torch.float32
    assert all(torch.equal(value, before[name].to(value.dtype)) for name, value in model.state_dict().items())


def test_what_cannot_be_checked_is_refused_with_a_cure() -> None:
    model, example = make("plain")
    with pytest.raises(ModelError, match="example="):
        check(model, **grouped(num_ranks=2))
    with pytest.raises(PipefitError, match="use fewer ranks"):
        check(model, **grouped(example=example, num_ranks=9))
    with pytest.raises(PipefitError, match='"local" or "distributed"'):
        check(model, **grouped(example=example, num_ranks=2, transport="carrier pigeon"))
    with pytest.raises(PipefitError, match="as many batch sizes"):
        check(model, **grouped(example=example, num_ranks=2, steps=3, batch_size=[8, 8]))


def test_an_outcome_that_holds_nothing_equals_no_reference() -> None:
    case = named("plain")
    wanted = expected(case)
    assert not compare(Outcome(wanted.losses, {}, {}), wanted, tolerance_of(torch.float64)).equal
    assert not compare(Outcome([], wanted.gradients, wanted.weights), wanted, tolerance_of(torch.float64)).equal
