"""The predicted memory of each rank is what its tensors take, also those that live inside one instruction."""

import pytest

pytest.importorskip("transformers")

from tests.pipeline import memory_jobs as jobs

from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAMES = ["LlamaForCausalLM", "GPT2LMHeadModel"]
PLANS = ["1f1b, stages replayed", "gpipe", "1f1b, layers replayed"]


def test_models_of_transformers_take_the_memory_that_is_predicted() -> None:
    shapes = [jobs.PLANS[plan] for plan in PLANS]
    real = launch(jobs.all_counted, 2, NAMES, shapes, threads=1, quiet=True, deadline_s=120)
    for number, name in enumerate(NAMES):
        found = jobs.predicted(name, shapes)
        for index, plan in enumerate(PLANS):
            counted = [real[rank][number][index] for rank in range(2)]
            assert found[index] == pytest.approx(counted, rel=0.03), (name, plan)
