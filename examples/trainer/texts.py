"""Small real data that comes with Python and its packages, and tokenizers for it; no download."""

import argparse
import difflib
import enum
import heapq
import io
import json
import keyword
import pathlib
import pickle
import pprint
import random
import re
import statistics
import tarfile
import textwrap
import tokenize

import tokenizers
from transformers import PreTrainedTokenizerFast

from pipefit.data import text

_KINDS = {tokenize.NAME: "name", tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator"}
KINDS = ["keyword", "name", "number", "operator", "string"]


def sentences(number: int) -> list[str]:
    """Sentences of Python's language reference."""
    prose = re.sub(r"\s+", " ", text().decode())
    return [one for one in re.split(r"(?<=[.:]) ", prose) if 20 < len(one) < 120][:number]


def descriptions(number: int) -> list[str]:
    """Sentences in which some of Python's modules describe themselves."""
    modules = (argparse, difflib, enum, heapq, pickle, pprint, random, statistics, tarfile, textwrap)
    prose = re.sub(r"\s+", " ", " ".join(module.__doc__ or "" for module in modules))
    return [one for one in re.split(r"(?<=[.:,]) ", prose) if len(one) > 20][:number]


def code(number: int) -> list[tuple[list[str], list[int]]]:
    """Lines of the source of Python's own `json`, as words with the kind of each."""
    lines = []
    for path in sorted(pathlib.Path(json.__file__).parent.glob("*.py")):
        words: list[str] = []
        kinds: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in _KINDS and len(token.string) < 20:
                words.append(token.string)
                kinds.append(KINDS.index("keyword" if keyword.iskeyword(token.string) else _KINDS[token.type]))
            elif token.type == tokenize.NEWLINE and len(words) > 3:
                lines.append((words, kinds))
                words, kinds = [], []
    return lines[:number]


def tokenizer_of(lines: list[str], **options: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator(lines, tokenizers.trainers.WordLevelTrainer(vocab_size=1000, special_tokens=special))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "cls_token": "[CLS]", **options}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)
