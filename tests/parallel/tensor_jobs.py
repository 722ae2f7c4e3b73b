"""What ranks run in the tests of tensor parallelism."""

import os
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.pipelines import case_of, grouped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipefit import Pipeline
from pipefit.calibrate.tensor_shard import profile_of_shard
from pipefit.checkpoint import export
from pipefit.errors import PipefitError
from pipefit.ir import Op
from pipefit.models import gpt
from pipefit.models.examples import mean_cross_entropy
from pipefit.parallel import Region, TensorRule, make_mesh, shard_layers
from pipefit.planner import by_hand, plan
from pipefit.profiling.workload import Workload
from pipefit.runtime.session import current
from pipefit.spec import Layer, Profile, Topology
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.testing import Case, Outcome, run_pipeline

SIZES = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 12, "context": 8}


def model(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(**(SIZES | options)).double()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, SIZES["vocab"], (2, size, SIZES["context"]), generator=generator)
    return words[0], words[1]


def task(counts: tuple[int, ...], **more: Any) -> Case:
    """A task of a pipeline with a stage per rank, unless it says otherwise."""
    options = more.pop("model", {})
    settings: dict[str, Any] = {
        "model": model(**options),
        "batches": [batch(5, step) for step in range(3)],
        "num_ranks": len(counts),
        "schedule": "1f1b",
        "num_microbatches": 2,
        "counts": counts,
        "tensor": 2,
    }
    return case_of(**settings | more)


TWO = {
    "t=2": task((4,), clip_norm=0.05),
    "t=2, untied, dropout, recomputed": task((4,), model={"tied": False, "dropout": 0.2}, recompute=True),
    "t=2, sequence": task((4,), sequence_parallel=True, clip_norm=0.05),
    "t=2, sequence, dropout": task((4,), sequence_parallel=True, model={"dropout": 0.2}),
}
FOUR = {
    "t=4": task((4,), tensor=4, clip_norm=0.05),
    "t=4, sequence, dropout": task((4,), tensor=4, sequence_parallel=True, model={"dropout": 0.2}),
    "t=2 p=2": task((2, 2), clip_norm=0.05),
    "t=2 p=2, whole messages, dropout, attention replayed": task(
        (2, 2), whole_messages=True, model={"dropout": 0.2}, recompute="selective"
    ),
    "t=2 p=2, sequence, layers replayed": task((2, 2), sequence_parallel=True, clip_norm=0.05, recompute="layer"),
    "t=2 d=2": task((4,), num_ranks=2, schedule="data-parallel", clip_norm=0.05),
    "t=2 p=2, pipedream": task((2, 2), schedule="pipedream", num_microbatches=1, model={"tied": False}),
}
EIGHT = {
    "2×2×2 interleaved, tied, clipped": task(
        (1, 1, 1, 1),
        num_ranks=4,
        schedule="interleaved",
        num_microbatches=4,
        num_chunks=2,
        replicas=(2,),
        clip_norm=0.05,
    ),
}


def outcomes(tasks: list[Case]) -> list[Outcome]:
    """This process's part of several tasks."""
    return [run_pipeline(task) for task in tasks]


PROFILE = Profile("gpt", 2, tuple(Layer(f"layer{i}", 1e-3, 1e-3, 1e-3, 1e3, 1e3, 1e6) for i in range(4)))


