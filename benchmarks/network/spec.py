"""Settings and results, and the ratio that makes a small network like the paper's.

The ratio to reproduce is ρ: seconds of one gradient reduction over seconds of one mini-batch's computation on a device,

    ρ = 2(m−1)/m · W/B / C      m devices, W bytes of weights, B bytes/s of a device's link, C seconds.

`paper_ratio` computes it from the layer graphs that PipeDream's authors published; `bandwidth_for` is the rate at which
a scaled-down model, measured here, has the same ρ on fewer devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipefit.errors import PipefitError
from pipefit.spec import Profile
from pipefit.spec.published import load_profile

PAPER_DEVICES = 16
PAPER_BANDWIDTH = 0.3125e9
"""Bytes per second of a device: a fourth of the 10 Gbit/s that the GPUs of a server of PipeDream's Cluster-A share."""


class Scaled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the paper at a size for a few processes.

    Attributes:
        model: built-in, or FILE:FACTORY.
        options: its size.
        microbatch: samples of a mini-batch, on one device.
        published: name of the layer graph that gives the ratio.
        stages: what the paper reports for 16 devices.
        speedup: over data parallelism, as reported there.
    """

    model: str
    options: str
    microbatch: int
    published: str
    stages: str
    speedup: float


_MODELS = Path(__file__).parents[2] / "examples/models"
SCALED = {
    "vgg": Scaled(f"{_MODELS}/vgg.py:vgg16", "image=96,width=0.125,classes=2400", 32, "vgg16", "15-1", 5.28),
    "resnet": Scaled(
        f"{_MODELS}/resnet.py:resnet50", "image=32,width=0.125,classes=150", 24, "resnet50", "data parallelism", 1.0
    ),
}
"""The classes are such that the convolutions hold as large a share of the weights as in the paper's models."""


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings.

    Attributes:
        ranks: hosts of the laboratory, one rank each.
        models: keys of `SCALED`.
        bandwidth_bytes_per_s: of every link, each way; None: such that ρ is the paper's.
        latency_s: of every message, one way; needs a kernel with netem.
        steps: updates of a synchronous pipeline in one turn; every strategy gets as many mini-batches.
        repeats: turns that count; medians are shown.
        seed: of the weights and the data.
    """

    ranks: int = 4
    models: tuple[str, ...] = ("vgg", "resnet")
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    steps: int = 2
    repeats: int = 1
    seed: int = 0


class NetworkRow(msgspec.Struct, frozen=True):
    """One strategy.

    Attributes:
        strategy: in words.
        schedule: its program's; "ddp" for torch's data parallelism.
        replicas: of each stage, as the papers write them.
        layers: of each stage.
        minibatches: whose gradients make one update of the first stage.
        against: mini-batches per update of the data parallelism that it is compared with.
        samples_per_s: median over the turns.
        speedup: over that data parallelism, torch's.
        predicted_samples_per_s: by the simulator; for "ddp" as if its reduction began with the last backward.
        counted_bytes: sent by all hosts per sample, by the counters of their network devices.
        program_bytes: the same by the program.
        busiest_link: bytes of the host that sent most, over what its link could have sent in that time.
    """

    strategy: str
    schedule: str
    replicas: str
    layers: tuple[int, ...]
    minibatches: int
    against: int
    samples_per_s: float
    speedup: float
    predicted_samples_per_s: float
    counted_bytes: float
    program_bytes: float
    busiest_link: float


class Planned(msgspec.Struct, frozen=True):
    """The answer of the partitioner under one convention of cost: replicas per stage, and its times in seconds."""

    cost: str
    replicas: str
    layers: tuple[int, ...]
    minibatch_s: float
    data_parallel_s: float
    straight_s: float


class ModelResult(msgspec.Struct, frozen=True):
    """One model's measurements.

    Attributes:
        name: key of `SCALED`.
        model: in words.
        microbatch: samples of a mini-batch.
        weight_bytes: W.
        compute_s: C, of a mini-batch on one device, measured.
        bandwidth_bytes_per_s: B of the links.
        ratio: ρ here.
        paper_ratio: ρ of the paper's model on its cluster.
        reported: what the paper says for 16 devices, and its speed-up over data parallelism.
        expected: the same speed-up with as many devices as here; see `scaled_speedup`.
        planned: the partitioner's answers.
        rows: by strategy.
    """

    name: str
    model: str
    microbatch: int
    weight_bytes: float
    compute_s: float
    bandwidth_bytes_per_s: float
    ratio: float
    paper_ratio: float
    reported: tuple[str, float]
    expected: float
    planned: tuple[Planned, ...]
    rows: tuple[NetworkRow, ...]


class NetworkResult(msgspec.Struct, frozen=True):
    """The whole result: settings, machine, and each model."""

    config: NetworkConfig
    machine: str
    models: tuple[ModelResult, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return {"format": "pipefit.network/1", **data}


class Task(msgspec.Struct, frozen=True):
    """The task of a rank: the settings and its place in the laboratory."""

    config: NetworkConfig
    lab: str
    models: dict[str, Scaled]
    cores: tuple[int, ...]
    share: float
    folder: str


class Report(msgspec.Struct, frozen=True):
    """A line that rank 0 writes: its progress, or a model's result."""

    line: str = ""
    result: ModelResult | None = None


