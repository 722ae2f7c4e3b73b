"""Data parallelism, pipelines and hybrids on a network as slow as PipeDream's (Linux, root)."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.network.lab import why_not
from benchmarks.network.spec import ModelResult, NetworkConfig, NetworkResult, check
from pipefit.spec.files import write_json
from pipefit.units import parse_quantity


def main(
    *,
    ranks: int = 4,
    bandwidth: str | None = None,
    latency: str | None = None,
    model: tuple[str, ...] = ("vgg", "resnet"),
    steps: int = 2,
    repeats: int = 1,
    output: Path | None = None,
) -> None:
    """Measures in a laboratory of namespaces, or prints why there can be none here.

    Args:
        ranks: hosts, 2 to 8.
        bandwidth: of every link, like "50 Mbit/s"; as slow as the paper's was when not given.
        latency: of every message one way, like "1 ms".
        model: vgg, resnet or both.
        steps: updates of a synchronous pipeline in one repetition.
        repeats: repetitions that count.
        output: a JSON file for the result.
    """
    config = NetworkConfig(
        ranks=ranks,
        models=tuple(dict.fromkeys(model)),
        bandwidth_bytes_per_s=None if bandwidth is None else parse_quantity(bandwidth, "bytes/s", "--bandwidth"),
        latency_s=0.0 if latency is None else parse_quantity(latency, "s", "--latency"),
        steps=steps,
        repeats=repeats,
    )
    check(config)
    if reason := why_not(config.latency_s):
        print(f"skipped: {reason}")
        return
    from benchmarks.network.run import network

    found = network(config, _say)
    print(tables(found))
    if output is not None:
        write_json(output, found.as_dict())
        print(f"json     {output}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tables(found: NetworkResult) -> str:
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
