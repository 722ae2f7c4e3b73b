"""Trials of a study on one GPU take turns, and each trains as it would on its own."""

from pathlib import Path

import pytest
import torch
from tests.study.cases import GPT, MLP, SMALL, alone

import pipefit as pf
from pipefit.study.trial import StudyError, Trial

pytestmark = pytest.mark.gpu


def test_a_program_that_has_used_the_gpu_cannot_fork_workers(tmp_path: Path) -> None:
    torch.ones(1, device="cuda:0")
    with pytest.raises(StudyError, match="has used the GPU already"):
        pf.Study([Trial(**SMALL, **MLP)], output=tmp_path / "study", threads=1, device="cuda:0").run()


def test_two_trials_share_the_gpu_and_do_not_notice_each_other(tmp_path: Path) -> None:
    given = [Trial(**{**SMALL, **model, "seed": n, "shards": 2}) for n, model in enumerate((MLP, GPT))]
    # Workers that are forks of this process could not use the GPU, which it has used itself.
    result = pf.Study(given, output=tmp_path / "study", threads=1, device="cuda:0").run(forked=False)
    assert [(row.status, row.reason) for row in result.trials] == [("finished", "")] * 2
    for row, trial in zip(result.trials, given, strict=True):
        assert row.losses == pytest.approx(alone(trial)[0], rel=1e-4)
