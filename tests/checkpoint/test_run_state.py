"""The state of a training comes back from what is saved of it."""

from pipefit.checkpoint.run_state import RunState
from pipefit.pipeline.loaders import LoaderPosition
from pipefit.stage.precision import LossScale

AT = {"kind": "DataLoader", "length": 8, "epoch": 1, "batches": 3, "state": [1, 2]}


def test_a_state_comes_back_on_every_rank_of_a_process():
    before = RunState(LoaderPosition(), [LossScale(4.0, streak=7, skipped=2)], num_updates=5, ordinal=10)
    before.position.resume(AT)
    after = RunState(LoaderPosition(), [LossScale(), LossScale()])
    after.resume(5, **before.saved())
    assert (after.num_updates, after.ordinal, after.position.state()) == (5, 10, AT)
    assert [scale.state() for scale in after.scales] == [{"scale": 4.0, "streak": 7, "skipped": 2}] * 2


def test_a_scale_begins_anew_where_the_loss_was_not_scaled():
    after = RunState(LoaderPosition(), [LossScale(8.0)])
    after.resume(1, **RunState(LoaderPosition()).saved())
    assert after.loss_scale is not None and after.loss_scale.scale == 8.0
    assert RunState(LoaderPosition()).loss_scale is None
