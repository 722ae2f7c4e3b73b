"""The request for a study: trials, and the options that they share."""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from pipefit.errors import PipefitError, look_up
from pipefit.spec.arguments import MOST_THREADS, Amount, NotNegative, Number, Seed, check_fields
from pipefit.spec.files import JsonObject
from pipefit.spec.options import setting
from pipefit.study.simulation import POLICIES
from pipefit.study.stopping import HELD_OUT, Rule
from pipefit.units import in_bytes

Values = Mapping[str, Any]
"""Values by their names: options, or the values that a search has chosen for a trial."""

Evaluations = list[tuple[int, float]]
"""(step, loss) of every evaluation on held-out data, steps from 1."""

OPTIMIZERS = ("adamw", "adam", "sgd")
"""By name."""


_LONGEST = 80
"""Maximum length of names; a longer one ends with a checksum, so that names stay different."""


class StudyError(PipefitError):
    """A study file or a trial contradicts itself; the message names the place."""


class NoRoomError(PipefitError):
    """The tier is too full for a trial now."""


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Errors inside name the place."""
    try:
        yield
    except PipefitError as problem:
        raise StudyError(f"{where}: {problem}") from None


@dataclass(frozen=True)
class Trial:
    """One training run of a study. Nothing of it is built before it is admitted.

    A model by name is trained on named data, as `pipefit train` does. A model given as a factory needs `loss` and
    `data` as well. Objects that a factory captures are sent only to the processes of the study, not to other machines.

    Attributes:
        name: of the trial; "": made from its number and `values`.
        model: built-in name, `pkg.mod:factory`, or a callable without arguments that gives the layers.
        options: of a model by name.
        loss: (output, target) → mean over the samples; for factories.
        data: a name or names as for `pipefit train --data`; or a callable from the step's number (from 0) to its
            (input, target).
        held_out: gives the held-out batches, each (input, target); for data that is a callable.
        evaluate: steps between evaluations on held-out data, including one after the last step; 0: none. The score of
            the trial is then its last evaluation, in place of its losses.
        batch: samples per step, for data by name.
        microbatches: per step.
        steps: weight updates.
        optimizer: "adamw", "adam" or "sgd"; or a callable from parameters to an optimizer.
        lr: peak learning rate, for optimizers by name.
        warmup: steps of linear warm-up of a cosine; 0 and an optimizer by name: a constant rate.
        scheduler: from an optimizer to its learning-rate schedule; None: by `warmup`.
        clip: largest global norm of the gradients; 0: none.
        seed: of weights, data and dropout.
        shards: parts of the model; 0: as many as the device's memory requires.
        values: that distinguish the trial from others, for people.
    """

    name: str = ""
    model: str | Callable[[], Any] = "gpt"
    options: Values = field(default_factory=dict)
    loss: Callable[[Any, Any], Any] | None = None
    data: str | tuple[str, ...] | Callable[[int], tuple[Any, Any]] = ()
    held_out: Callable[[], Sequence[tuple[Any, Any]]] | None = None
    evaluate: Amount = setting(0)
    batch: Number = setting(16)
    microbatches: Number = setting(4)
    steps: Number = setting(100)
    optimizer: str | Callable[[list[Any]], Any] = "adamw"
    lr: NotNegative = setting(1e-3)
    warmup: Amount = setting(0)
    scheduler: Callable[[Any], Any] | None = None
    clip: NotNegative = setting(0.0)
    seed: Seed = setting(0)
    shards: Amount = setting(0)
    values: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        values = self.values if isinstance(self.values, Mapping) else {}
        label = ", ".join(f"{key}={value}" for key, value in values.items())
        if isinstance(self.name, str) and self.name:
            label = self.name
        with at(f"trial {label}".strip()):
            self._check()

    def _check(self) -> None:
        check_fields(self, StudyError)
        listed = isinstance(self.data, tuple)
        is_named = isinstance(self.model, str)
        if not callable(self.optimizer):
            look_up(self.optimizer, dict.fromkeys(OPTIMIZERS), "optimizer: unknown", StudyError)
        if listed and self.batch < self.microbatches:
            raise StudyError(f"batch: {self.batch} samples are too few for {self.microbatches} micro-batches")
        if not is_named and (self.loss is None or listed):
            raise StudyError("a factory's model needs loss=… and data=…, a function of the step's number")
        if not listed and (self.held_out is None) != (self.evaluate == 0):
            raise StudyError("held_out=… gives the batches, and evaluate=… how often: give both or neither")

    @property
    def kind(self) -> str:
        """A key that trials share whose turns take the same time; a model of a factory is like no other."""
        if callable(self.model):
            return f"{id(self)}"
        sizes = (self.batch, self.microbatches, self.shards, self.clip > 0, plain(self.optimizer))
        return repr((self.model, sorted(self.options.items()), plain(self.data), *sizes))

    def as_dict(self) -> JsonObject:
        """The trial as JSON data; callables by their names."""
        return {key: plain(value) for key, value in vars(self).items()}


Define = Callable[[Values], Trial]
"""Makes a trial of values that a search has chosen."""


def plain(value: Any) -> Any:
    """A value as JSON data; callables by their names, numbers that are not finite as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if callable(value):
        return f"<{getattr(value, '__qualname__', type(value).__name__)}>"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@dataclass(frozen=True)
