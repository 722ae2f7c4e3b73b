"""Every field of `TrainingArguments` works as in `Trainer`, has no effect, or is refused by name at the start."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import trainer_jobs as jobs
from transformers import TrainingArguments

import pipefit as pf
from pipefit import Parallelism
from pipefit.errors import PipefitError, PlanError
from pipefit.integrations.stage_optimizers import StageOptimizers
from pipefit.integrations.trainer_arguments import HONOURED, OPTIMIZERS, REFUSED, WITHOUT_EFFECT, check_arguments
from pipefit.integrations.transformers import PipelineTrainer, _Loss
from pipefit.pipeline.facts import described


def arguments(kind: Any = TrainingArguments, **settings: Any) -> Any:
    made = kind("unused", use_cpu=True)
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def test_every_field_is_in_one_of_the_three_classes() -> None:
    names = {one.name for one in fields(TrainingArguments)}
    assert names <= HONOURED | WITHOUT_EFFECT | REFUSED.keys()
    assert not HONOURED & WITHOUT_EFFECT
    assert not (HONOURED | WITHOUT_EFFECT) & REFUSED.keys()


def test_defaults_are_taken() -> None:
    check_arguments(arguments())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_is_named_with_what_to_do(name: str) -> None:
    with pytest.raises(PipefitError, match=f"(?s)does not honour\n  {name}=.*{REFUSED[name][:20]}".replace("(…", ".")):
        check_arguments(arguments(**{name: "other"}))


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(PipefitError) as problem:
        check_arguments(arguments(fp16=True, neftune_noise_alpha=5.0, optim="lion_32bit"))
    for name in ("fp16=True (use bf16)", "neftune_noise_alpha=5.0", "optim='lion_32bit' (use one of adafactor"):
        assert name in str(problem.value)


@dataclass
class Later(TrainingArguments):
    """As a later version may have it."""

    new_trick: float = 0.0
    new_list: list[str] = field(default_factory=lambda: ["a"])


def test_a_field_that_pipefit_does_not_know_must_have_its_default() -> None:
    assert Later.__dataclass_fields__["new_list"].default_factory is not MISSING
    check_arguments(arguments(Later))
    with pytest.raises(PipefitError, match=r"new_trick=0.5 \(this version of pipefit does not know it"):
        check_arguments(arguments(Later, new_trick=0.5))
    with pytest.raises(PipefitError, match="new_list"):
        check_arguments(arguments(Later, new_list=[]))


@pytest.mark.parametrize(
    ("request_of", "what"),
    [
        (pf.Request(parallelism=Parallelism(tensor=2)), "tensor"),
        (pf.Request(parallelism=Parallelism(shard="optimizer", replicas=2)), "shard"),
        (pf.Request(schedule="pipedream"), "schedule pipedream"),
    ],
)
def test_a_pipeline_that_the_loop_cannot_use_is_refused(request_of: pf.Request, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        PipelineTrainer(torch.nn.Linear(1, 1), arguments(), pipeline=request_of)


def test_an_optimizer_that_cannot_be_made_again_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    model = torch.nn.Linear(2, 2)
    with pytest.raises(PipefitError, match="a Own cannot be made again for each stage; give its class"):
        StageOptimizers(model, Own(model.parameters(), 0.1), None)
    StageOptimizers(model, Own(model.parameters(), 0.1), (Own, {"lr": 0.1}))
    assert "adamw_torch" in OPTIMIZERS


def test_what_ranks_compare_of_the_loss_has_no_attributes_of_the_trainer() -> None:
    # One is a list in the order of a set, which differs among processes that were started one by one.
    class Some:
        columns: Any = ("labels", "input_ids")

    assert described(_Loss(Some())) == "pipefit.integrations.transformers._Loss"


def test_a_model_without_its_weights_is_refused(tmp_path: Path) -> None:
    model = jobs.made("causal_lm", jobs.Trainer, tmp_path).model
    with pytest.raises(PipefitError, match="got a Cut"):
        PipelineTrainer(pf.cut(model), arguments())


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_sample_without_labels_counts_for_nothing(smoothing: float, tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    found = []
    for kind in (jobs.Trainer, PipelineTrainer):
        trainer = jobs.made("token_classification", kind, tmp_path, label_smoothing_factor=smoothing, **settings)
        for data in (trainer.train_dataset, trainer.eval_dataset):
            for sample in data[::2]:
                sample["labels"] = [-100] * len(sample["labels"])
        trainer.train()
        found.append(jobs.history(trainer))
    expected, over_pipeline = found
    assert sum("loss" in log for log in expected) == 4
    # Also a batch in which no sample has labels: its loss is no number, which the Trainer logs as 0.
    assert 0 < sum(log.get("loss") == 0 for log in expected) < 4
    for log, right in zip(over_pipeline, expected, strict=True):
        assert log == pytest.approx(right, abs=1e-5)


@pytest.mark.slow
def test_micro_batches_must_suit_the_batches(tmp_path: Path) -> None:
    trainer = jobs.made("causal_lm", PipelineTrainer, tmp_path)
    trainer._request = pf.Request(microbatches=6)
    with pytest.raises(PlanError, match=r"6 micro-batches per update.*gradient_accumulation_steps=4"):
        trainer.train()
