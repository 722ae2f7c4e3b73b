"""The figures that records name, in addition to the metrics of drawings, and the pictures of their own kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getmembers, isfunction
from typing import Any

from pipefit.reproduce import amoebanet, drawings, hydra, measured, predicted, questions
from pipefit.reproduce.topology_picture import topology_picture

FIGURES: dict[str, Callable[..., Any]] = {}
"""Every figure by its name: a function of the bench, of the step where it needs one, and of what is given."""

for _module in (amoebanet, drawings, hydra, measured, predicted, questions):
    for _name, _function in getmembers(_module, isfunction):
        if _function.__module__ == _module.__name__ and not _name.startswith("_"):
            FIGURES[_name] = _function

PICTURES: Mapping[str, Callable[..., Any]] = {"sharp": hydra.sharp_picture, "topology": topology_picture}
"""Every picture of its own kind by its name."""
