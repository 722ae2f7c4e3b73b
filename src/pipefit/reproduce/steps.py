"""Calls of pipefit's verbs as values: they can be run, compared, and shown as commands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pipefit.errors import PipefitError


class Step(ABC):
    """A call of a verb; equal calls are run once.

    Attributes:
        places: its arguments.
        options: its options by their names in Python.
    """

    verb = ""
    flags: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *places: Any, **options: Any) -> None:
        self.places, self.options = places, options
        self.command = " ".join(["pipefit", self.verb, *self._words()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.command == other.command

    def __hash__(self) -> int:
        return hash(self.command)

    def but(self, **options: Any) -> Step:
        """This call with other options."""
        return type(self)(*self.places, **{**self.options, **options})

    @abstractmethod
    def run(self) -> Any:
        """Calls the verb."""

    def _words(self) -> list[str]:
        words = []
        for name, value in self.options.items():
            flag = self.flags.get(name, f"--{name.replace('_', '-')}")
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(flag)
            if value is not True:
                words.append(shlex.quote(text))
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
        {
            "microbatch_sizes": "-b",
            "num_microbatches": "-m",
            "schedules": "--schedule",
            "depths": "--depth",
            "tensors": "--tensor",
            "state_per_weight": "--state",
        }
    )

    def run(self) -> Any:
        """Plans."""
        return self.question.ask()

    @property
    def question(self) -> Any:
        """The question to the planner, on the topology with the memory that is given."""
        from msgspec.structs import replace

        from pipefit.planner.machines import load_topology
        from pipefit.planner.sweeps import Question
        from pipefit.units import parse_quantity

        model, machine, options = self.places[0], load_topology(self.places[1]), dict(self.options)
        if memory := options.pop("memory", None):
            machine = replace(machine, device=replace(machine.device, memory_bytes=parse_quantity(memory, "bytes")))
        return Question(model, machine, options)

    def _words(self) -> list[str]:
        return ["--profile", self.places[0], "--topology", self.places[1], *super()._words()]


class Largest(Planned):
    """`pipefit plan --largest layers`: the number of layers of the largest model that fits."""

    def run(self) -> int:
        """Searches."""
        from pipefit.planner.computed_profile import gpt_settings
        from pipefit.planner.sweeps import largest

        question = self.question
        return gpt_settings(largest(question.model, question.topology, "layers", **question.options))["layers"]

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
        return self.places[0](**self.options)

    def _words(self) -> list[str]:
        return []

    def __init__(self, text: str, function: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self.command = f"python: {text}"
