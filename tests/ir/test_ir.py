"""Instructions, their text, and what they need, make and hold."""

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.errors import PipefitError, ProgramError, ScheduleError
from pipefit.ir import OP_SPEC, Header, Instruction, Kind, Op, Program, Reduction, Spill, WeightRule
from pipefit.ir.blocking import Blocking
from pipefit.ir.graph import collective_members, dependency_graph
from pipefit.ir.liveness import lifetimes, peak, peak_at, peak_inflight, weight_versions, working_lifetimes
from pipefit.ir.text import dump, load, parse, parse_instruction, save
from pipefit.ir.values import Value
from pipefit.schedules import Shape, generate, names

indices = st.integers(0, 99) | st.just(-1)
OPERANDS = {
    "stage": indices,
    "mb": indices,
    "version": indices,
    "kind": st.sampled_from(Kind),
    "peer": st.integers(0, 99),
    "tier": st.sampled_from(["host", "disk"]),
    "slot": indices,
}


@st.composite
def instructions(draw):
    op = draw(st.sampled_from(list(Op)))
    operands = OPERANDS | ({"kind": st.sampled_from(Reduction)} if op is Op.REDUCE else {})
    return Instruction(op, **{field: draw(operands[field]) for field in OP_SPEC[op].fields})


def _spill(tier, weights_slots, optim_slots, activations):
    return Spill(tier, weights_slots, optim_slots, (0,), activations)


@st.composite
def programs(draw):
    """Any program at all, sensible or not."""
    stages = draw(st.integers(1, 3))
    placement = draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple),
            min_size=stages,
            max_size=stages,
        )
    )
    updates = draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    frozen = draw(st.integers(0, stages - 1))
    header = Header(
        schedule=draw(st.sampled_from(["mine", "1f1b", "two words"])),
        placement=tuple(placement),
        num_microbatches=draw(st.integers(1, 99)),
        num_steps=draw(st.integers(1, 9)),
        weights=draw(st.sampled_from(list(WeightRule))),
        updates=tuple(updates),
        ties=((0, stages - 1),) if stages > 1 and not frozen and draw(st.booleans()) else (),
        clip=draw(st.booleans()),
        spill=draw(
            st.none()
            | st.builds(_spill, st.sampled_from(["host", "disk"]), st.integers(1, 9), st.integers(0, 9), st.booleans())
        ),
        frozen=frozen,
    )
    ranks = draw(st.lists(st.lists(instructions(), max_size=6).map(tuple), max_size=3))
    return Program(header, tuple(ranks))


@given(instructions())
def test_an_instruction_comes_back_from_its_text(instruction):
    assert parse_instruction(str(instruction)) == instruction


@given(programs())
def test_a_program_comes_back_from_its_text(program):
    assert parse(dump(program)) == program
    assert parse(dump(program)).digest == program.digest


def test_a_program_comes_back_from_its_file(tmp_path):
    program = generate("interleaved", Shape(2, 4, num_chunks=2))
    assert load(save(program, tmp_path / "a.pipe")) == program


def test_comments_and_blank_lines_do_not_count():
    program = generate("naive", Shape(1, 1))
    text = dump(program).replace("\n  fwd", "\n\n  # now forward\n  fwd").replace("m0 w0\n", "m0 w0  # here\n")
    assert parse(text) == program


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "x:1: expected 'format pipefit.program/1', got 'nothing'"),
        ("format pipefit.plan/1", "x:1: expected"),
        ("format pipefit.program/1\nschedule a", "header lines missing"),
    ],
)
def test_text_that_is_no_program_is_refused_with_its_line(text, says):
    with pytest.raises(ProgramError, match=says):
        parse(text, "x")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fdw s0 m0 w0", "unknown operation 'fdw'; did you mean fwd"),
        ("fwd s0 m0", "fwd takes stage mb version, got 's0 m0'"),
        ("fwd 0 0 0", "expected stage as s0, s1, …, got '0'"),
        ("send s0 m0 act <1", "expected peer as >0"),
        ("send s0 m0 nothing >1", "nothing"),
    ],
)
def test_a_line_that_is_no_instruction_is_refused_with_its_number(line, says):
    text = dump(generate("naive", Shape(1, 1))) + f"  {line}\n"
    number = len(text.splitlines())
    with pytest.raises(ProgramError, match=f"x:{number}: .*{says}"):
        parse(text, "x")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("clip no", "clip takes no words, got 'no'"),
        ("frozen 1 2", "expected one word after the name of the line, got '1 2'"),
        ("tensor", "expected one word after the name of the line, got 'none'"),
        ("tensor 2 pieces more", "expected one word"),
        ("tensor 2 piece", "expected one word"),
        ("sharded weights 2 3", "expected one word"),
    ],
)
def test_a_line_of_the_header_has_no_words_that_are_not_read(line, says):
    text = dump(generate("naive", Shape(1, 1))).replace("\nrank 0", f"{line}\n\nrank 0")
    with pytest.raises(ProgramError, match=f"x:8: {says}"):
        parse(text, "x")


