"""`pipefit watch`: a run followed in the browser."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json


def command(folder: Path, /, *, port: int = 0, json: Json = False) -> Answer:
    """Follow a run in the browser: its curves and its latest timeline, on a page of this machine alone.

    Example: pipefit watch runs/first

    Args:
        folder: Folder of a run, written by `pipefit train -o FOLDER`; the run may be going on, or over.
        port: Of the page on 127.0.0.1; 0: any free one.
    """
    if not json:
        print("loading …", flush=True)
    from pipefit.run.following import server_of

    with server_of(folder, port) as server:
        page = f"http://127.0.0.1:{server.server_port}/"
        if not json:
            print(f"{folder}: {page}  (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return Answer({"page": page}, "")
