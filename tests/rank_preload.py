"""What the server of the ranks loads in tests, after pipefit's own."""

from tests.small_probes import shrink

shrink()
