"""A whole run as a list of steps: model and data, plan, pipeline, prediction, training, evaluation, results."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pipefit.calibrate.prediction import prediction_of
from pipefit.cost import CostModel
from pipefit.data import ArrayBatches, sample
from pipefit.errors import ModelError, PipefitError
from pipefit.models import ModelBundle, build, parse_options
from pipefit.models.hub import is_folder
from pipefit.pipeline.assembly import end_run
from pipefit.pipeline.callbacks import Checkpoints, EarlyStopping
from pipefit.pipeline.loggers import json_log, log_named
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.request import decide
from pipefit.pipeline.resume import committed_step
from pipefit.pipeline.run_report import PipelineReport
from pipefit.profiling.machine import CpuUse
from pipefit.profiling.workload import Workload
from pipefit.run.config import RunConfig, checkpoints_of, with_defaults, with_steps
from pipefit.run.following import LatestTimeline
from pipefit.run.measuring import busy_cores, busy_measurement, busy_training, measured, slow_training
from pipefit.run.observer import Observer
from pipefit.run.optimizers import Rates, make_optimizer, rates
from pipefit.run.result import METRICS, ReadyRun, RunResult, Sample, write_folder
from pipefit.run.sources import Source, bundle_of, example_of, source_of
from pipefit.run.texts import HeldOutPrompt, is_named, texts_of
from pipefit.run.tier_records import with_tier
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import noted
from pipefit.runtime.session import current
from pipefit.schedules import shape_of
from pipefit.simulate import simulate
from pipefit.spec import Plan
from pipefit.spec.options import Parallelism
from pipefit.stage.compiler import backend_of
from pipefit.stage.device import process_device
from pipefit.stage.precision import half_of
from pipefit.stage.split import named_layers
from pipefit.timeline.compare import compare
from pipefit.units import counted

_BYTES_PER_TOKEN = 4
"""Of text, about."""


def run(config: RunConfig, observer: Observer) -> RunResult:
    """Runs on this rank; every rank of the run makes the same call.

    Raises:
        PipefitError: something in the configuration does not fit; nothing has been trained.
    """
    config = with_tier(_restarted(with_defaults(config)), current().rank)
    ready = _ready(config, observer)
    config = ready.config
    pipe = ready.pipe
    source = ready.source
    observer.begins(config)
    pipe.loop.last_step = config.steps
    observer.planned(ready.plan, ready.costs.profile if ready.costs else None, ready.bundle, source)
    observer.doing("loading the checkpoint" if config.resume else "evaluating")
    _resume(config, pipe, observer)
    if source.is_tuned and source.held_out:
        before = pipe.evaluate(source.held_out)
    else:
        before = None
    observer.doing("first step: compiling the layers" if config.precision.compile else "first step")
    best = EarlyStopping(pipe, config.patience, Path(config.output) / "best" if config.output else None)
    began = time.perf_counter()
    before_training = CpuUse.now()
    losses = pipe.fit(
        source.batches,
        config.num_steps - pipe.num_updates,
        callbacks=[*_callbacks(config, pipe, observer), best],
        held_out=source.held_out if config.evaluate_every else None,
        evaluate_every=config.evaluate_every,
    )
    seconds = time.perf_counter() - began
    others = busy_cores(before_training)
    if (stop := current().stop).agreed:
        # Its last step is saved; the rest would use up the time that is left.
        end_run(pipe.workers, False)
        raise stop.leaving
    observer.doing("evaluating, and writing the results")
    report = pipe.report(last=8 if pipe.schedule.is_synchronous else 1)
    result = _result(ready, losses, seconds, report, before)
    if best.best_step:
        result.notes = _ending(best, config, pipe.num_updates)
        if best.folder is not None:
            result.paths |= {"best": str(best.folder)}
    if ready.costs is not None and ready.costs.cores_of_others:
        result.notes = [*result.notes, busy_measurement(ready.costs.cores_of_others)]
    if others:
        result.notes = [*result.notes, busy_training(others)]
    place = current().folder or (checkpoints_of(config.output) if config.output else None)
    if place:
        result.faults = noted(place)
    else:
        result.faults = []
    # A model on a tier may be larger than the host's memory.
    if ready.plan.spill or is_folder(config.model):
        state = {}
    else:
        state = pipe.state_dict()
    if config.output and is_folder(config.model):
        result.paths["model"] = str(pipe.save_pretrained(Path(config.output) / "model"))
    if source.tokenizer is not None and not ready.plan.spill:
        result.samples = _answered(ready)
    if pipe.rank == 0:
        timeline = report.timeline
        predicted = None
        if ready.costs is not None:
            predicted = simulate(timeline.program, ready.costs.cost, repeats=timeline.num_repeats)
            result.rows = compare(predicted, timeline)
            has_turns = len(pipe.workers) > 1  # ranks that alternate in one process
            if not others and not has_turns and (slow := slow_training(result.rows)):
                result.notes = [*result.notes, slow]
        result.samples = result.samples or _continued(ready, state)
        if config.output:
            write_folder(ready, timeline, predicted, result)
    end_run(pipe.workers, pipe.num_updates >= config.num_steps)
    return result


def _restarted(config: RunConfig) -> RunConfig:
    """The options of a run that was started again after a fault: it resumes from the records of its own tier."""
    disk = config.spill.disk
    session = current()
    if session.start.restart and disk and None not in exchange(session, committed_step(disk)):
        return replace(config, resume=str(disk))
    return config


def _ready(config: RunConfig, observer: Observer) -> ReadyRun:
    """Model, data, plan and pipeline of a run."""
    bundle, source = _model_and_data(config, observer)
    if config.evaluate_every and not source.held_out:
        raise PipefitError(f"--evaluate-every: {source.name} has no held-out part")
    config = _with_epochs(config, source)
    work = _workload(config, bundle, source)
    if config.quick:
        plan = decide(config.request, work, current()).plan
        costs = None
    else:
        plan, costs = measured(config, work, observer)
    observer.doing("building the stages")
    assert config.warmup is not None
    scheduler = rates(config.lr_schedule, config.warmup, config.num_steps)
    pipe = Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=work.optimizer,
        plan=plan,
        parallelism=Parallelism(device=work.device),
        precision=config.precision,
        updates=replace(config.updates, scheduler=scheduler),
        spill=config.request.spill,
    )
    if costs is None:
        plan = pipe.plan
    else:
        plan = _with_prediction(config, pipe, costs.cost)
    return ReadyRun(config, bundle, source, plan, costs, pipe)


def _model_and_data(config: RunConfig, observer: Observer) -> tuple[ModelBundle, Source]:
    """Model and data; the user's records are read first, because that shows soon whether they fit."""
    data = config.data
    seed = config.updates.seed
    in_folder = is_folder(config.model)
    texts = None
    if in_folder and data and not is_named(data):
        observer.doing("reading the data")
        texts = texts_of(config)
    observer.doing("building the model" if texts else "building the model and reading the data")
    torch.manual_seed(seed)
    options = parse_options(config.option, config.model)
    bundle = bundle_of(config.model, options, seed, in_folder or config.spill.cap_bytes is not None, config.lora)
    if in_folder and not data and bundle.data == "text":
        texts = texts_of(config)
    return bundle, source_of(bundle, data, config.batch, seed, config.eval_data, texts)


