"""Text generation with a byte-level language model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipefit.errors import DataError


@torch.no_grad()
def sample(
    model_forward: Callable[[Tensor], Tensor],
    prompt: bytes,
    num_bytes: int,
    temperature: float = 0.8,
    seed: int = 0,
    context: int = 128,
) -> str:
    """Continues `prompt` by `num_bytes` bytes and returns prompt and continuation as text.

    The model sees a sliding window of the last `context` bytes; nothing is cached, so the cost is one forward of
    that window per byte. The caller puts the model into evaluation mode.

    Args:
        model_forward: ids (1, s) int64 -> logits (1, s, 256), s up to `context`.
        prompt: at least one byte.
        num_bytes: bytes to add.
        temperature: 0 takes the likeliest byte; 1 samples from the model's distribution.
        seed: the seed of the sampling; the same seed gives the same text.
        context: the longest window that the model takes.

    Raises:
        DataError: the prompt is empty, the temperature negative, or the model's logits not finite.
    """
    if not prompt:
        raise DataError("sample: the prompt must hold at least one byte")
    if temperature < 0:
        raise DataError(f"sample: the temperature must not be negative, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_bytes):
        logits = model_forward(torch.tensor([ids[-context:]]))[0, -1].float().cpu()
        ids.append(_draw(logits, temperature, generator))
    # Bytes that are no text, and half a character at the end, are shown by their numbers.
    return bytes(ids).decode(errors="backslashreplace")


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not bool(torch.isfinite(logits).all()):
        raise DataError("sample: the model gave logits that are not finite; its weights have diverged")
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
