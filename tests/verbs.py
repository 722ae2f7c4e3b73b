"""Verbs as their users call them, and what these get to read."""

import json
from typing import Any

import pytest

from pipefit.cli import main


def answered(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """What a verb answers to --json: one object, and nothing else on stdout."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a verb says of bad input: one message on stderr, exit code 2, no traceback."""
    capsys.readouterr()
    assert main(list(words)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    return shown.err
