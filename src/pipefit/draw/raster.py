"""Our vector pictures as bitmaps, so that a PNG shows what the SVG shows.

This reads what `svg`, `chart` and the pictures of plans write, and no more of SVG: rectangles, circles, straight
paths and lines of text, with plain class rules.
"""

from __future__ import annotations

import math
import re
from functools import cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from pipefit.errors import PipefitError
from pipefit.spec.files import write_atomically

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Style = dict[str, str]
Point = tuple[float, float]

_FINE = 2  # shapes are drawn this much larger, then averaged: their edges lie between pixels
_MOST_PIXELS = 60_000_000
_FONTS = (
    ("LiberationSans-Regular.ttf", "LiberationSans-Bold.ttf"),
    ("Arial.ttf", "Arial Bold.ttf"),
    ("arial.ttf", "arialbd.ttf"),
    ("NotoSans-Regular.ttf", "NotoSans-Bold.ttf"),
    ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
)
# Signs that Pillow's font lacks.
_PLAIN = str.maketrans({"−": "-", "→": "->", "µ": "u", "×": "x", "≥": ">=", "≤": "<=", "–": "-"})


def save_bitmap(path: str | Path, svg: str, *, scale: float = 2.0) -> Path:
    """Writes a picture of ours as PNG, atomically; see `rasterise`."""
    try:
        return write_atomically(path, rasterise(svg, scale=scale))
    except ModuleNotFoundError:
        raise PipefitError(
            f"{path}: a PNG needs Pillow, which is not installed; pip install 'pipefit[plot]', or save an .svg"
        ) from None


