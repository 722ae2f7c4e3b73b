"""Batches from torch's `DataLoader`: shuffled alike on every rank, and compared among them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipefit as pf
from pipefit.errors import PipefitError
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current


class Rows(torch.utils.data.Dataset):
    def __init__(self, own=0):
        self.own = own

    def __len__(self):
        return 22

    def __getitem__(self, index):
        row = torch.arange(6, dtype=torch.float32) * (index + 1) / 100 + self.own
        return row, torch.tensor([index / 22])


def pipeline():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return pf.Pipeline(model, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1), stages=2,
                       microbatches=2)  # fmt: skip


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
