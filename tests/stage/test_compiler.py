"""Layers under torch.compile: one compilation for each kind of layer, and the numbers of one process."""

import copy
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.pipelines import grouped
from torch import Tensor, nn
from torch.hub import tqdm

import pipefit as pf
from pipefit.errors import ModelError, PipefitError, PlanError
from pipefit.models import build
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.workload import Workload
from pipefit.runtime.session import current
from pipefit.spec.options import Parallelism, Precision, Spilled
from pipefit.stage import compiler
from pipefit.stage.compiler import backend_of
from pipefit.stage.split import named_layers
from pipefit.testing import check

# The compiler looks at all that a tensor has; its own filter does not hold where warnings are errors.
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"), pytest.mark.slow]

CALLS: Counter[str] = Counter()
"""Compilations and calls of the backend `counted`."""


def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    CALLS["compilations"] += 1

    def run(*args: Any) -> Any:
        CALLS["runs"] += 1
        return graph.forward(*args)

    return run


def test_an_older_torch_has_one_limit_of_variants_for_the_whole_process(monkeypatch):
    def older(function, *, backend, options):
        return function

    monkeypatch.setattr(torch, "compile", older)
    with torch._dynamo.config.patch(recompile_limit=8):
        assert compiler._function_of.__wrapped__("aot_eager", "a kind of layer")(lambda x: 2 * x, 3) == 6
        assert torch._dynamo.config.recompile_limit == 64


def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise RuntimeError("no such instruction")


torch._dynamo.register_backend(counted, name="counted")
torch._dynamo.register_backend(broken, name="broken")


def gpt(hidden: int = 16, **options: Any) -> Any:
    return build("gpt", layers=4, hidden=hidden, heads=2, context=8, **{"dropout": 0.1} | options)


def convnet() -> Any:
    return build("convnet", layers=4, channels=4)


SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"num_ranks": 3},
    "recomputed": {"num_ranks": 2, "schedule": "gpipe", "recompute": True},
    "interleaved": {"num_ranks": 2, "schedule": "interleaved", "num_chunks": 2},
    "halves": {"num_ranks": 3, "schedule": "zb-h1"},
    "halves in a V": {"num_ranks": 2, "schedule": "zb-v", "num_chunks": 2, "recompute": True},
    "stashed weights": {"num_ranks": 3, "schedule": "pipedream", "num_microbatches": 1, "steps": 6},
    "two versions": {"num_ranks": 2, "schedule": "pipedream-2bw", "steps": 5},
    "replicas": {"num_ranks": 3, "replicas": (2, 1), "clip_norm": 0.1},
}


@pytest.mark.parametrize("model", [gpt, convnet])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_layers_train_as_one_process_does_without(shape: str, model: Any) -> None:
    result = check(model(), **grouped(compile="aot_eager", **SHAPES[shape]))
    assert max(result.loss_diff, result.grad_diff, result.weight_diff) < 1e-12


def test_sizes_of_batches_and_lengths_of_sequences_may_vary() -> None:
    model = gpt()

    def example(size: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = model.example(size, seed)
        return x[:, : 3 + seed], y[:, : 3 + seed]

    sizes = {"steps": 5, "batch_size": [8, 5, 4, 7, 9]}
    result = check(model, example=example, **sizes, **grouped(compile="aot_eager", num_ranks=2))
    assert max(result.loss_diff, result.grad_diff, result.weight_diff) < 1e-12


def test_under_autocast_only_dropout_is_rounded_elsewhere() -> None:
    options = grouped(compile="aot_eager", num_ranks=2, precision="bf16", dtype=torch.float32)
    result = check(gpt(dropout=0.0), **options)
    assert result.equal and max(result.grad_diff, result.weight_diff) < 1e-5
    assert check(gpt(), **options).equal


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_usual_compiler_trains_as_one_process_does() -> None:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]

    def example(size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, 6, generator=generator), torch.randint(6, (size,), generator=generator)

    options = grouped(compile=True, num_ranks=2, schedule="zb-h1", batch_size=8)
    result = check(nn.Sequential(*blocks), example=example, **options)
    assert max(result.loss_diff, result.grad_diff, result.weight_diff) < 1e-12


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def pipeline(bundle: Any, compile: bool | str, **options: Any) -> pf.Pipeline:
    model = copy.deepcopy(bundle.layers).double()
    return pf.Pipeline(model, loss=bundle.loss, optimizer=sgd, precision=Precision(compile=compile), **options)


