"""Optimizers and schedules as users make them: what a pipeline steps is what one process steps."""

import copy

import pytest
import torch
import transformers
from tests.pipelines import case_of
from torch import nn
from torch.optim import lr_scheduler

import pipefit as pf
from pipefit.errors import PipefitError
from pipefit.runtime.launch import launch
from pipefit.testing.equality import compare, expected
from pipefit.testing.pipelined import run_pipeline

SPARED = ("bias", "norm")


class Normed(nn.Module):
    """A layer whose norm has no telling name."""

    def __init__(self, size):
        super().__init__()
        self.inner, self.scale = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x):
        return x + self.scale(torch.tanh(self.inner(x)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Normed(8), Normed(8), nn.LayerNorm(8), nn.Linear(8, 2)).double()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    draw = lambda size: torch.randn(8, size, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(6), draw(2)) for _ in range(count)]


def pipeline(optimizer, model=None, stages=(1, 2, 2), **options):
    updates = pf.Updates(
        **{name: options.pop(name) for name in ("clip_norm", "no_decay", "scheduler") if name in options}
    )
    return pf.Pipeline(
        network() if model is None else model,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        **{"stages": stages, "microbatches": 2, "updates": updates, **options},
    )


def is_spared(name):
    """The norms and biases of `network`, by hand."""
    return name.endswith("bias") or name in ("1.scale.weight", "2.scale.weight", "3.weight")


def groups(model):
    named = list(model.named_parameters())
    decayed = [parameter for name, parameter in named if not is_spared(name)]
    return [
        {"params": decayed, "weight_decay": 0.5},
        {"params": [parameter for name, parameter in named if is_spared(name)], "weight_decay": 0.0},
    ]


def trained(optimizer, count, scheduler=None, clip_norm=None, model=None):
    """Losses, weights and learning rates of one process with the optimizer of groups written by hand."""
    model = network() if model is None else model
    made = optimizer(model)
    rates = scheduler(made) if scheduler else None
    losses = []
    for x, y in batches(count):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
        made.zero_grad()
        if rates:
            rates.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_same(pipe, losses, wanted):
    assert losses == pytest.approx(wanted[0], rel=1e-12)
    state = pipe.state_dict()
    assert state.keys() == wanted[1].keys()
    for name, weight in wanted[1].items():
        torch.testing.assert_close(state[name], weight, rtol=1e-12, atol=1e-14)


def by_name(named):
    """SGD with groups by name, as people write it: the second is empty in some stages, the first in others."""
    named = list(named)
    return torch.optim.SGD(
        [
            {"params": [parameter for name, parameter in named if not is_spared(name)], "weight_decay": 0.5},
            {"params": [parameter for name, parameter in named if is_spared(name)], "weight_decay": 0.0},
        ],
        0.1,
        momentum=0.9,
    )


def with_pairs(named_parameters):
    """Torch takes the pairs themselves."""
    return torch.optim.SGD(named_parameters, 0.1, momentum=0.9, weight_decay=0.5)


def decaying(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.5)


# ---- groups without decay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("stages", [(1, 2, 2), (3, 1, 1)])
@pytest.mark.parametrize(("optimizer", "rule"), [(by_name, ()), (decaying, SPARED), (with_pairs, "bias,NORM")])
def test_weights_without_decay_are_stepped_as_by_one_process(optimizer, rule, stages, clip_norm):
    pipe = pipeline(optimizer, no_decay=rule, stages=stages, clip_norm=clip_norm)
    wanted = trained(lambda model: torch.optim.SGD(groups(model), 0.1, momentum=0.9), 4, clip_norm=clip_norm)
    assert_same(pipe, pipe.fit(batches(4)), wanted)


def test_the_rule_changes_the_training():
    with_rule, without = (pipeline(decaying, no_decay=rule).fit(batches(4)) for rule in (SPARED, ()))
    assert with_rule[-1] != pytest.approx(without[-1], rel=1e-6)


@pytest.mark.parametrize("schedule", ["zb-h1", "pipedream-2bw"])
def test_other_schedules_step_groups_without_decay_too(schedule):
    case = case_of(
        model=network(), batches=batches(4), counts=(1, 2, 2), num_ranks=3, schedule=schedule, num_microbatches=3,
        loss=nn.functional.mse_loss, optimizer=decaying, no_decay=SPARED,
    )  # fmt: skip
    result = compare(run_pipeline(case), expected(case), 1e-10)
    assert result.equal, result


