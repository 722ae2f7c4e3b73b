"""Models of transformers over tensor-parallel processes, by the plans they bring: equal to one process."""

import pytest
import torch
import transformers

import pipefit as pf
from pipefit.cutting.own import random_batch
from pipefit.errors import ModelError
from pipefit.runtime.launch import launch
from pipefit.testing import Outcome, compare, expected, tolerance_of
from tests.cutting import tensor_plan_jobs as jobs
from tests.tiny_models import save_model

pytestmark = [pytest.mark.dist, pytest.mark.long]
ALL = {2: jobs.TWO, 4: jobs.FOUR}


@pytest.fixture(scope="module")
def parts():
    return {n: launch(jobs.outcomes, n, list(cases), n, threads=1, quiet=True) for n, cases in ALL.items()}


@pytest.mark.parametrize(("count", "name"), [(count, name) for count, cases in ALL.items() for name in cases])
def test_a_model_with_a_plan_trains_as_in_one_process(count, name, parts):
    got = Outcome.joined([outcomes[list(ALL[count]).index(name)] for outcomes in parts[count]])
    assert sorted(got.gradients) == list(range(count)), "every process holds its part of the mesh"
    result = compare(got, expected(jobs.case(*ALL[count][name], count)), tolerance_of(torch.float64))
    assert result.equal, result


def test_a_plan_that_forgets_a_weight_is_refused_before_the_first_update():
    said = "the gradient of model.layers.0.mlp.act_fn.alpha_p is not the same on the 2 processes"
    with pytest.raises(ModelError, match=said):
        launch(jobs.train_forgetful, 2, threads=1, quiet=True)


FOLDERS = {"LlamaForCausalLM": {"tie_word_embeddings": True}, "MixtralForCausalLM": {"num_local_experts": 4}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each with its model, and what four processes find out about it."""
    place = tmp_path_factory.mktemp("folders")
    models = {family: save_model(place / family, family, "20KB", **fields) for family, fields in FOLDERS.items()}
    found = launch(jobs.facts_of_folders, 4, [str(place / family) for family in FOLDERS], threads=1, quiet=True)
    return {family: (place / family, models[family].eval(), facts)
            for family, facts in zip(FOLDERS, zip(*found, strict=True), strict=True)}  # fmt: skip


@pytest.mark.parametrize("family", FOLDERS)
def test_a_folder_is_read_in_parts_generates_and_is_saved_whole(family, folders):
    folder, model, parts = folders[family]
    ids, wanted = jobs.prompts(), model.state_dict()
    text = model.generate(ids, max_new_tokens=5, do_sample=False)
    torch.manual_seed(3)
    drawn = model.generate(ids, max_new_tokens=5, do_sample=True, top_k=0)
    total = sum(parameter.numel() for parameter in model.parameters())
    for part in parts:
        assert all(torch.equal(value, wanted[name]) for name, value in part["state"].items())
        assert part["held"] < 0.36 * total, "about a quarter; a tied head is in both stages"
        assert torch.equal(part["text"], text) and torch.equal(part["drawn"], drawn)
        assert part["loss"] == parts[0]["loss"]
        assert "cannot be written" in part["error"] or "no-folder" in part["error"]
        assert not any(kind.startswith(("Columns", "Rows", "Divided", "Tokens")) for kind in part["kinds"])
    alone = pf.Pipeline(pf.pretrained(folder), optimizer=jobs.sgd, stages=1, microbatches=2)
    batch = random_batch(model, 4)
    alone.fit([batch])
    assert alone.evaluate([batch]) == pytest.approx(parts[0]["loss"], rel=1e-6)
    resumed = pf.Pipeline(pf.pretrained(folder), optimizer=jobs.sgd, stages=2, microbatches=2)
    resumed.load(folder / "checkpoint")
    saved = getattr(transformers, family).from_pretrained(folder / "saved").state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(saved[name], resumed.state_dict()[name]), name
