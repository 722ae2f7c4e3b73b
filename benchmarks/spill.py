"""Spilling measured: a model larger than the memory allowed, and the cost of spilling where it is not needed.

Two parts. `large` trains a GPT of about a billion parameters with Adam in a process of its own, whose highest resident
memory is read from the kernel and compared with a cap. `speed` trains a smaller one that also fits: resident, spilled
to disk with synchronous loads, with double buffering, with double buffering and replays, spilled to the host's memory,
and spilled to disk by a plan for half the bytes of the resident one, alternating.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.spill_large import large, print_large
from benchmarks.spilled_gpt import batches_of, folder_in, gpt_of, pipeline_of, state_bytes
from pipefit.errors import PipefitError
from pipefit.ir.op import Op
from pipefit.ir.residency import kept_fetches
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling import measure_tier
from pipefit.spec.options import Spilled
from pipefit.spec.topology import Tier
from pipefit.spill.tiers import Key
from pipefit.units import parse_quantity


@dataclass(frozen=True)
class SpeedRow:
    """One number of tokens per step; medians of seconds per step.

    Attributes:
        tokens: per step.
        resident_s: everything in memory.
        synchronous_s: spilled to disk, each stage loaded when it is needed.
        buffered_s: spilled to disk, loaded while another computes.
        replaying_s: the same, but forwards are replayed; the others keep their activations.
        host_s: spilled to the host's memory, loaded while another computes.
        half_s: spilled to disk as planned for half the bytes of weights, gradients and states.
        read_s, write_s: the bytes of a step at the disk's own rates.
        one_channel: whether reads and writes of the disk alternate.
    """

    tokens: int
    resident_s: float
    synchronous_s: float
    buffered_s: float
    replaying_s: float
    host_s: float
    half_s: float
    read_s: float
    write_s: float
    one_channel: bool

    @property
    def lanes_s(self) -> dict[str, float]:
        """Seconds that each lane is busy in a step."""
        if self.one_channel:
            return {"compute": self.resident_s, "disk": self.read_s + self.write_s}
        return {"compute": self.resident_s, "read": self.read_s, "write": self.write_s}

    @property
    def limit_s(self) -> float:
        """The bound of every order of work and copies to disk: the slowest lane."""
        return max(self.lanes_s.values())

    @property
    def binds(self) -> str:
        """The slowest lane."""
        return max(self.lanes_s, key=self.lanes_s.__getitem__)

    @property
    def of_limit(self) -> float:
        """The fraction of the limit that double buffering reaches."""
        return self.limit_s / self.buffered_s

    @property
    def of_resident(self) -> float:
        """Its speed over that of the resident run, which computes the same."""
        return self.resident_s / self.buffered_s

    @property
    def host_of_resident(self) -> float:
        """The speed of the run spilled to the host's memory over that of the resident run."""
        return self.resident_s / self.host_s

    @property
    def half_of_resident(self) -> float:
        """The speed of the run in half the memory over that of the resident run."""
        return self.resident_s / self.half_s


def speed(
    folder: Path | None = None,
    *,
    layers: int = 8,
    hidden: int = 1024,
    tokens: tuple[int, ...] = (32, 64, 128, 256, 512, 1024),
    repeats: int = 3,
    steps: int = 4,
    on_row: Callable[[SpeedRow], None] | None = None,
) -> tuple[Tier, list[SpeedRow]]:
    """Trains one model in six ways, alternating, for several numbers of tokens per step.

    Args:
        folder: on the disk to use; None: a temporary one.
        layers: blocks of the GPT.
        hidden: its width, a multiple of 64.
        tokens: per step; those above 256 come in micro-batches of 256.
        repeats: turns; the medians are taken.
        steps: of each turn, one after the other, with the last write-back waited for.
        on_row: called with each row as it is done.

    Returns:
        The tier's rates, measured before, and the rows.
    """
    rows = []
    with folder_in(folder) as place:
        tier = measure_tier(place)
        for count in tokens:
            rows.append(_row(place, layers, hidden, count, tier, repeats, steps))
            if on_row is not None:
                on_row(rows[-1])
    return tier, rows


