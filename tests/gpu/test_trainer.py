"""`PipelineTrainer` on a GPU trains as `Trainer` does there: scripts of `examples/trainer`, stages in one process."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.integrations.trainer_jobs import FOLDER, history

import pipefit as pf
from pipefit.integrations.transformers import PipelineTrainer

pytestmark = pytest.mark.gpu

SCRIPTS = ["causal_lm", "sequence_classification", "seq2seq"]
SETTINGS = {"disable_tqdm": True, "log_level": "error", "max_steps": 6, "eval_strategy": "no", "logging_steps": 1}


def trained(script: str, kind: Any, folder: Path, **more: Any) -> list[dict[str, float]]:
    trainer = importlib.import_module(script).trainer(kind, str(folder), **SETTINGS, **more)
    trainer.train()
    assert trainer.args.device.type == "cuda"
    return history(trainer)


class OverStages(PipelineTrainer):
    """Over two stages of this process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(pipeline=pf.Request(stages=2), **options)


class FromTheGpu(OverStages):
    """Over two stages, of a model that the user has moved to the GPU."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model=model.to("cuda"), **options)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # with more the Trainer would copy the model to each


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_the_losses_and_norms_of_the_trainer_on_this_gpu(script: str, bf16: bool, tmp_path: Path) -> None:
    expected = trained(script, transformers.Trainer, tmp_path / "alone", bf16=bf16)
    found = trained(script, OverStages, tmp_path / "stages", bf16=bf16)
    assert len({log["loss"] for log in expected if "loss" in log}) > 3
    for log, other in zip(found, expected, strict=True):
        assert log == pytest.approx(other, rel=5e-2 if bf16 else 1e-4)


def test_a_model_that_is_on_the_gpu_already_trains_as_one_that_is_not(tmp_path: Path) -> None:
    expected = trained("causal_lm", OverStages, tmp_path / "host")
    found = trained("causal_lm", FromTheGpu, tmp_path / "gpu")
    assert len(found) > 6
    for log, other in zip(found, expected, strict=True):
        assert log == pytest.approx(other, rel=1e-4)
