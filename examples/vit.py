"""Trains a vision transformer of Hugging Face on digits: `pipefit run -n 2 examples/vit.py`."""

import torch
from transformers import ViTConfig, ViTForImageClassification

import pipefit as pf
from pipefit.data import digits

torch.manual_seed(0)
data = digits()
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))
images = [{"pixel_values": x, "labels": y} for x, y in zip(data.train_x, data.train_y, strict=True)]
loader = torch.utils.data.DataLoader(images, batch_size=64, shuffle=True)
pipe = pf.Pipeline(model, optimizer=lambda params: torch.optim.AdamW(params, 3e-3), stages=2)
test = {"pixel_values": data.test_x, "labels": data.test_y}
for epoch in range(3):
    pipe.fit(loader)
    loss, hits = pipe.evaluate([test], metric=lambda out, y: (out["logits"].argmax(1) == y["labels"]).float().mean())
    if pipe.rank == 0:
        print(f"epoch {epoch}: test loss {loss:.3f}, accuracy {hits:.1%}")
