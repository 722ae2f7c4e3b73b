"""`pipefit run`: a script's ranks on this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Json, Starts, verb
from pipefit.errors import PipefitError
from pipefit.units import counted

_WITH_VALUE = ("-n", "--ranks", "--threads", "--recover", "--min-ranks", "--logs")


@verb()
def command(
    script: Path,
    /,
    *arguments: Annotated[str, Parameter(help="For the script.", allow_leading_hyphen=True)],
    ranks: Annotated[Count, Parameter(alias="-n")] = 2,
    starts: Starts,
    logs: Path | None = None,
    json: Json = False,
) -> Answer:
    """Start the ranks of a script on this machine.

    Example: pipefit run -n 4 train.py --epochs 3

    Arguments after the script are its own. Rank 0 writes here, the others to logs. When one fails, all end and it is
    named.

    Args:
        script: A Python script.
        ranks: Processes to start.
        logs: Folder for the logs of the ranks; default: a temporary one.
    """
    if script.is_dir():
        raise PipefitError(f"{script}: expected a Python script, got a directory")
    if not script.is_file():
        raise PipefitError(f"{script}: no such file")
    if not json:
        print(f"starting {counted(ranks, 'rank')} …", file=sys.stderr, flush=True)
    from pipefit.cli.ranks import run_rank
    from pipefit.runtime.launch import launch

    start = time.perf_counter()
    launch(run_rank, ranks, str(script), arguments, folder=logs, quiet=json, **vars(starts))
    return Answer({"script": str(script), "num_ranks": ranks, "seconds": time.perf_counter() - start}, "")


def prepare(tokens: list[str]) -> list[str]:
    """Marks the begin of the script's own arguments, so that none of them is taken as an option of pipefit."""
    place = 1
    while place < len(tokens) and tokens[place].startswith("-") and tokens[place] != "--":
        if tokens[place] in _WITH_VALUE:
            place += 2
        else:
            place += 1
    if tokens[place : place + 1] in ([], ["--"]):
        return tokens
    return [*tokens[:place], "--", *tokens[place:]]
