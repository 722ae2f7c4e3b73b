"""Built-in models and those of the examples: what they are made of, that every cut of them computes the same, and how
they are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipefit.errors import ModelError
from pipefit.models import BUILT_IN, build, gpt, parse_options
from pipefit.stage.split import named_layers

SMALL = {
    "convnet": {"layers": 5, "channels": 8},
    "gpt": {"layers": 2, "hidden": 32, "heads": 2, "vocab": 50, "context": 16},
    "mlp": {"layers": 4, "width": 16},
}
EXAMPLES = Path(__file__).parents[2] / "examples/models"
ALEXNET, VGG = f"{EXAMPLES}/vgg.py:alexnet", f"{EXAMPLES}/vgg.py:vgg16"
RESNET, GNMT = f"{EXAMPLES}/resnet.py:resnet50", f"{EXAMPLES}/gnmt.py:gnmt"
LARGE = {
    ALEXNET: {"image": 64, "width": 0.0625, "classes": 10},
    GNMT: {"layers": 6, "hidden": 16, "vocab": 40, "length": 7},
    RESNET: {"image": 16, "width": 0.0625, "classes": 10},
    VGG: {"image": 32, "width": 0.0625, "classes": 10},
}
EVERY = pytest.mark.parametrize("name", [pytest.param(name, id=name.rpartition(":")[2]) for name in SMALL | LARGE])


def small(name, **more):
    torch.manual_seed(0)
    return build(name, **{**(SMALL | LARGE)[name], **more})


def test_every_built_in_model_has_a_small_form_here():
    assert set(SMALL) == set(BUILT_IN)


@EVERY
def test_loss_is_a_finite_scalar_and_every_parameter_gets_a_gradient(name):
    bundle = small(name)
    x, y = bundle.example(3, 0)
    loss = bundle.loss(bundle.layers(x), y)
    loss.backward()
    assert loss.shape == () and torch.isfinite(loss)
    without = [n for n, p in bundle.layers.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert without == []


@EVERY
def test_the_same_seed_gives_the_same_weights_and_the_same_example(name):
    first, second = small(name), small(name)
    for (key, a), (_, b) in zip(first.layers.state_dict().items(), second.layers.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
    leaves = [pytree.tree_leaves(bundle.example(2, 5)) for bundle in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))
    other = pytree.tree_leaves(first.example(2, 6))
    assert not all(torch.equal(a, b) for a, b in zip(leaves[0], other, strict=True))


@EVERY
def test_the_initial_loss_is_near_that_of_guessing(name):
    # In training mode: before the first step the running statistics of batch norm say nothing yet.
    bundle = small(name)
    classes = bundle.options.get("vocab", bundle.options.get("classes"))
    x, y = bundle.example(8, 0)
    with torch.no_grad():
        loss = bundle.loss(bundle.layers(x), y).item()
    assert loss == pytest.approx(torch.tensor(float(classes)).log().item(), rel=0.5)


@EVERY
def test_every_value_between_layers_is_a_pytree_of_tensors_with_the_batch_first(name):
    bundle = small(name)
    value, _ = bundle.example(3, 0)
    for layer_name, layer in bundle.layers.named_children():
        value = layer(value)
        leaves = pytree.tree_leaves(value)
        assert all(isinstance(leaf, torch.Tensor) and leaf.shape[0] == 3 for leaf in leaves), layer_name


@pytest.mark.parametrize("name", [*SMALL, ALEXNET, RESNET, VGG])
def test_a_layer_does_not_change_its_input(name):
    bundle = small(name)
    value, _ = bundle.example(3, 0)
    for layer_name, layer in bundle.layers.named_children():
        before = value.clone()
        output = layer(value)
        assert torch.equal(value, before), layer_name
        value = output


@pytest.mark.parametrize("name", ["gpt", GNMT, "mlp"])
def test_samples_do_not_see_each_other_without_batch_norm(name):
    bundle = small(name)
    bundle.layers.eval()
    x, _ = bundle.example(4, 0)
    whole = bundle.layers(x)
    half = bundle.layers(pytree.tree_map(lambda leaf: leaf[2:], x))
    torch.testing.assert_close(whole[2:], half)


# Published parameter counts: the figures of torchvision's reference models, of which these three share the layout.
@pytest.mark.parametrize(("name", "num_parameters"), [(ALEXNET, 61_100_840), (VGG, 138_357_544), (RESNET, 25_557_032)])
def test_full_size_parameter_counts_equal_the_published_ones(name, num_parameters):
    with torch.device("meta"):
        assert build(name).num_parameters == num_parameters


def test_gnmt_has_the_weights_of_pipedreams_profile():
    # PipeDream's profile of GNMT-8 gives weight bytes per LSTM; both bias vectors of torch's LSTM are counted there.
    with torch.device("meta"):
        model = build(GNMT).layers
    lstm_bytes = {
        name: 4 * sum(p.numel() for p in layer.lstm.parameters())
        for name, layer in model.named_children()
        if hasattr(layer, "lstm")
    }
    assert lstm_bytes["encoder0"] == 67_174_400
    assert lstm_bytes["encoder1"] == 50_364_416
    assert 4 * model.embed_source.token.weight.numel() == 132_382_720
    assert len(lstm_bytes) == 8


def test_a_full_size_image_passes_on_the_meta_device():
    for name in (ALEXNET, VGG, RESNET):
        with torch.device("meta"):
            assert build(name).layers(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_tied_gpt_holds_one_parameter_object_in_its_first_and_last_layer():
    model = small("gpt").layers
    assert model.head.project.weight is model.embed.token.weight
    assert list(dict(model.named_children())) == ["embed", "block0", "block1", "head"]
    untied = small("gpt", tied=False).layers
    assert untied.head.project.weight is not untied.embed.token.weight


def test_gpt_parameters_follow_the_formula():
    # 12 l h² (1 + 13/(12 h)) + (V + s) h + 2 h: the count of PTD-P with the final norm.
    l, h, v, s = 3, 24, 50, 16  # noqa: E741
    model = gpt(layers=l, hidden=h, heads=2, vocab=v, context=s)
    assert sum(p.numel() for p in model.parameters()) == 12 * l * h * h + 13 * l * h + (v + s) * h + 2 * h


def test_gpt_does_not_look_ahead():
    bundle = small("gpt")
    x, _ = bundle.example(1, 0)
    changed = x.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 50
    before, after = bundle.layers(x), bundle.layers(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_gpt_refuses_more_positions_than_its_context():
    with pytest.raises(ValueError, match="17 positions given, but context=16"):
        small("gpt").layers(torch.zeros(1, 17, dtype=torch.int64))


def test_gnmt_attends_to_the_source_and_not_to_the_coming_target():
    bundle = small(GNMT, dropout=0.0)
    (source, target), _ = bundle.example(1, 0)
    before = bundle.layers((source, target))
    other_source, other_target = source.clone(), target.clone()
    other_source[0, -1] = (source[0, -1] + 1) % 40
    other_target[0, 4] = (target[0, 4] + 1) % 40
    assert not torch.equal(before[:, 0], bundle.layers((other_source, target))[:, 0])
    after = bundle.layers((source, other_target))
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_small_image_stem_keeps_the_size_of_the_image():
    x = torch.zeros(1, 3, 16, 16)
    assert small(RESNET).layers.stem(x).shape[-2:] == (16, 16)
    assert small(RESNET, small=False).layers.stem(x).shape[-2:] == (4, 4)


def test_mlp_takes_images_and_counts_its_linear_maps_as_layers():
    bundle = small("mlp", layers=3, batch_norm=True, activation="gelu", dropout=0.1)
    assert [name for name, _ in bundle.layers.named_children()] == ["hidden0", "hidden1", "head"]
    assert bundle.layers(torch.randn(5, 1, 8, 8)).shape == (5, 10)
    assert len(small("mlp", layers=1).layers) == 1


@pytest.mark.parametrize("layers", [2, 3, 6, 9])
@pytest.mark.parametrize("image", [1, 8, 28])
def test_convnet_takes_any_depth_and_image(layers, image):
    model = build("convnet", layers=layers, image=image, channels=2)
    assert len(model.layers) == layers
    assert model.layers(model.example(2, 0)[0]).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "did you mean gpt"),
        (
            "gpt",
            {"layer": 3},
            r"no option 'layer'; did you mean layers.*valid with their defaults: layers=4, hidden=128",
        ),
        ("gpt", {"hidden": 100, "heads": 8}, "hidden=100 is not a multiple of heads=8; .* hidden=96 or 104"),
        ("gpt", {"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ("gpt", {"layers": "two"}, "layers: expected a whole number, got 'two'"),
        ("gpt", {"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ("mlp", {"activation": "swish"}, "activation must be one of gelu"),
        ("convnet", {"layers": 1}, "at least 2 layers"),
        (ALEXNET, {"image": 32}, "the smallest that works is image=63"),
        (VGG, {"image": 48}, "image=48 is not a multiple of 32"),
        (GNMT, {"layers": 2}, "at least 3 LSTMs"),
    ],
)
def test_a_mistake_in_a_name_or_option_says_what_would_work(name, options, message):
    with pytest.raises(ModelError, match=message):
        build(name, **options)


def test_alexnets_smallest_image_works_and_one_less_does_not():
    tiny = {"width": 0.01, "classes": 2}
    assert build(ALEXNET, image=63, **tiny).layers(torch.zeros(1, 3, 63, 63)).shape == (1, 2)
    with pytest.raises(ModelError):
        build(ALEXNET, image=62, **tiny)


def test_options_are_read_by_the_type_in_the_signature():
    read = parse_options("layers=2, hidden=32,heads=2,tied=no,dropout=0", "gpt")
    assert read == {"layers": 2, "hidden": 32, "heads": 2, "tied": False, "dropout": 0.0}
    assert isinstance(read["dropout"], float)
    assert parse_options("small=none,image=64", RESNET) == {"small": None, "image": 64}
    assert parse_options("small=true", RESNET) == {"small": True}
    assert parse_options("length=9", GNMT) == {"length": 9}
    assert parse_options("", "gpt") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers", "expected options like layers=8,hidden=256; got 'layers'"),
        ("layers=", "got 'layers='"),
        ("layers=1,layers=2", "layers is given twice, as 1 and 2"),
        ("depth=3", "no option 'depth'; .*layers=4"),
        ("tied=maybe", "tied: expected true or false, got 'maybe'"),
        ("hidden=1.5", "hidden: expected a whole number, got '1.5'"),
    ],
)
def test_malformed_options_are_refused(text, message):
    with pytest.raises(ModelError, match=message):
        parse_options(text, "gpt")


FACTORIES = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()))


def sequence(width: int = 5, **rest):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))


def named():
    return [("first", nn.Linear(4, 5)), ("second", nn.Linear(5, 3))]


def plain():
    return [nn.Linear(4, 5), nn.Linear(5, 3)]


def module():
    return Odd()


def cuttable():
    return Odd(), None, lambda batch, seed: (torch.ones(batch, 4), torch.zeros(batch, 3))


def with_loss():
    return sequence(), nn.MSELoss()


def with_example():
    return sequence(), nn.MSELoss(), lambda batch, seed: (torch.ones(batch, 4), torch.zeros(batch, 3))


def raising():
    return 1 // 0


def refused_by_torch():
    return nn.Linear(4, -3)


def leaving():
    raise SystemExit(3)


def number():
    return 7


def empty():
    return []


def no_modules():
    return [nn.Linear(4, 5), "relu"]


constant = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module of model factories in the folder that a command is called from."""
    (tmp_path / "own_models.py").write_text(FACTORIES)
    (tmp_path / "broken_models.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "unreadable_models.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_models", "broken_models", "unreadable_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("factory", "names"),
    [("sequence", ["0", "1"]), ("named", ["first", "second"]), ("plain", ["0", "1"])],
)
@pytest.mark.parametrize("place", ["own_models", "own_models.py"])
def test_a_users_factory_may_return_a_sequence_or_a_list(factories, place, factory, names):
    bundle = build(f"{place}:{factory}")
    assert [name for name, _ in bundle.layers.named_children()] == names
    assert bundle.layers(torch.ones(2, 4)).shape == (2, 3)
    assert bundle.loss(torch.zeros(2, 3), torch.tensor([0, 1])).item() == pytest.approx(1.0986, abs=1e-4)


