"""Gradients: own functions, hooks, penalties, views and changes in place; other kinds of numbers and of modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.hand import WIDTH, Block, Host, Shelf
from tests.zoo.specimen import several, tokens, vectors

put = Shelf("gradients")
SEQUENCES = vectors(6, 8)


class Straight(torch.autograd.Function):
    """Rounds; its backward is that of the identity (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(torch.autograd.Function):
    """The identity with a reversed gradient (Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Cubed(torch.autograd.Function):
    """A function with saved tensors and the right derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Applies(Block):
    def __init__(self, function: Any, *more: Any) -> None:
        super().__init__()
        self.function, self.more = function, more

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(self.function.apply(h, *self.more))


@put("straight-through rounding in blocks")
def straight() -> nn.Module:
    return Host(Block(), Applies(Straight), Block(), Applies(Straight))


@put("straight-through rounding, not in a list")
class StraightAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(Straight.apply(3 * torch.tanh(self.a(x))))))


@put("reversed gradient in blocks")
def reversed_gradient() -> nn.Module:
    return Host(Block(), Applies(Reversed, 0.3), Block(), Block())


@put("reversed gradient before a second head")
class Adversarial(Host):
    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        h = self.blocks[1](self.blocks[0](h))
        domain = self.domain(Reversed.apply(h, 0.5))
        return self.head(self.blocks[3](self.blocks[2](h))), domain


@put("own function with the right derivative")
def cubed() -> nn.Module:
    return Host(Block(), Applies(Cubed), Block(), Applies(Cubed))


@put("backward hook of a module that scales gradients")
def module_hook() -> nn.Module:
    made = Host()
    made.blocks[1].register_full_backward_hook(lambda module, given, got: tuple(0.5 * one for one in given))
    return made


@put("backward pre-hook of a module")
def module_pre_hook() -> nn.Module:
    made = Host()
    made.blocks[2].register_full_backward_pre_hook(lambda module, got: tuple(one.clamp(-0.01, 0.01) for one in got))
    return made


@put("hook of an activation")
def tensor_hook() -> nn.Module:
    class Hooked(Block):
        def forward(self, h: Tensor) -> Tensor:
            output = super().forward(h)
            if output.requires_grad:
                output.register_hook(lambda grad: 0.5 * grad)
            return output

    return Host(*(Hooked() for _ in range(4)))


@put("hook of a parameter")
def parameter_hook() -> nn.Module:
    made = Host()
    made.blocks[1].linear.weight.register_hook(lambda grad: 2 * grad)
    return made


@put("forward hook that changes the output")
def output_hook() -> nn.Module:
    made = Host()
    for block in made.blocks:
        block.register_forward_hook(lambda module, given, output: output * 1.5)
    return made


@put("forward pre-hook that changes the input")
def input_hook() -> nn.Module:
    made = Host()
    for block in made.blocks:
        block.register_forward_pre_hook(lambda module, given: (given[0] + 0.1,))
    return made


@put("hook of the model")
def model_hook() -> nn.Module:
    made = Host()
    made.register_forward_hook(lambda module, given, output: 2 * output + 1)
    made.register_forward_pre_hook(lambda module, given: (given[0] - 0.5,))
    return made


@put("gradient penalty inside a block")
def penalty_in_block() -> nn.Module:
    class Penalised(Block):
        def forward(self, h: Tensor) -> Tensor:
            with torch.enable_grad():
                at = h.detach().requires_grad_()
                energy = super().forward(at).square().sum()
                (slope,) = torch.autograd.grad(energy, at, create_graph=True)
            return super().forward(h) - 0.1 * slope

    return Host(*(Penalised() for _ in range(4)))


