"""Trains a causal language model: `pipefit run -n 2 examples/trainer/causal_lm.py`."""

import texts
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from pipefit.integrations.transformers import PipelineTrainer


def trainer(kind=PipelineTrainer, folder="runs/causal-lm", **more):
    set_seed(0)
    lines = texts.sentences(120)
    tokenizer = texts.tokenizer_of(lines)
    samples = [{"input_ids": tokenizer(line)["input_ids"]} for line in lines]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes))
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "no",
    }
    return kind(
        model=model,
        args=TrainingArguments(folder, **{**settings, **more}),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=samples[:100],
        eval_dataset=samples[100:],
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    tuned = trainer()
    tuned.train()
    tuned.save_model()
