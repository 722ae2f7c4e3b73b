"""Plain values between stages are part of the structure that ranks agree on once, in one process and in several."""

import pytest
import torch
from tests.runtime.value_jobs import VALUES, batches, fickle, loss, model, trained
from torch import nn

import pipefit as pf
from pipefit.errors import ModelError
from pipefit.runtime.launch import launch
from pipefit.stage.payload import Contract, Structure, flatten, unflatten


def reference():
    """One process, micro-batch by micro-batch, since a layer multiplies by the number of samples that it gets."""
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    losses = []
    for x, target in [*batches(2), *batches(2, size=5)]:
        total = 0.0
        for part, wanted in zip(x.tensor_split(2), target["y"].tensor_split(2), strict=True):
            value = loss(whole(part), {"y": wanted}) * len(part) / len(x)
            value.backward()
            total += value.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("zb-h1", False), ("gpipe", True)])
def test_values_flow_with_the_tensors_and_change_nothing(schedule, recompute):
    losses, held_out = trained(schedule=schedule, parallelism=pf.Parallelism(recompute=recompute))
    assert losses == pytest.approx(reference(), rel=1e-12) and held_out > 0


def test_values_wait_with_spilled_inputs():
    spread, spill = pf.Parallelism(ranks=1, chunks=3), pf.Spilled(activations=True)
    assert trained(schedule="spilled", parallelism=spread, spill=spill)[0] == pytest.approx(reference(), rel=1e-12)


@pytest.mark.dist
def test_values_reach_other_processes():
    assert launch(trained, 3, None, threads=1) == [trained()] * 3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("float", "stage 0 gave the value 2.0 for micro-batch 1, but 1.0 for an earlier"),
        ("type", "value True .* but 1 "),
    ],
)
def test_a_value_that_changes_is_refused_with_a_remedy(kind, message):
    with pytest.raises(ModelError, match=message + ".*turn one that changes into a tensor"):
        fickle(kind)


@pytest.mark.dist
def test_a_value_that_changes_is_refused_in_processes_with_the_same_words():
    with pytest.raises(ModelError, match=r"stage 0 gave the value 2\.0 for micro-batch 1, but 1\.0 for an earlier"):
        launch(fickle, 3, "float", threads=1)


def test_values_of_the_data_may_change_from_batch_to_batch():
    """They are part of a micro-batch's shape, for which the ranks agree anew."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 8)

        def forward(self, given):
            return self.inner(given["x"]) * given["scale"], given["scale"]

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 2)

        def forward(self, given):
            return self.inner(given[0]) + given[1]

    torch.manual_seed(0)
    whole = nn.Sequential(Scaled(), Summed()).double()
    data = [({"x": x, "scale": scale, "mask": None}, target["y"]) for scale, (x, target) in enumerate(batches(3), 1)]
    wanted = [nn.functional.mse_loss(whole(x), y).item() for x, y in data]
    options = {"loss": nn.functional.mse_loss, "stages": 2, "microbatches": 2}
    pipe = pf.Pipeline(whole, optimizer=lambda given: torch.optim.SGD(given, 0.0), **options)
    assert pipe.fit(data) == pytest.approx(wanted, rel=1e-12)


def test_what_is_neither_tensor_nor_plain_value_is_refused():
    class Odd(nn.Module):
        def forward(self, x):
            return {"x": x, "odd": {1, 2}}

    pipe = pf.Pipeline(
        nn.Sequential(nn.Linear(6, 6), Odd(), nn.Identity()).double(),
        loss=loss,
        optimizer=lambda given: torch.optim.SGD(given, 0.0),
        stages=[2, 1],
    )
    with pytest.raises(
        ModelError, match=r"the output of stage 0 holds a set .* \(None, bool, int, float, str\) can flow"
    ):
        pipe.fit(batches(1))


def test_structures_come_back_from_their_text():
    payload = {"x": torch.ones(2), **VALUES, "more": [torch.zeros(1), (7, None)]}
    leaves, structure = flatten(payload)
    read = Structure.loads(structure.dumps())
    assert read == structure and repr(unflatten(leaves, read)) == repr(payload)
    contract = Contract.of(leaves, [False, False], structure)
    assert Contract.from_bytes(contract.to_bytes()) == contract
    one, same, other = (flatten([torch.ones(1), value])[1] for value in (1, 1, True))
    assert one == same != other
