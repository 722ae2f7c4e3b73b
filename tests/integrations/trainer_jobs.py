"""Functions that run the scripts of `examples/trainer` with `PipelineTrainer`, on ranks, and with `Trainer`."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from pipefit.integrations.transformers import PipelineTrainer
from pipefit.runtime.session import current

FOLDER = Path(__file__).parents[2] / "examples" / "trainer"
SCRIPTS = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem != "texts"]
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "step")
QUIET = {"disable_tqdm": True, "log_level": "error", "dataloader_pin_memory": False, "use_cpu": True}
SHORTER: dict[str, dict[str, Any]] = {
    "image_classification": {
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "eval_steps": 5,
        "save_steps": 5,
        "patience": 1,
    }
}
STOP_AT = 6  # in the first epoch
CHECKPOINT = f"checkpoint-{STOP_AT}"

History = list[dict[str, float]]


def made(script: str, kind: Any, folder: Path, **settings: Any) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(script).trainer(
        kind, str(folder), **{**QUIET, **SHORTER.get(script, {}), **settings}
    )


def history(trainer: Trainer) -> History:
    logs = trainer.state.log_history
    return [{name: value for name, value in log.items() if name in COMPARED} for log in logs]


class StopAndSave(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == STOP_AT


def alone(place: str) -> dict[str, History]:
    """The histories of each script with `Trainer`, in this process; leaves a checkpoint in an epoch."""
    found = {}
    for script in SCRIPTS:
        trainer = made(script, Trainer, Path(place) / f"{script}-alone")
        trainer.train()
        found[script] = history(trainer)
    stopped(Trainer, Path(place) / "alone")
    return found


def over_two(place: str) -> dict[str, History]:
    """The histories of each script with `PipelineTrainer`."""
    current()  # this module was imported before the process became a rank
    found = {}
    for script in SCRIPTS:
        trainer = made(script, PipelineTrainer, Path(place) / script)
        trainer.train()
        found[script] = history(trainer)
    return found


def on_gpus(place: str) -> dict[str, History]:
    """The histories of two scripts with `PipelineTrainer`, each rank on a GPU of its own."""
    current()
    found = {}
    for script in ("causal_lm", "sequence_classification"):
        trainer = made(script, PipelineTrainer, Path(place) / script, use_cpu=False)
        assert trainer.args.device == torch.device("cuda", current().rank)
        trainer.train()
        found[script] = history(trainer)
    return found


class StopWithin(TrainerCallback):
    """Ends the training within the third update, if all processes follow rank 0."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.is_world_process_zero and state.global_step == 2


def stopped_within(place: str) -> int:
    """The last step of a training that a callback ends within an update."""
    current()
    trainer = made("causal_lm", PipelineTrainer, Path(place) / "within")
    trainer.add_callback(StopWithin)
    trainer.train()
    return int(trainer.state.global_step)


def stopped(kind: Any, folder: Path) -> Any:
    """A trainer that has stopped in its first epoch, with a checkpoint."""
    trainer = made("causal_lm", kind, folder)
    trainer.add_callback(StopAndSave)
    trainer.train()
    return trainer


def resumed(kind: Any, folder: Path, stopped_in: Path) -> History:
    """The history of a training that was resumed in its first epoch."""
    trainer = made("causal_lm", kind, folder)
    trainer.train(resume_from_checkpoint=str(stopped_in / CHECKPOINT))
    return history(trainer)


def folders(place: str) -> dict[str, Any]:
    """Trainings that were stopped in an epoch and are resumed; and what their folders hold."""
    current()
    root = Path(place)
    found: dict[str, Any] = {}
    trainer = stopped(PipelineTrainer, root / "pipe")
    trainer.save_model(str(root / "saved"))
    found["weights"] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found["stepped"] = set(trainer.optimizer.optimizer.state_dict()["state"])
    found["pipe to pipe"] = resumed(PipelineTrainer, root / "pipe-pipe", root / "pipe")
    found["alone to pipe"] = resumed(PipelineTrainer, root / "alone-pipe", root / "alone")
    adapted = made("lora", PipelineTrainer, root / "lora", max_steps=2)
    adapted.train()
    adapted.save_model(str(root / "adapters"))
    found["adapters"] = {n: p.detach().clone() for n, p in adapted.model.named_parameters() if p.requires_grad}
    found["files"] = sorted(path.name for path in (root / "pipe" / CHECKPOINT).iterdir())
    found["world"] = (trainer.args.world_size, trainer.is_world_process_zero(), trainer.is_local_process_zero())
    return found
