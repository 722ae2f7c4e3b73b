"""Scripts of users around a pipeline: what they do to gradients, weights and modules trains as in plain torch."""

import copy
import threading

import pytest
import torch
from tests.pipeline.test_changed_models import batches
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import pipefit as pf
from pipefit.errors import ModelError, PipefitError, PlanError

COPIES = pf.Parallelism(replicas=2)


def adamw(weights):
    return torch.optim.AdamW(weights, lr=0.01, weight_decay=0.5)


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *middle, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def piped(model, optimizer=sgd, loss=nn.functional.mse_loss, **options):
    return pf.Pipeline(model, loss=loss, optimizer=optimizer, **({"stages": 2, "microbatches": 2} | options))


def in_torch(model, optimizer=sgd, loss=nn.functional.mse_loss, parts=1, clip=None):
    """Weights after plain training, which accumulates some parts of each batch."""
    made = optimizer(list(model.parameters()))
    for x, y in batches(3):
        made.zero_grad()
        for own_x, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss(model(own_x), own_y) / parts).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
    return model.state_dict()


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(state[name], weight, rtol=1e-10, atol=1e-12), name


def trained(pipe):
    for batch in batches(3):
        pipe.step(*batch)
    return pipe.state_dict()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("copies", [pf.Parallelism(), COPIES])
def test_gradients_that_a_user_left_do_not_count(schedule, copies):
    model = network()
    expected = in_torch(copy.deepcopy(model))
    pipe = piped(model, schedule=schedule, parallelism=copies)
    for batch in batches(3):
        model(batch[0]).sum().backward()
        pipe.step(*batch)
    assert_same(pipe.state_dict(), expected)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x):
        return self.used(x), self.other(x)


def of_first(outputs, y):
    return nn.functional.mse_loss(outputs[0], y)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("copies", [pf.Parallelism(), COPIES])
def test_a_head_that_the_loss_does_not_use_has_no_gradient(schedule, copies):
    model = network(TwoHeads())[:3]
    expected = in_torch(copy.deepcopy(model), adamw, of_first)
    assert expected["2.other.weight"].equal(model[2].other.weight)
    pipe = piped(model, adamw, of_first, schedule=schedule, parallelism=copies)
    assert_same(trained(pipe), expected)


class FirstOf(nn.Module):
    def forward(self, outputs):
        return outputs[0] * 2


@pytest.mark.parametrize("stages", [[3, 4], [4, 3]])
def test_a_head_that_a_later_stage_does_not_use_is_reported(stages, caplog):
    pipe = piped(network(TwoHeads(), FirstOf()), adamw, stages=stages)
    trained(pipe)
    assert caplog.text.count("stage 1 gives no gradient to an output") == (stages == [3, 4])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_of_several_outputs_at_a_border_can_be_frozen(schedule):
    class Joined(nn.Module):
        def forward(self, outputs):
            return outputs[0] * outputs[1]

    model = nn.Sequential(TwoHeads(), Joined(), *network()).double()
    plain = copy.deepcopy(model)
    pipe = piped(model, stages=[1, 6], schedule=schedule)
    optimizer = sgd(plain.parameters())
    for number, (x, y) in enumerate(batches(3)):
        for one in (model, plain):
            one[0].other.requires_grad_(number == 0)
        pipe.step(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    assert_same(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"spill": pf.Spilled()}, {"parallelism": COPIES}])
def test_a_stage_frozen_in_the_first_step_is_not_unfrozen_later(options):
    model = network()
    pipe = piped(model, stages=[2, 3], **options)
    for worker in pipe.workers:
        for own in worker.owned.get(0, ()):
            own.parameter.requires_grad_(False)
    before = pipe.state_dict()
    pipe.step(*batches(1)[0])
    assert pipe.state_dict()["0.weight"].equal(before["0.weight"])
    for worker in pipe.workers:
        for own in worker.owned.get(0, ()):
            own.parameter.requires_grad_(True)
    with pytest.raises(ModelError, match=r"output 0 of stage 0 needs a gradient .*make another Pipeline"):
        pipe.step(*batches(1)[0])


