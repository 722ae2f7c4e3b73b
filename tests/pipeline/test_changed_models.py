"""What a user changes in the model between two steps counts as it does in plain torch, or is refused."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import pipefit as pf
from pipefit.errors import ModelError
from pipefit.spec.options import Spilled


class Transposed(nn.Module):
    """A head that has the weight of another layer."""

    def __init__(self, tied):
        super().__init__()
        self.weight = tied.weight

    def forward(self, x):
        return x @ self.weight


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def tied():
    model = network()
    model.append(Transposed(model[0]))
    return model


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(8, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def piped(model, **options):
    return pf.Pipeline(model, loss=nn.functional.mse_loss, optimizer=sgd, **({"stages": 2} | options))


def trained(model, step, change):
    """Losses of steps, with a change after the second one."""
    losses = []
    for number, batch in enumerate(batches()):
        if number == 2:
            change(model)
        losses.append(step(*batch))
    return losses


def in_torch(model, change):
    optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return trained(model, step, change)


def as_in_torch(make, change, **options):
    model = make()
    expected = copy.deepcopy(model)
    pipe = piped(model, **options)
    assert trained(model, pipe.step, change) == pytest.approx(in_torch(expected, change), rel=1e-12)
    found = pipe.state_dict()
    pipe.close()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-14)


def nothing(model):
    pass


def by_a_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) / 2, model.parameters())


def by_other_types(model):
    model.float()
    model.double()


def by_pruning(model):
    prune.l1_unstructured(model[2], "weight", 0.5)
    prune.remove(model[2], "weight")


@torch.no_grad()
def in_place(model):
    for parameter in model.parameters():
        parameter.div_(2)


def frozen(model):
    model[0].requires_grad_(False)


TWICE = pf.Parallelism(replicas=2)


@pytest.mark.parametrize("change", [by_a_vector, by_other_types, by_pruning])
def test_other_memory_of_weights_counts(change):
    as_in_torch(network, change)


@pytest.mark.parametrize("change", [nothing, in_place, by_a_vector, frozen])
@pytest.mark.parametrize("options", [{}, {"stages": [3, 3]}, {"parallelism": TWICE}])
def test_copies_in_one_process_follow_the_model_and_it_has_their_weights(change, options):
    if "parallelism" in options:
        as_in_torch(network, change, **options)
    else:
        as_in_torch(tied, change, **options)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "weights"])
def test_a_stage_that_is_frozen_meanwhile_stays_as_it_is_on_copies_that_share(shard):
    as_in_torch(network, frozen, parallelism=pf.Parallelism(replicas=2, shard=shard), stages=[2, 3])


def test_copies_in_one_process_follow_the_mode_of_the_model():
    def dropping():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5)).double()
        model.append(Transposed(model[0]))
        return model.eval()

    as_in_torch(dropping, lambda model: model[1].train(), stages=[1, 3])
    model = dropping().train()
    pipe = piped(model, stages=[1, 3])
    model.eval()
    x, y = batches(1)[0]
    expected = nn.functional.mse_loss(model(x), y).item()
    assert pipe.step(x, y) == pytest.approx(expected, rel=1e-12)


def unfrozen(model):
    model[0].requires_grad_(True)


def of_another_type(model):
    model[0].float()


def other_layer(model):
    model[2] = nn.Identity()


def further_layer(model):
    model.append(nn.Tanh())


def hooked(model):
    model.register_forward_hook(lambda module, given, output: output * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfrozen, "0.weight was frozen when the Pipeline was made"),
        (of_another_type, r"was torch.float64 of shape \[6, 6\] .* torch.float32 of shape \[6, 6\] now"),
        (other_layer, "other layers than when the Pipeline was made"),
        (further_layer, "other layers than when the Pipeline was made"),
        (hooked, "a forward or hooks of its own"),
    ],
)
@pytest.mark.parametrize("fits", [False, True])
def test_a_change_that_would_be_lost_is_refused(change, message, fits):
    model = network()
    if change is unfrozen:
        frozen(model)
    pipe = piped(model)
    pipe.step(*batches(1)[0])
    change(model)
    with pytest.raises(ModelError, match=message):
        if fits:
            pipe.fit(batches())
        else:
            pipe.step(*batches(1)[0])


def test_other_memory_of_a_spilled_weight_is_refused():
    model = network()
    pipe = piped(model, stages=4, spill=Spilled())
    pipe.step(*batches(1)[0])
    model[0].weight.data = torch.zeros(6, 6, dtype=torch.float64)
    with pytest.raises(ModelError, match="stage 0 was changed between two steps, when its weights are on the host"):
        pipe.step(*batches(1)[0])


def test_weights_that_were_frozen_in_the_first_step_only_are_refused():
    model = network()
    pipe = piped(model, stages=[2, 3])
    frozen(model)
    pipe.step(*batches(1)[0])
    unfrozen(model)
    with pytest.raises(ModelError, match="an output of stage 0 needs a gradient for micro-batch 0, but did not"):
        pipe.step(*batches(1)[0])


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 6, max_norm=0.1)

    def forward(self, x):
        return self.table(x.abs().clamp(0, 7).long()).mean(1)


def test_a_forward_that_changes_weights_trains_on_one_copy_only():
    def embedded():
        torch.manual_seed(0)
        return nn.Sequential(Embeds(), nn.Linear(6, 6)).double()

    as_in_torch(embedded, nothing)
    with pytest.raises(ModelError, match=r"a forward changes the weight 0.table.weight, .* each copy of the stage"):
        piped(embedded(), parallelism=TWICE).step(*batches(1)[0])


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


def test_a_border_that_no_gradient_crosses_is_reported_once(caplog):
    model = network()
    model.insert(2, Detached())
    pipe = piped(model, stages=[2, 1, 3])
    with caplog.at_level(logging.WARNING, "pipefit"):
        pipe.step(*batches(1)[0])
        pipe.step(*batches(1)[0])
    assert caplog.text.count("stage 1 gives no gradient to the stages before it") == 1
