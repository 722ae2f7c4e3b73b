"""The table that the executor reads."""

from pipefit.ir import Op
from pipefit.runtime.handlers import HANDLERS


def test_every_operation_has_a_handler():
    assert set(HANDLERS) == set(Op)
