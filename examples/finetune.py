"""Fine-tunes a language model: `pipefit run -n 2 examples/finetune.py MODEL TEXT OUT`.

MODEL is a folder with a causal language model and its tokenizer, such as SmolLM2-135M; OUT becomes a folder of the same
kind.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import pipefit as pf

model, text, out = sys.argv[1:4]
ids = AutoTokenizer.from_pretrained(model)(Path(text).read_text(), return_tensors="pt").input_ids[0]
samples = [{"input_ids": window, "labels": window} for window in ids[: len(ids) // 64 * 64].view(-1, 64)]
loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
pipe = pf.Pipeline(pf.pretrained(model), optimizer=lambda params: torch.optim.AdamW(params, 1e-3), stages=2)
for epoch in range(2):
    losses = pipe.fit(loader)
    if pipe.rank == 0:
        print(f"epoch {epoch}: loss {losses[0]:.3f} → {losses[-1]:.3f}")
pipe.save_pretrained(out)
