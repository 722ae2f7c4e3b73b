"""A whole run as a list of steps: model and data, plan, pipeline, prediction, training, evaluation, results."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import nn

from pipefit.calibrate.prediction import costs_on_ranks, prediction_of
from pipefit.cost import CostModel
from pipefit.data import sample
from pipefit.errors import PipefitError
from pipefit.models import ModelBundle, build, parse_options
from pipefit.models.hub import is_folder
from pipefit.pipeline.assembly import end_run
from pipefit.pipeline.memory_cap import machine_tier
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.request import decide, default_device
from pipefit.pipeline.run_report import PipelineReport
from pipefit.pipeline.step_figures import ModelFlop, StepFigures, count_flop
from pipefit.profiling.workload import Workload
from pipefit.run.config import RunConfig, with_defaults
from pipefit.run.optimizers import STATE_PER_WEIGHT, make_optimizer, warmed_cosine
from pipefit.run.result import RunResult, checkpoints_of, metrics_in, write_folder
from pipefit.run.sources import Source, bundle_of, example_of, source_of
from pipefit.run.tier_records import with_tier
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session, current
from pipefit.schedules import shape_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.options import Parallelism
from pipefit.stage.precision import half_of
from pipefit.stage.split import named_layers
from pipefit.timeline.compare import compare


class Observer(Protocol):
    """An observer of a run, such as the display of the command line. Only rank 0 has one that does anything."""

    def planned(self, plan: Plan, profile: Profile, bundle: ModelBundle, source: Source) -> None:
        """The plan is made; training begins."""

    def stepped(self, step: int, loss: float, seconds: float, figures: StepFigures | None = None) -> None:
        """A step's loss is known, `seconds` after training began; `figures` are those of the ranks in its pass.

        Steps count from 1, including those of the runs from which this one resumed.
        """

    def counted(self, flop: ModelFlop | None) -> None:
        """The FLOP of model and devices are known; None: the model's cannot be counted."""


def run(config: RunConfig, observer: Observer) -> RunResult:
    """Runs on this rank; every rank of the run makes the same call.

    Raises:
        PipefitError: something in the configuration does not fit; nothing has been trained.
    """
    session = current()
    config = with_tier(with_defaults(config), session.rank)
    subject = _build(config)
    plan, profile, topology = decide(config.request, subject.work, session, measure=True)
    assert profile is not None and topology is not None
    profile = profile.at(largest_part(subject.work.batch("a run")[0], plan.num_microbatches))
    if config.spill.cap_bytes is None and session.rank == 0:
        observer.counted(count_flop(subject.work, config.request.parallelism.ranks or 1))
    cost = _cost(config, subject.work, plan, profile, topology, session)
    pipe = _pipeline(config, subject, plan)
    plan = _with_prediction(config, pipe, cost)
    observer.planned(plan, profile, subject.bundle, subject.source)
    _resume(config, pipe, subject.source)
    before = pipe.evaluate(subject.source.held_out) if subject.source.is_tuned and subject.source.held_out else None
    losses, seconds = _train(config, pipe, subject.source, observer)
    report = pipe.report(last=8 if pipe.schedule.is_synchronous else 1)
    measured = report.timeline
    result = _result(config, pipe, plan, subject.source, losses, seconds, report)
    result.held_out_before = before
    predicted = simulate(measured.program, cost, repeats=measured.num_repeats)
    # A model on a tier may be larger than the host's memory.
    state = {} if plan.spill or is_folder(config.model) else pipe.state_dict()
    if config.output:
        _save(config, pipe, subject.source)
        if is_folder(config.model):
            result.paths["model"] = str(pipe.save_pretrained(Path(config.output) / "model"))
    if session.rank == 0:
        result.rows = compare(predicted, measured)
        result.text = _generated(config, subject, plan, state)
        if config.output:
            write_folder(config, pipe, plan, profile, measured, predicted, result)
    end_run(pipe.workers, pipe.num_updates >= config.steps)
    return result


@dataclass(frozen=True)
class _Subject:
    """The model and the data of a run."""

    bundle: ModelBundle
    source: Source
    work: Workload


