"""`PipelineTrainer` with two stages in one process has the numbers of `Trainer`, in uses that the examples have not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integrations.trainer_jobs import QUIET
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import pipefit as pf
from pipefit.integrations.transformers import PipelineTrainer

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SETTINGS = {
    "per_device_train_batch_size": 4,
    "learning_rate": 0.02,
    "max_steps": 5,
    "optim": "sgd",
    "save_strategy": "no",
}
PREDICTED = "predicted"


class Net(nn.Module):
    """A classifier that is none of transformers."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity, returns: Any = dict) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = norm(8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.returns = returns

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        logits = self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))
        if labels is None:
            return {"logits": logits}
        if isinstance(labels, list):
            labels = torch.stack([one["class"] for one in labels])
        loss = cross_entropy(logits, labels)
        if self.returns is tuple:
            return loss, logits
        return {"loss": loss, "logits": logits}


def samples(number: int = 20) -> list[dict[str, Tensor]]:
    """Samples of three classes; the first four are of one class."""
    drawn = torch.Generator().manual_seed(1)
    xs = torch.randn(number, 6, generator=drawn)
    classes = torch.randint(0, 3, (number,), generator=drawn)
    classes[:4] = 0
    return [{"x": x, "labels": label} for x, label in zip(xs, classes, strict=True)]


def texts(number: int = 16) -> list[dict[str, Tensor]]:
    """Texts with a class."""
    drawn = torch.Generator().manual_seed(1)
    words = torch.randint(1, 50, (number, 6), generator=drawn)
    return [{"input_ids": line, "labels": torch.tensor(row % 3)} for row, line in enumerate(words)]


def bert(kind: Any, classes: int) -> Any:
    return kind(BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=classes, **SIZES, **OFF))


def made(kind: Any, folder: Path, model: Any = None, data: Any = None, options: Any = None, **settings: Any) -> Any:
    given = dict(options or {})
    if issubclass(kind, PipelineTrainer):
        given = {"pipeline": pf.Request(stages=2), **given}
    else:
        given.pop("pipeline", None)
    arguments = TrainingArguments(str(folder), logging_steps=1, **{**QUIET, **SETTINGS, **settings})
    data = data or samples()
    return kind(model or Net(), arguments, train_dataset=data, eval_dataset=data, **given)


def numbers(trainer: Trainer) -> dict[str, Any]:
    """The last weights, and of each log and evaluation so far the losses, norms and learning rates."""
    found: dict[str, Any] = dict(trainer.model.state_dict())
    for row, log in enumerate(trainer.state.log_history):
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            if name in log:
                found[f"{name} {row}"] = torch.tensor(log[name])
    return found


