"""Colours: one palette for every kind of picture, chosen so that colour-blind readers distinguish families.

Forwards are light and carry dark text, backwards dark with light text, so lightness is enough to separate them; the
weight half of a split backward is amber, which no common colour blindness confuses with blue. Chunks of a rank are
shades of their family, from light to dark.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A kind of instruction: its name, its colours (first chunk, last chunk, only chunk) and its text, by theme."""

    name: str
    light: tuple[str, str, str]
    light_text: str
    dark: tuple[str, str, str]
    dark_text: str


FAMILIES: dict[str, Family] = {
    "F": Family("forward", ("#c3def8", "#86b6e6", "#add2f5"), "#0c2747", ("#a9cff2", "#5a97d4", "#84b7ea"), "#06182c"),
    "R": Family(
        "recompute", ("#ebe0f8", "#bfa3e3", "#d8c6f0"), "#2f184f", ("#cbb4ec", "#8f6fc2", "#b195dd"), "#190b2e"
    ),
    "B": Family("backward", ("#3b78bd", "#13386a", "#2960a6"), "#ffffff", ("#3c6fb2", "#1c3b6c", "#2c5899"), "#f2f7ff"),
    "I": Family(
        "input gradient", ("#2b8580", "#0c4744", "#1b6b66"), "#ffffff", ("#2b7f7a", "#124a47", "#1d6661"), "#f0fffd"
    ),
    "W": Family(
        "weight gradient", ("#f8d183", "#dd9a1c", "#f0b643"), "#3a2600", ("#f0c670", "#b67d13", "#d9a136"), "#241700"
    ),
    "S": Family("optimizer step", ("#5b6472",) * 3, "#ffffff", ("#b6c0cf",) * 3, "#10151d"),
}

# The lanes of copies and of steps on the host: (light, dark).
LANES: dict[str, tuple[str, str]] = {
    "fetch": ("#c58410", "#e5b04c"),
    "evict": ("#7a5c1e", "#b89450"),
    "host": ("#5b6472", "#b6c0cf"),
}

# All other parts of a picture: (light, dark).
INKS: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#0f141c"),
    "ink": ("#17202c", "#e8edf4"),
    "soft": ("#5a6675", "#9aa7b8"),
    "lane": ("#f1f3f6", "#1b222d"),
    "line": ("#dbe1e8", "#2c3644"),
    "bar": ("#93a4b8", "#5f7188"),
    "mark": ("#d6336c", "#ff7aa8"),
}


def mix(first: str, last: str, share: float) -> str:
    """A colour between two.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    text = "#"
    for a, b in zip(bytes.fromhex(first[1:]), bytes.fromhex(last[1:]), strict=True):
        mixed = round(a + (b - a) * share)
        text += f"{mixed:02x}"
    return text


def chunk_colour(letter: str, chunk: int, num_chunks: int, dark: bool = False) -> str:
    """The fill of a chunk's cells."""
    family = FAMILIES[letter]
    if dark:
        first, last, only = family.dark
    else:
        first, last, only = family.light
    if num_chunks == 1:
        return only
    return mix(first, last, chunk / (num_chunks - 1))


def cell_rules(scope: str, num_chunks: int, dark: bool) -> str:
    """CSS for the cells of a picture and their text, under a selector.

    Plain rules, no variables: every viewer of SVG understands them.
    """
    rules = []
    for letter, family in FAMILIES.items():
        for chunk in range(num_chunks):
            fill = chunk_colour(letter, chunk, num_chunks, dark)
            rules.append(f"{scope} .{letter}{chunk}{{fill:{fill}}}")
        text = family.light_text
        if dark:
            text = family.dark_text
        rules.append(f"{scope} .t{letter}{{fill:{text}}}")
    for name, colours in (LANES | INKS).items():
        rules.append(f"{scope} .{name}{{fill:{colours[dark]}}}")
    line = INKS["line"][dark]
    mark = INKS["mark"][dark]
    rules.append(f"{scope} .hair{{stroke:{line};stroke-width:1}}{scope} .halo{{stroke:{mark};stroke-width:2}}")
    return "".join(rules)
