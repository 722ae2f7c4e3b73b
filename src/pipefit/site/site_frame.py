"""The frame of the pages of the site."""

from __future__ import annotations

from pipefit.spec.assets import rendered


def page(title: str, body: str, script: str = "") -> str:
    """A page in the frame.

    Args:
        title: of the page.
        body: HTML.
        script: JavaScript that runs at the end.
    """
    return rendered("pipefit.site", "shell.html.j2", title=title, body=body, script=script)
