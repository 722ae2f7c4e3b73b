"""Spilled training is resident training, bit for bit: the same micro-batches, wherever the weights lie."""

import copy

import pytest
import torch
from tests.pipelines import grouped
from tests.spill.small_runs import (
    adagrad,
    adamw,
    dampened,
    data,
    expected,
    factored,
    momentum,
    network,
    resident,
    rmsprop,
    same,
    spilled,
)
from torch import nn

from pipefit import Pipeline
from pipefit.errors import PipefitError, PlanError
from pipefit.ir.op import Op
from pipefit.models import build
from pipefit.pipeline.memory_cap import spill_of
from pipefit.spec.options import Parallelism, Spilled, Updates
from pipefit.testing import check

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", [momentum, dampened, adamw, adagrad, rmsprop, factored])
def test_spilled_training_is_resident_training_to_the_bit(optimizer, clip, tmp_path):
    other = spilled(optimizer, clip, disk=tmp_path / "tier")
    losses, state = expected(optimizer, clip)
    assert [other.step(x, y) for x, y in data()] == losses
    assert same(other.state_dict(), state)
    other.close()


@pytest.mark.parametrize("how", [{"prefetch": 0}, {"slots": 1}, {"slots": 3, "optim_slots": 2}, {"optim_slots": 0}])
def test_slots_and_prefetching_change_nothing(how):
    other = spilled(adamw, 0.5, **how)
    losses, state = expected(adamw, 0.5)
    assert [other.step(x, y) for x, y in data()] == losses
    assert same(other.state_dict(), state)
    other.close()


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("how", [{}, {"slots": 1}, {"slots": 3}, {"host_memory": "1 GiB", "step_on": "host"}])
def test_stages_that_keep_their_activations_replay_nothing_and_train_alike(optimizer, clip, how):
    other = spilled(optimizer, clip, keep="all", **how)
    assert not any(i.op == "recompute" for i in other.program.ranks[0])
    losses, state = expected(optimizer, clip)
    assert [other.step(x, y) for x, y in data()] == losses
    assert same(other.state_dict(), state)
    other.close()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("how", [{}, {"slots": 1}, {"optim_slots": 0}, {"keep": "all"}, {"step_on": "host"}])
def test_a_frozen_stage_is_read_and_never_written(how, clip):
    def frozen():
        model = network()
        model[1] = nn.Identity()
        model[:4].requires_grad_(False)
        model[4].weight.requires_grad_(False)
        return model

    one, other = resident(adamw, clip, frozen()), spilled(adamw, clip, frozen(), (2, 2, 2, 1), **how)
    assert other.plan.frozen == 2
    moved = [(i.stage, i.kind) for i in other.program.ranks[0] if i.op == Op.EVICT]
    assert moved and min(moved)[0] == 2
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_backward_finds_its_weights_in_whatever_slot_they_are(ranks):
    def pipeline(spill):
        return Pipeline(
            network(),
            loss=nn.functional.cross_entropy,
            optimizer=adamw,
            schedule="interleaved",
            stages=[3, 1, 1, 2] if ranks == 1 else [3, 2, 1, 1],
            microbatches=2,
            spill=spill,
            parallelism=Parallelism(chunks=4 // ranks),
            updates=Updates(seed=3),
        )

    one, other = pipeline(None), pipeline(Spilled(keep="all", slots=2 if ranks == 1 else 1))
    if ranks == 1:
        fetches = [i.slot for i in other.program.ranks[0] if (i.op, i.stage, i.kind) == ("fetch", 1, "weights")]
        assert len(set(fetches)) == 2
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_weights_that_a_layer_transposes_or_uses_twice_are_saved_by_their_place():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.fixed = nn.Parameter(torch.randn(8, 8), requires_grad=False)

        def forward(self, x):
            return torch.tanh(x @ self.weight.t() @ self.fixed) @ self.weight[:, ::2].exp() @ self.weight[1::2]

    def model():
        torch.manual_seed(1)
        return nn.Sequential(*(Twice() for _ in range(4)), nn.Linear(8, 4))

    counts = (1, 1, 1, 1, 1)
    one, other = resident(model=model()), spilled(model=model(), counts=counts, keep="all")
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_what_the_host_has_no_room_for_lies_on_disk(tmp_path):
    other = spilled(adamw, 0.5, disk=tmp_path / "tier", host_memory=5 * 4096)
    tier = other.workers[0].spilling.tier
    assert tier.memory_bytes == 5 * 4096 and tier.disk_bytes > 0
    losses, state = expected(adamw, 0.5)
    assert [other.step(x, y) for x, y in data()] == losses
    assert same(other.state_dict(), state)
    other.close()


def test_weights_that_two_shards_share_stay_on_the_device_and_train_alike():
    """Their gradient is summed shard by shard, not micro-batch by micro-batch: equal to rounding."""
    torch.manual_seed(0)
    bundle = build("gpt", layers=2, hidden=16, heads=2, context=8, vocab=32, dropout=0.1)
    x, y = bundle.example(6, 0)
    one = Pipeline(copy.deepcopy(bundle.layers), loss=bundle.loss, optimizer=adamw, stages=1, microbatches=3)
    other = Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=adamw,
        stages=4,
        microbatches=3,
        spill=Spilled(),
        parallelism=Parallelism(chunks=4),
    )
    for _ in range(3):
        assert one.step(x, y) == pytest.approx(other.step(x, y), rel=1e-6)
    for name, value in other.state_dict().items():
        assert torch.allclose(one.state_dict()[name], value, atol=1e-5)
    other.close()


