"""Blocks that loop over tokens: counts that follow from short sequences are those of the whole sequence."""

import math
from collections import Counter

import pytest

from pipefit.models.hub import without_weights
from pipefit.profiling import count_model, loops, model_count

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

MAMBA = {"hidden_size": 100, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
MAMBA2 = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
JAMBA = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
JAMBA |= {"attn_layer_period": 4, "attn_layer_offset": 3, "num_hidden_layers": 4, "vocab_size": 50, "num_experts": 4}
GRIFFIN = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}


def counted(monkeypatch, name, options, most, tokens=66):
    """The count where a forward of a block has at most so many kernels; how many blocks follow from short sequences."""
    monkeypatch.setattr(model_count, "_MOST", most)
    followed = []

    def noted(*args):
        found = loops.extrapolated(*args)
        followed.append(found)
        return found

    monkeypatch.setattr(model_count, "extrapolated", noted)
    found = count_model(lambda: without_weights(f"transformers:{name}", options), tokens)
    return found, len(followed)


def work(counted):
    """The figures of each layer, and how often it runs each kernel, at both sizes."""
    found = []
    for kind in counted.kinds:
        for count in counted.counts[kind]:
            ways = []
            for kernels in (count.forward, count.backward_input, count.backward_weight, count.cores):
                numbers = Counter()
                for kernel in kernels:
                    numbers[kernel.kind, kernel.sizes] += kernel.times
                ways.append(numbers)
            found.append((count.figures, ways))
    return found


@pytest.mark.parametrize(
    ("name", "options", "most", "followed"),
    [
        ("MambaForCausalLM", MAMBA, 200, True),
        ("FalconMambaForCausalLM", MAMBA, 200, True),
        ("JambaForCausalLM", JAMBA, 200, True),
        ("JambaForCausalLM", JAMBA | {"num_experts": 16}, 200, True),  # tokens of an expert are no whole number
        ("RecurrentGemmaForCausalLM", GRIFFIN, 200, True),
        # Chunks, and no loop: too many kernels, which do not follow from short sequences.
        ("Mamba2ForCausalLM", MAMBA2 | {"num_hidden_layers": 2, "vocab_size": 50}, 20, False),
        ("LlamaForCausalLM", LLAMA, 10, False),
    ],
)
def test_a_loop_over_tokens_is_counted_as_if_it_were_run(monkeypatch, name, options, most, followed):
    fast, times = counted(monkeypatch, name, options, most)
    whole, none = counted(monkeypatch, name, options, math.inf)
    assert (times > 0, none) == (followed, 0)
    assert work(fast) == work(whole)
    assert (fast.flops, fast.num_parameters, fast.shared) == (whole.flops, whole.num_parameters, whole.shared)


def test_a_loop_that_begins_otherwise_in_a_long_sequence_is_run(monkeypatch):
    from transformers.models.mamba import modeling_mamba

    scan = modeling_mamba.mamba_selective_scan

    def branching(hidden_states, *args, **kwargs):
        if hidden_states.shape[-1] > 64:
            hidden_states = hidden_states.exp()
        return scan(hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", branching)
    fast, times = counted(monkeypatch, "MambaForCausalLM", MAMBA, 200)
    whole, _ = counted(monkeypatch, "MambaForCausalLM", MAMBA, math.inf)
    assert not times
    assert work(fast) == work(whole)
