"""Batches from torch's `DataLoader`: alike on every rank, compared among them, taken up where a checkpoint stands."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import pipefit as pf
from pipefit.data import ArrayBatches
from pipefit.errors import DataError, PipefitError
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current


class Rows(torch.utils.data.Dataset):
    def __init__(self, own=0):
        self.own, self.loaded = own, []

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.loaded.append(index)
        row = torch.arange(6, dtype=torch.float32) * (index + 1) / 100 + self.own
        return row, torch.tensor([index / 22])


def pipeline(stages=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return pf.Pipeline(model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1), stages=stages,
                       **{"microbatches": 2, **options})  # fmt: skip


def shuffled(workers):
    pipe = pipeline()
    # Ranks draw different numbers of random numbers: what each epoch's order must not depend on.
    torch.rand(current().rank + 1)
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=workers)
    return [pipe.fit(loader) for _ in range(3)]


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_shuffles_gives_all_ranks_the_same_order(workers):
    alone = shuffled(0)
    assert launch(shuffled, 2, workers, threads=1) == [alone, alone]
    assert len(alone[0]) == 6 and alone[0] != alone[1]  # with the last, ragged batch


def test_a_generator_of_the_users_own_is_left_alone():
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(torch.rand(8, 6), torch.rand(8, 1)), 4, shuffle=True, generator=own)
    pipeline().fit(loader)
    assert loader.generator is own


def different():
    pipeline().fit(DataLoader(Rows(own=current().rank), batch_size=4))


@pytest.mark.dist
def test_ranks_with_other_data_are_refused():
    with pytest.raises(PipefitError, match=r"checksum of the first batch: rank 0 has .*, rank 1 has"):
        launch(different, 2, threads=1)


# ---- taken up again --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return (Rows()[index] for index in range(22))


class Stateful(DataLoader):
    """As torchdata's StatefulDataLoader: its own state, with tensors, which a plain `iter` would forget."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken, "order": torch.tensor(self.order), "random": self.generator.get_state()}

    def load_state_dict(self, state):
        self.taken, self.order = state["taken"], state["order"].tolist()
        self.generator.set_state(state["random"])

    def __iter__(self):
        if not self.taken:
            self.order = torch.randperm(22, generator=self.generator).tolist()
        while self.taken < 5:
            self.taken += 1
            yield self.collate_fn([self.dataset[index] for index in self.order[4 * self.taken - 4 : 4 * self.taken]])
        self.taken = 0


LOADERS = {
    "shuffled": lambda: DataLoader(Rows(), 4, shuffle=True),
    "in order": lambda: DataLoader(Rows(), 4, drop_last=True),
    "by its own generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "by workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2),
    "by workers that persist": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=1, persistent_workers=True,
                                                  generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Rows(), 4, sampler=WeightedRandomSampler([*range(22)], 22)),
    "one by one": lambda: DataLoader(TensorDataset(torch.rand(9, 4, 6), torch.rand(9, 4, 1)), None, shuffle=True),
    "streamed": lambda: DataLoader(Stream(), 4),
    "stateful": lambda: Stateful(Rows(), 4),
    "pipefit's": lambda: ArrayBatches(*map(torch.stack, zip(*map(Rows().__getitem__, range(22)), strict=True)), 4),
}  # fmt: skip


def loader_named(name):
    torch.manual_seed(7)
    return LOADERS[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_training_takes_the_batches_of_an_uninterrupted_one(name, tmp_path):
    whole = pipeline()
    losses = whole.fit(loader_named(name), steps=17)
    for count in (2, 5, 6, 7):
        first = pipeline()
        start = first.fit(loader_named(name), steps=count)
        first.save(tmp_path)
        second, loader = pipeline(stages=3, schedule="gpipe"), loader_named(name)
        second.load(tmp_path)
        rest = second.fit(loader)
        assert len(rest) < 17 - count  # what is left of the epoch, or the next one
        rest += second.fit(loader, steps=17 - count - len(rest))
        assert start + rest == losses
        state = whole.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in second.state_dict().items())
        first.close()  # ends its loader's workers
        second.close()
    whole.close()


def test_a_fit_of_some_steps_is_followed_by_the_rest():
    losses = pipeline().fit(loader_named("shuffled"), steps=12)
    pipe, loader = pipeline(), loader_named("shuffled")
    assert [pipe.fit(loader, steps=2), pipe.fit(loader), pipe.fit(loader)] == [losses[:2], losses[2:6], losses[6:]]


