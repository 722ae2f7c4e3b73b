"""What tensor parallelism is predicted to cost."""

import pytest
import torch
from torch import nn

from pipefit.calibrate import tensor_shard as shard
from pipefit.cost import FREE, of_plan
from pipefit.cost.tensor import tensor_shard
from pipefit.models import gpt
from pipefit.models.examples import mean_cross_entropy
from pipefit.parallel.region import Exchange, IsolatedRegion
from pipefit.profiling import profile_layers
from pipefit.profiling.links import per_core
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.spec import Layer, Level, Partition, Placement, Plan, Profile, StageSpec, Topology
from pipefit.stage.split import named_layers

BLOCKS = tuple(Layer(name, 2.0, 2.0, 4.0, 100.0, 600.0, 1000.0) for name in ("block0", "block1"))
ENDS = Layer("embed", 1.0, 0.0, 2.0, 100.0, 40.0, 800.0), Layer("head", 1.0, 1.0, 1.0, 400.0, 500.0, 800.0)
PROFILE = Profile("gpt", 1, (ENDS[0], *BLOCKS, ENDS[1]), optimizer_s=8.0, loss_s=4.0)
CPU = torch.device("cpu")


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


# ------------------------------------------------------------------------------------------------------- as divided

SUM = Exchange("sum", (3, 6, 8), torch.float32)


def rehearsed(sequence: bool = False, frozen: int = 0) -> tuple[list[shard.Ways], list[Exchange], Profile]:
    """The exchanges of a small GPT over two processes, and what one of them has."""
    layers = named_layers(model())
    for layer in layers[:frozen]:
        layer.module.requires_grad_(False)
    x, y = (torch.randint(0, 12, (3, 6)) for _ in range(2))
    rehearsal = IsolatedRegion(None, 2, 0, sequence)
    with shard._rehearsed(layers, rehearsal) as divided:
        loss = divided.loss(mean_cross_entropy)
        each, ends = shard._exchanges(layers, x, y, loss, rehearsal, CPU)
        measured = profile_layers(layers, x, loss, y, repeats=1, warmup=0)
    return each, ends, measured


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(layers=2, hidden=8, heads=4, vocab=12, context=6)


def test_blocks_below_everything_that_trains_sum_nothing_on_the_way_back():
    (embed, block, other, head), _, _ = rehearsed(frozen=3)
    assert (embed, block, other) == (([SUM], []), ([SUM, SUM], []), ([SUM, SUM], []))
    assert head == ([], [SUM]), "for its layer norm, which trains"


def test_every_sum_of_a_divided_gpt_is_found():
    (embed, block, other, head), loss, _ = rehearsed()
    assert block == other == ([SUM, SUM], [SUM, SUM])
    assert embed == ([SUM], []) and head == ([], [SUM])
    assert loss == [SUM._replace(shape=(18,)), SUM._replace(shape=(2, 18))]


def test_under_a_divided_sequence_sums_become_gathers_and_scatters_and_whole_weights_add_up():
    (embed, block, _, head), _, _ = rehearsed(sequence=True)
    scattered = Exchange("scattered", (3, 6, 8), torch.float32, 1)
    gathered = Exchange("gathered", (3, 3, 8), torch.float32, 1)
    small = SUM._replace(shape=(6 * 8,))
    assert block == ([gathered, scattered] * 2, [gathered, scattered] * 2 + [small])
    assert embed[0] == [scattered] and embed[1][0] == gathered
    assert head == ([gathered], [scattered, SUM._replace(shape=(2 * 8,))])


def test_a_rehearsal_weighs_the_parts_and_leaves_the_layers_as_they_were():
    layers = named_layers(model())
    before = [(p, p.data, p.data.clone()) for layer in layers for p in layer.module.parameters()]
    classes = [type(layer.module) for layer in layers]
    with shard._rehearsed(layers, IsolatedRegion(None, 2, 0, False)):
        assert layers[1].module.up.weight.shape == (16, 8)
        assert [type(layer.module) for layer in layers] != classes
    assert [type(layer.module) for layer in layers] == classes
    assert all(p.data is not None and torch.equal(p, copy) and p.grad is None for p, _, copy in before)
    _, _, measured = rehearsed()
    shared = 6 * 8 * 4  # two norms and the two biases after the sums
    whole = sum(p.nbytes for p in layers[1].module.parameters())
    assert measured.layers[1].weight_bytes - shared == (whole - shared) / 2
    assert rehearsed(sequence=True)[2].layers[1].output_bytes == measured.layers[1].output_bytes / 2


def test_exchanges_are_added_to_the_work_that_waits_for_them():
    each = [([SUM], []), ([SUM, SUM], [SUM, SUM]), ([], []), ([], [SUM])]
    priced = shard._with_exchanges(PROFILE, each, [SUM], {SUM: 10.0})
    assert [layer.forward_s for layer in priced.layers] == [11.0, 22.0, 2.0, 1.0]
    assert [layer.backward_input_s for layer in priced.layers] == [0.0, 22.0, 2.0, 11.0]
    assert priced.loss_s == 14.0
    assert [layer.backward_weight_s for layer in priced.layers] == [2.0, 4.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("tensor", "cores", "crowd"), [(2, 2, 1.0), (4, 2, 2.0), (8, 2, 4.0), (8, 3, 8 / 3), (2, 8, 1)]
)
def test_what_processes_took_while_they_shared_cores_is_simulated_as_it_was_measured(tensor, cores, crowd):
    """Not slowed down by sharing a second time, as it was: by 10 for 8 processes on 2 cores."""
    topology = Topology.local(tensor, cores=cores)
    assert per_core(topology, tensor) == crowd
    alone, turn = 2.0, 12.0
    seconds = {SUM: shard.added_s([turn] * 20, [alone * crowd] * 20, crowd)}
    one = Profile("one", 1, (Layer("one", alone, 0.0, 0.0, 0.0, 0.0, 0.0),))
    plan = Plan(Partition((StageSpec((0,), tensor=tensor),)), Placement(((0,),)), "1f1b", 1)
    program = generate("1f1b", Shape(depth=1, num_microbatches=1))
    cost = of_plan(shard._with_exchanges(one, [([SUM], [])], [], seconds), plan, topology, runtime=FREE)
    assert simulate(program, cost).makespan_s == pytest.approx(turn)


def test_processes_for_a_core_are_those_of_one_machine_and_of_this_run():
    servers = Topology((Level("server", 4, 1e9, cores=2), Level("rack", 2, 1e9)))
    assert [per_core(servers, num) for num in (1, 2, 3, 8)] == [1.0, 1.0, 1.5, 2.0]
    assert per_core(Topology((Level("gpus", 8, 1e9),)), 8) == 1.0, "processes with a device each share nothing"
