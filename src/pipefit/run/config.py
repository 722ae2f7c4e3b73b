"""The configuration of a training run; its fields are the options of `pipefit train`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pipefit.errors import PipefitError, PlanError
from pipefit.pipeline.loggers import check_installed
from pipefit.schedules import find
from pipefit.spec import Plan
from pipefit.spec.arguments import Amount, NotNegative, Number, check_fields
from pipefit.spec.files import JsonObject
from pipefit.spec.options import AUTO, Precision, Request, Saves, Spilled, Updates, as_flat, setting
from pipefit.units import counted

_MOST_CORES = 4
"""Ranks without GPUs; small models have few layers."""


@dataclass(frozen=True)
class RunConfig:
    """A training run."""

    model: str = setting(
        "gpt", "A built-in model (gpt, mlp, convnet), or your own as package.module:factory or file.py:factory."
    )
    option: str = setting("", "Options of the model, like layers=8,hidden=256; may be repeated.", typed="words")
    lora: str = setting(
        "",
        "Train adapters of peft over the weights of a folder, like r=8,alpha=16,target=all-linear; targets are "
        "names of modules with + between them, or all-linear.",
        typed="words",
    )
    data: Sequence[str] = setting(
        (),
        "Data sets: text, digits, synthetic, or your own files: text, or records as .jsonl or .parquet with "
        "text, prompt and completion, or messages; default: the data that suits the model.",
        typed="texts",
    )
    context: Amount = setting(
        0, "Maximum tokens of a sequence, for models with a tokenizer; default: the model's own, at most 512."
    )
    pack: bool = setting(False, "Records follow each other without padding, in sequences of that many tokens.")
    learn: Literal["answers", "all"] = setting(
        "answers", "Answers: of a prompt with its completion, and of a chat, only the answers; or all."
    )
    eval_data: str = setting("", "Text or records to evaluate on, as for --data; default: the last tenth of the data.")
    request: Request = field(default_factory=Request)
    precision: Precision = field(default_factory=Precision)
    batch: Number = setting(16, "Samples per step.")
    steps: Number | None = setting(None, "Weight updates; default: 100.")
    epochs: Number | None = setting(None, "Passes over the data, in place of --steps.")
    optimizer: Literal["adamw", "adam", "sgd"] = setting("adamw", "Of every stage.")
    weight_decay: NotNegative | None = setting(None, "Of adamw and adam (default: 0.1 and 0) and sgd (0).")
    betas: Sequence[float] = setting((), "Of adamw (default: 0.9,0.99) and adam (0.9,0.999).", typed="figures")
    lr: NotNegative | None = setting(
        None, "Peak learning rate; default: 5e-5 for the weights of a folder, 2e-4 for --lora, else 2e-3."
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "Learning rates after the warm-up: down to 5 % of the peak by a cosine or a line, or constant."
    )
    warmup: Amount | None = setting(None, "Steps of linear warm-up; default: a tenth of all steps.")
    updates: Updates = field(default_factory=lambda: Updates(clip_norm=1.0))
    measure: Literal["once", "again"] = setting(
        "once",
        "Once: later runs of the same model on this machine use the measurement of the first one, which is kept "
        "among temporary files, or in XDG_CACHE_HOME if it is set; again: measure now.",
    )
    quick: bool = setting(
        False, "Measure nothing before training: no prediction, no MFU, stages with equal numbers of layers."
    )
    output: str = setting("", "Folder for checkpoints, pictures, trace and metrics.", "-o")
    resume: str = setting("", "Resume from a checkpoint's folder, or from that of --disk.")
    saves: Saves = field(default_factory=Saves)
    evaluate_every: Amount = setting(
        0, "Steps between evaluations on held-out data; the best weights are kept; 0: only at the end."
    )
    patience: Amount = setting(0, "Evaluations without a better loss after which training ends; 0: no limit.")
    log: Sequence[str] = setting(
        (),
        "Further form of the figures of every step: csv, tensorboard or wandb; may be repeated.",
        typed=list[Literal["csv", "tensorboard", "wandb"]],
    )
    sample: Amount = setting(200, "Bytes of each answer at the end, about, for the model of a folder.")

    @property
    def spill(self) -> Spilled:
        """The options of spilled stages, also where nothing is spilled."""
        return self.request.spill or Spilled()

    @property
    def num_ranks(self) -> int:
        """Number of processes, once `with_defaults` has chosen it."""
        assert self.request.parallelism.ranks is not None
        return self.request.parallelism.ranks

    @property
    def num_steps(self) -> int:
        """Number of weight updates, once the data is known."""
        assert self.steps is not None
        return self.steps


def checkpoints_of(folder: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(folder) / "checkpoints"


def with_defaults(config: RunConfig) -> RunConfig:
    """The configuration with the options that follow from others: schedule, processes, steps, learning rate.

    The steps of --epochs, and a warm-up that follows from them, stay None until the data is known.
    """
    check_fields(config, PlanError)
    config = _with_rates(config)
    request = config.request
    spread = config.request.parallelism
    is_capped = config.request.is_capped
    if spread.ranks is None:
        if is_capped:
            usual = spread.data_parallel
        else:
            usual = _usual_ranks(request)
        if request.plan:
            usual = Plan.load(request.plan).num_processes
        request = replace(request, parallelism=replace(spread, ranks=usual))
    if config.patience and not config.evaluate_every:
        raise PipefitError("--patience counts evaluations: give --evaluate-every too")
    if config.log and not config.output:
        raise PipefitError("--log writes into the folder of the run: give -o FOLDER too")
    for name in config.log:
        check_installed(name)
    if config.quick and config.measure == "again":
        raise PipefitError("--quick measures nothing, and --measure again measures: give one of them")
    if config.quick and (is_capped or request.schedule == AUTO or request.stages == AUTO):
        raise PipefitError("--quick: a plan by measurements, for --schedule auto or --device-memory, needs them")
    is_open = is_capped or (config.request == Request() and not config.quick)
    schedule = request.schedule or (AUTO if is_open else "1f1b")
    if schedule == AUTO and not is_capped:
        count = request.microbatches
    else:
        count = request.num_microbatches
    return replace(config, request=replace(request, schedule=schedule, microbatches=count))


_USUAL_STEPS = 100
_PEAKS = {"": 2e-3, "pretrained weights": 5e-5, "adapters": 2e-4}
"""Usual learning rates by what is trained; "": new weights."""


def _trained(config: RunConfig) -> str:
    """Names the kind of weights that are trained; "": new ones."""
    if not Path(config.model).is_dir():
        return ""
    return "adapters" if config.lora else "pretrained weights"


def _with_rates(config: RunConfig) -> RunConfig:
    if config.epochs and config.steps:
        raise PipefitError("--steps and --epochs: give one of them")
    is_folder = Path(config.model).is_dir()
    if not is_folder and (config.context or config.pack or config.learn == "all"):
        raise PipefitError(
            f"--context, --pack and --learn are for models with a tokenizer, in a folder; {config.model} has none"
        )
    if config.lora and not is_folder:
        raise PipefitError(f"--lora: adapters are trained over the weights of a folder; {config.model} has none")
    if config.epochs and config.spill.disk:
        raise PipefitError("--epochs: a run on a disk must know its steps: give --steps")
    if config.lr is None:
        config = replace(config, lr=_PEAKS[_trained(config)])
    if config.epochs:
        return config
    return with_steps(config, config.steps or _USUAL_STEPS)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """The configuration with this number of steps, and the warm-up that follows from it."""
    if config.warmup is None:
        config = replace(config, warmup=-(-steps // 10))
    return replace(config, steps=steps)


def _usual_ranks(request: Request) -> int:
    """Processes that a launcher has started, or that suit the machine; 2 where options give the pipeline its shape."""
    spread = request.parallelism
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if request.stages is not None or request.spill is not None or spread.copies:
        return 2
    if max(spread.tensor, spread.chunks) > 1:
        return 2
    return num_gpus() or min(num_cores(), _MOST_CORES)


def num_gpus() -> int:
    """GPUs of NVIDIA that this process may use, without loading torch."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([one for one in visible.split(",") if one.strip()]))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def choices(asked: RunConfig, config: RunConfig) -> list[tuple[str, str]]:
    """The choices that a user left to pipefit, with their reasons.

    Args:
        asked: the user's options.
        config: the same, `with_defaults`.
    """
    request = asked.request
    ranks = config.request.parallelism.ranks
    is_own = request.plan is not None or config.request.is_capped
    is_auto = config.request.schedule == AUTO
    found = []
    if request.parallelism.ranks is None and not is_own:
        if num_gpus():
            machine = counted(num_gpus(), "GPU")
        else:
            machine = counted(num_cores(), "core")
        found.append(("ranks", f"{ranks}, on a machine of {machine} (--ranks)"))
    if request.schedule is None and not is_own:
        said = "the fastest by measurements of the layers" if is_auto else "1f1b; auto takes the fastest"
        found.append(("schedule", f"{said} (--schedule)"))
    if request.microbatches is None and not is_own:
        if is_auto:
            said = "chosen with the schedule"
        else:
            said = str(request.num_microbatches)
        found.append(("micro-batches", f"{said} (--microbatches)"))
    return [*found, ("learning rate", _rates(asked, config)), ("checkpoints", _saving(config))]


