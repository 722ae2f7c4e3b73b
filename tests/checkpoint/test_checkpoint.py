import errno
import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline, Spilled
from pipefit.checkpoint import commit, export
from pipefit.checkpoint.manifest import MANIFEST, read_manifest
from pipefit.errors import ModelError, PipefitError
from pipefit.spec.sealed import seal

pytestmark = pytest.mark.slow


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def in_groups(parameters):
    """Weight decay for matrices only, as is the custom."""
    groups = [([p for p in parameters if p.dim() > 1], 0.1), ([p for p in parameters if p.dim() < 2], 0.0)]
    return torch.optim.AdamW([{"params": own, "weight_decay": decay} for own, decay in groups if own], 0.01)


def dropping(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)


def warming(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


class Output(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x @ self.weight.T


def tied():
    torch.manual_seed(0)
    embedding = nn.Embedding(5, 4)
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.Linear(4, 4), Output(embedding))


def pipeline(make=model, **options):
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": momentum, "stages": 2, "microbatches": 4, **options}
    return Pipeline(make(), **grouped(**settings))


def batches(count=6, make=model):
    generator = torch.Generator().manual_seed(1)
    if make is tied:
        words = [torch.randint(0, 5, (8,), generator=generator) for _ in range(count)]
        return [(word, word.roll(1)) for word in words]
    return [
        (torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)) for _ in range(count)
    ]


def same(first, second):
    mine, theirs = first.state_dict(), second.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [momentum, adam, in_groups])
@pytest.mark.parametrize("scheduler", [dropping, warming])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"stages": 2}, {"stages": 2}),
        ({"stages": 3, "schedule": "gpipe"}, {"stages": [1, 5], "schedule": "gpipe"}),
        ({"stages": 1}, {"stages": 4, "chunks": 2, "schedule": "interleaved"}),
    ],
)
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(tmp_path, optimizer, scheduler, before, after):
    training = {"optimizer": optimizer, "scheduler": scheduler}
    whole = pipeline(**before, **training)
    losses = whole.fit(batches())
    first = pipeline(**before, **training)
    start = first.fit(batches()[:3])
    first.save(tmp_path, extra={"position": 3})
    second = pipeline(**after, **training)
    position = second.load(tmp_path).extra["position"]
    assert start + second.fit(batches()[position:]) == losses
    assert same(second, whole)


def test_a_checkpoint_saved_while_fit_runs_goes_on_at_the_updates_it_has_done(tmp_path):
    whole = pipeline()
    losses = whole.fit(batches(), callbacks=[lambda record: record.step == 3 and whole.save(tmp_path)])
    second = pipeline()
    done = second.load(tmp_path).step
    assert second.fit(batches()[done:]) == losses[done:]
    assert same(second, whole)


