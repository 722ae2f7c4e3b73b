"""Colours: one palette for every kind of picture, in `palette.toml`."""

from __future__ import annotations

import tomllib

import msgspec

from pipefit.spec.assets import asset


class Family(msgspec.Struct, frozen=True):
    """A kind of instruction: its name, its colours (first chunk, last chunk, only chunk) and its text, by theme.

    In a terminal, background and text by chunk parity.
    """

    name: str
    light: tuple[str, str, str]
    light_text: str
    dark: tuple[str, str, str]
    dark_text: str
    terminal: tuple[tuple[int, int], tuple[int, int]]


class _Palette(msgspec.Struct):
    families: dict[str, Family]
    lanes: dict[str, tuple[str, str]]
    inks: dict[str, tuple[str, str]]


_PALETTE = msgspec.convert(tomllib.loads(asset("pipefit.draw", "palette.toml")), _Palette)
FAMILIES = _PALETTE.families
"""Kinds of instructions, by their letters."""
INKS = _PALETTE.inks
"""All other parts of a picture: (light, dark)."""


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
    for name, colours in (_PALETTE.lanes | INKS).items():
        rules.append(f"{scope} .{name}{{fill:{colours[dark]}}}")
    line = INKS["line"][dark]
    mark = INKS["mark"][dark]
    rules.append(f"{scope} .hair{{stroke:{line};stroke-width:1}}{scope} .halo{{stroke:{mark};stroke-width:2}}")
    return "".join(rules)