def rasterise(svg: str, *, scale: float = 2.0) -> bytes:
    """A picture of ours as PNG, on light paper unless its theme is dark.

    Args:
        svg: the text of the picture.
        scale: pixels for each pixel of the picture.

    Raises:
        ModuleNotFoundError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw

    root = ElementTree.fromstring(svg)
    rules = _rules("".join(node.text or "" for node in root.iter() if _name(node) == "style"))
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    fine = _FINE if wide * high * (scale * _FINE) ** 2 <= _MOST_PIXELS else 1
    size = math.ceil(wide * scale), math.ceil(high * scale)
    image = Image.new("RGB", (size[0] * fine, size[1] * fine), "white")
    canvas = _Canvas(ImageDraw.Draw(image), ImageDraw.Draw(image, "RGBA"))
    texts = []
    base = _style(root, rules, {})
    for node in root.iter():
        kind = _name(node)
        if kind in _SHAPES:
            style = _style(node, rules, base)
            _SHAPES[kind](canvas.of(style), node, style, scale * fine)
        elif kind == "text":
            texts.append(node)
    image = image.reduce(fine) if fine > 1 else image
    words = ImageDraw.Draw(image, "RGBA")
    for node in texts:
        _text(words, node, _style(node, rules, base), scale)
    picture = BytesIO()
    image.save(picture, format="png", compress_level=2)
    return picture.getvalue()


class _Canvas(NamedTuple):
    """A canvas for opaque shapes, and one for transparent shapes, which takes longer."""

    solid: ImageDraw
    mixed: ImageDraw

    def of(self, style: Style) -> ImageDraw:
        return self.mixed if "opacity" in style else self.solid


def _name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def _rules(sheet: str) -> dict[str, Style]:
    """The rules of each class; "" has those of the root. Rules for dark paper come last, and are left out."""
    found: dict[str, Style] = {}
    for name, body in re.findall(r"\.[\w-]+(?: \.([\w-]+))?\{([^{}]*)\}", sheet.partition("@media")[0]):
        found.setdefault(name, {}).update(part.split(":", 1) for part in body.split(";") if ":" in part)
    return found


def _style(node: ElementTree.Element, rules: dict[str, Style], base: Style) -> Style:
    """The attributes of an element, with what its classes say above them."""
    style = base | node.attrib
    for name in node.get("class", "").split():
        style |= rules.get(name, {})
    return style if base else rules.get("", {}) | style


def _colour(style: Style, key: str, default: str = "") -> tuple[int, ...] | None:
    name = style.get(key, default)
    if not name.startswith("#"):
        return None
    red, green, blue = (int(name[at : at + 2], 16) for at in (1, 3, 5))
    return (red, green, blue, round(255 * float(style["opacity"]))) if "opacity" in style else (red, green, blue)


def _number(style: Style, key: str, default: float = 0.0) -> float:
    return float(style.get(key, default))


# --------------------------------------------------------------------------------------------------------------- shapes


def _rect(canvas: ImageDraw, node: ElementTree.Element, style: Style, scale: float) -> None:
    x, y, wide, high = (_number(style, key) * scale for key in ("x", "y", "width", "height"))
    # A pixel belongs to the rectangle when its middle does.
    box = [round(x), round(y), max(round(x + wide) - 1, round(x)), max(round(y + high) - 1, round(y))]
    fill = _colour(style, "fill", "#000000")
    radius = min(_number(style, "rx") * scale, (box[2] - box[0]) / 2, (box[3] - box[1]) / 2)
    if fill and radius >= 1:
        canvas.rounded_rectangle(box, radius, fill=fill)
    elif fill:
        canvas.rectangle(box, fill=fill)


def _circle(canvas: ImageDraw, node: ElementTree.Element, style: Style, scale: float) -> None:
    x, y, radius = (_number(style, key) * scale for key in ("cx", "cy", "r"))
    box = [x - radius, y - radius, x + radius, y + radius]
    canvas.ellipse(
        box, fill=_colour(style, "fill", "#000000"), outline=_colour(style, "stroke"), width=_wide(style, scale)
    )


def _path(canvas: ImageDraw, node: ElementTree.Element, style: Style, scale: float) -> None:
    stroke, fill = _colour(style, "stroke"), _colour(style, "fill", "" if "stroke" in style else "#000000")
    for points, closed in _points(node.get("d", ""), scale):
        if fill and closed:
            canvas.polygon(points, fill=fill)
        if stroke and style.get("stroke-width") != "0":
            line = [*points, points[0]] if closed else points
            dashes = [float(part) * scale for part in re.findall(r"[\d.]+", style.get("stroke-dasharray", ""))]
            for piece in _dashed(line, dashes):
                canvas.line(piece, fill=stroke, width=_wide(style, scale), joint="curve")


def _wide(style: Style, scale: float) -> int:
    return max(round(_number(style, "stroke-width", 1.0) * scale), 1)


def _points(text: str, scale: float) -> list[tuple[list[Point], bool]]:
    """The pieces of a path of straight lines, and whether each is closed."""
    pieces: list[tuple[list[Point], bool]] = []
    for move, body in re.findall(r"([MLHVZ])([^MLHVZ]*)", text):
        values = [float(value) * scale for value in re.findall(r"-?[\d.]+", body)]
        if move == "M":
            pieces.append(([], False))
        points = pieces[-1][0]
        if move == "Z":
            pieces[-1] = (points, True)
        elif move == "H":
            points.append((values[0], points[-1][1]))
        elif move == "V":
            points.append((points[-1][0], values[0]))
        else:
            points += zip(values[::2], values[1::2], strict=True)
    return [piece for piece in pieces if len(piece[0]) > 1]


def _dashed(line: list[Point], dashes: list[float]) -> list[list[Point]]:
    """A line cut into its dashes; without any it stays whole."""
    if not sum(dashes):
        return [line]
    pieces, at, left = [[line[0]]], 0, dashes[0]
    for (x0, y0), (x1, y1) in pairwise(line):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            place = x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length
            at += 1
            left = dashes[at % len(dashes)]
            if at % 2:
                pieces[-1].append(place)
            else:
                pieces.append([place])
        left -= length - done
        if at % 2 == 0:
            pieces[-1].append((x1, y1))
    return [piece for piece in pieces if len(piece) > 1]


_SHAPES = {"rect": _rect, "circle": _circle, "path": _path}


# ---------------------------------------------------------------------------------------------------------------- words


def _text(canvas: ImageDraw, node: ElementTree.Element, style: Style, scale: float) -> None:
    size = float(style.get("font-size", "12").removesuffix("px")) * scale
    fill = _colour(style, "fill", "#000000")
    font, is_plain = _font(round(4 * size) / 4, int(style.get("font-weight", 400)) >= 600)
    words = "".join(node.itertext())
    anchor = {"middle": "ms", "end": "rs"}.get(style.get("text-anchor", ""), "ls")
    place = _number(style, "x") * scale, _number(style, "y") * scale
    canvas.text(place, words.translate(_PLAIN) if is_plain else words, fill=fill, font=font, anchor=anchor)


@cache
def _font(size: float, bold: bool) -> tuple[Any, bool]:
    """A font of the system with all our signs, or the one that Pillow brings; and whether it is that."""
    from PIL import ImageFont

    for names in _FONTS:
        try:
            return ImageFont.truetype(names[bold], size), False
        except OSError:
            continue
    return ImageFont.load_default(size), True
