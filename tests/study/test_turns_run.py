"""One trial, a turn at a time from records and back: the same bits, and nothing lost when it is cut off."""

import pytest
import torch
from safetensors.torch import load_file
from tests.study.cases import CPU, GPT, MLP, SMALL, TIED, alone, by_pipeline, in_turns

from pipefit.errors import InfeasibleError, TierError
from pipefit.spill.tier_file import TierFile
from pipefit.study.execute import runner as runner_module
from pipefit.study.execute.admission import recipe_of
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import export, take_turn
from pipefit.study.execute.trial_files import read_losses, read_state
from pipefit.study.trial import NoRoomError, Trial

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(trial, folder, workers=2):
    losses = in_turns(trial, folder, workers)
    export(OpenTrial(0, trial, folder, CPU), str(folder / "out.safetensors"))
    return losses, load_file(folder / "out.safetensors")


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
    """Stands for the death of the process."""


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["free", "clipped"])
@pytest.mark.parametrize("shards", [1, 3])
def test_cut_off_before_any_write_and_taken_up_by_another_worker_the_numbers_are_the_same(
    shards, clip, tmp_path, monkeypatch
):
    trial = Trial(**{**SMALL, "steps": 2}, **MLP, shards=shards, clip=clip)
    expected = alone(trial)[0]
    written = {"count": 0, "cut": -1}

    def counting(function):
        def call(*args):
            if written["count"] == written["cut"]:
                raise Cut
            written["count"] += 1
            return function(*args)

        return call

    for name in ("write", "commit"):
        monkeypatch.setattr(TierFile, name, counting(getattr(TierFile, name)))
    monkeypatch.setattr(runner_module, "write_loss", counting(runner_module.write_loss))
    runner = OpenTrial(0, trial, tmp_path / "whole", CPU)
    admitted = written["count"]
    while read_state(tmp_path / "whole")[0] < trial.steps:
        take_turn(runner)
    total = written["count"]
    assert total > admitted + 4
    # Every place where one-shard trials write, a third of those of several shards.
    for cut in range(admitted, total, 1 if shards == 1 else 3):
        folder = tmp_path / f"cut-{cut}"
        written.update(count=0, cut=cut)
        with pytest.raises(Cut):
            runner = OpenTrial(0, trial, folder, CPU)
            while True:
                take_turn(runner)
        written.update(cut=-1)
        other = OpenTrial(0, trial, folder, CPU)
        while read_state(folder)[0] < trial.steps:
            take_turn(other)
        assert read_losses(folder, trial.steps)[0] == expected, cut


def test_a_trial_whose_admission_was_cut_off_is_admitted_anew(tmp_path, monkeypatch):
    trial = Trial(**SMALL, **MLP)
    with monkeypatch.context() as patched:
        patched.setattr(TierFile, "commit", lambda *args: (_ for _ in ()).throw(Cut()))
        with pytest.raises(Cut):
            OpenTrial(0, trial, tmp_path, CPU)
    assert read_state(tmp_path) is None
    assert in_turns(trial, tmp_path) == alone(trial)[0]


def test_a_worker_that_failed_in_a_turn_goes_on_with_what_the_tier_has(tmp_path, monkeypatch):
    trial = Trial(**SMALL, **MLP)
    runner = OpenTrial(0, trial, tmp_path, CPU)
    take_turn(runner)
    with monkeypatch.context() as patched:
        patched.setattr(TierFile, "commit", lambda *args: (_ for _ in ()).throw(OSError("the disk is gone")))
        with pytest.raises(OSError, match="disk is gone"):
            take_turn(runner)
    runner.close()
    runner = OpenTrial(0, trial, tmp_path, CPU)
    take_turn(runner)
    take_turn(runner)
    assert read_losses(tmp_path, 3)[0] == alone(trial)[0]


