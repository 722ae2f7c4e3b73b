"""Ranks that differ: in what they make, in the weights of replicas, or in the methods that they call."""

from itertools import permutations
from pathlib import Path

import pytest
from tests.runtime import disagreeing_jobs as jobs
from tests.runtime.call_jobs import METHODS, call
from tests.runtime.test_disagreeing_ranks import WORDS

from pipefit.errors import DisagreementError, NonFiniteLossError
from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1800)]

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "5.bias")
BITS = (0, 12, 23, 30, 31)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_makes_another_pipeline(rank: int, trial, tmp_path: Path):
    for number, (what, words) in enumerate(WORDS.items()):
        place = tmp_path / str(number)
        said = ""
        try:
            launch(jobs.train, 2, str(place), what, rank, quiet=True, deadline_s=60)
        except DisagreementError as problem:
            said = str(problem)
        messages = {Path(f"{place}-{each}").read_text() for each in range(2)}
        subject = words.partition(":")[0]
        trial("ranks that disagree", f"{what}: {said}", well=len(messages) == 1, named=f"{subject}: rank 0 has" in said)


def test_a_bit_of_a_weight_of_a_replica(trial, tmp_path: Path):
    for number, name in enumerate(NAMES):
        for rank, bit in [(index % 2, bit) for index, bit in enumerate(BITS)]:
            options = {"schedule": "data-parallel", "stages": 2, "verify_replicas": 1}
            said, named = "", None
            try:
                launch(jobs.spoil, 2, str(tmp_path / f"{number}-{bit}"), "fit", options, rank, name, bit, quiet=True)
            except DisagreementError as problem:
                said = str(problem)
                named = f"checksum of {name}: rank 0 has" in said and "after step 3" in said
            except NonFiniteLossError as problem:  # an exponent of all ones is found before the comparison
                said = str(problem)
            trial("a flipped bit of a replica", f"{name}, bit {bit}: {said}", well=bool(said), named=named)


def test_ranks_call_different_methods(trial, tmp_path: Path):
    for one, other in permutations(METHODS, 2):
        said = ""
        try:
            launch(call, 2, str(tmp_path / f"{one}-{other}"), [one, other], quiet=True, deadline_s=60)
        except DisagreementError as problem:
            said = str(problem)
        named = all(METHODS[name] in said for name in (one, other))
        trial("ranks call different methods", f"{one}, {other}: {said}", well=bool(said), named=named)
