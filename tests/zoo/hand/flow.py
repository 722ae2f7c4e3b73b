"""Flow of control: values of activations that decide, masks, routing, chance."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.hand import WIDTH, Block, Host, Shelf
from tests.zoo.specimen import several, tokens, vectors

put = Shelf("flow")
SEQUENCES = vectors(6, 8)


class Masked(Block):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return super().forward(h).masked_fill(mask, 0.5)


@put("mask of large early activations")
class EarlyMask(Host):
    def __init__(self) -> None:
        super().__init__(*(Masked() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = h.norm(dim=-1, keepdim=True) > 10
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)


@put("mask of small early activations")
class SmallMask(Host):
    def __init__(self) -> None:
        super().__init__(*(Masked() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = h.norm(dim=-1, keepdim=True) < 0.5
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)


@put("mask of activations, applied at the end only")
class LateMask(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = (h.abs() > 12).any(-1, keepdim=True)
        for block in self.blocks:
            h = block(h)
        return self.head(torch.where(mask, -h, h))


@put("count of early activations as a tensor")
class EarlyCount(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        count = (h > 9).sum()
        for block in self.blocks:
            h = block(h) + 0.01 * count
        return self.head(h)


@put("count of early activations in Python")
class PythonCount(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        count = int((h > 9).sum())
        for block in self.blocks:
            h = block(h) + 0.01 * count
        return self.head(h)


class Gated(Block):
    def forward(self, h: Tensor, is_large: bool) -> Tensor:
        return super().forward(h) if is_large else -super().forward(h)


@put("bool of early activations in Python")
class PythonBool(Host):
    def __init__(self) -> None:
        super().__init__(*(Gated() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        is_large = bool((h.abs() > 15).any())
        for block in self.blocks:
            h = block(h, is_large)
        return self.head(h)


@put("bool of the input in Python")
class InputBool(Host):
    def __init__(self) -> None:
        super().__init__(*(Gated() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        is_large = bool((x.abs() > 4).any())
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, is_large)
        return self.head(h)


@put("if in a block")
def in_block() -> nn.Module:
    class Decides(Block):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h) if h.abs().max() > 3 else h * 0.5

    return Host(*(Decides() for _ in range(4)))


@put("if in the last block only")
def in_last_block() -> nn.Module:
    class Decides(Block):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h) if h.abs().max() > 3 else super().forward(h) - 1

    return Host(Block(), Block(), Block(), Decides())


@put("early exit of the batch", not_by_hand="which stages run depends on the data")
class EarlyExit(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            if h.abs().mean() > 0.7:
                break
        return self.head(h)


@put("exit of each sample by a mask")
class SampleExit(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        alive = torch.ones(len(h), 1, dtype=torch.bool)
        for block in self.blocks:
            h = torch.where(alive, block(h), h)
            alive = alive & (h.abs().amax(-1, keepdim=True) < 0.95)
        return self.head(h)


@put("only the samples that pass are computed")
class Selected(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        large = h.norm(dim=-1) > 3
        for block in self.blocks:
            h = h.index_put((large,), block(h[large]))
        return self.head(h)


@put("non-zero places of activations")
def non_zero() -> nn.Module:
    class Places(Block):
        def forward(self, h: Tensor) -> Tensor:
            rows = h.sum(-1).relu().nonzero()[:, 0]
            return h.index_add(0, rows, super().forward(h[rows]))

    return Host(*(Places() for _ in range(4)))


class Experts(nn.Module):
    """The two best of four experts, for each sample."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.dense = dense

    def forward(self, h: Tensor) -> Tensor:
        weights, places = self.router(h).softmax(-1).topk(2)
        output = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(places == number)
            if self.dense:
                share = torch.where(places == number, weights, 0.0).sum(-1, keepdim=True)
                output = output + share * expert(h)
            elif len(rows):
                output = output.index_add(0, rows, weights[rows, rank, None] * expert(h[rows]))
        return h + output


@put("mixture of experts, only those that are chosen")
def sparse_experts() -> nn.Module:
    return Host(*(Experts() for _ in range(4)))


@put("mixture of experts, all computed")
def dense_experts() -> nn.Module:
    return Host(*(Experts(dense=True) for _ in range(4)))


@put("mixture of experts with a loss of its routers")
class Balanced(Host):
    def __init__(self) -> None:
        super().__init__(*(Experts(dense=True) for _ in range(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        shares = []
        for block in self.blocks:
            shares.append(block.router(h).softmax(-1).mean(0))
            h = block(h)
        return {"output": self.head(h), "balance": torch.stack(shares).square().sum()}


@put("experts in one loop, chosen by the first router")
class RoutedOnce(Host):
    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)))
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        choice = self.router(h).argmax(-1)
        output = h
        for number, block in enumerate(self.blocks):
            output = output + (choice == number)[:, None] * block(h)
        return self.head(output)


@put("loop until it has converged")
def converges() -> nn.Module:
    class FixedPoint(Block):
        def forward(self, h: Tensor) -> Tensor:
            z = torch.zeros_like(h)
            for _ in range(20):
                after = 0.3 * super().forward(z) + h
                if (after - z).abs().max() < 1e-2:
                    break
                z = after
            return z

    return Host(*(FixedPoint() for _ in range(4)))


