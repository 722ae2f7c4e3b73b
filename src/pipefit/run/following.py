"""A run that is followed while it trains: its latest timeline as a file, and its page on the loopback interface."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipefit.errors import PipefitError
from pipefit.pipeline.callbacks import Record
from pipefit.run.report_page import check_folder, page_of
from pipefit.run.result import MEASURED, METRICS, RESULT
from pipefit.timeline import save_trace

_log = logging.getLogger("pipefit.logs")

_HOST = "127.0.0.1"
_LAST = 8
"""Steps at the end that the result measures, among which there is no pause."""


class LatestTimeline:
    """A callback that writes the timeline of the last passes about ten times in a run, and at least every 100 steps.

    Args:
        pipe: that is trained, by a synchronous schedule.
        folder: the folder of the run; the result and timeline of an earlier run in it are removed.
        steps: the steps of the whole run.
    """

    def __init__(self, pipe: Any, folder: Path, steps: int) -> None:
        self._pipe = pipe
        self._path = folder / MEASURED
        self._steps = steps
        self.every = min(max(steps // 10, 10), 100)
        if pipe.rank == 0:
            for name in (MEASURED, RESULT):
                (folder / name).unlink(missing_ok=True)

    def step(self, record: Record) -> None:
        """Writes the timeline when it is due. Every rank calls it."""
        if record.step % self.every == 0 and record.step <= self._steps - _LAST:
            timeline = self._pipe.timeline()
            if self._pipe.rank == 0:
                try:
                    save_trace(timeline, self._path)
                except PipefitError as problem:
                    _log.warning("%s; training goes on without it", problem)


def server_of(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the page of a run, which follows it; on the loopback interface.

    Args:
        folder: the folder of the run.
        port: 0: any free one.

    Raises:
        PipefitError: there is no such folder, or the port cannot be used.
    """
    check_folder(folder)
    page = _cached(folder)

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client may leave at any time
                super().handle()

        def do_GET(self) -> None:
            # A page of another site must not read the run through a name that resolves to this machine.
            name = self.headers.get("Host", "").partition(":")[0]
            if self.path != "/" or name not in (_HOST, "localhost"):
                self.send_error(404)
                return
            try:
                code = 200
                text = page()
            except PipefitError as problem:
                code = 503
                text = str(problem)
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"text/{'html' if code == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as problem:
        raise PipefitError(f"--port {port}: cannot be used: {problem}; leave it out for any free port") from None


def _cached(folder: Path) -> Callable[[], str]:
    """The page, made again only when one of the run's files has changed."""

    @functools.lru_cache(maxsize=1)
    def page_at(state: tuple[int, ...]) -> str:
        return page_of(folder, follows=True)

    return lambda: page_at(tuple(_state(folder / name) for name in (METRICS, MEASURED, RESULT)))


def _state(path: Path) -> int:
    try:
        found = path.stat()
    except OSError:
        return 0
    return hash((found.st_mtime_ns, found.st_size, found.st_ino))