def facts_of_two(place: str) -> dict[str, Any]:
    """What two processes that share one rank find out."""
    found: dict[str, Any] = {}
    layers = model()
    pipe = pipeline(layers, tensor=2)
    found["first loss"] = pipe.step(*batch(4, 0))
    found["bytes of a block"] = sum(p.nbytes for p in layers[1].parameters())
    found["state"] = pipe.state_dict()
    found["metric"] = pipe.evaluate([batch(4, 9)], lambda output, y: float(output.shape[-1]))
    pipe.save(f"{place}/adam")
    export(pipe, f"{place}/model.safetensors")
    found["second loss"] = pipe.step(*batch(4, 1))
    found["trained"] = pipe.state_dict()
    again = pipeline(model(tied=True, dropout=0.0), tensor=2, sequence_parallel=True)
    again.load(f"{place}/adam")
    found["second loss after load"] = again.step(*batch(4, 1))
    other = pipeline(model(), tensor=2)
    other.load_state_dict(found["state"])
    found["loaded state"] = other.state_dict()
    rows = found["state"]["block0.up.weight"]
    longer = found["state"] | {"block0.up.weight": torch.cat([rows, rows[:1]])}
    found["longer"] = refusal(lambda: other.load_state_dict(longer))
    other.close()
    found["closed"] = refusal(lambda: other.step(*batch(4, 1)))
    found["class after close"] = type(other.layers[1].module).__name__
    wide = pipeline(model(), tensor=2, loss=smooth)
    found["smoothed loss"] = wide.step(*batch(4, 0))
    planned = plan(PROFILE, Topology.local(2), global_batch=4, num_microbatches=2, tensors=(2,))
    found["planned"] = planned.tensor, planned.pieces, pipeline(model(), plan=planned).step(*batch(4, 0))
    found["oracle"] = differences_from_dtensor()
    return found


def refusal(call: Callable[[], object]) -> str:
    """The message of a call that is refused."""
    try:
        call()
    except PipefitError as problem:
        return str(problem)
    return ""


def pipeline(layers: nn.Sequential, **options: Any) -> Pipeline:
    settings: dict[str, Any] = {"loss": mean_cross_entropy, "optimizer": adam, "microbatches": 2, "clip_norm": 0.5}
    return Pipeline(layers, **grouped(**settings | options))


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def smooth(output: Tensor, target: Tensor) -> Tensor:
    """A loss that needs all logits."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def differences_from_dtensor() -> dict[str, float]:
    """A block of pipefit beside the same block divided by torch: output and gradients."""
    mesh = make_mesh(1, 2, current().rank, 2)
    ours, theirs = model()[1], model()[1]
    shard_layers([NamedLayer(0, "block", ours)], mesh)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    # torch cuts a fused projection through the middle, so its heads are laid side by side first.
    half = SIZES["hidden"] // 2
    order = torch.cat([torch.arange(3)[:, None] * 2 * half + torch.arange(half) + j * half for j in range(2)]).flatten()
    with torch.no_grad():
        for parameter in (theirs.attention.qkv.weight, theirs.attention.qkv.bias):
            parameter.copy_(parameter[order].clone())
    theirs.attention.heads //= 2
    theirs.attention.forward = types.MethodType(attend, theirs.attention)
    plan = {"attention.qkv": columns, "attention.out": rows, "up": columns, "down": rows}
    parallelize_module(theirs, init_device_mesh("cpu", (2,)), plan)
    torch.manual_seed(3)
    x = torch.randn(2, 6, SIZES["hidden"], dtype=torch.float64)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = ours(mine), theirs(its)
    a.sin().sum().backward()
    b.sin().sum().backward()
    pairs = {
        "output": (a, b),
        "input": (mine.grad, its.grad),
        "up": (ours.up.weight.grad, theirs.up.weight.grad.to_local()),
        "down": (ours.down.weight.grad, theirs.down.weight.grad.to_local()),
        "qkv": (ours.attention.qkv.weight.grad, theirs.attention.qkv.weight.grad.to_local()),
        "norm": (ours.norm1.weight.grad, theirs.norm1.weight.grad),
    }
    return {name: float((p - q).abs().max()) for name, (p, q) in pairs.items()}


def attend(self: Any, x: Tensor) -> Tensor:
    b, s, _ = x.shape
    q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.out(y.transpose(1, 2).reshape(b, s, -1))


def load_with_one(place: str) -> tuple[float, dict[str, Tensor]]:
    """Goes on, without tensor parallelism, from what two processes have saved."""
    pipe = pipeline(model(), stages=1)
    pipe.load(f"{place}/adam")
    return pipe.step(*batch(4, 1)), pipe.state_dict()


def measured_parts() -> dict[str, Any]:
    """What two processes measure of their parts, and which of their threads give way."""
    session = current()
    layers = named_layers(model())
    plan = by_hand(len(layers), num_ranks=1, schedule="1f1b", num_microbatches=2, tensor=2, sequence_parallel=True)
    work = Workload(layers, mean_cross_entropy, torch.optim.SGD, torch.device("cpu"), batch(4, 0))
    found = profile_of_shard(work, plan, session, Topology.local(2))
    tasks = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
    patient = [os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH for task in tasks]
    return {"profile": found, "class": type(layers[1].module).__name__, "carriers that give way": patient}


def bytes_of_four() -> dict[str, tuple[int, float, int]]:
    """For each way to send: bytes between ranks and inside a rank, of one step, and gathers of pieces."""
    found = {}
    ways = {"whole": {"whole_messages": True}, "pieces": {}, "sequence": {"sequence_parallel": True}}
    for name, options in ways.items():
        pipe = pipeline(model(), tensor=2, stages=2, **options)
        pipe.step(*batch(4, 0))
        found[name] = (*pipe.loop.moved_bytes, sum(i.op is Op.GATHER for i in pipe.program.ranks[0]))
        found[f"{name}, told"] = str(pipe.report()).splitlines()
    torch.manual_seed(0)
    odd = nn.Sequential(Alike(3, 3), Alike(3, 3)).double()
    pipe = pipeline(odd, tensor=2, stages=2)
    loss = pipe.step(torch.ones(2, 3).double(), torch.tensor([0, 2]))
    found["odd"] = (loss, *pipe.loop.moved_bytes)
    return found


class Alike(nn.Linear):
    """A layer of a user's, with a rule of its own: every process computes the same."""


