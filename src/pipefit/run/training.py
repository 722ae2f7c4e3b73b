"""A whole run: model, data, profile, plan, training, evaluation, and everything it leaves in its folder."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from pipefit.calibrate.prediction import costs_on_ranks, prediction_of
from pipefit.data import sample
from pipefit.errors import PipefitError, PlanError
from pipefit.ir import text as program_text
from pipefit.models import ModelBundle, build, parse_options
from pipefit.parallel import widths_of
from pipefit.pipeline.assemble import let_go
from pipefit.pipeline.capped import AUTO
from pipefit.pipeline.live import Live, Rated, rated
from pipefit.pipeline.peak_memory import held_memory_bytes, peak_memory_bytes
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.setup import default_device
from pipefit.pipeline.sharding import with_sharding
from pipefit.pipeline.traffic import Traffic, traffic
from pipefit.planner import by_hand, ranks_of
from pipefit.planner import plan as plan_for
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.links import links_of
from pipefit.run.bundle import bundle_of
from pipefit.run.config import RunConfig
from pipefit.run.metrics import METRICS, Metrics
from pipefit.run.optimizers import STATE_PER_WEIGHT, make_optimizer, warmed_cosine
from pipefit.run.sources import Source, example_of, source_of
from pipefit.run.spilled_run import capped, going_on, rates_of, tiers_of
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session, current
from pipefit.schedules import shape_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Prediction, Profile, Topology
from pipefit.spec.files import write_atomically, write_json
from pipefit.stage.split import named_layers
from pipefit.timeline import Timeline
from pipefit.timeline.compare import Row, compare

__all__ = ["Observer", "RunResult", "run"]

_CHECKPOINTS = "checkpoints"
_COUNTS = (2, 4, 8, 16)
"""Micro-batches per update that a run with the schedule "auto" chooses from."""


class Observer(Protocol):
    """Who watches a run; the command line's shows it to people. Only rank 0 has one that does anything."""

    def planned(self, plan: Plan, profile: Profile, bundle: ModelBundle, source: Source) -> None:
        """The plan stands; training begins."""

    def stepped(self, step: int, loss: float, seconds: float, live: Live | None = None) -> None:
        """A step's loss is known, `seconds` after training began; `live` tells of the ranks in its pass.

        Steps count from 1, over all runs that went on from each other.
        """

    def rated(self, rated: Rated | None) -> None:
        """What the model needs and the devices can; None: it is not known."""


@dataclass
class RunResult:
    """What a run gave; the same on every rank but for paths and rows, which rank 0 has."""

    losses: list[float]
    seconds: float
    samples_per_s: float
    tokens_per_s: float
    baseline: tuple[str, float] | None
    held_out_loss: float | None
    held_out_accuracy: float | None
    predicted: Prediction | None
    measured_period_s: float
    bubble: float
    utilisation: list[float]
    peak_memory_bytes: list[float]
    traffic: Traffic
    held_bytes: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    text: str = ""
    paths: dict[str, str] = field(default_factory=dict)


def run(config: RunConfig, observer: Observer) -> RunResult:
    """Runs on this rank; every rank of the run calls it alike.

    Raises:
        PipefitError: something in the configuration does not fit; nothing has been trained.
    """
    session = current()
    config, resumed = going_on(config, session.rank)
    spill = tiers_of(config, resumed is not None)
    torch.manual_seed(config.seed)
    options = parse_options(config.options, config.model)
    bundle = bundle_of(config.model, options, config.seed, bool(config.device_memory))
    source = source_of(config, bundle)
    optimizer = make_optimizer(config.optimizer, config.lr)
    example = example_of(config, bundle, source)
    plan = resumed or (Plan.load(config.plan) if config.plan else None)
    layers = named_layers(bundle.layers)
    sizes = _sizes(config, plan, example)
    if config.device_memory:
        plan, profile, topology = capped(config, layers, optimizer, example, bundle.loss)
        plan = resumed or plan
    else:
        profile = agreed_profile(
            layers, example, sizes, session, loss=bundle.loss, optimizer=optimizer, clips=bool(config.clip)
        )
        topology = links_of(session, plan.num_processes if plan else config.ranks)
        if session.rank == 0:
            observer.rated(rated(layers, example, bundle.loss, config.ranks, device=config.device))
    plan = with_sharding(plan or _plan(config, session, bundle, profile, topology), config.shard_optimizer)
    profile = profile.at(largest_part(example[0], plan.num_microbatches))
    if (spill or plan.spill) is not None and not topology.tiers:
        device = torch.device(config.device) if config.device else default_device()
        num_sharing = topology.tier_shares(plan.placement.num_ranks)
        topology = msgspec.structs.replace(topology, tiers=(rates_of(config, device, num_sharing),))
    cost = costs_on_ranks(
        plan,
        profile,
        topology,
        session,
        layers,
        example,
        loss=bundle.loss,
        optimizer=optimizer,
        state_per_weight=STATE_PER_WEIGHT[config.optimizer],
        clips=bool(config.clip),
    )
    pipe = Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=optimizer,
        scheduler=warmed_cosine(config.warmup, config.steps),
        plan=plan,
        clip_norm=config.clip or None,
        precision=config.precision,
        loss_scale=config.loss_scale or None,
        seed=config.seed,
        device=config.device or None,
        spill=spill,
    )
    forecast = _forecast(pipe, cost)
    foretold = prediction_of(plan, forecast, config.batch)
    if config.device_memory and plan.prediction is not None:
        # What was held against the cap, to the byte.
        foretold = msgspec.structs.replace(foretold, peak_bytes=plan.prediction.peak_bytes)
    plan = msgspec.structs.replace(plan, prediction=foretold)
    observer.planned(plan, profile, bundle, source)
    if resumed is not None:
        source.resume(pipe.noted.get("data", {}))
    elif config.resume:
        _resume(pipe, config, source)
    pipe.notes = lambda: {"data": source.state()}
    pipe.tells_live = True
    losses, seconds = _train(pipe, config, source, observer)
    measured = pipe.timeline(last=8 if pipe.schedule.is_synchronous else 1)
    judged = _judge(pipe, source)
    moved = traffic(session, pipe.history.moved_bytes)
    result = _result(config, source, plan, losses, seconds, measured, judged, peak_memory_bytes(session), moved)
    result.held_bytes = held_memory_bytes(session, pipe.held_bytes)
    _leave(
        pipe,
        config,
        bundle,
        source,
        result,
        profile,
        plan,
        simulate(measured.program, cost, repeats=measured.num_repeats),
        measured,
    )
    let_go(pipe.workers, pipe.num_updates >= config.steps)
    return result


