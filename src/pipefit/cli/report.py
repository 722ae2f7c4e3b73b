"""`pipefit report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json, ending
from pipefit.units import columns


def command(
    folder: Path,
    /,
    *,
    output: Annotated[Path | None, ending(".html", alias="-o")] = None,
    json: Json = False,
) -> Answer:
    """One self-contained HTML page of a run: loss, plan, predicted next to measured, timelines.

    Example: pipefit report runs/first

    Where `pipefit compare -o FOLDER` has written into the same folder, also the speed against one process.

    Args:
        folder: Folder of a run, written by `pipefit train -o FOLDER`.
        output: Path of the page; default: FOLDER/report.html.
    """
    from pipefit.run.report_page import summary_of, write_report

    page = write_report(folder, output)
    lines = columns([*summary_of(folder), ("report", str(page))])
    return Answer({"report": str(page)}, "\n".join(lines))
