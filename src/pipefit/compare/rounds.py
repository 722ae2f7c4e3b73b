"""Measures every cell in the same processes; each repetition measures all cells before the next one begins.

The first gives a row of every cell; medians over further ones are better. Other programs on the machine then affect all
cells alike, and also the layers, which are profiled in each repetition.
Ranks wait at a barrier before and after each measurement; an idle rank waits there, blocked in the kernel. A core that
was idle is slow at first, so some updates run before those that count.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pipefit.calibrate.overhead import runtime_costs
from pipefit.compare.cells import Cell, Task, build_cells, make_task
from pipefit.compare.comparison import Comparison, Refusal, Row
from pipefit.compare.settings import CompareConfig
from pipefit.compare.strategies import ScheduledPipeline
from pipefit.cost import RuntimeCosts, of_plan
from pipefit.errors import PipefitError
from pipefit.models.examples import Batch
from pipefit.profiling.agreed import agreed_profile, median_profile
from pipefit.profiling.clock import half_interquartile_range
from pipefit.profiling.links import links_of
from pipefit.run.observer import Say
from pipefit.run.optimizers import STATE_PER_WEIGHT
from pipefit.runtime.collectives import exchange
from pipefit.runtime.malloc import trim
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import current
from pipefit.simulate import simulate
from pipefit.spec import Topology
from pipefit.units import counted

_KEPT_LOSSES = 4
_WARM_UP_S = 0.4


@dataclass(frozen=True)
class _Time:
    """The time of a comparison, the same on every rank.

    Attributes:
        limit_s: seconds of the comparison; 0: no limit.
        asked: a file; once it exists, the user has asked for the end.
        began_s: its beginning on the clock of this machine, `time.monotonic`.
    """

    limit_s: float
    asked: Path | None
    began_s: float

    def is_over(self, more_s: float) -> bool:
        """Returns whether further seconds go beyond the limit, or the user has asked for the end."""
        late = bool(self.limit_s) and time.monotonic() - self.began_s + more_s > self.limit_s
        return any(_of_ranks(float(late or self.is_asked)))

    @property
    def is_asked(self) -> bool:
        """Whether the user has asked for the end."""
        return self.asked is not None and self.asked.exists()


def compare_on_ranks(
    config: CompareConfig, say: Say = lambda line: None, asked: Path | None = None, began_s: float | None = None
) -> Comparison:
    """Compares on this rank; every rank of the run makes the same call and gets the same result.

    Args:
        config: the settings.
        say: takes a line about the progress; it may do nothing on other ranks than 0.
        asked: a file; once it exists, the comparison ends with the rows that it has.
        began_s: its beginning on the clock `time.monotonic`, from which the limit counts; None: now.

    Raises:
        PipefitError: an unknown strategy or model, or nothing that can be measured.
    """
    session = current()
    left = _Time(60 * config.limit, asked, began_s or time.monotonic())
    say("profiling the model at every micro-batch size")
    task = make_task(config, session)
    say("measuring the links, and what the ranks add to each instruction")
    topology = links_of(session, session.num_ranks)
    runtime = runtime_costs(session)
    cells, refused = build_cells(task, say)
    if not cells:
        raise PipefitError("nothing can be measured: " + "; ".join(item.reason for item in refused[:3]))
    # Excluded from garbage collection: traversing these objects would take longer than a measurement.
    gc.collect()
    gc.freeze()
    late = _first_rows(cells, task, say, left)
    del cells[len(cells) - len(late) :]
    _repeat(cells, task, say, left)
    gc.unfreeze()
    updates = min(len(cell.losses) for cell in cells)
    rows = []
    for cell in cells:
        predicted = _predicted(cell, task, topology, runtime)
        rows.append(_row(cell, predicted, updates, config))
    return Comparison(
        model=task.description,
        data=task.source,
        num_ranks=session.num_ranks,
        batch=config.batch,
        samples=config.batch * updates,
        repeats=len(cells[0].seconds),
        layer_counts=tuple(len(stage.layers) for stage in task.partition.stages),
        rows=rows,
        refused=refused + late,
    ).with_speedups()


def _first_rows(cells: list[Cell], task: Task, say: Say, left: _Time) -> list[Refusal]:
    """Measures each cell once, with its memory, and says so; returns the cells for which there was no time."""
    longest_s = 0.0
    for index, cell in enumerate(cells):
        began = time.monotonic()
        if index and left.is_over(longest_s):
            if left.is_asked:
                why = "the comparison was interrupted"
            else:
                why = f"no time within --limit {task.config.limit:g}"
            return [Refusal(late.strategy, late.num_microbatches, why) for late in cells[index:]]
        say(f"measuring: {index + 1} of {len(cells)}, {cell.name}")
        for keep in (False, True):
            _measure(cell, task.batches, keep)
        cell.rise = _rise_bytes(partial(cell.trainer.train, task.batches[: cell.steps]))
        rate = task.config.batch / cell.seconds[0]
        say(f"measured {index + 1:2} of {len(cells)}  {cell.name:<20}  {rate:8.1f} samples/s")
        longest_s = max(longest_s, time.monotonic() - began)
    return []


def _repeat(cells: list[Cell], task: Task, say: Say, left: _Time) -> None:
    """Measures all cells again, as often as the settings and the time allow, and the layers each time."""
    expected_s = sum((cell.warm_up + cell.steps) * cell.seconds[0] for cell in cells)
    for repetition in range(2, task.config.repeats + 1):
        if left.is_over(expected_s):
            say("interrupted" if left.is_asked else f"no time for another repetition after {repetition - 1}")
            break
        began = time.monotonic()
        say(f"repetition {repetition} of {task.config.repeats}, {counted(len(cells), 'cell')}")
        for index, cell in enumerate(cells):
            say(f"measuring: repetition {repetition}, {index + 1} of {len(cells)}, {cell.name}")
            _measure(cell, task.batches, keep=True)
        for num, profiles in task.profiles.items():
            size = largest_part(task.batches[0][0], num)
            profiles.append(agreed_profile(task.work, [size], current(), repeats=2, warmup=1))
        expected_s = time.monotonic() - began


def _measure(cell: Cell, batches: list[Batch], keep: bool) -> None:
    """Measures a cell once: a few updates between two barriers; the first time sets the number of warm-up updates."""
    gc.collect()
    gc.disable()
    _train(cell, batches, cell.warm_up)
    seconds, used = _train(cell, batches, cell.steps)
    gc.enable()
    if not keep:
        longest_s = max(_of_ranks(seconds))
        cell.warm_up = int(_WARM_UP_S * cell.steps / longest_s)
        return
    cell.seconds.append(seconds / cell.steps)
    if isinstance(cell.trainer, ScheduledPipeline):
        timeline = cell.trainer.timeline(cell.steps)
        cell.busy.append([timeline.busy_s(rank) / seconds for rank in range(current().num_ranks)])
        cell.bubbles.append(timeline.bubble_fraction)
    else:
        cell.busy.append(_of_ranks(used / seconds))


def _train(cell: Cell, batches: list[Batch], steps: int) -> tuple[float, float]:
    """Runs some updates of a cell; returns the seconds between two barriers, and this rank's processor seconds."""
    done = len(cell.losses)
    mine = [batches[(done + index) % len(batches)] for index in range(steps)]
    dist.barrier()
    # The calling thread does the work of a rank on a CPU.
    began = time.perf_counter()
    used = time.thread_time()
    losses: Sequence[float] = ()
    if mine:
        losses = cell.trainer.train(mine)
    used = time.thread_time() - used
    dist.barrier()
    seconds = time.perf_counter() - began
    if current().rank == 0:
        cell.losses += losses
    else:
        cell.losses += [0.0] * len(mine)
    return seconds, used


