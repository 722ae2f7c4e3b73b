"""What tensor parallelism is predicted to cost."""

from pipefit.cost import FREE, of_plan
from pipefit.cost.tensor import tensor_shard
from pipefit.profiling.links import per_core
from pipefit.spec import Layer, Level, Partition, Placement, Plan, Profile, StageSpec, Topology

BLOCKS = tuple(Layer(name, 2.0, 2.0, 4.0, 100.0, 600.0, 1000.0) for name in ("block0", "block1"))
ENDS = Layer("embed", 1.0, 0.0, 2.0, 100.0, 40.0, 800.0), Layer("head", 1.0, 1.0, 1.0, 400.0, 500.0, 800.0)
PROFILE = Profile("gpt", 1, (ENDS[0], *BLOCKS, ENDS[1]), optimizer_s=8.0, loss_s=4.0)


def plan_of(tensor: int, **more: bool) -> Plan:
    stages = tuple(StageSpec(layers, tensor=tensor) for layers in ((0, 1), (2, 3)))
    return Plan(Partition(stages), Placement(((0,), (1,))), "1f1b", 4, **more)


def law(size: float) -> float:
    return 0.5 + size / 1000


def test_arithmetic_divides_work_and_adds_two_sums_each_way_in_a_block():
    found = tensor_shard(PROFILE, 2, Topology((Level("server", 2, 1000.0, 0.25),)))
    embed, first, _, head = found.layers
    assert found.optimizer_s == 4.0, "each steps its part of the weights"
    assert (first.forward_s, first.backward_input_s, first.backward_weight_s) == (1 + 2 * law(100), 1 + 2 * law(100), 2)
    assert (embed.forward_s, head.backward_input_s, head.weight_bytes) == (0.5, 0.5, 400)
    assert first.saved_bytes == 500 + 50, "five times its output is whole everywhere"


def test_a_profile_of_parts_is_taken_as_it_is():
    alone = of_plan(PROFILE, plan_of(1), Topology.local(4), runtime=FREE)
    both = of_plan(PROFILE, plan_of(2), Topology.local(4), runtime=FREE)
    assert (both.forward_s, both.step_s, both.loss_s) == (alone.forward_s, alone.step_s, alone.loss_s)
    assert (both.act_bytes, both.weight_bytes) == (alone.act_bytes, alone.weight_bytes)
    assert both.tensor == 2, "pieces are cut by the program"


def test_under_a_divided_sequence_outputs_and_all_that_is_saved_are_divided():
    topology = Topology((Level("server", 2, 1000.0, 0.25),))
    whole, found = (tensor_shard(PROFILE, 2, topology, sequence=sequence).layers[1] for sequence in (False, True))
    assert (found.output_bytes, found.saved_bytes, found.weight_bytes) == (50, 300, 500)
    assert found.forward_s == whole.forward_s, "the same bytes move"


def test_processes_for_a_core_are_those_of_one_machine_and_of_this_run():
    servers = Topology((Level("server", 4, 1e9, cores=2), Level("rack", 2, 1e9)))
    assert [per_core(servers, num) for num in (1, 2, 3, 8)] == [1.0, 1.0, 1.5, 2.0]
    assert per_core(Topology((Level("gpus", 8, 1e9),)), 8) == 1.0, "processes with a device each share nothing"
