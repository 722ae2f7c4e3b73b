"""Options of a training run, each defined once: name, type, default and help, for Python, TOML and the command line.

Python takes the frozen dataclasses themselves. The command line (`pipefit.cli.options`) makes one flag of each field,
with the help and the names given here; a TOML file takes the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import Meta

from pipefit.errors import PlanError, look_up
from pipefit.spec.arguments import Amount, NotNegative, Number, Seed, check_fields
from pipefit.spec.plan import Recompute, Shard, recompute_kind
from pipefit.units import in_bytes

LARGEST_LOSS_SCALE = 2.0**126
"""Largest scale of a loss: twice that is still a number of float32."""
AUTO = "auto"
"""The value that leaves a choice to the planner."""

StepOn = Literal["auto", "device", "host"]
STEP_ON: tuple[str, ...] = get_args(StepOn)
"""Places where spilled stages may step."""

Keep = Literal["auto", "all", "none"]
KEEP: tuple[str, ...] = get_args(Keep)
"""Choices of the spilled stages that keep their activations."""

STOP = "stop"
SKIP = "skip"
"""Policies for an update whose loss or gradient is not a finite number."""

Group = TypeVar("Group")


def setting(
    default: Any,
    help: str = "",
    *flags: str,
    typed: Any = None,
    hidden: bool = False,
    only: Sequence[str] = (),
) -> Any:
    """A field of a group of options.

    Args:
        default: its value where none is given, or `dict` for an empty one.
        help: for people, in a sentence.
        flags: its names on the command line where the long one is not the field's, and the short one: "--clip", "-d".
        typed: its type on the command line, where it differs: a type, or a name of `pipefit.cli.options.TYPES`,
            such as "numbers" (2,1).
        hidden: for Python only.
        only: the ways to use the group, such as planning methods, in which the option has an effect; (): in all.
    """
    facts = {"help": help, "flags": flags, "typed": typed, "hidden": hidden, "only": only}
    if default is dict:
        return field(default_factory=dict, metadata=facts)
    return field(default=default, metadata=facts)


class Checked:
    """A group of options that is checked when it is made, by the annotations of its fields."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError)


