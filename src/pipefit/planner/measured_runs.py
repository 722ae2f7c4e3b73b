"""Runs that were measured elsewhere, predicted; and the constants of a machine, fitted to such runs.

A run is a line of a CSV file with these columns (more are allowed):

    model        gpt:layers=… or llama:layers=…
    devices      in all
    tensor, depth, chunks, microbatch, batch, recompute (none, stage, layer, selective)
    sharded      what copies share, by the stages of ZeRO: 0 nothing, 1 the optimizer, 3 also weights (FSDP); then a
                 rank may have several chunks at depth 1, of which one at a time is gathered
    seconds      of a step; empty: it ran out of memory
    cut          optional: blocks (equally many in each stage, as Megatron-LM cuts) or weights (stages of equal
                 weights, as DeepSpeed cuts where nothing is said); empty: blocks
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import chain, repeat
from pathlib import Path

import msgspec
import numpy as np

from pipefit.errors import PipefitError, PlanError, ProfileError
from pipefit.planner.candidate import costs_of
from pipefit.planner.computed_profile import transformer_profile
from pipefit.planner.estimate import estimate
from pipefit.planner.machines import of_servers
from pipefit.planner.methods import problem_of
from pipefit.planner.reserved import reserved_bytes, visible_bytes
from pipefit.planner.simulated import simulated
from pipefit.planner.space import Config, groups_fit, positions
from pipefit.planner.transformer import transformer_of
from pipefit.spec import Device, Level, Topology
from pipefit.spec.files import read_text
from pipefit.spec.plan import RECOMPUTE, Shard, recompute_kind

_STEP = 0.05
_ROUNDS = 8
_SLOPED = 2
"""Rounds after which the slopes stay: a factor of a figure changes seconds nearly by a power of it."""
_PRIORS = (0.3, 0.6, 0.1, 0.6, 0.6)
"""How far each of `CONSTANTS` is expected from the figure of a data sheet, as a logarithm: memory differs the least,
links and the host, which launches kernels, the most."""
_NOISE = 0.05
_OUTLIER = 0.1
_RUNS_FOR_EACH = 2


@dataclass(frozen=True)
class MeasuredRun:
    """A run: what was trained how, and what came out.

    Attributes:
        model: as text.
        devices: in all.
        tensor: tensor width.
        depth: ranks of a pipeline.
        chunks: stages on each rank.
        microbatch: samples of a micro-batch.
        batch: samples of a step.
        recompute: what backwards replay.
        shard: what copies share.
        seconds: of a step; None: it ran out of memory.
        place: its file and line, or its folder, for messages.
        cut: what all stages have equally much of, a key of `CUTS`.
    """

    model: str
    devices: int
    tensor: int
    depth: int
    chunks: int
    microbatch: int
    batch: int
    recompute: str
    shard: Shard
    seconds: float | None
    place: str = "a run"
    cut: str = "blocks"

    def question(self) -> MeasuredRun:
        """The run without its result and its place, equal for two measurements of one thing."""
        return replace(self, seconds=None, place="")

    def __str__(self) -> str:
        widths = f"{self.devices} devices, tensor {self.tensor}, depth {self.depth}, micro-batch {self.microbatch}"
        return f"{self.place}: {widths}"


CUTS = {"blocks": "uniform", "weights": "weights"}
"""The partitioner of each cut."""

_SHARDS: dict[str, Shard] = {"0": "none", "1": "optimizer", "3": "weights"}
_KNOWN: dict[str, Collection[str]] = {"recompute": RECOMPUTE, "sharded": _SHARDS, "cut": CUTS}
_NUMBERS = ("devices", "tensor", "depth", "chunks", "microbatch", "batch")


def read_runs(path: Path) -> list[tuple[MeasuredRun, dict[str, str]]]:
    """The runs of a CSV file, each with its whole line.

    Raises:
        ProfileError: a column is missing, a value is malformed, or widths do not fit the devices.
    """
    reader = csv.DictReader(StringIO(read_text(path, ProfileError), newline=""))
    try:
        lines = list(reader)
    except csv.Error as problem:
        raise ProfileError(f"{path}: not CSV: {problem}") from None
    needed = {"model", *_NUMBERS, "recompute", "sharded", "seconds"}
    missing = sorted(needed - set(reader.fieldnames or ()))
    if missing:
        raise ProfileError(f"{path}: expected the columns {', '.join(sorted(needed))}; {', '.join(missing)} missing")
    return [(_run(path, number, line), line) for number, line in enumerate(lines, 2)]


def _run(path: Path, number: int, line: dict[str, str]) -> MeasuredRun:
    where = f"{path.name}, line {number}"
    cut = line.get("cut") or "blocks"
    line = {**line, "cut": cut}
    sizes = {}
    for name in _NUMBERS:
        text = line[name] or ""
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
            got = text[:40]
            raise ProfileError(f"{where}: {name}: expected a whole number from 1 to 999999999, got {got!r}")
        sizes[name] = int(text)
    try:
        seconds = float(line["seconds"]) if line["seconds"] else None
    except ValueError:
        raise ProfileError(f"{where}: seconds: expected a number or nothing, got {line['seconds']!r}") from None
    if seconds is not None and not 1e-9 <= seconds <= 1e9:
        raise ProfileError(f"{where}: seconds: expected a number from 1e-9 to 1e9, got {seconds:g}")
    if sizes["devices"] % (sizes["tensor"] * sizes["depth"]):
        raise ProfileError(
            f"{where}: {sizes['devices']} devices cannot be copies of tensor {sizes['tensor']} × depth {sizes['depth']}"
        )
    for name, known in _KNOWN.items():
        if line.get(name) not in known:
            raise ProfileError(f"{where}: {name}: expected one of {', '.join(known)}, got {line.get(name)!r}")
    shard = _SHARDS[line["sharded"]]
    if sizes["chunks"] > 1 and sizes["depth"] == 1 and shard != "weights":
        raise ProfileError(f"{where}: chunks: expected 1 where the depth is 1, got {sizes['chunks']}")
    try:
        transformer_of(line["model"])
    except ProfileError as problem:
        raise ProfileError(f"{where}: {problem}") from None
    return MeasuredRun(
        line["model"], **sizes, recompute=line["recompute"], shard=shard, seconds=seconds, place=where, cut=cut
    )


@dataclass(frozen=True)
class Expected:
    """The predicted figures of a run.

    Attributes:
        seconds: of a step.
        peak_bytes: the most of a device's tensors at once.
        reserved_bytes: the most memory that a process takes for them.
    """

    seconds: float
    peak_bytes: float
    reserved_bytes: float


def predict(run: MeasuredRun, topology: Topology) -> Expected:
    """Seconds and memory of a run on a machine.

    Args:
        run: what is trained, and how.
        topology: its servers and links; as many servers as the run has.

    Raises:
        PlanError: the run cannot be planned so: its heads or its batch cannot be split evenly, it has fewer layers than
            stages, or its devices do not fill the servers.
    """
    try:
        return _predict(run, _of_size(topology, run))
    except PipefitError as problem:
        raise PlanError(f"{run}: cannot be planned: {problem}") from None


def _predict(run: MeasuredRun, machine: Topology) -> Expected:
    profile = transformer_profile(transformer_of(run.model), run.microbatch, machine.device, topology=machine)
    problem = problem_of(profile, machine, run.batch)
    problem.blocking = True
    copies = run.devices // (run.tensor * run.depth)
    microbatches, rest = divmod(run.batch, run.microbatch * copies)
    if rest:
        raise PlanError(f"{copies} copies cannot share a batch of {run.batch} evenly")
    schedule = "1f1b"
    if run.depth == 1:
        schedule = "data-parallel"
    if run.chunks > 1:
        schedule = "interleaved"
    shard: Shard = "none"
    if copies > 1:
        shard = run.shard
    config = Config(
        schedule,
        copies,
        run.depth,
        run.tensor,
        run.chunks,
        run.microbatch,
        microbatches * copies,
        recompute_kind(run.recompute),
        shard,
        CUTS[run.cut],
    )
    found = estimate(problem, config)
    partition = found.partition
    winner = None
    if partition is not None:
        winner = simulated(problem, found)
    if partition is None or winner is None:
        raise PlanError(found.why or "the schedule does not have this shape")
    _, sizes = costs_of(problem, config, partition)
    standing = [0.0] * run.depth
    for stage, rank in enumerate(positions(config)):
        standing[rank] += sizes.resident_bytes([stage])
        if stage not in sizes.gathered:
            standing[rank] += sizes.weight_bytes[stage] + sizes.wgrad_bytes[stage]
    exchanging = sum(width > 1 for width in (run.tensor, run.depth, copies))
    taken = max(reserved_bytes(*each, exchanging) for each in zip(standing, winner.peak_bytes, strict=True))
    return Expected(winner.period_s, max(winner.peak_bytes), taken)


def _of_size(topology: Topology, run: MeasuredRun) -> Topology:
    """The machine with as many devices as a run has, whose memory has no limit."""
    inner, *others = topology.levels
    width = min(inner.width, run.devices)
    servers, rest = divmod(run.devices, width)
    sized = of_servers(topology, width, servers)
    if rest or (servers > 1 and not others) or not groups_fit(sized, run.tensor):
        raise PlanError(f"servers of {inner.width} devices cannot have {run.devices} in all, in groups of {run.tensor}")
    return msgspec.structs.replace(sized, device=msgspec.structs.replace(topology.device, memory_bytes=1e18))


def fits(expected: Expected, device: Device) -> bool:
    """Returns whether a run fits a device's memory by prediction."""
    return expected.reserved_bytes <= visible_bytes(device)