def _with_epochs(config: RunConfig, source: Source) -> RunConfig:
    """The configuration with the steps of --epochs.

    Raises:
        PipefitError: the data has no end.
    """
    if config.epochs is None:
        return config
    if not isinstance(source.batches, ArrayBatches):
        raise PipefitError(f"--epochs: {source.name} is drawn at random, without an end: give --steps")
    return with_steps(config, config.epochs * len(source.batches))


def _workload(config: RunConfig, bundle: ModelBundle, source: Source) -> Workload:
    place = process_device(config.request.parallelism.device)
    assert config.lr is not None
    return Workload(
        named_layers(bundle.layers),
        bundle.loss,
        make_optimizer(config.optimizer, config.lr, config.weight_decay, config.betas),
        place,
        example_of(bundle, source, config.batch),
        bool(config.updates.clip_norm),
        half_of(config.precision.dtype),
        bundle.name,
        backend_of(config.precision.compile, place),
    )


def _with_prediction(config: RunConfig, pipe: Pipeline, cost: CostModel) -> Plan:
    """The plan with its prediction on this machine: several passes of a synchronous program, else a long segment."""
    plan = pipe.plan
    if pipe.schedule.is_synchronous:
        timeline = simulate(pipe.program, cost, repeats=4)
    else:
        steps = max(4, -(-32 // plan.num_microbatches))
        timeline = simulate(pipe.schedule(shape_of(plan, num_steps=steps)), cost)
    prediction = prediction_of(timeline, config.batch)
    if config.spill.cap_bytes is not None and plan.prediction is not None:
        # The bytes that were compared with the cap.
        prediction = msgspec.structs.replace(prediction, peak_bytes=plan.prediction.peak_bytes)
    return msgspec.structs.replace(plan, prediction=prediction)


def _resume(config: RunConfig, pipe: Pipeline, observer: Observer) -> None:
    """Resumes from a run's folder, that of its checkpoints, or one of them."""
    if config.resume and config.spill.resume is False:
        inside = checkpoints_of(config.resume)
        pipe.load(inside if inside.is_dir() else config.resume)
        if pipe.num_updates >= config.num_steps:
            raise PipefitError(
                f"{config.resume} has done {pipe.num_updates} steps, and --steps {config.num_steps} counts them all: "
                f"give more than {pipe.num_updates}"
            )
        _compare_rates(config, pipe, observer)


def _compare_rates(config: RunConfig, pipe: Pipeline, observer: Observer) -> None:
    """Says which learning rates the first run left behind, if the options name others."""
    found = [scheduler for worker in pipe.workers for scheduler in worker.schedulers.values()]
    first = next((one for one in found if isinstance(one, Rates)), None)
    if first is None:
        return
    asked = (config.lr_schedule, config.warmup, config.steps)
    if (first.kind, first.warmup, first.num_steps) != asked or max(first.base_lrs) != config.lr:
        observer.says(f"learning rate: the first run's go on ({first}); --lr, --warmup and --steps do not change them")


def _callbacks(config: RunConfig, pipe: Pipeline, observer: Observer) -> list[Any]:
    """Callbacks of the training: the display, and files in the run's folder."""
    if config.output:
        folder = Path(config.output)
    else:
        folder = None
    found: list[Any] = [observer]
    if folder is not None:
        found += [json_log(folder / METRICS), *(log_named(name, folder) for name in config.log)]
        saves = config.saves
        found += [Checkpoints(pipe, checkpoints_of(folder), saves.every, saves.keep, saves.share)]
        if pipe.schedule.is_synchronous:
            found.append(LatestTimeline(pipe, folder, config.num_steps))
    return found


def _ending(best: EarlyStopping, config: RunConfig, num_updates: int) -> list[str]:
    """The best evaluation, and the reason why the training ended, in words."""
    notes = [f"best held-out loss {best.best_loss:.4f} at step {best.best_step}"]
    if best.folder is not None:
        notes[0] += "; the model has the weights of that step again"
    if best.has_ended:
        count = counted(config.patience, "evaluation")
        notes.append(f"ended at step {num_updates} of {config.steps}: no better held-out loss in {count} (--patience)")
    return notes


def _result(run: ReadyRun, losses: list[float], seconds: float, report: PipelineReport, before: Any) -> RunResult:
    measured = report.timeline
    source = run.source
    held_out_loss: float | None = None
    accuracy: float | None = None
    if source.counts_hits:
        held_out_loss, accuracy = run.pipe.evaluate(
            source.held_out, lambda output, y: (output.argmax(1) == y).float().mean().item()
        )
    elif source.held_out:
        held_out_loss = run.pipe.evaluate(source.held_out)
    if seconds:
        rate = len(losses) * run.config.batch / seconds
    else:
        rate = 0.0
    return RunResult(
        losses=losses,
        seconds=seconds,
        samples_per_s=rate,
        tokens_per_s=rate * source.tokens_per_sample,
        baseline=source.baseline,
        held_out_loss=held_out_loss,
        held_out_accuracy=accuracy,
        held_out_metrics=dict(run.pipe.metrics) if source.held_out else {},
        held_out_before=before,
        predicted=run.plan.prediction,
        measured_period_s=measured.period_s,
        bubble=measured.bubble_fraction,
        utilisation=[measured.utilisation(rank) for rank in range(len(measured.program.ranks))],
        traffic=report.traffic,
        peak_memory_bytes=report.peak_memory_bytes,
        held_bytes=report.held_bytes,
        compile_s=report.compile_s,
    )


def _answered(run: ReadyRun) -> list[Sample]:
    """Answers of the trained model of a folder, generated by its stages. Every rank makes the same call."""
    config = run.config
    found = []
    for prompt in run.source.prompts:
        room = run.source.longest - len(prompt.tokens)
        length = min(config.sample // _BYTES_PER_TOKEN, room)
        if length < 1:
            continue
        ids = torch.tensor([prompt.tokens])
        how: dict[str, Any] = {"do_sample": not prompt.is_answer, "seed": config.updates.seed}
        try:
            tokens = run.pipe.generate(ids, max_new_tokens=length, **how)[0, len(prompt.tokens) :].tolist()
        except ModelError:
            return []
        found.append(_sample(run.source, prompt, run.source.decoded(tokens), length))
    return found


def _continued(run: ReadyRun, state: dict[str, torch.Tensor]) -> list[Sample]:
    """Text of the trained model of bytes, made by the whole model on this rank."""
    config = run.config
    source = run.source
    if not (source.prompts and config.sample and state):
        return []
    # The layers of a tensor-parallel run are parts of the model's.
    if run.plan.tensor > 1:
        whole = build(config.model, **parse_options(config.option, config.model))
    else:
        whole = run.bundle
    model = whole.layers
    assert isinstance(model, nn.Sequential)
    model.load_state_dict(state, assign=True)
    model.eval()
    found = []
    for prompt in source.prompts:
        context = source.tokens_per_sample
        text = sample(model, bytes(prompt.tokens), config.sample, seed=config.updates.seed, context=context)
        answer = text.removeprefix(source.decoded(prompt.tokens))
        found.append(_sample(source, prompt, answer, config.sample))
    return found


def _sample(source: Source, prompt: HeldOutPrompt, answer: str, length: int) -> Sample:
    return Sample(source.decoded(prompt.tokens), source.decoded(prompt.target[:length]), answer)
