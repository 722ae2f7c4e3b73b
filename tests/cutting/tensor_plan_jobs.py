"""Functions that ranks run in the tests of tensor plans of transformers."""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import pipefit as pf
from pipefit.cutting.own import random_batch
from pipefit.errors import PipefitError
from pipefit.spec.options import Parallelism, Request, Updates
from pipefit.testing import Case, run_pipeline

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0}  # fmt: skip
WIDE = {**SIZES, "head_dim": 8}
TIED = {**SIZES, "tie_word_embeddings": True}
LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.2, "task_type": "CAUSAL_LM"}
TWO = {
    "Llama": ("LlamaForCausalLM", SIZES, {}),
    "tied, dropout in attention, recomputed": (
        "LlamaForCausalLM", {**TIED, "attention_dropout": 0.2}, {"recompute": True}),
    "tied, dropout in attention, layers replayed": (
        "LlamaForCausalLM", {**TIED, "attention_dropout": 0.2}, {"recompute": "layer"}),
    "dropout in attention, which is replayed": (
        "LlamaForCausalLM", {**TIED, "attention_dropout": 0.2}, {"recompute": "selective"}),
    "dropout in eager attention": ("LlamaForCausalLM", {**SIZES, "attention_dropout": 0.2, "eager": True}, {}),
    "a vocabulary that two does not divide": ("LlamaForCausalLM", {**TIED, "vocab_size": 101}, {}),
    "Mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 5}, {}),
    "Qwen 2, biases": ("Qwen2ForCausalLM", SIZES, {}),
    "Qwen 3, norms of heads": ("Qwen3ForCausalLM", WIDE, {"clip_norm": 0.1}),
    "Gemma 2, scaled tied embedding": ("Gemma2ForCausalLM", {**WIDE, "attn_logit_softcapping": None}, {}),
    "Phi 3, fused": ("Phi3ForCausalLM", SIZES, {}),
    "StarCoder 2, dropout": ("Starcoder2ForCausalLM", {
        **SIZES, "attention_dropout": 0.2, "residual_dropout": 0.1, "embedding_dropout": 0.1}, {}),
    "OLMo 2, norms after attention": ("Olmo2ForCausalLM", SIZES, {}),
    "GPT-NeoX, heads in one weight": ("GPTNeoXForCausalLM", {**SIZES, "attention_dropout": 0.2}, {}),
    "Mixtral, losses of routers": ("MixtralForCausalLM", {
        **SIZES, "num_local_experts": 4, "output_router_logits": True}, {}),
    "adapters, dropout": ("LlamaForCausalLM", {**SIZES, "attention_dropout": 0.1, "lora": LORA}, {}),
    "adapters of a fused model": ("Phi3ForCausalLM", {**SIZES, "lora": LORA}, {}),
}  # fmt: skip
FOUR = {
    "Qwen 3, interleaved, tied": (
        "Qwen3ForCausalLM", {**WIDE, "tie_word_embeddings": True}, {"chunks": 2, "schedule": "interleaved"}),
    "Gemma 2, zero bubble": ("Gemma2ForCausalLM", WIDE, {"schedule": "zb-h1"}),
    "Starcoder 2, two copies": ("Starcoder2ForCausalLM", SIZES, {"replicas": (2,)}),
    "Mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4}, {"whole_messages": True}),
    "adapters, dropout": ("LlamaForCausalLM", {**SIZES, "attention_dropout": 0.2, "lora": LORA}, {}),
    "dropout, layers replayed": ("LlamaForCausalLM", {**TIED, "attention_dropout": 0.2}, {"recompute": "layer"}),
}  # fmt: skip


def model(kind, fields):
    torch.manual_seed(0)
    found = getattr(transformers, kind)
    own = {name: value for name, value in fields.items() if name not in ("eager", "lora")}
    config = found.config_class(**own)
    config._experts_implementation = "eager"
    if fields.get("eager"):
        config._attn_implementation = "eager"
    made = found(config)
    if "lora" in fields:
        made = get_peft_model(made, LoraConfig(**fields["lora"]))
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return made.double().train()


def case(kind, fields, options, processes):
    made = pf.cut(model(kind, fields))
    batches = [random_batch(made.shell.model, 5, seed) for seed in range(2)]
    options = dict(options)
    schedule = options.pop("schedule", "1f1b")
    updates = Updates(weigh=made.weigh, clip_norm=options.pop("clip_norm", None))
    spread = Parallelism(ranks=processes, tensor=2, **options)
    stages = 1 if processes == 2 or spread.copies else 2 * spread.chunks
    counts = [len(made) // stages + (stage < len(made) % stages) for stage in range(stages)]
    request = Request(schedule, 2, parallelism=spread)
    return Case(made, [(b, b) for b in batches], tuple(counts), request, updates=updates, loss=made.loss)


def outcomes(names, processes):
    """This process's part of some cases."""
    cases = {2: TWO, 4: FOUR}[processes]
    return [run_pipeline(case(*cases[name], processes)) for name in names]


def train_forgetful():
    """Trains a model with a plan that forgets a weight."""
    run_pipeline(case("ApertusForCausalLM", SIZES, {}, 2))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def prompts():
    return torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(0))


def facts_of_folders(folders):
    return [facts_of(folder) for folder in folders]


def facts_of(folder):
    """Weights of a folder, text, and what is saved after a step; two stages over two processes each."""
    pipe = pf.Pipeline(pf.pretrained(folder), optimizer=sgd, stages=2, microbatches=2,
                       parallelism=Parallelism(tensor=2))  # fmt: skip
    held = [p.numel() for worker in pipe.workers for stage in worker.stages.values() for p in stage.parameters()]
    found = {"state": pipe.state_dict(), "held": sum(held)}
    found["text"] = pipe.generate(prompts(), max_new_tokens=5)
    found["drawn"] = pipe.generate(prompts(), max_new_tokens=5, do_sample=True, seed=3)
    batch = random_batch(pipe.layers[0].module.shell.model, 4)
    pipe.fit([batch])
    found["loss"] = pipe.evaluate([batch])
    pipe.save(f"{folder}/checkpoint")
    pipe.save_pretrained(f"{folder}/saved")
    try:
        pipe.save_pretrained("/dev/null/no-folder")
    except PipefitError as problem:
        found["error"] = str(problem)
    pipe.close()
    found["kinds"] = sorted({type(module).__name__ for layer in pipe.layers for module in layer.module.modules()})
    return found