def _row(place: Path, layers: int, hidden: int, tokens: int, tier: Tier, repeats: int, steps: int) -> SpeedRow:
    batches = batches_of(tokens)
    # A block for each shard; what comes before and after the blocks is small, and shares the first and the last.
    cut = [2, *[1] * (layers - 2), 2] if layers > 1 else [3]

    def spilled(**how: Any) -> Pipeline:
        return pipeline_of(gpt_of(layers, hidden), tokens, Spilled(optim_slots=2, **how), stages=cut, chunks=len(cut))

    half = gpt_of(layers, hidden)
    pipes = {
        "resident": pipeline_of(gpt_of(layers, hidden), tokens, None, stages=1),
        "synchronous": spilled(disk=place / "synchronous", keep="all", prefetch=0),
        "buffered": spilled(disk=place / "buffered", keep="all"),
        "replaying": spilled(disk=place / "replaying"),
        "host": spilled(keep="all"),
        "half": pipeline_of(half, tokens, Spilled(state_bytes(half) / 2, disk=place / "half"), example=next(batches)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(repeats + 1):
        for name, pipe in pipes.items():
            spent = _timed(pipe, [next(batches) for _ in range(steps)])
            if turn:
                seconds[name].append(spent / steps)
    read, written = _traffic(pipes["buffered"])
    for pipe in pipes.values():
        pipe.close()
    medians = [statistics.median(values) for values in seconds.values()]
    rates = tier.read_bytes_per_s, tier.write_bytes_per_s
    return SpeedRow(tokens, *medians, read / rates[0], written / rates[1], tier.one_channel)


def _timed(pipe: Pipeline, batches: list[tuple[Tensor, Tensor]]) -> float:
    began = time.perf_counter()
    for x, y in batches:
        pipe.step(x, y)
    pipe.settle()
    return time.perf_counter() - began


def _traffic(pipe: Pipeline) -> tuple[float, float]:
    """Bytes that a step reads and writes, once another has gone before."""
    spilling = pipe.workers[0].spilling
    assert spilling is not None
    sizes = {Key(stage, kind): size for stage, store in spilling.stores.items() for kind, size in store.sizes.items()}
    kept = kept_fetches(pipe.program, 0, later=True)
    moves = [i for index, i in enumerate(pipe.program.ranks[0]) if i.op in (Op.FETCH, Op.EVICT) and index not in kept]
    read, written = (sum(sizes[Key(i.stage, i.kind)] for i in moves if i.op is way) for way in (Op.FETCH, Op.EVICT))
    return read, written


def main(
    *,
    disk: Path | None = None,
    cap: str = "2.5 GiB",
    layers: int = 20,
    hidden: int = 2048,
    large_tokens: int = 512,
    steps: int = 3,
    small_layers: int = 8,
    small_hidden: int = 1024,
    tokens: tuple[int, ...] = (32, 64, 128, 256, 512, 1024),
    repeats: int = 3,
) -> int:
    """Prints both parts; exit code 1: the large model's process had more memory than the cap.

    Args:
        disk: folder on the disk; temporary files when not given.
        cap: on the resident memory of the large model's process.
        layers: of the large model; 0 leaves it out.
        hidden: its width.
        large_tokens: of its step.
        steps: it trains.
        small_layers: of the small model; 0 leaves it out.
        small_hidden: its width.
        tokens: of its steps.
        repeats: of every way to train it.
    """
    if disk is not None and not disk.is_dir():
        raise PipefitError(f"--disk {disk}: no such folder")
    fine = True
    if layers:
        limit = parse_quantity(cap, "bytes", "--cap")
        found = large(disk, layers=layers, hidden=hidden, tokens=large_tokens, steps=steps, cap_bytes=limit)
        fine = found.is_under_cap
        print_large(found)
    if small_layers:
        print(_HEAD)
        tier, _ = speed(
            disk, layers=small_layers, hidden=small_hidden, tokens=tokens, repeats=repeats, on_row=_print_row
        )
        rates = tier.read_bytes_per_s / 1e9, tier.write_bytes_per_s / 1e9
        turns = "alternating" if tier.one_channel else "at the same time"
        print(f"the disk alone: reads {rates[0]:.2f} GB/s, writes {rates[1]:.2f} GB/s, {turns}")
    return 0 if fine else 1


_HEAD = (
    "seconds per step: resident; spilled to disk, loads waited for; double-buffered; that with replays; spilled to the "
    "host's memory; to disk, as planned for half the memory\n"
    f"{'tokens':>6} {'resident':>9} {'synchr.':>9} {'buffered':>9} {'replaying':>9} {'host':>9} {'half':>9}  "
    f"{'of resident':>11} {'host':>5} {'half':>5} {'of limit':>9}  binds"
)


def _print_row(row: SpeedRow) -> None:
    print(
        f"{row.tokens:>6} {row.resident_s:>9.3f} {row.synchronous_s:>9.3f} {row.buffered_s:>9.3f} "
        f"{row.replaying_s:>9.3f} {row.host_s:>9.3f} {row.half_s:>9.3f}  {row.of_resident:>11.0%} "
        f"{row.host_of_resident:>5.0%} {row.half_of_resident:>5.0%} {row.of_limit:>9.0%}  {row.binds}",
        flush=True,
    )
