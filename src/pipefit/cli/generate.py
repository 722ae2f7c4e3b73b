"""`pipefit generate`: text of a trained language model."""

from __future__ import annotations

from pathlib import Path

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Json, Seed, Time
from pipefit.errors import PipefitError


def command(
    folder: Path,
    /,
    *,
    prompt: str,
    tokens: Count = 100,
    temperature: Time = 0,
    seed: Seed = 0,
    chat: bool = False,
    json: Json = False,
) -> Answer:
    """Write text with a trained language model.

    Example: pipefit generate runs/tuned --prompt "2 and 2 are"

    The folder is that of a run, of a model or of adapters. The whole model is in this process.

    Args:
        folder: A run's folder, or one that `save_pretrained` wrote.
        prompt: Beginning of the text.
        tokens: Most tokens to add; bytes, for a model of bytes.
        temperature: Of the sampling; 0: always the most probable token.
        seed: Of the sampling.
        chat: The prompt is a message to an assistant, in the format of the tokenizer's chat template.
    """
    if not folder.is_dir():
        raise PipefitError(f"{folder}: expected a folder, got none")
    from pipefit.run.continuation import continued

    text = continued(folder, prompt, tokens, float(temperature), seed, chat)
    return Answer({"prompt": prompt, "text": text}, prompt + text if not chat else text)
