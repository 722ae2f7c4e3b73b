"""One table of options: for `pipefit plan`, and for both calls in Python."""

import inspect
from dataclasses import fields
from functools import partial

import pytest

import pipefit as pf
from pipefit.cli import plan as verb
from pipefit.cli.counted import ModelSource
from pipefit.errors import InfeasibleError, PlanError
from pipefit.planner import Cap, plan
from pipefit.planner.plan_options import PlanOptions
from pipefit.spec.options import as_flat, flag_of, refuse_unused
from pipefit.spec.published import load_profile

OPTIONS = {one.name: one for one in fields(PlanOptions)}
GIVEN = {
    "method": "uniform", "cost": "paper", "straight": True, "global_batch": 64, "microbatch_sizes": [64],
    "num_microbatches": 4, "schedules": ["1f1b"], "depths": [1], "chunks": [1], "recompute": "none",
    "memory": "64 GiB", "state_per_weight": 1.0, "tensors": [2], "shard": "weights", "whole_messages": True,
    "blocking": True, "cap": Cap(8 * 2.0**30),
}  # fmt: skip


def test_python_takes_every_option_of_a_plan_that_the_command_line_takes():
    offered = set(inspect.signature(verb.command).parameters) - {"profile", "topology", "json"}
    cap, answer = as_flat(verb.CapOptions()).keys(), as_flat(verb.Wanted()).keys()
    model = as_flat(ModelSource()).keys()
    assert offered - cap - answer - model == as_flat(PlanOptions()).keys()
    assert set(GIVEN) == set(OPTIONS)
    assert set(inspect.signature(pf.plan).parameters) - set(OPTIONS) == {
        "model", "example", "topology", "loss", "options",
    }  # fmt: skip


SEARCH = "global_batch num_microbatches schedules depths chunks recompute whole_messages blocking"
USED = {
    "auto": f"{SEARCH} tensors shard",
    "ptdp": f"{SEARCH} tensors",
    "gpipe": SEARCH,
    "2bw": SEARCH,
    "uniform": SEARCH,
    "pipedream": "cost straight",
    "under a cap": "global_batch num_microbatches schedules",
}
ALWAYS = {"microbatch_sizes", "memory", "state_per_weight"}
"""The table, drawn a second time."""


@pytest.mark.parametrize("way", USED)
def test_an_option_is_used_or_refused_by_its_name(way):
    profile, machine = load_profile("vgg16"), pf.Topology.local(1)
    for name in GIVEN.keys() - ALWAYS - {"cap", "method"}:
        options = {name: GIVEN[name], "method": way}
        if way == "under a cap":
            options |= {"cap": GIVEN["cap"], "method": "auto"}
        if name in USED[way].split():
            asked = PlanOptions(**options)
            refuse_unused(asked, asked.way, "refused", flag_of)
            continue
        for call in (plan, partial(pf.plan, topology=machine)):
            places = (profile, machine) if call is plan else (profile,)
            with pytest.raises(
                PlanError, match=f"^{name}: (method {way} does not use it|it is for plans without a cap)"
            ):
                call(*places, **options)


def test_a_method_has_no_effect_under_a_cap():
    with pytest.raises(PlanError, match=r"^method: it is for plans without a cap"):
        plan(load_profile("vgg16"), pf.Topology.local(1), method="uniform", cap=GIVEN["cap"])


def test_memory_in_python_is_that_of_every_device():
    with pytest.raises(InfeasibleError, match="of 1 MiB"):
        pf.plan("vgg16", topology="local:2", memory="1 MiB")
    planned = pf.plan("vgg16", topology="local:2", memory="64 GiB", global_batch=128)
    assert planned.topology.device.memory_bytes == 64 * 2**30
    assert max(planned.plan.prediction.peak_bytes) < 64 * 2**30


def test_an_unknown_option_gets_the_nearest():
    with pytest.raises(PlanError, match="unknown option 'depth'; did you mean depths"):
        pf.plan("vgg16", topology="local:2", depth=[2])


def test_a_tensor_width_of_1_is_no_wish():
    assert PlanOptions(method="uniform", tensors=[1]) == PlanOptions(method="uniform")
    assert PlanOptions(method="auto", tensors=[1]).tensors == [1]


@pytest.mark.parametrize("wrong", [[[1]], ["1"], 1, "1", [1.5]])
def test_a_choice_of_another_type_is_refused(wrong):
    with pytest.raises(PlanError, match="tensors: expected a list of whole numbers or None"):
        PlanOptions(method="uniform", tensors=wrong)
