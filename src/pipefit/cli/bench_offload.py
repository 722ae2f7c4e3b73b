"""`pipefit bench offload`: its options, its table, its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.options import count, sizes
from pipefit.errors import PipefitError
from pipefit.units import format_bytes, format_seconds, parse_quantity

if TYPE_CHECKING:
    from pipefit.compare.bench.offload import OffloadConfig, OffloadRow
    from pipefit.profiling import Copies

__all__ = ["bench_offload"]

_DEVICES = ("cuda", "cpu")
_SIZES = ("layers", "hidden", "heads", "vocab", "context", "part", "fsdp-part")


def bench_offload(
    device: str = "cuda",
    cap: str | None = None,
    option: Sequence[str] = (),
    tokens: Sequence[int] = (),
    steps: int | None = None,
    *,
    quiet: bool = False,
) -> Answer:
    """Runs it.

    Exit code 1: the spilled run had more of the GPU's memory than the cap.
    """
    if device not in _DEVICES:
        raise PipefitError(f"--device: expected one of {', '.join(_DEVICES)}, got {device!r}")
    wanted = _sizes(option)
    from pipefit.compare.bench import offload as bench

    config = replace(bench.OffloadConfig(device=device), **wanted)
    if cap is not None:
        config = replace(config, cap_bytes=parse_quantity(cap, "bytes", "--cap"))
    if steps is not None:
        config = replace(config, steps=steps)

    def tell(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    resident: dict[int, float] = {}

    def tell_row(row: OffloadRow) -> None:
        if row.way == "resident" and row.seconds is not None:
            resident[row.tokens] = row.seconds
        tell(_row(row, resident.get(row.tokens)))

    found = bench.rates(config)
    tell(_head(config, found))
    rows = bench.offload(config, tokens or bench.TOKENS, on_row=tell_row)
    exceeded = device == "cuda" and any(
        row.way == "spilled" and (row.peak_bytes or 0.0) > config.cap_bytes for row in rows
    )
    if exceeded:
        tell(f"the cap of {format_bytes(config.cap_bytes)} was EXCEEDED")
    data: dict[str, Any] = {
        "config": asdict(config),
        "rates": found._asdict(),
        "rows": [asdict(row) | {"of_resident": _of(row, resident.get(row.tokens))} for row in rows],
    }
    return Answer(data, "", FINDING if exceeded else FINE)


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    found = sizes("--option", texts, _SIZES)
    return {name.replace("-", "_"): count(f"--option {name}", value) for name, value in found.items()}


def _head(config: OffloadConfig, found: Copies) -> str:
    to_device, to_host, both = (f"{rate / 1e9:.2f} GB/s" for rate in found)
    return (
        f"GPT of {config.layers} x {config.hidden}, {config.heads} heads, on {config.device}; spilled under "
        f"{format_bytes(config.cap_bytes)}\n"
        f"copies alone: {to_device} to the device, {to_host} to the host, {both} both at once\n"
        f"{'tokens':>7} {'way':<10} {'step':>10} {'of resident':>11} {'peak':>11} {'predicted':>10} {'loss':>8}"
    )


def _of(row: OffloadRow, resident_s: float | None) -> float | None:
    return resident_s / row.seconds if resident_s is not None and row.seconds is not None else None


def _row(row: OffloadRow, resident_s: float | None) -> str:
    if row.seconds is None or row.peak_bytes is None or row.loss is None:
        return f"{row.tokens:>7} {row.way:<10} {row.note}"
    share = _of(row, resident_s)
    of_resident = "" if share is None else f"{share:.0%}"
    predicted = "" if row.predicted_s is None else format_seconds(row.predicted_s)
    return (
        f"{row.tokens:>7} {row.way:<10} {format_seconds(row.seconds):>10} {of_resident:>11} "
        f"{format_bytes(row.peak_bytes):>11} {predicted:>10} {row.loss:>8.3f}  {row.note}"
    )
