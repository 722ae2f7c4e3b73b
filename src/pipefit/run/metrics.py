"""The loss of every step of a run, written as it becomes known: one that is killed has lost its last at most."""

from __future__ import annotations

import json
from pathlib import Path

from pipefit.errors import PipefitError
from pipefit.spec.files import write_atomically

METRICS = "metrics.jsonl"


class Metrics:
    """A file in a run's folder with a line for each step.

    Args:
        folder: of the run; None: nothing is written.
        done: steps that are done already. A run that resumes in its folder keeps their lines, and no later ones.
    """

    def __init__(self, folder: Path | None, done: int) -> None:
        self._file = None
        if folder is None:
            return
        self._path = folder / METRICS
        write_atomically(self._path, "".join(_before(self._path, done)))
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, step: int, loss: float) -> None:
        """Writes down a step's loss.

        Raises:
            PipefitError: it cannot be written.
        """
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"step": step, "loss": loss}) + "\n")
            self._file.flush()
        except OSError as problem:
            raise PipefitError(f"{self._path}: cannot be written: {problem.strerror}") from None

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            self._file.close()


def _before(path: Path, done: int) -> list[str]:
    """The lines of the steps that are done; a last one that was cut off is none of them."""
    if not done or not path.exists():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["step"] <= done]
