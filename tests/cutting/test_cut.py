"""Models that nobody wrote for a pipeline: cut, proved, and trained like one process."""

import functools

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import pipefit as pf
from pipefit.cutting.own import Labels, own_loss, random_batch
from pipefit.errors import ModelError
from pipefit.models import ModelBundle, build, parse_options
from pipefit.testing import check

pytestmark = pytest.mark.slow

TEXT = "hidden_size=32,intermediate_size=64,num_hidden_layers=4,num_attention_heads=4,vocab_size=100"
SEQUENCES = (
    "d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,vocab_size=100,pad_token_id=0,decoder_start_token_id=0"
)
EXPERTS = f"{TEXT},num_key_value_heads=2,num_local_experts=4,output_router_logits=true"
FAMILIES = {
    "GPT2LMHeadModel": ("n_embd=32,n_layer=4,n_head=4,vocab_size=100", "zb-h1"),  # a tied head, dropout between layers
    "LlamaForCausalLM": (f"{TEXT},num_key_value_heads=2", "interleaved"),
    "MixtralForCausalLM": (EXPERTS, "1f1b"),  # the loss of the routers takes all layers' logits at once
    "BertForMaskedLM": (TEXT, "pipedream-2bw"),
    "BartForConditionalGeneration": (SEQUENCES, "zb-h1"),  # two lists of blocks
    "T5ForConditionalGeneration": (  # a bias that one block makes for all
        "d_model=32,d_kv=8,d_ff=64,num_layers=2,num_heads=4,vocab_size=100", "zb-h1"),
    "SwinForImageClassification": ("embed_dim=16,depths=[2,2],num_heads=[2,4],image_size=32,window_size=4", "gpipe"),
    "CLIPVisionModel": (  # without a loss of its own
        "hidden_size=32,intermediate_size=64,num_hidden_layers=4,num_attention_heads=4,image_size=16,patch_size=8",
        "1f1b"),
    "MambaForCausalLM": ("hidden_size=32,num_hidden_layers=4,vocab_size=100,state_size=4", "1f1b"),
}  # fmt: skip


def bundle(family):
    name = f"transformers:{family}"
    return build(name, **parse_options(FAMILIES[family][0], name))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_trains_as_in_one_process(family):
    torch.manual_seed(0)
    schedule = FAMILIES[family][1]
    chunks = 2 if schedule == "interleaved" else 1
    found = check(bundle(family), schedule=schedule, steps=2, parallelism=pf.Parallelism(ranks=2, chunks=chunks))
    assert found.equal, found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("family", "schedule"), [("GPT2LMHeadModel", "zb-h1"), ("LlamaForCausalLM", "pipedream-2bw")])
def test_compiled_blocks_train_as_one_process_does_without(family, schedule):
    torch.manual_seed(0)
    compiled = pf.Precision(compile="aot_eager")
    found = check(bundle(family), schedule=schedule, precision=compiled, parallelism=pf.Parallelism(ranks=2))
    assert max(found.loss_diff, found.grad_diff, found.weight_diff) < 1e-12


def test_blocks_whose_routers_hand_out_more_are_not_compiled():
    with pytest.raises(ModelError, match=r"gathered by hooks.*train it without compile"):
        check(bundle("MixtralForCausalLM"), precision=pf.Precision(compile="aot_eager"))


def test_attention_weights_that_nobody_reads_do_not_travel_to_the_end():
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "rotary_dim": 4, "n_positions": 32}
    made = build("transformers:GPTJForCausalLM", **options, bos_token_id=1, eos_token_id=2).layers
    assert [num_tensors for _, num_tensors in made.crossing] == [1, 1, 1]


