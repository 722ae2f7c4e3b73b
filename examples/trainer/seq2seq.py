"""Restores capital letters with an encoder and a decoder: `pipefit run -n 2 examples/trainer/seq2seq.py`."""

import texts
from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration, TrainingArguments, set_seed

from pipefit.integrations.transformers import PipelineTrainer


def trainer(kind=PipelineTrainer, folder="runs/seq2seq", **more):
    set_seed(0)
    lines = texts.sentences(64)
    tokenizer = texts.tokenizer_of(lines + [line.lower() for line in lines], eos_token="[SEP]")
    samples = [{**tokenizer(line.lower()), "labels": tokenizer(line)["input_ids"]} for line in lines]
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes, **tokens))
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "optim": "adafactor",
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
    }
    return kind(
        model=model,
        args=TrainingArguments(folder, **{**settings, **more}),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=samples[:56],
        eval_dataset=samples[56:],
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    trainer().train()
