"""The configuration of a training run; its fields are the options of `pipefit train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipefit.errors import PipefitError
from pipefit.pipeline.loggers import check_installed
from pipefit.spec import Plan
from pipefit.spec.options import AUTO, Precision, Request, Spilled, Updates, as_flat, check_least, setting


@dataclass(frozen=True)
class RunConfig:
    """A training run.

    Attributes:
        model: a built-in model (gpt, mlp, convnet), or your own as package.module:factory or
            file.py:factory.
        option: options of the model, like layers=8,hidden=256; may be repeated.
        lora: train adapters of peft over the weights of a folder, like r=8,alpha=16,target=all-linear; targets are
            names of modules with + between them, or all-linear.
        data: data sets: text, digits, synthetic, or your own files: text, or records as .jsonl or .parquet with
            text, prompt and completion, or messages; default: the data that suits the model.
        context: maximum tokens of a sequence, for models with a tokenizer; default: the model's own, at most 512.
        pack: records follow each other without padding, in sequences of that many tokens.
        request: the pipeline.
        precision: the type in which layers compute.
        updates: clipping and seed.
        batch: samples per step.
        steps: weight updates.
        optimizer: of every stage.
        lr: peak learning rate.
        warmup: steps of linear warm-up; then a cosine down to 5 %.
        output: folder for checkpoints, pictures, trace and metrics.
        resume: resume from a checkpoint's folder, or from that of --disk.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        evaluate_every: steps between evaluations on held-out data; the best weights are kept; 0: only at the end.
        patience: evaluations without a better loss after which training ends; 0: no limit.
        log: further form of the figures of every step: csv, tensorboard or wandb; may be repeated.
        sample: bytes to generate at the end, for language models.
    """

    model: str = "gpt"
    option: str = setting("", typed="words")
    lora: str = setting("", typed="words")
    data: Sequence[str] = setting((), typed="texts")
    context: int = setting(0, least=0)
    pack: bool = False
    request: Request = field(default_factory=Request)
    precision: Precision = field(default_factory=Precision)
    batch: int = setting(16, least=1)
    steps: int = setting(100, least=1)
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = setting(2e-3, least=0.0)
    warmup: int = setting(20, least=0)
    updates: Updates = field(default_factory=lambda: Updates(clip_norm=1.0))
    output: str = setting("", "--output", "-o")
    resume: str = ""
    checkpoint_every: int = setting(0, least=0)
    evaluate_every: int = setting(0, least=0)
    patience: int = setting(0, least=0)
    log: Sequence[str] = setting((), typed=list[Literal["csv", "tensorboard", "wandb"]])
    sample: int = setting(200, least=0)

    @property
    def spill(self) -> Spilled:
        """The options of spilled stages, also where nothing is spilled."""
        return self.request.spill or Spilled()


def with_defaults(config: RunConfig) -> RunConfig:
    """The configuration with the schedule and the number of processes that follow from the other options."""
    check_least(config)
    request, spread = config.request, config.request.parallelism
    is_capped = config.spill.cap_bytes is not None
    if spread.ranks is None:
        under_cap = spread.data_parallel if is_capped else 2
        usual = Plan.load(request.plan).num_processes if request.plan else under_cap
        request = replace(request, parallelism=replace(spread, ranks=usual))
    if config.patience and not config.evaluate_every:
        raise PipefitError("--patience counts evaluations: give --evaluate-every too")
    if config.log and not config.output:
        raise PipefitError("--log writes into the folder of the run: give -o FOLDER too")
    for name in config.log:
        check_installed(name)
    schedule = request.schedule or (AUTO if is_capped else "1f1b")
    return replace(config, request=replace(request, schedule=schedule))


_FREE = (
    "output",
    "resume",
    "checkpoint_every",
    "evaluate_every",
    "patience",
    "log",
    "sample",
    "disk",
    "host_memory",
    "commit_every",
    "plan",
)
"""Options that may differ when another run resumes from the records of this one."""


def facts_of(config: RunConfig) -> dict[str, Any]:
    """The options of a run that determine its numbers, by their names on the command line, as JSON data."""
    facts = {f"--{name.replace('_', '-')}": value for name, value in as_flat(config).items() if name not in _FREE}
    return dict(json.loads(json.dumps(facts)))