def test_a_missing_file_and_a_folder_are_a_users_mistake(tmp_path):
    for path in (tmp_path / "none.pipe", tmp_path):
        with pytest.raises(PipefitError, match=str(path)):
            load(path)


def test_the_digest_tells_programs_apart():
    digests = {generate(name, Shape(2, 4)).digest for name in names()[:9]}
    assert len(digests) == 9


@pytest.mark.parametrize("op", list(Op))
def test_every_operation_says_roughly_what_it_does_and_names_known_operands(op):
    assert OP_SPEC[op].roughly or op is Op.BARRIER
    assert set(OP_SPEC[op].fields) <= set(Instruction.__struct_fields__)


@pytest.mark.parametrize("name", names()[:9])
def test_a_generated_graph_has_no_cycle_nothing_missing_and_pairs_all_messages(name):
    graph = dependency_graph(generate(name, Shape(3, 4, num_steps=2, clip=True)))
    assert not graph.missing and not graph.unmatched
    edges = networkx.DiGraph((before, after) for after, preds in enumerate(graph.preds) for before in preds)
    edges.add_edges_from(
        (number, partner) for number, partner in graph.partner.items() if graph.instructions[number].op is Op.SEND
    )
    assert networkx.is_directed_acyclic_graph(edges)
    assert all(graph.partner[graph.partner[number]] == number for number in graph.partner)
    for group in graph.collectives:
        members = collective_members(graph.program.header, graph.instructions[group[0]])
        assert tuple(sorted(graph.ranks[number] for number in group)) == members


def test_a_run_that_may_post_early_ends_where_one_that_may_not_is_stuck():
    program = generate("gpipe", Shape(2, 2))
    swapped = list(program.ranks[1])
    swapped.append(swapped.pop(0))  # its first receive comes last
    graph = dependency_graph(program.with_ranks([list(program.ranks[0]), swapped]))
    run = Blocking(graph)
    stuck = run.run()
    assert stuck and graph.instructions[stuck[0]].op is Op.SEND
    run.post(stuck[0])
    assert not run.run().get(0)


def test_a_value_is_held_from_its_making_to_its_last_need():
    program = generate("1f1b", Shape(1, 1))
    held = {str(life.value): (life.born, life.dies) for life in lifetimes(program, 0)}
    names_ = [str(i) for i in program.ranks[0]]
    assert held["saved[s0,0]"] == (names_.index("fwd s0 m0 w0"), names_.index("bwd s0 m0 w0"))
    assert held["weights[s0,1]"][1] == len(names_)
    assert held["weights[s0,0]"] == (-1, names_.index("drop s0 w0"))


def test_the_peak_is_the_highest_sum_and_where_it_is_first():
    lives = lifetimes(generate("gpipe", Shape(1, 3)), 0)

    def saved(value: Value) -> float:
        return float(value.kind == "saved")

    assert peak(lives, saved) == 3.0
    highest, index = peak_at(lives, saved)
    assert (highest, str(generate("gpipe", Shape(1, 3)).ranks[0][index])) == (3.0, "fwd s0 m2 w0")
    assert peak_at(lives, lambda value: 0.0) == (0.0, -1)


def test_activations_and_versions_of_a_rank_without_work_are_none():
    header = Header("none", ((0,),), 1, 1, WeightRule.FLUSH, (1,))
    program = Program(header, ((),))
    assert peak_inflight(program, 0) == 0
    assert weight_versions(program, 0) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"placement": ()},
        {"placement": ((0, 0),)},
        {"num_microbatches": 0},
        {"updates": (0,)},
        {"updates": (1, 1)},
        {"ties": ((0, 5),)},
        {"ties": ((0, 0),)},
        {"frozen": 1},
        {"frozen": -1},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change):
    fields = {"placement": ((0,),), "num_microbatches": 1, "num_steps": 1, "updates": (1,), **change}
    with pytest.raises(ScheduleError):
        Header(schedule="x", weights=WeightRule.FLUSH, **fields)


