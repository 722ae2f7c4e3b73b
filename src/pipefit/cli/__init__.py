"""The command line: one thin file per verb. Only here does pipefit print."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 for a finding, 2 for bad input.

    Args:
        arguments: after the program's name; None: those of the process.
    """
    from pipefit.cli.app import run

    return run(arguments)