def test_whatever_is_damaged_between_two_turns_is_found_and_named(tmp_path):
    trial = Trial(**SMALL, **MLP, shards=2)
    runner = OpenTrial(0, trial, tmp_path / "t", CPU)
    for _ in range(4):
        take_turn(runner)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    assert set(whole) == {"trial.tier", "trial.commit", "losses"}

    def turns_with(name, content):
        for file, data in whole.items():
            (tmp_path / "t" / file).write_bytes(content if file == name else data)
        read_losses(tmp_path / "t", read_state(tmp_path / "t")[0])
        other = OpenTrial(0, trial, tmp_path / "t", CPU)
        for _ in range(3):  # every record is read
            take_turn(other)

    turns_with("", b"")
    for name in ("trial.commit", "losses"):
        data = whole[name]
        for place in range(0, len(data), max(len(data) // 20, 1)):
            with pytest.raises(TierError, match=f"{name}: .*damaged"):
                turns_with(name, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(TierError, match=f"{name}: .*damaged"):
            turns_with(name, data[: len(data) // 2])
    edited = whole["trial.commit"].replace(b'"step": 1,', b'"step": 0,')
    assert edited != whole["trial.commit"]
    with pytest.raises(TierError, match=r"trial\.commit: damaged"):
        turns_with("trial.commit", edited)
    records = bytearray(whole["trial.tier"])
    for place in range(5000, len(records), 4096):  # every payload, of either copy
        records[place] ^= 1
    with pytest.raises(TierError, match=r"trial\.tier does not have its checksum"):
        turns_with("trial.tier", bytes(records))
    with pytest.raises(TierError, match=r"trial\.tier: .*truncated"):
        turns_with("trial.tier", whole["trial.tier"][:-8192])


def test_under_a_limit_the_model_is_cut_so_that_each_shard_fits_and_an_impossible_limit_names_the_least(tmp_path):
    trial = Trial(**{**SMALL, "steps": 2}, model="mlp", options={"layers": 6, "width": 64})
    runner = OpenTrial(0, trial, tmp_path / "a", CPU, capacity_bytes=150_000)
    figures = runner.state.figures
    assert figures.shards > 1 and 0 < figures.device_bytes <= 150_000
    while read_state(tmp_path / "a")[0] < 2:
        take_turn(runner)
        assert runner.held_bytes <= 150_000
    assert read_losses(tmp_path / "a", 2)[0] == alone(trial)[0]
    with pytest.raises(InfeasibleError, match="the smallest capacity that works is"):
        OpenTrial(0, trial, tmp_path / "b", CPU, capacity_bytes=10_000)
    assert not (tmp_path / "b").exists()


def test_batches_may_change_their_size_from_step_to_step(tmp_path):
    def data(step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn((6, 4, 9, 2, 8)[step] * 400, 5, generator=generator)
        return x, x.sum(1, keepdim=True)

    layers = lambda: [torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)]  # noqa: E731
    trial = Trial("own", layers, loss=torch.nn.functional.mse_loss, data=data, microbatches=2, steps=5, shards=3)
    assert in_turns(trial, tmp_path, 3) == alone(trial)[0]


def test_micro_batches_weigh_as_many_targets_as_count(tmp_path):
    def data(step):
        generator = torch.Generator().manual_seed(step)
        y = torch.randint(0, 3, (8,), generator=generator)
        y[:3] = -100
        return torch.randn(8, 5, generator=generator), y

    def layers():
        return [torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]

    options = {"loss": torch.nn.functional.cross_entropy, "data": data, "steps": 3, "shards": 2}
    whole = in_turns(Trial("whole", layers, microbatches=1, **options), tmp_path / "whole")
    split = in_turns(Trial("split", layers, microbatches=2, **options), tmp_path / "split")
    assert split == pytest.approx(whole, rel=1e-5)


def test_what_an_optimizer_of_the_users_keeps_is_counted_where_the_model_is_cut(tmp_path):
    def admitted(name, optimizer):
        trial = Trial(**{**SMALL, "optimizer": optimizer}, model="mlp", options={"layers": 6, "width": 64})
        return OpenTrial(0, trial, tmp_path / name, CPU, capacity_bytes=150_000).state.figures

    plain = admitted("plain", "adam")
    more = admitted("more", lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True))
    none = admitted("none", lambda p: torch.optim.SGD(p, 1e-2))
    assert none.shards < plain.shards < more.shards <= 6
    assert none.tier_bytes < plain.tier_bytes < more.tier_bytes


def test_nothing_is_built_before_admission_and_nothing_written_without_room(tmp_path):
    built = []

    def model():
        built.append(1)
        return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]

    trial = Trial("own", model, loss=torch.nn.functional.mse_loss, data=lambda k: (torch.ones(4, 4), torch.ones(4, 2)))
    assert not built
    with pytest.raises(NoRoomError):
        OpenTrial(0, trial, tmp_path / "t", CPU, room_bytes=10)
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