class Mixing(nn.Module):
    """A layer with a weight of another one, which does not train, and one of its own."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.own = nn.Linear(8, 8)

    def forward(self, x):
        return self.own(x @ self.weight)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_frozen_weight_that_two_shards_share_stays_on_the_device_too(slots):
    """When one of them left its slot, the other read a weight without values."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    layers = nn.Sequential(Mixing(weight), nn.Linear(8, 8), Mixing(weight), nn.Linear(8, 4))
    one = resident(adamw, model=copy.deepcopy(layers))
    other = spilled(adamw, model=layers, counts=(1, 1, 1, 1), slots=slots)
    assert [one.step(*batch) for batch in data()] == [other.step(*batch) for batch in data()]
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_a_stage_that_is_on_its_tier_holds_no_memory_and_tells_who_reads_it():
    pipe = spilled()
    pipe.step(*data(1)[0])
    parameter = pipe.model[0].weight
    assert parameter.shape == (16, 8)
    assert parameter.untyped_storage().nbytes() == 4
    assert parameter.isnan().all()
    pipe.close()


def test_evaluation_fetches_every_stage_and_changes_nothing():
    one, other = resident(), spilled()
    for x, y in data():
        one.step(x, y), other.step(x, y)
    before = other.state_dict()
    assert one.evaluate(data(2)) == other.evaluate(data(2))
    assert same(before, other.state_dict())
    other.close()


@pytest.mark.parametrize("optimizer", [dampened, adamw])
def test_checkpoints_go_from_spilled_to_resident_runs_and_back(optimizer, tmp_path):
    batches = data(6)
    whole = resident(optimizer, 0.5)
    losses = [whole.step(x, y) for x, y in batches]
    first = spilled(optimizer, 0.5)
    for x, y in batches[:2]:
        first.step(x, y)
    first.save(tmp_path / "a")
    first.close()
    second = resident(optimizer, 0.5)
    second.load(tmp_path / "a")
    assert [second.step(x, y) for x, y in batches[2:4]] == losses[2:4]
    second.save(tmp_path / "b")
    third = spilled(optimizer, 0.5, counts=(2, 2, 2, 1), disk=tmp_path / "tier")
    third.load(tmp_path / "b")
    assert [third.step(x, y) for x, y in batches[4:]] == losses[4:]
    assert same(third.state_dict(), whole.state_dict())
    third.close()


def test_a_checkpoint_of_a_spilled_run_before_its_first_step_is_whole(tmp_path):
    first, second = spilled(), resident()
    first.save(tmp_path)
    second.load(tmp_path)
    assert [first.step(x, y) for x, y in data(2)] == [second.step(x, y) for x, y in data(2)]
    first.close()


def test_weights_alone_are_taken_into_a_spilled_run():
    source, target = resident(), spilled()
    source.step(*data(1)[0])
    target.load_state_dict(source.state_dict())
    assert same(source.state_dict(), target.state_dict())
    target.close()


def test_a_model_of_the_meta_device_gets_the_same_weights_wherever_they_lie(tmp_path):
    def pipeline(**more):
        with torch.device("meta"):
            bundle = build("gpt", layers=3, hidden=16, heads=2, context=8, vocab=32, tied=False)
        return Pipeline(
            bundle.layers, **grouped(loss=bundle.loss, optimizer=adamw, microbatches=2, seed=5, **more)
        ), bundle

    one, bundle = pipeline(stages=1)
    other, _ = pipeline(stages=5, chunks=5, spill=Spilled(disk=tmp_path / "tier"))
    assert same(one.state_dict(), other.state_dict())
    std = one.state_dict()["block0.attention.out.weight"].std()
    assert 0.015 / 6**0.5 < std < 0.025 / 6**0.5
    x, y = bundle.example(4, 0)
    for _ in range(2):
        assert one.step(x, y) == other.step(x, y)
    other.close()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"slots": 1, "prefetch": 0},
        {"slots": 1, "disk": "tier"},
        {"slots": 1, "disk": "tier", "host_memory": 6 * 4096},
        {"slots": 1, "keep": (1,)},
        {"slots": 1, "host_memory": "1 GiB", "step_on": "host"},
    ],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_activations_that_wait_on_the_tier_change_nothing(how, clip, tmp_path):
    how = {**how, "disk": tmp_path / "tier"} if "disk" in how else how
    one, other = resident(adamw, clip), spilled(adamw, clip, activations=True, **how)
    moved = [i for i in other.program.ranks[0] if i.kind == "act" and i.op in (Op.EVICT, Op.FETCH)]
    assert moved
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    # Larger and smaller batches than at first: records get more room, or have too much.
    for size in (30, 7):
        x, y = torch.randn(size, 8), torch.randint(0, 4, (size,))
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    assert not other.workers[0].spilling.parked._waiting
    other.close()


