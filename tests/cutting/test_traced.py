"""Models without a list of blocks: traced, cut where little crosses, and trained like one process."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipefit as pf
from pipefit.cutting.exported import flow_of
from pipefit.cutting.lines import MOST, by_lines, crossings, found_lines
from pipefit.cutting.traced import Traced
from pipefit.errors import ModelError
from pipefit.models import ModelBundle
from pipefit.profiling import analytic_profile
from pipefit.spec.topology import Device
from pipefit.testing import check
from tests.verbs import answered

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skip connections from each level down to the same level up, batch norm, dropout."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.down1, self.down2, self.middle = Block(3, 8), Block(8, 16), Block(16, 16)
        self.up2, self.up1, self.out = Block(32, 8), Block(16, 8), nn.Conv2d(8, 2, 1)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(dropout)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.drop(self.middle(self.pool(b)))
        b = self.up2(torch.cat([F.interpolate(c, size=b.shape[2:]), b], 1))
        return self.out(self.up1(torch.cat([F.interpolate(b, size=a.shape[2:]), a], 1)))


class Dense(nn.Module):
    """Each layer takes what all before it gave."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * i) for i in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(4))
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        found = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            found.append(F.dropout(conv(F.relu(norm(torch.cat(found, 1)))), 0.2, self.training))
        return self.head(torch.cat(found, 1).mean((2, 3)))


