"""Files that come with a package: texts, and templates of pages."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from pipefit.units import format_bytes, format_seconds


@cache
def asset(package: str, name: str) -> str:
    """The text of a file of a package, such as "pipefit.site"."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def rendered(package: str, name: str, /, **content: object) -> str:
    """A template of a package, filled; texts are escaped, and a name without content is an error.

    Pages extend "pipefit.spec/frame.html.j2", which has the colours and the look that they share.
    """
    # Only pages need a template engine, whose import takes time.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(lambda path: asset(*path.split("/"))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    return environment.get_template(f"{package}/{name}").render(content)
