"""Bytes that each rank reads of a model's folder, and its memory: a random Llama of 1 GB in several files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

import pipefit as pf
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.units import columns, format_bytes

CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "vocab_size": 4096,
}
"""251 million parameters."""


def main(ranks: int = 2) -> None:
    """Writes the folder, loads it over ranks, and writes it again.

    Args:
        ranks: processes; each has one stage.
    """
    with tempfile.TemporaryDirectory() as place:
        folder, again = Path(place) / "model", Path(place) / "again"
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        model.save_pretrained(folder, max_shard_size="200MB")
        del model
        found = launch(_load, ranks, folder, again, threads=1)
        first, second = (transformers.LlamaForCausalLM.from_pretrained(one).state_dict() for one in (folder, again))
        same = all(torch.equal(value, second[name]) for name, value in first.items())
    rows = [("rank", "stage", "read", "read ÷ stage", "peak − torch", "peak ÷ stage")]
    for rank, (stage, read, rise) in enumerate(found):
        ratios = f"{read / stage:.3f}", f"{rise / stage:.3f}"
        rows.append((str(rank), format_bytes(stage), format_bytes(read), ratios[0], format_bytes(rise), ratios[1]))
    print(*columns(rows), f"saved folder {'equal' if same else 'DIFFERENT'} to the bit", sep="\n")


def _load(folder: Path, again: Path) -> tuple[float, float, float]:
    """Bytes of the weights of this rank's stage, of what it read, and of the rise of its memory."""
    read = 0
    opened = safetensors.safe_open

    class Counted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *problem: object) -> None:
            self.file.__exit__(*problem)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Any:
            nonlocal read
            tensor = self.file.get_tensor(name)
            read += tensor.nbytes
            return tensor

    safetensors.safe_open = Counted  # type: ignore[assignment,misc]
    # What transformers and torch take by themselves.
    tiny = {name: 32 if "size" in name else 2 for name in CONFIG}
    pf.cut(transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny)))
    before = _peak()
    pipe = pf.Pipeline(
        pf.pretrained(folder), optimizer=lambda params: torch.optim.SGD(params, 0.1), stages=current().num_ranks
    )
    mine = [p for worker in pipe.workers for stage in worker.stages.values() for layer in stage.layers
            for p in layer.module.parameters()]  # fmt: skip
    pipe.save_pretrained(again)
    return float(sum(p.nbytes for p in mine)), float(read), float(_peak() - before)


def _peak() -> int:
    """The most resident memory so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
