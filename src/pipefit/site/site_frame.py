"""The frame of the pages of the site."""

from __future__ import annotations

from importlib.resources import files


def page(title: str, body: str, script: str = "") -> str:
    """A page in the frame.

    Args:
        title: of the page.
        body: HTML.
        script: JavaScript that runs at the end.
    """
    return rendered("shell.html.j2", title=title, body=body, script=script)


def asset(name: str) -> str:
    """A file of the site."""
    return files("pipefit.site").joinpath(name).read_text(encoding="utf-8")


def rendered(name: str, **content: object) -> str:
    """A template, filled."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(asset(name)).render(content)