def reduction_ratio(weight_bytes: float, compute_s: float, num_devices: int, bandwidth_bytes_per_s: float) -> float:
    """ρ: seconds of a ring reduction of all gradients over the seconds of a mini-batch.

    >>> reduction_ratio(4e6, 0.5, 4, 6e6)
    2.0
    """
    return 2 * (num_devices - 1) / num_devices * weight_bytes / bandwidth_bytes_per_s / compute_s


def bandwidth_for(ratio: float, weight_bytes: float, compute_s: float, num_devices: int) -> float:
    """The bandwidth at which ρ is this, in bytes per second.

    >>> bandwidth_for(2.0, 4e6, 0.5, 4)
    6000000.0
    """
    return reduction_ratio(weight_bytes, compute_s, num_devices, ratio)


def scaled_speedup(reported: float, num_devices: int) -> float:
    """The speed-up at "15-1" scaled to (n − 1)-1: of n devices one computes next to nothing. 1 stays 1.

    >>> round(scaled_speedup(5.28, 4), 2), scaled_speedup(5.28, 16), scaled_speedup(1.0, 4)
    (4.22, 5.28, 1.0)
    """
    whole = (PAPER_DEVICES - 1) / PAPER_DEVICES
    return reported * (num_devices - 1) / num_devices / whole if reported > 1 else reported


def paper_ratio(published: str) -> float:
    """ρ of a published layer graph on 16 devices, each with its part of its server's link."""
    profile = load_profile(published)
    return reduction_ratio(weight_bytes(profile), compute_s(profile), PAPER_DEVICES, PAPER_BANDWIDTH)


def weight_bytes(profile: Profile) -> float:
    """W: bytes of all weights."""
    return float(sum(layer.weight_bytes for layer in profile.layers))


def compute_s(profile: Profile) -> float:
    """C: seconds of a mini-batch through all layers and back."""
    return float(sum(layer.total_s for layer in profile.layers)) + profile.loss_s


def check(config: NetworkConfig, scaled: Mapping[str, Scaled] = SCALED) -> None:
    """Refuses what has no meaning.

    Raises:
        PipefitError: which option, and what it may be.
    """
    if not 2 <= config.ranks <= 8:
        raise PipefitError(f"--ranks: strategies differ from 2 ranks on, and 8 share a machine at most: {config.ranks}")
    unknown = [name for name in config.models if name not in scaled]
    if unknown or not config.models:
        raise PipefitError(f"--model: expected {' or '.join(scaled)}, got {', '.join(unknown) or 'none'}")
