"""Calls of pipefit's verbs as values: they can be run, compared, and shown as commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipefit.errors import PipefitError, look_up
from pipefit.planner.plan_options import PlanOptions
from pipefit.reproduce.record_parts import Record, without

if TYPE_CHECKING:
    from pipefit.planner.sweeps import Question

_PLACE = re.compile(r"\{(\w+)\}")


class Step(ABC):
    """A call of a verb; equal calls are run once.

    Attributes:
        places: its arguments.
        options: its options by their names in Python.
    """

    verb = ""
    flags: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *places: Any, **options: Any) -> None:
        self.places = places
        self.options = options
        self.command = " ".join(["pipefit", self.verb, *self._words()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.command == other.command

    def __hash__(self) -> int:
        return hash(self.command)

    @abstractmethod
    def run(self) -> Any:
        """Calls the verb."""

    def _words(self) -> list[str]:
        words = []
        for name, value in self.options.items():
            usual = "--" + name.replace("_", "-")
            words.append(self.flags.get(name, usual))
            if isinstance(value, list | tuple):
                words.append(",".join(map(str, value)))
            elif value is not True:
                words.append(shlex.quote(str(value)))
        return words


class Draw(Step):
    """`pipefit draw`: Draw("gpipe", 4, 8, num_steps=2) gives a `Drawing`."""

    verb = "draw"
    flags = MappingProxyType({"num_chunks": "-v", "num_steps": "--steps"})

    def run(self) -> Any:
        """Draws."""
        from pipefit.draw.drawing import draw

        return draw(*self.places, **self.options)

    def _words(self) -> list[str]:
        schedule, stages, microbatches = self.places
        return [schedule, "-p", str(stages), "-m", str(microbatches), *super()._words()]


class Planned(Step):
    """`pipefit plan`: Planned("vgg16", "pcie-4", method="pipedream") gives a `Plan`."""

    verb = "plan"
    flags = MappingProxyType(
        {one.name: one.metadata["flags"][-1] for one in fields(PlanOptions) if one.metadata["flags"]}
    )

    def run(self) -> Any:
        """Plans."""
        return self.question.ask()

    @property
    def question(self) -> Question:
        """The question to the planner, on the topology with the memory that is given."""
        from pipefit.planner.machines import load_topology
        from pipefit.planner.sweeps import Question

        model, name = self.places
        machine = PlanOptions(memory=self.options.get("memory")).machine(load_topology(name))
        return Question(model, machine, self.options)

    def _words(self) -> list[str]:
        model, machine = self.places
        return ["--profile", model, "--topology", machine, *super()._words()]


class Largest(Planned):
    """`pipefit plan --largest layers`: the number of layers of the largest model that fits."""

    def run(self) -> int:
        """Searches."""
        from pipefit.planner.sweeps import largest
        from pipefit.planner.transformer import transformer_of

        question = self.question
        model = largest(str(question.model), question.topology, "layers", **question.options)
        return transformer_of(model).layers

    def _words(self) -> list[str]:
        return ["--largest", "layers", *super()._words()]


class Verb(Step):
    """Any verb in a process of its own: Verb("compare", model="gpt") gives its JSON object."""

    def __init__(self, verb: str, *places: Any, **options: Any) -> None:
        self.verb = verb
        super().__init__(*places, **options)

    def run(self) -> Any:
        """Runs the verb as a user would."""
        words = [sys.executable, "-m", "pipefit", self.verb, *self._words(), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PipefitError(f"{self.command}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def _words(self) -> list[str]:
        return [*map(str, self.places), *super()._words()]


class Python(Step):
    """A few lines of Python, where no verb of the command line does it: the function and its text."""

    verb = "python"

    def run(self) -> Any:
        """Calls the function."""
        return self.places[0]()

    def _words(self) -> list[str]:
        return []

    def __init__(self, text: str, function: Any) -> None:
        super().__init__(function)
        self.command = f"python: {text}"


_CALLS: Mapping[str, type[Step]] = MappingProxyType({"draw": Draw, "plan": Planned, "largest": Largest})
"""The calls of records by their keys, which give the places; all other keys are options."""


def is_call(record: Record) -> bool:
    """Returns whether a record has a call of its own."""
    return "call" in record or any(key in record for key in _CALLS)


def step_of(record: Record, calls: Record) -> Step:
    """The call that a record describes: { draw = ["gpipe", 4, 8], recompute = true } or { call = "its template", … }.

    Args:
        record: the record of a call.
        calls: templates by name; their places such as "{model}" are filled from the record, whose other keys are
            options.

    Raises:
        PipefitError: an unknown template, or a record without a call.
    """
    if "call" in record:
        template = look_up(record["call"], calls, "no call is named")
        options = without(record, {"call", *places_of(template)})
        return step_of({**filled(template, record), **options}, calls)
    for verb, kind in _CALLS.items():
        if verb in record:
            return kind(*record[verb], **without(record, (verb,)))
    raise PipefitError(f"expected a call ({', '.join(_CALLS)} or a template), got {', '.join(record)}")


def places_of(template: Any) -> set[str]:
    """The names of the places of a template: of "gpt:layers={k}" k."""
    if isinstance(template, Mapping):
        return places_of(list(template.values()))
    if isinstance(template, list):
        return set().union(*map(places_of, template))
    if not isinstance(template, str):
        return set()
    return set(_PLACE.findall(template))


def filled(template: Any, values: Record) -> Any:
    """A template with values in those places for which there are some; a text of one place becomes the value itself.

    >>> filled({"plan": ["gpt:layers={k}", "pcie-4"], "depths": ["{k}"]}, {"k": 2})
    {'plan': ['gpt:layers=2', 'pcie-4'], 'depths': [2]}
    """
    if isinstance(template, Mapping):
        return {key: filled(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(value, values) for value in template]
    for name in places_of(template) & values.keys():
        place = "{" + name + "}"
        if template == place:
            return values[name]
        template = template.replace(place, str(values[name]))
    return template
