"""Tests that are about simulated GPUs; real ones pass by."""

import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sham/" in item.nodeid and "sham_driver" not in sys.modules:
            item.add_marker(pytest.mark.skip(reason="needs the simulated GPUs of `make gpu-sham`"))
