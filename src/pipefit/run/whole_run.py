"""A whole run as a list of steps: model and data, plan, pipeline, prediction, training, evaluation, results."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from pipefit.cost import CostModel
from pipefit.data import ArrayBatches
from pipefit.errors import ModelError, PipefitError
from pipefit.models import build, parse_options
from pipefit.models.hub import is_folder
from pipefit.pipeline.assembly import end_run
from pipefit.pipeline.callbacks import Checkpoints, EarlyStopping
from pipefit.pipeline.given_model import GivenModel
from pipefit.pipeline.loggers import json_log, log_named
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.request import decide
from pipefit.pipeline.resume import committed_step
from pipefit.pipeline.run_report import PipelineReport
from pipefit.profiling.machine import CpuUse
from pipefit.run.config import RunConfig, checkpoints_of, with_defaults, with_steps
from pipefit.run.following import LatestTimeline
from pipefit.run.guesses import guesses_of
from pipefit.run.machine_facts import machine_facts
from pipefit.run.measuring import busy_cores, busy_measurement, busy_training, measured, slow_training
from pipefit.run.observer import Observer
from pipefit.run.optimizers import Rates, make_optimizer, rates
from pipefit.run.result import METRICS, ReadyRun, RunResult, Sample, write_folder
from pipefit.run.sources import Source, example_of, model_and_data
from pipefit.run.tier_records import with_tier
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import noted
from pipefit.runtime.session import current
from pipefit.schedules import shape_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Prediction
from pipefit.spec.options import Parallelism
from pipefit.timeline import Timeline, bottleneck
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
    observer.planned(ready.plan, ready.costs.profile if ready.costs else None, ready.bundle, source)
    observer.doing("loading the checkpoint" if config.resume else "evaluating")
    _resume(config, pipe, observer)
    before = None
    if source.is_tuned and source.held_out:
        before = pipe.evaluate(source.held_out)
    trained = _train(ready, observer)
    if (stop := current().stop).agreed:
        # Its last step is saved; the rest would use up the time that is left.
        end_run(pipe.workers, False)
        raise stop.leaving
    observer.doing("evaluating, and writing the results")
    report = pipe.report(last=8 if pipe.schedule.is_synchronous else 1)
    result = _result(ready, trained, report, before)
    _use_model(ready, result)
    if pipe.rank == 0:
        timelines = _compared(ready, trained, report.timeline, result)
        if config.output:
            write_folder(ready, timelines, result)
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
    bundle, source = model_and_data(config, observer.doing)
    if config.evaluate_every and not source.held_out:
        raise PipefitError(f"--evaluate-every: {source.name} has no held-out part")
    config = _with_epochs(config, source)
    assert config.lr is not None and config.warmup is not None
    optimizer = make_optimizer(config.optimizer, config.lr, config.weight_decay, config.betas)
    given = GivenModel.of(
        bundle.layers,
        loss=bundle.loss,
        optimizer=optimizer,
        example=None,
        device=config.request.parallelism.device,
        precision=config.precision,
        updates=config.updates,
    )
    work = replace(given.work, example=example_of(bundle, source, config.batch), model=bundle.name)
    costs = None
    if config.quick:
        decision = decide(config.request, work, current())
    else:
        decision, costs = measured(config, work, observer)
    observer.doing("building the stages")
    scheduler = rates(config.lr_schedule, config.warmup, config.num_steps)
    pipe = Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=optimizer,
        plan=decision,
        parallelism=Parallelism(device=work.device, rebalance=config.request.parallelism.rebalance),
        precision=config.precision,
        updates=replace(config.updates, scheduler=scheduler),
        spill=config.request.spill,
    )
    pipe.state.last_step = config.steps
    plan = pipe.plan
    if costs is not None:
        plan = _with_prediction(config, pipe, costs.cost)
    return ReadyRun(config, bundle, source, plan, costs, pipe)


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


def _with_prediction(config: RunConfig, pipe: Pipeline, cost: CostModel) -> Plan:
    """The plan with its prediction on this machine: several passes of a synchronous program, else a long segment."""
    plan = pipe.plan
    if pipe.schedule.is_synchronous:
        timeline = simulate(pipe.program, cost, repeats=4)
    else:
        steps = max(4, -(-32 // plan.num_microbatches))
        timeline = simulate(pipe.schedule(shape_of(plan, num_steps=steps)), cost)
    period_s = timeline.period_s
    throughput = 0.0
    if period_s:
        throughput = config.batch / period_s
    peak_bytes = tuple(map(timeline.peak_bytes, range(len(timeline.program.ranks))))
    if config.request.is_capped and plan.prediction is not None:
        # The bytes that were compared with the cap.
        peak_bytes = plan.prediction.peak_bytes
    step_s = timeline.makespan_s / timeline.num_repeats / timeline.program.header.num_steps
    prediction = Prediction(step_s, period_s, period_s, throughput, peak_bytes)
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
    found: list[Any] = [observer]
    if not config.output:
        return found
    folder = Path(config.output)
    found += [json_log(folder / METRICS), *(log_named(name, folder) for name in config.log)]
    saves = config.saves
    found.append(Checkpoints(pipe, checkpoints_of(folder), saves.every, saves.keep, saves.share))
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


class _Trained(NamedTuple):
    """A training that has ended.

    Attributes:
        losses: of its steps.
        seconds: that they took.
        cores_of_others: mean number of cores that other programs took meanwhile.
        best: the best evaluation.
    """

    losses: list[float]
    seconds: float
    cores_of_others: float
    best: EarlyStopping


def _train(run: ReadyRun, observer: Observer) -> _Trained:
    """Trains to the last step."""
    config = run.config
    pipe = run.pipe
    held_out = None
    if config.evaluate_every:
        held_out = run.source.held_out
    folder = None
    if config.output:
        folder = Path(config.output) / "best"
    best = EarlyStopping(pipe, config.patience, folder)
    observer.doing("first step: compiling the layers" if config.precision.compile else "first step")
    began = time.perf_counter()
    before = CpuUse.now()
    losses = pipe.fit(
        run.source.batches,
        config.num_steps - pipe.num_updates,
        callbacks=[*_callbacks(config, pipe, observer), best],
        held_out=held_out,
        evaluate_every=config.evaluate_every,
    )
    seconds = time.perf_counter() - began
    return _Trained(losses, seconds, busy_cores(before), best)


def _result(run: ReadyRun, trained: _Trained, report: PipelineReport, before: float | None) -> RunResult:
    """The figures of a run; every rank makes the same call."""
    config = run.config
    source = run.source
    timeline = report.timeline
    held_out_loss = None
    accuracy = None
    if source.counts_hits:
        held_out_loss, accuracy = run.pipe.evaluate(
            source.held_out, lambda output, y: (output.argmax(1) == y).float().mean().item()
        )
    elif source.held_out:
        held_out_loss = run.pipe.evaluate(source.held_out)
    rate = 0.0
    if trained.seconds:
        rate = len(trained.losses) * config.batch / trained.seconds
    result = RunResult(
        losses=trained.losses,
        seconds=trained.seconds,
        samples_per_s=rate,
        tokens_per_s=rate * source.tokens_per_sample,
        baseline=source.baseline,
        held_out_loss=held_out_loss,
        held_out_accuracy=accuracy,
        held_out_metrics=dict(run.pipe.metrics) if source.held_out else {},
        held_out_before=before,
        predicted=run.plan.prediction,
        measured_period_s=timeline.period_s,
        bubble=timeline.bubble_fraction,
        utilisation=[timeline.utilisation(rank) for rank in range(len(timeline.program.ranks))],
        traffic=report.traffic,
        peak_memory_bytes=report.peak_memory_bytes,
        held_bytes=report.held_bytes,
        compile_s=report.compile_s,
        machine=machine_facts(current(), run.pipe.device),
    )
    if run.pipe.plan != msgspec.structs.replace(run.plan, prediction=run.pipe.plan.prediction):
        result.predicted = None  # another plan was predicted than the one that was measured
    best = trained.best
    if best.best_step:
        result.notes += _ending(best, config, run.pipe.num_updates)
        if best.folder is not None:
            result.paths["best"] = str(best.folder)
    if run.costs is not None and run.costs.cores_of_others:
        result.notes.append(busy_measurement(run.costs.cores_of_others))
    if trained.cores_of_others:
        result.notes.append(busy_training(trained.cores_of_others))
    if host := bottleneck(timeline):
        result.notes.append(host)
    place = current().folder
    if place is None and config.output:
        place = checkpoints_of(config.output)
    if place is not None:
        result.faults = noted(place)
    return result


def _compared(run: ReadyRun, trained: _Trained, measured: Timeline, result: RunResult) -> dict[str, Timeline]:
    """Compares the measured times with those that the costs predict; returns both timelines by name."""
    if run.costs is None or result.predicted is None:
        return {"measured": measured}
    predicted = simulate(measured.program, run.costs.cost, repeats=measured.num_repeats)
    result.rows = compare(predicted, measured)
    has_turns = len(run.pipe.workers) > 1  # ranks that alternate in one process
    slow = slow_training(result.rows)
    if slow and not trained.cores_of_others and not has_turns:
        result.notes.append(slow)
    return {"measured": measured, "predicted": predicted}


def _use_model(run: ReadyRun, result: RunResult) -> None:
    """Saves the trained model of a folder, and asks a model for answers or classes. Every rank makes the same call."""
    config = run.config
    source = run.source
    if is_folder(config.model):
        if config.output:
            result.paths["model"] = str(run.pipe.save_pretrained(Path(config.output) / "model"))
        if not run.plan.spill:
            result.samples = _answered(run)
        return
    is_chain = isinstance(run.bundle.layers, nn.Sequential)
    # A model on a tier may be larger than the host's memory.
    if run.plan.spill or not is_chain or not source.counts_hits:
        return
    state = run.pipe.state_dict()
    if run.pipe.rank == 0:
        result.guesses = guesses_of(_whole(run, state), *source.held_out[0])


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
        decoded = run.source.decoded
        found.append(Sample(decoded(prompt.tokens), decoded(prompt.target[:length]), decoded(tokens)))
    return found


def _whole(run: ReadyRun, state: dict[str, torch.Tensor]) -> nn.Sequential:
    """The whole trained model on this rank, in evaluation mode."""
    config = run.config
    # The layers of a tensor-parallel run are parts of the model's.
    if run.plan.tensor > 1:
        whole = build(config.model, **parse_options(config.option, config.model))
    else:
        whole = run.bundle
    model = whole.layers
    assert isinstance(model, nn.Sequential)
    model.load_state_dict(state, assign=True)
    model.eval()
    return model