class StudySpec:
    """A study: its options, for a file, `pipefit study` and `pipefit.Study`.

    Attributes:
        trials: in the order in which they were given.
    """

    trials: tuple[Trial, ...]
    workers: Number = setting(2, "Processes, one per device.")
    policy: str = setting("lrtf", "Rule for the next trial of a free device: lrtf, fifo, round-robin or whole-task.")
    device_memory: float | str | None = setting(
        None, 'Limit of a shard on a device, as 64 << 20 or "64 MiB"; None: models are not split for it.'
    )
    tier: Literal["disk", "host"] = setting(
        "disk",
        'Place of trials between turns: "disk": the study\'s folder; "host": shared memory, which is lost when '
        "the machine stops.",
    )
    memory: float | str | None = setting(None, "Limit on all trials there together; None: all free space.")
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = setting(
        0, "CPU threads of each worker; 0: an equal share of the cores."
    )
    stop: Rule | None = setting(
        None, 'Rule that stops trials early, its name, or both with numbers as {"rule": "median", "min_steps": 10}.'
    )
    output: str = setting("runs/study", "The study's folder.")
    name: str = setting("study", "For people.")
    device: str = setting("", 'Of the workers; "": GPUs when there are some, else the CPU.')

    def __post_init__(self) -> None:
        check_fields(self, StudyError)
        look_up(self.policy, POLICIES, "unknown policy", StudyError)
        for key in ("device_memory", "memory"):
            size = in_bytes(vars(self)[key], key)
            if size is not None and not 0 < size < math.inf:
                raise StudyError(f"{key}: expected more than 0 bytes, got {vars(self)[key]!r}")
        names = Counter(file_name(number, trial) for number, trial in enumerate(self.trials))
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise StudyError(f"two trials are called {twice[0]}: give them different names")
        self._check_evaluations()

    @property
    def device_bytes(self) -> float:
        """The limit on a device's memory; 0: none."""
        return in_bytes(self.device_memory, "device_memory") or 0.0

    @property
    def tier_bytes(self) -> float:
        """The limit on the tier; 0: none."""
        return in_bytes(self.memory, "memory") or 0.0

    def _check_evaluations(self) -> None:
        """Checks that all scores are of one kind, and that the stopping rule has its losses."""
        evaluates = {trial.evaluate > 0 for trial in self.trials}
        if len(evaluates) > 1:
            raise StudyError("evaluate: some trials are scored on held-out data and some are not; set it for all")
        if self.stop is None or self.stop.on != HELD_OUT:
            return
        if False in evaluates:
            raise StudyError(f"stop: on = {HELD_OUT!r} needs trials that evaluate: set evaluate, in steps")
        first = getattr(self.stop, "first", 0)
        if any(first % trial.evaluate for trial in self.trials):
            raise StudyError(f"stop: first = {first}: trials must be evaluated there; evaluate must divide it")

    def check_further(self, trial: Trial, others: Sequence[Trial]) -> None:
        """Checks a trial that is added later.

        Raises:
            StudyError: its score is of another kind than those of the others, or unsuitable for the stopping rule.
        """
        if not isinstance(trial, Trial):
            raise StudyError(f"define must give a Trial, got {type(trial).__name__}")
        alike = [replace(other, name=f"{number}") for number, other in enumerate((*others[:1], trial))]
        replace(self, trials=tuple(alike))

    def as_dict(self) -> JsonObject:
        """The study as JSON data."""
        if self.stop is None:
            stop = None
        else:
            stop = {"rule": self.stop.name, **plain(vars(self.stop))}
        options = {key: value for key, value in vars(self).items() if key not in ("trials", "stop")}
        return {**options, "stop": stop, "trials": [trial.as_dict() for trial in self.trials]}


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of a trial that is built.

    Attributes:
        num_turns: of one step.
        shards: parts of the model.
        parameters: of the model, each counted once.
        tier_bytes: of its state on the tier: every record twice, with the optimizer's states.
        device_bytes: that its largest shard needs on the device, by the profile; 0 where none was made.
    """

    num_turns: int
    shards: int
    parameters: int
    tier_bytes: int
    device_bytes: float = 0.0


class Progress(NamedTuple):
    """The progress of a trial at its last commit.

    Attributes:
        turn: the next one of the step.
        losses: of each step done.
        held_out: (step, loss) of every evaluation on held-out data, steps from 1.
    """

    turn: int
    losses: list[float]
    held_out: Evaluations


class Job(NamedTuple):
    """The next job of a worker.

    Attributes:
        kind: "start", "admit", "turn", "export" or "close".
        trial: its number.
        argument: number of consecutive turns, bytes of room on the tier, or the file to write.
        name: of the trial, and of its folder.
        values: of a trial that a search chose.
        alive: the trials that continue; the worker keeps nothing of the others.
    """

    kind: str
    trial: int = -1
    argument: Any = None
    name: str = ""
    values: Values | None = None
    alive: frozenset[int] = frozenset()


def file_name(number: int, trial: Trial) -> str:
    """The trial's name, in a form for file names."""
    place = f"t{number:02d}"
    parts = [f"{key}={value}" for key, value in trial.values.items()]
    words = trial.name or "-".join([place, *parts])
    name = re.sub(r"[^A-Za-z0-9_.=+-]+", "-", words).strip("-.") or place
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{zlib.crc32(words.encode()):08x}"