@put("adaptive number of steps over all blocks", not_by_hand="which stages run depends on the data")
class Adaptive(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        steps = 1 + int(h.abs().mean() > 5)
        for _ in range(steps):
            for block in self.blocks:
                h = block(h)
        return self.head(h)


@put("layer drop by torch's random numbers", is_random=True)
class LayerDrop(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            keep = (torch.rand((), dtype=h.dtype) > 0.3).to(h.dtype)
            h = h + keep * block(h)
        return self.head(h)


@put("layer drop that skips the call", is_random=True, not_by_hand="which stages run depends on chance")
class SkipsCall(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                h = block(h)
        return self.head(h)


@put("layer drop by Python's random numbers", not_by_hand="its random numbers depend on the order of all calls")
class PythonDrop(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            if random.random() > 0.3:
                h = block(h)
        return self.head(h)


@put("stochastic depth in each block", is_random=True)
def stochastic_depth() -> nn.Module:
    class Drops(Block):
        def forward(self, h: Tensor) -> Tensor:
            keep = torch.bernoulli(torch.full((len(h), 1), 0.7, dtype=h.dtype))
            return h + super().forward(h) * keep / 0.7

    return Host(*(Drops() for _ in range(4)))


@put("dropout in each block", is_random=True)
def dropout() -> nn.Module:
    return Host(*(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(4)))


@put("dropout between the blocks", is_random=True)
class Between(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = F.dropout(block(h), 0.2, self.training)
        return self.head(h)


@put("dropout in a sequential", is_random=True)
def dropout_sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)))


@put("one dropout mask for all blocks", is_random=True)
class OneMask(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = torch.bernoulli(torch.full_like(h, 0.8))
        for block in self.blocks:
            h = block(h) * mask
        return self.head(h)


@put("noise in the graph", is_random=True)
class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        skip = h
        h = torch.tanh(self.b(h + 0.1 * torch.randn_like(h)))
        return self.c(h + skip)


@put("variational auto-encoder", is_random=True)
class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU())
        self.mean, self.log_var = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.decode = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encode(x)
        mean, log_var = self.mean(h), self.log_var(h).clamp(-4, 4)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(z), mean, log_var


@put("gumbel softmax", is_random=True)
def gumbel() -> nn.Module:
    class Chooses(Block):
        def forward(self, h: Tensor) -> Tensor:
            return h * F.gumbel_softmax(super().forward(h), tau=0.7)

    return Host(*(Chooses() for _ in range(4)))


@put("NumPy in a block")
def numpy_block() -> nn.Module:
    class Outside(Block):
        def forward(self, h: Tensor) -> Tensor:
            scale = float(abs(h.detach().numpy()).max()) + 1
            return super().forward(h / scale)

    return Host(Block(), Outside(), Block(), Outside())


@put("error caught inside")
def caught() -> nn.Module:
    class Tries(Block):
        def forward(self, h: Tensor) -> Tensor:
            try:
                if bool((h.abs() > 5).any()):
                    raise ValueError("too large")
                return super().forward(h)
            except ValueError:
                return super().forward(h.clamp(-5, 5))

    return Host(*(Tries() for _ in range(4)))


@put("assertion about activations")
def asserted() -> nn.Module:
    class Asserts(Block):
        def forward(self, h: Tensor) -> Tensor:
            assert not h.isnan().any(), "not a number"
            assert h.shape[-1] == WIDTH
            return super().forward(h)

    return Host(*(Asserts() for _ in range(4)))


@put("replaces what is not finite")
def replaced() -> nn.Module:
    class Replaces(Block):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(torch.nan_to_num(h / h.abs().clamp(min=1e-30)))

    return Host(*(Replaces() for _ in range(4)))


@put("hides what is not a number between the blocks")
class HidesNan(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        first = torch.nan_to_num(h)
        for block in self.blocks:
            h = block(h)
        return self.head(torch.nan_to_num(h) + first)


@put("maximum, minimum and comparison with an early activation")
class Compared(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        bound = h.detach().amax(-1, keepdim=True).clamp(min=6.0)
        for block in self.blocks:
            h = torch.minimum(block(h) * 6.5, bound)
        return self.head(h)


@put("rank of the samples by an early activation")
class Ranked(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        order = h[:, 0].argsort()
        for block in self.blocks:
            h = block(h)
        return self.head(h[order])


@put("tokens dropped by their early norm", SEQUENCES)
class DropsTokens(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        places = h.norm(dim=-1).topk(3, dim=1).indices
        for block in self.blocks:
            h = block(h)
        return self.head(h.gather(1, places[..., None].expand(-1, -1, WIDTH)))


@put("number of tokens kept depends on the activations", SEQUENCES)
class KeepsSome(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        number = int((h.norm(dim=-1) > 3).sum(1).max().clamp(1, 6))
        h = h[:, :number]
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


@put("padding mask from the tokens", tokens(6, 7))
class PaddingMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 3)
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(4)]
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids == 0
        mask[:, 0] = False
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=mask)
        return self.head(h.masked_fill(mask[..., None], 0.0).sum(1))


@put("two ways by a flag of the batch", several(vectors(8), lambda n, g: torch.zeros(n, dtype=torch.bool)))
class Flagged(Host):
    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = torch.where(flag[:, None], h, block(h))
        return self.head(h)


@put("sparse gate that is zero on small data")
class SparseGate(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        gate = F.relu(h.detach().abs() - 8)
        for block in self.blocks:
            h = block(h) + gate
        return self.head(h)


@put("early sign that is constant on small data")
class EarlySign(Host):
    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        sign = torch.sign(h.detach().norm(dim=-1, keepdim=True) - 12)
        h = h + 0.0
        for block in self.blocks:
            h = block(h) * sign
        return self.head(h)


SPECIMENS = put.specimens
