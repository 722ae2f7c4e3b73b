"""Trains a small network on handwritten digits over a pipeline. Start it in any of three ways:

python examples/train_sequential.py                            all ranks in this process
pipefit run -n 2 examples/train_sequential.py                  processes on this machine
torchrun --nproc-per-node 2 examples/train_sequential.py       processes on a cluster
"""

import torch
from torch import nn

from pipefit import Pipeline
from pipefit.data import ArrayBatches, digits

torch.manual_seed(0)
data = digits()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
pipe = Pipeline(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.AdamW(params, 1e-3), microbatches=4
)
batches = ArrayBatches(data.train_x, data.train_y, batch=64)
for epoch in range(5):
    losses = pipe.fit(batches)
    accuracy = pipe.evaluate([(data.test_x, data.test_y)], metric=lambda out, y: (out.argmax(1) == y).float().mean())[1]
    if pipe.rank == 0:
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, test accuracy {accuracy:.1%}")
