"""Finds the kinds of words in Python code: `pipefit run -n 2 examples/trainer/token_classification.py`."""

import texts
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    TrainingArguments,
    set_seed,
)

from pipefit.integrations.transformers import PipelineTrainer


def accuracy(found):
    counted = found.label_ids != -100
    return {"accuracy": float((found.predictions.argmax(2) == found.label_ids)[counted].mean())}


def trainer(kind=PipelineTrainer, folder="runs/token-classification", **more):
    set_seed(0)
    lines = texts.code(100)
    tokenizer = texts.tokenizer_of([" ".join(words) for words, _ in lines])
    samples = []
    for words, kinds in lines:
        sample = tokenizer(words, is_split_into_words=True, truncation=True, max_length=48)
        labels = [-100 if place is None else kinds[place] for place in sample.word_ids()]
        samples.append({**sample, "labels": labels})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=len(texts.KINDS), **sizes, **off)
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "label_smoothing_factor": 0.1,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
    }
    return kind(
        model=BertForTokenClassification(config),
        args=TrainingArguments(folder, **{**settings, **more}),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        train_dataset=samples[:80],
        eval_dataset=samples[80:],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )


if __name__ == "__main__":
    trainer().train()
