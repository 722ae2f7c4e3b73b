"""Ranks with batches of different shapes or values: each names both, and none aborts, hangs or trains on."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.runtime import unlike_jobs as jobs

from pipefit.errors import DataError
from pipefit.runtime.launch import launch

pytestmark = pytest.mark.dist

USUAL, DOUBLE = "float32[8, 4], int64[8]", "float64[8, 4], int64[8]"
FEWER, MORE = "float32[6, 4], int64[6]", "float32[16, 4], int64[16]"
KNOWN = ["", "fewer", "", "fewer"]


def _refused(place: Path, ranks: int, *job: Any) -> str:
    """The message that all ranks raise, and the launcher."""
    with pytest.raises(DataError) as problem:
        launch(jobs.train, ranks, str(place), *job, threads=1, quiet=True, deadline_s=30)
    told = [(place.parent / f"{place.name}-{rank}").read_text() for rank in range(ranks)]
    assert told == [f"DataError: {problem.value}"] * ranks
    return str(problem.value)


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [("1f1b", 0), ("1f1b", 1), ("gpipe", 1), ("zb-h1", 0), ("interleaved", 1), ("pipedream", 0), ("pipedream-2bw", 1)],
)
def test_a_later_batch_of_another_shape_is_named_on_every_rank(schedule: str, rank: int, tmp_path: Path) -> None:
    options = {"schedule": schedule, **({"chunks": 2} if schedule == "interleaved" else {})}
    message = _refused(tmp_path / "it", 2, rank, ["", "", ""], ["", "", "fewer"], options)
    one, two = (FEWER, USUAL) if rank == 0 else (USUAL, FEWER)
    assert message.startswith(f"batches of different shapes: rank 0 has {one}, rank 1 has {two}; every rank must")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (["", "fewer", "", ""], f"rank 0 has {FEWER}, rank 1 has {USUAL}"),
        (["", "fewer", "more", "fewer"], f"rank 0 has {USUAL}, rank 1 has {MORE}"),
        (["", "fewer", "type", "fewer"], f"rank 0 has {USUAL}, rank 1 has {DOUBLE}"),
    ],
)
def test_shapes_that_ranks_know_already_are_compared_too(own: list[str], told: str, tmp_path: Path) -> None:
    assert told in _refused(tmp_path / "it", 2, 1, KNOWN, own, {"schedule": "1f1b"})


@pytest.mark.parametrize("what", ["fit", "step"])
def test_types_of_the_first_batch_are_compared(what: str, tmp_path: Path) -> None:
    message = _refused(tmp_path / "it", 2, 1, ["", ""], ["type", ""], {"what": what})
    assert message.startswith(f"shapes of the first batch: rank 0 has {USUAL}, rank 1 has {DOUBLE}")


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"schedule": "data-parallel"}),
        (4, {"schedule": "1f1b", "replicas": 2, "microbatches": 4}),
        (4, {"schedule": "pipedream", "replicas": 2, "microbatches": 4}),
        (3, {"schedule": "1f1b", "stages": 3}),
    ],
)
def test_replicas_and_ranks_further_away_name_the_shapes_too(
    ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    message = _refused(tmp_path / "it", ranks, 1, ["", "", ""], ["", "more", ""], options)
    assert f"rank 1 has {MORE}" in message and f"has {USUAL}" in message


@pytest.mark.parametrize("own", [["", "one"], ["", "fewer"], [""]])
def test_batches_of_an_evaluation_are_compared(own: list[str], tmp_path: Path) -> None:
    message = _refused(tmp_path / "it", 2, 1, ["", ""], own, {"what": "evaluate"})
    assert f"rank 0 has {USUAL}, rank 1 has {'float32' if len(own) > 1 else 'no more batches'}" in message


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (["", "values", ""], {"schedule": "1f1b"}),
        (["", "values", ""], {"schedule": "data-parallel"}),
        (["", "values", ""], {"schedule": "pipedream"}),
        (["", "values", ""], {"what": "step"}),
        (["values", "", ""], {"what": "evaluate"}),
    ],
)
def test_values_of_batches_are_compared(own: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    """A rank that left a batch out, or had them in another order, once trained on with the others."""
    message = _refused(tmp_path / "it", 2, 1, ["", "", ""], own, options)
    assert re.match(r"checksum of the batch: rank 0 has \d+, rank 1 has \d+; every rank must", message)


def test_one_rank_with_too_few_samples_is_heard_by_all(tmp_path: Path) -> None:
    assert "too few for 2 micro-batches" in _refused(tmp_path / "it", 2, 1, ["", ""], ["", "one"], {"what": "fit"})
