"""`pipefit bench`: the speed that pipefit publishes of itself, measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.options import Json, count, help_of
from pipefit.errors import PipefitError, nearest

__all__ = ["command"]


@dataclass(frozen=True)
class Asked:
    """The options of the verb; each benchmark looks at its own."""

    repeats: int | None
    microbatches: str | None
    option: list[str] | None
    ranks: int | None
    bandwidth: str | None
    latency: str | None
    model: list[str] | None
    steps: int | None
    output: Path | None
    json: bool
    disk: Path | None = None
    cap: str | None = None
    tokens: str | None = None
    device: str = "cuda"


def command(
    name: Annotated[str | None, Parameter(help="Which; without one, a list.")] = None,
    *,
    repeats: Annotated[int | None, help_of("Repetitions, in turns; default: the benchmark's own.")] = None,
    microbatches: Annotated[str | None, help_of("For lean and prediction.", "--microbatches", "-m")] = None,
    option: Annotated[
        list[str] | None, help_of("Options of the model, for prediction; sizes, for spill and offload.", "--option")
    ] = None,
    ranks: Annotated[int | None, help_of("For network: hosts, 2 to 8; default: 4.", "--ranks", "-n")] = None,
    bandwidth: Annotated[
        str | None, help_of("For network: of every link, like '50 Mbit/s'; default: as slow as the paper's was.")
    ] = None,
    latency: Annotated[str | None, help_of("For network: of every message one way, like '1 ms'.")] = None,
    model: Annotated[list[str] | None, help_of("For network: vgg or resnet; default: both.", "--model")] = None,
    steps: Annotated[
        int | None,
        help_of(
            "For network: updates in one turn. For study: of the longest trial. For spill: of the large model. For "
            "offload: that are timed."
        ),
    ] = None,
    output: Annotated[Path | None, help_of("For network: a JSON file for the result.", "--output", "-o")] = None,
    disk: Annotated[Path | None, help_of("For spill: folder on the disk; default: temporary files.")] = None,
    cap: Annotated[
        str | None,
        help_of("For spill: on the large model's process, 2.5 GiB. For offload: on the device's memory, 20 GiB."),
    ] = None,
    tokens: Annotated[str | None, help_of("For spill and offload: per step, like 4096,16384.")] = None,
    device: Annotated[str, help_of("For offload: cuda, or cpu to try it.")] = "cuda",
    json: Json = False,
) -> Answer:
    """Measure what pipefit says about its own speed.

    Example: pipefit bench lean

    Ranks share this machine with whatever else runs on it: compare figures of one run with each other.
    """
    if name is None:
        width = max(map(len, _BENCHES))
        lines = [f"{key:<{width}}  {about}" for key, (_, about) in _BENCHES.items()]
        return Answer({"benchmarks": {key: about for key, (_, about) in _BENCHES.items()}}, "\n".join(lines))
    if name not in _BENCHES:
        raise PipefitError(f"unknown benchmark {name!r}; {nearest(name, _BENCHES)}")
    if repeats is not None:
        count("--repeats", repeats)
    return _BENCHES[name][0](
        Asked(
            repeats,
            microbatches,
            option,
            ranks,
            bandwidth,
            latency,
            model,
            steps,
            output,
            json,
            disk,
            cap,
            tokens,
            device,
        )
    )


def _lean(asked: Asked) -> Answer:
    from pipefit.cli.options import whole_numbers
    from pipefit.compare.bench.lean import lean

    num = (whole_numbers("--microbatches", asked.microbatches) or (16,))[0]
    rows = lean(num, repeats=asked.repeats or 15)
    lines = [f"µs per micro-batch and stage, {num} micro-batches, two ranks; median, and the least of all repetitions"]
    lines += [f"{row.name:<18} {row.num_stages} stages {row.microseconds:8.0f} {row.least:8.0f}" for row in rows]
    return Answer({"num_microbatches": num, "rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _prediction(asked: Asked) -> Answer:
    from dataclasses import replace

    from pipefit.cli.compare import told
    from pipefit.cli.options import whole_numbers
    from pipefit.compare.bench.prediction import CONFIGS, GPT, prediction

    chosen = (replace(GPT, options=",".join(asked.option)),) if asked.option else CONFIGS
    configs = [
        replace(
            config,
            repeats=asked.repeats or config.repeats,
            microbatches=whole_numbers("--microbatches", asked.microbatches) or config.microbatches,
        )
        for config in chosen
    ]
    found = prediction(configs)
    return Answer({"comparisons": [one.as_dict() for one in found]}, lambda: "".join(told(one, {}) for one in found))


def _start(asked: Asked) -> Answer:
    from pipefit.compare.bench.start import start
    from pipefit.units import format_seconds

    rows = start(asked.repeats or 5)
    lines = [f"{row.what:<46} {format_seconds(row.seconds):>9}, least {format_seconds(row.least)}" for row in rows]
    return Answer({"rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _partition(asked: Asked) -> Answer:
    from pipefit.compare.bench.partitioning import partition_times

    rows = list(partition_times())
    lines = [
        f"{row.model:14} {row.shape:9} {row.cost:14} {row.found:14} {row.note:13} {row.seconds:6.2f} s of processor"
        for row in rows
    ]
    return Answer({"rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _ddp(asked: Asked) -> Answer:
    from pipefit.cli.options import whole_numbers
    from pipefit.compare.bench.ddp import MODELS, ddp

    models = MODELS if not asked.option else (("gpt", ",".join(asked.option), 16),)
    counts = whole_numbers("--microbatches", asked.microbatches) or (1, 4)
    rows = ddp(models, counts, asked.steps or 4, asked.repeats or 15)
    lines = ["seconds per update on two ranks; the ratio is the median over the turns, below 1: faster than DDP"]
    lines += [
        f"{row.model:<46} {row.num_microbatches} per rank: pipefit {row.pipefit_s:.4f}, DDP {row.ddp_s:.4f}, "
        f"ratio {row.ratio:.3f}, of processor time {row.processor_ratio:.3f}"
        for row in rows
    ]
    return Answer({"rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _hybrid(asked: Asked) -> Answer:
    from dataclasses import replace

    from pipefit.cli.options import whole_numbers
    from pipefit.compare.bench.hybrid import CONFIG, hybrid
    from pipefit.units import format_bytes, format_seconds

    config = replace(
        CONFIG,
        options=",".join(asked.option) if asked.option else CONFIG.options,
        microbatches=(whole_numbers("--microbatches", asked.microbatches) or (CONFIG.microbatches,))[0],
        steps=asked.steps or CONFIG.steps,
        repeats=asked.repeats or CONFIG.repeats,
    )
    rows = hybrid(config)
    lines = [
        f"GPT {config.options}, batch {config.batch} in {config.microbatches} micro-batches; all figures per update",
        f"{'':<20}{'t,p,d':>7}{'ranks':>7}{'predicted':>11}{'measured':>11}{'ratio':>7}"
        f"{'sent':>12}{'inside':>12}{'reduced':>12}",
    ]
    for row in rows:
        shape = ",".join(str(width) for width in row.shape) if all(row.shape) else row.name
        lines.append(
            f"{row.name:<20}{shape:>7}{row.processes:>7}{format_seconds(row.predicted_s):>11}"
            f"{format_seconds(row.measured_s):>11}{row.ratio:>7.2f}{format_bytes(row.sent_bytes):>12}"
            f"{format_bytes(row.inside_bytes):>12}{format_bytes(row.reduced_bytes):>12}"
        )
    told = [row._asdict() | {"ratio": row.ratio} for row in rows]
    return Answer({"config": asdict(config), "rows": told}, "\n".join(lines))


def _network(asked: Asked) -> Answer:
    from pipefit.cli.network import bench_network

    return bench_network(
        ranks=asked.ranks,
        bandwidth=asked.bandwidth,
        latency=asked.latency,
        models=asked.model,
        steps=asked.steps,
        repeats=asked.repeats,
        output=asked.output,
        json=asked.json,
    )


def _study(asked: Asked) -> Answer:
    from pipefit.compare.bench.study import LENGTHS, study_policies

    longest = asked.steps or max(LENGTHS)
    rows = study_policies(scale=longest / max(LENGTHS))
    lines = [f"{len(LENGTHS)} trials on 2 workers, the longest of {longest} steps", ""]
    lines += [f"{'policy':<12} {'makespan':>10} {'bound':>10} {'× bound':>8} {'predicted':>10} {'moving state':>13}"]
    for row in rows:
        predicted = f"{row.predicted_s:.2f} s" if row.predicted_s is not None else "–"
        lines.append(
            f"{row.policy:<12} {row.makespan_s:>8.2f} s {row.bound_s:>8.2f} s {1 + row.gap:>8.3f} {predicted:>10} "
            f"{row.moved:>13.1%}"
        )
    alike = len({row.losses for row in rows}) == 1
    lines += ["", f"every trial's last loss is {'the same to the bit' if alike else 'NOT THE SAME'} under every policy"]
    data = {"rows": [row._asdict() for row in rows], "longest_steps": longest, "same_losses": alike}
    return Answer(data, "\n".join(lines), FINE if alike else FINDING)


def _spill(asked: Asked) -> Answer:
    from pipefit.cli.bench_spill import spill
    from pipefit.cli.options import whole_numbers

    tokens = whole_numbers("--tokens", asked.tokens)
    return spill(asked.disk, asked.cap, asked.option or (), tokens, asked.steps, asked.repeats, asked.json)


def _offload(asked: Asked) -> Answer:
    from pipefit.cli.bench_offload import offload
    from pipefit.cli.options import whole_numbers

    tokens = whole_numbers("--tokens", asked.tokens)
    return offload(asked.device, asked.cap, asked.option or (), tokens, asked.steps, asked.json)


_BENCHES: dict[str, tuple[Callable[[Asked], Answer], str]] = {
    "lean": (_lean, "overhead of the executor: µs per micro-batch and stage, beside torch and a bare loop"),
    "prediction": (_prediction, "measured beside predicted for every schedule, each rank on a core of its own"),
    "ddp": (_ddp, "data parallelism, its reductions in buckets, beside torch's DistributedDataParallel"),
    "hybrid": (_hybrid, "tensor, pipeline and data parallelism and a 2-1 pipeline, measured beside predicted"),
    "start": (_start, "how fast the verbs answer and ranks start"),
    "network": (
        _network,
        "data parallelism, pipelines and hybrids on a slow network (Linux, root): PipeDream's VGG and ResNet",
    ),
    "study": (_study, "twelve trials on two workers: LRTF, FIFO and whole tasks beside the bound no policy can beat"),
    "spill": (_spill, "a billion parameters under a cap on memory; the price of spilling beside the same in memory"),
    "offload": (_offload, "a GPT under a cap on one GPU: resident, spilled, and FSDP2's offload to the CPU"),
    "partition": (_partition, "how long PipeDream's partitioner takes, and how that grows"),
}
