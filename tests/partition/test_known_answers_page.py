"""The page of known answers shows what the code finds."""

import pytest

from docs import known_answers

pytestmark = pytest.mark.slow


def test_every_figure_on_the_page_is_what_the_code_finds():
    shown = known_answers.PAGE.read_text()
    assert shown.count("```text") == 6
    assert known_answers.filled(shown) == shown, "bring it up to date with: python -m docs.known_answers"


def test_published_runs_on_v100s_are_predicted_within_eight_percent():
    for *shape, published_s in known_answers.V100_RUNS:
        if shape[0] == 1:
            assert known_answers.v100_s(*shape) == pytest.approx(published_s, rel=0.08), shape
