"""Changes of a model between two steps train as in plain torch, or are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import pipefit as pf
from pipefit.checkpoint import export
from pipefit.errors import ModelError, PipefitError
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
    drawn = torch.randn(count, 2, 8, 6, generator=generator, dtype=torch.float64)
    return [(x, y) for x, y in drawn]


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


def taken(model):
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})


def frozen(model):
    model[0].requires_grad_(False)


@pytest.mark.parametrize("change", [by_a_vector, by_other_types, by_pruning])
def test_other_memory_of_weights_counts(change):
    as_in_torch(network, change)


def test_in_one_process_the_model_has_the_weights_of_stages_that_share_some():
    as_in_torch(tied, nothing, stages=[3, 3])


@pytest.mark.parametrize("change", [in_place, frozen])
def test_changes_in_place_count(change):
    as_in_torch(network, change)


@torch.no_grad()
def clamped(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("change", [by_a_vector, in_place, clamped, taken, frozen])
@pytest.mark.parametrize(
    ("make", "replicas", "shard"),
    [
        (tied, 1, "none"),
        (network, 2, "none"),
        (tied, (2, 1), "none"),
        (network, 2, "optimizer"),
        (tied, 2, "gradients"),
    ],
)
def test_in_one_process_copies_follow_changes_of_the_model(change, make, replicas, shard):
    as_in_torch(make, change, parallelism=pf.Parallelism(replicas=replicas, shard=shard))


def test_in_one_process_copies_keep_a_frozen_weight_that_the_model_has_in_parts():
    def half_frozen():
        model = tied()
        frozen(model)
        return model

    parallelism = pf.Parallelism(replicas=(2, 1), shard="weights")
    as_in_torch(half_frozen, nothing, parallelism=parallelism, stages=[3, 3])


def test_in_one_process_copies_follow_the_modes_of_the_model():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6)).double()

    model = network()
    pipe = piped(model, parallelism=pf.Parallelism(replicas=2))
    model[1].eval()
    x, y = batches(1)[0]
    expected = nn.functional.mse_loss(network().eval()(x), y).item()
    assert pipe.step(x, y) == pytest.approx(expected, rel=1e-12)
    assert pipe.evaluate([(x, y)]) == pytest.approx(nn.functional.mse_loss(model.eval()(x), y).item(), rel=1e-12)


@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_a_stage_can_be_frozen_where_copies_share(shard):
    model = network()
    pipe = piped(model, parallelism=pf.Parallelism(replicas=2, shard=shard), stages=[2, 3])
    pipe.step(*batches(1)[0])
    for worker in pipe.workers:  # in one process each copy of a stage has modules of its own
        for own in worker.owned.get(0, ()):
            own.parameter.requires_grad_(False)
    before = pipe.state_dict()
    pipe.step(*batches(1)[0])
    assert pipe.state_dict()["0.weight"].equal(before["0.weight"])
    assert not pipe.state_dict()["4.weight"].equal(before["4.weight"])


def unfrozen(model):
    model[0].requires_grad_(True)


def of_another_type(model):
    model[0].float()


def other_layer(model):
    model[2] = nn.Identity()


def further_layer(model):
    model.append(nn.Tanh())


def fewer_layers(model):
    del model[1]


def hooked(model):
    model.register_forward_hook(lambda module, given, output: output * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfrozen, "0.weight was frozen when the Pipeline was made"),
        (of_another_type, r"is torch.float32 of shape \[6, 6\] now"),
        (other_layer, "other layers than when the Pipeline was made"),
        (further_layer, "other layers than when the Pipeline was made"),
        (fewer_layers, "other layers than when the Pipeline was made"),
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


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_border_that_no_gradient_crosses_is_reported_once(schedule, caplog):
    model = network()
    model.insert(2, Detached())
    pipe = piped(model, stages=[2, 1, 3], schedule=schedule)
    for batch in batches(2):
        pipe.step(*batch)
    assert caplog.text.count("stage 1 gives no gradient to an output of the stages before it") == 1
    assert caplog.text.count("gives no gradient") == 1


def test_a_border_of_which_some_samples_give_no_gradient_is_not_reported(caplog):
    pipe = piped(network(), stages=[2, 3], updates=pf.Updates(weigh=lambda y: float(y[0, 0] > 0)))
    pipe.step(*batches(1)[0])
    assert "gives no gradient" not in caplog.text


class Embeds(nn.Module):
    def __init__(self, kind=nn.Embedding):
        super().__init__()
        self.table = kind(8, 6, max_norm=0.1)

    def forward(self, x):
        return self.table(x.abs().clamp(0, 7).long()).view(len(x), -1, 6).mean(1)


def embedded(kind=nn.Embedding):
    torch.manual_seed(0)
    return nn.Sequential(Embeds(kind), nn.Linear(6, 6)).double()


def test_a_forward_that_changes_weights_trains_on_one_copy():
    as_in_torch(embedded, nothing)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_forward_that_changes_weights_is_refused_on_several_copies(kind):
    with pytest.raises(ModelError, match=r"stage 0: 0.table has max_norm, .* each copy of the stage"):
        piped(embedded(kind), parallelism=pf.Parallelism(replicas=2))


@torch.no_grad()
def other_memory(weight):
    weight.data = torch.zeros_like(weight)


@pytest.mark.parametrize("change", [other_memory, nn.init.zeros_])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_change_of_a_spilled_weight_is_refused(name, change):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(1, 5), nn.Linear(5, 6)).double()
    pipe = piped(model, stages=4, spill=Spilled())
    for batch in batches(2):
        pipe.step(*batch)
    pipe.evaluate(batches(1))
    pipe.load_state_dict(pipe.state_dict())
    pipe.step(*batches(1)[0])
    change(getattr(model[1], name))
    with pytest.raises(ModelError, match="stage 1 was changed between two steps, when its weights are on the host"):
        pipe.step(*batches(1)[0])


class OwnForward(nn.Module):
    """A module that is cut, whose head has the weight of its first layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h).tanh()
        return self.head(h)


