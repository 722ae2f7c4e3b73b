"""Tells sentences of two books apart: `pipefit run -n 2 examples/trainer/sequence_classification.py`."""

import texts
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

from pipefit.integrations.transformers import PipelineTrainer


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def trainer(kind=PipelineTrainer, folder="runs/sequence-classification", **more):
    set_seed(0)
    pairs = [(line, 0) for line in texts.sentences(60)] + [(line, 1) for line in texts.descriptions(60)]
    tokenizer = texts.tokenizer_of([line for line, _ in pairs])
    samples = [{**tokenizer(line, truncation=True, max_length=48), "label": label} for line, label in pairs]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes, **off))
    settings = {
        "per_device_train_batch_size": 16,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
    }
    return kind(
        model=model,
        args=TrainingArguments(folder, **{**settings, **more}),
        train_dataset=[one for place, one in enumerate(samples) if place % 5],
        eval_dataset=samples[::5],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )


if __name__ == "__main__":
    tuned = trainer()
    tuned.train()
    print(tuned.evaluate())
