"""Folders of tiny models as `save_pretrained` writes them, with tokenizers."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipefit.data import text

CHAT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('who?') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<end>{% endfor %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def save_tokenizer(folder, vocabulary=300):
    """A byte-level tokenizer trained on the first of the built-in text; <end> ends a sequence."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    made.train_from_iterator([text().decode()[:20_000]], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return fast


def save_model(folder, kind="LlamaForCausalLM", shard="1GB", **fields):
    """A model with random weights; the same ones every time."""
    torch.manual_seed(0)
    found = getattr(transformers, kind)
    config = found.config_class(**({"vocab_size": 300, "num_key_value_heads": 2, **SIZES} | fields))
    model = found(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def llama_folder(folder):
    """A tiny Llama with a tied head, and its tokenizer."""
    save_tokenizer(folder)
    return save_model(folder, tie_word_embeddings=True, max_position_embeddings=128, eos_token_id=0, pad_token_id=0)
