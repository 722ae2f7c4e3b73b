"""Costs measured by one start of a run, kept for the next start."""

import math
from dataclasses import replace

import pytest

from pipefit.cost import USUAL, RuntimeCosts
from pipefit.runtime.meeting import MEMORY, Start
from pipefit.runtime.outliving import kept
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session


@pytest.mark.parametrize("costs", [USUAL, RuntimeCosts(1e-6, math.inf)])
def test_costs_are_those_of_the_first_start(costs, tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY, str(tmp_path))
    first = Session(0, 1, None, Progress())
    assert kept(first, "runtime", RuntimeCosts, lambda: costs) == costs
    restarted = replace(first, start=Start(restart=1))
    assert kept(restarted, "runtime", RuntimeCosts, lambda: pytest.fail("measured again")) == costs
