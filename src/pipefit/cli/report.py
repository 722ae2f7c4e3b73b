"""`pipefit report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json, ending


def command(
    folder: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(alias="-o"), ending(".html")] = None,
    json: Json = False,
) -> Answer:
    """One self-contained HTML page of a run: loss, plan, predicted next to measured, timelines.

    Example: pipefit report runs/first

    Args:
        folder: Of a run: what `pipefit train -o FOLDER` left.
        output: Where the page goes; default: FOLDER/report.html.
    """
    from pipefit.run.report_page import write_report

    page = write_report(folder, output)
    return Answer({"report": str(page)}, f"wrote {page}")