def _build(config: RunConfig) -> _Subject:
    torch.manual_seed(config.updates.seed)
    may_be_empty = config.spill.cap_bytes is not None or is_folder(config.model)
    options = parse_options(config.option, config.model)
    bundle = bundle_of(config.model, options, config.updates.seed, may_be_empty, config.lora)
    source = source_of(bundle, config.data, config.batch, config.updates.seed, config.context, config.pack)
    if config.evaluate_every and not source.held_out:
        raise PipefitError(f"--evaluate-every: {source.name} has no held-out part")
    device = config.request.parallelism.device
    work = Workload(
        named_layers(bundle.layers),
        bundle.loss,
        make_optimizer(config.optimizer, config.lr),
        torch.device(device) if device else default_device(),
        example_of(bundle, source, config.batch),
        bool(config.updates.clip_norm),
        half_of(config.precision.dtype),
        bundle.name,
    )
    return _Subject(bundle, source, work)


def _cost(
    config: RunConfig, work: Workload, plan: Plan, profile: Profile, topology: Topology, session: Session
) -> CostModel:
    """Costs of the plan on these ranks; spilled stages of a plan without a cap also need the tier's rates."""
    if (config.request.spill or plan.spill) is not None and not topology.tiers:
        tier = machine_tier(config.spill, work, session, topology.tier_shares(plan.placement.num_ranks))
        topology = msgspec.structs.replace(topology, tiers=(tier,))
    return costs_on_ranks(plan, profile, topology, session, work, STATE_PER_WEIGHT[config.optimizer])


def _pipeline(config: RunConfig, subject: _Subject, plan: Plan) -> Pipeline:
    return Pipeline(
        subject.bundle.layers,
        loss=subject.bundle.loss,
        optimizer=subject.work.optimizer,
        plan=plan,
        parallelism=Parallelism(device=subject.work.device),
        precision=config.precision,
        updates=replace(config.updates, scheduler=warmed_cosine(config.warmup, config.steps)),
        spill=config.request.spill,
    )


