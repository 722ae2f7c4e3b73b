"""Model and data of a run by name: first weights, batches to train on, batches to evaluate on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.data import ArrayBatches, SyntheticBatches, TextBatches, digits, split_corpus, text, unigram_entropy
from pipefit.data.records import TokenBatches, token_samples
from pipefit.data.token_table import IGNORED, TokenTable
from pipefit.errors import DataError, ModelError
from pipefit.models import ModelBundle, build, parse_options
from pipefit.models.examples import Batch
from pipefit.models.hub import is_folder, limits_of, tokenizer_of
from pipefit.models.registry import hub_bundle
from pipefit.run.config import RunConfig
from pipefit.stage.materialise import can_be_drawn, initialise, is_meta
from pipefit.stage.split import named_layers

_MOST_HELD_OUT = 32
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
class Source:
    """The source of a run's batches.

    Attributes:
        name: for people.
        batches: (input, target), one for each step, with `state_dict` and `load_state_dict`.
        held_out: batches to evaluate on; () when there are none.
        baseline: a loss that a trained model should beat, and its name; None when there is none.
        tokens_per_sample: mean of a text; 0 otherwise.
        longest: maximum number of tokens of a text, for the model of a folder; 0 otherwise.
        counts_hits: whether accuracy is defined.
        example: one of its batches, where it is known without drawing one.
        is_tuned: whether the model was trained before, so that the held-out loss before training is informative.
        tokenizer: of the text for the model of a folder; None: other data.
        prompts: beginnings of held-out sequences of such text.
    """

    name: str
    batches: Any
    held_out: tuple[Any, ...] = ()
    baseline: tuple[str, float] | None = None
    tokens_per_sample: int = 0
    longest: int = 0
    counts_hits: bool = False
    example: Batch | None = None
    is_tuned: bool = False
    tokenizer: Any = None
    prompts: tuple[HeldOutPrompt, ...] = ()

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def example_of(bundle: ModelBundle, source: Source, batch: int) -> Batch:
    """A batch of `batch` samples in the shapes of the run: the model's random example, else one from the data.

    Raises:
        ModelError: there is neither.
    """
    if source.is_tuned and source.example is not None:
        return source.example
    try:
        return bundle.example(batch, 0)
    except ModelError:
        if source.example is None:
            raise
        return source.example


def model_and_data(config: RunConfig, doing: Callable[[str], None]) -> tuple[ModelBundle, Source]:
    """The model of a run and its data.

    Args:
        config: the options of the run.
        doing: takes the part of the run that begins.

    Raises:
        PipefitError: they do not fit together, or one of them cannot be made.
    """
    if is_folder(config.model):
        return _folder_and_data(config, doing)
    doing("building the model and reading the data")
    seed = config.updates.seed
    torch.manual_seed(seed)
    options = parse_options(config.option, config.model)
    bundle = bundle_of(config.model, options, seed, config.request.is_capped)
    return bundle, source_of(bundle, config.data, config.batch, seed, config.eval_data)


def _folder_and_data(config: RunConfig, doing: Callable[[str], None]) -> tuple[ModelBundle, Source]:
    """The model of a folder, without weights, and its data; the user's records are read first, to refuse them soon."""
    seed = config.updates.seed
    is_own = bool(config.data) and not _is_named(config.data)
    if is_own:
        doing("reading the data")
        source = _of_folder(config, config.batch, seed)
    doing("building the model")
    torch.manual_seed(seed)
    with torch.device("meta"):
        bundle = hub_bundle(config.model, parse_options(config.option, config.model), config.lora)
    if is_own:
        return bundle, source
    if config.data or bundle.data != "text":
        return bundle, source_of(bundle, config.data, config.batch, seed, config.eval_data)
    return bundle, _of_folder(config, config.batch, seed)


def _is_named(data: Sequence[str]) -> bool:
    """Returns whether `--data` names a data set that is not text or records."""
    return tuple(data) in (("digits",), ("synthetic",))


