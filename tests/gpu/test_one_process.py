"""Training on a GPU in one process is plain torch's training: every schedule, and every setting of an update."""

import re
from typing import Any

import pytest
import torch
from tests.gpu import plain
from tests.gpu.cases import SYNCHRONOUS
from tests.gpu.plain import assert_close, batches, network, sentences, tied
from tests.pipelines import grouped
from tests.testing.equality_models import make
from torch import nn

from pipefit import Pipeline
from pipefit.models import build
from pipefit.spec.options import Parallelism
from pipefit.testing import check

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"

ASYNCHRONOUS = ("pipedream", "pipedream-vertical-sync", "pipedream-2bw")


def pipeline(model: nn.Module, **options: Any) -> Pipeline:
    settings = {"loss": nn.functional.cross_entropy, "optimizer": plain.sgd, "microbatches": 4, "device": DEVICE}
    return Pipeline(model, **grouped(**settings | options))


def trained(model: nn.Module, data: list[plain.Batch], **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipe = pipeline(model, **options)
    losses = [pipe.step(x, y) for x, y in data]
    assert all(
        p.device == torch.device(DEVICE) for stage in pipe.workers[0].stages.values() for p in stage.parameters()
    )
    return losses, {name: value.cpu() for name, value in pipe.state_dict().items()}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_synchronous_schedule_trains_as_plain_torch(name: str) -> None:
    assert_close(trained(network(), batches(), **SYNCHRONOUS[name]), plain.trained(network(), batches()))


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_every_asynchronous_schedule_follows_its_formula(schedule: str) -> None:
    model, example = make("plain")
    options = grouped(schedule=schedule, num_ranks=3, num_microbatches=2, steps=5, example=example, device=DEVICE)
    result = check(model, **options)
    assert result.equal, result


@pytest.mark.parametrize(
    "name", ["plain", "batch norm", "dropout", "tied neighbours", "an integer mask beside activations", "convolutions",
             "a frozen first half with batch norms", "attention, batch norm and dropout"]
)  # fmt: skip
def test_every_kind_of_model_trains_as_the_user_s_own_forward(name: str) -> None:
    model, example = make(name)
    options = grouped(schedule="1f1b", num_ranks=3, num_microbatches=3, example=example, device=DEVICE, clip_norm=0.5)
    result = check(model, **options)
    assert result.equal, result


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_tied_weights_have_one_gradient(schedule: str) -> None:
    more = {"chunks": 2, "stages": 4} if schedule == "interleaved" else {"stages": 3}
    assert_close(trained(tied(), sentences(), schedule=schedule, **more), plain.trained(tied(), sentences()))


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", [plain.sgd, plain.adamw])
def test_optimizers_and_clipping(optimizer: Any, clip_norm: float | None) -> None:
    got = trained(network(), batches(), stages=3, optimizer=optimizer, clip_norm=clip_norm)
    # Adam divides by the root of its second moment, which magnifies rounding of the smallest gradients.
    tolerance = plain.TOLERANCE if optimizer is plain.sgd else 1e-6
    assert_close(got, plain.trained(network(), batches(), optimizer, clip_norm), tolerance)


@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_replays_change_nothing(recompute: str) -> None:
    got = trained(network(), batches(), stages=3, recompute=recompute)
    assert_close(got, plain.trained(network(), batches()))


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()) for _ in range(6))).double()


REPLAYED = [(schedule, recompute) for schedule in ("1f1b", "gpipe") for recompute in ("none", "stage", "layer")]


# zb-h1 does not replay layers inside their backward.
@pytest.mark.parametrize(("schedule", "recompute"), [*REPLAYED, ("zb-h1", "none"), ("zb-h1", "stage")])
def test_dropout_depends_on_neither_stages_nor_schedule_nor_replays(schedule: str, recompute: str) -> None:
    one = trained(dropping(), batches(), stages=1, schedule="gpipe")
    other = trained(dropping(), batches(), stages=3, schedule=schedule, recompute=recompute)
    assert_close(other, one)
    assert one[0] != plain.trained(dropping(), batches())[0], "some numbers must have been dropped"


