"""`pipefit compare`: every strategy on this machine, measured in one run."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipefit.cli.answer import Answer
from pipefit.cli.heartbeat import NEXT_S
from pipefit.cli.models import importable
from pipefit.cli.options import Folder, Json, Ranks, verb
from pipefit.compare.settings import WHOLE, CompareConfig
from pipefit.run.observer import Say
from pipefit.units import columns, counted

if TYPE_CHECKING:
    from pipefit.compare.comparison import Comparison, Row


@verb()
def command(
    *,
    settings: CompareConfig,
    ranks: Ranks = 2,
    output: Folder = None,
    json: Json = False,
) -> Answer:
    """Measure every strategy side by side on this machine.

    Example: pipefit compare --model gpt --ranks 2 -o runs/compared

    One process, data parallelism, every schedule, and torch.distributed.pipelining, for several numbers of
    micro-batches. They alternate within one run, so that other programs on the machine affect all alike. The table has
    samples per second, speed-ups, measured and predicted times, memory, and the loss after equal samples. Ctrl-C ends
    it with the rows measured so far.

    Args:
        ranks: Processes, one thread each.
        output: Folder for the figures and the chart.
    """
    began_s = time.monotonic()
    counts = tuple(dict.fromkeys(settings.microbatches))
    settings = replace(settings, model=importable(settings.model), microbatches=counts)
    if not json:
        cells = sum(len(counts) for name in settings.names if name not in WHOLE)
        cells += sum(name in WHOLE for name in settings.names)
        limit = "without a limit"
        if settings.limit:
            limit = f"within {settings.limit:g} minutes"
        _reporter()(f"comparing {counted(cells, 'cell')} {limit}; more: --strategies all, -m 1,2,4,8,16, --limit")
    from pipefit.runtime.launch import launch

    with tempfile.TemporaryDirectory(prefix="pipefit-") as folder, _ending_early(Path(folder) / "end") as asked:
        result: Comparison = launch(compare_rank, ranks, settings, json, asked, began_s, threads=1, quiet=json)[0]
    paths = {}
    if output is not None:
        paths = result.save(output)
    return Answer({**result.as_dict(), "paths": paths}, partial(table, result, paths))


@contextlib.contextmanager
def _ending_early(asked: Path) -> Iterator[Path]:
    """The context in which Ctrl-C makes the file that asks the ranks for the end; a second one ends them at once."""
    from pipefit.runtime.signals import handling

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asked.touch()
        print("\nending with the rows measured so far; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    with handling(ask, signal.SIGINT):
        yield asked


def compare_rank(
    settings: CompareConfig, quiet: bool, asked: Path | None = None, began_s: float | None = None
) -> Comparison:
    """Compares as this rank; rank 0 reports the progress."""
    from pipefit.compare.rounds import compare_on_ranks
    from pipefit.runtime.session import current

    if current().rank > 0 or quiet:
        return compare_on_ranks(settings, asked=asked, began_s=began_s)
    return compare_on_ranks(settings, _reporter(), asked, began_s)


def _reporter() -> Say:
    """A function that shows the progress in lines; of details one each 5 s."""
    reported_s = time.monotonic()

    def say(line: str) -> None:
        nonlocal reported_s
        is_detail = line.startswith(("building", "measuring"))
        if not is_detail or time.monotonic() - reported_s > NEXT_S:
            reported_s = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return say


def table(result: Comparison, paths: Mapping[str, str] = MappingProxyType({})) -> str:
    """A comparison as a table for people."""
    stages = " + ".join(map(str, result.layer_counts))
    lines = [
        f"{result.model}; data: {result.data}",
        f"{result.num_ranks} ranks of one thread, stages of {stages} layers, {result.batch} samples per update; "
        f"medians of {result.repeats}; losses after {result.samples} samples",
        "",
    ]
    rows = map(_cells, sorted(result.rows, key=lambda row: row.num_microbatches))
    lines += [*columns([_HEADS, *rows], right=True), ""]
    if result.choice is not None:
        chosen, best = map(_name, result.choice)
        lines.append(
            f"synchronous schedules are predicted within {result.largest_error:.1%}; the choice by prediction, "
            f"{chosen}, takes {result.choice.over_best:.3f} × the best measured, {best}"
        )
    refused: dict[str, list[str]] = {}
    for item in result.refused:
        refused.setdefault(item.reason, []).append(_name(item))
    lines += [f"not measured: {', '.join(cells)}: {reason}" for reason, cells in refused.items()]
    lines += [f"{kind:<8} {path}" for kind, path in paths.items()]
    return "\n".join(lines) + "\n"


_HEADS = ("strategy", "m", "samples/s", "× one thread", "× same m", "bubble", "predicted", "pred./meas.", "busy",
          "memory", "loss")  # fmt: skip


def _name(row: Any) -> str:
    return f"{row.strategy} m={row.num_microbatches}"


def _cells(row: Row) -> list[str]:
    count = str(row.num_microbatches)
    if row.strategy in WHOLE:
        count = "–"
    memory = " + ".join(f"{size / 2**20:.0f}" for size in row.peak_bytes)
    if memory:
        memory += " MiB"
    return [
        row.strategy,
        count,
        f"{row.samples_per_s:.1f}",
        _figure(row.speedup, ".2f"),
        _figure(row.speedup_accumulated, ".2f"),
        _figure(row.bubble, ".1%"),
        _figure(row.bubble_predicted, ".1%"),
        _figure(row.predicted_over_measured, ".3f"),
        " ".join(f"{share:.0%}" for share in row.utilisation),
        memory,
        _figure(row.final_loss, ".3f"),
    ]


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)
