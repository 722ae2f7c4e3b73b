"""One trial, a turn at a time from records and back: the same bits, and nothing lost when it is cut off."""

import pytest
import torch
from safetensors.torch import load_file
from tests.study.cases import CPU, GPT, MLP, SMALL, TIED, alone, by_pipeline, in_turns

from pipefit.errors import InfeasibleError, PipefitError
from pipefit.study.execute import between
from pipefit.study.execute import live as live_module
from pipefit.study.execute.boundary import packed, unpacked
from pipefit.study.execute.cursor import read_cursor, read_losses
from pipefit.study.execute.export import export
from pipefit.study.execute.live import LiveTrial, NoRoomError
from pipefit.study.execute.recipe import recipe_of
from pipefit.study.execute.records import read_record, write_record
from pipefit.study.trial import Trial


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(trial, folder, workers=2):
    losses = in_turns(trial, folder, workers)
    file = export(LiveTrial(0, trial, folder, CPU), str(folder / "out.safetensors"))
    return losses, load_file(file)


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["free", "clipped"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model", [MLP, GPT], ids=["batch-norm and dropout", "gpt"])
def test_a_trial_that_changes_its_worker_at_every_turn_has_the_bits_of_one_process(model, shards, clip, tmp_path):
    trial = Trial(**SMALL, **model, shards=shards, clip=clip, warmup=1)
    wanted, weights = alone(trial)
    losses, got = run(trial, tmp_path)
    assert losses == wanted
    assert len(got) == len(weights) and all(torch.equal(a, b) for a, b in zip(got.values(), weights, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_other_optimizers_too(optimizer, tmp_path):
    trial = Trial(**SMALL, **MLP, shards=2, optimizer=optimizer)
    assert in_turns(trial, tmp_path) == alone(trial)[0]


def test_a_weight_that_two_shards_share_is_trained_once_with_the_gradients_of_both(tmp_path):
    trial = Trial(**SMALL, **TIED, shards=4)
    how = {"stages": 4, "chunks": 4, "schedule": "breadth-first", "recompute": True}
    wanted, weights = by_pipeline(trial, recipe_of(trial), **how)
    losses, got = run(trial, tmp_path)
    assert losses == wanted
    assert all(torch.equal(a, b) for a, b in zip(got.values(), weights, strict=True))
    model = recipe_of(trial)
    names = {name for layer in model.layers for name in layer.module.state_dict(prefix=f"{layer.prefix}.")}
    assert set(got) == names


class Cut(BaseException):
    """What stands in for a death."""


@pytest.mark.parametrize("shards", [1, 3])
def test_cut_off_before_any_write_and_taken_up_by_another_worker_the_numbers_are_the_same(
    shards, tmp_path, monkeypatch
):
    trial = Trial(**{**SMALL, "steps": 2}, **MLP, shards=shards)
    wanted = alone(trial)[0]
    written = {"count": 0, "cut": -1}

    def counting(function):
        def call(*args):
            if written["count"] == written["cut"]:
                raise Cut
            written["count"] += 1
            return function(*args)

        return call

    for name in ("write_record", "commit", "write_loss"):
        monkeypatch.setattr(live_module, name, counting(getattr(live_module, name)))
    monkeypatch.setattr(between, "write_record", live_module.write_record)
    in_turns(trial, tmp_path / "whole")
    total = written["count"]
    assert total > 4
    for cut in range(shards + 1, total):  # before that the trial is not admitted
        folder = tmp_path / f"cut-{cut}"
        written.update(count=0, cut=cut)
        live = LiveTrial(0, trial, folder, CPU)
        with pytest.raises(Cut):
            live.admit()
            while True:
                live.turn()
        written.update(cut=-1)
        other = LiveTrial(0, trial, folder, CPU)
        other.admit()
        while read_cursor(folder).step < trial.steps:
            other.turn()
        assert list(read_losses(folder, trial.steps)) == wanted


def test_a_worker_that_failed_in_a_turn_goes_on_with_what_the_tier_has(tmp_path, monkeypatch):
    trial = Trial(**SMALL, **MLP)
    live = LiveTrial(0, trial, tmp_path, CPU)
    live.admit()
    live.turn()

    def broken(*args):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(live_module, "commit", broken)
        with pytest.raises(OSError, match="disk is gone"):
            live.turn()
    live.turn()
    live.turn()
    assert list(read_losses(tmp_path, 3)) == alone(trial)[0]


def test_every_flipped_byte_of_a_record_is_found(tmp_path):
    path = tmp_path / "r.a"
    tensors = {"w": torch.arange(300, dtype=torch.float32), "n": torch.tensor(3), "none": torch.empty(0)}
    write_record(path, 4, tensors, {"x": [1]})
    record = read_record(path, 4)
    assert record.extra == {"x": [1]} and all(torch.equal(record.tensors[k], tensors[k]) for k in tensors)
    whole = path.read_bytes()
    for place in (0, 9, 30, 4096, 4110, 8200, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(PipefitError, match=r"checksum|no whole record|found"):
            read_record(path, 4)
    path.write_bytes(whole[:-4096])
    with pytest.raises(PipefitError, match="checksum"):
        read_record(path, 4)
    path.write_bytes(whole)
    with pytest.raises(PipefitError, match="expected version 6 of the trial's state, found version 4"):
        read_record(path, 6)


def test_under_a_limit_the_model_is_cut_so_that_each_shard_fits_and_an_impossible_limit_names_the_least(tmp_path):
    trial = Trial(**{**SMALL, "steps": 2}, model="mlp", options={"layers": 6, "width": 64})
    live = LiveTrial(0, trial, tmp_path / "a", CPU, capacity_bytes=150_000)
    admitted = live.admit()
    assert admitted.num_shards > 1 and 0 < admitted.device_bytes <= 150_000
    while read_cursor(tmp_path / "a").step < 2:
        live.turn()
        assert live.held_bytes <= 150_000
    assert list(read_losses(tmp_path / "a", 2)) == alone(trial)[0]
    with pytest.raises(InfeasibleError, match="the smallest capacity that works is"):
        LiveTrial(0, trial, tmp_path / "b", CPU, capacity_bytes=10_000).admit()
    assert not (tmp_path / "b").exists()


def test_what_waits_between_two_shards_lies_in_memory_as_it_did(tmp_path):
    given = [torch.randn(4, 3, 5).transpose(0, 2), torch.randn(6)[::2], torch.ones(2).expand(3, 2), torch.tensor(2.0)]
    write_record(tmp_path / "r", 1, *packed("act", 0, [7], {("act", 0, 7): given}))
    found = unpacked("act", 0, read_record(tmp_path / "r", 1), CPU)["act", 0, 7]
    assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))
    assert found[0].stride() == given[0].stride()


def test_what_an_optimizer_of_the_users_keeps_is_counted_where_the_model_is_cut(tmp_path):
    def admitted(name, optimizer):
        trial = Trial(**{**SMALL, "optimizer": optimizer}, model="mlp", options={"layers": 6, "width": 64})
        return LiveTrial(0, trial, tmp_path / name, CPU, capacity_bytes=150_000).admit()

    plain = admitted("plain", "adam")
    more = admitted("more", lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True))
    none = admitted("none", lambda p: torch.optim.SGD(p, 1e-2))
    assert none.num_shards < plain.num_shards < more.num_shards <= 6
    assert none.tier_bytes < plain.tier_bytes < more.tier_bytes


def test_nothing_is_built_before_admission_and_nothing_written_without_room(tmp_path):
    built = []

    def model():
        built.append(1)
        return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]

    trial = Trial("own", model, loss=torch.nn.functional.mse_loss, data=lambda k: (torch.ones(4, 4), torch.ones(4, 2)))
    live = LiveTrial(0, trial, tmp_path / "t", CPU)
    assert not built
    with pytest.raises(NoRoomError):
        live.admit(room_bytes=10)
    assert built and not (tmp_path / "t").exists()


def test_a_tensor_that_is_neither_weight_nor_buffer_keeps_its_values(tmp_path):
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
            self.register_buffer("shift", torch.ones(4), persistent=False)

        def forward(self, x):
            return super().forward(x) * self.scale + self.shift

    def data(step):
        drawn = torch.Generator().manual_seed(step)
        return torch.randn(4, 4, generator=drawn), torch.randn(4, 4, generator=drawn)

    trial = Trial("own", lambda: [Scaled(), Scaled()], loss=torch.nn.functional.mse_loss, data=data, steps=3, shards=2)
    assert in_turns(trial, tmp_path) == alone(trial)[0]
