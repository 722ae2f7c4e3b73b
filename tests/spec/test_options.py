"""Options as one flat table of names and values, and back."""

import pytest

from pipefit.errors import PlanError
from pipefit.run.config import RunConfig
from pipefit.spec.arguments import check_fields
from pipefit.spec.options import Parallelism, Request, Updates, as_flat, from_flat

VALUES = {"ranks": 3, "microbatches": 8, "seed": 5, "device_memory": "1 GiB", "precision": "bf16"}


def test_a_flat_table_becomes_groups_and_comes_back():
    config = from_flat(RunConfig, VALUES)
    assert config.request.parallelism.ranks == 3 and config.request.spill.device_memory == "1 GiB"
    # What is not named stays as the outer group has it, not as its own kind would.
    assert config.updates == Updates(clip_norm=1.0, seed=5)
    assert {name: as_flat(config)[name] for name in VALUES} == VALUES
    assert from_flat(RunConfig, as_flat(config)) == config


def test_a_group_in_which_nothing_is_named_stays_away():
    assert from_flat(Request, {"microbatches": 2}).spill is None


def test_a_name_of_no_option_is_refused_with_the_nearest():
    with pytest.raises(PlanError, match="unknown option 'rank'; did you mean ranks"):
        from_flat(RunConfig, {"rank": 3})
    with pytest.raises(PlanError, match="unknown option 'slots'"):  # in Python only
        from_flat(RunConfig, {"slots": 3})
    assert from_flat(Parallelism, {}) == Parallelism()


def test_a_count_too_large_for_a_float_is_refused():
    for steps, message in (
        (10**400, r"steps: expected at most 10\^15, got a number of 1329 bits"),
        (10**15 + 1, r"steps: expected at most 10\^15, got a number of 50 bits"),
    ):
        with pytest.raises(PlanError, match=message):
            check_fields(RunConfig(steps=steps), PlanError)
    check_fields(RunConfig(steps=10**15, updates=Updates(seed=2**63 - 1)), PlanError)