@dataclass(frozen=True)
class Parallelism(Checked):
    """The distribution of a model over processes."""

    ranks: Number | None = setting(
        None,
        "Processes: data × pipeline × tensor; default: the plan's, 1 under a cap, one for each GPU, or one for "
        "each of up to 4 cores.",
        "-n",
    )
    chunks: Number = setting(1, "Stages on each rank, for the looped schedules.", "-v")
    replicas: Number | Sequence[Number] = setting(
        (), "Copies of each stage, such as 2,1; one number is for all.", typed="numbers"
    )
    data_parallel: Number = setting(1, "Copies of the whole pipeline.", "-d")
    shares: Sequence[Number] = setting((), "Micro-batches of each copy per update, such as 3,1.", typed="numbers")
    tensor: Number = setting(
        1,
        "Processes that share each rank by tensor parallelism, for models with rules or a plan for it.",
        "-t",
    )
    sequence_parallel: bool = setting(False, "The processes of a rank also split the sequence between them.")
    whole_messages: bool = setting(
        False, "Each process of a rank sends all of a message between ranks, not only its part."
    )
    shard: Shard = setting("none", "What the replicas of each stage share: each includes those before it.")
    verify_replicas: Amount | None = setting(
        None,
        "Steps between comparisons of the weights of replicas, which are equal bit for bit; 0: none; default: at"
        " each checkpoint.",
    )
    rebalance: bool = setting(
        False, "Layers move between ranks while the run trains, where measured times promise that this pays."
    )
    recompute: Recompute = setting(
        "none",
        'What backwards replay instead of keeping it: "stage": whole stages, of which only inputs are kept; '
        '"layer": layer by layer, of which inputs are kept; "selective": only the cores of attention.',
    )
    options: Mapping[str, int] = setting(
        dict, "An option of the schedule as NAME=INTEGER; may be repeated.", "--schedule-option", typed="pairs"
    )
    device: Any = setting(
        None, "Where ranks compute, like cpu or cuda; default: the GPU of the process where it has one.", typed=str
    )

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

    In Python `compile` may also be the name of a backend of torch.compile, such as "aot_eager"; True is "inductor".
    """

    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = setting(
        "fp32",
        "Type that layers compute in: fp32 (the model's own), tf32 (the same, with products that a GPU rounds), or "
        "bf16 or fp16, under autocast.",
        "--precision",
    )
    loss_scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)] | None = setting(
        None,
        "First scale of the loss, which then follows the gradients; default: 65536 for fp16, else no scaling.",
    )
    compile: bool | str = setting(
        False, "Train layers by torch.compile, one compilation for each kind of layer.", typed=bool
    )

    @classmethod
    def of(cls, value: Precision | str) -> Precision:
        """A precision from its name, or itself."""
        return value if isinstance(value, Precision) else cls(value)  # type: ignore[arg-type]  # checked where it is used


@dataclass(frozen=True)
class Updates(Checked):
    """Settings of a weight update in addition to its optimizer: clipping, learning-rate schedule, seed."""

    clip_norm: NotNegative | None = setting(
        None, "Largest global norm of an update's gradients, over all stages; 0: any.", "--clip"
    )
    nonfinite: Literal["stop", "skip", "off"] = setting(
        "stop",
        "For an update whose loss or a gradient is not finite: stop (before any rank steps; the weights are "
        "those of the step before), skip (the next batch follows), or off (only losses, after the step).",
    )
    seed: Seed = setting(0, "Of dropout; in a run also of weights and the order of the data.")
    no_decay: Sequence[str] | str = setting(
        (),
        "Parts of names, like bias,norm: parameters with one in their name, or in the class of the module that "
        "holds them, get no weight decay.",
        typed="words",
    )
    scheduler: Any = setting(None, "From an optimizer to its learning-rate schedule, which steps with it.", hidden=True)
    weigh: Callable[[Any], Any] | None = setting(
        None,
        "From a micro-batch's target to its weight in the batch's mean loss; None: its number of samples. When "
        "the loss averages over tokens, return the number of tokens that count.",
        hidden=True,
    )


@dataclass(frozen=True)
class Saves(Checked):
    """The checkpoints of a training."""

    every: Amount | None = setting(
        None,
        "Steps between checkpoints; 0: only at the end; default: by time, see --checkpoint-share.",
        "--checkpoint-every",
    )
    share: Annotated[float, Meta(ge=0.001, le=1)] = setting(
        0.03,
        "Largest part of the time that goes into checkpoints by time; they are at least 60 s apart.",
        "--checkpoint-share",
    )
    keep: Amount = setting(3, "Number of the newest checkpoints that stay; 0: all.", "--keep-checkpoints")


@dataclass(frozen=True)
class Spilled(Checked):
    """Spilling of stages to the host's memory or to disk: `Pipeline(…, spill=Spilled("1.5 GiB", disk="/scratch"))`.

    In Python `step_on` and `keep` may also be the numbers of the stages that step on the host, and of those that keep
    their activations.
    """

    device_memory: float | str | None = setting(
        None, "Cap on the device's memory, like 1.5GiB: the rest of the model waits on the host or on disk.", typed=str
    )
    host_memory: float | str | None = setting(
        None, "Limit on the machine's memory that spilled stages take; default: no limit.", typed=str
    )
    disk: str | Path | None = setting(
        None,
        "Folder in which spilled stages wait; all of them, unless the host's memory is used up to a limit.",
        typed=str,
    )
    slots: Number = setting(
        2,
        "Stages whose weights and gradients are on the device at once: one computes, the others load.",
        hidden=True,
    )
    optim_slots: Amount = setting(
        1, "Stages whose optimizer states are on the device at once; 0: these stay there.", hidden=True
    )
    step_on: StepOn | Sequence[Amount] = setting(
        AUTO,
        "Where spilled stages step; on the host the optimizer's states stay there. auto: the faster of both by "
        "the plan for a cap, else the device.",
        typed=StepOn,
    )
    keep: Keep | Sequence[Amount] = setting(
        AUTO,
        "Spilled stages that keep their activations on the device, and replay nothing; auto: as many as fit "
        "under a cap, else none.",
        typed=Keep,
    )
    activations: bool = setting(
        False,
        "Inputs of spilled stages wait there too, until their replay; under a cap this is also chosen where "
        "nothing fits otherwise.",
    )
    prefetch: Amount | None = setting(
        None,
        "Stages ahead that the next one is loaded; None: as soon as a slot is free; 0: when it is needed.",
        hidden=True,
    )
    resume: bool | Amount = setting(
        False,
        "Resume from the last step that a run committed in `disk` before it was cut off. Model, plan and "
        "training must be the same; `Pipeline.num_updates` is the step. A number: from that step or one before.",
        hidden=True,
    )
    commit_every: Amount | None = setting(
        None, "Steps between commits to disk, to resume from; 0: none; default: 1 if all is there, else 10."
    )
    about: Mapping[str, Any] = setting(
        dict, "Further JSON data that must be the same to resume, by the names that messages use.", hidden=True
    )

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

    In Python `stages` may also be a number of stages, or "auto".
    """

    schedule: str | None = setting(
        None,
        "Its name, or auto; `pipefit schedules` lists them. Default: auto under a cap, and where no option of "
        "the pipeline is given; else 1f1b.",
    )
    microbatches: Number | None = setting(
        None, "Per weight update; default: chosen with the schedule auto, else 4.", "-m"
    )
    stages: int | Sequence[int] | str | None = setting(
        None,
        "Layers of each stage, like 3,3; default: balanced by a profile, else by FLOP and parameters.",
        typed="numbers",
    )
    plan: Any = setting(None, "Follow this plan, with its schedule, stages and micro-batches.", typed=str)
    parallelism: Parallelism = field(default_factory=Parallelism)
    spill: Spilled | None = None

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per weight update where no search chooses them."""
        return self.microbatches or 4

    @property
    def is_capped(self) -> bool:
        """Whether a cap on the device's memory makes the plan."""
        return self.spill is not None and self.spill.cap_bytes is not None