def source_of(bundle: ModelBundle, data: Sequence[str], batch: int, seed: int, eval_data: str = "") -> Source:
    """The data of a model.

    Args:
        bundle: the model.
        data: "text", "digits" or "synthetic", or text files; (): the data that suits the model.
        batch: samples per step.
        seed: of the order of the data.
        eval_data: file of text to evaluate on; "": the last tenth of the data.

    Raises:
        DataError: unknown, missing, empty, or unsuitable for the model.
    """
    wanted = tuple(data) or ((bundle.data,) if bundle.data else ("synthetic",))
    if _is_named(wanted) and eval_data:
        raise DataError(f"--eval-data is for text and records; {wanted[0]} has its own, or none")
    if wanted == ("digits",):
        images = digits(seed=seed)
        batches = ArrayBatches(images.train_x, images.train_y, batch, seed=seed)
        first = images.train_x[:batch], images.train_y[:batch]
        return Source("digits", batches, ((images.test_x, images.test_y),), counts_hits=True, example=first)
    if wanted == ("synthetic",):
        return Source("synthetic", SyntheticBatches(bundle.example, batch, seed=seed))
    if is_folder(bundle.name):
        return _of_folder(RunConfig(model=bundle.name, data=wanted, eval_data=eval_data), batch, seed)
    x, _ = bundle.example(1, 0)
    if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.dim() != 2:
        raise DataError(f"text is for language models; {bundle.name} takes other data: use --data synthetic or digits")
    return _of_bytes(wanted, eval_data, x.shape[1], batch, seed)


def _of_bytes(data: Sequence[str], eval_data: str, context: int, batch: int, seed: int) -> Source:
    """Text as bytes; without data to evaluate on, its last tenth is held out."""
    train = text(_files(data))
    if eval_data:
        held = text(eval_data)
    else:
        train, held = split_corpus(train)
    return Source(
        ", ".join(data),
        TextBatches(train, batch, context, seed=seed),
        tuple(TextBatches(held, batch, context, seed=1, num_batches=4)),
        ("unigram entropy", unigram_entropy(train)),
        tokens_per_sample=context,
    )


def _files(names: Sequence[str]) -> list[Path] | None:
    """The files of text or records that `--data` names; None: the built-in text."""
    if tuple(names) in ((), ("text",)):
        return None
    return [Path(name) for name in names]


def _of_folder(config: RunConfig, batch: int, seed: int) -> Source:
    """Text for the model of a folder, by the tokenizer in it; without --eval-data its last tenth is held out.

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
        samples = token_samples(_files(names), tokenizer, context, config.pack, config.learn == "all")
        if samples.highest >= vocabulary:
            raise DataError(
                f"{folder}: its tokenizer gives the token {samples.highest}, but the model knows {vocabulary} tokens; "
                "they do not belong together"
            )
        return samples

    train = read(config.data)
    if config.eval_data:
        held_out = read([config.eval_data])
    else:
        count = len(train) - len(train) // 10
        held_out = train[count:]
        train = train[:count]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    padding = next((token for token in known if token is not None), 0)
    batches = TokenBatches(train, batch, padding, context, seed)
    evaluated: tuple[Any, ...] = ()
    if len(held_out):
        evaluated = tuple(islice(TokenBatches(held_out, batch, padding, context, 1, ragged=True), _MOST_HELD_OUT))
    lengths = train.lengths
    example = batches.batch_at(max(range(len(batches)), key=lambda k: lengths[batches.longest_at(k)]))
    return Source(
        ", ".join(config.data) or "text",
        batches,
        evaluated,
        tokens_per_sample=round(float(lengths.mean())),
        longest=context,
        example=(example, example),
        is_tuned=True,
        tokenizer=tokenizer,
        prompts=tuple(_prompts(held_out)),
    )


def _prompts(held_out: TokenTable) -> Iterator[HeldOutPrompt]:
    """Beginnings of the first held-out sequences."""
    for number in range(min(len(held_out), _MOST_PROMPTS)):
        prompt = _prompt(held_out.ids(number).tolist(), held_out.labels(number).tolist())
        if prompt.tokens and prompt.target:
            yield prompt


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


def bundle_of(model: str, options: dict[str, Any], seed: int, empty: bool) -> ModelBundle:
    """A model for a run, whose weights are the same with and without a cap.

    A model with its own function for a layer's weights draws or reads them layer by layer; with `empty` it comes
    without weights, because each layer gets them later in its place. Any other model is built in memory by its factory.
    """
    with torch.device("meta") if empty else contextlib.nullcontext():
        bundle = build(model, **options)
    layers = named_layers(bundle.layers)
    own = getattr(bundle.layers, "initialise_layer", None)
    if own is None or not can_be_drawn(layers, own):
        if is_meta(layers):
            return build(model, **options)
        return bundle
    if not empty and not is_folder(model):
        initialise(layers, seed, own)
    return bundle
