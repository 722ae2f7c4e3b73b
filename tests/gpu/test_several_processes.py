"""Several ranks on one GPU train as one process does; their messages go through the host, by a backend of the tests."""

from typing import Any

import pytest
from tests.faults.repaired_jobs import COPIES, Fault, train
from tests.faults.test_repaired_ranks import is_same
from tests.gpu import plain
from tests.gpu.rank_jobs import DEVICE, MODELS, Result, all_trained, repaired, trained

from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]

TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("network", {"schedule": "1f1b"}),
    "tied ends": ("tied", {"schedule": "1f1b"}),
    "clipped": ("network", {"schedule": "1f1b", "clip_norm": 0.05}),
    "interleaved": ("network", {"schedule": "interleaved", "chunks": 2}),
    "zb-h1": ("network", {"schedule": "zb-h1"}),
    "zb-v": ("network", {"schedule": "zb-v", "chunks": 2}),
    "replicas": ("network", {"schedule": "data-parallel"}),
    "sharded optimizer": ("network", {"schedule": "data-parallel", "shard": "optimizer"}),
    "shared weights": ("network", {"schedule": "breadth-first", "chunks": 2, "replicas": 2, "shard": "weights"}),
    "tensor": ("gpt", {"schedule": "1f1b", "tensor": 2}),
    "sequence": ("gpt", {"schedule": "1f1b", "tensor": 2, "sequence_parallel": True}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("network", {"schedule": "1f1b"}),
    "interleaved": ("network", {"schedule": "interleaved", "chunks": 2}),
    "zb-h1": ("network", {"schedule": "zb-h1"}),
    "1f1b, replicated": ("network", {"schedule": "1f1b", "data_parallel": 2}),
    "1f1b, sharded optimizer": ("network", {"schedule": "1f1b", "data_parallel": 2, "shard": "optimizer"}),
    "1f1b, tensor": ("gpt", {"schedule": "1f1b", "tensor": 2}),
}
DELAYED: dict[str, dict[str, Any]] = {
    "pipedream": {"schedule": "pipedream", "microbatches": 1},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "microbatches": 4},
}


def _launched(num_ranks: int, tasks: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, list[Result]]:
    parts = launch(all_trained, num_ranks, list(tasks.values()), threads=1, quiet=True)
    return {name: [part[index] for part in parts] for index, name in enumerate(tasks)}


@pytest.fixture(scope="module")
def of_two(rank_server: None) -> dict[str, list[Result]]:
    return _launched(2, TWO)


@pytest.fixture(scope="module")
def of_four(rank_server: None) -> dict[str, list[Result]]:
    return _launched(4, FOUR)


def _assert_all_are_plain(model: str, options: dict[str, Any], found: list[Result]) -> None:
    make, data, loss = MODELS[model]
    wanted = plain.trained(make(), data(), clip_norm=options.get("clip_norm"), loss=loss)
    for got in found:
        plain.assert_close(got, wanted)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_plain_torch(name: str, of_two: dict[str, list[Result]]) -> None:
    _assert_all_are_plain(*TWO[name], of_two[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_plain_torch(name: str, of_four: dict[str, list[Result]]) -> None:
    _assert_all_are_plain(*FOUR[name], of_four[name])


@pytest.mark.parametrize("name", DELAYED)
def test_asynchronous_schedules_train_as_their_ranks_in_one_process(name: str) -> None:
    wanted = trained("network", {**DELAYED[name], "num_ranks": 2})
    for (got,) in launch(all_trained, 2, [("network", DELAYED[name])], threads=1, quiet=True):
        plain.assert_close(got, wanted)


def test_a_rank_that_dies_is_not_needed_by_the_others(tmp_path, caplog) -> None:
    place = tmp_path / "whole"
    place.mkdir()
    on_gpu = COPIES | {"device": DEVICE}
    expected = train(str(place), on_gpu, [])
    options: dict[str, Any] = {"folder": tmp_path / "logs", "quiet": True, "recover": 1}
    found = launch(repaired, 4, str(tmp_path), on_gpu, [Fault(3, "bwd", 4)], **options)
    assert len(found) == 3 and all(is_same(one, expected) for one in found)
    assert "repair 1 of 1: 3 ranks go on" in caplog.text
