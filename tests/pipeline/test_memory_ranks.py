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

NAMES = ["LlamaForCausalLM"]
PLANS = ["1f1b, stages replayed", "gpipe", "1f1b, layers replayed"]


def test_a_model_of_transformers_takes_the_memory_that_is_predicted() -> None:
    """`python -m tests.pipeline.memory_table` compares ten of them."""
    shapes = [jobs.PLANS[plan] for plan in PLANS]
    ranks = launch(jobs.both, 2, NAMES, shapes, threads=1, quiet=True, deadline_s=120)
    for number, name in enumerate(NAMES):
        found, _ = ranks[0][number]
        for index, plan in enumerate(PLANS):
            counted = [rank[number][1][index] for rank in ranks]
            assert found[index] == pytest.approx(counted, rel=0.03), (name, plan)


def test_copies_that_share_gradients_or_weights_take_the_memory_that_is_predicted() -> None:
    """Next to torch's own count; `python -m tests.pipeline.sharing_memory` compares more."""
    shapes = list(sharing.SHAPES[2].values())
    for rank in launch(sharing.both, 2, NAMES[0], shapes, sharing.LEVELS, threads=1, quiet=True, deadline_s=240):
        for predicted, counted in rank:
            assert predicted == pytest.approx(counted, rel=0.03)