def _sizes(config: RunConfig, plan: Plan | None, example: tuple[Any, Any]) -> list[int]:
    """The micro-batch sizes to measure: that of the run, or those to choose from."""
    if plan is None and config.schedule == AUTO:
        counts = [count for count in _COUNTS if count <= config.batch]
        return list(dict.fromkeys(largest_part(example[0], count) for count in reversed(counts)))
    return [largest_part(example[0], plan.num_microbatches if plan else config.microbatches)]


def _plan(config: RunConfig, session: Session, bundle: ModelBundle, profile: Profile, topology: Topology) -> Plan:
    if config.schedule == AUTO:
        return plan_for(
            profile,
            topology,
            global_batch=config.batch,
            microbatch_sizes=[size for size in (profile.microbatch_size, *_others(profile)) if not config.batch % size],
            state_per_weight=STATE_PER_WEIGHT[config.optimizer],
            executable=True,
            tensors=widths_of([layer.module for layer in named_layers(bundle.layers)], session.num_ranks),
            sharded=True if config.shard_optimizer else None,
        )
    return by_hand(
        len(named_layers(bundle.layers)),
        num_ranks=ranks_of(
            session.num_ranks if session.is_distributed else config.ranks, config.tensor, config.data_parallel
        ),
        schedule=config.schedule,
        num_microbatches=config.microbatches,
        num_chunks=config.chunks,
        stages=config.stages or None,
        replicas=_replicas(config),
        recompute=config.recompute,
        tensor=config.tensor,
        sequence_parallel=config.sequence_parallel,
        scatter_gather=not config.whole_messages,
        sharded_optimizer=config.shard_optimizer,
        profile=profile,
        model=bundle.name,
    )


def _replicas(config: RunConfig) -> tuple[int, ...]:
    if config.data_parallel == 1:
        return config.replicas
    if config.replicas:
        raise PlanError("give replicas of each stage or data_parallel copies of the whole pipeline, not both")
    return (config.data_parallel,)


def _others(profile: Profile) -> list[int]:
    return [other.microbatch_size for other in profile.others]


