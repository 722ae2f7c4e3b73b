"""Conversations as token ids, of which the answers of the assistant are learned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipefit.data.token_table import IGNORED, Tokens
from pipefit.errors import DataError

_ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": _ASSISTANT,
    _ASSISTANT: _ASSISTANT,
    "system": "system",
    "tool": "tool",
}
"""Roles by the names that ShareGPT's `from` has for them."""

_MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
"""The part of a template that marks what the assistant says."""

Render = Callable[..., str]
"""From messages to their text, by the tokenizer's template."""


def of_sharegpt(turns: Sequence[Any], where: str) -> list[Any]:
    """Messages from ShareGPT's turns, {"from": "human", "value": "…"}; other turns stay as they are.

    Raises:
        DataError: an unknown speaker.
    """
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)
            continue
        role = _ROLES.get(str(turn["from"]))
        if role is None:
            known = ", ".join(_ROLES)
            raise DataError(f"data: {where}: a turn is from {turn['from']!r:.40}; expected one of {known}")
        messages.append({"role": role, "content": turn.get("value")})
    return messages


def chat_tokens(messages: Sequence[Any], tokenizer: Any, where: str, learns_all: bool) -> Tokens:
    """A conversation through the tokenizer's chat template.

    The answers of the assistant are what the template adds after its prompt for one (`add_generation_prompt`), or marks
    by `{% generation %}`.

    Args:
        messages: dicts with role and content.
        tokenizer: a tokenizer of transformers.
        where: place of the record, for messages.
        learns_all: whether all tokens are learned, not only the answers.

    Raises:
        DataError: there is no template, it cannot use the messages, or it does not show where an answer is.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise DataError(f"data: {where} is a conversation, but the model's tokenizer has no chat template")
    try:
        if learns_all or (isinstance(template, str) and _MARKED.search(template)):
            return _by_template(messages, tokenizer, learns_all)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        spans = list(_answers(messages, text, tokenizer.apply_chat_template, where))
        return _within(text, spans, tokenizer, where)
    except DataError:
        raise
    except Exception as problem:  # of any kind, for the template is the model's
        raise DataError(f"data: {where}: the chat template cannot use its messages: {problem}") from None


def _by_template(messages: Sequence[Any], tokenizer: Any, learns_all: bool) -> Tokens:
    """All tokens; learned are all, or those that the template marks."""
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=not learns_all
    )
    ids = found["input_ids"]
    if learns_all:
        return Tokens(ids, ids)
    marks = found["assistant_masks"]
    return Tokens(ids, [one if mark else IGNORED for one, mark in zip(ids, marks, strict=True)])


def _within(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any, where: str) -> Tokens:
    """The tokens of a text, of which those that begin in a span are learned."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"data: {where}: the model's tokenizer does not say where its tokens are; give --learn all")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = found["input_ids"]
    labels = []
    for token, (start, _) in zip(ids, found["offset_mapping"], strict=True):
        is_learned = any(begin <= start < end for begin, end in spans)
        labels.append(token if is_learned else IGNORED)
    return Tokens(ids, labels)


def _answers(messages: Sequence[Any], text: str, template: Render, where: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each answer of the assistant in the text of a conversation."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != _ASSISTANT:
            continue
        whole = template(messages[: index + 1], tokenize=False)
        start = _begin(messages[:index], text, template)
        content = str(message.get("content") or "").strip()
        if start is None and text.startswith(whole):
            # The template has no prompt for an answer: its words are in the last part.
            start = whole.rfind(content)
        if start is None or start < 0 or not text.startswith(whole):
            raise DataError(
                f"data: {where}: the chat template changes message {index + 1} when others follow, so its answer "
                "cannot be found; give --learn all, or mark it by {% generation %} in the template"
            )
        yield start, len(whole)


def _begin(before: Sequence[Any], text: str, template: Render) -> int | None:
    """The place where the template lets the assistant answer; None: it has no prompt for that."""
    if not before:
        return None
    asked = template(before, tokenize=False, add_generation_prompt=True)
    if asked == template(before, tokenize=False) or not text.startswith(asked):
        return None
    return len(asked)
