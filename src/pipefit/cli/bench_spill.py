"""`pipefit bench spill`: its options, its table, its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.options import sizes
from pipefit.errors import PipefitError
from pipefit.units import format_bytes, parse_quantity

if TYPE_CHECKING:
    from pipefit.compare.bench.spill import LargeResult, SpeedRow
    from pipefit.spec.topology import Tier

__all__ = ["bench_spill"]

_SIZES = {"layers": 20, "hidden": 2048, "tokens": 512, "small-layers": 8, "small-hidden": 1024}


def bench_spill(
    disk: Path | None = None,
    cap: str = "2.5 GiB",
    option: Sequence[str] = (),
    tokens: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    steps: int = 3,
    repeats: int = 3,
    *,
    quiet: bool = False,
) -> Answer:
    """Runs both parts, or the one that is not turned off by `layers=0` or `small-layers=0`.

    Exit code 1: the large model's process had more memory than the cap.
    """
    wanted = _SIZES | sizes("--option", option, _SIZES)
    if disk is not None and not disk.is_dir():
        raise PipefitError(f"--disk {disk}: no such folder")
    from pipefit.compare.bench.spill import large, speed

    data: dict[str, Any] = {}

    def tell(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    fine = True
    if wanted["layers"]:
        limit = parse_quantity(cap, "bytes", "--cap")
        found = large(
            disk,
            layers=wanted["layers"],
            hidden=wanted["hidden"],
            tokens=wanted["tokens"],
            steps=steps,
            cap_bytes=limit,
        )
        fine = found.is_under_cap
        data["large"] = asdict(found) | {"is_under_cap": fine}
        tell("\n".join(_large(found)))
    if wanted["small-layers"]:
        tell(_HEAD)
        tier, rows = speed(
            disk,
            layers=wanted["small-layers"],
            hidden=wanted["small-hidden"],
            tokens=tuple(tokens),
            repeats=repeats,
            on_row=lambda row: tell(_row(row)),
        )
        tell(_rates(tier))
        data["speed"] = {"tier": _plain(tier), "rows": [asdict(row) | _derived(row) for row in rows]}
    return Answer(data, "", FINE if fine else FINDING)


def _large(found: LargeResult) -> list[str]:
    verdict = "kept" if found.is_under_cap else "EXCEEDED"
    each = zip(found.seconds, found.losses, strict=True)
    steps = ", ".join(f"{seconds:.1f} s (loss {loss:.3f})" for seconds, loss in each)
    return [
        f"GPT of {found.num_parameters / 1e6:,.0f} M parameters, Adam, float32: {format_bytes(found.state_bytes)} of "
        f"weights, gradients and states; {found.shards} shards, {found.tokens} tokens per step",
        f"cap {format_bytes(found.cap_bytes)} {verdict}: the process had {format_bytes(found.peak_bytes)} resident at "
        f"most (VmHWM), predicted {format_bytes(found.predicted_bytes)}; {format_bytes(found.base_bytes)} of it is "
        f"Python and torch, {format_bytes(found.arena_bytes)} slots; {format_bytes(found.tier_bytes)} on disk",
        f"weights drawn and written in {found.setup_s:.1f} s; steps: {steps}; predicted {found.predicted_s:.1f} s, "
        f"{found.binds} binds",
        "",
    ]


_HEAD = (
    "seconds per step: resident; spilled to disk, loads waited for; double-buffered; that with replays; spilled to the "
    "host's memory; to disk, as planned for half the memory\n"
    f"{'tokens':>6} {'resident':>9} {'synchr.':>9} {'buffered':>9} {'replaying':>9} {'host':>9} {'half':>9}  "
    f"{'of resident':>11} {'host':>5} {'half':>5} {'of limit':>9}  binds"
)


def _row(row: SpeedRow) -> str:
    return (
        f"{row.tokens:>6} {row.resident_s:>9.3f} {row.synchronous_s:>9.3f} {row.buffered_s:>9.3f} "
        f"{row.replaying_s:>9.3f} {row.host_s:>9.3f} {row.half_s:>9.3f}  {row.of_resident:>11.0%} "
        f"{row.host_of_resident:>5.0%} {row.half_of_resident:>5.0%} {row.of_limit:>9.0%}  {row.binds}"
    )


def _derived(row: SpeedRow) -> dict[str, Any]:
    return {
        "limit_s": row.limit_s,
        "binds": row.binds,
        "of_limit": row.of_limit,
        "of_resident": row.of_resident,
        "host_of_resident": row.host_of_resident,
        "half_of_resident": row.half_of_resident,
    }


def _rates(tier: Tier) -> str:
    rates = tier.read_bytes_per_s / 1e9, tier.write_bytes_per_s / 1e9
    turns = "in turns" if tier.one_channel else "side by side"
    return f"the disk alone: reads {rates[0]:.2f} GB/s, writes {rates[1]:.2f} GB/s, {turns}"


def _plain(tier: Tier) -> dict[str, float | bool]:
    rates = {"read_bytes_per_s": tier.read_bytes_per_s, "write_bytes_per_s": tier.write_bytes_per_s}
    return {**rates, "one_channel": tier.one_channel}