def _forecast(pipe: Pipeline, cost: Any) -> Timeline:
    """The steady state: several passes of a synchronous program, a long segment of an asynchronous one."""
    if pipe.schedule.is_synchronous:
        return simulate(pipe.program, cost, repeats=4)
    steps = max(4, -(-32 // pipe.plan.num_microbatches))
    return simulate(pipe.schedule(shape_of(pipe.plan, num_steps=steps)), cost)


def _resume(pipe: Pipeline, config: RunConfig, source: Source) -> None:
    """Goes on from a run's folder, or from the folder of its checkpoints or of one of them."""
    inside = Path(config.resume) / _CHECKPOINTS
    source.resume(pipe.load(inside if inside.is_dir() else config.resume).extra.get("data", {}))
    if pipe.num_updates >= config.steps:
        raise PipefitError(
            f"{config.resume} has done {pipe.num_updates} steps, and --steps {config.steps} counts them all: "
            f"ask for more than {pipe.num_updates}"
        )


def _train(pipe: Pipeline, config: RunConfig, source: Source, observer: Observer) -> tuple[list[float], float]:
    """Trains in segments between checkpoints."""
    losses: list[float] = []
    began = time.perf_counter()
    batches = source.endless()
    size = config.checkpoint_every or config.steps
    done = pipe.num_updates
    folder = Path(config.output) if config.output and pipe.rank == 0 else None
    with contextlib.closing(Metrics(folder, done)) as metrics:
        while done < config.steps:
            count = min(size, config.steps - done)

            def shown(step: int, loss: float, before: int = done) -> None:
                metrics.add(before + step, loss)
                observer.stepped(before + step, loss, time.perf_counter() - began, pipe.live)

            losses += pipe.fit(batches, steps=count, on_step=shown)
            done += count
            if config.checkpoint_every and config.output and done < config.steps:
                pipe.save(_checkpoints(config), extra={"data": source.state()})
    return losses, time.perf_counter() - began


def _checkpoints(config: RunConfig) -> str:
    return str(Path(config.output) / _CHECKPOINTS)


def _judge(pipe: Pipeline, source: Source) -> tuple[float | None, float | None]:
    if not source.held_out:
        return None, None
    if source.counts_hits:
        judged = pipe.evaluate(source.held_out, lambda output, y: (output.argmax(1) == y).float().mean().item())
        return judged
    return pipe.evaluate(source.held_out), None


def _result(
    config: RunConfig,
    source: Source,
    plan: Plan,
    losses: list[float],
    seconds: float,
    measured: Timeline,
    judged: tuple[float | None, float | None],
    memory: list[float],
    moved: Traffic,
) -> RunResult:
    rate = len(losses) * config.batch / seconds if seconds else 0.0
    return RunResult(
        losses=losses,
        seconds=seconds,
        samples_per_s=rate,
        tokens_per_s=rate * source.tokens_per_sample,
        baseline=source.baseline,
        held_out_loss=judged[0],
        held_out_accuracy=judged[1],
        predicted=plan.prediction,
        measured_period_s=measured.period_s,
        bubble=measured.bubble_fraction,
        utilisation=[measured.utilisation(rank) for rank in range(len(measured.program.ranks))],
        peak_memory_bytes=memory,
        traffic=moved,
    )


def _leave(
    pipe: Pipeline,
    config: RunConfig,
    bundle: ModelBundle,
    source: Source,
    result: RunResult,
    profile: Profile,
    plan: Plan,
    forecast: Timeline,
    measured: Timeline,
) -> None:
    """Writes what the run leaves; every rank takes part in gathering, rank 0 writes."""
    # What lives on a tier may be more than the host can hold.
    state = {} if plan.spill else pipe.state_dict()
    if config.output:
        pipe.save(_checkpoints(config), extra={"data": source.state()})
    if pipe.rank:
        return
    result.rows = compare(forecast, measured)
    if source.tokens_per_sample and config.sample and state:
        # The layers of a tensor-parallel run are parts of the model's.
        whole = build(config.model, **parse_options(config.options, config.model)) if plan.tensor > 1 else bundle
        result.text = _generate(whole, state, config, source)
    if not config.output:
        return
    folder = Path(config.output)
    plan.save(folder / "plan.json")
    profile.save(folder / "profile.json")
    program_text.save(pipe.program, folder / "program.pipe")
    forecast.save_trace(folder / "predicted.trace.json")
    measured.save_trace(folder / "measured.trace.json")
    result.paths = _pictures(folder, forecast, measured)
    result.paths |= {"checkpoint": _checkpoints(config), "metrics": str(folder / METRICS)}
    write_json(folder / "run.json", {"format": "pipefit.run/1", "config": asdict(config), "result": _plain(result)})


def _pictures(folder: Path, forecast: Timeline, measured: Timeline) -> dict[str, str]:
    from pipefit.draw import save
    from pipefit.draw.page import html

    save(measured, folder / "measured.svg")
    save(forecast, folder / "predicted.svg")
    write_atomically(folder / "timeline.html", html({"measured": measured, "predicted": forecast}))
    names = {"picture": "measured.svg", "page": "timeline.html", "trace": "measured.trace.json"}
    return {name: str(folder / file) for name, file in names.items()}


def _plain(result: RunResult) -> dict[str, Any]:
    """The result as JSON data. The error of a row follows from its figures, and may be infinite, which JSON has not."""
    data: dict[str, Any] = msgspec.to_builtins(asdict(result))
    data["rows"] = [{key: value for key, value in row._asdict().items() if key != "error"} for row in result.rows]
    return data


def _generate(bundle: ModelBundle, state: dict[str, torch.Tensor], config: RunConfig, source: Source) -> str:
    """A sample of the trained language model, made by the whole model on this rank."""
    model: nn.Module = bundle.layers
    model.load_state_dict(state, assign=True)
    model.eval()
    return sample(model, b"The ", config.sample, seed=config.seed, context=source.tokens_per_sample)