class Twin(nn.Module):
    """Two branches with the same encoder, and a parameter that both use."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16))
        self.left, self.right, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        a = self.left(torch.tanh(self.encoder(x[:, :6]))) * self.scale
        b = self.right(torch.tanh(self.encoder(x[:, 6:]))) + self.scale
        return self.head(torch.cat([a * b, a - b], -1))


class Recurrent(nn.Module):
    """Two ways through a sequence, a mask of positions, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 8), nn.Linear(16, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        mask = torch.arange(ids.shape[1])[None, :, None] < 2
        h = self.embed(ids).masked_fill(mask, 0.0)
        there, _ = self.lstm(h)
        back, _ = self.gru(h.flip(1))
        h = h + torch.tanh(self.mix(torch.cat([there, back.flip(1)], -1)))
        return self.head(h.masked_fill(mask, 0.0)).flatten(0, 1)


class Odd(nn.Module):
    """Noise, a stream that is written into, buffers that change, a normalised weight, and parts without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(4))
        self.normal = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("lower", torch.ones(8, 8).tril(), persistent=False)

    def forward(self, x):
        self.steps += 1
        h = self.first(x + torch.rand_like(x) / 10)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        for matrix in self.matrices:
            h += F.dropout(torch.tanh((h * 1.0) @ (matrix * self.lower)), 0.2, self.training)
        h = self.normal(h)
        with torch.no_grad():
            places = torch.zeros_like(x[:, :1]).expand(-1, 8).clone()
            places[:, 2] = 1
            top = h.topk(2, -1).indices
        return self.out(self.norm(h + places) + h.gather(1, top).sum(1, keepdim=True))


def images(batch, seed=0, kind=(2, 8, 8)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.randn(batch, *kind, generator=generator)


def labelled(batch, seed=0, shape=(3, 8, 8), kinds=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *shape, generator=generator), torch.randint(kinds, (batch,), generator=generator)


def words(batch, seed=0):
    ids = torch.randint(20, (batch, 5), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(1, 1)


def of_words(output, target):
    return F.cross_entropy(output, target.flatten())


MODELS = {
    "unet": (UNet, images, F.mse_loss),
    "dense": (Dense, labelled, F.cross_entropy),
    "twin": (Twin, functools.partial(labelled, shape=(12,), kinds=3), F.cross_entropy),
    "recurrent": (Recurrent, words, of_words),
    "odd": (Odd, functools.partial(labelled, shape=(6,), kinds=3), F.cross_entropy),
}


@functools.cache
def bundle(name):
    """A cut model; all but one in the type of the checks, which otherwise trace it again."""
    torch.manual_seed(0)
    kind, example, loss = MODELS[name]
    model, x = kind(), example(4)[0]
    if name != "unet":
        model, x = model.double(), x.double() if x.is_floating_point() else x
    return ModelBundle(name, pf.cut(model, x), loss, example, None, {})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream-2bw"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_blocks_trains_as_in_one_process(name, schedule):
    for ranks in (2,) if schedule == "interleaved" else (2, 3):
        spread = pf.Parallelism(ranks=ranks, chunks=2 if schedule == "interleaved" else 1)
        found = check(bundle(name), schedule=schedule, steps=2, parallelism=spread)
        assert found.equal, found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["unet", "odd", "recurrent"])
def test_the_layers_of_a_graph_train_compiled_as_one_process_does_without(name):
    found = check(bundle(name), schedule="zb-h1", steps=2, precision=pf.Precision(compile="aot_eager"))
    assert max(found.loss_diff, found.grad_diff, found.weight_diff) < 1e-12


@pytest.mark.dist
def test_two_processes_trace_for_themselves_and_train_as_one():
    assert check(bundle("unet"), schedule="1f1b", steps=2, transport="distributed").equal


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_the_names_of_the_model_and_nothing_else(name):
    layers = bundle(name).layers.layers
    kept = {key for layer in layers for key in layer.module.state_dict(prefix=layer.dotted)}
    assert kept == MODELS[name][0]().state_dict().keys()
    assert bundle(name).layers.way == "of its traced graph"


def descend(parameters):
    return torch.optim.SGD(parameters, 0.1)


def test_weights_and_running_averages_are_those_of_the_model_itself():
    torch.manual_seed(0)
    model, (x, y) = UNet(dropout=0.0).double(), images(8)
    x, y = x.double(), y.double()
    whole = copy.deepcopy(model)
    pipe = pf.Pipeline(model, loss=F.mse_loss, optimizer=descend, stages=3, example=(x, y), microbatches=1)
    pipe.fit([(x, y)] * 3)
    optimizer = descend(whole.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(whole(x), y).backward()
        optimizer.step()
    state = pipe.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert pipe.evaluate([(x, y)]) == pytest.approx(float(F.mse_loss(whole.eval()(x), y)), rel=1e-10)


def test_buffers_that_the_forward_writes_are_those_of_the_model_itself():
    """Stubs of the interception wrote NaN into `mean`, and code outside of the blocks counted once for each stage."""
    torch.manual_seed(0)
    model, (x, y) = Odd().double(), MODELS["odd"][1](8)
    model.requires_grad_(False).out.requires_grad_(True)
    whole = copy.deepcopy(model)
    pipe = pf.Pipeline(model, loss=F.cross_entropy, optimizer=descend, stages=3, example=(x.double(), y))
    pipe.fit([(x.double(), y)])
    for part in x.double().tensor_split(4):
        whole(part)
    state = pipe.state_dict()
    assert state["steps"] == whole.steps == 4
    for name in ("normal.parametrizations.weight.0._u", "normal.parametrizations.weight.0._v"):
        torch.testing.assert_close(state[name], whole.state_dict()[name], rtol=1e-10, atol=1e-12)
    assert state["mean"].isfinite().all()


class Counting(nn.Module):
    """A repeated list of blocks, and buffers that the code around it writes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_code_around_blocks_that_writes_a_buffer_is_traced_and_runs_in_one_stage():
    model = Counting()
    x = torch.randn(4, 6)
    pipe = pf.Pipeline(model, loss=F.mse_loss, optimizer=descend, stages=2, example=(x, x), microbatches=4)
    pipe.fit([(x, x)])
    assert pipe.state_dict()["steps"] == 4


def test_what_crosses_is_the_skips_and_never_the_batch_or_a_mask_of_it():
    made = bundle("unet").layers
    assert [layer.name for layer in made.layers] == [
        "down1.conv", "down2.conv", "middle.conv", "up2.conv", "up1.conv", "out",
    ]  # fmt: skip
    assert [count for _, count in made.crossing] == [1, 2, 3, 2, 1]
    sequences = bundle("recurrent").layers
    assert [count for _, count in sequences.crossing] == [1, 2, 2, 1]
    # The profile says the same.
    profile = analytic_profile(made, images(4)[0], Device(flops=1e12))
    assert [layer.output_bytes for layer in profile.layers[:-1]] == [size for size, _ in made.crossing]


def test_batches_of_other_shapes_and_of_one_sample_are_traced_when_they_come():
    model, (x, y) = UNet(), images(8)
    pipe = pf.Pipeline(model, loss=F.mse_loss, optimizer=descend, stages=2, example=(x, y))
    wide = torch.randn(5, 3, 16, 16), torch.randn(5, 2, 16, 16)
    assert all(torch.tensor(pipe.fit([(x, y), wide, (x[:4], y[:4])])).isfinite())


class Chain(nn.Module):
    """A long row of layers in pairs, with or without a way around each pair."""

    def __init__(self, pairs, around):
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(2 * pairs))
        self.around = around

    def forward(self, x):
        for one, two in zip(self.matrices[::2], self.matrices[1::2], strict=True):
            x = torch.tanh(x @ one) @ two + (x if self.around else 0)
        return x


