"""The last passes of a run, kept for timelines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipefit.errors import PipefitError
from pipefit.ir.program import Program
from pipefit.runtime.collectives import exchange
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution
from pipefit.timeline import Event, Timeline

_KEPT = 16


class PassHistory:
    """The times of the last passes over the newest program."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._passes: deque[dict[int, tuple[list[float], list[float]]]] = deque(maxlen=_KEPT)

    def add(self, program: Program, runs: Sequence[Execution]) -> None:
        """Keeps the times of a pass."""
        if program is not self._program:
            self._program = program
            self._passes.clear()
        self._passes.append({run.compiled.rank: (run.starts, run.ends) for run in runs})

    def timeline(self, engine: Engine, last: int) -> Timeline:
        """The last passes of all ranks, times in seconds since the first of them began.

        Clocks are taken as common, which they are on one machine.

        Raises:
            PipefitError: nothing has run yet.
        """
        if self._program is None or not self._passes:
            raise PipefitError("nothing has run yet: there is no timeline")
        program = self._program
        passes = [sorted(times.items()) for times in list(self._passes)[-last:]]
        # Processes that share a rank hold the times of the same instructions: those of its first one count.
        of_processes = exchange(engine.session, passes if engine.mesh.is_first else [[]] * len(passes))
        events = [
            Event(rank, position, repeat, start, end)
            for of_process in of_processes
            for repeat, times in enumerate(of_process)
            for rank, (starts, ends) in times
            for position, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        origin = min((event.start_s for event in events if event.start_s), default=0.0)
        shifted = [e._replace(start_s=e.start_s - origin, end_s=max(e.end_s, e.start_s) - origin) for e in events]
        shifted.sort(key=lambda event: (event.rank, event.repeat, event.position))
        return Timeline(program, tuple(shifted), source="measured", num_repeats=len(passes))
