"""`pipefit report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json, ending


def command(
    folder: Path,
    /,
    *,
    output: Annotated[Path | None, ending(".html", alias="-o")] = None,
    json: Json = False,
) -> Answer:
    """One self-contained HTML page of a run: loss, plan, predicted next to measured, timelines.

    Example: pipefit report runs/first

    Args:
        folder: Folder of a run, written by `pipefit train -o FOLDER`.
        output: Path of the page; default: FOLDER/report.html.
    """
    from pipefit.run.report_page import write_report

    page = write_report(folder, output)
    return Answer({"report": str(page)}, f"wrote {page}")