class Twisted(nn.Module):
    """Gives two tensors of different types, one of them not in the order of its dimensions, and the same twice."""

    def forward(self, x):
        turned = x.view(-1, 4, 4).transpose(1, 2)
        return turned, x.double(), turned


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, given):
        a, b, c = given
        return self.layer((a + c).reshape(-1, 16) * 0.5 + b.float())


def test_activations_of_several_tensors_come_back_as_they_were():
    def made(**how):
        torch.manual_seed(1)
        layers = [nn.Linear(8, 16), Twisted(), Joined(), nn.Linear(4, 4), nn.Linear(4, 4)]
        return Pipeline(
            nn.Sequential(*layers), **grouped(loss=nn.functional.cross_entropy, optimizer=adamw, microbatches=3, **how)
        )

    one = made(stages=1)
    other = made(stages=[2, 1, 1, 1], chunks=4, spill=Spilled(activations=True, slots=1))
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_ranks_of_a_pipeline_park_what_they_are_sent():
    def made(**how):
        return Pipeline(
            network(),
            **grouped(
                loss=nn.functional.cross_entropy,
                optimizer=adamw,
                stages=[2, 1, 1, 1, 1, 1],
                chunks=3,
                microbatches=3,
                schedule="breadth-first",
                **how,
            ),
        )

    one, other = made(), made(spill=Spilled(activations=True, slots=1))
    assert all(any(i.op is Op.EVICT and i.kind == "act" for i in rank) for rank in other.program.ranks)
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_copies_are_in_the_measured_timeline():
    pipe = spilled()
    pipe.step(*data(1)[0])
    pipe.step(*data(1)[0])
    pipe.settle()
    events = pipe.timeline(last=1).events
    listed = pipe.program.ranks[0]
    copies = [e for e in events if listed[e.position].op in ("fetch", "evict")]
    assert copies and all(0 <= e.start_s <= e.end_s for e in copies)
    pipe.close()


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("breadth-first", 2), ("gpipe", 1), ("1f1b", 1)])
def test_a_pipeline_whose_stages_are_spilled_trains_as_one_that_holds_them(schedule, chunks):
    def pipeline(spill):
        return Pipeline(
            network(),
            loss=nn.functional.cross_entropy,
            optimizer=adamw,
            stages=2 * chunks,
            microbatches=4,
            schedule=schedule,
            spill=spill,
            parallelism=Parallelism(chunks=chunks),
            updates=Updates(clip_norm=0.5, seed=3),
        )

    one, other = pipeline(None), pipeline(Spilled(slots=1))
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_the_check_of_equality_takes_the_spilled_schedule():
    result = check(
        network(),
        **grouped(
            num_ranks=1,
            schedule="spilled",
            num_chunks=4,
            num_microbatches=3,
            loss=nn.functional.cross_entropy,
            example=lambda samples, number: data(number + 1)[-1],
            batch_size=12,
        ),
    )
    assert result.equal and result.weight_diff < 1e-15


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_spills_with_its_weights_in_full(precision):
    def pipeline(stages, spill):
        return Pipeline(
            network(),
            loss=nn.functional.cross_entropy,
            optimizer=adamw,
            stages=stages,
            microbatches=3,
            precision=precision,
            spill=spill,
            schedule="spilled" if spill else "breadth-first",
            parallelism=Parallelism(chunks=stages, recompute=True),
            updates=Updates(seed=3),
        )

    one, other = pipeline(4, None), pipeline(4, Spilled())
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


@pytest.mark.parametrize(
    "wrong",
    [{"slots": 0}, {"slots": 2.5}, {"optim_slots": -1}, {"prefetch": -1}, {"commit_every": -1}, {"device_memory": 0},
     {"host_memory": "0 MiB"}, {"device_memory": "much"}],
    ids=str,
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_at_once_by_their_name(wrong):
    with pytest.raises(PipefitError, match=f"^{next(iter(wrong))}: expected"):
        Spilled(**wrong)


def test_stages_to_keep_are_named_by_words_or_numbers():
    assert spill_of(Spilled(keep="none"), 3).keeps == spill_of(Spilled(), 3).keeps == ()
    assert spill_of(Spilled(keep=(2, 0)), 3).keeps == (0, 2)
    with pytest.raises(PlanError, match="keep: expected auto, all, none, or some of the stages 0, 1, 2, got"):
        spill_of(Spilled(keep=(3,)), 3)
    with pytest.raises(PlanError, match=r"keep: expected one of auto, all, none or a list .*'some'"):
        Spilled(keep="some")
    with pytest.raises(PlanError, match="expected auto or none, got 'all'"):
        Pipeline(
            network(), loss=nn.functional.cross_entropy, optimizer=adamw, spill=Spilled("1 MiB", keep="all"),
            example=data(1)[0],
        )  # fmt: skip
