"""Interactive drawings in the manual: the directive `drawing` of its pages.

    ```{drawing} pipefit draw 1f1b -p 4 -m 8 -o 1f1b.html
    ```

The command runs when the manual is built, and writes its page next to the page that shows it, in a frame.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pipefit.cli import main as pipefit

_COMMAND = re.compile(r"^```\{drawing\} (.+)$", re.MULTILINE)

# A drawing in a frame says how high it is.
_LISTENER = """addEventListener("message", event => {
  for (const frame of document.querySelectorAll("iframe.drawing"))
    if (frame.contentWindow === event.source && event.data.height > 0) frame.style.height = event.data.height + "px";
});"""


def commands(page: str) -> list[str]:
    """Returns the commands of a page's drawings."""
    return _COMMAND.findall(page)


def make(command: str, folder: Path) -> str:
    """Runs a command of a drawing in a folder, and returns the name of the file that it writes.

    Raises:
        ValueError: another command, or one that fails.
    """
    words = shlex.split(command)
    if words[:2] != ["pipefit", "draw"] or words[-2] != "-o" or not words[-1].endswith(".html"):
        raise ValueError(f"expected pipefit draw … -o NAME.html, got {command!r}")
    folder.mkdir(parents=True, exist_ok=True)
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        failed = pipefit(words[1:])
    if failed:
        raise ValueError(f"{command}: {printed.getvalue()}")
    return words[-1]


class DrawingDirective(SphinxDirective):
    """A frame with the page that a command writes, and the command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Writes the page, and returns the frame and the command."""
        command = self.arguments[0]
        # The drawing follows from the code, not only from this page.
        self.env.note_reread()
        name = make(command, Path(self.env.app.outdir) / Path(self.env.docname).parent)
        frame = f'<iframe class="drawing" src="{escape(name)}" title="{escape(command)}" loading="lazy"></iframe>'
        shown = nodes.literal_block(f"$ {command}", f"$ {command}", language="console")
        return [nodes.raw("", frame, format="html"), shown]


def setup(app: Sphinx) -> None:
    """Adds the directive to Sphinx."""
    app.add_directive("drawing", DrawingDirective)
    app.add_js_file(None, body=_LISTENER)
    app.add_css_file("drawing.css")
