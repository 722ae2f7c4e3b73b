"""The two halves of a backward: together the whole one, no node twice but where weights branch off, what is kept."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from pipefit.errors import ModelError
from pipefit.runtime.halves import Saved, input_half, run_backward, weight_half
from pipefit.stage.compiler import backend_of

WIDTH = 4


class Scaled(Function):
    """An operation of a user's own, with a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Viewed(Function):
    """A function between two weights and what uses them at two depths; nothing but autograd's own edges holds it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a.view_as(a), b.view_as(b)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a.clone(), b.clone()


class Net(nn.Module):
    def __init__(self, run: Callable[["Net", Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.run = run

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(self, x, y)


def residual(net: Net, x: Tensor, y: Tensor) -> Any:
    h = x + net.second(F.gelu(net.first(net.norm(x))))
    return (h * y, h)


def one_output_is_an_input(net: Net, x: Tensor, y: Tensor) -> Any:
    return (net.first(x).tanh(), y, net.first.weight)


def an_input_that_is_not_used(net: Net, x: Tensor, y: Tensor) -> Any:
    return (net.second(net.first(x).tanh()),)


def at_two_depths(net: Net, x: Tensor, y: Tensor) -> Any:
    return (net.second(net.first(net.first(x).tanh()).tanh()) + y,)


def side_by_side(net: Net, x: Tensor, y: Tensor) -> Any:
    return (net.second(net.first(x).tanh() * net.first(y).tanh()),)


def own_function(net: Net, x: Tensor, y: Tensor) -> Any:
    return (Scaled.apply(net.first(x).tanh(), net.norm.weight) + y,)


def function_over_weights(net: Net, x: Tensor, y: Tensor) -> Any:
    a, b = Viewed.apply(net.first.weight, net.second.weight)
    return (F.linear(F.linear(x, a).tanh(), b).tanh() * y,)


def hooked_activation(net: Net, x: Tensor, y: Tensor) -> Any:
    h = net.first(x)
    h.register_hook(lambda grad: grad * 3)
    return (net.second(h.tanh()) + y,)


def recurrent(net: Net, x: Tensor, y: Tensor) -> Any:
    return (net.lstm(x.unsqueeze(1))[0].squeeze(1) + net.first(y),)


def several_outputs_of_a_node(net: Net, x: Tensor, y: Tensor) -> Any:
    a, b = net.first(x).tanh().chunk(2, -1)
    return (a, torch.cat((b, a), -1) * net.norm.weight + y)


def autocast(net: Net, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (net.second(net.first(net.norm(x)).relu()) + y,)


def without_inputs_at_two_places(net: Net, x: Tensor, y: Tensor) -> Any:
    own = net.first.weight[:3].tanh()  # as a decoder's first layers, before they see what the encoder gave
    queries = net.second(own).tanh()
    return (own * x + queries * y, own.sin())


def compiled(net: Net, x: Tensor, y: Tensor) -> Any:
    """Under torch.compile, whose backward is one node."""
    backend = backend_of("aot_eager", torch.device("cpu"))
    return torch.compile(residual, backend=backend)(net, x, y)


CASES = [
    residual, one_output_is_an_input, an_input_that_is_not_used, at_two_depths, side_by_side, own_function,
    function_over_weights, hooked_activation, recurrent, several_outputs_of_a_node, autocast,
    without_inputs_at_two_places, compiled,
]  # fmt: skip


def forward(net: Net, dtype: torch.dtype, seed: int = 0) -> tuple[Saved, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(3, WIDTH, dtype=dtype, generator=generator).requires_grad_() for _ in range(2))
    outputs = net(x, y)
    grads = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in outputs]
    return Saved([x, y], [get_gradient_edge(leaf) for leaf in outputs]), grads


def gradients(net: Net) -> list[Tensor | None]:
    found = [weight.grad for weight in net.parameters()]
    net.zero_grad(set_to_none=True)
    return found


def alike(mine: list[Tensor | None], other: list[Tensor | None]) -> bool:
    pairs = list(zip(mine, other, strict=True))
    return all((a is None) == (b is None) and (a is None or torch.allclose(a, b, 1e-5, 1e-7)) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_halves_make_the_gradients_of_a_whole_backward(case: Any) -> None:
    dtype = torch.float32 if case in (recurrent, autocast) else torch.float64
    net = Net(case).to(dtype)
    for seed in (0, 1):  # a second micro-batch adds to the first
        saved, grads = forward(net, dtype, seed)
        run_backward(tuple(saved.edges), tuple(grads), accumulate=True)
    inputs, weights = [leaf.grad for leaf in saved.inputs], gradients(net)
    kept = []
    for seed in (0, 1):
        saved, grads = forward(net, dtype, seed)
        found, rest = input_half(saved, grads)
        kept.append((saved, rest))
        del saved
    assert alike(found, inputs) and all(weight.grad is None for weight in net.parameters())
    for _, rest in kept:
        weight_half(rest)
    assert alike(gradients(net), weights)


def test_without_inputs_that_learn_the_second_half_is_the_whole_backward() -> None:
    net = Net(residual)
    saved, grads = forward(net, torch.float32)
    found, rest = input_half(Saved([], saved.edges), grads)
    assert found == [] and len(rest) == 1 and rest[0].weights == ()


def calls_of_nodes(saved: Saved) -> Counter[Any]:
    """Counts how often each node of a graph runs from now on."""
    calls: Counter[Any] = Counter()
    stack, seen = [edge.node for edge in saved.edges], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        node.register_hook(lambda _, __, node=node: calls.update([node]))
        stack += [child for child, _ in node.next_functions if child is not None]
    return calls


def test_only_the_nodes_where_weights_branch_off_run_in_both_halves() -> None:
    net = Net(residual)
    saved, grads = forward(net, torch.float32)
    calls = calls_of_nodes(saved)
    _, rest = input_half(saved, grads)
    weight_half(rest)
    twice = [node.name() for node, count in calls.items() if count > 1]
    assert twice == ["AddmmBackward0", "AddmmBackward0"]
    assert max(calls.values()) == 2 and sum(count == 1 for count in calls.values()) > 6


def test_what_is_kept_between_the_halves_is_what_arrives_where_weights_branch_off() -> None:
    net = Net(residual)
    saved, grads = forward(net, torch.float32)
    _, rest = input_half(saved, grads)
    *products, vectors = rest
    assert [len(run.weights) for run in products] == [2, 2]
    assert [grad.nbytes for run in products for grad in run.grads] == [3 * WIDTH * 4] * 2
    # The gradients of a norm are there already: they take as long as reading what arrives.
    assert sorted(id(w) for w in vectors.weights) == sorted(id(w) for w in net.norm.parameters())
    assert [grad.nbytes for grad in vectors.grads] == [WIDTH * 4] * 2


def test_a_weight_with_a_hook_at_two_depths_is_refused() -> None:
    net = Net(at_two_depths)
    net.first.bias.register_hook(lambda grad: grad * 2)
    saved, grads = forward(net, torch.float32)
    with pytest.raises(ModelError, match="whole backwards"):
        input_half(saved, grads)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_backward_makes_all_gradients_in_the_first_half() -> None:
    net = Net(compiled)
    saved, grads = forward(net, torch.float32)
    _, rest = input_half(saved, grads)
    assert {edge.node.name() for run in rest for edge in run.edges} == {"torch::autograd::AccumulateGrad"}
