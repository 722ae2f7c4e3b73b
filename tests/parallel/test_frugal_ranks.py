"""A model that fits only when it is shared is built, saved and loaded: hardly more than one stage is whole at once."""

from pathlib import Path

import pytest
import torch
from tests.parallel import frugal_jobs as jobs

from pipefit.runtime.launch import launch

pytestmark = pytest.mark.dist

SMALL = 8192
"""Bytes for marks, counters and the rounding of buckets."""


@pytest.mark.parametrize("copies", [2, 4])
def test_no_more_than_one_stage_is_whole(copies: int, tmp_path: Path) -> None:
    found = launch(jobs.frugal, copies, copies, str(tmp_path), threads=1, quiet=True)
    part = jobs.BLOCKS * jobs.BLOCK_BYTES / copies
    for own in found:
        assert own.built.left == pytest.approx(part, abs=SMALL)
        assert own.built.most <= part + jobs.BLOCK_BYTES + SMALL
        # Two stages are whole, one has gradients, and the others' terms of its sum arrive; one more keeps its sum.
        whole = 2 + 1 + (1 - 1 / copies) + (jobs.BLOCKS - 2) / copies
        assert own.trained.most <= whole * jobs.BLOCK_BYTES + 8 * SMALL
        assert own.saved.most <= jobs.BLOCK_BYTES
        assert own.saved.left <= SMALL
        # Two states of each weight are new.
        assert own.loaded.left == pytest.approx(2 * part, abs=SMALL)
        assert own.loaded.most <= own.loaded.left + jobs.BLOCK_BYTES + SMALL
        assert own.again == own.losses == found[0].losses

    whole = jobs.pipeline(copies, "none")
    whole.load(tmp_path)
    losses = whole.fit(jobs.batches(2))
    # With two copies a sum has one order.
    assert losses == (found[0].losses if copies == 2 else pytest.approx(found[0].losses, rel=1e-5))
    for name, weight in whole.state_dict().items():
        assert torch.allclose(found[0].weights[name], weight, rtol=1e-4, atol=1e-6), name
