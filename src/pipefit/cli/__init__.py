"""The command line: one thin file per verb. Only here does pipefit print."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 for a finding, 2 for bad input.

    Args:
        arguments: after the program's name; None: those of the process.
    """
    try:
        from pipefit.cli.app import run
    except KeyboardInterrupt:
        # It takes a moment to load, and what is interrupted there is reported like all else.
        print("pipefit: interrupted", file=sys.stderr)
        return 130
    return run(arguments)
