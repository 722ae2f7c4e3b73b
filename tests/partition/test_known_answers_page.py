"""The page of known answers shows what the code finds."""

import pytest

from docs import known_answers

pytestmark = pytest.mark.slow


def test_every_figure_on_the_page_is_what_the_code_finds():
    shown = known_answers.PAGE.read_text()
    assert shown.count("```text") == 5
    assert known_answers.filled(shown) == shown, "bring it up to date with: python -m docs.known_answers"
