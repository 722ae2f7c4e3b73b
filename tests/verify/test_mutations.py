"""What the verifier accepts trains the same model: mutants of programs against a symbolic second opinion."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mutants import mutants, relabelled, with_rank
from tests.oracle import difference

from pipefit.schedules import Shape, generate
from pipefit.verify import verify

ADVERSARIES = ({"seed": 0}, {"seed": 1, "tags": False}, {"seed": 2, "tags": False, "eager": True})


def few(name, **shape):
    return pytest.param(name, Shape(**{"depth": 2, "num_microbatches": 2, **shape}), id=f"{name} {shape}")


CASES = [
    few("naive"),
    few("data-parallel", num_steps=2),
    few("gpipe", recompute=None),
    few("1f1b", num_steps=2, clip=True, ties=((0, 1),)),
    few("1f1b", replicas=(2, 2)),
    few("interleaved", num_chunks=2, recompute=None),
    few("breadth-first", num_chunks=2, ties=((0, 3),)),
    few("pipedream", num_microbatches=1, num_steps=4, replicas=(2, 1)),
    few("pipedream", num_microbatches=1, num_steps=3, recompute=None),
    few("pipedream-vertical-sync", num_microbatches=1, num_steps=3),
    few("pipedream-2bw", num_steps=3),
    few("zb-h1", num_steps=2, clip=True, recompute=None),
    few("zb-v", num_chunks=2, ties=((0, 3),)),
    few("1f1b", num_steps=2, clip=True, frozen=1),
    few("interleaved", num_chunks=2, frozen=2, recompute=None),
    few("pipedream", num_microbatches=1, num_steps=4, replicas=(2, 1), frozen=1),
    few("zb-h1", depth=3, frozen=2),
    few("breadth-first", depth=1, num_chunks=3, replicas=(2,), shard="weights"),
    few("breadth-first", depth=1, num_chunks=2, replicas=(2,), shard="gradients", shard_slots=1, clip=True),
    few("1f1b", replicas=(2, 1), num_steps=2, shard="optimizer", clip=True),
    few("1f1b", replicas=(2, 2), num_microbatches=3, shares=(2, 1), ties=((0, 1),)),
    few("zb-h2", tensor=2, pieces=True, recompute=None),
    few("gpipe", commit=True, clip=True, replicas=(2, 2)),
]


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.long
def test_every_mutant_is_refused_or_trains_the_same_model(name, shape):
    p = generate(name, shape)
    assert verify(p).ok and not difference(p, p, ADVERSARIES)
    count = 0
    for how, mutant in mutants(p):
        count += 1
        if verify(mutant).ok:
            assert not (found := difference(p, mutant, ADVERSARIES)), f"{how} is accepted: {found}"
    assert count > 300


@st.composite
def programs(draw):
    several = {"interleaved": (1, 2), "breadth-first": (1, 2), "zb-v": (2,)}
    name = draw(st.sampled_from(["gpipe", "1f1b", "pipedream", "pipedream-2bw", "zb-h1", "zb-h2", *several]))
    depth = draw(st.integers(1, 3))
    chunks = draw(st.sampled_from(several.get(name, (1,))))
    replicas = draw(st.sampled_from([(), (), (2,) * depth]))
    frozen = draw(st.integers(0, depth * chunks - 1))
    is_synchronous = not name.startswith("pipedream")
    ties = ((0, depth * chunks - 1),) if depth * chunks > 1 and not frozen and draw(st.booleans()) else ()
    shape = Shape(
        depth=depth,
        num_microbatches=draw(st.integers(4 if name == "pipedream-2bw" else 2, 4)),
        num_chunks=chunks,
        num_steps=draw(st.sampled_from([2, 4])),
        replicas=replicas,
        ties=ties,
        clip=draw(st.booleans()),
        recompute=draw(st.sampled_from([(), None])),
        ahead=draw(st.integers(0, 2)),
        frozen=frozen,
        shard=draw(st.sampled_from(["none", "optimizer", *["gradients", "weights"] * is_synchronous])),
        tensor=2,
        pieces=draw(st.booleans()),
        shard_slots=draw(st.integers(1, 2)),
    )
    return generate(name, shape)


@given(programs(), st.data())
def test_several_mutations_at_once_are_refused_or_train_the_same_model(p, data):
    mutant = p
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, len(p.ranks) - 1))
        own = list(mutant.ranks[rank])
        one, other = (data.draw(st.integers(0, len(own) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["swap", "move", "delete", "relabel"])):
            case "swap":
                own[one], own[other] = own[other], own[one]
            case "move":
                own.insert(other, own.pop(one))
            case "delete":
                del own[one]
            case "relabel":
                labels = [label for _, label in relabelled(mutant, rank, one)]
                own[one] = data.draw(st.sampled_from(labels)) if labels else own[one]
        mutant = with_rank(mutant, rank, own)
    if verify(mutant).ok:
        assert not difference(p, mutant, ADVERSARIES)


def test_the_second_opinion_can_tell_results_apart():
    p = generate("1f1b", Shape(depth=2, num_microbatches=2, num_steps=2))
    refused = [m for how, m in mutants(p) if how.startswith(("delete: rank 0[0]", "again at the end: rank 1[4]"))]
    assert len(refused) == 2 and all(difference(p, mutant, ADVERSARIES) for mutant in refused)
