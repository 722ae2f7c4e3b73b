"""Options of a training run, each defined once: name, type, default and help, for Python, TOML and the command line.

Python takes the frozen dataclasses themselves. The command line (`pipefit.cli.options`) makes one flag of each field,
with the help under "Attributes" and the names given here; a TOML file takes the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_type_hints

from pipefit.errors import ABOVE_0, PlanError, look_up
from pipefit.spec.arguments import Amount, Number, check_fields
from pipefit.spec.plan import Recompute, recompute_kind
from pipefit.units import parse_quantity

MOST_SEED: Final = 2**63 - 1
"""Largest seed of random numbers."""

LARGEST_LOSS_SCALE: Final = 2.0**126
"""Largest scale of a loss: twice that is still a number of float32."""

MOST_THREADS: Final = 1024
"""Most CPU threads of a process."""

AUTO: Final = "auto"
"""The value that leaves a choice to the planner."""

STEP_ON: Final = ("auto", "device", "host")
"""Places where spilled stages may step."""

KEEP: Final = ("auto", "all", "none")
"""Choices of the spilled stages that keep their activations."""

STOP = "stop"
SKIP = "skip"
OFF = "off"
"""Policies for an update whose loss or gradient is not a finite number."""

_StepOn = Literal["auto", "device", "host"]
_Keep = Literal["auto", "all", "none"]

Group = TypeVar("Group")


def setting(
    default: Any,
    *flags: str,
    typed: Any = None,
    least: float | None = None,
    most: float = math.inf,
    hidden: bool = False,
) -> Any:
    """A field of a group of options.

    Args:
        default: its value where none is given, or `dict` for an empty one.
        flags: its names on the command line, the long one first; (): made from the field's name.
        typed: its type on the command line, where it differs in Python: a type, or "numbers" (2,1), "figures"
            (0.9,0.95), "words" (a=1,b=2; may be repeated), "pairs" (NAME=INTEGER; may be repeated), "texts" (several
            after one flag).
        least: the smallest number that it may be; a whole number such as 1: it must be whole; None: not checked.
        most: the largest, where `least` is given.
        hidden: for Python only.
    """
    facts = {"flags": flags, "typed": typed, "least": least, "most": most, "hidden": hidden}
    if default is dict:
        return field(default_factory=dict, metadata=facts)
    return field(default=default, metadata=facts)


class Checked:
    """A group of options that is checked when it is made; see `check_least`."""

    def __post_init__(self) -> None:
        check_least(self)


@dataclass(frozen=True)
class Parallelism(Checked):
    """The distribution of a model over processes.

    Attributes:
        ranks: processes: data × pipeline × tensor; default: the plan's, 1 under a cap, one for each GPU, or one for
            each of up to 4 cores.
        chunks: stages on each rank, for the looped schedules.
        replicas: copies of each stage, such as 2,1; one number is for all.
        data_parallel: copies of the whole pipeline.
        tensor: processes that share each rank by tensor parallelism, for models with rules or a plan for it.
        sequence_parallel: the processes of a rank also split the sequence between them.
        whole_messages: each process of a rank sends all of a message between ranks, not only its part.
        shard_optimizer: shard the optimizer's states over the replicas of each stage.
        verify_replicas: steps between comparisons of the weights of replicas, which are equal bit for bit; 0: none;
            default: at each checkpoint.
        recompute: what backwards replay instead of keeping it: "stage": whole stages, of which only inputs are kept;
            "layer": layer by layer, of which inputs are kept; "selective": only the cores of attention.
        options: an option of the schedule as NAME=INTEGER; may be repeated.
        device: where ranks compute, like cpu or cuda; default: the GPU of the process where it has one.
    """

    ranks: int | None = setting(None, "--ranks", "-n", least=1)
    chunks: int = setting(1, "--chunks", "-v", least=1)
    replicas: Number | Sequence[Number] = setting((), typed="numbers")
    data_parallel: int = setting(1, "--data-parallel", "-d", least=1)
    tensor: int = setting(1, "--tensor", "-t", least=1)
    sequence_parallel: bool = False
    whole_messages: bool = False
    shard_optimizer: bool = False
    verify_replicas: int | None = setting(None, least=0)
    recompute: Recompute = "none"
    options: Mapping[str, int] = setting(dict, "--schedule-option", typed="pairs")
    device: Any = setting(None, typed=str)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", recompute_kind(self.recompute))
        super().__post_init__()

    @property
    def copies(self) -> tuple[int, ...]:
        """Copies of each stage; one number is for every stage; (): one copy of each.

        Raises:
            PlanError: both `replicas` and `data_parallel` are given.
        """
        each = (self.replicas,) if isinstance(self.replicas, int) else tuple(self.replicas)
        if self.data_parallel == 1:
            return each
        if each:
            raise PlanError("give replicas of each stage or data_parallel copies of the whole pipeline, not both")
        return (self.data_parallel,)


@dataclass(frozen=True)
class Precision(Checked):
    """How layers compute: in which type, while weights stay as they are, and whether they are compiled.

    Attributes:
        dtype: type that layers compute in: fp32 (the model's own), or bf16 or fp16, under autocast.
        loss_scale: first scale of the loss, which then follows the gradients; default: 65536 for fp16, else no scaling.
        compile: train layers by torch.compile, one compilation for each kind of layer. In Python also the name of a
            backend, such as "aot_eager"; True is "inductor".
    """

    dtype: Literal["fp32", "bf16", "fp16"] = setting("fp32", "--precision")
    loss_scale: float | None = setting(None, least=ABOVE_0, most=LARGEST_LOSS_SCALE)
    compile: bool | str = setting(False, typed=bool)

    @classmethod
    def of(cls, value: Precision | str) -> Precision:
        """A precision from its name, or itself."""
        return value if isinstance(value, Precision) else cls(value)  # type: ignore[arg-type]  # checked where it is used


@dataclass(frozen=True)
class Updates(Checked):
    """Settings of a weight update in addition to its optimizer: clipping, learning-rate schedule, seed.

    Attributes:
        clip_norm: largest global norm of an update's gradients, over all stages; 0: any.
        nonfinite: for an update whose loss or a gradient is not finite: stop (before any rank steps; the weights are
            those of the step before), skip (the next batch follows), or off (only losses, after the step).
        seed: of dropout; in a run also of weights and the order of the data.
        no_decay: parts of names, like bias,norm: parameters with one in their name, or in the class of the module that
            holds them, get no weight decay.
        scheduler: from an optimizer to its learning-rate schedule, which steps with it.
        weigh: from a micro-batch's target to its weight in the batch's mean loss; None: its number of samples. When
            the loss averages over tokens, return the number of tokens that count.
    """

    clip_norm: float | None = setting(None, "--clip", least=0.0)
    nonfinite: Literal["stop", "skip", "off"] = "stop"
    seed: int = setting(0, least=0, most=MOST_SEED)
    no_decay: Sequence[str] | str = setting((), typed="words")
    scheduler: Any = setting(None, hidden=True)
    weigh: Callable[[Any], Any] | None = setting(None, hidden=True)


@dataclass(frozen=True)
class Saves(Checked):
    """The checkpoints of a training.

    Attributes:
        every: steps between checkpoints; 0: only at the end; default: by time, see --checkpoint-share.
        share: largest part of the time that goes into checkpoints by time; they are at least 60 s apart.
        keep: number of the newest checkpoints that stay; 0: all.
    """

    every: int | None = setting(None, "--checkpoint-every", least=0)
    share: float = setting(0.03, "--checkpoint-share", least=0.001, most=1.0)
    keep: int = setting(3, "--keep-checkpoints", least=0)


@dataclass(frozen=True)
class Spilled(Checked):
    """Spilling of stages to the host's memory or to disk: `Pipeline(…, spill=Spilled("1.5 GiB", disk="/scratch"))`.

    Attributes:
        device_memory: cap on the device's memory, like 1.5GiB: the rest of the model waits on the host or on disk.
        host_memory: limit on the machine's memory that spilled stages take; default: no limit.
        disk: folder in which spilled stages wait; all of them, unless the host's memory is used up to a limit.
        slots: stages whose weights and gradients are on the device at once: one computes, the others load.
        optim_slots: stages whose optimizer states are on the device at once; 0: these stay there.
        step_on: where spilled stages step; on the host the optimizer's states stay there. auto: the faster of both by
            the plan for a cap, else the device. In Python also the stages that step on the host.
        keep: spilled stages that keep their activations on the device, and replay nothing; auto: as many as fit under
            a cap, else none. In Python also their numbers.
        activations: inputs of spilled stages wait there too, until their replay; under a cap this is also chosen where
            nothing fits otherwise.
        prefetch: stages ahead that the next one is loaded; None: as soon as a slot is free; 0: when it is needed.
        resume: resume from the last step that a run committed in `disk` before it was cut off. Model, plan and training
            must be the same; `Pipeline.num_updates` is the step. A number: from that step or one before.
        commit_every: steps between commits to disk, to resume from; 0: none; default: 1 if all is there, else 10.
        about: further JSON data that must be the same to resume, by the names that messages use.
    """

    device_memory: float | str | None = setting(None, typed=str)
    host_memory: float | str | None = setting(None, typed=str)
    disk: str | Path | None = setting(None, typed=str)
    slots: int = setting(2, least=1, hidden=True)
    optim_slots: int = setting(1, least=0, hidden=True)
    step_on: Literal["auto", "device", "host"] | Sequence[Amount] = setting(
        AUTO, typed=Literal["auto", "device", "host"]
    )
    keep: Literal["auto", "all", "none"] | Sequence[Amount] = setting(AUTO, typed=Literal["auto", "all", "none"])
    activations: bool = False
    prefetch: int | None = setting(None, least=0, hidden=True)
    resume: bool | Amount = setting(False, hidden=True)
    commit_every: int | None = setting(None, least=0)
    about: Mapping[str, Any] = setting(dict, hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("device_memory", "host_memory"):
            size = in_bytes(getattr(self, name), name)
            if size is not None and not size > 0:
                raise PlanError(f"{name}: expected more than 0 bytes, got {getattr(self, name)!r}")

    @property
    def cap_bytes(self) -> float | None:
        """The cap on the device's memory."""
        return in_bytes(self.device_memory, "device_memory")

    @property
    def host_bytes(self) -> int | None:
        """The limit on the host's memory."""
        size = in_bytes(self.host_memory, "host_memory")
        if size is None:
            return None
        return int(size)

    @property
    def folder(self) -> Path | None:
        """The folder of the disk tier."""
        if self.disk is None:
            return None
        return Path(self.disk)


@dataclass(frozen=True)
class Request(Checked):
    """The pipeline that a user asks for; `pipefit.pipeline.request` turns it into a plan.

    Attributes:
        schedule: its name, or auto; `pipefit schedules` lists them. Default: auto under a cap, and where no option of
            the pipeline is given; else 1f1b.
        microbatches: per weight update; default: chosen with the schedule auto, else 4.
        stages: layers of each stage, like 3,3; default: balanced by a profile, else by FLOP and parameters. In Python
            also a number of stages, or "auto".
        plan: follow this plan, with its schedule, stages and micro-batches.
        parallelism: distribution of the model over processes.
        spill: spilling of stages; None: none.
    """

    schedule: str | None = None
    microbatches: int | None = setting(None, "--microbatches", "-m", least=1)
    stages: int | Sequence[int] | str | None = setting(None, typed="numbers")
    plan: Any = setting(None, typed=str)
    parallelism: Parallelism = field(default_factory=Parallelism)
    spill: Spilled | None = None

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per weight update where no search chooses them."""
        return self.microbatches or 4


def in_bytes(value: float | str | None, name: str) -> float | None:
    """Bytes of a number, or of text like "1.5 GiB"; None stays None."""
    if value is None:
        return None
    return parse_quantity(value, "bytes", name)


def as_flat(group: Any) -> dict[str, Any]:
    """All visible options of a group and of the groups in it, by their names with underscores."""
    flat: dict[str, Any] = {}
    kinds = groups_of(type(group))
    for one in fields(group):
        value = getattr(group, one.name)
        if one.name in kinds:
            flat |= as_flat(kinds[one.name]() if value is None else value)
        elif not one.metadata.get("hidden"):
            flat[key_of(one)] = value
    return flat


def from_flat(kind: type[Group], values: Mapping[str, Any], usual: Group | None = None) -> Group:
    """The group whose options have these values; the inverse of `as_flat`.

    Args:
        kind: of the group.
        values: by names as `as_flat` gives them.
        usual: the group with the values of the other options; None: the defaults.

    Raises:
        PlanError: a name is not that of an option.
    """
    if usual is None:
        usual = kind()
    known = as_flat(usual)
    for name in values:
        look_up(name, known, "unknown option", PlanError)
    return _with_values(usual, values)


def _with_values(group: Group, values: Mapping[str, Any]) -> Group:
    changes: dict[str, Any] = {}
    groups = groups_of(type(group))
    for one in fields(group):  # type: ignore[arg-type]
        if one.name in groups:
            before = getattr(group, one.name)
            default = groups[one.name]()
            after = _with_values(default if before is None else before, values)
            if before is None and after == default:
                changes[one.name] = None
            else:
                changes[one.name] = after
        elif not one.metadata.get("hidden") and key_of(one) in values:
            changes[one.name] = values[key_of(one)]
    return replace(group, **changes)  # type: ignore[type-var]


def key_of(one: Any) -> str:
    """The name of a field in a flat table, a TOML file and JSON, such as "data_parallel"."""
    flags = one.metadata.get("flags")
    if flags:
        return str(flags[0]).removeprefix("--").replace("-", "_")
    return str(one.name)


def groups_of(kind: type[Any]) -> dict[str, type[Any]]:
    """The fields of a group that are groups themselves, also where they may be None."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        for part in (hint, *getattr(hint, "__args__", ())):
            if isinstance(part, type) and is_dataclass(part):
                found[name] = part
    return found


_MOST_COUNT = 10**15
"""Largest number of an option without a limit of its own: arithmetic in floating point stays exact."""


def check_least(group: Any) -> None:
    """Checks the types of a group's options, and that no number is below its minimum or above its maximum.

    Raises:
        PlanError: one is of another type, is too small or large or not finite, or not whole where it must be.
    """
    for one in fields(group):
        least = one.metadata.get("least")
        value = getattr(group, one.name)
        if least is None or value is None:
            continue
        most = one.metadata["most"]
        kinds = (int,) if isinstance(least, int) else (int, float)
        if isinstance(value, int) and most == math.inf and value > _MOST_COUNT:
            most = _MOST_COUNT
        if type(value) not in kinds or not least <= value <= most or math.isinf(value):
            if kinds == (int,):
                noun = "a whole number"
            else:
                noun = "a number"
            if most < math.inf:
                limit = f"from {least} to {most}"
            else:
                limit = f"of at least {least:g}"
            if least == ABOVE_0:
                limit = f"above 0 and at most {most:g}"
            raise PlanError(f"{key_of(one)}: expected {noun} {limit}, got {value!r}")
    check_fields(group, PlanError)
