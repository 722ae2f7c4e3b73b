"""Tests on a GPU: a warning of a driver or of torch's kernels is shown in the summary, and fails nothing."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("default"))
