"""Trains LoRA adapters over a frozen language model: `pipefit run -n 2 examples/lora.py MODEL OUT`.

MODEL is a folder with a causal language model and its tokenizer; OUT becomes a folder for `PeftModel.from_pretrained`.
"""

import sys

import torch
from transformers import AutoTokenizer

import pipefit as pf

model, out = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(model)
sums = [f"{a} plus {b} is {a + b}." for a in range(10) for b in range(10)]
batch = dict(tokenizer(sums, padding=True, return_tensors="pt", return_token_type_ids=False))
batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
adapted = pf.pretrained(model, lora="r=8,alpha=16,target=all-linear")
pipe = pf.Pipeline(adapted, optimizer=lambda params: torch.optim.AdamW(params, 1e-2), stages=2)
losses = pipe.fit([batch] * 10)
if pipe.rank == 0:
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
pipe.save_pretrained(out)
