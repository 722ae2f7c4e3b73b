"""`PipelineTrainer` over two ranks with a GPU each has the numbers of `Trainer` in one process."""

from pathlib import Path

import pytest
from tests.integrations import trainer_jobs as jobs
from transformers import Trainer

from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


def test_scripts_over_two_gpus_have_the_histories_of_one_process(tmp_path: Path) -> None:
    first, second = launch(jobs.on_gpus, 2, str(tmp_path), threads=1, quiet=True)
    assert len(first) == len(second) == 2
    for found in (first, second):
        for script, logs in found.items():
            alone = jobs.made(script, Trainer, tmp_path / f"{script}-alone")
            alone.train()
            expected = jobs.history(alone)
            assert len(logs) == len(expected) > 4
            for log, other in zip(logs, expected, strict=True):
                assert log == pytest.approx(other, abs=1e-5)
