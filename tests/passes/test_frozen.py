"""Frozen stages have forwards only, and everything else goes on as it would."""

from collections import Counter

import pytest

from pipefit.cost import CostModel, unit
from pipefit.errors import ScheduleError
from pipefit.ir import COMPUTE_OPS, Op, Program
from pipefit.ir.graph import FEW_SENDS, dependency_graph
from pipefit.ir.liveness import lifetimes, peak_inflight
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.verify import verify

CASES = {
    "gpipe": Shape(3, 4),
    "1f1b": Shape(3, 8, num_steps=2, recompute=None),
    "interleaved": Shape(2, 4, num_chunks=2),
    "breadth-first": Shape(2, 4, num_chunks=2, replicas=(2,)),
    "zb-h1": Shape(3, 5, clip=True),
    "zb-v": Shape(2, 4, num_chunks=2),
    "pipedream": Shape(3, 1, num_steps=6, replicas=(1, 2, 1)),
    "pipedream-vertical-sync": Shape(3, 1, num_steps=6),
    "pipedream-2bw": Shape(3, 3, num_steps=4),
    "spilled": Shape(4, 2),
}


def both(name: str, frozen: int = 2) -> tuple[Program, Program]:
    shape = {field: getattr(CASES[name], field) for field in Shape.__struct_fields__}
    return generate(name, Shape(**shape)), generate(name, Shape(**shape | {"frozen": frozen}))


@pytest.mark.parametrize("name", CASES)
def test_frozen_stages_have_forwards_only_and_the_others_what_they_had(name):
    whole, program = both(name)
    assert verify(program).ok
    kept = {Op.LOAD, Op.FWD, Op.SEND, Op.RECV, Op.FETCH, Op.DROP}
    assert {i.op for _, _, i in program if 0 <= i.stage < 2} <= kept
    assert not [i for _, _, i in program if i.kind == "grad" and i.stage < 2]
    assert not [i for _, _, i in program if i.op is Op.DROP and i.stage < 2 and not program.header.is_spilled(i.stage)]
    for before, after in zip(whole.order, program.order, strict=True):
        stays = [short for short in before if short[0] == "F" or int(short[1:].split(".")[0]) >= 2]
        assert [short for short in stays if short[0] != "R"] == [short for short in after if short[0] != "R"]


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream-2bw"])
def test_a_frozen_stage_has_one_version_and_the_others_those_they_had(name):
    versions = [{(i.stage, i.mb): i.version for _, _, i in p if i.op in COMPUTE_OPS} for p in both(name)]
    before, after = versions
    assert {version for (stage, _), version in after.items() if stage < 2} == {0}
    assert all(after[key] == version for key, version in before.items() if key[0] >= 2)


def test_vertical_sync_asks_the_first_stage_that_trains():
    program = generate("pipedream-vertical-sync", Shape(4, 1, num_steps=9, frozen=2))
    forwards = {(i.stage, i.mb): i.version for _, _, i in program if i.op is Op.FWD}
    assert [forwards[2, mb] for mb in range(9)] == [forwards[3, mb] for mb in range(9)] == [0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_nothing_is_kept_of_a_frozen_forward_once_it_is_sent():
    _, program = both("1f1b")
    kinds = Counter(life.value.kind for rank in (0, 1) for life in lifetimes(program, rank))
    assert set(kinds) == {"input", "act", "weights"}
    assert [peak_inflight(program, rank) for rank in range(3)] == [0, 0, 1]
    for life in lifetimes(program, 0):
        if life.value.kind == "act":
            assert program.ranks[0][life.dies].op is Op.SEND and life.dies == life.born + 1


def test_a_rank_that_trains_nothing_comes_to_the_norm_of_every_update():
    program = generate("1f1b", Shape(3, 4, num_steps=3, frozen=1, clip=True))
    for own in program.ranks:
        assert [i.version for i in own if i.op is Op.REDUCE and i.kind == "norm"] == [0, 1, 2]
    first = [str(i) for i in program.ranks[0]]
    assert first.index("reduce s* w0 norm") > first.index("send s0 m3 act >1")
    assert first.index("reduce s* w0 norm") < first.index("fwd s0 m4 w0"), "a flush: others need no more before it"


def test_a_frozen_stage_runs_ahead_by_a_few_messages_and_no_more():
    """No gradient comes back that it would wait for, but its activations need room until they have arrived."""
    program = generate("1f1b", Shape(2, 32, frozen=1))
    graph = dependency_graph(program)
    for number, (i, preds) in enumerate(zip(graph.instructions, graph.preds, strict=True)):
        if i.op is Op.FWD and i.stage == 0:
            sends = [graph.instructions[p].mb for p in preds if graph.instructions[p].op is Op.SEND]
            assert sends == [i.mb - FEW_SENDS - 1] * (i.mb > FEW_SENDS), str(graph.instructions[number])
    cost = CostModel((1, 1), (0, 1), (0, 9), act_bytes=(1, 0), saved_bytes=(0, 0))
    assert simulate(program, cost, repeats=3).peak_bytes(0) <= 2 * (FEW_SENDS + 2)


def test_an_update_takes_less_time_where_the_first_stages_are_frozen():
    spans = []
    for frozen in range(4):
        program = generate("1f1b", Shape(4, 8, frozen=frozen))
        spans.append(simulate(program, unit(program.header)).makespan_s)
    assert spans == [33, 31, 29, 27]


def test_the_rhythm_of_an_asynchronous_program_does_not_end_with_its_frozen_forwards():
    program = generate("pipedream", Shape(3, 1, num_steps=12, frozen=1))
    timeline = simulate(program, CostModel((1, 1, 1), (0, 1, 1), (0, 1, 1)))
    assert timeline.is_steady and timeline.period_s == 3


@pytest.mark.parametrize("shape", [Shape(2, 2, frozen=2), Shape(2, 2, frozen=1, ties=((0, 1),))])
def test_the_last_stage_and_one_that_shares_a_weight_are_never_frozen(shape):
    with pytest.raises(ScheduleError, match="frozen"):
        generate("1f1b", shape)
