"""`pipefit bench network`: its options, its table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli.answer import Answer

if TYPE_CHECKING:
    from pipefit.compare.bench.network_spec import ModelResult, NetworkResult

__all__ = ["bench_network", "told"]


def bench_network(
    ranks: int | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    model: Sequence[str] = (),
    steps: int | None = None,
    repeats: int | None = None,
    output: Path | None = None,
    *,
    quiet: bool = False,
) -> Answer:
    """Measures in a laboratory of namespaces, or says in a few words why there can be none here."""
    from pipefit.compare.bench.netlab import why_not
    from pipefit.compare.bench.network_spec import NetworkConfig, check
    from pipefit.spec.files import write_json
    from pipefit.units import parse_quantity

    usual = NetworkConfig()
    config = NetworkConfig(
        ranks=usual.ranks if ranks is None else ranks,
        models=tuple(dict.fromkeys(model or usual.models)),
        bandwidth_bytes_per_s=None if bandwidth is None else parse_quantity(bandwidth, "bytes/s", "--bandwidth"),
        latency_s=0.0 if latency is None else parse_quantity(latency, "s", "--latency"),
        steps=steps or usual.steps,
        repeats=repeats or usual.repeats,
    )
    check(config)
    if reason := why_not(config.latency_s):
        return Answer({"format": "pipefit.network/1", "skipped": reason}, f"skipped: {reason}")
    from pipefit.compare.bench.network import network

    found = network(config, (lambda line: None) if quiet else _say)
    data = found.as_dict()
    if output is not None:
        write_json(output, data)
    return Answer(data, told(found) + (f"\njson     {output}" if output is not None else ""))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def told(found: NetworkResult) -> str:
    """Every model's table."""
    return "\n\n".join([found.machine, *(_model(one) for one in found.models)])


_HEADS = ("strategy", "replicas", "schedule", "per update", "samples/s", "× DDP", "predicted", "kB/sample", "program")
_WIDTHS = (22, 9, 13, 10, 10, 7, 10, 10, 9)


def _model(found: ModelResult) -> str:
    lines = [
        f"{found.name}: {found.model}",
        f"{found.weight_bytes / 1e6:.2f} MB of weights, {found.compute_s * 1e3:.0f} ms per mini-batch of "
        f"{found.microbatch} on one device ({found.microbatch / found.compute_s:.1f} samples/s), links of "
        f"{found.bandwidth_bytes_per_s / 1e6:.3g} MB/s",
        f"reducing all gradients takes {found.ratio:.2f} × as long as computing them; the paper's model: "
        f"{found.paper_ratio:.2f}",
        f"reported there on 16 devices: {found.reported[0]}, {found.reported[1]:.2f} × data parallelism; in proportion "
        f"here: {found.expected:.2f} ×",
    ]
    for plan in found.planned:
        ahead = plan.data_parallel_s / plan.minibatch_s
        straight = plan.data_parallel_s / plan.straight_s
        lines.append(
            f"partitioner, {plan.cost}: {plan.replicas}, {ahead:.2f} × data parallelism; straight {straight:.2f} ×"
        )
    lines += ["", _line(_HEADS)]
    group = found.rows[0].against if found.rows else 0
    for row in found.rows:
        if row.against != group:
            lines.append("")
            group = row.against
        lines.append(
            _line(
                (
                    row.strategy,
                    row.replicas,
                    row.schedule,
                    f"{row.minibatches}",
                    f"{row.samples_per_s:.1f}",
                    f"{row.speedup:.2f}",
                    f"{row.predicted_samples_per_s:.1f}",
                    f"{row.counted_bytes / 1e3:.1f}",
                    f"{row.program_bytes / 1e3:.1f}",
                )
            )
        )
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    texts = zip(cells[:3], _WIDTHS[:3], strict=True)
    numbers = zip(cells[3:], _WIDTHS[3:], strict=True)
    return "".join([*(f"{cell:<{width}}" for cell, width in texts), *(f"{cell:>{width}}" for cell, width in numbers)])
