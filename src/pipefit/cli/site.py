"""`pipefit site`: static pages of schedules, plans, published runs, the lectures' figures and the course."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pipefit.cli.answer import Answer
from pipefit.cli.heartbeat import Heartbeat
from pipefit.cli.options import FOLDER, Json
from pipefit.errors import look_up


def command(
    *,
    output: Annotated[Path, FOLDER],
    only: list[str] | None = None,
    profile: list[str] | None = None,
    json: Json = False,
) -> Answer:
    """Write static pages that need no server and no network.

    Example: pipefit site -o site

    Schedules to play with, plans for models and GPUs, published runs next to predictions, the figures of five lectures,
    and the course. All of it takes minutes, most of them for plans: a page cannot plan.

    Args:
        output: Folder of the pages.
        only: A page to write: schedules, plan, runs, lectures or course; again: more. Default: all.
        profile: A model of the plan page by its sizes, as for `pipefit plan`; again: more. Default: seven usual ones.
    """
    from pipefit.site.pages import MAKERS, Site, first_page
    from pipefit.spec.files import write_atomically

    names = only or list(MAKERS)
    makers = [look_up(name, MAKERS, "no page is called") for name in names]
    with Heartbeat(sys.stderr) as heartbeat:
        site = Site(output, _draw, heartbeat.doing, {text: text for text in profile or ()})
        for maker in makers:
            maker(site)
    return Answer({"pages": names}, "", output=write_atomically(output / "index.html", first_page(names)))


def _draw(words: list[str], path: Path) -> None:
    """Writes the drawing of a command into a file."""
    from pipefit.cli.app import make_app

    tokens = [*words, "-o", str(path)]
    draw, bound, _ = make_app(tokens).parse_args(tokens, print_error=False, exit_on_error=False)
    draw(*bound.args, **bound.kwargs)
