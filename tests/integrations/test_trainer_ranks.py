"""`PipelineTrainer` over two processes trains as `Trainer` does in one: the scripts of `examples/trainer`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.integrations import trainer_jobs as jobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, jobs.History]:
    return jobs.alone(str(place))


@pytest.fixture(scope="module")
def over_two(place: Path) -> dict[str, jobs.History]:
    return launch(jobs.over_two, 2, str(place), threads=1, quiet=True)[0]


@pytest.fixture(scope="module")
def folders(place: Path, alone: dict[str, jobs.History]) -> list[dict[str, Any]]:
    return launch(jobs.folders, 2, str(place), threads=1, quiet=True)


def assert_same(one: jobs.History, other: jobs.History) -> None:
    assert [sorted(log) for log in one] == [sorted(log) for log in other]
    for log, expected in zip(one, other, strict=True):
        assert log == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("script", jobs.SCRIPTS)
def test_a_script_has_the_losses_norms_and_metrics_of_one_process(
    script: str, alone: dict[str, jobs.History], over_two: dict[str, jobs.History]
) -> None:
    losses = {log["loss"] for log in alone[script] if "loss" in log}
    assert len(losses) > 1
    assert len(alone[script]) > 4
    assert_same(over_two[script], alone[script])


@pytest.mark.parametrize("name", ["pipe to pipe", "alone to pipe"])
def test_the_pipeline_resumes_in_an_epoch(
    name: str, folders: list[dict[str, Any]], alone: dict[str, jobs.History]
) -> None:
    assert_same(folders[0][name], alone["causal_lm"])


def test_the_trainer_resumes_from_the_pipeline(
    place: Path, folders: list[dict[str, Any]], alone: dict[str, jobs.History]
) -> None:
    assert_same(jobs.resumed(jobs.Trainer, place / "pipe-alone", place / "pipe"), alone["causal_lm"])


def test_each_process_steps_the_weights_of_its_own_stages(folders: list[dict[str, Any]]) -> None:
    first, second = (of_rank["stepped"] for of_rank in folders)
    assert first
    assert second
    assert not first & second
    assert len(first | second) == len(folders[0]["weights"])


def test_after_training_every_process_has_the_whole_model(folders: list[dict[str, Any]]) -> None:
    first, second = (of_rank["weights"] for of_rank in folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_folder_opens_in_transformers(place: Path, folders: list[dict[str, Any]]) -> None:
    for folder in ("saved", f"pipe/{jobs.CHECKPOINT}"):
        opened = AutoModelForCausalLM.from_pretrained(place / folder).state_dict()
        assert all(torch.equal(value, opened[name]) for name, value in folders[0]["weights"].items())
    assert AutoTokenizer.from_pretrained(place / "saved").pad_token == "[PAD]"
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} < set(folders[0]["files"])


def test_the_folder_of_adapters_opens_in_peft(place: Path, folders: list[dict[str, Any]]) -> None:
    base = jobs.made("causal_lm", jobs.Trainer, place / "base").model
    opened = PeftModel.from_pretrained(base, place / "adapters")
    weights = dict(opened.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in folders[0]["adapters"].items())


def test_all_processes_are_one_replica_and_rank_0_writes_and_prints(folders: list[dict[str, Any]]) -> None:
    assert [of_rank["world"] for of_rank in folders] == [(1, True, True), (1, False, False)]


def test_a_callback_of_rank_0_ends_the_training_within_an_update(place: Path) -> None:
    assert launch(jobs.stopped_within, 2, str(place), threads=1, quiet=True) == [2, 2]
