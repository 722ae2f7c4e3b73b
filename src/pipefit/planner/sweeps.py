"""Plans over the values of an option, and the largest model that fits."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import msgspec

from pipefit.draw.chart import chart
from pipefit.errors import InfeasibleError, PlanError, nearest
from pipefit.planner.explain import used_columns
from pipefit.planner.machines import read_profile
from pipefit.planner.methods import fits_by, problem_of, space_of
from pipefit.planner.plan_figures import idle_share, sent_bytes
from pipefit.planner.plan_options import PlanOptions
from pipefit.planner.planning import plan
from pipefit.planner.training_figures import training
from pipefit.planner.transformer import is_transformer, settings_of, transformer_of
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.options import flag_of, with_fields
from pipefit.units import format_bytes, parse_quantity

SIZES = ("layers", "hidden")
"""Sizes of a GPT by arithmetic that `largest` and `sweep` change."""


@dataclass(frozen=True)
class Question:
    """A question to the planner.

    Attributes:
        model: a profile, or its name; by arithmetic ("gpt:layers=…") it follows the machine and the sizes asked for.
        topology: of the machine.
        options: of `plan`.
    """

    model: Profile | str
    topology: Topology
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def profile(self) -> Profile:
        """The profile of the model on the machine."""
        if isinstance(self.model, Profile):
            return self.model
        sizes = self.options.get("microbatch_sizes") or (1,)
        return read_profile(self.model, self.topology, sizes[0])

    def sized(self, name: str, value: int) -> Question:
        """The question for a GPT with another size.

        Raises:
            PlanError: the model's profile was not computed.
        """
        if isinstance(self.model, str):
            model = self.model
        else:
            model = self.model.model
        if not is_transformer(model):
            raise PlanError(f"{name}: expected a model by arithmetic, gpt:layers=…,hidden=…,heads=…; got {model}")
        sizes = settings_of(model) | {name: value}
        family = model.partition(":")[0]
        words = [f"{key}={size}" for key, size in sizes.items()]
        return replace(self, model=f"{family}:" + ",".join(words))

    def outermost(self, **figures: Any) -> Question:
        """The question for a machine whose outermost level has other figures."""
        *inner, last = self.topology.levels
        levels = (*inner, msgspec.structs.replace(last, **figures))
        if self.topology.devices and "width" in figures:
            raise PlanError("machines: expected devices that are all alike; the topology lists every one")
        return replace(self, topology=msgspec.structs.replace(self.topology, levels=levels))

    def ask(self) -> Plan:
        """The plan.

        Raises:
            InfeasibleError: nothing fits.
            PlanError: an argument that makes no sense.
        """
        return plan(self.profile, self.topology, **self.options)


SWEPT = (
    "tensor", "depth", "microbatch-size", "microbatches", "batch", "schedule", "bandwidth", "machines", "layers",
    "hidden",
)  # fmt: skip
"""Names that `sweep` takes: options of a plan, figures of the topology's outermost level, and sizes of a GPT."""

_OPTIONS = {flag_of(one).removeprefix("--"): one for one in fields(PlanOptions)}
_OPTIONS["batch"] = _OPTIONS["global-batch"]


def _changed(question: Question, name: str, value: Any) -> Question:
    """The question with another value of one of `SWEPT`."""
    if name in SIZES:
        return question.sized(name, value)
    if name == "machines":
        return question.outermost(width=value)
    if name == "bandwidth":
        return question.outermost(bandwidth_bytes_per_s=parse_quantity(value, "bytes/s"))
    option = _OPTIONS[name]
    if option.metadata["typed"]:
        value = [value]  # the one to choose from
    return replace(question, options={**question.options, option.name: value})


@dataclass(frozen=True)
class Cell:
    """One plan of a sweep.

    Attributes:
        values: that were set, by name.
        plan: None where there is none.
        why: the reason why there is none.
        figures: samples_per_s, idle, sent_bytes, peak_bytes, and for a GPT flops_per_device.
    """

    values: Mapping[str, Any]
    plan: Plan | None
    why: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """The plans of a sweep.

    Attributes:
        names: that were changed.
        cells: a plan, or the reason why there is none, for every combination of values.
    """

    names: tuple[str, ...]
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int | None = None) -> list[str]:
        """A table of at most so many characters per line; None: those of the terminal, or 100."""
        head = ["plan", "samples/s", "TFLOP/s each", "idle", "sent/sample", "memory"]
        width = width or shutil.get_terminal_size((100, 24)).columns
        return used_columns(head, map(_row, self.cells), width)

    def svg(self, title: str = "") -> str:
        """A chart over the first name, a line for each value of the others; of a GPT, TFLOP/s per device.

        Raises:
            PlanError: nothing fits.
        """
        fitting = [cell for cell in self.cells if cell.plan is not None]
        if not fitting:
            raise PlanError("nothing of the sweep fits, so there is no throughput to draw")
        first, *others = self.names
        is_gpt = all("flops_per_device" in cell.figures for cell in fitting)
        series: dict[str, list[tuple[float | str, float]]] = {}
        for cell in fitting:
            words = [f"{name} {cell.values[name]}" for name in others]
            line = ", ".join(words) or "fastest plan"
            rate = cell.figures["samples_per_s"]
            if is_gpt:
                rate = cell.figures["flops_per_device"] / 1e12
            series.setdefault(line, []).append((cell.values[first], rate))
        places = [cell.values[first] for cell in fitting]
        wide = False
        if not isinstance(places[0], str):
            wide = max(places) >= 8 * min(places)
        labels = {"tensor": "tensor width", "batch": "samples per update", "bandwidth": "bandwidth, outermost level"}
        label = "samples/s"
        if is_gpt:
            label = "TFLOP/s per device"
        return chart(series, title=title, x_label=labels.get(first, first), y_label=label, log_x=wide)