class Branches(nn.Module):
    """Two branches that meet; one skips all blocks, so that nothing may be cut inside."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.skipping = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        h = self.first(x) * self.scale
        skipping = self.skipping(h)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.last(h + skipping)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def test_an_own_module_is_cut_before_its_blocks_and_keeps_its_names():
    model = Plain()
    made = pf.cut(model, torch.randn(4, 8))
    assert [layer.name for layer in made.layers] == ["before", *(f"blocks.{i}" for i in range(4)), "after"]
    names = [name for layer in made.layers for name in layer.module.state_dict(prefix=layer.dotted)]
    assert names == list(model.state_dict())
    assert "proved equal" in str(made)


def test_an_own_module_trains_as_in_one_process():
    def example(batch, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 8, generator=generator), torch.randint(0, 3, (batch,), generator=generator)

    made = pf.cut(Plain(), torch.randn(4, 8))
    assert check(made, schedule="1f1b", example=example).equal


def test_a_value_that_skips_all_blocks_is_sent_past_them():
    model = Branches()
    made = pf.cut(model, torch.randn(4, 8))
    assert made.way == "of its traced graph"
    assert [layer.name for layer in made.layers] == ["first", "skipping", *(f"blocks.{n}" for n in range(4)), "last"]
    assert [num_tensors for _, num_tensors in made.crossing] == [1, 2, 2, 2, 2, 1]


def test_a_model_that_raises_on_its_example_is_named_with_the_cause():
    with pytest.raises(ModelError, match="Plain raised RuntimeError on its example: mat1 and mat2"):
        pf.cut(Plain(), torch.randn(4, 9))


class Residual(nn.Module):
    """Sums around the blocks, made by the model itself; what follows them needs more than the last block's output."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved"])
def test_a_module_whose_own_code_adds_around_its_blocks_is_cut_between_them(schedule):
    torch.manual_seed(0)
    model = Residual()
    x, y = torch.randn(8, 8), torch.randn(8, 3)
    made = pf.cut(model, x)
    assert [layer.name for layer in made.layers] == ["before", *(f"blocks.{n}" for n in range(4)), "head", "after"]
    spread = pf.Parallelism(ranks=2, chunks=2 if schedule == "interleaved" else 1)
    bundle = ModelBundle("residual", made, nn.functional.mse_loss, lambda batch, seed=0: (x, y), None, {})
    assert check(bundle, schedule=schedule, steps=2, parallelism=spread).equal


def test_a_parameter_without_elements_is_no_obstacle():
    """MobileBERT has one: the proof could not sum up the rows of its gradient."""
    model = Plain()
    model.blocks[1].register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    model.blocks[1].register_forward_hook(lambda module, given, output: output + module.empty.sum())
    assert len(pf.cut(model, torch.randn(4, 8))) == 6


def test_cuts_by_hand_name_modules_that_are_called_once():
    made = pf.cut(Plain(), torch.randn(4, 8), cuts=["blocks.1", "blocks.3"])
    assert [layer.name for layer in made.layers] == ["before", "blocks.1", "blocks.3", "after"]
    with pytest.raises(ModelError, match=r"no module 'blocks.9'"):
        pf.cut(Plain(), torch.randn(4, 8), cuts=["blocks.9"])


def test_a_module_without_an_example_is_refused():
    with pytest.raises(ModelError, match="give example="):
        pf.Pipeline(Plain(), loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD, stages=2)


def test_a_pipeline_takes_a_model_of_transformers_and_its_dict_batches():
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=100
    )
    model = transformers.LlamaForCausalLM(config)
    batches = [random_batch(model, 8, seed) for seed in range(3)]
    pipe = pf.Pipeline(model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), stages=2, microbatches=4)
    losses = pipe.fit(batches)
    assert len(losses) == 3
    assert pipe.state_dict().keys() == model.state_dict().keys() - {"model.rotary_emb.inv_freq"}
    pipe.close()


