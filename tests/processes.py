"""Processes of tests, forked from one that has loaded torch: they begin at once, where a Python takes seconds."""

import sys
from collections.abc import Callable
from typing import Any

from pipefit.runtime import launch


def server() -> Any:
    """The server that all ranks of the tests are forked from, too."""
    context = launch._server()
    context.set_forkserver_preload(["pipefit.pipeline.preload", "tests.rank_preload"])
    return context


def ended(function: Callable[..., object], *args: object) -> int:
    """What a process came to that ran a function, found by its name: −signal, or its exit code."""
    process = server().Process(target=_run, args=(function, args))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(function: Callable[..., object], args: tuple[object, ...]) -> None:
    sys.stdout = sys.stderr  # what it prints is not the test's
    function(*args)
