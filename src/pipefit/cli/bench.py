"""`pipefit bench`: the speed that pipefit publishes of itself, measured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.bench_network import bench_network
from pipefit.cli.bench_offload import bench_offload
from pipefit.cli.bench_spill import bench_spill
from pipefit.cli.options import Json, count, help_of, whole_numbers
from pipefit.errors import PipefitError, nearest

__all__ = ["command"]


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        run: measures; its parameters are the options that it has, `quiet` is --json.
        about: one line for people.
    """

    run: Callable[..., Answer]
    about: str


def command(
    name: Annotated[str | None, Parameter(help="Which; without one, a list.")] = None,
    *,
    repeats: Annotated[int | None, help_of("Repetitions, in turns; default: the benchmark's own.")] = None,
    microbatches: Annotated[
        str | None, help_of("For lean, prediction, ddp and hybrid.", "--microbatches", "-m")
    ] = None,
    option: Annotated[
        list[str] | None,
        help_of("Options of the model, for prediction, ddp and hybrid; sizes, for spill and offload.", "--option"),
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
            "For network, ddp and hybrid: updates in one turn. For study: of the longest trial. For spill: of the "
            "large model. For offload: that are timed."
        ),
    ] = None,
    output: Annotated[Path | None, help_of("For network: a JSON file for the result.", "--output", "-o")] = None,
    disk: Annotated[Path | None, help_of("For spill: folder on the disk; default: temporary files.")] = None,
    cap: Annotated[
        str | None,
        help_of("For spill: on the large model's process, 2.5 GiB. For offload: on the device's memory, 20 GiB."),
    ] = None,
    tokens: Annotated[str | None, help_of("For spill and offload: per step, like 4096,16384.")] = None,
    device: Annotated[str | None, help_of("For offload: cuda, the default, or cpu to try it.")] = None,
    json: Json = False,
) -> Answer:
    """Measure what pipefit says about its own speed.

    Example: pipefit bench lean

    Ranks share this machine with whatever else runs on it: compare figures of one run with each other.
    """
    if name is None:
        width = max(map(len, _BENCHES))
        lines = [f"{key:<{width}}  {bench.about}" for key, bench in _BENCHES.items()]
        return Answer({"benchmarks": {key: bench.about for key, bench in _BENCHES.items()}}, "\n".join(lines))
    if name not in _BENCHES:
        raise PipefitError(f"unknown benchmark {name!r}; {nearest(name, _BENCHES)}")
    for what, value in (("--repeats", repeats), ("--steps", steps)):
        if value is not None:
            count(what, value)
    options = {
        "repeats": repeats,
        "microbatches": whole_numbers("--microbatches", microbatches) or None,
        "option": option,
        "ranks": ranks,
        "bandwidth": bandwidth,
        "latency": latency,
        "model": model,
        "steps": steps,
        "output": output,
        "disk": disk,
        "cap": cap,
        "tokens": whole_numbers("--tokens", tokens) or None,
        "device": device,
    }
    return _run(name, {key: value for key, value in options.items() if value is not None}, json)


def _run(name: str, given: dict[str, Any], quiet: bool) -> Answer:
    """Runs a benchmark with the options that were given.

    Raises:
        PipefitError: it has no such option.
    """
    bench = _BENCHES[name]
    known = [key for key in signature(bench.run).parameters if key != "quiet"]
    for key in given:
        if key not in known:
            its = ", ".join(f"--{key}" for key in known) or "none"
            raise PipefitError(f"--{key}: not an option of {name}, whose options are: {its}")
    return bench.run(**given, **({"quiet": quiet} if "quiet" in signature(bench.run).parameters else {}))