@pytest.mark.parametrize("every", [0, 4])
def test_a_checkpoint_of_a_callback_stands_at_the_batches_that_were_trained_on(every, tmp_path):
    """A loss is read while the next step runs, unless the callback wants a pause."""
    whole = pipeline()
    save = pf.Checkpoints(whole, tmp_path, every, keep=0) if every else lambda r: r.step == 4 and whole.save(tmp_path)
    losses = whole.fit(loader_named("shuffled"), steps=15, callbacks=[save])
    second = pipeline()
    done = second.load(tmp_path / "step-000004" if every else tmp_path).step
    assert done == (4 if every else 5)
    assert second.fit(loader_named("shuffled"), steps=15 - done) == losses[done:]


def test_batches_that_are_skipped_are_not_loaded(tmp_path):
    first = pipeline()
    first.fit(loader_named("shuffled"), steps=4)
    first.save(tmp_path)
    second, loader = pipeline(), loader_named("shuffled")
    second.load(tmp_path)
    second.fit(loader)
    assert len(loader.dataset.loaded) == 22 - 4 * 4
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler  # the loader is the user's own again


def test_a_checkpoint_of_another_loader_is_refused(tmp_path):
    first = pipeline()
    first.fit(loader_named("shuffled"), steps=4)
    first.save(tmp_path)
    second = pipeline()
    second.load(tmp_path)
    with pytest.raises(
        DataError, match="at batch 4 of a DataLoader of 6 batches, but fit was given a DataLoader of 11"
    ):
        second.fit(DataLoader(Rows(), 2))
    second.save(tmp_path)  # the position is still there
    third = pipeline()
    third.load(tmp_path)
    assert len(third.fit(loader_named("shuffled"))) == 2
    second.fit(iter(DataLoader(Rows(), 2)))


def asynchronous(place):
    """Losses before and after a checkpoint, of two replicas of PipeDream, which share the mini-batches."""
    pipe = pipeline(1, schedule="pipedream", microbatches=1, parallelism=pf.Parallelism(replicas=2))
    loader = loader_named("shuffled")
    losses = [pipe.fit(loader, steps=4)]
    pipe.save(place)
    return [*losses, pipe.fit(loader), pipe.fit(loader)]


@pytest.mark.dist
def test_an_asynchronous_segment_ends_where_its_batches_do(tmp_path):
    """The first replica does not need the last batch: it stood one behind, and so did the checkpoint."""
    losses = asynchronous(tmp_path)
    assert [*map(len, losses)] == [4, 2, 6]
    assert launch(asynchronous, 2, str(tmp_path / "run"), threads=1) == [losses, losses]
    pipe, loader = pipeline(1, schedule="pipedream", microbatches=1), loader_named("shuffled")
    pipe.load(tmp_path / "run")
    assert len(pipe.fit(loader)) == 2


def in_processes(place, workers):
    """Two epochs and a half, saved in the middle of the second."""
    pipe, loader = pipeline(), DataLoader(Rows(), 4, shuffle=True, num_workers=workers)
    start = pipe.fit(loader, steps=9)
    pipe.save(place)
    return start, pipe.fit(loader) + pipe.fit(loader)


def taken_up(place, workers):
    pipe, loader = pipeline(stages=None), DataLoader(Rows(), 4, shuffle=True, num_workers=workers)
    pipe.load(place)
    return pipe.fit(loader) + pipe.fit(loader)


@pytest.mark.dist
def test_processes_take_up_what_another_number_of_them_has_left(tmp_path):
    (start, rest), other = launch(in_processes, 2, str(tmp_path), 1, threads=1)
    assert other == (start, rest) and len(rest) == 9
    assert start + rest == pipeline().fit(DataLoader(Rows(), 4, shuffle=True), steps=18)
    assert launch(taken_up, 3, str(tmp_path), 0, threads=1) == [rest] * 3
    assert taken_up(str(tmp_path), 0) == rest


def streamed():
    pipeline().fit(DataLoader(Stream(), batch_size=4))


@pytest.mark.dist
def test_processes_train_on_a_stream_without_a_length():
    launch(streamed, 2, threads=1)
