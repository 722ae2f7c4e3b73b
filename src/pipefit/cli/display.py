"""The display of a training run: the plan, a progress line, measured next to predicted figures."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
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
        self._last_s = 0.0
        self._width = 0
        self._first = 0
        self._flop: Any = None

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._width:
            self._write("\n")

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
        import msgspec

        from pipefit.planner.explain import explain

        self._tokens = source.tokens_per_sample
        self._print(
            f"{bundle.name}: {len(bundle.layers)} layers, {bundle.num_parameters:,} parameters; data: {source.name}"
        )
        self._print(explain(msgspec.structs.replace(plan, candidates=()), profile))

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
        moving = self._stream.isatty()
        last = step >= self._num_steps
        self.doing("ending the training" if last else f"step {step + 1}", is_named=True)
        is_tenth = step % max(self._num_steps // 10, 1) == 0
        if moving:
            due = seconds - self._last_s >= 0.1
        else:
            due = is_tenth or seconds - self._last_s >= gap_s(seconds)
        if not (due or last):
            return
        self._last_s = seconds
        done = step - self._first + 1
        if seconds:
            rate = done * self._batch / seconds
        else:
            rate = 0.0
        parts = [f"step {step}/{self._num_steps}", f"loss {record.loss:.4f}"]
        parts += [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        parts += [f"{rate:.1f} samples/s"]
        if self._tokens:
            parts.append(f"{format_count(rate * self._tokens)} tokens/s")
        parts += _of_ranks(record)
        if self._flop is not None:
            parts.append(_mfu(self._flop.mfu(rate)))
        if not last:
            parts.append(f"{format_seconds(seconds / done * (self._num_steps - step))} left")
        line = printable("  ".join(parts))
        if moving:
            self._write(f"\r{line:<{self._width}}" + ("\n" if last else ""))
            if last:
                self._width = 0
            else:
                self._width = len(line)
            self._said_s = time.monotonic()
        else:
            self._print(line)

    def _print(self, text: str) -> None:
        super()._print("\n" * bool(self._width) + text)
        self._width = 0


def _mfu(share: float) -> str:
    if share > 1:
        return "MFU unknown: the machine was busy while its speed was measured"
    return f"MFU {share:.0%}"


def _of_ranks(record: Any) -> list[str]:
    """The bubble of the last step, and the memory of each process."""
    memory = [format_bytes(size) for size in record.memory_bytes if size]
    if memory:
        return [f"bubble {record.bubble:.0%}", "memory " + " + ".join(memory)]
    return []


def _perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.4g}"


def report(result: Any) -> str:
    """The end of a run: its figures, measured next to predicted, faults, a sample, and the paths of its files."""
    from pipefit.runtime.faults import described

    lines = [f"trained {len(result.losses)} steps in {format_seconds(result.seconds)}: " + _rates(result)]
    if any(result.compile_s):
        lines.append(f"layers compiled in {format_seconds(max(result.compile_s))}")
    if result.losses:
        lines.append(f"loss {result.losses[0]:.4f} → {result.losses[-1]:.4f}")
    if result.baseline:
        lines[-1] += f"   ({result.baseline[0]}: {result.baseline[1]:.4f})"
    if result.held_out_loss is not None:
        if result.held_out_accuracy is not None:
            hits = f", accuracy {result.held_out_accuracy:.1%}"
        else:
            hits = ""
        if result.held_out_before is None:
            before = ""
        else:
            before = f"{result.held_out_before:.4f} → "
        more = "".join(f", {name} {value:.4g}" for name, value in result.held_out_metrics.items())
        lines.append(f"held-out loss {before}{result.held_out_loss:.4f}{hits}{more}")
        if result.held_out_before is not None:
            lines[-1] += f"   (perplexity {_perplexity(result.held_out_before)} → {_perplexity(result.held_out_loss)})"
    lines += result.notes
    if result.rows:
        alone = len(result.peak_memory_bytes) < len(result.utilisation)
        turns = " (the ranks alternated in this one process; the prediction is for a process each)" if alone else ""
        lines += ["", f"measured next to predicted{turns}", *columns(_compared(result.rows))]
    if len(result.peak_memory_bytes) > len(result.utilisation):
        who = "process"
    else:
        who = "rank"
    lines += ["", "busy    " + _each("rank", (f"{share:.0%}" for share in result.utilisation))]
    lines += ["memory  " + _each(who, map(format_bytes, result.peak_memory_bytes))]
    if result.held_bytes:
        lines += ["tensors " + _held(result)]
    sent, inside = result.traffic
    if any(sent):
        lines += [f"sent    {_each(who, map(format_bytes, sent))} in a pass"]
    if any(inside):
        lines += ["inside  " + _each(who, map(format_bytes, inside))]
    for fault, done in described(result.faults):
        lines += ["", f"fault: {fault}", f"  {done}"]
    for sample in result.samples:
        lines += ["", "from the held-out data:", *columns(_sampled(sample))]
    if result.paths:
        width = max(map(len, result.paths))
        lines += ["", *(f"{name:<{width}}  {path}" for name, path in result.paths.items())]
    return "\n".join(lines)


def _sampled(sample: Any) -> list[tuple[str, str]]:
    """Prompt, target and answer, each with the lines after its first one below it."""
    rows = []
    for name, text in (("prompt", sample.prompt), ("target", sample.target), ("answer", sample.answer)):
        first, *others = printable(text).split("\n")
        rows += [(name, first), *(("", line) for line in others)]
    return rows


def _each(who: str, figures: Iterable[str]) -> str:
    return "  ".join(f"{who} {rank}: {figure}" for rank, figure in enumerate(figures))


def _held(result: Any) -> str:
    """Peak bytes of tensors of each process, next to the prediction for its rank."""
    if result.predicted:
        claims = result.predicted.peak_bytes
    else:
        claims = ()
    ranks = len(result.utilisation)
    wide = max(len(result.held_bytes) // ranks, 1) if ranks else 1  # tensor-parallel processes share a rank
    said = [f" of {format_bytes(claim)} predicted" for claim in claims for _ in range(wide)]
    said += [""] * len(result.held_bytes)
    figures = (f"{format_bytes(held)}{more}" for held, more in zip(result.held_bytes, said, strict=False))
    return _each("process" if wide > 1 else "rank", figures)


def _rates(result: Any) -> str:
    if result.tokens_per_s:
        tokens = f", {format_count(result.tokens_per_s)} tokens/s"
    else:
        tokens = ""
    return f"{result.samples_per_s:.1f} samples/s{tokens}, bubble {result.bubble:.1%}"


_WAITING = ("load", "send", "recv", "reduce", "drop")
"""Rows that mostly contain waits for others, which the timelines show better."""


def _compared(rows: Any) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("", "predicted", "measured", "error")]
    for row in notable(rows):
        if row.name.split()[0] in _WAITING:
            continue
        if row.name == "bubble":
            table.append((row.name, f"{row.predicted:.1%}", f"{row.measured:.1%}", f"{100 * row.error:+.1f} points"))
        elif row.predicted and row.measured:
            table.append((row.name, format_seconds(row.predicted), format_seconds(row.measured), f"{row.error:+.1%}"))
    return table
