"""Every generated program verifies clean, or its shape is refused with the nearest that works."""

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.oracle import outcome

from pipefit.errors import ScheduleError
from pipefit.schedules import Shape, generate, names
from pipefit.verify import verify

CHUNKED = ("interleaved", "breadth-first", "zb-v")
OVER_RANKS = tuple(name for name in names()[:13] if name != "spilled")


@st.composite
def requests(draw):
    name = draw(st.sampled_from(OVER_RANKS))
    depth = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if name in CHUNKED else 1
    stages = 1 if name == "data-parallel" else depth * chunks
    copies = draw(st.lists(st.integers(1, 3), min_size=depth, max_size=depth)) if draw(st.booleans()) else []
    options = {}
    if draw(st.booleans()):
        options = {"1f1b": {"warmup": draw(st.integers(0, 4))}, "interleaved": {"group": draw(st.integers(0, 6))}}.get(
            name.replace("pipedream-2bw", "1f1b").replace("pipedream", "1f1b"), {}
        )
    frozen = draw(st.integers(0, max(stages - 1, 0)))
    shape = Shape(
        depth=depth,
        num_microbatches=draw(st.integers(1, 9)),
        num_chunks=chunks,
        num_steps=draw(st.integers(1, 4)),
        replicas=tuple(copies),
        ties=((0, stages - 1),) if stages > 1 and not frozen and draw(st.booleans()) else (),
        clip=draw(st.booleans()),
        recompute=draw(st.sampled_from([(), (0,), None])),
        frozen=frozen,
        ahead=draw(st.integers(0, 3)),
        options=options,
        shard=draw(
            st.sampled_from(["none", "optimizer"] + ["gradients", "weights"] * (not name.startswith("pipedream")))
        ),
        shard_slots=draw(st.integers(1, 3)),
    )
    return name, shape


@given(requests())
@example(("zb-v", Shape(2, 4, num_chunks=2, replicas=(3,))))  # replicas that complete their stages in other orders
def test_a_generated_program_verifies_clean_or_is_refused(request_):
    name, shape = request_
    try:
        p = generate(name, shape)
    except ScheduleError as refusal:
        assert any(character.isdigit() for character in str(refusal))
        return
    assert str(verify(p)).endswith("no violations")


@pytest.mark.parametrize("name", OVER_RANKS)
def test_every_small_shape_without_replicas_verifies_clean(name):
    refused = 0
    for depth, m, v, steps, ahead in product((1, 2, 3, 4), (1, 2, 3, 5, 8), (1, 2, 3), (1, 2), (0, 1)):
        if v > 1 and name not in CHUNKED:
            continue
        try:
            p = generate(name, Shape(depth, m, num_chunks=v, num_steps=steps, ahead=ahead))
        except ScheduleError:
            refused += 1
            continue
        assert verify(p).ok, verify(p)
    may_refuse = {
        "data-parallel": "fewer micro-batches than ranks",
        "pipedream-2bw": "m < p - 1",
        "zb-v": "chunks other than two",
    }
    assert bool(refused) == (name in may_refuse)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 7, 9])
def test_interleaved_takes_counts_that_the_ranks_do_not_divide(m):
    for depth, v in product((2, 3, 4), (2, 3)):
        assert verify(generate("interleaved", Shape(depth, m, num_chunks=v))).ok


def test_all_synchronous_schedules_of_one_shape_train_the_same_model():
    results = [
        outcome(generate(name, Shape(3, 3, num_steps=2, recompute=recompute)))
        for name, recompute in product(
            ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2"), ((), None)
        )
    ]
    assert all(result == results[0] for result in results)


def test_more_chunks_or_another_order_do_not_change_what_is_trained():
    shape = Shape(2, 4, num_chunks=2, num_steps=2)
    assert outcome(generate("interleaved", shape)) == outcome(generate("breadth-first", shape))


def test_stashing_trains_another_model_than_a_flush_and_vertical_sync_another_than_stashing():
    flush, stash, vertical = (
        outcome(generate(name, Shape(3, 1, num_steps=4))) for name in ("1f1b", "pipedream", "pipedream-vertical-sync")
    )
    assert flush != stash != vertical != flush


def test_a_gradient_sum_of_a_tie_does_not_make_a_rank_wait_that_others_need():
    # Placed right after its last gradient it stood before backwards that other members waited for.
    for name, v in (("interleaved", 2), ("breadth-first", 2), ("pipedream-2bw", 1)):
        shape = Shape(2, 2, num_chunks=v, num_steps=2, ties=((0, 2 * v - 1),), clip=True)
        assert verify(generate(name, shape)).ok


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("interleaved", Shape(4, 8, options={"group": 2}), "expected 4 to 8"),
        ("interleaved", Shape(4, 8, options={"group": -1}), "at least 0, got -1"),
        ("interleaved", Shape(4, 8, options={"group": 10**9}), "expected 4 to 8"),
        ("1f1b", Shape(4, 8, options={"warmup": -1}), "at least 0, got -1"),
        ("1f1b", Shape(4, 8, options={"warmup": 10**9}), "expected 0 to 8"),
        ("1f1b", Shape(4, 8, options={"warmpu": 1}), "warmup"),
        ("pipedream-2bw", Shape(4, 2), "use 3 or more"),
        ("pipedream-2bw", Shape(4, 5, options={"warmup": 2}), "use 6 or more"),
        ("pipedream-2bw", Shape(1, 1, replicas=(2,)), "at least 2 micro-batches"),
        ("pipedream", Shape(2, 1, num_steps=3, replicas=(2, 1)), "use 2 or 4 steps"),
        ("pipedream", Shape(2, 1, num_steps=4, replicas=(2, 1), clip=True), r"step once in \[2, 1\]"),
        ("pipedream", Shape(2, 1, num_steps=4, replicas=(2, 1), ties=((0, 1),)), "a tied weight"),
        ("pipedream-vertical-sync", Shape(2, 1, num_steps=4, replicas=(2, 1)), "equally many replicas"),
        ("interleaved", Shape(2, 4, num_chunks=2, replicas=(2, 1)), "equally many replicas"),
        ("zb-v", Shape(2, 4), "use 2 chunks"),
        ("zb-v", Shape(2, 4, num_chunks=2, replicas=(2, 1)), "equally many replicas"),
        ("zb-v", Shape(2, 4, num_chunks=2, placement=((0,), (1,), (0,), (1,))), "stages s and 3 − s"),
        ("gpipe", Shape(2, 1, replicas=(2, 2)), "use at least 2"),
        ("gpipe", Shape(2, 4, num_chunks=2), "one stage per rank"),
        ("gpipe", Shape(2, 4, placement=((0,), (0,))), "one stage on every rank"),
        ("gpipe", Shape(2, 4, placement=((0,), (2,))), r"rank 1 has \[\]"),
        ("gpipe", Shape(3, 4, ties=((0, 1), (0, 2))), "no two may begin alike"),
        ("gpipe", Shape(3, 4, ties=((1,),)), "at least two"),
    ],
)
def test_a_shape_without_a_meaning_is_refused_with_what_would_work(name, shape, says):
    with pytest.raises(ScheduleError, match=says):
        generate(name, shape)


def test_options_are_whole_numbers():
    with pytest.raises(ScheduleError, match="whole number"):
        Shape(4, 8, options={"warmup": 1.5})