SPILLED = """format pipefit.program/1
schedule mine
microbatches 1
steps 1
weights flush
placement 0 0
updates 1 1
spill disk weights 1 optim 1 stages 0 1

rank 0
  load s0 m0
  fetch s0 weights w0 disk @0
  fwd s0 m0 w0
  drop s0 w0
  fetch s1 weights w0 disk @0
  fwd s1 m0 w0
  load s1 m0
  loss m0
  bwd s1 m0 w0
  fetch s1 optim w0 disk @0
  step s1 w0
  evict s1 optim w1 disk
  evict s1 weights w1 disk
  fetch s0 weights w0 disk @0
  recompute s0 m0 w0
  bwd s0 m0 w0
  fetch s0 optim w0 disk @0
  step s0 w0
  evict s0 optim w1 disk
  evict s0 weights w1 disk
"""


def test_a_fetch_waits_for_its_slot_and_for_the_write_back_of_what_it_reads():
    again = "  fetch s1 weights w1 disk @0\n  drop s1 w1\n"
    program = parse(SPILLED + again)
    graph = dependency_graph(program)
    waits = {
        str(graph.instructions[number]): {str(graph.instructions[before]) for before in graph.preds[number]}
        for number in range(len(program))
    }
    assert not graph.missing
    assert waits["fetch s1 weights w0 disk @0"] == {"drop s0 w0"}
    assert waits["fetch s0 optim w0 disk @0"] == {"evict s1 optim w1 disk"}
    assert waits["step s0 w0"] == {"fetch s0 weights w0 disk @0", "fetch s0 optim w0 disk @0", "bwd s0 m0 w0"}
    assert waits["evict s1 weights w1 disk"] == {"step s1 w0"}
    assert waits["fetch s1 weights w1 disk @0"] == {
        "evict s1 weights w1 disk",
        "evict s0 weights w1 disk",
        "step s0 w0",
    }


def test_what_is_spilled_is_held_only_while_it_is_on_the_device():
    lives = [life for life in lifetimes(parse(SPILLED), 0) if life.value.kind in ("weights", "optim")]
    weights = [(str(life.value), life.born, life.dies) for life in lives if life.value.kind == "weights"]
    assert weights == [
        *(("weights[s0,0]", 1, 3), ("weights[s1,0]", 4, 10), ("weights[s1,1]", 11, 12)),
        *(("weights[s0,0]", 13, 17), ("weights[s0,1]", 18, 19)),
    ]
    assert peak(lives, lambda value: value.kind == "weights") == 1
    assert peak(lives, lambda value: value.kind == "optim") == 1


def test_half_copies_stay_until_the_next_step_of_any_stage_of_the_rank():
    """Also those of a stage that waits for its replay, which nothing uses meanwhile."""
    program = parse(SPILLED.replace("  drop s0 w0\n", ""))
    lines = [str(i) for i in program.ranks[0]]
    copies = [life for life in working_lifetimes(program, 0) if life.value.kind == "half copies"]
    assert [(life.value.stage, lines[life.born], lines[life.dies + 1]) for life in copies] == [
        (0, "fwd s0 m0 w0", "step s1 w0"),
        (1, "fwd s1 m0 w0", "step s1 w0"),
        (0, "recompute s0 m0 w0", "step s0 w0"),
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("spill disk", "spill moon"), "tier host or disk, got 'moon'"),
        (("weights 1 optim", "weights 0 optim"), "spill.weights_slots: expected at least 1, got 0"),
        (("stages 0 1", "stages 1 0"), "increasing order"),
        (("stages 0 1", "stages 0 2"), "no such stage"),
        (("weights 1 optim 1 stages", "slots"), "expected 'spill TIER weights N optim N stages S"),
    ],
)
def test_a_spill_that_cannot_be_is_refused(change, says):
    with pytest.raises((ProgramError, ScheduleError), match=says):
        parse(SPILLED.replace(*change))
