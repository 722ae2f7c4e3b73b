"""The lecture on training large networks with limited hardware: GPipe, Hydra, PipeDream, PipeDream-2BW."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

from pipefit.reproduce.clusters import MODELS, NAIVE_1, stall_share
from pipefit.reproduce.entry import Bench, Made, Picture, curves, drawn, each, figure
from pipefit.reproduce.measured import study_file
from pipefit.reproduce.pipedream_gpipe import same_version, versions_used
from pipefit.reproduce.predicted import falls, memory_gb, period, rate, speedup
from pipefit.reproduce.steps import Draw, Planned, Python, Verb

_ONE, _TWO = Draw("spilled", 4, 2, slots=1), Draw("spilled", 4, 2, slots=2)
_DOUBLE = Draw("pipedream-2bw", 4, 4, num_steps=6)
_VERTICAL = Draw("pipedream-vertical-sync", 4, 12)


def _version_rule(run: Bench) -> bool:
    """Whether micro-batch k, from 1, uses version max(⌊(k − 1)/m⌋ − 1, 0) at every stage."""
    places = [(stage, k) for stage in range(4) for k in range(1, 25)]
    return all(versions_used(run, _DOUBLE, stage, k - 1)["fwd"] == max((k - 1) // 4 - 1, 0) for stage, k in places)


# ---------------------------------------------------------------------------------------------- Hydra: many models

_DEVICES, _TRIALS, _SHARDS = 8, 12, 8


def _trials() -> list[Any]:
    """Twelve models of eight shards, of which a step visits each twice, but the last one once."""
    from pipefit.study.simulation import TrialCost

    turns = (*[1.0] * (_SHARDS - 1), 3.0, *[2.0] * (_SHARDS - 1))
    return [TrialCost(turns, 10) for _ in range(_TRIALS)]


def _sharp(policy: str = "lrtf") -> Any:
    from pipefit.study.simulation import simulate_study

    return simulate_study(_trials(), _DEVICES, policy)


def _study(run: Bench, policy: str = "lrtf") -> Any:
    return run(Python(f"simulate_study(12 trials of 15 turns and 10 steps, 8, {policy!r})", _sharp, policy=policy))


def _one_by_one(run: Bench, microbatches: int) -> float:
    """Seconds of one model after the other over all devices, with GPipe's schedule; naive with one micro-batch."""
    from pipefit.study.simulation import one_by_one_s

    totals = [trial.total_s for trial in _trials()]
    return one_by_one_s(totals, [_DEVICES] * _TRIALS, [microbatches] * _TRIALS)


def _sharp_picture(run: Bench) -> Picture:
    from pipefit.study.picture import picture

    found, names = _study(run), [f"model {number + 1}" for number in range(_TRIALS)]
    text = f"makespan {found.makespan_s:g}, lower bound {found.bound_s:g}: gap {found.gap:.1%}"
    return Picture("SHARP", lambda: picture(found, names, _DEVICES, "SHARP: 12 models on 8 devices"), text)


_MAKESPANS: Mapping[str, Callable[[Bench], float]] = {
    "SHARP": lambda run: _study(run).makespan_s,
    "whole models": lambda run: _study(run, "whole-task").makespan_s,
    **{f"GPipe, m = {m}": lambda run, m=m: _one_by_one(run, m) for m in (8, 4)},
    "naive": lambda run: _one_by_one(run, 1),
}


def _over_sharp(run: Bench, name: str) -> float:
    return _MAKESPANS[name](run) / _MAKESPANS["SHARP"](run)


# ------------------------------------------------------------------------------------------ PipeDream-2BW: throughput

_GPT = {
    "2.2B": "gpt:layers=48,hidden=1920,heads=32,sequence=512",
    "3.8B": "gpt:layers=54,hidden=2432,heads=32,sequence=512",
}


def _pipelined(method: str, size: str, batch: int, *depths: int, machine: str = "nvlink-8x8", **more: Any) -> Planned:
    """A GPT on servers of eight V100s, at one of some depths."""
    options = {"microbatch_sizes": [1, 2, 4, 8], "depths": depths or [4, 8, 16]} | more
    return Planned(_GPT[size], machine, method=method, global_batch=batch, **options)