def trained(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    trainer.evaluate()
    return numbers(trainer)


def class_weights(kind: Any, folder: Path) -> Any:
    class Weighted(kind):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(x=inputs["x"])
            loss = cross_entropy(outputs["logits"], inputs["labels"], weight=torch.tensor([1.0, 5.0, 9.0]))
            return (loss, outputs) if return_outputs else loss

    return trained(made(Weighted, folder, train_sampling_strategy="sequential"))


def batch_norms(kind: Any, folder: Path) -> Any:
    return trained(made(kind, folder, Net(nn.BatchNorm1d)))


def labels_in_a_list(kind: Any, folder: Path) -> Any:
    def collate(batch: Any) -> Any:
        return {"x": torch.stack([one["x"] for one in batch]), "labels": [{"class": one["labels"]} for one in batch]}

    trainer = made(kind, folder, options={"data_collator": collate})
    trainer.train()
    return numbers(trainer)


def outputs_in_a_tuple(kind: Any, folder: Path) -> Any:
    return trained(made(kind, folder, Net(returns=tuple)))


def other_ignored_labels(kind: Any, folder: Path) -> Any:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return cross_entropy(outputs["logits"], labels, ignore_index=1)

    return trained(made(kind, folder, options={"compute_loss_func": loss}, train_sampling_strategy="sequential"))


def a_part_without_labels(kind: Any, folder: Path) -> Any:
    data = samples(16)
    for one in data[8:12]:
        one["labels"] = torch.tensor(-100)
    trainer = made(kind, folder)
    trainer.train()
    trainer.evaluate(data)
    return {**numbers(trainer), PREDICTED: torch.tensor(trainer.predict(data).predictions)}


def outputs_by_attribute_and_number(kind: Any, folder: Path) -> Any:
    class Own(kind):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            assert outputs.logits is outputs[0]
            loss = cross_entropy(outputs.logits.view(-1, model.config.num_labels), labels)
            return (loss, outputs) if return_outputs else loss

    return trained(made(Own, folder, bert(BertForSequenceClassification, 3), texts()))


def answers_outside_of_the_text(kind: Any, folder: Path) -> Any:
    data = []
    for row, text in enumerate(texts()):
        data.append(
            {"input_ids": text["input_ids"], "start_positions": torch.tensor(row % 8), "end_positions": torch.tensor(5)}
        )
    settings = {"gradient_accumulation_steps": 4, "max_steps": 2}
    return trained(made(kind, folder, bert(BertForQuestionAnswering, 2), data, **settings))


def weights_without_optimizer(kind: Any, folder: Path) -> Any:
    model = Net()
    optimizer = torch.optim.AdamW(model.last.parameters(), 0.02)
    return trained(made(kind, folder, model, options={"optimizers": (optimizer, None)}))


def another_optimizer(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder)
    trainer.train()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.args.learning_rate = 0.1
    return trained(trainer)


def arguments_after_an_evaluation(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder)
    trainer.evaluate()
    trainer.args.learning_rate = 0.1
    trainer.args.max_grad_norm = 0.1
    trainer.args.gradient_accumulation_steps = 2
    return trained(trainer)


def micro_batches_after_a_prediction(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder, options={"pipeline": pf.Request(stages=2, microbatches=4)})
    predicted = trainer.predict([{"x": one["x"]} for one in samples(7)]).predictions
    return {**trained(trainer), PREDICTED: torch.tensor(predicted)}


def data_that_ends_within_an_update(kind: Any, folder: Path) -> Any:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples())

    trainer = made(kind, folder, gradient_accumulation_steps=3)
    trainer.train_dataset = Stream()
    return trained(trainer)


def a_checkpoint_of_any_module(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder, save_strategy="steps", save_steps=2)
    trainer.train()
    saved = load_file(folder / "checkpoint-2" / "model.safetensors")
    return {**numbers(trainer), **{f"saved {name}": value for name, value in saved.items()}}


def states_of_wide_weights(kind: Any, folder: Path) -> Any:
    data = [{**one, "x": one["x"].double()} for one in samples()]
    trainer = made(kind, folder, Net().double(), data, optim="adamw_torch", save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return numbers(trainer)


def a_checkpoint_before_the_first_update(kind: Any, folder: Path) -> Any:
    class EndFirst(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.global_step == 0 and state.epoch == 0

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.epoch = 1.0

    settings = {"gradient_accumulation_steps": 2, "save_strategy": "epoch", "num_train_epochs": 4, "max_steps": -1}
    trainer = made(kind, folder, options={"callbacks": [EndFirst()]}, **settings)
    return trained(trainer)


CASES = [
    class_weights,
    batch_norms,
    labels_in_a_list,
    outputs_in_a_tuple,
    other_ignored_labels,
    a_part_without_labels,
    outputs_by_attribute_and_number,
    answers_outside_of_the_text,
    weights_without_optimizer,
    another_optimizer,
    arguments_after_an_evaluation,
    micro_batches_after_a_prediction,
    data_that_ends_within_an_update,
    a_checkpoint_of_any_module,
    states_of_wide_weights,
    a_checkpoint_before_the_first_update,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_numbers_are_those_of_the_trainer(case: Callable[[Any, Path], dict[str, Tensor]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = case(Trainer, tmp_path / "one")
    torch.manual_seed(0)
    found = case(PipelineTrainer, tmp_path / "pipeline")
    assert found.keys() == expected.keys()
    assert sum(name.startswith(("loss", "grad_norm")) for name in found) > 3
    for name, value in expected.items():
        if value.dtype == torch.float64:
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)
