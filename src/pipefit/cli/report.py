"""`pipefit report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json, check_suffix, help_of

__all__ = ["command"]


def command(
    folder: Annotated[Path, help_of("Of a run: what `pipefit train -o FOLDER` left.")],
    /,
    *,
    output: Annotated[
        Path | None, help_of("Where the page goes; default: FOLDER/report.html.", "--output", "-o")
    ] = None,
    json: Json = False,
) -> Answer:
    """One self-contained HTML page of a run: loss, plan, predicted beside measured, timelines.

    Example: pipefit report runs/first
    """
    from pipefit.run.report_page import write_report

    check_suffix(output, (".html",))
    page = write_report(folder, output)
    return Answer({"report": str(page)}, f"wrote {page}")
