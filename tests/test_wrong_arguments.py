"""Every public call with wrong arguments: an error of pipefit's own, or an acceptance that is meant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.schedules.registry import REGISTRY
from pipefit.spec import Layer, StageSpec
from pipefit.spec.topology import Device, Level

pytestmark = pytest.mark.slow


class Odd:
    """An object that is nothing that pipefit takes."""

    def __repr__(self) -> str:
        return "<odd>"


WRONG: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "nan": float("nan"),
    "huge": 10**30,
    "complex": 1j,
    "text": "x",
    "escape": "\x1b[31m",
    "empty": "",
    "list": [],
    "texts": ["x"],
    "dict": {},
    "named": {"x": "y"},
    "bytes": b"x",
    "object": Odd(),
    "class": int,
    "tensor": torch.ones(2, 2),
}
X, Y = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
LOSS = nn.CrossEntropyLoss()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def pipeline(**more: Any) -> pf.Pipeline:
    usual: dict[str, Any] = {"loss": LOSS, "optimizer": sgd, "stages": 2, "microbatches": 2}
    return pf.Pipeline(more.pop("model", None) or model(), **usual | more)


PIPE = pipeline()
PLAN = {"partition": PIPE.plan.partition, "placement": PIPE.plan.placement, "schedule": "1f1b", "num_microbatches": 2}
LAYER = Layer("first", 1.0, 1.0, 1.0, 8, 8, 8)
TRIAL = pf.Trial(name="one", steps=1, batch=4, options={"layers": 1})


def of(method: str, *places: Any) -> Callable[..., Any]:
    """A method of a new pipeline, so that one call does not change the next."""
    return lambda **given: getattr(pipeline(), method)(*places, **given)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Pipeline": (
        lambda **given: pf.Pipeline(given.pop("model"), **given),
        {"model": model(), "loss": LOSS, "optimizer": sgd, "stages": 2, "schedule": "1f1b", "microbatches": 2,
         "plan": None, "example": (X, Y), "parallelism": pf.Parallelism(), "precision": "fp32",
         "updates": pf.Updates(), "spill": None},
    ),
    "Pipeline.step": (of("step"), {"x": X, "y": Y}),
    "Pipeline.fit": (
        of("fit"),
        {"batches": [(X, Y)] * 2, "steps": 1, "callbacks": (), "held_out": [(X, Y)], "evaluate_every": 0},
    ),
    "Pipeline.evaluate": (of("evaluate"), {"batches": [(X, Y)], "metric": None}),
    "Pipeline.generate": (of("generate"), {"input_ids": torch.ones(1, 2, dtype=torch.int64), "max_new_tokens": 1}),
    "Pipeline.load_state_dict": (of("load_state_dict"), {"state": PIPE.state_dict()}),
    "Pipeline.save": (of("save"), {"path": "saved", "extra": None, "keep": 1, "wait": True}),
    "Pipeline.save_pretrained": (of("save_pretrained"), {"folder": "folder"}),
    "Pipeline.load": (of("load"), {"path": "none", "weights_only": True}),
    "Pipeline.timeline": (of("timeline"), {"last": 1}),
    "Pipeline.report": (of("report"), {"last": 1}),
    "Request": (pf.Request, {name: getattr(pf.Request(), name) for name in vars(pf.Request())}),
    "Parallelism": (pf.Parallelism, {name: getattr(pf.Parallelism(), name) for name in vars(pf.Parallelism())}),
    "Precision": (pf.Precision, dict(vars(pf.Precision()))),
    "Updates": (pf.Updates, dict(vars(pf.Updates()))),
    "Spilled": (pf.Spilled, dict(vars(pf.Spilled()))),
    "Trial": (pf.Trial, dict(vars(TRIAL))),
    "Study": (
        pf.Study,
        {"trials": [TRIAL], "define": None, "search": None, "workers": 1, "policy": "lrtf", "stop": None,
         "output": "x"},
    ),
    "Checkpoints": (pf.Checkpoints, {"pipe": PIPE, "folder": "x", "every": 1, "keep": 1, "share": 0.1}),
    "EarlyStopping": (pf.EarlyStopping, {"pipe": PIPE, "patience": 1, "folder": "x"}),
    "EMA": (pf.EMA, {"pipe": PIPE, "decay": 0.9}),
    "csv_log": (pf.csv_log, {"path": "x"}),
    "json_log": (pf.json_log, {"path": "x"}),
    "tensorboard_log": (pf.tensorboard_log, {"folder": "x"}),
    "wandb_log": (pf.wandb_log, {"folder": "x"}),
    "committed_step": (pf.committed_step, {"folder": "x", "rank": 0}),
    "pretrained": (pf.pretrained, {"folder": "x", "lora": ""}),
    "cut": (pf.cut, {"model": nn.Sequential(model(), model()), "example": X, "cuts": ["1"]}),
    "plan": (
        pf.plan,
        {"model": pf.Profile("two", 1, (LAYER,)), "topology": "local:1", "global_batch": 4, "method": "auto",
         "num_microbatches": 2, "example": None, "loss": None},
    ),
    "draw": (
        pf.draw,
        {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 2, "num_chunks": 1, "forward": 1, "backward": 2,
         "input": None, "weight": None, "latency": 0, "num_steps": 1, "replicas": (), "stage_work": (),
         "recompute": False, "slots": None, "optim_slots": 1, "tier": "host", "prefetch": None, "activations": False,
         "step_on": "device", "keep": False, "copy": 2},
    ),
    "schedule": (pf.schedule, {"order": None, "name": "wrong", "layout": "loop"}),
    "Shape": (
        pf.Shape,
        {"depth": 2, "num_microbatches": 2, "num_chunks": 1, "num_steps": 1, "replicas": (), "placement": (),
         "recompute": (), "ties": (), "clip": False, "ahead": 1, "tensor": 1, "spill": None, "options": {}},
    ),
    "Partition": (pf.Partition, {"stages": (StageSpec((0,)),)}),
    "Partition.even": (pf.Partition.even, {"num_layers": 2, "num_stages": 1}),
    "Partition.from_counts": (pf.Partition.from_counts, {"counts": [1], "num_layers": 1}),
    "Placement": (pf.Placement, {"ranks": ((0,),)}),
    "Plan": (pf.Plan, {**PLAN, "options": {}, "data": 1, "frozen": 0, "model": "", "spill": None}),
    "Plan.load": (pf.Plan.load, {"path": "none"}),
    "Profile": (pf.Profile, {"model": "two", "microbatch_size": 1, "layers": (LAYER,)}),
    "Topology": (pf.Topology, {"name": "two", "levels": (Level("all", 2, 1e9),), "device": Device()}),
    "Topology.local": (pf.Topology.local, {"num_devices": 2}),
}  # fmt: skip

UNCHECKED = {"Instruction", "Program", "Timeline", "Report", "bwd", "bwd_input", "bwd_weight", "fwd"}
"""Objects that schedules and runs make by the million: a program is proved as a whole, and a timeline is measured."""

NO_CALLS = {"PipefitError", "STOP", "study", "__version__"}


ACCEPTED: dict[str, dict[str, str]] = {
    "Pipeline": {
        "loss": "class",
        "stages": "None",
        "schedule": "None empty",
        "microbatches": "None",
        "plan": "None",
        "example": "None dict named",
        "spill": "None",
    },
    "Pipeline.fit": {
        "steps": "None",
        "callbacks": "list",
        "held_out": "None",
        "evaluate_every": "0",
    },
    "Pipeline.evaluate": {
        "metric": "None",
    },
    "Pipeline.save": {
        "path": "text escape empty",
        "extra": "None dict named",
        "keep": "None",
        "wait": "True",
    },
    "Request": {
        "schedule": "None text escape empty",  # a Pipeline checks what they name
        "microbatches": "None",
        "stages": "None -1 0 text escape empty list",
        "plan": " ".join(WRONG),
        "spill": "None",
    },
    "Parallelism": {
        "ranks": "None",
        "replicas": "list",
        "sequence_parallel": "True",
        "whole_messages": "True",
        "rebalance": "True",
        "shares": "list",
        "verify_replicas": "None 0",
        "recompute": "True",
        "options": "dict",
        "device": " ".join(WRONG),  # a Pipeline checks it
    },
    "Precision": {
        "loss_scale": "None 1.5 huge",
        "compile": "True text escape empty",
    },
    "Updates": {
        "clip_norm": "None 0 1.5",
        "seed": "0",
        "no_decay": "text escape empty list texts",
        "scheduler": " ".join(WRONG),  # a Pipeline checks it
        "weigh": "None class",
    },
    "Spilled": {
        "device_memory": "None 1.5 huge",
        "host_memory": "None 1.5 huge",
        "disk": "None text escape empty",
        "optim_slots": "0",
        "step_on": "list",
        "keep": "list",
        "activations": "True",
        "prefetch": "None 0",
        "resume": "True 0",
        "commit_every": "None 0",
        "about": "dict named",
    },
    "Trial": {
        "name": "text escape empty",
        "model": "text escape empty",
        "options": "dict named",
        "loss": "None class",
        "data": "text escape empty class",
        "held_out": "None class",
        "evaluate": "0",
        "optimizer": "class",
        "lr": "0 1.5",
        "warmup": "0",
        "scheduler": "None class",
        "clip": "0 1.5",
        "seed": "0",
        "shards": "0",
        "values": "dict named",
    },
    "Study": {
        "define": "None",
        "search": "None",
        "workers": "None",
        "policy": "None",
        "stop": "None",
        "output": "None text escape empty",
    },
    "Checkpoints": {
        "folder": "text escape empty",
        "every": "None 0",
        "keep": "None 0",
    },
    "EarlyStopping": {
        "patience": "0",
        "folder": "None text escape empty",
    },
    "EMA": {
        "decay": "0",
    },
    "csv_log": {
        "path": "text escape empty",
    },
    "json_log": {
        "path": "text escape empty",
    },
    "tensorboard_log": {
        "folder": "text escape empty",
    },
    "committed_step": {
        "folder": "text escape empty",
        "rank": "None 0",
    },
    "plan": {
        "global_batch": "None",
        "num_microbatches": "None",
        "example": "None",
        "loss": "None class",
    },
    "draw": {
        "forward": "0 1.5 huge",
        "backward": "None 0 1.5 huge",
        "input": "None 0 1.5",
        "weight": "None 0 1.5",
        "latency": "0 1.5 huge",
        "num_steps": "None",
        "replicas": "list",
        "stage_work": "list",
        "recompute": "True list",
        "slots": "None",
        "optim_slots": "0",
        "prefetch": "None 0",
        "activations": "True",
        "keep": "True",
        "copy": "0 1.5 huge",
    },
    "schedule": {
        "order": "None class",
        "name": "text escape empty",
    },
    "Shape": {
        "recompute": "None",
        "clip": "True",
        "ahead": "0",
        "spill": "None",
        "options": "dict",
    },
    "Partition.from_counts": {
        "num_layers": "None",
    },
    "Plan": {
        "schedule": "text escape empty",
        "options": "dict",
        "frozen": "0",
        "model": "text escape empty",
        "spill": "None",
    },
    "Profile": {
        "model": "text escape empty",
    },
    "Topology": {
        "name": "text escape empty",
    },
}
"""Values that are meant to be accepted, by call and argument: None for a default, a number in range, text as a name."""

THEIR_OWN = {
    ("Pipeline", "optimizer", "class"),
    ("Pipeline.step", "y", "tensor"),
    ("Pipeline.evaluate", "metric", "class"),
}
"""Calls that raise what the user's own function raises: `int` as an optimizer, a loss for other targets."""