def gently(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_single_precision_and_the_same_for_any_stages(precision: str) -> None:
    data = [(x.float(), y) for x, y in batches(steps=6)]
    single, _ = plain.trained(network().float(), data, gently)
    half = {"precision": precision, "loss_scale": 128.0, "optimizer": gently}
    one = trained(network().float(), data, stages=1, **half)
    other = trained(network().float(), data, stages=4, schedule="1f1b", **half)
    assert other[0] == pytest.approx(one[0], rel=1e-3)
    assert one[0] == pytest.approx(single, rel=2e-2)
    assert one[0] != pytest.approx(single, rel=1e-7), "nothing was rounded"


def test_a_checkpoint_resumes_to_the_bit(tmp_path: Any) -> None:
    data = batches(steps=6)
    whole = pipeline(network(), stages=3, optimizer=plain.adamw)
    losses = [whole.step(x, y) for x, y in data]
    first = pipeline(network(), stages=3, optimizer=plain.adamw)
    assert [first.step(x, y) for x, y in data[:3]] == losses[:3]
    first.save(tmp_path)
    second = pipeline(network(), stages=3, optimizer=plain.adamw)
    second.load(tmp_path)
    assert [second.step(x, y) for x, y in data[3:]] == losses[3:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_a_checkpoint_of_the_cpu_continues_on_the_gpu(tmp_path: Any) -> None:
    data = batches(steps=6)
    first = pipeline(network(), stages=3, device="cpu")
    for x, y in data[:3]:
        first.step(x, y)
    first.save(tmp_path)
    second = pipeline(network(), stages=2)
    second.load(tmp_path)
    losses = [second.step(x, y) for x, y in data[3:]]
    assert losses == pytest.approx(plain.trained(network(), data)[0][3:], rel=plain.TOLERANCE)


def test_evaluation_is_that_of_the_cpu() -> None:
    def made(device: str) -> Pipeline:
        torch.manual_seed(0)
        bundle = build("gpt", layers=4, hidden=32, heads=4, context=16, vocab=23)
        model = bundle.layers.double()
        options = grouped(loss=bundle.loss, optimizer=plain.sgd, stages=3, microbatches=2, device=device)
        return Pipeline(model, **options)

    here, there = made(DEVICE), made("cpu")
    words = torch.randint(0, 23, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        assert here.step(words, words) == pytest.approx(there.step(words, words), rel=1e-9)
    assert here.evaluate([(words, words)]) == pytest.approx(there.evaluate([(words, words)]), rel=1e-9)


def test_a_trained_model_generates_what_it_does_on_the_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    words = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(0))

    def generated(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, eos_token_id=None, **sizes)
        model = transformers.LlamaForCausalLM(config).double()
        pipe = Pipeline(model, optimizer=plain.sgd, stages=3, parallelism=Parallelism(device=device))
        pipe.fit([{"input_ids": words, "labels": words}])
        return pipe.generate(words, max_new_tokens=6).cpu()

    assert torch.equal(generated(DEVICE), generated("cpu"))


def test_the_timeline_and_the_figures_of_a_step_are_there() -> None:
    pipe = pipeline(network(), stages=3, schedule="1f1b")
    records: list[Any] = []
    pipe.fit(batches(), callbacks=[records.append])
    assert len(records) == 4
    timeline = pipe.timeline(last=1)
    assert timeline.events and all(0 <= event.start_s <= event.end_s for event in timeline.events)
    computed = [(event.rank, event.position) for event, _ in timeline.compute()]
    assert [(launch.rank, launch.position) for launch in timeline.launches] == computed
    assert all(0 <= launch.start_s <= launch.end_s for launch in timeline.launches)
    assert re.search(r"^the host is (not )?the bottleneck: ", str(pipe.report()), re.MULTILINE)


def test_nothing_of_the_model_stays_on_the_gpu_when_a_pipeline_is_gone() -> None:
    import gc

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    trained(network(), batches(), stages=3)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_compiled_model_trains_alike() -> None:
    data = [(x.float(), y) for x, y in batches()]
    plainly = trained(network().float(), data, stages=2)
    compiled = trained(network().float(), data, stages=2, compile="aot_eager")
    assert compiled[0] == pytest.approx(plainly[0], rel=1e-4)


def test_tf32_rounds_products() -> None:
    torch.set_float32_matmul_precision("highest")

    def losses(precision: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
        pipe = pipeline(model, stages=2, loss=nn.functional.mse_loss, precision=precision)
        return [pipe.step(x, x) for _ in range(4)]

    exact = losses("fp32")
    try:
        rounded = losses("tf32")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)
