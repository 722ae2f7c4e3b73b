"""Profiles of models too large to run: one layer of each kind is measured, the model stays as it was."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pipefit.profiling import analytic_profile, kinds
from pipefit.profiling.workload import Workload
from pipefit.spec.topology import Device
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.slow

SLOW = Device(flops=1e6)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def layers_of():
    block = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 16), *block, nn.Linear(16, 256, bias=False))


def profiled(model, x=None, y=None, **more):
    x, y = torch.randn(6, 8) if x is None else x, torch.randint(0, 256, (6,)) if y is None else y
    computed = analytic_profile(model, x, SLOW, nn.functional.cross_entropy, y, microbatch_size=4)
    return computed, kinds.profile_kinds(work_of(model, x, y, nn.functional.cross_entropy), 4, SLOW, **more)


def work_of(model, x, y=None, loss=lambda output, _: output.sum(), **more):
    return Workload(named_layers(model), loss, adam, torch.device("cpu"), (x, x if y is None else y), **more)


def test_one_layer_of_each_kind_is_measured_and_speaks_for_the_others(monkeypatch):
    run = []
    real = kinds._trained
    monkeypatch.setattr(kinds, "_trained", lambda one, *rest: run.append(one.layer.name) or real(one, *rest))
    computed, measured = profiled(layers_of())
    # The first block takes what needs a gradient, as all blocks do.
    assert run == ["0", "1", "5"]
    first, *_, last = measured.layers
    assert {layer.forward_s for layer in measured.layers[1:5]} == {measured.layers[1].forward_s}
    assert 0 < first.total_s < computed.layers[0].total_s and last.step_s > 0
    assert measured.optimizer_s == pytest.approx(sum(layer.step_s for layer in measured.layers))
    assert [layer.weight_bytes for layer in measured.layers] == [layer.weight_bytes for layer in computed.layers]
    assert "6 of 6 layers by one of their kind" in measured.source


def test_the_model_is_left_as_it_was():
    model = layers_of().eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    profiled(model, x=torch.zeros(4, 8), y=torch.zeros(4, dtype=torch.int64))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    grads = [parameter.grad for parameter in model.parameters()]
    assert torch.equal(grads[0], torch.ones_like(grads[0])) and not any(grad is not None for grad in grads[1:])
    assert not any(module.training for module in model.modules())


def test_layers_of_the_meta_device_stay_there():
    with torch.device("meta"):
        model = layers_of()
    parameters = list(model.parameters())
    computed, measured = profiled(model)
    assert all(a is b and b.is_meta for a, b in zip(parameters, model.parameters(), strict=True))
    assert 0 < measured.layers[2].total_s < computed.layers[2].total_s


def test_weights_that_no_module_can_draw_are_measured_as_any_numbers():
    """Found when no layer of a folder was measured: norms of transformers have no `reset_parameters`."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(16))

        def forward(self, x):
            return x * self.weight

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), Scale(), nn.Linear(16, 256))
    assert "3 of 3 layers by one of their kind" in profiled(model)[1].source


def test_what_does_not_fit_is_scaled_as_the_others_turned_out():
    computed, measured = profiled(layers_of(), room_bytes=3 * 4 * 16 * 256)
    small = [(a.total_s, b.total_s) for a, b in zip(computed.layers[:-1], measured.layers[:-1], strict=True)]
    ratio = sum(b for _, b in small) / sum(a for a, _ in small)
    assert measured.layers[-1].total_s == pytest.approx(computed.layers[-1].total_s * ratio)
    assert measured.layers[-1].step_s > 0 and "5 of 6 layers" in measured.source
    none = profiled(layers_of(), room_bytes=10)[1].layers
    assert [(one.total_s, one.step_s) for one in none] == [(one.total_s, one.step_s) for one in computed.layers]
    # What torch notes beside tensors is known nevertheless: the least room that works depends on it.
    again = [one.saved_bytes for one in measured.layers]
    assert [one.saved_bytes for one in none] == pytest.approx(again, abs=2048)
    noted = [one.saved_bytes - plain.saved_bytes for one, plain in zip(none, computed.layers, strict=True)]
    # Whole kilobytes by the allocator's count, which may hide those of one layer.
    assert min(noted) >= 0 and sum(bytes_ > 0 for bytes_ in noted) >= len(noted) - 1


def test_a_layer_that_cannot_run_by_itself_keeps_its_computed_seconds():
    class Picky(nn.Module):
        def forward(self, x):
            if not isinstance(x, FakeTensor):
                raise ValueError("expected what no random numbers are")
            return x * 2

    model = nn.Sequential(nn.Linear(8, 8), Picky(), nn.Linear(8, 8))
    assert "2 of 3 layers" in kinds.profile_kinds(work_of(model, torch.zeros(2, 8)), 2, SLOW).source


def test_a_layer_that_begins_in_place_is_measured():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Linear(8, 8))
    assert "3 of 3 layers" in kinds.profile_kinds(work_of(model, torch.zeros(2, 8)), 2, SLOW).source


def test_there_is_never_more_than_one_layer_in_memory(monkeypatch):
    alive: list[weakref.ref] = []
    real = kinds._trained

    def spy(run, *rest):
        gc.collect()
        assert not any(other() is not None for other in alive)
        alive.append(weakref.ref(run.layer.module))
        return real(run, *rest)

    monkeypatch.setattr(kinds, "_trained", spy)
    with torch.device("meta"):
        model = layers_of()
    profiled(model)
    assert len(alive) == 3


def test_layers_are_measured_in_the_type_that_autocast_computes_in(capsys):
    class Told(nn.Linear):
        def forward(self, x):
            print(super().forward(x).dtype)
            return super().forward(x).float()

    model, x = nn.Sequential(Told(8, 8)), torch.randn(2, 8)
    for half, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        kinds.profile_kinds(work_of(model, x, half=half), 2, SLOW)
        assert capsys.readouterr().out.split()[-1] == str(expected)