# ---- a machine, fitted ---------------------------------------------------------------------------------------------

CONSTANTS = (
    "efficiency of products",
    "bandwidth of the innermost links",
    "bandwidth of memory",
    "bandwidth of the other links",
    "time of a kernel",
)
"""The constants of a machine that a fit changes, in this order: the first alone where there are few runs."""


@dataclass(frozen=True)
class Constant:
    """A constant of a machine: its multiple of the figure before, and the interval that holds it with 95 %."""

    name: str
    times: float
    low: float
    high: float


@dataclass(frozen=True)
class FittedMachine:
    """A machine as its runs say.

    Attributes:
        topology: with the fitted constants.
        constants: the fitted ones.
        errors: relative, predicted against measured, of each run by a machine fitted to the others.
    """

    topology: Topology
    constants: tuple[Constant, ...]
    errors: tuple[float, ...]


def fit_machine(runs: Sequence[MeasuredRun], topology: Topology) -> FittedMachine:
    """Fits the constants of a machine to runs, by least squares of relative errors (Gauss and Newton).

    Each constant may differ from the given figure by a factor; without evidence it stays (`_PRIORS`). Runs that are
    far off count less (Huber 1964), so that a bad one does not turn the others.

    A machine fitted to the other runs has the error e/(1 − h) in a run, h the run's leverage (Allen, "The relationship
    between variable selection and data augmentation", 1974). Intervals follow from these errors, or from `_NOISE` where
    they are smaller.

    Args:
        runs: with seconds; at least two for each constant that is fitted, else fewer constants are.
        topology: the machine with figures of data sheets.

    Raises:
        ProfileError: fewer than two runs.
    """
    count = min(len(runs) // _RUNS_FOR_EACH, len(CONSTANTS))
    if len(topology.levels) < 2:
        count = min(count, 3)
    if not count:
        raise ProfileError(f"expected at least {_RUNS_FOR_EACH} measured runs to fit a constant, got {len(runs)}")
    measured = np.array([run.seconds or 0.0 for run in runs])
    if not measured.all():
        raise ProfileError("expected runs with seconds; those that ran out of memory say nothing about speed")

    def errors_at(*points: np.ndarray) -> np.ndarray:
        machines = [_changed(topology, factors) for factors in points]
        # Run by run: its program serves all machines.
        seconds = [[predict(run, machine).seconds for machine in machines] for run in runs]
        return np.log(seconds / measured[:, None]).T

    found = np.zeros(count)
    weight = np.diag((_NOISE / np.array(_PRIORS[:count])) ** 2)
    for turn in range(_ROUNDS):
        further = found + _STEP * np.eye((turn < _SLOPED) * count, count)
        errors, *moved = errors_at(found, *further)
        if moved:
            slopes = (np.stack(moved, axis=1) - errors[:, None]) / _STEP
        trust = 1 / np.maximum(1.0, np.abs(errors - np.median(errors)) / _OUTLIER)
        normal = slopes.T @ (slopes * trust[:, None]) + weight
        change = np.linalg.solve(normal, slopes.T @ (trust * errors) + weight @ found)
        found -= change
        if np.abs(change).max() < 1e-3:
            break
    inverse = np.linalg.inv(normal)
    leverage = trust * np.sum(slopes @ inverse * slopes, axis=1)
    errors = errors_at(found)[0] / (1 - leverage)
    noise = max(np.sqrt(np.mean(errors**2)), _NOISE)
    spread = noise * np.sqrt(np.diag(inverse))
    times = np.exp([found, found - 1.96 * spread, found + 1.96 * spread]).tolist()
    constants = tuple(map(Constant, CONSTANTS, *times))
    return FittedMachine(_changed(topology, found), constants, tuple(np.expm1(errors).tolist()))


def _changed(topology: Topology, factors: np.ndarray) -> Topology:
    """The machine with constants times the exponentials of the factors, in the order of `CONSTANTS`."""
    products, inner, memory, outer, kernel = np.exp(np.pad(factors, (0, len(CONSTANTS) - len(factors)))).tolist()
    device = topology.device
    changed = msgspec.structs.replace(
        device,
        efficiency=device.efficiency * products,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * memory,
        kernel_s=device.kernel_s * kernel,
    )
    levels = map(_faster, topology.levels, chain([inner], repeat(outer)))
    return msgspec.structs.replace(topology, device=changed, levels=tuple(levels))


def _faster(level: Level, times: float) -> Level:
    return msgspec.structs.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * times)