def lines_of(model, x):
    flow = flow_of(model, (x,), {}, None, None)
    lines = found_lines(flow)
    return [len(nodes) for nodes in crossings(flow, by_lines(flow, lines), len(lines) + 1)[1:]]


def test_lines_inside_of_residual_pairs_are_left_out():
    # Nothing goes around the first matrix but the batch.
    assert lines_of(Chain(20, around=True), torch.randn(3, 4)) == [1] * 20


def test_a_long_row_has_64_layers():
    assert lines_of(Chain(50, around=False), torch.randn(3, 4)) == [1] * (MOST - 1)


def test_cuts_by_hand_are_before_the_named_modules():
    made = pf.cut(UNet(), images(4)[0], cuts=["middle", "up1"])
    assert [layer.name for layer in made.layers] == ["down1.conv", "middle", "up1"]
    assert {name.partition(".")[0] for name, _ in made.layers[1].module.named_parameters()} == {"middle", "up2"}
    with pytest.raises(ModelError, match=r"Twin cannot be cut: .*encoder does not run after anything with weights"):
        pf.cut(Twin(), torch.randn(4, 12), cuts=["encoder"])


class Heads(nn.Module):
    """Further outputs in training only."""

    def __init__(self):
        super().__init__()
        self.first, self.side, self.second, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        out = self.out(torch.tanh(self.second(h)) + h)
        return {"out": out, "side": self.side(h)} if self.training else {"out": out}


def test_an_evaluation_runs_what_the_model_runs_in_evaluation():
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    model = Heads()

    def loss(output, target):
        return sum(F.mse_loss(value, target) for value in output.values())

    pipe = pf.Pipeline(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.0), stages=2, example=(x, y))
    trained = pipe.fit([(x, y)])[0]
    with torch.no_grad():
        assert trained == pytest.approx(float(loss(model(x), y)), rel=1e-5)
        assert pipe.evaluate([(x, y)]) == pytest.approx(float(loss(model.eval()(x), y)), rel=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_operations_of_a_layer_can_be_compiled():
    losses = []
    for backend in (False, "aot_eager"):
        torch.manual_seed(0)
        model, (x, y) = Twin(), MODELS["twin"][1](8)
        compiled = pf.Precision(compile=backend)
        pipe = pf.Pipeline(model, loss=F.cross_entropy, optimizer=descend, stages=2, example=(x, y), precision=compiled)
        losses.append(pipe.fit([(x, y)] * 2))
    assert len(pipe.workers[0].stages[0].compiled) > 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_weights_that_are_not_there_yet_are_lent_for_the_cut():
    with torch.device("meta"):
        model = Twin()
    made = pf.cut(model, torch.randn(4, 12))
    assert isinstance(made.shell, Traced)
    assert all(p.is_meta for layer in made.layers for p in layer.module.parameters())


FACTORY = """
import torch
from torch import nn
import pipefit as pf

class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.first(x.mul_(2))
        return self.out(self.third(torch.tanh(self.second(h))) + h)

def example(batch, seed=0):
    return torch.randn(batch, 6), torch.randint(0, 6, (batch,))

def found():
    return Skipping(), nn.functional.cross_entropy, example

def by_hand():
    return pf.cut(Skipping(), example(4)[0], cuts=["third"]), nn.functional.cross_entropy, example
"""


def test_the_command_says_how_a_model_was_cut_and_what_crosses(tmp_path, capsys):
    (tmp_path / "skipping_model.py").write_text(FACTORY)
    for factory, layers in (("found", ["first", "second", "third", "out"]), ("by_hand", ["first", "third"])):
        told = answered(capsys, "cut", f"{tmp_path}/skipping_model.py:{factory}")
        assert told["way"] == "of its traced graph"
        assert [row["layer"] for row in told["layers"]] == layers
        assert told["layers"][1]["enters_tensors"] == (1 if factory == "found" else 2)