def _over_depth(
    title: str, y_label: str, figure: Callable[[Bench, Planned], float], **more: Any
) -> Callable[[Bench], Picture]:
    """A figure of 2BW's plans over the depth."""
    lines = {"2BW": lambda run, depth: figure(run, _pipelined("2bw", "2.2B", 512, depth, **more))}
    return curves(title, "depth", y_label, (2, 4, 8, 16), lines, log_x=True)


_BATCHES = (64, 128, 256, 512)


def _tensor_only(size: str, batch: int, machine: str = "nvlink-8x8") -> Planned:
    """Model parallelism of the slide's widths: 8 for 2.2 billion parameters, and 16 for 3.8."""
    width = {"2.2B": 8, "3.8B": 16}[size]
    options = {"tensors": [width], "depths": [1], "schedules": ["1f1b"], "microbatch_sizes": [1, 2, 4]}
    return Planned(_GPT[size], machine, global_batch=batch, **options)


def _most(run: Bench, ahead: Callable[[int], Planned], behind: Callable[[int], Planned]) -> float:
    """The largest ratio of two throughputs over the batches for which both fit."""
    pairs = [(ahead(batch), behind(batch)) for batch in _BATCHES]
    return max(rate(run, one) / rate(run, other) for one, other in pairs if run.fits(one) and run.fits(other))


def _by_batch(size: str, machine: str) -> Callable[[Bench], Picture]:
    """Samples per second of 2BW, GPipe and model parallelism by the batch, as on the slide."""
    devices = prod(map(int, machine.removeprefix("nvlink-").split("x")))
    depths = [depth for depth in (4, 8, 16) if depth <= devices]

    def pipelined(method: str) -> Callable[[Bench, int], float]:
        return lambda run, batch: rate(run, _pipelined(method, size, batch, *depths, machine=machine))

    def tensor(run: Bench, batch: int) -> float:
        return rate(run, _tensor_only(size, batch, machine))

    lines = {"2BW": pipelined("2bw"), "GPipe": pipelined("gpipe"), "model parallelism": tensor}
    title = f"{size.replace('B', ' billion')} parameters on {devices} V100s"
    return curves(title, "batch", "samples/s", _BATCHES, lines, log_x=True)


_SCHEDULES = ("gpipe", "pipedream", "pipedream-2bw", "1f1b")
_HYBRID = Draw("pipedream", 3, 8, replicas=(2, 1, 1), stage_work=(4, 2, 2), forward=1, backward=1)
_PIPELINE_1 = NAIVE_1.but(num_microbatches=32, recompute="stage")


def _at_first_stage(title: str, y_label: str, figure: str) -> Callable[[Bench], Picture]:
    """A figure of each rank, here of the first, over the depth."""

    def held(run: Bench, depth: int, name: str) -> float:
        return float(run(Draw(name, depth, 48 if name == "pipedream" else 16)).metrics[figure][0])

    lines = {name: partial(held, name=name) for name in _SCHEDULES}
    return curves(title, "depth d", y_label, (2, 4, 8, 16), lines)


def _machines(model: str) -> Planned:
    """Machines of one GPU, joined by 10 Gbit/s; mini-batches as in the profiles, for VGG-16 as in the paper of 2019."""
    size = {"vgg16": 64, "alexnet": 256}.get(model, 128)
    return Planned(model, "pcie-16x1", method="pipedream", memory="64 GB", microbatch_sizes=[size])


def _measured(run: Bench, policy: str) -> float:
    """Seconds of the measured turns under a policy."""
    return float(run(Verb("study", study_file()))["policies"][policy]["makespan_s"])


