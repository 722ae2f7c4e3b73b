"""Trains a module of your own, with branches: `pipefit run -n 2 examples/own_module.py`."""

import torch
from torch import nn

import pipefit as pf


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.skip, self.head = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))

    def forward(self, x, scale):
        h = self.embed(x) * scale
        for block in self.blocks:
            h = h + block(h)
        return self.head(h + self.skip(x))


batch = (torch.randn(256, 16), torch.rand(256, 1)), torch.randint(4, (256,))
adam = lambda params: torch.optim.Adam(params, 3e-3)  # noqa: E731
pipe = pf.Pipeline(Tower(), loss=nn.CrossEntropyLoss(), optimizer=adam, stages=2, example=batch)
losses = pipe.fit([batch] * 30)
if pipe.rank == 0:
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