def test_copies_of_a_tied_weight_are_all_without_decay():
    """The word is in one of the names only: by that name alone the copies would drift apart."""

    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
        model[2].weight = model[0].weight
        return nn.Sequential(model[0], model[1], nn.Sequential(nn.Identity(), model[2])).double()

    data = [(x, x) for x, _ in batches(3)]
    for optimizer, rule in ((decaying, ("2.1",)), (lambda named: _apart(named, "0.weight"), ())):
        pipe = pipeline(optimizer, model=tied(), stages=(2, 1), no_decay=rule)
        pipe.fit(data)
        model = tied()
        made = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for x, y in data:
            nn.functional.mse_loss(model(x), y).backward()
            made.step()
            made.zero_grad()
        state = pipe.state_dict()
        torch.testing.assert_close(state["0.weight"], model[0].weight.data, rtol=1e-12, atol=1e-14)
        assert torch.equal(state["0.weight"], state["2.1.weight"])


def _apart(named, spared):
    return torch.optim.SGD(
        [{"params": [p], "weight_decay": 0.0 if name == spared else 0.5} for name, p in named], 0.1, momentum=0.9
    )


def test_a_sharded_optimizer_keeps_the_groups():
    data = pf.Parallelism(ranks=2, replicas=2, shard="optimizer")
    pipe = pipeline(decaying, stages=1, parallelism=data, no_decay=SPARED)
    wanted = trained(lambda model: torch.optim.SGD(groups(model), 0.1, momentum=0.9), 3)
    assert_same(pipe, pipe.fit(batches(3)), wanted)


def test_spilled_stages_keep_the_groups():
    spread = pf.Parallelism(ranks=1, chunks=3)
    pipe = pipeline(by_name, parallelism=spread, spill=pf.Spilled(), schedule="spilled")
    wanted = trained(lambda model: torch.optim.SGD(groups(model), 0.1, momentum=0.9), 3)
    assert_same(pipe, pipe.fit(batches(3)), wanted)


# ---- kinds of optimizers and schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
def test_foreach_and_fused_optimizers_step_as_in_one_process(how):
    pipe = pipeline(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, **how), clip_norm=0.3)
    wanted = trained(lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 4, clip_norm=0.3)
    assert_same(pipe, pipe.fit(batches(4)), wanted)


SCHEDULES = {
    "cosine of transformers": lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, 2, 6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_of_torch_and_transformers_step_as_in_one_process(kind):
    pipe = pipeline(by_name, scheduler=SCHEDULES[kind])
    wanted = trained(lambda model: torch.optim.SGD(groups(model), 0.1, momentum=0.9), 5, SCHEDULES[kind])
    assert_same(pipe, pipe.fit(batches(5)), wanted)


@pytest.mark.parametrize("rule", [(), SPARED])
def test_a_run_resumes_with_other_stages_groups_and_rates(tmp_path, rule):
    """The groups of the rule are others in each stage, and one of `by_name` may be empty in a stage."""
    optimizer, rates = (decaying if rule else by_name), SCHEDULES["cosine of transformers"]
    first = pipeline(optimizer, scheduler=rates, no_decay=rule)
    first.fit(batches(3))
    first.save(tmp_path)
    second = pipeline(optimizer, scheduler=rates, no_decay=rule, stages=(3, 1, 1))
    second.load(tmp_path)
    wanted = trained(lambda model: torch.optim.SGD(groups(model), 0.1, momentum=0.9), 6, rates)
    assert_same(second, second.fit(batches(6)[3:]), (wanted[0][3:], wanted[1]))


def followed(_=None):
    """A run whose rate follows the held-out loss, as the manual writes it."""
    pipe = pipeline(decaying)

    class Plateau:
        def __init__(self):
            made = [optimizer for worker in pipe.workers for optimizer in worker.optimizers.values()]
            self.rates = [lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0) for optimizer in made]

        def evaluation(self, record):
            for rate in self.rates:
                rate.step(record.held_out_loss)

    seen = []
    pipe.fit(batches(4), callbacks=[Plateau(), lambda record: seen.append(record.learning_rates)],
             held_out=batches(1), evaluate_every=1)  # fmt: skip
    return seen