MADE: Mapping[str, Made] = {
    "spilled-execution": Made(
        (lambda run: sum((i.op.value == "fetch" and i.kind == "weights" for _, _, i in run(_ONE).program)),),
        drawn(_ONE, "Spilled execution, one slot"),
    ),
    "double-buffering": Made(
        (lambda run: period(run, _TWO) < period(run, _ONE), lambda run: period(run, _ONE) / period(run, _TWO)),
        drawn(_TWO, "Double buffering"),
    ),
    "sharp": Made(
        (
            lambda run: 1 - 1 / _over_sharp(run, "GPipe, m = 8"),
            lambda run: _over_sharp(run, "naive"),
            lambda run: _over_sharp(run, "whole models"),
        ),
        _sharp_picture,
        curves(
            "Twelve models on eight devices",
            "",
            "time",
            tuple(_MAKESPANS),
            {"time": lambda run, name: _MAKESPANS[name](run)},
            kind="bar",
        ),
    ),
    "sharp-measured": Made(
        each(lambda run, name: _measured(run, name) / _measured(run, "lrtf"), ("whole-task", "gpipe", "naive"))
    ),
    "pipedream-hybrid": Made((figure(_HYBRID, "period"),), drawn(_HYBRID)),
    "vertical-sync": Made(
        (
            lambda run: same_version(run, _VERTICAL),
            lambda run: all(
                len({versions_used(run, _VERTICAL, stage, mb)["fwd"] for stage in range(4)}) == 1 for mb in range(12)
            ),
            figure(_VERTICAL, "weight_versions", max),
        ),
        drawn(_VERTICAL),
    ),
    "2bw-versions": Made(
        (
            _version_rule,
            figure(_DOUBLE, "weight_versions", max),
            figure(Draw("pipedream", 4, 12), "weight_versions", max),
            figure(Draw("1f1b", 4, 8), "weight_versions", max),
        ),
        drawn(_DOUBLE),
        drawn(Draw("1f1b", 4, 4, num_steps=2), "PipeDream-Flush"),
    ),
    "2bw-memory": Made(
        (),
        _at_first_stage("Versions of the weights at the first stage", "versions", "weight_versions"),
        _at_first_stage("In flight at the first stage, 16 micro-batches per update", "micro-batches", "peak_inflight"),
    ),
    "2bw-throughput": Made(
        (
            lambda run: _most(run, partial(_pipelined, "2bw", "2.2B"), partial(_pipelined, "gpipe", "2.2B")),
            lambda run: _most(run, partial(_pipelined, "2bw", "3.8B"), partial(_tensor_only, "3.8B")),
            falls(rate, [_pipelined("2bw", "2.2B", batch) for batch in (1024, 512, 256, 128)]),
        ),
        _by_batch("2.2B", "nvlink-1x8"),
        _by_batch("2.2B", "nvlink-8x8"),
        _by_batch("3.8B", "nvlink-8x8"),
    ),
    "2bw-planner": Made(
        (
            falls(rate, [_pipelined("2bw", "2.2B", 512, depth) for depth in (4, 8, 16)], 1.02),
            falls(memory_gb, [_pipelined("2bw", "2.2B", 512, depth, microbatch_sizes=[1]) for depth in (4, 8, 16)]),
            lambda run: run.fits(_pipelined("2bw", "2.2B", 512, 1)),
        ),
        _over_depth("2.2 billion parameters on 64 V100s, batch 512", "samples/s", rate),
        _over_depth("Memory with micro-batches of 1", "GB", memory_gb, microbatch_sizes=[1]),
    ),
    "gpipe-one-accelerator": Made((lambda run: run(_PIPELINE_1) / run(NAIVE_1),)),
    "pipedream-speedups": Made(
        each(lambda run, model: speedup(run, _machines(model)), ("inception_v3", "vgg16", "resnet50", "alexnet"))
    ),
    "stalls": Made(
        each(lambda run, model: stall_share(run, model, 32) > stall_share(run, model, 4), ("vgg16", "gnmt")),
        curves(
            "Stalls of data parallelism, servers of four GPUs, 10 Gbit/s",
            "GPUs",
            "share of time",
            (4, 8, 16, 32),
            {model: lambda run, n, model=model: stall_share(run, model, n) for model in MODELS},
            log_x=True,
        ),
    ),
}