@put("gradient of the whole model in its forward", not_by_hand="a backward of all stages runs within each forward")
class Penalty(Host):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = super().forward(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output, slope.norm(dim=-1).sub(1).square().mean()


@put("forces as the gradient of an energy", vectors(5, 3), not_by_hand="a backward of all stages runs in each forward")
class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            distances = (places[:, :, None] - places[:, None]).square().sum(-1)
            h = self.embed((-distances).exp())
            for block in self.blocks:
                h = block(h)
            energy = self.head(h).sum((1, 2))
            (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -slope


@put("inner step of an optimizer in a block")
def inner_step() -> nn.Module:
    class Adapts(Block):
        """One step of gradient descent on its own weights, within the forward (Finn et al. 2017)."""

        def forward(self, h: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = (super().forward(h) - h).square().mean()
                (slope,) = torch.autograd.grad(loss, self.linear.weight, create_graph=True)
            return torch.tanh(F.linear(h, self.linear.weight - 0.1 * slope, self.linear.bias))

    return Host(*(Adapts() for _ in range(4)))


@put("hypernetwork for the next block")
class Hyper(Host):
    def __init__(self) -> None:
        super().__init__()
        self.makers = nn.ModuleList(nn.Linear(WIDTH, WIDTH * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for maker in self.makers:
            weights = maker(h).unflatten(-1, (WIDTH, WIDTH)) / WIDTH
            h = torch.tanh(torch.einsum("bij,bj->bi", weights, h))
        return self.head(h)


@put("hypernetwork from parameters")
class HyperParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, 3))
        self.maker = nn.Linear(3, WIDTH * WIDTH)
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for code in self.codes:
            h = torch.tanh(F.linear(h, self.maker(code).view(WIDTH, WIDTH)))
        return self.head(h)


@put("functional call with made weights")
def functional_call() -> nn.Module:
    class Calls(Block):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Parameter(torch.ones(WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            weights = {"weight": self.linear.weight * self.maker, "bias": self.linear.bias}
            return torch.tanh(torch.func.functional_call(self.linear, weights, (h,)))

    return Host(*(Calls() for _ in range(4)))


@put("vmap and per-sample gradients")
def per_sample() -> nn.Module:
    class PerSample(Block):
        def forward(self, h: Tensor) -> Tensor:
            slopes = torch.func.vmap(torch.func.grad(lambda row: row.tanh().square().sum()))(h)
            return super().forward(h + 0.1 * slopes)

    return Host(*(PerSample() for _ in range(4)))


@put("gradient checkpointing in the blocks")
def checkpointed() -> nn.Module:
    class Saves(Block):
        def forward(self, h: Tensor) -> Tensor:
            return checkpoint(super().forward, h, use_reentrant=False)

    return Host(*(Saves() for _ in range(4)))


@put("gradient checkpointing between the blocks")
class CheckpointsAll(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


@put("gradient checkpointing, reentrant, with dropout", is_random=True)
def reentrant() -> nn.Module:
    class Saves(Block):
        def forward(self, h: Tensor) -> Tensor:
            return checkpoint(self._inner, h, use_reentrant=True)

        def _inner(self, h: Tensor) -> Tensor:
            return F.dropout(Block.forward(self, h), 0.2)

    return Host(*(Saves() for _ in range(4)))


@put("detached middle")
class Detached(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for place, block in enumerate(self.blocks):
            h = block(h.detach() if place == 2 else h)
        return self.head(h)


@put("stop-gradient branch", several(vectors(8), vectors(8)))
class StopGradient(nn.Module):
    """SimSiam (Chen and He 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block())
        self.predict = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.encoder(a), self.encoder(b)
        return self.predict(a) - b.detach(), self.predict(b) - a.detach()


@put("no gradient in the first half")
class NoGrad(Host):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.blocks[1](self.blocks[0](self.embed(x)))
        return self.head(self.blocks[3](self.blocks[2](h)))


@put("in-place views")
class Views(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for place, block in enumerate(self.blocks):
            h = h.clone()
            h[:, place::4] = block(h)[:, place::4]
        return self.head(h)


@put("adds in place between the blocks")
class InPlaceSum(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h += block(h.clone())
        return self.head(h)


@put("accumulates into one tensor")
class Accumulates(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        total = torch.zeros_like(h)
        for block in self.blocks:
            h = block(h)
            total += h
        return self.head(total)


@put("writes into its input", not_by_hand="the batch itself changes")
class WritesInput(Host):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


@put("output is a view of an early tensor")
class EarlyView(Host):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        early = h[:, :4]
        for block in self.blocks:
            h = block(h)
        return self.head(h), early


@put("TorchScript blocks")
def scripted() -> nn.Module:
    return Host(*(torch.jit.script(Block().double()) for _ in range(4)))


@put("TorchScript function in the model")
class ScriptedFunction(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = _fused(h, block(h))
        return self.head(h)


@torch.jit.script
def _fused(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a) * b + a


@put("traced TorchScript block")
def traced_script() -> nn.Module:
    def block() -> nn.Module:
        return torch.jit.trace(Block().double(), torch.randn(2, WIDTH, dtype=torch.float64))

    return Host(Block(), block(), Block(), block())


class ComplexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)

    def forward(self, z: Tensor) -> Tensor:
        z = z @ self.weight
        return z / (1 + z.abs())


@put("complex activations and weights")
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 2 * WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(ComplexBlock() for _ in range(4))

    def double(self) -> Complex:
        self.embed.double(), self.head.double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.embed(x).unflatten(-1, (WIDTH, 2)))
        for block in self.blocks:
            z = block(z)
        return self.head(z.abs())


@put("Fourier layers", vectors(16))
class Fourier(nn.Module):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.imaginary = nn.Parameter(torch.randn(9) / 3), nn.Parameter(torch.randn(9) / 3)

        def forward(self, h: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(h) * torch.complex(self.real, self.imaginary)
            return h + torch.tanh(torch.fft.irfft(spectrum, n=h.shape[-1]))

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(4)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _sparse(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randn(12, 8, generator=generator).relu().to_sparse()


@put("sparse input", _sparse, splits=False)
class SparseInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH) / 3)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sparse.mm(x, self.weight)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@put("sparse matrix as a buffer")
class SparseBuffer(Host):
    def __init__(self) -> None:
        super().__init__()
        self.mix: Tensor
        self.register_buffer("mix", torch.eye(WIDTH, dtype=torch.float64).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = torch.sparse.mm(self.mix, block(h).T).T
        return self.head(h)


@put("sparse matrix as a buffer that is not saved")
class UnsavedSparseBuffer(SparseBuffer):
    def __init__(self) -> None:
        super().__init__()
        self._non_persistent_buffers_set.add("mix")


@put("sparse gradient of an embedding", tokens(20, 6))
class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@put("bag of embeddings", tokens(20, 6))
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, WIDTH, mode="mean"), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.bag(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@put("integers and floats cross together", tokens(20, 6))
class Both(nn.Module):
    class Layer(Block):
        def forward(self, h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(h), (ids + 1) % 20

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h, ids = layer(h, ids)
            h = h + self.embed(ids)
        return self.head(h)


@put("mixed types, half of it in float32")
def mixed_types() -> nn.Module:
    class Single(Block):
        def double(self) -> Single:
            return self

        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h.float()).double()

    class Mixed(Host):
        def double(self) -> Mixed:
            self.embed.double(), self.head.double()
            return self

    return Mixed(*(Single() for _ in range(4)))


@put("quantised weights, straight through")
def quantised() -> nn.Module:
    class Quantised(Block):
        def forward(self, h: Tensor) -> Tensor:
            weight = self.linear.weight
            scale = weight.detach().abs().max() / 7
            rounded = weight + ((weight / scale).round() * scale - weight).detach()
            return torch.tanh(F.linear(h, rounded, self.linear.bias))

    return Host(*(Quantised() for _ in range(4)))


@put("clamps its own gradient by a parameter's size")
def clamps() -> nn.Module:
    class Clamps(Block):
        def forward(self, h: Tensor) -> Tensor:
            bound = self.linear.weight.detach().norm()
            return torch.maximum(torch.minimum(super().forward(h) * 4, bound), -bound)

    return Host(*(Clamps() for _ in range(4)))


@put("subclass of a parameter")
def subclassed() -> nn.Module:
    class Special(nn.Parameter):
        pass

    class Uses(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Special(torch.ones(WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h) * self.scale

    return Host(*(Uses() for _ in range(4)))


@put("call that is not forward")
class OtherMethod(Host):
    def __init__(self) -> None:
        class Encodes(Block):
            def encode(self, h: Tensor) -> Tensor:
                return torch.tanh(self.linear(h)) + h

        super().__init__(*(Encodes() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block.encode(h)
        return self.head(h)


@put("weights of a block used without calling it")
class UsesWeights(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = torch.sin(F.linear(h, block.linear.weight)) + block.linear.bias
        return self.head(h)


@put("forward replaced on the instance")
def replaced_forward() -> nn.Module:
    made = Host()
    for block in made.blocks:
        block.forward = lambda h, block=block: torch.sin(block.linear(h))
    return made


@put("regulariser of all weights in the output")
class Regularised(Host):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(parameter.square().sum() for parameter in self.parameters())


@put("orthogonality of pairs of blocks in the output")
class Orthogonality(Host):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.blocks[0].linear.weight @ self.blocks[3].linear.weight.T
        return super().forward(x), product.square().mean()


@put("attention as matrix functions", SEQUENCES)
def matrix_functions() -> nn.Module:
    class Solves(Block):
        def forward(self, h: Tensor) -> Tensor:
            gram = h @ h.transpose(-1, -2) + 2 * torch.eye(h.shape[1], dtype=h.dtype)
            return super().forward(torch.linalg.solve(gram, h))

    return Host(*(Solves() for _ in range(4)))


SPECIMENS = put.specimens
