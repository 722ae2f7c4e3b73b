"""The display of a training run: the plan, a progress line, measured next to predicted figures."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from pipefit.cli.answer import printable
from pipefit.cli.heartbeat import Heartbeat, gap_s
from pipefit.run.observer import Observer
from pipefit.timeline.compare import notable
from pipefit.units import columns, counted, format_bytes, format_count, format_seconds


class Watcher(Heartbeat, Observer):
    """Shows a run to people, on rank 0: a progress line in a terminal, plain lines in a file; never silent for long.

    Args:
        num_steps: of the whole run; 0: `begins` gives it.
        batch: samples per step.
        stream: None: standard output.
    """

    def __init__(self, num_steps: int, batch: int, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stdout)
        self._num_steps = num_steps
        self._batch = batch
        self._tokens = 0
        self._flop: Any = None
        self._first = 0
        self._shown_s = 0.0
        # Of the line that moves.
        self._width = 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._end_line()

    def begins(self, config: Any) -> None:
        """Notes the number of steps, and prints it where the user gave epochs."""
        self._num_steps = config.steps
        if config.epochs:
            self._print(f"{counted(config.epochs, 'epoch')}: {counted(config.steps, 'step')}")

    def says(self, text: str) -> None:
        """Prints a line."""
        self._print(text)

    def planned(self, plan: Any, profile: Any, bundle: Any, source: Any) -> None:
        """Prints the plan, without the candidates that lost."""
        from msgspec.structs import replace

        from pipefit.planner.explain import explain

        self._tokens = source.tokens_per_sample
        self._print(
            f"{bundle.name}: {len(bundle.layers)} layers, {bundle.num_parameters:,} parameters; data: {source.name}"
        )
        self._print(explain(replace(plan, candidates=()), profile))

    def counted(self, flop: Any) -> None:
        """Takes the FLOP from which MFU is computed, and prints their convention."""
        self._flop = flop
        if flop is not None:
            self._print(f"MFU: {flop.convention}")

    def step(self, record: Any) -> None:
        """Updates the line, at most ten times a second; steps count from 1, or from the end of an earlier run."""
        step = record.step
        seconds = record.seconds
        self._first = self._first or step
        is_last = step >= self._num_steps
        if is_last:
            self.doing("ending the training", is_named=True)
        else:
            self.doing(f"step {step + 1}", is_named=True)
        waited_s = seconds - self._shown_s
        is_moving = self._stream.isatty()
        if is_moving:
            is_due = waited_s >= 0.1
        else:
            is_due = step % max(self._num_steps // 10, 1) == 0 or waited_s >= gap_s(seconds)
        if not (is_due or is_last):
            return
        self._shown_s = seconds
        line = printable("  ".join(self._parts(record, is_last)))
        if not is_moving:
            self._print(line)
            return
        self._write(f"\r{line:<{self._width}}")
        self._width = len(line)
        if is_last:
            self._end_line()
        self._said_s = time.monotonic()

    def _parts(self, record: Any, is_last: bool) -> list[str]:
        done = record.step - self._first + 1
        rate = 0.0
        if record.seconds:
            rate = done * self._batch / record.seconds
        parts = [f"step {record.step}/{self._num_steps}", f"loss {record.loss:.4f}"]
        parts += [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        parts.append(f"{rate:.1f} samples/s")
        if self._tokens:
            parts.append(f"{format_count(rate * self._tokens)} tokens/s")
        memory = [format_bytes(size) for size in record.memory_bytes if size]
        if memory:
            parts += [f"bubble {record.bubble:.0%}", "memory " + " + ".join(memory)]
        if self._flop is not None:
            parts.append(_mfu(self._flop.mfu(rate)))
        if not is_last:
            left_s = record.seconds / done * (self._num_steps - record.step)
            parts.append(f"{format_seconds(left_s)} left")
        return parts

    def _end_line(self) -> None:
        if self._width:
            self._write("\n")
            self._width = 0

    def _print(self, text: str) -> None:
        self._end_line()
        super()._print(text)


def _mfu(share: float) -> str:
    if share > 1:
        return "MFU unknown: the machine was busy while its speed was measured"
    return f"MFU {share:.0%}"


def report(result: Any) -> str:
    """The end of a run: its figures, measured next to predicted, faults, a sample, and the paths of its files."""
    from pipefit.runtime.faults import GREW, MOVED, events_of

    lines = [*_losses(result), *result.notes]
    num_ranks = len(result.utilisation)
    num_processes = len(result.peak_memory_bytes)
    if result.rows:
        title = "measured next to predicted"
        if num_processes < num_ranks:
            title += " (the ranks alternated in this one process; the prediction is for a process each)"
        lines += ["", title, *columns(_compared(result.rows))]
    who = "rank"
    if num_processes > num_ranks:
        who = "process"
    sent, inside = result.traffic
    lines += ["", "busy    " + _each("rank", [f"{share:.0%}" for share in result.utilisation])]
    lines.append("memory  " + _each(who, _sizes(result.peak_memory_bytes)))
    if result.held_bytes:
        lines.append("tensors " + _held(result))
    if any(sent):
        lines.append(f"sent    {_each(who, _sizes(sent))} in a pass")
    if any(inside):
        lines.append("inside  " + _each(who, _sizes(inside)))
    for event in events_of(result.faults):
        what = "fault"
        if event.kind in (MOVED, GREW):
            what = event.kind
        lines += ["", f"{what}: {event.what}", f"  {event.done}"]
    for sample in result.samples:
        lines += ["", "from the held-out data:", *columns(_sampled(sample))]
    if result.paths:
        lines += ["", *columns(list(result.paths.items()))]
    return "\n".join(lines)


def _losses(result: Any) -> list[str]:
    """The speed of a run, and its losses."""
    speed = f"{result.samples_per_s:.1f} samples/s"
    if result.tokens_per_s:
        speed += f", {format_count(result.tokens_per_s)} tokens/s"
    took = format_seconds(result.seconds)
    lines = [f"trained {len(result.losses)} steps in {took}: {speed}, bubble {result.bubble:.1%}"]
    if any(result.compile_s):
        lines.append(f"layers compiled in {format_seconds(max(result.compile_s))}")
    if result.losses:
        lines.append(f"loss {result.losses[0]:.4f} → {result.losses[-1]:.4f}")
    if result.baseline:
        name, loss = result.baseline
        lines[-1] += f"   ({name}: {loss:.4f})"
    if result.held_out_loss is not None:
        lines.append(_held_out(result))
    return lines


def _held_out(result: Any) -> str:
    after = result.held_out_loss
    before = result.held_out_before
    line = f"held-out loss {after:.4f}"
    if before is not None:
        line = f"held-out loss {before:.4f} → {after:.4f}"
    if result.held_out_accuracy is not None:
        line += f", accuracy {result.held_out_accuracy:.1%}"
    for name, value in result.held_out_metrics.items():
        line += f", {name} {value:.4g}"
    if before is not None:
        line += f"   (perplexity {_perplexity(before)} → {_perplexity(after)})"
    return line


def _perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.4g}"


def _sampled(sample: Any) -> list[tuple[str, str]]:
    """Prompt, target and answer, each with the lines after its first one below it."""
    rows = []
    for name in ("prompt", "target", "answer"):
        first, *others = printable(getattr(sample, name)).split("\n")
        rows.append((name, first))
        rows += [("", line) for line in others]
    return rows


def _each(who: str, figures: Sequence[str]) -> str:
    return "  ".join(f"{who} {number}: {figure}" for number, figure in enumerate(figures))


def _sizes(figures: Sequence[float]) -> list[str]:
    return list(map(format_bytes, figures))


def _held(result: Any) -> str:
    """Peak bytes of tensors of each process, next to the prediction for its rank."""
    figures = _sizes(result.held_bytes)
    num_ranks = len(result.utilisation)
    width = max(len(figures) // max(num_ranks, 1), 1)  # tensor-parallel processes share a rank
    if result.predicted:
        claims = [claim for claim in result.predicted.peak_bytes for _ in range(width)]
        for number, claim in enumerate(claims[: len(figures)]):
            figures[number] += f" of {format_bytes(claim)} predicted"
    if width > 1:
        return _each("process", figures)
    return _each("rank", figures)


_WAITING = ("load", "send", "recv", "reduce", "drop")
"""Rows that mostly contain waits for others, which the timelines show better."""


def _compared(rows: Any) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("", "predicted", "measured", "error")]
    for row in notable(rows):
        if row.name.split()[0] in _WAITING:
            continue
        if row.name == "bubble":
            error = f"{100 * row.error:+.1f} points"
            table.append((row.name, f"{row.predicted:.1%}", f"{row.measured:.1%}", error))
        elif row.predicted and row.measured:
            times = map(format_seconds, (row.predicted, row.measured))
            table.append((row.name, *times, f"{row.error:+.1%}"))
    return table