@pytest.mark.parametrize("without_buffers", [False, True])
def test_a_batch_norm_can_stop_tracking_between_two_steps(without_buffers):
    model = network(nn.BatchNorm1d(6))
    plain = copy.deepcopy(model)
    pipe = piped(model, microbatches=1)
    optimizer = sgd(plain.parameters())
    for x, y in batches(3):
        pipe.step(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
        for one in (model, plain):
            one[2].track_running_stats = False
            if without_buffers:
                one[2].running_mean = one[2].running_var = one[2].num_batches_tracked = None
    assert_same(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize("shard", ["none", "weights"])
def test_hooks_of_weights_count_on_every_copy(shard):
    model = network()
    plain = network()
    for one in (model, plain):
        one[0].weight.register_hook(torch.sign)
    expected = in_torch(plain, parts=2)
    assert_same(trained(piped(model, parallelism=pf.Parallelism(replicas=2, shard=shard))), expected)


@pytest.mark.parametrize("shard", ["none", "weights"])
def test_pruned_weights_stay_so_on_every_copy(shard):
    model = network()
    plain = network()
    for one in (model, plain):
        prune.l1_unstructured(one[4], "weight", 0.4)
    expected = in_torch(plain)
    assert_same(trained(piped(model, parallelism=pf.Parallelism(replicas=2, shard=shard))), expected)


def test_a_layer_that_cannot_be_copied_is_refused():
    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.lock = threading.Lock()

    with pytest.raises(ModelError, match=r"cannot be copied: TypeError: .*pipefit run"):
        piped(network(Locked()), parallelism=COPIES)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("option", [{"parallelism": COPIES}, {"parallelism": pf.Parallelism(recompute="layer")}])
def test_torch_script_is_refused_where_it_would_be_copied_or_replayed(option):
    model = network(torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()))
    with pytest.raises(ModelError, match="TorchScript"):
        trained(piped(model, **option))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


def test_complex_and_real_weights_are_clipped_together():
    model = nn.Sequential(nn.Linear(6, 6).double(), Complex(), nn.Linear(6, 6).double())
    expected = in_torch(copy.deepcopy(model), clip=0.1)
    assert_same(trained(piped(model, updates=pf.Updates(clip_norm=0.1))), expected)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)

    def forward(self, x):
        return self.table((x.abs() * 4).long() % 10).mean(1)


def test_sparse_gradients_of_spilled_stages_count():
    model = nn.Sequential(Tokens(), nn.Linear(6, 6)).double()
    expected = in_torch(copy.deepcopy(model))
    assert_same(trained(piped(model, spill=pf.Spilled())), expected)


def test_an_optimizer_of_sparse_gradients_is_refused_where_copies_add_them_up():
    def make(named):
        if named[0][0].startswith("0"):
            return torch.optim.SparseAdam([parameter for _, parameter in named])
        return sgd([parameter for _, parameter in named])

    pipe = piped(nn.Sequential(Tokens(), nn.Linear(6, 6)).double(), make, parallelism=COPIES)
    with pytest.raises(PlanError, match="which SparseAdam does not take"):
        pipe.step(*batches(1)[0])


def test_an_optimizer_with_hooks_cannot_be_sharded():
    def make(weights):
        made = sgd(weights)
        made.register_step_pre_hook(lambda *given: None)
        return made

    with pytest.raises(PlanError, match="with hooks of its step cannot be sharded"):
        piped(network(), make, parallelism=pf.Parallelism(replicas=2, shard="optimizer"))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(context):
    pipe = piped(network())
    with context(), pytest.raises(PipefitError, match="training needs gradients"):
        pipe.step(*batches(1)[0])
    trained(pipe)


@pytest.mark.parametrize("loss", [lambda output, y: (output > y).double().mean(), lambda output, y: y.mean()])
def test_a_loss_without_a_gradient_is_refused(loss):
    with pytest.raises(ModelError, match="the loss has no gradient"):
        piped(network(), loss=loss).step(*batches(1)[0])


class Reentrant(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def test_a_reentrant_checkpoint_is_refused_where_backwards_are_split():
    model = network(Reentrant(6, 6), Reentrant(6, 6))
    assert_same(trained(piped(copy.deepcopy(model), stages=[3, 4])), in_torch(copy.deepcopy(model)))
    with pytest.raises(ModelError, match="use_reentrant=False"):
        trained(piped(model, stages=[3, 4], schedule="zb-h1"))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("reused", [0, 1])
def test_a_loader_may_use_the_memory_of_a_batch_again(schedule, reused):
    def of_one_memory():
        memory = torch.empty(8, 6, dtype=torch.float64)
        for batch in batches(3):
            given = list(batch)
            given[reused] = memory.copy_(batch[reused])
            yield tuple(given)

    pipes = [piped(network(), schedule=schedule) for _ in range(2)]
    losses = [pipe.fit(data, steps=3) for pipe, data in zip(pipes, (of_one_memory(), batches(3)), strict=True)]
    assert losses[0] == losses[1]
    assert_same(pipes[0].state_dict(), pipes[1].state_dict())
