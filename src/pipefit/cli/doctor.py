"""`pipefit doctor`: what this machine has, whether ranks can talk, and what to fix."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.options import Count, Json
from pipefit.errors import PipefitError
from pipefit.units import columns


def command(
    *,
    ranks: Annotated[int, Parameter(alias="-n")] = 2,
    timeout: Count = 60,
    json: Json = False,
) -> Answer:
    """Say what this machine has, whether ranks can talk, and what to fix.

    Example: pipefit doctor

    Exit code 1: something keeps pipefit from working here. A mark of ! is a warning.

    Args:
        ranks: Processes of the self-test.
        timeout: Seconds after which the self-test has failed.
    """
    from pipefit.cli.doctor_checks import all_checks

    if ranks < 2:
        raise PipefitError(f"--ranks: expected at least 2, which talk to each other; got {ranks}")
    found = all_checks(ranks, timeout)
    problems = [check for check in found if check.state == "bad"]
    data = {
        "ok": not problems,
        "checks": [{"name": c.name, "state": c.state, "found": c.found, "fix": c.fix} for c in found],
        "facts": {name: value for check in found for name, value in check.facts.items()},
    }
    marks = {"good": "+", "warn": "!", "bad": "x"}
    rows = []
    for check in found:
        rows.append((marks[check.state], check.name, check.found))
        rows += [("", "", f"fix: {check.fix}")] if check.fix else []
    lines = columns(rows)
    lines += ["", "All is well." if not problems else f"{len(problems)} to fix, marked x."]
    return Answer(data, "\n".join(lines), FINDING if problems else FINE)
