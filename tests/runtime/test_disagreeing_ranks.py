"""Ranks that do not make the same pipeline are refused at once, all with one message that names what differs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime import disagreeing_jobs as jobs

from pipefit.errors import DataError, DisagreementError
from pipefit.runtime.launch import launch

pytestmark = pytest.mark.dist

WORDS = {
    "seed": "0.weight: rank 0 has trained float32[8, 4] with checksum",
    "learning rate": "optimizer lr: rank 0 has 0.1, rank 1 has 0.2",
    "optimizer": "optimizer kind: rank 0 has SGD, rank 1 has Adam",
    "activation": "module 1: rank 0 has torch.nn.modules.activation.ReLU(), rank 1 has torch.nn",
    "function of a layer": "3.activation: rank 0 has",
    "number of a layer": "3.factor: rank 0 has 1.0, rank 1 has 2.0",
    "dropout": "module 2: rank 0 has torch.nn.modules.dropout.Dropout(p=0.3, inplace=False), rank 1 has",
    "frozen weight": "0.weight: rank 0 has trained float32[8, 4]",
    "stages": "stages: rank 0 has [3, 3], rank 1 has [2, 4]",
    "schedule": "schedule: rank 0 has none, rank 1 has gpipe",
    "microbatches": "microbatches: rank 0 has 2, rank 1 has 4",
    "loss": "loss: rank 0 has tests.runtime.disagreeing_jobs.smoothed",
    "smoothed loss": "loss: rank 0 has tests.runtime.disagreeing_jobs.smoothed",
    "clip": "clip_norm: rank 0 has none, rank 1 has 1.0",
    "seed of dropout": "seed: rank 0 has 0, rank 1 has 5",
    "scheduler": "scheduler: rank 0 has none, rank 1 has tests.runtime.jobs.halving",
    "precision": "precision: rank 0 has none, rank 1 has torch.bfloat16",
    "version of torch": f"version of torch: rank 0 has {torch.__version__}, rank 1 has 1.0",
}


def _refused(kind: type[Exception], place: Path, ranks: int, job: Any, *args: Any) -> str:
    """The message that all ranks raise, and the launcher."""
    with pytest.raises(kind) as problem:
        launch(job, ranks, str(place), *args, quiet=True, deadline_s=60)
    said = [Path(f"{place}-{rank}").read_text() for rank in range(ranks)]
    assert said == [f"{kind.__name__}: {problem.value}"] * ranks
    return str(problem.value)


@pytest.mark.parametrize("what", WORDS)
def test_what_one_rank_has_otherwise_is_named_before_the_first_step(what: str, tmp_path: Path) -> None:
    message = _refused(DisagreementError, tmp_path / "it", 2, jobs.train, what, 1)
    assert WORDS[what] in message and "every rank must make the same Pipeline" in message


def test_the_rank_that_differs_is_named_among_several(tmp_path: Path) -> None:
    options = {"stages": 1, "schedule": "data-parallel", "microbatches": 3}
    message = _refused(DisagreementError, tmp_path / "it", 3, _train_replicas, "learning rate", 1, options)
    assert message.startswith("optimizer lr: ranks 0 and 2 have 0.1, rank 1 has 0.2; every rank must")


def _train_replicas(place: str, what: str, rank: int, options: dict[str, Any]) -> list[float]:
    return jobs.train(place, what, rank, **options)


def test_what_may_differ_is_not_compared() -> None:
    one, other = launch(jobs.train_with_own_things, 2, quiet=True)
    assert one == other and len(one) == 4


def test_ranks_at_other_steps_are_refused(tmp_path: Path) -> None:
    message = _refused(DataError, tmp_path / "it", 2, jobs.load_on_one_rank)
    assert "steps trained: rank 0 has 0, rank 1 has 2" in message


REPLICATED = {
    2: [("1f1b", {"schedule": "data-parallel", "stages": 2}), ("1f1b", {"schedule": "data-parallel", "stages": 1})],
    3: [
        ("1f1b", {"replicas": (2, 1), "stages": 2, "microbatches": 4}),
        ("pipedream", {"replicas": (2, 1), "stages": 2, "microbatches": 4}),
        ("1f1b", {"replicas": (2, 1), "stages": 2, "microbatches": 4, "shard": "optimizer"}),
    ],
    4: [("replicas", {}), ("replicas", {"precision": "fp16"}), ("tensor", {"data_parallel": 2, "microbatches": 4})],
}


@pytest.mark.parametrize("ranks", REPLICATED)
def test_replicas_stay_the_same_bit_for_bit(ranks: int) -> None:
    tasks = REPLICATED[ranks]
    assert launch(jobs.train_and_verify, ranks, tasks, quiet=True) == [[6] * len(tasks)] * ranks


SPOILED = "the replicas of stage 0 have different weights: checksum of 0.bias: rank 0 has "


@pytest.mark.parametrize(("how", "every", "step"), [("fit", 1, 3), ("fit", 2, 4), ("save", None, 2)])
def test_a_flipped_bit_of_a_replica_is_named(how: str, every: int | None, step: int, tmp_path: Path) -> None:
    options = {"schedule": "data-parallel", "stages": 2, "verify_replicas": every}
    message = _refused(DisagreementError, tmp_path / "it", 2, jobs.spoil, how, options)
    assert f"after step {step} {SPOILED}" in message
    assert not list(tmp_path.glob("it-saved/step-*"))


def test_replicas_are_not_compared_where_that_is_off(tmp_path: Path) -> None:
    options = {"schedule": "data-parallel", "stages": 2, "verify_replicas": 0}
    for _, steps in launch(jobs.spoil, 2, str(tmp_path / "it"), "save", options, quiet=True):
        assert steps == 4


def test_a_rank_may_wait_for_a_slow_one_while_another_has_done_its_part() -> None:
    """The wait of the third rank was taken for one in another method, which ended the run."""
    assert launch(jobs.wait_in_what_all_do, 3, quiet=True, recover=1) == [1.0, 0.0, 0.0]
