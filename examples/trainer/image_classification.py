"""Trains a vision transformer on digits: `pipefit run -n 2 examples/trainer/image_classification.py`."""

from transformers import EarlyStoppingCallback, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from pipefit.data import digits
from pipefit.integrations.transformers import PipelineTrainer


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def trainer(kind=PipelineTrainer, folder="runs/image-classification", patience=3, **more):
    set_seed(0)
    data = digits()
    images = [{"pixel_values": x, "labels": y} for x, y in zip(data.train_x, data.train_y, strict=True)]
    tests = [{"pixel_values": x, "labels": y} for x, y in zip(data.test_x, data.test_y, strict=True)]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))
    settings = {
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "num_train_epochs": 10,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 25,
        "save_strategy": "steps",
        "save_steps": 25,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
    }
    return kind(
        model=model,
        args=TrainingArguments(folder, **{**settings, **more}),
        train_dataset=images[:800],
        eval_dataset=tests[:128],
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=patience)],
    )


if __name__ == "__main__":
    trainer().train()
