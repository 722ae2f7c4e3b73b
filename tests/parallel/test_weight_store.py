"""Versions of weights: which are alive, which the live parameters show, and what micro-batches in flight see."""

from typing import Any

import pytest
import torch
from tests.testing.equality_models import make
from tests.testing.test_equality_stories import task_of
from torch import Tensor, nn

from pipefit.ir.liveness import weight_versions
from pipefit.parallel.weights import WeightStore
from pipefit.testing import make_pipeline


def stepped(store: WeightStore, version: int, by: float, *, in_place: bool = False) -> None:
    """The update that an optimizer would make: every weight grows by the same amount."""
    store.begin_step(version, in_place)
    with torch.no_grad():
        for master in store.masters:
            master += by
    store.end_step()
    if in_place:
        store.drop(version)


def store_of(*values: float) -> tuple[nn.Parameter, WeightStore]:
    parameter = nn.Parameter(torch.tensor(values))
    return parameter, WeightStore([parameter])


def test_a_step_makes_a_version_beside_the_one_it_starts_from() -> None:
    live, store = store_of(1.0, 2.0)
    stepped(store, 0, 10.0)
    assert sorted(store._versions) == [0, 1]
    assert live.tolist() == [1, 2], "the live parameters stay where they are"
    store.at(1)
    assert live.tolist() == [11, 12]
    store.at(0)
    assert live.tolist() == [1, 2]


def test_reading_a_version_copies_nothing() -> None:
    live, store = store_of(1.0)
    first = live.data_ptr()
    stepped(store, 0, 1.0)
    store.at(1)
    assert live.data_ptr() == store.masters[0].data_ptr() != first


def test_a_step_in_place_overwrites_and_the_live_parameters_follow() -> None:
    live, store = store_of(1.0)
    memory = live.data_ptr()
    stepped(store, 0, 1.0, in_place=True)
    assert sorted(store._versions) == [1] and live.tolist() == [2] and live.data_ptr() == memory


def test_a_step_in_place_while_an_older_version_is_live_leaves_that_one_live() -> None:
    # The drain of PipeDream: the last backward uses version 0, and its step starts from version 1, which no forward
    # will ever use. The live parameters once stayed at version 0 under the name of version 2.
    live, store = store_of(1.0)
    stepped(store, 0, 1.0)
    store.at(0)
    stepped(store, 1, 1.0, in_place=True)
    assert live.tolist() == [1]
    store.at(2)
    assert live.tolist() == [3]


def test_after_a_program_the_newest_version_is_live_and_called_0() -> None:
    live, store = store_of(1.0)
    stepped(store, 0, 1.0)
    store.at(0)
    stepped(store, 1, 1.0, in_place=True)
    store.drop(0)
    store.rebase()
    assert sorted(store._versions) == [0] and live.tolist() == [3]
    stepped(store, 0, 1.0, in_place=True)
    assert live.tolist() == [4], "training goes on from there"


def conv_at_two_versions() -> tuple[nn.Conv1d, WeightStore, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    conv = nn.Conv1d(2, 2, 3, padding=1, bias=False).double()
    store = WeightStore(list(conv.parameters()))
    old = conv.weight.detach().clone()
    x = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)
    out = conv(x)
    stepped(store, 0, 1.0)
    store.at(1)
    return conv, store, old, x, out


def test_a_convolution_in_flight_goes_back_through_the_weights_it_came_by() -> None:
    _, store, old, x, out = conv_at_two_versions()
    store.at(0)
    out.sum().backward()
    wanted = nn.functional.conv_transpose1d(torch.ones_like(out), old, padding=1)
    torch.testing.assert_close(x.grad, wanted)


def test_a_convolution_would_go_back_through_the_live_weights_which_is_why_backwards_set_the_version() -> None:
    # Autograd keeps the leaf itself for a convolution: it sees where the parameter points at the time of the backward.
    _, _, old, x, out = conv_at_two_versions()
    out.sum().backward()
    wrong = nn.functional.conv_transpose1d(torch.ones_like(out), old + 1, padding=1)
    torch.testing.assert_close(x.grad, wrong)


LAWS = [
    ("pipedream", 1, (3, 2, 1)),  # n − s versions at stage s
    ("pipedream-vertical-sync", 1, (3, 3, 3)),  # n everywhere
    ("pipedream-2bw", 3, (2, 2, 2)),
    ("1f1b", 3, (1, 1, 1)),
]


@pytest.mark.parametrize(("schedule", "m", "law"), LAWS)
def test_versions_alive_in_a_run_are_those_of_the_papers_and_of_the_program(
    schedule: str, m: int, law: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    most: dict[int, int] = {}

    def counting(method: Any) -> Any:
        def count(self: WeightStore, *args: Any, **options: Any) -> None:
            method(self, *args, **options)
            # A step in place has two names for one set of tensors until the old one is dropped.
            distinct = {id(tensors) for tensors in self._versions.values()}
            most[id(self)] = max(most.get(id(self), 0), len(distinct))

        return count

    for method in ("at", "begin_step"):
        monkeypatch.setattr(WeightStore, method, counting(getattr(WeightStore, method)))
    task = task_of(*make("convolutions"), steps=8, schedule=schedule, num_microbatches=m)
    pipe = make_pipeline(task)
    pipe.fit(task.batches, steps=8)
    stores = [worker.stores[stage] for stage, worker in enumerate(pipe.workers)]
    program = pipe.programs.of(1 if schedule == "1f1b" else 8)
    assert tuple(most[id(store)] for store in stores) == law
    assert tuple(weight_versions(program, rank) for rank in range(3)) == law
    assert all(sorted(store._versions) == [0] for store in stores), "drained"
