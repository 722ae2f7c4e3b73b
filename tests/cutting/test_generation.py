"""Text from stages is the text of the whole model, token by token."""

import copy

import pytest
import torch
import transformers
from torch import nn

import pipefit as pf
from pipefit.cutting.own import random_batch
from pipefit.errors import DataError, ModelError
from pipefit.runtime.launch import launch
from pipefit.spec.options import Parallelism, Spilled

pytestmark = pytest.mark.slow

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
FAMILIES = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "MistralForCausalLM": {**GROUPED, "sliding_window": 5},
    "Gemma2ForCausalLM": {**GEMMA, "tie_word_embeddings": False},
    "Gemma3ForCausalLM": {**GEMMA, "tie_word_embeddings": False},
    "GPT2LMHeadModel": GPT,  # a tied head, dropout
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},  # blocks give attention weights too
    "GPTNeoXForCausalLM": TEXT,
    "Phi3ForCausalLM": GROUPED,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
    "OPTForCausalLM": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                       "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "MambaForCausalLM": {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    "JambaForCausalLM": {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                         "mamba_d_state": 4, "mamba_d_conv": 4, "use_mamba_kernels": False},
}  # fmt: skip
NEW = 9


def model_of(kind="LlamaForCausalLM", **fields):
    """A model that says many things: of large random weights, in float64."""
    torch.manual_seed(0)
    found = getattr(transformers, kind)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = found.config_class(**{"vocab_size": 100, **ends, **FAMILIES.get(kind, {}), **fields})
    config._experts_implementation = "eager"
    model = found(config).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.35)
    return model.train()


def prompts():
    """Three prompts, two of which are padded on their left."""
    ids = torch.randint(3, 100, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    return ids * mask, mask


def whole(model, mask=None, **options):
    """The text of the whole model, which then trains as before."""
    ids, padded = prompts()
    silent = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
    usual = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": padded if mask is None else mask}
    text = model.eval().generate(ids, **{**usual, **silent, **options})
    model.train()
    return text


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.01)


@pytest.mark.parametrize("kind", FAMILIES)
def test_stages_write_what_the_whole_model_writes(kind):
    model = model_of(kind)
    # A token that is written early, so that rows end at different times.
    end = int(whole(model)[1, 9])
    texts = [whole(model), whole(model, eos_token_id=end), whole(model, mask=prompts()[1].fill_(1))]
    made = pf.cut(model)
    assert len({tuple(row) for row in texts[0].tolist()}) == 3
    for stages, chunks in ((1, 1), (2, 1), (3, 1), (4, 2), (len(made), 1)):
        more = {"parallelism": Parallelism(chunks=chunks), "schedule": "interleaved" if chunks > 1 else "1f1b"}
        pipe = pf.Pipeline(made, optimizer=sgd, stages=stages, **more)
        ids, mask = prompts()
        assert torch.equal(pipe.generate(ids, mask, max_new_tokens=NEW), texts[0])
        assert torch.equal(pipe.generate(ids, mask, max_new_tokens=NEW, eos_token_id=end), texts[1])
        assert torch.equal(pipe.generate(ids, torch.ones_like(ids), max_new_tokens=NEW), texts[2])
        pipe.close()


DRAWN = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95}


def test_drawn_tokens_are_those_of_the_whole_model_with_this_seed():
    model = model_of()
    torch.manual_seed(5)
    text = whole(model, **DRAWN)
    torch.manual_seed(5)
    free = whole(model, do_sample=True, top_k=0)
    pipe = pf.Pipeline(model, optimizer=sgd, stages=2)
    state = torch.random.get_rng_state()
    assert torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW, seed=5, **DRAWN), text)
    assert torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW, seed=5, do_sample=True), free)
    assert not torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW, seed=6, **DRAWN), text)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_text_between_steps_changes_no_step(kind):
    losses = []
    for writes in (False, True):
        model = model_of(kind)
        batches = [random_batch(model, 4, seed) for seed in range(2)]
        pipe = pf.Pipeline(model, optimizer=sgd, stages=2, microbatches=2)
        modules = [module for layer in pipe.layers for module in layer.module.shell.model.modules()]
        modules[-1].eval()  # by its user
        modes = [module.training for module in modules]
        found = [] if not writes else [pipe.generate(*prompts(), max_new_tokens=2)]
        assert [module.training for module in modules] == modes
        found = pipe.fit(batches)
        if writes:
            before = pipe.generate(*prompts(), max_new_tokens=NEW)
            model.load_state_dict(pipe.state_dict(), strict=False)
            assert torch.equal(before, whole(model))
        losses.append(found + pipe.fit(batches))
    assert losses[0] == losses[1]


class Merged(nn.Linear):
    """Adds an adapter, in evaluation mode to the weight itself, as loralib does."""

    is_merged = False

    def train(self, mode=True):
        if self.is_merged == mode:
            with torch.no_grad():
                self.weight += self.adapter if not mode else -self.adapter
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x):
        added = 0 if self.is_merged else nn.functional.linear(x, self.adapter)
        return super().forward(x) + added


def test_text_leaves_adapters_as_they_were_that_are_merged_for_it():
    model = model_of()
    for layer in model.model.layers:
        merged = Merged(32, 32, bias=False).double()
        merged.adapter = nn.Parameter(torch.randn(32, 32, dtype=torch.float64) / 4)
        layer.self_attn.q_proj = merged
    text = whole(model)
    pipe = pf.Pipeline(model, optimizer=sgd, stages=2, microbatches=2)
    assert torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW), text)
    before = copy.deepcopy(model)
    pipe.fit([random_batch(model, 4)])
    for layer, untrained in zip(model.model.layers, before.model.layers, strict=True):
        assert not torch.equal(layer.self_attn.q_proj.adapter, untrained.self_attn.q_proj.adapter)