def test_every_public_name_is_tried():
    assert {name.partition(".")[0] for name in CALLS} | UNCHECKED | NO_CALLS == set(pf.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_by_an_error_of_pipefit(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipefit.schedules.registry.REGISTRY", dict(REGISTRY))
    call, usual = CALLS[name]
    for argument in usual:
        expected = ACCEPTED.get(name, {}).get(argument, "").split()
        for words, value in WRONG.items():
            try:
                call(**usual | {argument: value})
            except pf.PipefitError:
                assert words not in expected, (argument, words)
            except Exception:
                assert (name, argument, words) in THEIR_OWN, (argument, words)
            else:
                assert words in expected, (argument, words)


@pytest.mark.parametrize("words", [words for words in WRONG if words not in ("None", "class")])
def test_a_pipeline_checks_the_device_and_the_scheduler(words):
    with pytest.raises(pf.PipefitError, match="device"):
        pipeline(parallelism=pf.Parallelism(device=WRONG[words]))
    with pytest.raises(pf.PipefitError, match="scheduler"):
        pipeline(updates=pf.Updates(scheduler=WRONG[words]))


def test_a_message_says_what_was_expected_and_what_came():
    with pytest.raises(pf.PipefitError, match=r"^steps: expected a whole number or None, got 1\.5$"):
        pipeline().fit([(X, Y)] * 2, steps=1.5)
    with pytest.raises(pf.PipefitError, match="every: expected a whole number of at least 0 or None, got -1"):
        pf.Checkpoints(PIPE, "x", every=-1)
    with pytest.raises(pf.PipefitError, match=r"stages: .* a list of whole numbers, text or None, got <odd>"):
        pipeline(stages=Odd())
    with pytest.raises(pf.PipefitError, match=r"precision: .* got an object of type Tensor"):
        pipeline(precision=torch.ones(20, 20))


def test_a_complex_loss_is_refused():
    with pytest.raises(pf.PipefitError, match=r"the loss must be one number .*complex64"):
        pipeline(loss=lambda output, target: output.sum() * 1j).step(X, Y)
