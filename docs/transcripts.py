"""Runs the commands that the manual shows and writes their output into it: `python -m docs.transcripts`.

Every fenced block `console` is of one of three kinds:

- Quick: all of its commands are of quick verbs. They run in the order of the page and in one empty folder; the lines up
  to the next command, or the end of the block, are the output. A test compares the pages.
- Slow: its commands are of slow verbs. A slow test runs them and compares what is shown, in which a line `…` stands for
  any lines. Rounding errors and the time of planning may differ. `python -m docs.transcripts --slow` writes blocks
  without such a line.
- Marked by a comment before it, `<!-- taken once: MACHINE -->`: it shows what one run printed there.

`cat` of a file that is not there writes it as it is shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from docs.pages import ROOT, renew

from pipefit.cli import main as pipefit

QUICK = frozenset({"draw", "schedules", "verify", "simulate", "synthesize"})
SLOW = frozenset({"plan", "check", "cut", "reproduce", "course"})
_TOOLS = ("cat", "sed", "python")
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- taken once: [^\n]+ -->\n+$")
_VARIES = re.compile(r"(?<=planned in )[\d.]+ m?s|(?<=loss |ents |ghts )[\d.e-]+")
# What `reproduce` says on stderr while it works.
_SAID = re.compile(r"^[\w-]+(?: …|: \d+ s so far)\n", re.MULTILINE)
_WIDTH = 90


def is_quick(block: str) -> bool:
    """Returns whether all commands of a block are run, and their output is written into the page."""
    return _all_of(block, QUICK)


def is_slow(block: str) -> bool:
    """Returns whether a slow test runs all commands of a block."""
    return not is_quick(block) and _all_of(block, QUICK | SLOW)


def _all_of(block: str, verbs: frozenset[str]) -> bool:
    words = [shlex.split(command) for command, _ in _commands(block)]
    known = _TOOLS if SLOW <= verbs else _TOOLS[:2]
    return bool(words) and all(each[0] in known or (each[0] == "pipefit" and each[1] in verbs) for each in words)


def _commands(block: str) -> list[tuple[str, str]]:
    """The commands of a block, each with the output that is shown."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, shown.strip("\n")) for command, _, shown in (part.partition("\n") for part in parts)]


def blocks(page: str) -> list[str]:
    """Returns the blocks of a page that are not marked."""
    return [match[1] for match in _BLOCK.finditer(page) if not _MARK.search(page[: match.start()])]


def unaccounted(page: str) -> list[str]:
    """The first lines of blocks, and of indented commands, that no test runs and that are not marked."""
    found = [block.partition("\n")[0] for block in blocks(page) if not _all_of(block, QUICK | SLOW)]
    return found + re.findall(r"^ {4}(\$ .*)$", page, re.MULTILINE)


def differences(page: str) -> list[str]:
    """The commands of a page's slow blocks that print something else than is shown, with what they print."""
    found = []
    with _empty_folder():
        for block in blocks(page):
            for command, shown in _commands(block):
                if command.startswith("cat ") and not Path(command[4:]).exists():
                    Path(command[4:]).write_text(f"{shown}\n")
                printed = answer(command)
                if is_slow(block) and not agrees(shown, printed):
                    found.append(f"$ {command}\n{printed}")
    return found


def agrees(shown: str, printed: str) -> bool:
    """Returns whether an output is the one shown, up to lines left out and figures that differ from run to run."""
    parts = re.split(r"^…\n", _VARIES.sub("#", f"{shown}\n"), flags=re.MULTILINE)
    return (
        re.fullmatch("(?:.*\n)?".join(map(re.escape, parts)), _VARIES.sub("#", f"{printed}\n"), re.DOTALL) is not None
    )


def answer(command: str) -> str:
    """Returns the output of a command in a terminal of 90 columns."""
    words = shlex.split(command)
    if words[0] == "cat" and words[1:2] and ">" not in words:
        return Path(words[1]).read_text().rstrip()
    if words[0] in _TOOLS:
        tool = (
            {"args": ["bash", "-c", command]}
            if words[0] != "python"
            else {"args": [sys.executable, *words[1:]], "cwd": ROOT}
        )
        return subprocess.run(**tool, check=True, capture_output=True, text=True).stdout.rstrip()
    printed = io.StringIO()
    environment = {"COLUMNS": str(_WIDTH), "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(printed):
        with contextlib.redirect_stderr(printed):
            pipefit(words[1:])
    return "\n".join(line.rstrip() for line in _SAID.sub("", printed.getvalue()).strip("\n").splitlines())


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def answered(page: str, slow: bool = False) -> str:
    """Returns the page with the output that its quick commands have now; `slow`: those of whole slow blocks."""

    def again(match: re.Match[str]) -> str:
        is_marked = _MARK.search(page[: match.start()]) is not None
        is_due = is_slow(match[1]) and "…\n" not in match[1] if slow else is_quick(match[1])
        if is_marked or not is_due:
            return match[0]
        parts = []
        for command, _ in _commands(match[1]):
            parts.append(f"$ {command}\n{answer(command)}".rstrip("\n"))
        return "```console\n" + "\n\n".join(parts) + "\n```"

    with _empty_folder():
        return _BLOCK.sub(again, page)


if __name__ == "__main__":
    renew(partial(answered, slow="--slow" in sys.argv))