def test_a_kind_of_layer_is_compiled_once_and_every_layer_runs_by_it_while_it_trains() -> None:
    bundle = gpt(hidden=12, tied=False)
    batch = bundle.example(8, 0)
    CALLS.clear()
    pipe = pipeline(bundle, "counted", stages=3)
    pipe.fit([batch] * 2)
    # An embedding, blocks, a head; each of 6 layers runs for each of 4 micro-batches.
    assert CALLS == {"compilations": 3, "runs": 2 * 4 * 6}
    pipe.evaluate([batch])
    pipeline(bundle, "counted", stages=2).fit([batch])
    assert CALLS == {"compilations": 3, "runs": 3 * 4 * 6}
    assert "compiled in" in str(pipe.report())
    plain = pipeline(bundle, False, stages=2)
    plain.fit([batch])
    assert CALLS["runs"] == 3 * 4 * 6 and "compiled in" not in str(plain.report())


@pytest.mark.usefixtures("small_probes")
def test_all_is_compiled_while_the_layers_are_measured() -> None:
    bundle = gpt(hidden=20)
    batch = bundle.example(8, 0)
    CALLS.clear()
    pipe = pipeline(bundle, "counted", stages="auto", example=batch)
    found = CALLS["compilations"]
    assert found >= 3
    pipe.fit([batch] * 2)
    assert CALLS["compilations"] == found


def test_what_is_compiled_for_halves_may_run_in_another_thread() -> None:
    bundle = gpt(hidden=28)
    pipe = pipeline(bundle, "aot_eager", stages=2, schedule="zb-h1")
    with ThreadPoolExecutor(1) as threads:
        (loss,) = threads.submit(pipe.fit, [bundle.example(8, 0)]).result()
    assert loss > 0


@pytest.mark.usefixtures("small_probes")
def test_layers_that_have_no_weights_yet_are_measured_compiled() -> None:
    with torch.device("meta"):
        layers = named_layers(gpt(hidden=24).layers)
    bundle = gpt(hidden=24)
    CALLS.clear()
    work = Workload(layers, bundle.loss, sgd, torch.device("cpu"), bundle.example(4, 0), compiler="counted")
    agreed_profile(work, [2], current())
    assert CALLS["compilations"] == 3 and CALLS["runs"] > 3


@pytest.mark.long
@pytest.mark.dist
def test_ranks_that_are_processes_compile_for_themselves() -> None:
    options = grouped(compile="aot_eager", num_ranks=2, schedule="zb-h1", transport="distributed")
    result = check(gpt(), **options)
    assert max(result.loss_diff, result.grad_diff, result.weight_diff) < 1e-12


def test_the_bars_of_the_compiler_leave_no_semaphore_behind() -> None:
    backend_of("aot_eager", torch.device("cpu"))
    assert isinstance(tqdm.get_lock(), type(threading.RLock()))


@pytest.mark.parametrize("spill", [Spilled(), Spilled(keep="all"), Spilled(step_on="host"), Spilled(activations=True)])
def test_spilled_stages_run_by_what_was_compiled_for_the_others(spill: Spilled) -> None:
    bundle = gpt(tied=False)
    batch = bundle.example(8, 0)
    options = {"stages": 4, "schedule": "interleaved", "parallelism": Parallelism(ranks=2, chunks=2)}
    plain = pipeline(bundle, False, **options)
    mine = pipeline(bundle, "aot_eager", spill=spill, **options)
    assert mine.fit([batch] * 3) == pytest.approx(plain.fit([batch] * 3), abs=1e-12)
    state = mine.state_dict()
    assert all(torch.allclose(state[name], value, 0, 1e-12) for name, value in plain.state_dict().items())


def test_what_compiled_layers_cannot_do_is_refused() -> None:
    bundle = gpt()
    with pytest.raises(PlanError, match=r"communicate inside their layers.*tensor=1 \(got 2\)"):
        pipeline(bundle, "aot_eager", parallelism=Parallelism(tensor=2))
    with pytest.raises(PlanError, match="leave out device_memory"):
        pipeline(bundle, "aot_eager", spill=Spilled("1 GiB"), example=bundle.example(8, 0))


def test_a_compiler_that_is_not_there_is_named() -> None:
    with pytest.raises(PipefitError, match="got 'inductr'; did you mean inductor"):
        pipeline(gpt(), "inductr", stages=2)
    nowhere = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with nowhere, pytest.raises(PipefitError, match=r'needs a C\+\+ compiler on a CPU.*compile="aot_eager"'):
        backend_of(True, torch.device("cpu"))


def test_a_layer_that_cannot_be_compiled_is_named_with_the_way_out() -> None:
    bundle = gpt()
    with pytest.raises(ModelError, match=r"(?s)layer embed .*no such instruction.*train without compile"):
        pipeline(bundle, "broken", stages=2).fit([bundle.example(8, 0)])