@pytest.mark.parametrize(
    "options", [{}, {"stages": 3, "spill": Spilled()}, {"parallelism": pf.Parallelism(replicas=2)}]
)
def test_weights_are_taken_into_a_model_that_was_cut(options):
    source, plain = OwnForward().double(), OwnForward().double()
    pipe = piped(source, example=batches(1)[0], **options)
    pipe.step(*batches(1)[0])
    pipe.load_state_dict(plain.state_dict())
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    x, y = batches(1)[0]
    assert pipe.step(x, y) == pytest.approx(nn.functional.mse_loss(plain(x), y).item(), rel=1e-12)


def test_weights_that_the_model_does_not_have_or_that_contradict_each_other_are_refused():
    cut = piped(OwnForward().double(), example=batches(1)[0])
    for pipe, last in ((piped(tied()), "5.weight"), (cut, "head.weight")):
        state = pipe.state_dict()
        with pytest.raises(ModelError, match="no weight or buffer named surplus"):
            pipe.load_state_dict(state | {"surplus": torch.ones(1)})
        with pytest.raises(ModelError, match=f"{last} and .*weight are one weight in this model"):
            pipe.load_state_dict(state | {last: 2 * state[last]})
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())


def without_one(state):
    del state["4.bias"]


def with_another(state):
    state["4.other"] = state["4.bias"]


def of_another_shape(state):
    state["4.weight"] = state["4.weight"][:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, "4.bias: .*, the state no value"),
        (with_another, "no weight or buffer named 4.other"),
        (of_another_shape, r"4.weight: .*\[6, 6\]\), the state .*\[5, 6\]"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"spill": Spilled()}])
def test_a_state_that_does_not_fit_changes_nothing(change, message, options):
    pipe = piped(network(), **options)
    before = pipe.state_dict()
    state = {name: 2 * value for name, value in before.items()}
    change(state)
    with pytest.raises(ModelError, match=message):
        pipe.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


@pytest.mark.parametrize(
    "options", [{"spill": Spilled()}, {"parallelism": pf.Parallelism(replicas=2, shard="weights")}]
)
def test_a_closed_pipeline_without_its_weights_is_refused(options, tmp_path):
    pipe = piped(network(), **options)
    batch = batches(1)[0]
    pipe.step(*batch)
    saved = pipe.save(tmp_path)
    state = pipe.state_dict()
    pipe.close()
    pipe.close()
    uses = [
        lambda: pipe.step(*batch),
        lambda: pipe.evaluate([batch]),
        lambda: pipe.load_state_dict(state),
        lambda: pipe.load(saved),
    ]
    if "spill" in options:
        model = tmp_path / "model.safetensors"
        uses += [pipe.state_dict, lambda: pipe.save(tmp_path), lambda: export(pipe, model)]
    else:
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
    for use in uses:
        with pytest.raises(PipefitError, match="the Pipeline was closed"):
            use()