def _lean(repeats: int = 15, microbatches: Sequence[int] = (16,)) -> Answer:
    from pipefit.compare.bench.lean import lean

    num = microbatches[0]
    rows = lean(num, repeats=repeats)
    lines = [f"µs per micro-batch and stage, {num} micro-batches, two ranks; median, and the least of all repetitions"]
    lines += [f"{row.name:<18} {row.num_stages} stages {row.microseconds:8.0f} {row.least:8.0f}" for row in rows]
    return Answer({"num_microbatches": num, "rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _prediction(
    repeats: int | None = None, microbatches: Sequence[int] | None = None, option: Sequence[str] = ()
) -> Answer:
    from pipefit.cli.compare import told
    from pipefit.compare.bench.prediction import CONFIGS, GPT, prediction

    chosen = (replace(GPT, options=",".join(option)),) if option else CONFIGS
    configs = [
        replace(
            config,
            repeats=repeats or config.repeats,
            microbatches=tuple(microbatches or config.microbatches),
        )
        for config in chosen
    ]
    found = prediction(configs)
    return Answer({"comparisons": [one.as_dict() for one in found]}, lambda: "".join(told(one, {}) for one in found))


def _start(repeats: int = 5) -> Answer:
    from pipefit.compare.bench.start import start
    from pipefit.units import format_seconds

    rows = start(repeats)
    lines = [f"{row.what:<46} {format_seconds(row.seconds):>9}, least {format_seconds(row.least)}" for row in rows]
    return Answer({"rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _partition() -> Answer:
    from pipefit.compare.bench.partitioning import partition_times

    rows = list(partition_times())
    lines = [
        f"{row.model:14} {row.shape:9} {row.cost:14} {row.found:14} {row.note:13} {row.seconds:6.2f} s of processor"
        for row in rows
    ]
    return Answer({"rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _ddp(repeats: int = 15, microbatches: Sequence[int] = (1, 4), option: Sequence[str] = (), steps: int = 4) -> Answer:
    from pipefit.compare.bench.ddp import MODELS, ddp

    models = MODELS if not option else (("gpt", ",".join(option), 16),)
    rows = ddp(models, microbatches, steps, repeats)
    lines = ["seconds per update on two ranks; the ratio is the median over the turns, below 1: faster than DDP"]
    lines += [
        f"{row.model:<46} {row.num_microbatches} per rank: pipefit {row.pipefit_s:.4f}, DDP {row.ddp_s:.4f}, "
        f"ratio {row.ratio:.3f}, of processor time {row.processor_ratio:.3f}"
        for row in rows
    ]
    return Answer({"rows": [row._asdict() for row in rows]}, "\n".join(lines))


def _hybrid(
    repeats: int | None = None,
    microbatches: Sequence[int] = (),
    option: Sequence[str] = (),
    steps: int | None = None,
) -> Answer:
    from pipefit.compare.bench.hybrid import CONFIG, hybrid
    from pipefit.units import format_bytes, format_seconds

    config = replace(
        CONFIG,
        options=",".join(option) if option else CONFIG.options,
        microbatches=microbatches[0] if microbatches else CONFIG.microbatches,
        steps=steps or CONFIG.steps,
        repeats=repeats or CONFIG.repeats,
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


def _study(steps: int | None = None) -> Answer:
    from pipefit.compare.bench.study import LENGTHS, study_policies

    longest = steps or max(LENGTHS)
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


_BENCHES = {
    "lean": Bench(_lean, "overhead of the executor: µs per micro-batch and stage, beside torch and a bare loop"),
    "prediction": Bench(_prediction, "measured beside predicted for every schedule, each rank on a core of its own"),
    "ddp": Bench(_ddp, "data parallelism, its reductions in buckets, beside torch's DistributedDataParallel"),
    "hybrid": Bench(_hybrid, "tensor, pipeline and data parallelism and a 2-1 pipeline, measured beside predicted"),
    "start": Bench(_start, "how fast the verbs answer and ranks start"),
    "network": Bench(
        bench_network,
        "data parallelism, pipelines and hybrids on a slow network (Linux, root): PipeDream's VGG and ResNet",
    ),
    "study": Bench(
        _study, "twelve trials on two workers: LRTF, FIFO and whole tasks beside the bound no policy can beat"
    ),
    "spill": Bench(
        bench_spill, "a billion parameters under a cap on memory; the price of spilling beside the same in memory"
    ),
    "offload": Bench(bench_offload, "a GPT under a cap on one GPU: resident, spilled, and FSDP2's offload to the CPU"),
    "partition": Bench(_partition, "how long PipeDream's partitioner takes, and how that grows"),
}
