"""The pages of the site, each written by a function of its own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipefit.reproduce.lectures import ENTRIES
from pipefit.reproduce.lectures_page import lectures_page
from pipefit.reproduce.outcome import run_all
from pipefit.reproduce.run_scores import published_runs
from pipefit.run.observer import Say
from pipefit.site.course_pages import Draw, course_pages
from pipefit.site.plan_grid import plan_grid
from pipefit.spec.assets import asset, rendered
from pipefit.spec.files import write_atomically

_SITE = "pipefit.site"


@dataclass(frozen=True)
class Site:
    """The folder of the pages, and what their functions need.

    Attributes:
        folder: for pages.
        draw: writes a drawing.
        say: called with a line about the work that begins.
        models: profiles of the plan page, by the names that readers see; empty: the usual ones.
    """

    folder: Path
    draw: Draw
    say: Say
    models: Mapping[str, str]

    def write(self, name: str, text: str) -> None:
        """Writes a page, with a link to the first one at its top."""
        up = "../" * name.count("/")
        top = f'<body>\n<nav><a href="{up}index.html">pipefit</a></nav>'
        write_atomically(self.folder / name, text.replace("<body>", top, 1))


def _schedules(site: Site) -> None:
    path = site.folder / "schedules.html"
    site.draw("draw 1f1b -p 4 -m 8".split(), path)
    site.write(path.name, path.read_text(encoding="utf-8"))


def _plan(site: Site) -> None:
    usual = tomllib.loads(asset(_SITE, "usual.toml"))
    grid = plan_grid(site.models or usual["models"], usual["machines"], usual["batches"], site.say)
    site.write("plan.html", plan_page(grid))


def plan_page(grid: object) -> str:
    """The page of plans, from `plan_grid`."""
    data = msgspec.json.encode(grid).decode().replace("</", "<\\/")
    script = f"const grid = {data};\n{asset(_SITE, 'plan.js')}"
    return rendered(_SITE, "shell.html.j2", title="Plans", body=asset(_SITE, "plan.html"), script=script)


def _runs(site: Site) -> None:
    found = published_runs(site.say)
    site.write("runs.html", rendered(_SITE, "runs.html.j2", svg=found.svg(), table=found.text))


def _lectures(site: Site) -> None:
    entries = [entry for entry in ENTRIES.values() if entry.kind != "measured"]
    site.write("lectures.html", lectures_page(run_all(entries, site.say)))


def _course(site: Site) -> None:
    for name, text in course_pages(site.folder / "course", site.draw).items():
        site.write(f"course/{name}", text)


MAKERS: Mapping[str, Callable[[Site], None]] = {
    "schedules": _schedules,
    "plan": _plan,
    "runs": _runs,
    "lectures": _lectures,
    "course": _course,
}
"""The function that writes each page, by the name of the page."""


def first_page(names: Sequence[str]) -> str:
    """The first page: a link to each of these pages."""
    return rendered(_SITE, "first.html.j2", names=names)