def options_of(group: Any, without: Collection[str] = ()) -> Iterator[tuple[Any, Any, Any]]:
    """The visible options of a group and of the groups in it: the field of each, its type and its value.

    Args:
        group: a dataclass whose fields are made by `setting`.
        without: names of fields, or of groups, that are left out.
    """
    hints = get_type_hints(type(group), include_extras=True)
    kinds = groups_of(type(group))
    for one in fields(group):
        if one.name in without or one.metadata.get("hidden"):
            continue
        value = getattr(group, one.name)
        if one.name in kinds:
            yield from options_of(value or kinds[one.name](), without)
        else:
            yield one, hints[one.name], value


def as_flat(group: Any) -> dict[str, Any]:
    """All visible options of a group and of the groups in it, by their names with underscores."""
    return {key_of(one): value for one, _, value in options_of(group)}


def from_flat(kind: type[Group], values: Mapping[str, Any]) -> Group:
    """The group whose options have these values, by names as `as_flat` gives them; all others have their defaults.

    Raises:
        PlanError: a name is not that of an option.
    """
    usual = kind()
    known = as_flat(usual)
    for name in values:
        look_up(name, known, "unknown option", PlanError)
    return _with_values(usual, values)


def _with_values(group: Group, values: Mapping[str, Any]) -> Group:
    changes = {}
    groups = groups_of(type(group))
    for one in fields(group):  # type: ignore[arg-type]
        if one.metadata.get("hidden"):
            continue
        if one.name in groups:
            before = getattr(group, one.name) or groups[one.name]()
            after = _with_values(before, values)
            # A group that is not there stays away where nothing in it is named.
            if after != before:
                changes[one.name] = after
        elif key_of(one) in values:
            changes[one.name] = values[key_of(one)]
    return replace(group, **changes)  # type: ignore[type-var]


def with_fields(kind: type[Group], values: Mapping[str, Any]) -> Group:
    """A group whose fields have these values.

    Raises:
        PlanError: the group has no field of that name; the nearest is suggested.
    """
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        look_up(name, known, "unknown option", PlanError)
    return kind(**values)


def refuse_unused(group: Any, way: str, why: str, name: Callable[[Any], str]) -> None:
    """Refuses the options of a group that were given although they have no effect.

    Args:
        group: its fields name the ways in which they have an effect, by `setting(only=…)`.
        way: in which the group is used.
        why: the rest of the message, after the option.
        name: the option in the message, from its field: `flag_of` or `attrgetter("name")`.

    Raises:
        PlanError: an option has a value that is not the default, and not False or empty.
    """
    for one in fields(group):
        given = getattr(group, one.name)
        is_unused = one.metadata["only"] and way not in one.metadata["only"]
        if is_unused and given and given != one.default:
            raise PlanError(f"{name(one)}: {why}")


def flag_of(one: Any) -> str:
    """The option of a field on the command line, such as "--data-parallel"."""
    return f"--{key_of(one).replace('_', '-')}"


def key_of(one: Any) -> str:
    """The name of a field in a flat table, a TOML file and JSON, such as "data_parallel"."""
    for flag in one.metadata.get("flags", ()):
        if flag.startswith("--"):
            return str(flag).removeprefix("--").replace("-", "_")
    return str(one.name)


def groups_of(kind: type[Any]) -> dict[str, type[Any]]:
    """The fields of a group that are groups themselves, also where they may be None."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        for part in (hint, *getattr(hint, "__args__", ())):
            if isinstance(part, type) and is_dataclass(part):
                found[name] = part
    return found
