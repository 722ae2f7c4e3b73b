"""Programs that spill train the same model as those that do not; and what breaks that is refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.mutants import mutants
from tests.oracle import BrokenProgramError, difference, outcome
from tests.oracle_spill import SpillingMachine

from pipefit.ir import Spill
from pipefit.ir.text import parse_instruction
from pipefit.schedules import Shape, find, generate
from pipefit.verify import verify

ADVERSARIES = ({"seed": 0}, {"seed": 1}, {"seed": 2, "tags": False, "eager": True}, {"seed": 3}, {"seed": 4})


def resident(name, shape):
    """The same schedule with every stage on its device."""
    return dataclasses.replace(find(name), spills=False)(replace(shape, spill=None))


@st.composite
def spilling(draw):
    name = draw(st.sampled_from(["spilled", "gpipe", "1f1b", "interleaved", "breadth-first", "naive"]))
    depth = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if find(name).chunks else 1
    num_stages = depth * chunks
    frozen = draw(st.just(0) | st.integers(0, num_stages - 1))
    ties = ((0, num_stages - 1),) if num_stages > 1 and not frozen and draw(st.booleans()) else ()
    stages = draw(st.sets(st.integers(0, num_stages - 1), min_size=1)) | set(ties[0] if ties else ())
    slots = draw(st.integers(2 if ties else 1, 3))
    optim = draw(st.integers(0, 2))
    tier = draw(st.sampled_from(["host", "disk"]))
    on_host = draw(st.sets(st.sampled_from(sorted(stages)))) if tier == "host" else ()
    keeps = draw(st.sets(st.sampled_from(sorted(stages))))
    some = tuple(sorted(on_host)), tuple(sorted(keeps))
    uneven = [(2, 1)] if depth == 2 and name in ("gpipe", "1f1b", "breadth-first") else []
    shape = Shape(
        depth=depth,
        num_microbatches=draw(st.integers(2, 4)),
        num_chunks=chunks,
        num_steps=draw(st.integers(1, 3)),
        replicas=draw(st.sampled_from([(), (), (2,), *uneven])),
        ties=ties,
        clip=draw(st.booleans()),
        recompute=draw(st.sampled_from([(), None])),
        spill=Spill(tier, slots, optim, tuple(sorted(stages)), draw(st.booleans()), *some),
        prefetch=draw(st.sampled_from([None, 0, 1, 2])),
        frozen=frozen,
    )
    return name, shape


@pytest.mark.slow
@given(spilling(), st.integers(0, 99))
def test_spilling_is_right_and_trains_the_same_model_whatever_the_slots(asked, seed):
    name, shape = asked
    program = generate(name, shape)
    verify(program).raise_if_bad()
    assert outcome(program, seed=seed) == outcome(resident(name, shape))


def told(program, rule="residency"):
    return [v.message for v in verify(program).violations if v.rule == rule]


def edited(text="", without="", after=""):
    """The first lines of a small program that spills, with a line taken out and perhaps put in elsewhere."""
    own = list(generate("spilled", Shape(3, 1)).ranks[0])
    at = own.index(parse_instruction(without)) if without else 0
    moved = [own.pop(at)] if without else []
    if text:
        moved = [parse_instruction(text)]
    if after:
        place = own.index(parse_instruction(after)) + 1
        own[place:place] = moved
    return generate("spilled", Shape(3, 1)).with_ranks([own])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"without": "drop s0 w0"}, "slot @0 still holds the weights of stage 0: evict or drop them first"),
        ({"text": "drop s2 w1", "without": "evict s2 weights w1 host", "after": "step s2 w0"}, "w1 would be lost"),
        ({"text": "fetch s2 weights w0 host @1", "after": "fwd s2 m0 w0"}, "already on the device, in slot @0"),
        ({"text": "fetch s1 weights w1 host @1", "after": "fwd s1 m0 w0"}, "but the host holds w0 of the weights"),
        ({"without": "recompute s0 m0 w0"}, "replay stage 0 before its backward"),
        ({"without": "evict s0 optim w1 host"}, "still on the device at the end"),
        ({"text": "fetch s1 wgrad w0 host @1", "after": "fwd s1 m0 w0"}, "the host holds none of the gradients"),
        ({"text": "evict s1 wgrad w0 host", "after": "bwd s1 m0 w0"}, ""),  # the step then finds no gradients
    ],
)
def test_what_breaks_spilling_is_refused_in_words(change, says):
    program = edited(**change)
    report = verify(program)
    assert not report.ok
    if says:
        assert any(says in message for message in told(program)), str(report)


def test_gradients_leave_their_slot_before_the_weights_next_to_them():
    """Such a program was accepted, and ended in the executor with a KeyError."""
    program = generate("spilled", HALF)
    own = list(program.ranks[0])
    evict = parse_instruction("evict s2 wgrad w0 host")
    own.remove(evict)
    own.insert(own.index(parse_instruction("drop s2 w0")) + 1, evict)
    messages = told(program.with_ranks([own]))
    assert "the gradients of stage 2 are still in the second slot of these weights: evict them first" in messages


def test_a_stage_may_not_leave_while_autograd_keeps_a_view_of_its_slot():
    program = generate("gpipe", Shape(2, 2, spill=Spill.of(2, slots=1)))
    own = list(program.ranks[0])
    forward = own.index(parse_instruction("fwd s0 m1 w0"))
    own[forward + 1 : forward + 1] = map(parse_instruction, ["drop s0 w0", "fetch s0 weights w0 host @0"])
    (message,) = told(program.with_ranks([own, list(program.ranks[1])]))
    assert message == "tensors saved by autograd for m0, m1 leave with this slot: replay stage 0 before its backward"


def test_a_stage_that_keeps_what_autograd_saved_may_leave_but_must_be_back_for_its_backward():
    program = generate("spilled", Shape(3, 1, spill=replace(Spill.of(3), keeps=(0,))))
    own = list(program.ranks[0])
    assert [str(i) for i in own if i.op == "recompute"] == ["recompute s1 m0 w0"]
    assert verify(program).ok
    without_leave = type(program)(replace(program.header, spill=Spill.of(3)), program.ranks)
    (message,) = told(without_leave)
    assert message == "tensors saved by autograd for m0 leave with this slot: replay stage 0 before its backward"
    back, backward = map(parse_instruction, ["fetch s0 weights w0 host @0", "bwd s0 m0 w0"])
    own.reverse()  # the second of its fetches
    own.remove(back)
    own.reverse()
    assert not verify(program.with_ranks([own])).ok
    own.insert(own.index(backward) + 1, back)
    assert not verify(program.with_ranks([own])).ok


def test_weights_may_come_back_to_another_slot_than_that_of_their_forward():
    program = generate("interleaved", SHUFFLED)
    slots = [i.slot for i in program.ranks[0] if (i.op, i.stage, i.kind) == ("fetch", 1, "weights")]
    assert len(set(slots)) == 2 and verify(program).ok


def test_a_header_that_spills_nothing_has_no_copies():
    program = generate("gpipe", Shape(1, 1))
    own = [parse_instruction("fetch s0 weights w0 host @0"), *program.ranks[0]]
    assert told(program.with_ranks([own])) == ["the header spills nothing: every stage stays on its device"]


SHUFFLED = Shape(1, 2, num_chunks=4, spill=replace(Spill.of(4), keeps=(0, 1, 2, 3)))
CASES = [
    ("spilled", Shape(3, 2)),
    ("spilled", Shape(3, 1, num_steps=2, spill=Spill("disk", 1, 1, (0, 1, 2)))),
    ("spilled", Shape(3, 1, clip=True, ties=((0, 2),))),
    ("gpipe", Shape(2, 2, spill=Spill("host", 1, 0, (0, 1)))),
    ("spilled", Shape(3, 2, spill=Spill("host", 1, 0, (0, 1, 2), True))),
    ("breadth-first", Shape(2, 2, num_chunks=2, spill=Spill("host", 1, 1, (0, 1, 2, 3), True))),
    ("interleaved", Shape(2, 2, num_chunks=2, clip=True, spill=Spill("host", 1, 1, (0, 2, 3)))),
    ("spilled", Shape(3, 1, num_steps=2, spill=Spill("host", 2, 0, (0, 1, 2), False, (0, 1, 2)))),
    ("spilled", Shape(3, 1, clip=True, ties=((0, 2),), spill=Spill("host", 2, 1, (0, 1, 2), False, (0, 2)))),
    ("spilled", Shape(3, 2, num_steps=2, spill=replace(Spill.of(3, slots=1), keeps=(0, 1)))),
    ("breadth-first", Shape(2, 2, num_chunks=2, spill=replace(Spill.of(4, slots=1), keeps=(0, 1, 2, 3)))),
    ("interleaved", SHUFFLED),
    ("spilled", Shape(2, 2, replicas=(2,))),
    ("spilled", Shape(3, 2, replicas=(2,), clip=True, spill=Spill.of(3, slots=1))),
    ("spilled", Shape(2, 2, num_steps=2, replicas=(2,), spill=Spill("host", 1, 0, (0, 1), on_host=(0, 1)))),
    ("interleaved", Shape(1, 4, num_chunks=2, replicas=(2,), spill=Spill.of(2, slots=1))),
    ("breadth-first", Shape(2, 2, num_chunks=2, replicas=(2, 1), spill=Spill.of(4, slots=1))),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
@pytest.mark.long
def test_every_mutant_of_a_spilling_program_is_refused_or_trains_the_same_model(name, shape):
    p = generate(name, shape)
    assert verify(p).ok and not difference(p, p, ADVERSARIES)
    count = 0
    for how, mutant in mutants(p):
        count += 1
        if verify(mutant).ok:
            assert not (found := difference(p, mutant, ADVERSARIES)), f"{how} is accepted: {found}"
    assert count > 300


HALF = Shape(3, 1, num_steps=2, spill=Spill("host", 2, 1, (0, 1, 2), False, (1, 2)))


@pytest.mark.parametrize(
    ("line", "before", "says"),
    [
        ("host_step s2 w0", "evict s2 wgrad w0 host", "the gradients of update 0 on the host, which holds none"),
        ("host_step s2 w0", "drop s2 w0", "w0 of stage 2 is still on the device, and stale after this: drop it first"),
        (
            "fetch s1 weights w1 host @1",
            "host_step s1 w0",
            "but the host holds w0 of the weights of stage 1",
        ),
        ("host_step s1 w0", "", "steps from w1 on the host, which holds w0 of stage 1"),
        ("evict s1 wgrad w1 host", "", "the gradients of update 1 on the host, which holds none"),
    ],
)
def test_a_host_steps_once_it_has_the_gradients_and_before_the_weights_are_fetched_again(line, before, says):
    program = generate("spilled", HALF)
    own = list(program.ranks[0])
    i = parse_instruction(line)
    i = i if i in own else next(j for j in own if replace(j, slot=i.slot) == i)
    own.remove(i)
    if before:
        own.insert(own.index(parse_instruction(before)), i)
    messages = told(program.with_ranks([own]))
    assert any(says in message for message in messages), messages


def test_where_a_stage_steps_is_what_the_header_says():
    program = generate("spilled", HALF)
    other = replace(program.header, spill=replace(program.header.spill, on_host=(0, 1)))
    messages = told(type(program)(other, program.ranks))
    assert any("stage 2 steps on its device: expected step" in message for message in messages)
    assert any("stage 0 steps on the host: expected host_step" in message for message in messages)


class Hasty(SpillingMachine):
    """A machine whose copies do not wait for one of the things that they must wait for."""

    forgets, pace = "", 0.05

    def _fetch(self, rank, i):
        super()._fetch(rank, i)
        for copy in self.copies[rank][-1:]:
            if copy.i is i:
                copy.waits = [other for other in copy.waits if self._kept(other, i)]

    def _kept(self, other, i):
        record = (other.i.kind, other.i.stage) == (i.kind, i.stage)
        if self.forgets == "write-back":
            return not (other.i.op == "evict" and record)
        if self.forgets == "slot":
            return record or other.i.op != "evict"
        return other.i.op != "fetch"


@pytest.mark.parametrize(
    ("forgets", "shape"),
    [
        ("write-back", Shape(2, 1)),
        ("slot", Shape(3, 1, spill=Spill.of(3, slots=1))),
        ("weights before gradients", Shape(3, 1, clip=True)),
    ],
)
def test_every_wait_of_a_copy_is_one_without_which_training_goes_wrong(forgets, shape):
    program = generate("spilled", shape)
    if forgets == "write-back":
        # Another look at a stage just evicted, in the other slot: what makes room for it has nothing to do with it.
        again = map(parse_instruction, ["fetch s0 weights w1 host @1", "drop s0 w1"])
        program = program.with_ranks([[*program.ranks[0], *again]])
        assert verify(program).ok
    wanted = outcome(program)
    hasty = type("Hasty", (Hasty,), {"forgets": forgets})

    def goes_wrong(seed):
        try:
            return hasty(program, seed).run() != wanted
        except (BrokenProgramError, KeyError):
            return True

    assert any(goes_wrong(seed) for seed in range(60))
    assert all(SpillingMachine(program, seed).run() == wanted for seed in range(10))