def test_nothing_is_dropped_in_an_evaluation():
    made = bundle("GPT2LMHeadModel")
    batch = made.example(8, 0)[0]
    model = made.layers.shell.model
    with torch.no_grad():
        wanted = float(model.eval()(**batch).loss)
    model.train()
    pipe = pf.Pipeline(made.layers, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), stages=2)
    pipe.fit([batch])
    assert pipe.evaluate([batch]) == pytest.approx(wanted, rel=1e-5)
    pipe.fit([batch])
    assert all(module.training for module in model.modules())


def test_a_trained_model_is_saved_as_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = build("transformers:GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=100)
    pipe = pf.Pipeline(model.layers, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), stages=2)
    pipe.fit([model.example(8, 0)[0]])
    state = pipe.state_dict()
    pipe.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    trained = build(str(tmp_path))
    assert torch.equal(trained.layers.shell.model.lm_head.weight, state["lm_head.weight"])


def test_adapters_train_as_in_one_process_and_are_saved_as_peft_reads_them(tmp_path):
    peft = pytest.importorskip("peft")
    made = bundle("LlamaForCausalLM")
    base = made.layers.shell.model
    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)
    model = peft.get_peft_model(base, config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, which would hide an error
            nn.init.normal_(parameter, std=0.02)
    assert check(pf.cut(model), schedule="zb-h1", example=made.example, steps=2).equal
    pipe = pf.Pipeline(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), stages=2)
    pipe.fit([made.example(8, 0)[0]])
    state = pipe.state_dict()
    pipe.save_pretrained(tmp_path)
    again = bundle("LlamaForCausalLM").layers.shell.model
    again.load_state_dict(frozen)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).state_dict()
    assert (tmp_path / "adapter_config.json").is_file()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_a_sequence_of_layers_has_no_folder_of_transformers(tmp_path):
    pipe = pf.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loss=nn.functional.mse_loss,
                       optimizer=torch.optim.SGD, stages=2)  # fmt: skip
    with pytest.raises(ModelError, match="is not a model of transformers"):
        pipe.save_pretrained(tmp_path)


def test_a_batch_may_leave_out_the_mask_that_the_proof_has():
    torch.manual_seed(0)
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=60, dropout_rate=0.0,
                      pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    batch = {"input_ids": torch.randint(60, (4, 7)), "labels": torch.randint(60, (4, 5))}
    loss = model(**batch).loss.item()
    pipe = pf.Pipeline(model, optimizer=torch.optim.SGD, stages=2, microbatches=2)
    assert pipe.fit([batch]) == pytest.approx([loss], rel=1e-5)


def test_labels_that_are_ignored_do_not_count():
    batch = {"labels": torch.tensor([[5, 6, -100, 7], [-100, 8, 9, -100]])}
    assert Labels(shifted=False)(batch) == 5
    assert Labels(shifted=True)(batch) == 4
    assert Labels(shifted=False)({"labels": torch.tensor([2, -100, 0])}) == 2


def test_a_micro_batch_without_labels_that_count_has_loss_0():
    batch = {"labels": torch.full((2, 3), -100)}
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = own_loss({"loss": torch.tensor(float("nan")), "logits": logits}, batch, Labels(shifted=True))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("transformers:LlamaForCasualLM", {}, r"no model class.*LlamaForCausalLM"),
        (
            "transformers:LlamaForCausalLM",
            {"hidden": 3},
            "no field 'hidden'",
        ),
    ],
)
def test_what_transformers_does_not_know_is_refused(name, options, message):
    with pytest.raises(ModelError, match=message):
        build(name, **options)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is a pickle.*save_pretrained"):
        build(str(tmp_path))


class Biased(nn.Module):
    """Has a buffer of its own, next to its blocks, as BART has."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("bias", torch.ones(4))
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale + self.bias


def test_buffers_of_the_model_itself_are_in_its_state():
    model = Biased()
    made = pf.cut(model, torch.randn(4, 4))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    pipe = pf.Pipeline(made, loss=nn.functional.mse_loss, optimizer=sgd, stages=2, microbatches=1)
    assert made.way == "around its blocks" and pipe.state_dict().keys() == model.state_dict().keys()
