"""Modules that the server of the ranks also loads in tests."""

from tests.small_probes import shrink

shrink()
