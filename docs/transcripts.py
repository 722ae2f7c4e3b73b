"""Runs the commands that the manual shows and writes their output into it: `python -m docs.transcripts`.

The commands of a fenced block `console` are run if all of them are quick verbs, in the order of the page and in one
empty folder. The lines up to the next command, or the end of the block, are the output. A test compares the pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from docs.pages import renew

from pipefit.cli import main as pipefit

QUICK = frozenset({"draw", "schedules", "verify", "simulate", "synthesize"})
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WIDTH = 90


def is_quick(block: str) -> bool:
    """Returns whether all commands of a block are run."""
    commands = [shlex.split(line[2:]) for line in block.splitlines() if line.startswith("$ ")]
    return bool(commands) and all(
        words[:1] == ["cat"] or (words[0] == "pipefit" and words[1] in QUICK) for words in commands
    )


def answer(command: str) -> str:
    """Returns the output of a command in a terminal of 90 columns."""
    words = shlex.split(command)
    if words[0] == "cat":
        return Path(words[1]).read_text().rstrip()
    printed = io.StringIO()
    environment = {"COLUMNS": str(_WIDTH), "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(printed):
        with contextlib.redirect_stderr(printed):
            pipefit(words[1:])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def answered(page: str) -> str:
    """Returns the page with the output that its commands have now."""

    def again(match: re.Match[str]) -> str:
        if not is_quick(match[1]):
            return match[0]
        parts = []
        for command in (line for line in match[1].splitlines() if line.startswith("$ ")):
            parts.append(f"{command}\n{answer(command[2:])}")
        return "```console\n" + "\n\n".join(parts) + "\n```"

    with _empty_folder():
        return _BLOCK.sub(again, page)


if __name__ == "__main__":
    renew(answered)
