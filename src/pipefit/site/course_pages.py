"""The chapters of the course as pages with their drawings."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from pipefit.spec.assets import asset, rendered

Draw = Callable[[list[str], Path], None]
"""Writes the drawing of a command, its words after `pipefit` without -o, into a file."""

_DRAWING = re.compile(r"^```\{drawing\} pipefit (.+) -o (.+\.html)\n```$", re.MULTILINE)
_FRAME = r"""<iframe src="\2" title="\1" loading="lazy"></iframe>

    pipefit \1
"""
_LIST = re.compile(r"^```\{toctree\}.*?^```$", re.MULTILINE | re.DOTALL)
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
"""A link to another page of the manual, which is not part of the site."""


def course_pages(folder: Path, draw: Draw) -> dict[str, str]:
    """The pages by their names; their drawings are written.

    Args:
        folder: for pages and drawings.
        draw: writes a drawing.
    """
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    chapters = {}
    links = []
    for source in sorted(files("pipefit.site").joinpath("course").iterdir(), key=str):
        text = source.read_text(encoding="utf-8")
        name = source.name.removesuffix("md")
        chapters[name] = text
        title = text.partition("\n")[0].removeprefix("# ")
        links.append(f"- [{title}]({name}html)")
    # The last one is the index.
    chapters["index."] = _LIST.sub("\n".join(["## Chapters", "", *links[:-1]]), chapters["index."])
    pages = {}
    for name, text in chapters.items():
        for words, target in _DRAWING.findall(text):
            draw(words.split(), folder / target)
        text = _DRAWING.sub(_FRAME, text.partition("\n## More")[0])
        text = _ELSEWHERE.sub(r"\1", text)
        body = markdown.render(text)
        script = asset("pipefit.site", "frames.js")
        pages[f"{name}html"] = rendered("pipefit.site", "shell.html.j2", title="Course", body=body, script=script)
    return pages