def test_a_callback_lowers_the_rate_after_each_evaluation_that_is_no_better():
    assert followed() == [pytest.approx((rate,)) for rate in (0.1, 0.01, 1e-3, 1e-4)]


@pytest.mark.dist
def test_ranks_in_processes_step_the_groups_too():
    pipe = pipeline(by_name, scheduler=SCHEDULES["sequence"])
    losses = pipe.fit(batches(4))
    assert launch(_in_processes, 3, None, threads=1) == [losses] * 3


def _in_processes(_):
    return pipeline(by_name, scheduler=SCHEDULES["sequence"]).fit(batches(4))


# ---- messages --------------------------------------------------------------------------------------------------------


def test_what_is_no_function_is_refused_with_the_words_to_write():
    model = network()
    with pytest.raises(PipefitError, match=r"optimizer=lambda params: torch\.optim\.AdamW\(params, lr=0\.003\)"):
        pipeline(torch.optim.AdamW(model.parameters(), 3e-3), model=model)
    with pytest.raises(PipefitError, match="expected a function from parameters to an optimizer, got 'adamw'"):
        pipeline("adamw")
    with pytest.raises(PipefitError, match="expected a function that returns a torch optimizer, got None"):
        pipeline(lambda params: None)
    with pytest.raises(PipefitError, match="LBFGS computes the loss several times per step"):
        pipeline(torch.optim.LBFGS)
    rates = lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 2)
    with pytest.raises(PipefitError, match=r"write scheduler=lambda optimizer: StepLR\(optimizer, …\)"):
        pipeline(decaying, scheduler=rates)
    with pytest.raises(PipefitError, match="in a callback's method `evaluation`"):
        pipeline(decaying, scheduler=lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(PipefitError, match="expected a function from an optimizer to a torch learning-rate schedule"):
        pipeline(decaying, scheduler=copy.copy)


def test_a_rule_that_spares_nothing_is_refused():
    with pytest.raises(PipefitError, match=r"no_decay=\('nrom',\): no parameter has .* the first is named 0\.weight"):
        pipeline(decaying, no_decay=("nrom",))
    with pytest.raises(PipefitError, match="no_decay: Rprop has no weight decay"):
        pipeline(torch.optim.Rprop, no_decay=("bias",))


@pytest.mark.slow
def test_the_norm_counts_a_weight_once_that_two_stages_hold_under_one_name():
    # BERT's last layer has the words' embedding of its first one, under the same name.
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=20, **sizes, **off)).double().train()
    ids = torch.randint(20, (4, 6))
    alone = copy.deepcopy(model)
    alone(input_ids=ids, labels=ids).loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in alone.parameters()]).norm()
    updates = pf.Updates(clip_norm=0.1)
    records = []
    pipe = pf.Pipeline(
        model, optimizer=lambda weights: torch.optim.SGD(weights, 1.0), stages=2, microbatches=1, updates=updates
    )
    pipe.fit([{"input_ids": ids, "labels": ids}], callbacks=[records.append])
    assert records[0].gradient_norm == pytest.approx(float(norm), rel=1e-9)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter -= parameter.grad * 0.1 / (norm + 1e-6)
    for name, weight in alone.state_dict().items():
        assert torch.allclose(pipe.state_dict()[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: lambda weights: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: lambda weights: torch.optim.SGD([*weights, nn.Parameter(torch.ones(8, 8))], lr=0.1),
    ],
)
def test_an_optimizer_of_other_weights_than_it_was_given_is_refused(make):
    model = network()
    with pytest.raises(PipefitError, match=r"steps a weight of shape \[8, .\] that it was not given"):
        pf.Pipeline(model, loss=nn.functional.mse_loss, optimizer=make(model), stages=2)


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_weight_that_an_optimizer_is_given_later_is_not_saved(shard, tmp_path):
    pipe = pf.Pipeline(
        network(),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
        stages=2,
        parallelism=pf.Parallelism(replicas=2, shard=shard),
    )
    optimizer = pipe.workers[0].optimizers[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    pipe.step(*batches(1)[0])
    with pytest.raises(PipefitError, match="was given another weight by add_param_group"):
        pipe.save(tmp_path)
