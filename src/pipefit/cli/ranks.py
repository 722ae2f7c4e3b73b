"""Functions that verbs run in the processes that they start."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipefit.run.config import RunConfig
    from pipefit.run.result import RunResult


def run_rank(script: str, arguments: Sequence[str]) -> None:
    """Runs a script in this rank; `sys.exit()` without a failure is a normal end."""
    from pipefit.runtime.launch import run_script

    try:
        run_script(script, arguments)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def train_rank(config: RunConfig, quiet: bool) -> RunResult:
    """Trains as this rank; rank 0 shows the progress unless `quiet`."""
    from pipefit.cli.display import Watcher
    from pipefit.run.claim import claimed
    from pipefit.run.observer import Observer
    from pipefit.run.whole_run import run
    from pipefit.runtime.session import current
    from pipefit.runtime.signals import listen

    with contextlib.ExitStack() as stack:
        if not current().is_distributed:
            stack.callback(listen(current().stop, None, ctrl_c=True))
        stack.enter_context(claimed(config.output, current()))
        if current().rank > 0 or quiet:
            return run(config, Observer())
        with Watcher(config.steps or 0, config.batch) as watcher:
            return run(config, watcher)
