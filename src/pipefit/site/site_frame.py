"""The frame of the pages of the site, and the link to the first page."""

from __future__ import annotations

from importlib.resources import files


def page(title: str, body: str, up: str = "", script: str = "") -> str:
    """A page with a link to the first one.

    Args:
        title: of the page.
        body: HTML.
        up: path to the folder of the first page.
        script: JavaScript that runs at the end.
    """
    return rendered("shell.html.j2", title=title, body=body, up=up, script=script)


def with_way_back(html: str) -> str:
    """A page that has a frame of its own, with a link to the first page above it."""
    return html.replace("<body>", '<body>\n<nav><a href="index.html">pipefit</a></nav>', 1)


def asset(name: str) -> str:
    """A file of the site."""
    return files("pipefit.site").joinpath(name).read_text(encoding="utf-8")


def rendered(name: str, **content: object) -> str:
    """A template, filled."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(asset(name)).render(content)
