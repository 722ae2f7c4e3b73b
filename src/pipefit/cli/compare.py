"""`pipefit compare`: every strategy on this machine, measured in one run."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.heartbeat import NEXT_S
from pipefit.cli.models import importable
from pipefit.cli.options import Count, Json, verb
from pipefit.compare.settings import WHOLE, CompareConfig
from pipefit.errors import PipefitError
from pipefit.units import columns, counted

if TYPE_CHECKING:
    from pipefit.compare.comparison import Comparison, Row


@verb()
def command(
    *,
    settings: CompareConfig,
    ranks: Annotated[Count, Parameter(alias="-n")] = 2,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
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
    if ranks < 2:
        raise PipefitError(f"--ranks: strategies differ only with several ranks, so expected at least 2, got {ranks}")
    if output is not None and output.exists() and not output.is_dir():
        raise PipefitError(f"{output}: expected a folder, got a file")
    counts = tuple(dict.fromkeys(settings.microbatches))
    settings = replace(settings, model=importable(settings.model), microbatches=counts)
    if not json:
        cells = sum(1 if name in WHOLE else len(counts) for name in settings.names)
        if settings.limit:
            limit = f"within {settings.limit:g} minutes"
        else:
            limit = "without a limit"
        _reporter()(f"comparing {counted(cells, 'cell')} {limit}; more: --strategies all, -m 1,2,4,8,16, --limit")
    from pipefit.runtime.launch import launch

    with tempfile.TemporaryDirectory(prefix="pipefit-") as folder, _ending_early(Path(folder) / "end") as asked:
        result: Comparison = launch(compare_rank, ranks, settings, json, asked, began_s, threads=1, quiet=json)[0]
    if output is not None:
        paths = result.save(output)
    else:
        paths = {}
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

    if current().rank == 0 and not quiet:
        say = _reporter()
    else:
        say = _silent
    return compare_on_ranks(settings, say, asked, began_s)


def _silent(line: str) -> None:
    """Shows nothing."""


def _reporter() -> Callable[[str], None]:
    """A function that shows the progress in lines: details on a terminal in one that changes, else one each 5 s."""
    reported_s = time.monotonic()

    def say(line: str) -> None:
        nonlocal reported_s
        is_detail = line.startswith(("building", "measuring"))
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}" + "\n" * (not is_detail))
            sys.stderr.flush()
            return
        if not is_detail or time.monotonic() - reported_s > NEXT_S:
            reported_s = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return say


def table(result: Comparison, paths: Mapping[str, str] = MappingProxyType({})) -> str:
    """A comparison as a table for people."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        clear = "\r\x1b[K"
    else:
        clear = ""
    heads = "strategy,m,samples/s,× one thread,× same m,bubble,predicted,pred./meas.,busy,memory,loss".split(",")
    rows = sorted(result.rows, key=lambda row: row.num_microbatches)
    lines = [
        f"{clear}{result.model}; data: {result.data}",
        f"{result.num_ranks} ranks of one thread, stages of {' + '.join(map(str, result.layer_counts))} layers, "
        f"{result.batch} samples per update; medians of {result.repeats}; losses after {result.samples} samples",
        "",
        *columns([heads, *([row.strategy, *_cells(row)] for row in rows)], right=True),
        "",
    ]
    if result.choice is not None:
        chosen, best = (f"{row.strategy} m={row.num_microbatches}" for row in result.choice)
        lines.append(
            f"synchronous schedules are predicted within {result.largest_error:.1%}; the choice by prediction, "
            f"{chosen}, takes {result.choice.over_best:.3f} × the best measured, {best}"
        )
    refused: dict[str, list[str]] = {}
    for item in result.refused:
        refused.setdefault(item.reason, []).append(f"{item.strategy} m={item.num_microbatches}")
    lines += [f"not measured: {', '.join(cells)}: {reason}" for reason, cells in refused.items()]
    lines += [f"{kind:<8} {path}" for kind, path in paths.items()]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    def of(value: float | None, how: str) -> str:
        if value is None:
            return ""
        return format(value, how)

    megabytes = [f"{size / 2**20:.0f}" for size in row.peak_bytes]
    return [
        "–" if row.strategy in WHOLE else str(row.num_microbatches),
        f"{row.samples_per_s:.1f}",
        of(row.speedup, ".2f"),
        of(row.speedup_accumulated, ".2f"),
        of(row.bubble, ".1%"),
        of(row.bubble_predicted, ".1%"),
        of(row.predicted_over_measured, ".3f"),
        " ".join(f"{share:.0%}" for share in row.utilisation),
        f"{' + '.join(megabytes)} MiB" if megabytes else "",
        of(row.final_loss, ".3f"),
    ]
