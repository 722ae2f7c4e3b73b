"""Trains a masked language model: `pipefit run -n 2 examples/trainer/masked_lm.py`."""

import texts
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, TrainingArguments, set_seed

from pipefit.integrations.transformers import PipelineTrainer


def trainer(kind=PipelineTrainer, folder="runs/masked-lm", **more):
    set_seed(0)
    lines = texts.sentences(80)
    tokenizer = texts.tokenizer_of(lines)
    samples = [dict(tokenizer(line)) for line in lines]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **off))
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
    }
    return kind(
        model=model,
        args=TrainingArguments(folder, **{**settings, **more}),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        train_dataset=samples[:64],
        eval_dataset=samples[64:],
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    trainer().train()
