"""Pages of the manual, and renewing those of their lines that follow from the code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pages() -> list[Path]:
    """Returns the pages that may hold tables and transcripts."""
    folders = ("docs", "docs/course", "docs/schedules")
    return [ROOT / "README.md", *(path for folder in folders for path in sorted((ROOT / folder).glob("*.md")))]


def renew(change: Callable[[str], str]) -> None:
    """Rewrites the pages that a function of their text changes."""
    for path in pages():
        before = path.read_text()
        after = change(before)
        if after != before:
            path.write_text(after)
            sys.stdout.write(f"{path.relative_to(ROOT)}: renewed\n")
