"""The predicted memory of each rank is what its tensors take, also those that live inside one instruction."""

from importlib.util import find_spec

import pytest
from tests.pipeline import memory_jobs as jobs
from tests.pipeline import sharing_memory as sharing

from pipefit.runtime.launch import launch

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

NAME = "LlamaForCausalLM"
PLANS = ["1f1b, stages replayed", "gpipe", "1f1b, layers replayed"]


def test_a_model_of_transformers_takes_the_memory_that_is_predicted() -> None:
    """`python -m tests.pipeline.memory_table` compares ten of them."""
    pipelines = [jobs.PLANS[plan] for plan in PLANS]
    shared = [{"schedule": "1f1b", "tensor": 2, "num_ranks": 1, "recompute": "layer"}]
    ranks = launch(jobs.several, 2, NAME, [pipelines, shared], threads=1, quiet=True, deadline_s=120)
    (found, _), (found_shared, _) = ranks[0][0]
    for number, plan in enumerate(PLANS):
        counted = [of_pipelines[number] for ((_, of_pipelines), _), _ in ranks]
        assert found[number] == pytest.approx(counted, rel=0.03), plan
    # Two processes share the only rank, and take as much.
    for (_, (_, counted)), _ in ranks:
        assert found_shared[0] == pytest.approx(counted, rel=0.03)
    # The work of whole layers, scaled, is that of shards; gradients of a table are scaled to too much.
    embedding, *others = ranks[0][1]
    assert embedding[:2] == pytest.approx([1, 1], rel=0.07) and min(embedding) > 0.9
    for layer in others:
        assert layer == pytest.approx([1] * 4, rel=0.02)


@pytest.mark.parametrize("plan", jobs.SPILLED)
def test_a_rank_whose_stages_wait_in_the_hosts_memory_takes_the_memory_that_is_predicted(plan: str) -> None:
    predicted, counted = jobs.spilled(NAME, jobs.SPILLED[plan]["schedule"])
    assert predicted == pytest.approx(counted, rel=0.03)


def test_copies_that_share_gradients_or_weights_take_the_memory_that_is_predicted() -> None:
    """Next to torch's own count; `python -m tests.pipeline.sharing_memory` compares more."""
    one, several = sharing.SHAPES[2].values()
    # A bias of BERT has no gradient, so its last backward begins no sum.
    bert = ("BertForMaskedLM", [one], ["weights"])
    asked = [(NAME, [one], sharing.LEVELS), (NAME, [several], ["weights"]), bert]
    for rank in launch(sharing.several, 2, asked, threads=1, quiet=True, deadline_s=240):
        for predicted, counted in rank:
            assert predicted == pytest.approx(counted, rel=0.01)