def _row(cell: Cell) -> list[str]:
    words = [f"{name} {value}" for name, value in cell.values.items()]
    values = ", ".join(words)
    found = cell.figures
    if cell.plan is None:
        return [f"{values}: {cell.why}", *[""] * 5]
    speed = ""
    if found.get("flops_per_device"):
        speed = f"{found['flops_per_device'] / 1e12:.4g}"
    winners = [one.summary for one in cell.plan.candidates if not one.why_lost]
    winner = (*winners, cell.plan.schedule)[0]
    return [
        f"{values}: {winner}",
        f"{found['samples_per_s']:.4g}",
        speed,
        f"{found['idle']:.1%}",
        format_bytes(found["sent_bytes"]),
        format_bytes(found["peak_bytes"]),
    ]


def sweep(model: Profile | str, topology: Topology, over: Mapping[str, Sequence[Any]], **options: Any) -> Sweep:
    """Plans for every combination of values.

    >>> from pipefit.planner.machines import load_topology
    >>> found = sweep("gpt:layers=4,hidden=256,heads=4", load_topology("dgx-a100-8"), {"depth": [1, 2]}, global_batch=8)
    >>> [len(cell.plan.partition.stages) for cell in found.cells]
    [1, 2]

    Args:
        model: a profile, or its name.
        topology: of the machine.
        over: values by name, see `SWEPT`; a bandwidth is a number in bytes per second or a text like "10 GB/s".
        options: of `plan`.

    Raises:
        PlanError: an unknown name, or a size of a model that is not a GPT by arithmetic.
    """
    over = {name.replace("_", "-"): values for name, values in over.items()}
    for name, values in over.items():
        if name not in SWEPT:
            raise PlanError(f"sweep: unknown name {name!r}; {nearest(name, SWEPT)}")
        are_counts = all(isinstance(one, int) and one >= 1 for one in values)
        if name not in ("schedule", "bandwidth") and not are_counts:
            raise PlanError(f"sweep: {name}: expected whole numbers of at least 1, got {', '.join(map(str, values))}")
    cells = []
    for chosen in product(*over.values()):
        question = Question(model, topology, options)
        named = dict(zip(over, chosen, strict=True))
        for name, value in named.items():
            question = _changed(question, name, value)
        cells.append(_cell(question, named))
    return Sweep(tuple(over), tuple(cells))


def _cell(question: Question, values: Mapping[str, Any]) -> Cell:
    try:
        made = question.ask()
    except InfeasibleError as problem:
        *_, last = str(problem).split("\n")
        return Cell(values, None, f"nothing fits; {last}")
    except PlanError as problem:
        return Cell(values, None, str(problem))
    prediction = made.prediction
    assert prediction is not None
    profile = question.profile
    topology = question.topology
    figures = {
        "samples_per_s": prediction.throughput,
        "idle": idle_share(made, profile, topology, prediction.period_s),
        "sent_bytes": sent_bytes(made, profile, topology),
        "peak_bytes": max(prediction.peak_bytes),
    }
    found = training(made, topology, counted=profile.counted)
    if "model_flops_per_device" in found:
        figures["flops_per_device"] = float(found["model_flops_per_device"])
    return Cell(values, made, figures=figures)


def largest(model: str, topology: Topology, by: str, **options: Any) -> str:
    """The name of the largest GPT that fits, by bisection over the planner's candidates.

    Args:
        model: "gpt:layers=…,hidden=…,heads=…": all sizes but one.
        topology: of a machine with limited memory.
        by: the size that grows: "layers", or "hidden" in multiples of the heads.
        options: of `plan`; methods that cut without regard to an even number of layers.

    Raises:
        InfeasibleError: even the smallest does not fit.
        PlanError: unknown size, unlimited memory, or a method or cap for which sizes are not in order.
    """
    if by not in SIZES:
        raise PlanError(f"largest: expected one of {', '.join(SIZES)}, got {by!r}")
    asked = with_fields(PlanOptions, options)
    topology = asked.machine(topology)
    if topology.device.memory_bytes == float("inf"):
        raise PlanError("largest: expected devices with limited memory; the topology has none")
    if not is_transformer(model):
        raise PlanError(f"largest: expected a model by arithmetic, gpt:layers=…,hidden=…,heads=…; got {model}")
    if asked.method in ("ptdp", "pipedream") or asked.cap is not None:
        raise PlanError("largest: expected --method auto, 2bw, gpipe or uniform, and no cap")
    question = Question(model, topology, options)
    sizes = vars(transformer_of(model))
    step = 1
    if by == "hidden":
        step = sizes["heads"]
    low = 0
    high = max(sizes[by] // step, 1)
    while _fits(question.sized(by, high * step)):
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(question.sized(by, middle * step)):
            low = middle
        else:
            high = middle
    if not low:
        question.ask()
    return str(question.sized(by, low * step).model)


def _fits(question: Question) -> bool:
    asked = with_fields(PlanOptions, question.options)
    problem = problem_of(question.profile, question.topology, asked.global_batch, asked.state_per_weight)
    try:
        return fits_by(asked.method, problem, space_of(problem, asked))
    except PlanError:  # too few layers for the depths asked for, for example
        return False
