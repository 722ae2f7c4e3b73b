"""The cost of a cut at run time: a Llama as it is, the same blocks as an `nn.Sequential`, and torch's own pipelining.

All contestants run in the same two processes, each on its own core, alternating; medians are taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import pipefit as pf
from benchmarks.devices import own_core
from pipefit.compare.torch_pipeline import TorchPipeline
from pipefit.planner import by_hand
from pipefit.profiling.workload import Workload
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.stage.split import named_layers
from pipefit.units import columns

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 1024,
}
_SAMPLES, _TOKENS, _MICROBATCHES = 32, 128, 8
_SCHEDULES = ("gpipe", "1f1b")
_STAGES = (5, 5)
"""Layers: the embedding and four blocks, four blocks and the head."""


class Block(nn.Module):
    """A block of the model with tables of rotary positions that are made once."""

    def __init__(self, block: nn.Module, positions: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.block = block
        self.cos, self.sin = positions

    def forward(self, hidden: Tensor) -> Any:
        """Runs the block: (samples, tokens, width) to the same."""
        return self.block(hidden, attention_mask=None, position_embeddings=(self.cos, self.sin))


def by_hand_layers() -> nn.Sequential:
    """The model's modules as an `nn.Sequential`, as one would write it for a pipeline."""
    model = _model()
    hidden = torch.zeros(1, _TOKENS, CONFIG["hidden_size"])
    positions = model.model.rotary_emb(hidden, torch.arange(_TOKENS)[None])
    blocks = [Block(block, positions) for block in model.model.layers]
    return nn.Sequential(model.model.embed_tokens, *blocks, nn.Sequential(model.model.norm, model.lm_head))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss: the mean cross entropy of each token after the first."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def main(repeats: int = 15) -> None:
    """Prints the median seconds of an update, and ratios to the cut model.

    Args:
        repeats: updates of each contestant that are measured.
    """
    found = launch(_measure, 2, repeats, threads=1)[0]
    rows = [("schedule", "contestant", "seconds per update", "÷ cut model")]
    for (schedule, name), samples in found.items():
        own = found[schedule, "cut model"]
        ratio = statistics.median(other / cut for other, cut in zip(samples, own, strict=True))
        rows.append((schedule, name, f"{statistics.median(samples):.4f}", f"{ratio:.3f}"))
    print(*columns(rows), sep="\n")


def _measure(repeats: int) -> dict[tuple[str, str], list[float]]:
    own_core(current().rank, current().num_ranks)
    contestants = {(schedule, name): run for schedule in _SCHEDULES for name, run in _contestants(schedule).items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in contestants}
    for turn in range(repeats + 2):
        for key, run in contestants.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if turn >= 2:
                seconds[key].append(time.perf_counter() - began)
    return seconds


def _contestants(schedule: str) -> dict[str, Callable[[], object]]:
    ids = torch.randint(CONFIG["vocab_size"], (_SAMPLES, _TOKENS))
    whole = pf.Pipeline(_model(), optimizer=_sgd, schedule=schedule, stages=list(_STAGES), microbatches=_MICROBATCHES)
    layers = pf.Pipeline(
        by_hand_layers(), loss=next_token_loss, optimizer=_sgd, schedule=schedule, stages=list(_STAGES),
        microbatches=_MICROBATCHES,
    )  # fmt: skip
    work = Workload(named_layers(by_hand_layers()), next_token_loss, _sgd, torch.device("cpu"))
    plan = by_hand(sum(_STAGES), num_ranks=2, schedule=schedule, num_microbatches=_MICROBATCHES)
    torchs = TorchPipeline(work, plan.partition, _MICROBATCHES, f"torch-{schedule}")
    return {
        "cut model": lambda: whole.fit([{"input_ids": ids, "labels": ids}]),
        "nn.Sequential": lambda: layers.fit([(ids, ids)]),
        "torch pipelining": lambda: torchs.train([(ids, ids)]),
    }


def _model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)