def test_an_asynchronous_run_goes_on_from_where_its_segment_ended(tmp_path):
    def run(pipe):
        return pipe.fit(batches()[:3], steps=3)

    options = {"schedule": "pipedream", "microbatches": 2, "optimizer": adam}
    whole, first, second = (pipeline(**options) for _ in range(3))
    run(whole)
    run(first)
    first.save(tmp_path)
    second.load(tmp_path)
    assert run(second) == run(whole)
    assert same(second, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_tied_weights_are_saved_once_and_stay_tied_wherever_the_model_is_cut(tmp_path, before, after):
    data = batches(4, tied)
    whole = pipeline(tied, stages=before, optimizer=adam)
    losses = whole.fit(data)
    first = pipeline(tied, stages=before, optimizer=adam)
    start = first.fit(data[:2])
    path = first.save(tmp_path)
    saved = [name for file in path.glob("*.safetensors") for name in load_file(file)]
    assert "0.weight" in saved and "3.weight" not in saved
    second = pipeline(tied, stages=after, optimizer=adam)
    second.load(tmp_path)
    rest = second.fit(data[2:])
    assert start + rest == pytest.approx(losses, abs=1e-6)  # a tie between stages sums in another order
    assert torch.equal(second.state_dict()["0.weight"], second.state_dict()["3.weight"])


def test_names_are_the_users_own(tmp_path):
    pipe = pipeline()
    pipe.fit(batches(1))
    path = pipe.save(tmp_path / "run")
    assert path == tmp_path / "run" / "step-000001"
    saved = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights = {name: tensor for name, tensor in saved.items() if not name.startswith("optim/")}
    expected = pipe.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert "optim/0.weight/momentum_buffer" in saved


def test_weights_alone_leave_the_training_as_it_is(tmp_path):
    first = pipeline()
    first.fit(batches(2))
    first.save(tmp_path)
    second = pipeline(optimizer=adam)
    second.load(tmp_path, weights_only=True)
    assert same(first, second)
    assert second.num_updates == 0


# ---- which one -------------------------------------------------------------------------------------------------------


def three(place):
    pipe = pipeline()
    paths = []
    for _ in range(3):
        pipe.fit(batches(1))
        paths.append(pipe.save(place))
    return paths


def test_the_newest_whole_checkpoint_is_taken_and_the_damaged_one_named(tmp_path, caplog):
    paths = three(tmp_path)
    file = paths[2] / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    pipe = pipeline()
    with caplog.at_level(logging.WARNING):
        found = pipe.load(tmp_path)
    assert (found.path, found.step, pipe.num_updates) == (paths[1], 2, 2)
    assert found.skipped == (f"{file}: damaged (it does not have its checksum)",)
    assert found.skipped[0] in caplog.text


def test_a_checkpoint_asked_for_by_name_is_not_replaced_by_another(tmp_path):
    paths = three(tmp_path)
    assert pipeline().load(paths[0]).step == 1
    (paths[0] / "rank-0.safetensors").unlink()
    with pytest.raises(PipefitError, match=r"rank-0\.safetensors: missing"):
        pipeline().load(paths[0])


def test_every_flipped_byte_is_found(tmp_path):
    torch.manual_seed(0)
    pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], loss=nn.MSELoss(), optimizer=momentum, microbatches=1)
    pipe.step(torch.ones(2, 2), torch.ones(2, 2))
    path = pipe.save(tmp_path)
    manifest = read_manifest(path)

    checks = {entry.name: lambda entry=entry: entry.check(path) for entry in manifest.files}
    for name, check in {MANIFEST: lambda: read_manifest(path), **checks}.items():
        file = path / name
        whole = file.read_bytes()
        for index in range(len(whole)):
            data = bytearray(whole)
            data[index] ^= 1 << (index % 8)
            file.write_bytes(data)
            with pytest.raises(PipefitError):
                check()
        file.write_bytes(whole)
        check()


def test_files_outside_the_checkpoint_are_refused_even_under_a_right_checksum(tmp_path):
    path = three(tmp_path)[0]
    data = json.loads((path / MANIFEST).read_text())
    del data["checksum"]
    data["files"][0]["name"] = "../step-000002/rank-0.safetensors"
    (path / MANIFEST).write_text(seal(data, indent=1))
    with pytest.raises(PipefitError, match=r"file name '\.\./step-000002/rank-0\.safetensors'"):
        pipeline().load(path)


# ---- nothing is lost -------------------------------------------------------------------------------------------------


def test_a_second_checkpoint_of_a_step_replaces_nothing(tmp_path):
    pipe = pipeline()
    pipe.fit(batches(1))
    paths = [pipe.save(tmp_path) for _ in range(2)]
    assert [path.name for path in paths] == ["step-000001", "step-000001.1"]
    assert pipeline().load(tmp_path).path == paths[1]


def test_only_the_newest_are_kept(tmp_path):
    pipe = pipeline()
    for _ in range(4):
        pipe.fit(batches(1))
        pipe.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_checkpoint_just_saved_is_kept_though_others_have_more_steps(tmp_path):
    three(tmp_path)
    pipe = pipeline()
    pipe.fit(batches(1))
    path = pipe.save(tmp_path, keep=1)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_is_said_and_loses_nothing(tmp_path, monkeypatch):
    paths = three(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commit, "write_tensors", full)
    pipe = pipeline()
    with pytest.raises(PipefitError, match=r"the disk is full; this file needs \d+ bytes, \d+ bytes are free"):
        pipe.save(tmp_path)
    assert sorted(tmp_path.iterdir()) == paths
    monkeypatch.undo()
    assert pipe.load(tmp_path).path == paths[2]