class SharedAlike(Alike):
    region: Region


Alike.tensor_rule = TensorRule(SharedAlike, {}, lambda layer: {})


def refused(**options: Any) -> list[str]:
    """What a pipeline that cannot be says."""
    layers = options.pop("layers", None) or model()
    try:
        pipe = pipeline(layers, **options)
        pipe.step(batch(4, 0)[0][:, :5], batch(4, 0)[1][:, :5])
    except PipefitError as problem:
        return [str(problem)]
    return []


def all_refused() -> list[list[str]]:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.device("meta"):
        empty = gpt(**SIZES)
    return [
        refused(tensor=3),
        refused(tensor=2, layers=layers),
        refused(tensor=2, layers=model(heads=1)),
        refused(tensor=2, layers=model(vocab=13)),
        refused(tensor=2, sequence_parallel=True),
        refused(tensor=2, replicas=(2, 1)),
        refused(tensor=2, layers=empty),
        refused(tensor=2, optimizer=torch.optim.Adafactor),
    ]


def stand_still_inside_a_layer() -> None:
    """Process 3, the second of rank 1, stops in the middle of its second pass."""
    pipe = pipeline(model(), tensor=2, stages=2)
    pipe.step(*batch(4, 0))
    layer = pipe.layers[-1].module
    if current().rank == 3:
        layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    pipe.step(*batch(4, 0))


TOGETHER = {
    "bf16": {"precision": "bf16"},
    "fp16 from a scale that overflows": {"precision": "fp16", "loss_scale": 2.0**24},
    "optimizer divided over replicas": {"replicas": 2, "shard": "optimizer"},
    "weights divided over replicas": {"replicas": 2, "shard": "weights", "precision": "bf16"},
    "sequence, bf16": {"precision": "bf16", "sequence_parallel": True, "recompute": True},
}


def losses_of(options: dict[str, Any], **more: Any) -> list[float]:
    layers = model().float() if "precision" in options else model()
    settings = {"stages": 2, "schedule": "1f1b"} | options | more
    if "replicas" in settings:
        settings["stages"] = 1
    return pipeline(layers, **settings).fit([batch(4, step) for step in range(5)])


def losses_together(place: str) -> dict[str, Any]:
    """Four processes, t = 2, with what else a run can have."""
    found: dict[str, Any] = {name: losses_of(options, tensor=2) for name, options in TOGETHER.items()}
    pipe = pipeline(model(), tensor=2, replicas=2, shard="optimizer")
    pipe.step(*batch(4, 0))
    pipe.save(f"{place}/adam")
    found["next"] = pipe.step(*batch(4, 1))
    return found