def test_a_users_module_that_is_no_sequence_is_cut_by_its_example(factories):
    bundle = build("own_models:cuttable")
    layers, payload = named_layers(bundle.layers), bundle.example(2, 0)[0]
    assert len(bundle.layers) == len(layers) > 2 and bundle.num_parameters == 2 * (16 + 4) + 12 + 3
    whole = bundle.layers.shell.model(payload)
    for layer in layers:
        payload = layer.module(payload)
    assert torch.equal(payload, whole)


def test_a_users_factory_may_bring_its_loss_and_example(factories):
    assert isinstance(build("own_models:with_loss").loss, nn.MSELoss)
    bundle = build("own_models:with_example")
    x, y = bundle.example(2, 0)
    assert x.shape == (2, 4) and y.shape == (2, 3)
    with pytest.raises(ModelError, match=r"return \(model, loss, example\)"):
        build("own_models:with_loss").example(2, 0)


def test_options_of_a_users_factory_are_read_by_its_signature(factories):
    assert parse_options("width=7", "own_models:sequence") == {"width": 7}
    assert build("own_models:sequence", width="7").layers[0].out_features == 7
    assert parse_options("free=2.5,word=abc", "own_models:sequence") == {"free": 2.5, "word": "abc"}
    with pytest.raises(ModelError, match="takes no options"):
        build("own_models:plain", width=3)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_models:raising", r"the factory raised ZeroDivisionError: .*own_models\.py, line \d+, in raising"),
        ("own_models:refused_by_torch", r"the factory raised RuntimeError: .*own_models\.py, line \d+, in refused_by"),
        ("own_models:leaving", "the factory raised SystemExit: 3"),
        ("own_models:sequense", "holds no 'sequense'; did you mean sequence"),
        ("own_models:number", "expected an nn.Sequential or a list of modules, got int"),
        ("own_models:module", r"give example=.*a factory returns \(model, loss, example\)"),
        ("own_models:empty", "the model has no layers"),
        ("own_models:no_modules", "layer 1: expected an nn.Module or .*'relu'"),
        ("own_models:constant", "is not a function but int"),
        ("no_such_package.models:make", "there is no module 'no_such_package'"),
        ("broken_models:make", "raised ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("unreadable_models:f", r"SyntaxError: .*unreadable_models\.py, line 1"),
        ("missing.py:make", "there is no file .*missing.py"),
        ("own_models:", "expected package.module:factory"),
    ],
)
def test_a_bad_factory_is_one_clear_message(factories, path, message):
    with pytest.raises(ModelError, match=message):
        build(path)


def test_a_bundle_describes_itself_in_one_line():
    described = small("gpt").describe()
    assert described.startswith("gpt(layers=2, hidden=32") and "4 layers" in described and "\n" not in described