def _with_prediction(config: RunConfig, pipe: Pipeline, cost: CostModel) -> Plan:
    """The plan with its prediction on this machine: several passes of a synchronous program, else a long segment."""
    plan = pipe.plan
    if pipe.schedule.is_synchronous:
        timeline = simulate(pipe.program, cost, repeats=4)
    else:
        steps = max(4, -(-32 // plan.num_microbatches))
        timeline = simulate(pipe.schedule(shape_of(plan, num_steps=steps)), cost)
    prediction = prediction_of(plan, timeline, config.batch)
    if config.spill.cap_bytes is not None and plan.prediction is not None:
        # The bytes that were compared with the cap.
        prediction = msgspec.structs.replace(prediction, peak_bytes=plan.prediction.peak_bytes)
    return msgspec.structs.replace(plan, prediction=prediction)


def _resume(config: RunConfig, pipe: Pipeline, source: Source) -> None:
    """Resumes from the records on a disk tier, or from a run's folder, that of its checkpoints, or one of them."""
    if config.spill.resume is not False:
        source.resume(pipe.resumed_notes.get("data", {}))
    elif config.resume:
        inside = checkpoints_of(config.resume)
        source.resume(pipe.load(inside if inside.is_dir() else config.resume).extra.get("data", {}))
        if pipe.num_updates >= config.steps:
            raise PipefitError(
                f"{config.resume} has done {pipe.num_updates} steps, and --steps {config.steps} counts them all: "
                f"give more than {pipe.num_updates}"
            )


def _train(config: RunConfig, pipe: Pipeline, source: Source, observer: Observer) -> tuple[list[float], float]:
    """Trains in segments between checkpoints and evaluations; then restores the best evaluated weights."""
    pipe.notes = lambda: {"data": source.state()}
    pipe.loop.shares_figures = True
    losses: list[float] = []
    began = time.perf_counter()
    batches = source.endless()
    done = pipe.num_updates
    best = _Best(config, pipe)
    with metrics_in(Path(config.output) if config.output and pipe.rank == 0 else None, done) as add:

        def show(before: int, step: int, loss: float) -> None:
            add(before + step, loss=loss)
            observer.stepped(before + step, loss, time.perf_counter() - began, pipe.loop.figures)

        while done < config.steps and not best.is_past:
            count = min(_until(done, every, config.steps) for every in (config.checkpoint_every, config.evaluate_every))
            losses += pipe.fit(batches, steps=count, on_step=partial(show, done))
            done += count
            if config.evaluate_every and (done % config.evaluate_every == 0 or done == config.steps):
                held_out_loss = pipe.evaluate(source.held_out)
                assert isinstance(held_out_loss, float)
                add(done, held_out_loss=held_out_loss)
                best.take(held_out_loss)
            if (
                config.checkpoint_every
                and config.output
                and done % config.checkpoint_every == 0
                and done < config.steps
            ):
                _save(config, pipe, source)
    best.restore()
    return losses, time.perf_counter() - began


def _until(done: int, every: int, steps: int) -> int:
    """Steps until the next multiple of `every` (0: there is none), or to the end."""
    return min(every - done % every, steps - done) if every else steps - done


class _Best:
    """The best evaluation of a run, whose weights are kept in its folder."""

    def __init__(self, config: RunConfig, pipe: Pipeline) -> None:
        self._pipe, self._patience = pipe, config.patience
        self._folder = Path(config.output) / "best" if config.output else None
        self._loss, self._since = math.inf, 0

    @property
    def is_past(self) -> bool:
        """Returns whether the best loss was long enough ago to stop."""
        return 0 < self._patience <= self._since

    def take(self, loss: float) -> None:
        """Takes the loss of the current weights, which is the same on every rank."""
        self._since += 1
        if loss < self._loss:
            self._loss, self._since = loss, 0
            if self._folder:
                self._pipe.save(self._folder, keep=1)

    def restore(self) -> None:
        """Restores the best weights, where they were kept."""
        if self._since and self._folder:
            self._pipe.load(self._folder, weights_only=True)


def _save(config: RunConfig, pipe: Pipeline, source: Source) -> None:
    pipe.save(checkpoints_of(config.output), extra={"data": source.state()})


def _result(
    config: RunConfig,
    pipe: Pipeline,
    plan: Plan,
    source: Source,
    losses: list[float],
    seconds: float,
    report: PipelineReport,
) -> RunResult:
    measured = report.timeline
    held_out_loss = accuracy = None
    if source.counts_hits:
        held_out_loss, accuracy = pipe.evaluate(source.held_out, _hits)
    elif source.held_out:
        held_out_loss = pipe.evaluate(source.held_out)
    rate = len(losses) * config.batch / seconds if seconds else 0.0
    return RunResult(
        losses=losses,
        seconds=seconds,
        samples_per_s=rate,
        tokens_per_s=rate * source.tokens_per_sample,
        baseline=source.baseline,
        held_out_loss=held_out_loss,
        held_out_accuracy=accuracy,
        held_out_before=None,
        predicted=plan.prediction,
        measured_period_s=measured.period_s,
        bubble=measured.bubble_fraction,
        utilisation=[measured.utilisation(rank) for rank in range(len(measured.program.ranks))],
        traffic=report.traffic,
        peak_memory_bytes=report.peak_memory_bytes,
        held_bytes=report.held_bytes,
    )


def _hits(output: torch.Tensor, y: torch.Tensor) -> float:
    return (output.argmax(1) == y).float().mean().item()


def _generated(config: RunConfig, subject: _Subject, plan: Plan, state: dict[str, torch.Tensor]) -> str:
    """A sample of the trained language model, made by the whole model on this rank; "": not a language model."""
    context = subject.source.tokens_per_sample
    if not (context and config.sample and state) or is_folder(config.model):
        return ""
    # The layers of a tensor-parallel run are parts of the model's.
    whole = build(config.model, **parse_options(config.option, config.model)) if plan.tensor > 1 else subject.bundle
    model: nn.Module = whole.layers
    model.load_state_dict(state, assign=True)
    model.eval()
    return sample(model, b"The ", config.sample, seed=config.updates.seed, context=context)
