"""Replays inside backwards: the tensors that stay, what is refused, and the figures that plans need."""

import copy

import pytest
import torch
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline, cut
from pipefit.cost import of_plan
from pipefit.errors import PlanError, ScheduleError
from pipefit.models.gpt import gpt
from pipefit.planner import by_hand
from pipefit.profiling import analytic_profile, profile_layers
from pipefit.profiling.survey import saved_storages, storage_key
from pipefit.spec import Device, Plan, Topology
from pipefit.spec.plan import INSIDE, RECOMPUTE
from pipefit.stage import replay
from pipefit.stage.split import named_layers
from pipefit.stage.stage import Stage

SIZES = {"layers": 5, "hidden": 32, "heads": 4, "context": 24}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return gpt(**SIZES, dropout=0.2)


@pytest.fixture(scope="module")
def profile(model, ids):
    return profile_layers(model, ids, repeats=1, warmup=0)


def kept_bytes(model, ids, kind):
    """Bytes that autograd keeps for the backward of a stage that holds the whole model."""
    stage = Stage(0, named_layers(copy.deepcopy(model)), torch.device("cpu"))
    stage.replay(kind, len(model))
    seen = {}
    with saved_storages(seen, {storage_key(weight) for weight in stage.parameters()}):
        output = stage.forward(ids, 0)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("kind", ["none", *INSIDE])
def test_a_stage_keeps_the_bytes_that_its_plan_predicts(model, ids, profile, kind):
    plan = by_hand(len(model), num_ranks=1, schedule="1f1b", num_microbatches=4, recompute=kind)
    assert kept_bytes(model, ids, kind) == of_plan(profile, plan, Topology.local(1)).saved_bytes[0]


def test_the_kinds_keep_ever_less(model, ids):
    none, selective, layer = (kept_bytes(model, ids, kind) for kind in ("none", "selective", "layer"))
    block = 3 * 24 * SIZES["hidden"] * 4
    # Without scores and masks; then only ids, the inputs of the blocks, and what the head keeps.
    assert none > 1.4 * selective > 1.4 * 3 * layer
    assert layer < (SIZES["layers"] + 3) * block


def test_a_computed_profile_has_the_bytes_that_are_measured(model, ids, profile):
    computed = analytic_profile(model, ids, Device(flops=1e12, memory_bandwidth_bytes_per_s=1e11))
    for mine, theirs in zip(profile.layers, computed.layers, strict=True):
        assert (mine.input_bytes, mine.selective_bytes) == (theirs.input_bytes, theirs.selective_bytes)
        assert (theirs.attention_s > 0) == (mine.attention_s > 0) == mine.name.startswith("block")
        assert theirs.attention_s < theirs.forward_s


def test_the_head_and_single_modules_are_not_replayed(model):
    layers = named_layers(model)
    assert [replay.replayed_module(layer, len(layers)) is not None for layer in layers] == [True] * 6 + [False]
    assert replay.replayed_module(named_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0], 2) is None


def test_a_replay_runs_each_layer_once_more(model, ids):
    calls = []
    own = copy.deepcopy(model)
    for name, module in own.named_children():
        inner = next(module.children())
        inner.register_forward_hook(lambda *_, name=name: calls.append(name))
    stage = Stage(0, named_layers(own), torch.device("cpu"))
    stage.replay("layer", len(own))
    output = stage.forward(ids, 0)
    forwards = list(calls)
    calls.clear()
    output.sum().backward()
    assert forwards == list(dict(own.named_children()))
    # Backwards, without the head; the lookup of tokens keeps nothing that its dropout would need again.
    assert calls == ["block4", "block3", "block2", "block1", "block0", "embed"]


def tiny(**options):
    torch.manual_seed(0)
    sgd = {"loss": nn.CrossEntropyLoss(), "optimizer": lambda params: torch.optim.SGD(params, 0.1)}
    return Pipeline(gpt(layers=2, hidden=8, heads=2, context=4), **sgd, **grouped(stages=2, **options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"recompute": "layer", "schedule": "zb-h1"}, "each of the two halves of a backward would replay every layer"),
        ({"recompute": "selective", "compile": "aot_eager"}, "compiled cannot be replayed inside their backward"),
        ({"recompute": "everything"}, "expected one of none, stage, layer, selective, got 'everything'"),
    ],
)
def test_what_cannot_be_replayed_so_is_refused(options, told):
    with pytest.raises((PlanError, ScheduleError), match=told):
        tiny(**options)


def test_a_spilled_stage_replays_as_a_whole(tmp_path):
    from pipefit.spec.options import Spilled

    with pytest.raises(ScheduleError, match="stage 0 is spilled; use stage"):
        tiny(recompute="layer", spill=Spilled(disk=tmp_path))


def test_attention_that_cannot_be_found_is_refused():
    with pytest.raises(PlanError, match="this model has none; use recompute layer or stage"):
        replay.check_attention(named_layers(nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))))
    eager = nn.Linear(2, 2)
    eager.config = type("Config", (), {"_attn_implementation": "eager"})()
    with pytest.raises(PlanError, match='load it with attn_implementation="sdpa"'):
        replay.check_attention(named_layers([eager]))


def test_plans_of_before_the_kinds_are_read(tmp_path):
    made = by_hand(4, num_ranks=2, schedule="1f1b", num_microbatches=4, recompute="stage")
    path = made.save(tmp_path / "plan.json")
    assert Plan.load(path) == made
    text = path.read_text()
    path.write_text(text.replace('"recompute": "stage"', '"recompute": true'))
    assert Plan.load(path) == made
    path.write_text(text.replace('"recompute": "stage"', '"recompute": "blocks"'))
    with pytest.raises(PlanError, match=rf"expected one of {', '.join(RECOMPUTE)}, got 'blocks'"):
        Plan.load(path)


class Masked(nn.Module):
    """A layer with a mask, which no backward needs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return torch.relu(self.linear(x)) + mask


class Masking(nn.Module):
    """A model whose masks alternate."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x):
        masks = [x > bound for bound in (0, 1)]
        for index, block in enumerate(self.blocks):
            x = block(x, masks[index % 2])
        return x.sum(1)


def test_layers_that_are_replayed_keep_also_the_masks_that_their_stage_makes_for_them():
    """Only what crosses a border was once counted."""
    batch = torch.randn(4, 8)
    layers = cut(Masking(), example=batch)
    profile = profile_layers(layers, batch, torch.nn.functional.mse_loss, batch[:, 0], repeats=1, warmup=0)
    number, mask = 4 * 8 * 4, 4 * 8
    block = profile.layers[2]
    # The input that is kept is saved, too, and not made again.
    assert (block.input_bytes, block.saved_bytes, block.again_bytes) == (number, 2 * number, number)
    assert profile.made_bytes == 2 * mask and profile.at(8).made_bytes == 4 * mask
    plan = by_hand(len(layers), num_ranks=2, schedule="1f1b", num_microbatches=4, recompute="layer", stages=[3, 3])
    own = [
        sum(profile.layers[index].replaying("layer").saved_bytes for index in group) for group in ((0, 1, 2), (3, 4, 5))
    ]
    assert of_plan(profile, plan, Topology.local(2)).saved_bytes == tuple(size + 2 * mask for size in own)
