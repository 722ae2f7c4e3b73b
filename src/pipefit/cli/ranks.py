"""What the verbs run in the processes that they start."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["run_rank"]


def run_rank(script: str, arguments: Sequence[str]) -> None:
    """Runs a script in this rank; leaving it by `sys.exit()` without a failure is an end like any other."""
    from pipefit.runtime.launch import run_script

    try:
        run_script(script, arguments)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
