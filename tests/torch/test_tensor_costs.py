"""What tensor parallelism is predicted to cost."""

import pytest

from pipefit.spec import Layer, Partition, Placement, Plan, Profile, StageSpec, Topology
from pipefit.train.calibrate import RuntimeCosts
from pipefit.train.predicted import cost_of

BLOCKS = tuple(Layer(name, 2.0, 2.0, 4.0, 100.0, 600.0, 1000.0) for name in ("block0", "block1"))
ENDS = Layer("embed", 1.0, 0.0, 2.0, 100.0, 40.0, 800.0), Layer("head", 1.0, 1.0, 1.0, 400.0, 500.0, 800.0)
PROFILE = Profile("gpt", 1, (ENDS[0], *BLOCKS, ENDS[1]), optimizer_s=8.0, loss_s=4.0)
FREE = RuntimeCosts(0.0, 0.0, copy_s_per_byte=0.0)


def plan_of(tensor: int, **more: bool) -> Plan:
    stages = tuple(StageSpec(layers, tensor=tensor) for layers in ((0, 1), (2, 3)))
    return Plan(Partition(stages), Placement(((0,), (1,))), "1f1b", 4, **more)


def law(size: float) -> float:
    return 0.5 + size / 1000


def test_work_is_divided_and_the_sums_inside_layers_are_added():
    alone = cost_of(PROFILE, plan_of(1), Topology.local(4), 2.0, FREE)
    both = cost_of(PROFILE, plan_of(2), Topology.local(4), 2.0, FREE, law)
    # The embedding sums once, a block twice each way, the head once in its backward: messages of 100 bytes.
    wait = law(100)
    assert both.forward_s == pytest.approx((alone.forward_s[0] / 2 + 3 * wait, alone.forward_s[1] / 2 + 2 * wait))
    assert both.backward_input_s == pytest.approx((1.0 + 2 * wait, 1.5 + 3 * wait))
    assert both.backward_weight_s == tuple(seconds / 2 for seconds in alone.backward_weight_s)
    assert both.step_s == tuple(seconds / 2 for seconds in alone.step_s)
    assert both.loss_s == alone.loss_s / 2 + 2 * law(0)
    assert (both.tensor, both.act_bytes) == (2, alone.act_bytes), "pieces are cut by the program"
    assert both.weight_bytes == (900.0, 900.0)


def test_a_divided_sequence_divides_messages_and_what_is_kept_and_sums_small_gradients():
    plain = cost_of(PROFILE, plan_of(2), Topology.local(4), 2.0, FREE, law)
    cost = cost_of(PROFILE, plan_of(2, sequence_parallel=True), Topology.local(4), 2.0, FREE, law)
    assert cost.act_bytes == (50.0, 200.0)
    assert cost.saved_bytes == (320.0, 550.0) and plain.saved_bytes == (20.0 + 550.0, 550.0 + 250.0)
    assert cost.backward_input_s[0] == pytest.approx(plain.backward_input_s[0] + 2 * law(0))
