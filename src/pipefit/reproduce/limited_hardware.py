"""The lecture on training large networks with limited hardware: GPipe, Hydra, PipeDream, PipeDream-2BW."""

from __future__ import annotations

from typing import Any

from pipefit.reproduce.clusters import NAIVE_1, stall_share
from pipefit.reproduce.entry import DOUBLE, GPIPE, HYDRA, PIPEDREAM, Bench, Entry, Picture, Value, curves, drawn, figure
from pipefit.reproduce.measured import study_file
from pipefit.reproduce.pipedream_gpipe import same_version, versions_used
from pipefit.reproduce.predicted import falls, memory_gb, rate, speedup
from pipefit.reproduce.steps import Draw, Planned, Python, Verb

DECK = "Training with limited hardware"

_ONE, _TWO = Draw("spilled", 4, 2, slots=1), Draw("spilled", 4, 2, slots=2)
_DOUBLE = Draw("pipedream-2bw", 4, 4, num_steps=6)
_VERTICAL = Draw("pipedream-vertical-sync", 4, 12)


def _version_rule(run: Bench) -> bool:
    """Whether micro-batch k, from 1, uses version max(⌊(k − 1)/m⌋ − 1, 0) at every stage."""
    places = [(stage, k) for stage in range(4) for k in range(1, 25)]
    return all(versions_used(run, _DOUBLE, stage, k - 1)["fwd"] == max((k - 1) // 4 - 1, 0) for stage, k in places)


def _most_versions(run: Bench, step: Draw) -> int:
    return max(run(step).metrics["weight_versions"])


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


# ------------------------------------------------------------------------------------------ PipeDream-2BW: throughput

_GPT = {
    "2.2B": "gpt:layers=48,hidden=1920,heads=32,sequence=512",
    "3.8B": "gpt:layers=54,hidden=2432,heads=32,sequence=512",
}


def _coalesced(size: str, machines: int, batch: int, depth: int | None = None, **more: Any) -> Planned:
    """A GPT under 2BW on servers of eight V100s."""
    options = {"microbatch_sizes": [1, 2, 4, 8], "depths": [depth] if depth else [4, 8, 16]} | more
    return Planned(_GPT[size], f"nvlink-{machines}x8", method="2bw", global_batch=batch, **options)


def _flushed(size: str, machines: int, batch: int) -> Planned:
    options = {"microbatch_sizes": [1, 2, 4, 8], "depths": [4, 8, 16]}
    return Planned(_GPT[size], f"nvlink-{machines}x8", method="gpipe", global_batch=batch, **options)


def _tensor_only(size: str, machines: int, batch: int) -> Planned:
    options = {"tensors": [16], "depths": [1], "schedules": ["1f1b"], "microbatch_sizes": [1, 2, 4]}
    return Planned(_GPT[size], f"nvlink-{machines}x8", global_batch=batch, **options)


_SCHEDULES = ("gpipe", "pipedream", "pipedream-2bw", "1f1b")
_HYBRID = Draw("pipedream", 3, 8, replicas=(2, 1, 1), stage_work=(4, 2, 2), forward=1, backward=1)
_PIPELINE_1 = NAIVE_1.but(num_microbatches=32, recompute="stage")
_SLOW = "The paper's links: 10 to 25 Gbit/s and its own all-reduce; the ring of ours overlaps better."


def _period(run: Bench, step: Draw) -> float:
    return float(run(step).metrics["period"])


def _held(run: Bench, name: str, depth: int, what: str) -> float:
    count = 48 if name == "pipedream" else 16
    return float(run(Draw(name, depth, count)).metrics[what][0])


def _machines(model: str) -> Planned:
    """Machines of one GPU, joined by 10 Gbit/s."""
    return Planned(
        model, "pcie-16x1", method="pipedream", memory="64 GB", microbatch_sizes=[128 if model == "resnet50" else 64]
    )


def _measured(run: Bench, policy: str) -> float:
    """Seconds of the measured turns under a policy."""
    return float(run(Verb("study", study_file()))["policies"][policy]["makespan_s"])


ENTRIES = (
    Entry(
        "spilled-execution",
        "Hydra: spilled execution",
        "A model of four shards on one device: each shard is fetched twice per step",
        "drawn",
        HYDRA + ", section 4",
        (
            Value(
                "fetches of weights per step",
                lambda run: sum(i.op.value == "fetch" and i.kind == "weights" for _, _, i in run(_ONE).program),
                8,
                why="The last shard's forward and backward follow each other, so it is fetched once: 2·4 − 1 = 7.",
            ),
        ),
        (drawn(_ONE, "Spilled execution, one slot"),),
    ),
    Entry(
        "double-buffering",
        "Hydra: double buffering",
        "With two slots the next shard is fetched while the current one computes",
        "drawn",
        HYDRA + ", section 4",
        (
            Value("faster than with one slot", lambda run: _period(run, _TWO) < _period(run, _ONE), True),
            Value("time of a step, one slot over two", lambda run: _period(run, _ONE) / _period(run, _TWO), unit="×"),
        ),
        (drawn(_TWO, "Double buffering"),),
    ),
    Entry(
        "sharp",
        "Hydra: results and observations",
        "SHARP: shards of 12 models alternate on 8 devices; GPipe and naive model parallelism train one by one",
        "computed",
        HYDRA + "; slide: up to 90 % lower runtime than GPipe, 4x faster than naive model parallelism",
        (
            Value(
                "lower runtime than GPipe with one micro-batch, up to",
                lambda run: 1 - _study(run).makespan_s / _one_by_one(run, 1),
                0.9,
                "%",
                within=0.1,
            ),
            Value(
                "lower runtime than GPipe with 8 micro-batches",
                lambda run: 1 - _study(run).makespan_s / _one_by_one(run, 8),
                unit="%",
            ),
            Value(
                "times faster than naive model parallelism",
                lambda run: _one_by_one(run, 1) / _study(run).makespan_s,
                4,
                "×",
                within=0.25,
                why="Of 8 devices one works in naive model parallelism; the slide does not give its number of devices.",
            ),
            Value(
                "times faster than whole models, one per device",
                lambda run: _study(run, "whole-task").makespan_s / _study(run).makespan_s,
                unit="×",
            ),
        ),
        (
            _sharp_picture,
            curves(
                "Twelve models on eight devices",
                "",
                "time",
                ("SHARP", "whole models", "GPipe, m = 8", "GPipe, m = 4", "naive"),
                {
                    "time": lambda run, name: {
                        "SHARP": lambda: _study(run).makespan_s,
                        "whole models": lambda: _study(run, "whole-task").makespan_s,
                        "GPipe, m = 8": lambda: _one_by_one(run, 8),
                        "GPipe, m = 4": lambda: _one_by_one(run, 4),
                        "naive": lambda: _one_by_one(run, 1),
                    }[name]()
                },
                kind="bar",
            ),
        ),
        "Energy (up to 2x less) is not computed: devices have no figure of it.",
    ),
    Entry(
        "sharp-measured",
        "Hydra: results and observations",
        "A study of four models on two workers, and its measured turns under every policy and baseline",
        "measured",
        HYDRA,
        tuple(
            Value(
                f"{name}: time over SHARP's",
                lambda run, name=name: _measured(run, name) / _measured(run, "lrtf"),
                unit="×",
            )
            for name in ("whole-task", "gpipe", "naive")
        ),
        note="The same turns under each policy; gpipe and naive: one model after the other over both workers.",
    ),
    Entry(
        "pipedream-hybrid",
        "PipeDream: pipeline parallel training, figure 6",
        "Pipelining with a replicated first stage",
        "drawn",
        "Harlap et al., PipeDream (2018), figure 6",
        (Value("time per mini-batch, stages of costs 4, 2, 2", figure(_HYBRID, "period")),),
        (drawn(_HYBRID),),
    ),
    Entry(
        "vertical-sync",
        "PipeDream: effective learning",
        "Vertical sync: a mini-batch uses the version of the first stage at every stage",
        "drawn",
        PIPEDREAM + ", section 3.3",
        (
            Value("forward and backward use the same version", lambda run: same_version(run, _VERTICAL), True),
            Value(
                "all stages use the same version",
                lambda run: all(
                    len({versions_used(run, _VERTICAL, stage, mb)["fwd"] for stage in range(4)}) == 1
                    for mb in range(12)
                ),
                True,
            ),
            Value("versions kept, at most", lambda run: _most_versions(run, _VERTICAL), 4),
        ),
        (drawn(_VERTICAL),),
    ),
    Entry(
        "2bw-versions",
        "PipeDream-2BW: double-buffered weight updates",
        "Two versions of the weights: micro-batch k uses max(⌊(k − 1)/m⌋ − 1, 0)",
        "drawn",
        DOUBLE + ", section 3.1",
        (
            Value("the rule holds at every stage", _version_rule, True),
            Value("versions kept, at most", lambda run: _most_versions(run, _DOUBLE), 2),
            Value("PipeDream keeps", lambda run: _most_versions(run, Draw("pipedream", 4, 12)), 4),
            Value("PipeDream-Flush keeps", lambda run: _most_versions(run, Draw("1f1b", 4, 8)), 1),
        ),
        (drawn(_DOUBLE), drawn(Draw("1f1b", 4, 4, num_steps=2), "PipeDream-Flush")),
    ),
    Entry(
        "2bw-memory",
        "PipeDream-2BW: weight versions and activations",
        "Versions of the weights, and micro-batches in flight, of four schedules",
        "drawn",
        DOUBLE + ", section 3",
        (),
        (
            curves(
                "Versions of the weights at the first stage",
                "depth d",
                "versions",
                (2, 4, 8, 16),
                {name: lambda run, d, name=name: _held(run, name, d, "weight_versions") for name in _SCHEDULES},
            ),
            curves(
                "In flight at the first stage, 16 micro-batches per update",
                "depth d",
                "micro-batches",
                (2, 4, 8, 16),
                {name: lambda run, d, name=name: _held(run, name, d, "peak_inflight") for name in _SCHEDULES},
            ),
        ),
    ),
    Entry(
        "2bw-throughput",
        "PipeDream-2BW: key takeaways, figures (a) to (c)",
        "GPTs of 2.2 and 3.8 billion parameters: 2BW, GPipe and tensor parallelism by batch",
        "computed",
        DOUBLE + ", figure 8; slide: 3.2X over GPipe, 20X over Megatron's model parallelism",
        (
            Value(
                "2.2B, 64 V100s, batch 512: times GPipe, up to",
                lambda run: rate(run, _coalesced("2.2B", 8, 512)) / rate(run, _flushed("2.2B", 8, 512)),
                3.2,
                "×",
                within=0.25,
                why="This GPipe has as many micro-batches as fit; the paper's has few, which flushes often.",
            ),
            Value(
                "3.8B, 64 V100s, batch 512: times tensor parallelism over 16",
                lambda run: rate(run, _coalesced("3.8B", 8, 512)) / rate(run, _tensor_only("3.8B", 8, 512)),
                20,
                "×",
                within=0.25,
                why="The sums of tensor parallelism between servers decide it; the paper does not give their rate.",
            ),
            Value(
                "throughput rises with the batch",
                falls(rate, [_coalesced("2.2B", 8, batch) for batch in (1024, 512, 256, 128)]),
                True,
            ),
        ),
        (
            curves(
                "2.2 billion parameters on 64 V100s",
                "batch",
                "samples/s",
                (64, 128, 256, 512),
                {
                    "2BW": lambda run, batch: rate(run, _coalesced("2.2B", 8, batch)),
                    "GPipe": lambda run, batch: rate(run, _flushed("2.2B", 8, batch)),
                    "tensor parallelism, 16": lambda run, batch: rate(run, _tensor_only("2.2B", 8, batch)),
                },
                log_x=True,
            ),
        ),
    ),
    Entry(
        "2bw-planner",
        "PipeDream-2BW: planner, and key takeaways",
        "Width, depth and micro-batch size: throughput falls with depth, larger micro-batches and models fit",
        "computed",
        DOUBLE + ", section 4",
        (
            Value(
                "throughput falls with depth",
                falls(rate, [_coalesced("2.2B", 8, 512, depth) for depth in (4, 8, 16)], 1.02),
                True,
                why="The batch of 512 fills every pipeline, and shorter ones sum larger gradients between servers.",
            ),
            Value(
                "memory at micro-batches of 1 falls with depth",
                falls(memory_gb, [_coalesced("2.2B", 8, 512, depth, microbatch_sizes=[1]) for depth in (4, 8, 16)]),
                True,
            ),
            Value("2.2B fits without a pipeline", lambda run: run.fits(_coalesced("2.2B", 8, 512, 1)), False),
        ),
        (
            curves(
                "2.2 billion parameters on 64 V100s, batch 512",
                "depth",
                "samples/s",
                (2, 4, 8, 16),
                {"2BW": lambda run, depth: rate(run, _coalesced("2.2B", 8, 512, depth))},
                log_x=True,
            ),
            curves(
                "Memory with micro-batches of 1",
                "depth",
                "GB",
                (2, 4, 8, 16),
                {"2BW": lambda run, depth: memory_gb(run, _coalesced("2.2B", 8, 512, depth, microbatch_sizes=[1]))},
                log_x=True,
            ),
        ),
    ),
    Entry(
        "gpipe-one-accelerator",
        "GPipe: results and observations",
        "One accelerator trains a model about 4 times as large, by replaying forwards",
        "computed",
        GPIPE + ", table 1: 318M over 82M parameters, 13 over 3 layers",
        (
            Value(
                "times more layers of a Transformer",
                lambda run: run(_PIPELINE_1) / run(NAIVE_1),
                13 / 3,
                "×",
                within=0.25,
                why="Ours without replay fits one layer: its activations of 32 samples at once fill the 16 GB.",
            ),
        ),
    ),
    Entry(
        "pipedream-speedups",
        "PipeDream: results",
        "Faster than data parallelism: VGG-16 5.12x, ResNet-50 1.21x (and Inception-v3 1.45x, AlexNet 6.76x)",
        "computed",
        "Harlap et al., PipeDream (2018): 8 or 16 machines of one GPU",
        tuple(
            Value(name, lambda run, model=model: speedup(run, _machines(model)), published, "×", 0.25, _SLOW)
            for name, model, published in (("VGG-16", "vgg16", 5.12), ("ResNet-50", "resnet50", 1.21))
        ),
        note="Profiles of Inception-v3 and AlexNet are not published.",
    ),
    Entry(
        "stalls",
        "Observations: communication overhead by the number of machines",
        "The share of time in which data parallelism waits for messages, by the number of GPUs",
        "computed",
        PIPEDREAM + ", figure 1",
        tuple(
            Value(f"{model}: rises with the GPUs", make, True)
            for model in ("vgg16", "gnmt")
            for make in [lambda run, model=model: stall_share(run, model, 32) > stall_share(run, model, 4)]
        ),
        (
            curves(
                "Stalls of data parallelism, servers of four GPUs, 10 Gbit/s",
                "GPUs",
                "share of time",
                (4, 8, 16, 32),
                {
                    model: lambda run, n, model=model: stall_share(run, model, n)
                    for model in ("vgg16", "resnet50", "gnmt")
                },
                log_x=True,
            ),
        ),
    ),
    Entry(
        "faster-gpus",
        "Observations: VGG on Titan X and V100",
        "220 hours on 8 machines with a Titan X each, less than 100 hours with V100s",
        "cited",
        PIPEDREAM,
        note="Needs a profile of VGG-16 on a Titan X, which is not published, and its hours to an accuracy.",
    ),
    Entry(
        "growth-of-models",
        "Problem motivation",
        "Winners of ImageNet: 4M parameters in 2014, 146M in 2017, 36x; memory of GPUs grew 3x",
        "cited",
        "slide",
        note="A fact about others' models; there is nothing to run.",
    ),
)

VERTICAL_SYNC, STALLS = (next(entry for entry in ENTRIES if entry.name == name) for name in ("vertical-sync", "stalls"))