def test_each_token_is_one_forward_and_only_its_hidden_states_travel():
    model = model_of()
    lengths, sent = [], []
    model.model.layers[2].register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
    pipe = pf.Pipeline(pf.cut(model), optimizer=sgd, stages=2)
    lengths.clear()
    transport, ended = pipe.engine.transports[0], pipe.engine.run

    def run(*args, **kwargs):
        executions = ended(*args, **kwargs)
        sent.append(transport.bytes_sent)
        return executions

    pipe.engine.run = run
    pipe.generate(*prompts(), max_new_tokens=4)
    assert lengths in ([7, 1, 1, 1], [7, 7, 1, 1, 1, 1, 1, 1])  # the border's own block is reached, then run
    assert sent == [3 * length * 32 * 8 for length in (7, 1, 1, 1)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_spilled_stages_write_the_same_text(tmp_path):
    for spill in (Spilled("500 KiB"), Spilled(disk=tmp_path)):
        model = model_of()
        text = whole(model)
        more = {"example": random_batch(model, 4)} if spill.disk is None else {"stages": 3}
        pipe = pf.Pipeline(model, optimizer=sgd, spill=spill, microbatches=2, **more)
        assert pipe.program.header.spill is not None
        assert torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW), text)
        pipe.close()


def test_adapters_write_with_their_model():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of(), peft.LoraConfig(r=4, target_modules="all-linear")).double()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros, which would hide an error
            nn.init.normal_(parameter, std=0.3)
    text = whole(adapted)
    assert not torch.equal(text, whole(model_of()))
    pipe = pf.Pipeline(adapted, optimizer=sgd, stages=2)
    assert torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW), text)


def test_a_folder_brings_its_own_settings_of_generation_and_keeps_them(tmp_path):
    model = model_of().float()
    end = int(whole(model)[1, 9])
    model.generation_config.eos_token_id = [99, end]
    model.save_pretrained(tmp_path / "first")
    pipe = pf.Pipeline(pf.pretrained(tmp_path / "first"), optimizer=sgd, stages=2)
    assert torch.equal(pipe.generate(*prompts(), max_new_tokens=NEW), whole(model))
    pipe.save_pretrained(tmp_path / "second")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "second").eos_token_id == [99, end]


def writes(cases):
    """Text of a rank before and after a step, and its refusal of prompts that differ between ranks."""
    found = []
    for kind, stages, chunks, copies in cases:
        model = model_of(kind)
        batch = random_batch(model, 4)
        more = {"parallelism": Parallelism(chunks=chunks, data_parallel=copies)}
        more["schedule"] = "interleaved" if chunks > 1 else "1f1b"
        pipe = pf.Pipeline(model, optimizer=sgd, stages=stages, microbatches=2, **more)
        ids, mask = prompts()
        texts = [pipe.generate(ids, mask, max_new_tokens=NEW)]
        pipe.fit([batch])
        texts.append(pipe.generate(ids, mask, max_new_tokens=NEW))
        texts.append(pipe.generate(ids, mask, max_new_tokens=NEW, seed=3, **DRAWN))
        found.append([text.tolist() for text in texts])
    try:
        pipe.generate(ids + pipe.rank, max_new_tokens=2)
    except DataError as problem:
        return found, str(problem)
    return found, ""


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("GPT2LMHeadModel", 2, 1, 1), ("MistralForCausalLM", 4, 2, 1), ("MixtralForCausalLM", 1, 1, 2)]),
        pytest.param(3, [("Gemma3ForCausalLM", 3, 1, 1), ("OPTForCausalLM", 3, 1, 1)], marks=pytest.mark.slow),
    ],
)
def test_processes_write_what_the_whole_model_writes(ranks, cases):
    wanted, _ = writes(cases)
    assert [texts[0] for texts in wanted] == [whole(model_of(kind)).tolist() for kind, *_ in cases]
    for found, refused in launch(writes, ranks, cases, quiet=True):
        assert found == wanted
        assert "different prompts" in refused


SEQUENCES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("T5ForConditionalGeneration", SEQUENCES, "T5ForConditionalGeneration encodes its input before it decodes"),
        ("LlamaForSequenceClassification", GROUPED, "not LlamaForSequenceClassification"),
        (
            "RwkvForCausalLM",
            {"hidden_size": 32, "num_hidden_layers": 2},
            "RwkvForCausalLM keeps earlier tokens in its own format",
        ),
        (
            "RecurrentGemmaForCausalLM",
            {**TEXT, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8},
            r"RecurrentGemmaForCausalLM keeps earlier tokens in its own.*layers 0, 1, 3",
        ),
    ],
)
def test_what_cannot_write_in_stages_is_refused(kind, fields, why):
    pipe = pf.Pipeline(model_of(kind, **fields), optimizer=sgd, stages=1)
    with pytest.raises(ModelError, match=why):
        pipe.generate(*prompts(), max_new_tokens=2)


def test_layers_that_write_nothing_are_refused():
    pipe = pf.Pipeline([nn.Linear(2, 2)], loss=nn.functional.mse_loss, optimizer=sgd, stages=1)
    with pytest.raises(ModelError, match="not a sequence of layers"):
        pipe.generate(*prompts(), max_new_tokens=2)


def test_prompts_are_a_tensor_of_token_ids():
    pipe = pf.Pipeline(model_of(), optimizer=sgd, stages=2)
    for wrong, what in (
        (torch.zeros(3), r"float32 \[3\]"),
        ([[1, 2]], "list"),
        (torch.zeros(1, 0).long(), r"\[1, 0\]"),
    ):
        with pytest.raises(DataError, match=what):
            pipe.generate(wrong, max_new_tokens=2)
