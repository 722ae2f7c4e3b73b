"""Texts and records for the model of a folder, read before the model: a wrong record is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipefit.data.records import token_samples
from pipefit.data.token_table import IGNORED, TokenTable
from pipefit.errors import DataError
from pipefit.models.hub import limits_of, tokenizer_of
from pipefit.run.config import RunConfig

_USUAL_CONTEXT = 512
_MOST_PROMPTS = 2
_MOST_WORDS = 32


class HeldOutPrompt(NamedTuple):
    """The beginning of a held-out sequence, and what follows there.

    Attributes:
        tokens: the tokens of the beginning.
        target: the tokens that follow.
        is_answer: whether these are an answer, which has one right form, and not a text that may go on in many ways.
    """

    tokens: list[int]
    target: list[int]
    is_answer: bool


@dataclass(frozen=True)
class Texts:
    """The sequences of a run.

    Attributes:
        name: the name of the data, for people.
        tokenizer: the tokenizer of the model.
        train: to train on.
        held_out: to evaluate on; may be empty.
        context: maximum number of tokens in a sequence.
    """

    name: str
    tokenizer: Any
    train: TokenTable
    held_out: TokenTable
    context: int

    @property
    def padding(self) -> int:
        """The token of padding."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((one for one in known if one is not None), 0)

    def prompts(self) -> tuple[HeldOutPrompt, ...]:
        """Beginnings of the first held-out sequences."""
        found = []
        for number in range(min(len(self.held_out), _MOST_PROMPTS)):
            found.append(_prompt(self.held_out.ids(number).tolist(), self.held_out.labels(number).tolist()))
        return tuple(prompt for prompt in found if prompt.tokens and prompt.target)


def is_named(data: Sequence[str]) -> bool:
    """Returns whether `--data` names a data set that is not text or records."""
    return tuple(data) in (("digits",), ("synthetic",))


def files_of(names: Sequence[str]) -> list[Path] | None:
    """The files of text or records that `--data` names; None: the built-in text."""
    if tuple(names) in ((), ("text",)):
        return None
    return [Path(name) for name in names]


def texts_of(config: RunConfig) -> Texts:
    """The sequences for the model of a folder, by the tokenizer in it; without --eval-data the last tenth is held out.

    Raises:
        DataError: a file, a record or an option does not fit.
        ModelError: the folder has no tokenizer.
    """
    folder = config.model
    longest, vocabulary = limits_of(folder)
    tokenizer = tokenizer_of(folder)
    if config.context > longest > 0:
        raise DataError(f"--context {config.context}: {folder} takes at most {longest} tokens")
    context = config.context or min(longest or _USUAL_CONTEXT, _USUAL_CONTEXT)

    def read(names: Sequence[str]) -> TokenTable:
        samples = token_samples(files_of(names), tokenizer, context, config.pack, config.learn == "all")
        if samples.highest >= vocabulary:
            raise DataError(
                f"{folder}: its tokenizer gives the token {samples.highest}, but the model knows {vocabulary} tokens; "
                "they do not belong together"
            )
        return samples

    samples = read(config.data)
    name = ", ".join(config.data) or "text"
    if config.eval_data:
        return Texts(name, tokenizer, samples, read([config.eval_data]), context)
    count = len(samples) - len(samples) // 10
    return Texts(name, tokenizer, samples[:count], samples[count:], context)


def _prompt(ids: list[int], labels: list[int]) -> HeldOutPrompt:
    """The prompt of a sequence: up to its first answer, or its first words where all of it is learned."""
    is_learned = [label != IGNORED for label in labels]
    if True in is_learned:
        start = is_learned.index(True)
    else:
        start = 0
    if start == 0:
        words = min(len(ids) // 4, _MOST_WORDS)
        return HeldOutPrompt(ids[:words], ids[words:], is_answer=False)
    end = start
    while end < len(ids) and is_learned[end]:
        end += 1
    return HeldOutPrompt(ids[:start], ids[start:end], is_answer=True)