def _rise_bytes(work: Callable[[], object]) -> float | None:
    """Bytes by which the memory in use rises while `work` runs; None where the system does not report it.

    The kernel's high-water mark of the resident set is reset first, and the allocator's free memory is returned to the
    system, so that memory left by earlier work counts again.
    """
    gc.collect()
    trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
    except (OSError, StopIteration):
        work()
        return None
    work()
    return max(_status_bytes("VmHWM") - before, 0.0)


def _status_bytes(field: str) -> float:
    """A field of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _of_ranks(value: float) -> list[float]:
    """The number of every rank, on every rank."""
    return exchange(current(), value)


def _predicted(cell: Cell, task: Task, topology: Topology, runtime: RuntimeCosts) -> tuple[float, float | None] | None:
    """Predicted seconds per update and bubble of a cell; None where there is no prediction."""
    if cell.num_microbatches not in task.profiles:
        return None
    profile = median_profile(task.profiles[cell.num_microbatches])
    if cell.strategy in ("accumulate", "one-thread"):
        each_s = sum(layer.total_s for layer in profile.layers) + profile.loss_s
        return each_s * cell.num_microbatches + profile.optimizer_s, None
    if not isinstance(cell.trainer, ScheduledPipeline):
        return None
    state = STATE_PER_WEIGHT[task.config.optimizer]
    cost = of_plan(profile, cell.trainer.plan, topology, state_per_weight=state, runtime=runtime)
    program = cell.trainer.timeline(cell.steps).program
    timeline = simulate(program, cost, repeats=cell.trainer.num_passes(cell.steps))
    return timeline.makespan_s / cell.steps, timeline.bubble_fraction


def _row(
    cell: Cell,
    predicted: tuple[float, float | None] | None,
    updates: int,
    config: CompareConfig,
) -> Row:
    """The figures of a cell, with its loss after some updates; every rank calls it, and those of rank 0 count."""
    rises = _of_ranks(math.nan if cell.rise is None else cell.rise)
    states = _of_ranks(cell.trainer.state_bytes)
    peaks = tuple(rise + state for rise, state in zip(rises, states, strict=True))
    if any(map(math.isnan, peaks)):
        peaks = ()
    bubble = None
    if cell.bubbles:
        bubble = statistics.median(cell.bubbles)
    final_loss = None
    if current().rank == 0:
        final_loss = statistics.mean(cell.losses[:updates][-_KEPT_LOSSES:])
    middle = statistics.median(cell.seconds)
    row = Row(
        strategy=cell.strategy,
        num_microbatches=cell.num_microbatches,
        step_s=middle,
        samples_per_s=config.batch / middle,
        bubble=bubble,
        utilisation=tuple(map(statistics.median, zip(*cell.busy, strict=True))),
        peak_bytes=peaks,
        final_loss=final_loss,
        spread=half_interquartile_range(cell.seconds) / middle,
    )
    if predicted is None:
        return row
    step_s, bubble = predicted
    return replace(row, predicted_step_s=step_s, bubble_predicted=bubble, predicted_over_measured=step_s / middle)