def _rates(asked: RunConfig, config: RunConfig) -> str:
    """The learning rates of a run, in words."""
    if asked.lr is None:
        usual = f", usual for {_trained(config) or 'new weights'}"
    else:
        usual = ""
    if config.warmup is None:
        warmup = "a tenth of the steps"
    else:
        warmup = counted(config.warmup, "step")
    if config.lr_schedule == "constant":
        after = "constant"
    else:
        after = f"{config.lr_schedule} down to 5 %"
    return f"{config.lr:g}{usual} (--lr); {warmup} of warm-up (--warmup), then {after} (--lr-schedule)"


def _saving(config: RunConfig) -> str:
    """The checkpoints of a run, in words."""
    saves = config.saves
    request = config.request
    if not config.output:
        return "none without -o FOLDER"
    schedule = request.schedule or ""
    if request.plan and Path(request.plan).is_file():
        schedule = Plan.load(request.plan).schedule
    if saves.every:
        every = f"every {saves.every} steps, and "
    else:
        every = ""
    # An asynchronous schedule drains for each, which changes its numbers.
    if saves.every is None and (schedule == AUTO or find(schedule).is_synchronous):
        every = f"by time, in at most {100 * saves.share:g} % of it, and "
    if saves.keep and every:
        kept = f"; the newest {saves.keep} stay"
    else:
        kept = ""
    return f"{every}at the end, in {config.output}{kept} (--checkpoint-every)"


_FREE = (
    "output",
    "resume",
    *as_flat(Saves()),
    "evaluate_every",
    "patience",
    "log",
    "sample",
    "disk",
    "host_memory",
    "commit_every",
    "nonfinite",
    "plan",
    "quick",
    "measure",
    "rebalance",
)
"""Options that may differ when another run resumes from the records of this one."""


def facts_of(config: RunConfig) -> JsonObject:
    """The options of a run that determine its numbers, by their names on the command line, as JSON data."""
    facts = {f"--{name.replace('_', '-')}": value for name, value in as_flat(config).items() if name not in _FREE}
    return dict(json.loads(json.dumps(facts)))
