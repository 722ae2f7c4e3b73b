"""Trains adapters of peft over a frozen language model: `pipefit run -n 2 examples/trainer/lora.py`."""

import causal_lm
from peft import LoraConfig, get_peft_model

from pipefit.integrations.transformers import PipelineTrainer


def trainer(kind=PipelineTrainer, folder="runs/lora", **more):
    def adapted(model, **options):
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return kind(model=get_peft_model(model, config), **options)

    return causal_lm.trainer(adapted, folder, **{"learning_rate": 1e-2, **more})


if __name__ == "__main__":
    tuned = trainer()
    tuned.train()
    tuned.save_model()