def _killed_at(call, work):
    """Does some work in a forked process that is killed at its n-th call of the file system; whether it was."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(original):
            def function(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return function

        for name in ("fsync", "mkdir", "rename", "rmdir", "unlink", "open"):
            setattr(os, name, counted(getattr(os, name)))
        for name in ("open", "mkdir", "rename"):
            setattr(Path, name, counted(getattr(Path, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_a_save_killed_at_any_call_of_the_file_system_leaves_a_whole_checkpoint(tmp_path):
    pipe = pipeline()
    pipe.fit(batches(1))
    before = tmp_path / "before"
    pipe.save(before)
    pipe.fit(batches(1))
    steps = set()
    for call in range(1, 200):
        place = tmp_path / str(call)
        shutil.copytree(before, place)
        killed = _killed_at(call, lambda place=place: pipe.save(place, keep=1))
        found = pipeline().load(place)
        steps.add(found.step)
        assert not found.skipped
        if not killed:
            break
        # The next save sweeps up what the killed one left.
        pipe.save(place, keep=1)
        assert [path.name.split(".")[0] for path in place.iterdir()] == ["step-000002"]
    assert call > 10
    assert steps == {1, 2}


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_a_path_that_is_missing_empty_or_a_file_is_refused(tmp_path):
    pipe = pipeline()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PipefitError, match="no such directory"):
        pipe.load(tmp_path / "missing")
    with pytest.raises(PipefitError, match="expected the directory of a run or of a checkpoint, found a file"):
        pipe.load(file)
    with pytest.raises(PipefitError, match="expected a directory for checkpoints, found a file"):
        pipe.save(file)
    with pytest.raises(PipefitError, match="expected a directory for checkpoints, found a file"):
        pipe.save(file / "inside")
    with pytest.raises(PipefitError, match="no checkpoint in it"):
        pipe.load(tmp_path)


def test_data_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(PipefitError, match="extra: expected JSON data"):
        pipeline().save(tmp_path, extra={"position": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_another_model_is_refused_and_nothing_changes(tmp_path):
    first = pipeline()
    first.save(tmp_path)
    torch.manual_seed(3)
    other = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)]
    second = pipeline(lambda: other)
    before = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    with pytest.raises(ModelError, match=r"5\.weight: the model's shape is \[4, 8\], the checkpoint's \[3, 8\]"):
        second.load(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in second.state_dict().items())
    with pytest.raises(ModelError, match=r"the checkpoint has 3\.bias, 3\.weight, 4\.bias and \d+ more"):
        pipeline(lambda: [nn.Linear(4, 8), nn.ReLU()]).load(tmp_path)


def test_another_optimizer_or_schedule_is_refused(tmp_path):
    first = pipeline(scheduler=dropping)
    first.fit(batches(1))
    first.save(tmp_path)
    with pytest.raises(ModelError, match="optimizer is SGD, this run's is AdamW"):
        pipeline(optimizer=adam, scheduler=dropping).load(tmp_path)
    with pytest.raises(ModelError, match="schedule is MultiStepLR, this run's is none"):
        pipeline().load(tmp_path)


# ---- going back to plain PyTorch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model, tied])
def test_an_export_is_one_file_that_plain_pytorch_reads(tmp_path, make):
    pipe = pipeline(make, stages=3)
    pipe.fit(batches(2, make))
    export(pipe, tmp_path / "model.safetensors")
    plain = make()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert load_model(plain, tmp_path / "model.safetensors") == (set(), [])
    expected = pipe.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_onto_a_directory_is_refused(tmp_path):
    with pytest.raises(PipefitError, match="expected a file to write, found a directory"):
        export(pipeline(), tmp_path)


class Gated(nn.Module):
    """A module that is cut, whose own weight its code uses around every block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.gates = nn.Parameter(torch.ones(6))

    def forward(self, x):
        before = []
        for number, block in enumerate(self.blocks):
            before.append(x)
            x = block(x).tanh() * self.gates[number] + sum(before)
        return x


def gated(**options):
    torch.manual_seed(0)
    example = torch.randn(2, 4, 4, dtype=torch.float64).unbind()
    given = grouped(loss=nn.functional.mse_loss, optimizer=momentum, microbatches=4, example=example, **options)
    return Pipeline(Gated().double(), **given)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4, "chunks": 2, "schedule": "interleaved"},
        {"stages": 4, "chunks": 2, "schedule": "breadth-first", "replicas": 2, "shard": "weights"},
        {"stages": 4, "chunks": 2, "schedule": "zb-v"},
        {"stages": 3, "spill": Spilled(slots=4)},
    ],
)
def test_a_weight_that_several_stages_of_a_rank_have_is_saved_once(options, wait, tmp_path):
    batches = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pipe, whole = gated(**options), gated(stages=1)
    for x, y in batches[:2]:
        assert pipe.step(x, y) == pytest.approx(whole.step(x, y), rel=1e-12)
    pipe.save(tmp_path, wait=wait)
    again = gated(stages=2)
    again.load(tmp_path)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-12, atol=1e-14)
    x, y = batches[2]
    assert again.step(x, y) == pytest.approx(whole.step(x, y), rel=1e-12)
    pipe.close()
