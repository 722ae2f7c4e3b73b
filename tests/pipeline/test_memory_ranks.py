"""The predicted memory of each rank is what its tensors take, also those that live inside one instruction."""

from importlib.util import find_spec

import pytest
from tests.pipeline import memory_jobs as jobs
from tests.pipeline import sharing_memory as sharing

from pipefit.runtime.launch import launch
from pipefit.spec.plan import Recompute

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
    groups = [(pipelines, "fp32"), (pipelines, "bf16"), (shared, "fp32"), (shared, "bf16")]
    ranks = launch(jobs.several, 2, NAME, groups, threads=1, quiet=True, deadline_s=240)
    for group, (_, precision) in enumerate(groups[:2]):
        found, _ = ranks[0][0][group]
        for number, plan in enumerate(PLANS):
            counted = [of_groups[group][1][number] for of_groups, _ in ranks]
            assert found[number] == pytest.approx(counted, rel=0.01), (plan, precision)
    # Two processes share the only rank, and take as much.
    for group in (2, 3):
        found_shared, _ = ranks[0][0][group]
        for of_groups, _ in ranks:
            assert found_shared[0] == pytest.approx(of_groups[group][1], rel=0.01)
    # The work of whole layers, scaled, is that of shards; gradients of a table are scaled to too much.
    embedding, *others = ranks[0][1]
    assert embedding[:2] == pytest.approx([1, 1], rel=0.07) and min(embedding) > 0.9
    for layer in others:
        assert layer == pytest.approx([1] * 4, rel=0.02)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [*zip(jobs.SPILLED, ("fp32", "bf16", "bf16"), strict=True), ("spilled, one stage at a time", "bf16")],
)
def test_a_rank_whose_stages_wait_in_the_hosts_memory_takes_the_memory_that_is_predicted(
    plan: str, precision: str
) -> None:
    predicted, counted = jobs.spilled(NAME, precision, *jobs.SPILLED[plan])
    assert predicted == pytest.approx(counted, rel=0.03)


GPT = {"layers": 4, "hidden": 64, "heads": 2, "context": 32, "vocab": 256}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("recompute", "tied"), [("none", False), ("none", True), ("layer", False)])
def test_layers_that_are_used_as_they_are_take_the_memory_that_is_predicted(
    precision: str, recompute: Recompute, tied: bool
) -> None:
    predicted, counted = jobs.resident({**GPT, "tied": tied}, precision, recompute)
    assert predicted == pytest.approx(counted, rel=0.03)


@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(
    ("name", "options", "precision", "schedule", "cap"),
    [
        ("gpt", {**GPT, "tied": False}, "fp32", "spilled", 2e6),
        ("gpt", {**GPT, "tied": False}, "bf16", "breadth-first", 3.5e6),
        ("gpt", {**GPT, "tied": True}, "bf16", "spilled", 2.7e6),
        ("mlp", {"layers": 6, "width": 256, "inputs": 64}, "bf16", "breadth-first", 2.2e6),
        ("convnet", {}, "fp32", "spilled", 2e6),
    ],
)
def test_a_plan_for_a_cap_keeps_it_also_inside_instructions(
    name: str, options: dict[str, object], precision: str, schedule: str, cap: float
) -> None:
    predicted, counted = jobs.capped(name, options, cap, precision, schedule)
    assert 0.9 * predicted < counted <= predicted <= cap


def test_copies_that_share_gradients_or_weights_take_the_memory_that_is_predicted() -> None:
    """Next to torch's own count; `python -m tests.pipeline.sharing_memory` compares more."""
    one, several = sharing.SHAPES[2].values()
    # A bias of BERT has no gradient, so its last backward begins no sum.
    bert = ("BertForMaskedLM", [one], ["weights"])
    asked = [(NAME, [one], sharing.LEVELS), (NAME, [several], ["weights"]), bert]
    for rank in launch(sharing.several, 2, asked, threads=1, quiet=True, deadline_s=240):
        for predicted, counted in rank:
            assert predicted == pytest.approx(counted, rel=0.01)
