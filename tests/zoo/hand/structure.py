"""Structure: what enters and leaves, modules that are shared, called twice or tied, branches that meet."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.hand import WIDTH, Block, Host, Shelf
from tests.zoo.specimen import keywords, several, tokens, vectors

put = Shelf("structure")
IMAGES = vectors(3, 16, 16)
SEQUENCES = vectors(6, 8)


class Conv(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


@put("U-Net", IMAGES)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([Conv(3, 6), Conv(6, 8), Conv(8, 10)])
        self.middle = Conv(10, 10)
        self.ups = nn.ModuleList([Conv(20, 8), Conv(16, 6), Conv(12, 6)])
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.out(x)


@put("DenseNet", IMAGES)
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(Conv(6 + 4 * place, 4) for place in range(5))
        self.head = nn.Linear(26, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


@put("deep supervision", IMAGES)
class Supervised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv(3, 6)
        self.layers = nn.ModuleList(Conv(6, 6) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        outputs = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            outputs.append(head(x.mean((2, 3))))
        return outputs


@put("feature pyramid", IMAGES)
class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Conv(3, 6), Conv(6, 8), Conv(8, 10)])
        self.side = nn.ModuleList([nn.Conv2d(6, 6, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(10, 6, 1)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = []
        for layer in self.down:
            x = F.max_pool2d(layer(x), 2)
            levels.append(x)
        found: dict[str, Tensor] = {}
        above: Any = None
        for place in (2, 1, 0):
            here = self.side[place](levels[place])
            above = here if above is None else here + F.interpolate(above, scale_factor=2.0)
            found[f"level{place}"] = above
        return found


@put("one block shared by all layers")
class Shared(Host):
    def __init__(self) -> None:
        block = Block()
        super().__init__(block, block, block, block)


@put("block called twice, others between")
class Twice(Host):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in [*self.blocks, self.blocks[0]]:
            h = block(h)
        return self.head(h)


@put("shared linear inside different blocks")
def shared_inside() -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)

    class Uses(Block):
        def __init__(self) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, h: Tensor) -> Tensor:
            return super().forward(self.shared(h))

    return Host(*(Uses() for _ in range(4)))


@put("head tied to the embedding", tokens(20, 6))
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@put("weight of the first layer, transposed in the last")
class TiedTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return F.linear(h, self.first.weight.T)


@put("twin encoder", several(vectors(8), vectors(8)))
class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.encoder(a), dim=-1), F.normalize(self.encoder(b), dim=-1)
        return (a * b).sum(-1, keepdim=True) * self.scale


@put("contrastive loss over the micro-batch", several(vectors(8), vectors(8)))
class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block())
        self.right = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block())

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) @ self.right(b).T


@put("two inputs, two outputs", keywords(image=IMAGES, text=tokens(12, 5)))
class TwoByTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(Conv(3, 6), Conv(6, 6))
        self.text = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 5)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        h = self.image(image).mean((2, 3)) + self.text(text).mean(1)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.a(h), self.b(h)


@dataclass
class Answer:
    output: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    output: Tensor
    hidden: Tensor


class Answers(Host):
    wrap: Any = Answer

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.wrap(self.head(h), h)


@put("dataclass as output")
class GivesDataclass(Answers):
    pass


@put("named tuple as output")
class GivesNamed(Answers):
    wrap = Pair


@put("nested output")
class GivesNested(Answers):
    def wrap(self, output: Tensor, hidden: Tensor) -> Any:
        return {"main": [output, {"hidden": (hidden, None)}], "name": "nested", "size": 3}


@put("dataclass between the blocks")
class DataclassBetween(Host):
    def __init__(self) -> None:
        class Takes(Block):
            def forward(self, state: Answer) -> Answer:
                return Answer(super().forward(state.output), state.hidden + state.output)

        super().__init__(*(Takes() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        state = Answer(self.embed(x), torch.zeros(len(x), WIDTH, dtype=x.dtype))
        for block in self.blocks:
            state = block(state)
        return self.head(state.output + state.hidden)


@put("dict between the blocks")
class DictBetween(Host):
    def __init__(self) -> None:
        class Takes(Block):
            def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
                return {"h": super().forward(state["h"]), "sum": state["sum"] + state["h"]}

        super().__init__(*(Takes() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        state = {"h": h, "sum": torch.zeros_like(h)}
        for block in self.blocks:
            state = block(state)
        return self.head(state["h"] + state["sum"])


@put("dict that blocks change in place")
class DictChanged(Host):
    def __init__(self) -> None:
        class Changes(Block):
            def forward(self, state: dict[str, Any]) -> None:
                state["h"] = super().forward(state["h"])
                state["count"] += 1

        super().__init__(*(Changes() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        state = {"h": self.embed(x), "count": 0}
        for block in self.blocks:
            block(state)
        return self.head(state["h"]) * state["count"]


@put("module dict and parameter list")
class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(8, WIDTH), "mid": Block(), "out": nn.Linear(WIDTH, 3)})
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH) * place) for place in (1.0, 0.5, 0.3))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts["in"](x)
        for scale in self.scales:
            h = torch.tanh(h * scale + self.shifts["a"])
        return self.parts["out"](self.parts["mid"](h))


@put("modules in a plain list", not_by_hand="its weights are not parameters of the model, and stay as they are")
class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Block().double() for _ in range(2)]
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.hidden:
            h = block(h)
        return self.head(h)


@put("only parameters, no child modules")
class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.c, self.d = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 3) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(torch.tanh(x @ self.a) @ self.b) @ self.c) @ self.d


@put("parameters of the model between its blocks")
class OwnParameters(Host):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4, WIDTH))
        self.token = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.token
        for scale, block in zip(self.scales, self.blocks, strict=True):
            h = block(h) * scale
        return self.head(h)


@put("frozen first half")
def frozen_first() -> nn.Module:
    made = Host()
    for part in (made.embed, *made.blocks[:2]):
        part.requires_grad_(False)
    return made


@put("frozen middle")
def frozen_middle() -> nn.Module:
    made = Host()
    made.blocks[1].requires_grad_(False)
    made.blocks[2].requires_grad_(False)
    return made


@put("frozen, all but the biases")
def biases() -> nn.Module:
    made = Host()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return made


@put("parameters that nothing uses")
class Unused(Host):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.other = nn.Linear(4, 4), nn.Parameter(torch.ones(3))


@put("low-rank adapters by hand")
def adapters() -> nn.Module:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, h: Tensor) -> Tensor:
            return torch.tanh(self.base(h) + self.up(self.down(h)))

    return Host(*(Adapted() for _ in range(4)))


@put("LSTM", SEQUENCES)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, WIDTH, 2, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(2 * WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        _, last = self.gru(h)
        return self.head(last[-1])


@put("list of LSTM cells", SEQUENCES)
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(8 if place == 0 else WIDTH, WIDTH) for place in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state: Any = None
            outputs = []
            for step in x.unbind(1):
                state = cell(step, state)
                outputs.append(state[0])
            x = torch.stack(outputs, 1)
        return self.head(x[:, -1])


@put("cells in a loop over time", SEQUENCES)
class OverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(8 if place == 0 else WIDTH, WIDTH) for place in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros(len(x), WIDTH, dtype=x.dtype) for _ in self.cells]
        for h in x.unbind(1):
            for place, cell in enumerate(self.cells):
                h = states[place] = cell(h, states[place])
        return self.head(h)


LENGTHS = several(SEQUENCES, lambda samples, generator: torch.randint(1, 7, (samples,), generator=generator))


@put("LSTM of packed sequences", LENGTHS)
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.first(packed)
        packed, _ = self.second(packed)
        h, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return self.head(h.sum(1))


@put("blocks that pack and unpack", LENGTHS)
class PackedBlocks(nn.Module):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, h: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=h.shape[1])[0]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, lengths)
        return self.head(h.sum(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return h + self.out(a.transpose(1, 2).flatten(2))


@put("attention with a cached mask", SEQUENCES)
class CachedMask(Host):
    def __init__(self) -> None:
        super().__init__(*(Attention() for _ in range(4)))
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.masks:
            self.masks[length] = torch.ones(length, length, dtype=torch.bool).tril()
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, self.masks[length])
        return self.head(h)


@put("attention with a mask as a buffer", SEQUENCES)
class MaskBuffer(Host):
    def __init__(self) -> None:
        super().__init__(*(Attention() for _ in range(4)))
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, self.mask[: x.shape[1], : x.shape[1]])
        return self.head(h)


@put("encoder and decoder", several(SEQUENCES, vectors(4, 8)))
class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1]).to(source.dtype)
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask))


@put("transformer encoder of torch", SEQUENCES)
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


@put("graph without a sample dimension", splits=False, data=several(
    lambda samples, generator: torch.randn(9, 8, generator=generator),
    lambda samples, generator: torch.randint(9, (2, 20), generator=generator)))  # fmt: skip
class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.embed(nodes)
        for layer in self.layers:
            h = torch.tanh(h + torch.zeros_like(h).index_add(0, edges[1], layer(h)[edges[0]]))
        return self.head(h)


@put("positions without a sample dimension", splits=False, data=several(
    SEQUENCES, lambda samples, generator: torch.arange(6)))  # fmt: skip
class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Linear(8, WIDTH), nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = self.embed(x) + self.place(positions)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@put("samples in the second dimension", splits=False, data=lambda n, g: torch.randn(6, n, 8, generator=g))
class SamplesSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(8 if place == 0 else WIDTH, WIDTH) for place in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[-1])


@put("detection with its losses inside", several(IMAGES, vectors(4)))
class Detects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([Conv(3, 6), Conv(6, 6), Conv(6, 6)])
        self.boxes, self.scores = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 1, 1)

    def forward(self, images: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        h = images
        for layer in self.body:
            h = F.max_pool2d(layer(h), 2)
        found, scores = self.boxes(h).flatten(2), self.scores(h).flatten(1)
        nearest = (found.detach() - boxes[:, :, None]).abs().sum(1).argmin(1)
        chosen = found.gather(2, nearest[:, None, None].expand(-1, 4, 1))[..., 0]
        return {
            "boxes": F.smooth_l1_loss(chosen, boxes),
            "scores": F.cross_entropy(scores, nearest),
        }


@put("detection that keeps the boxes above a threshold", several(IMAGES, vectors(4)))
class KeepsBoxes(Detects):
    def forward(self, images: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        h = images
        for layer in self.body:
            h = F.max_pool2d(layer(h), 2)
        found, scores = self.boxes(h).flatten(2).transpose(1, 2), self.scores(h).flatten(1)
        losses = [torch.zeros((), dtype=h.dtype)]
        for sample in range(len(images)):
            kept = found[sample][scores[sample] > scores[sample].mean()]
            if len(kept):
                losses.append((kept - boxes[sample]).abs().mean())
        return {"boxes": torch.stack(losses).mean(), "scores": scores.square().mean()}


@put("branches that meet at the end", IMAGES)
class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv(3, 6)
        self.branches = nn.ModuleList(nn.Sequential(*(Conv(6, 6) for _ in range(depth))) for depth in (1, 2, 3))
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cat([branch(x) for branch in self.branches], 1).mean((2, 3)))


@put("reversible blocks")
class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 2 * WIDTH), nn.Linear(2 * WIDTH, 3)
        self.f, self.g = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.embed(x).chunk(2, -1)
        for f, g in zip(self.f, self.g, strict=True):
            a = a + f(b)
            b = b + g(a)
        return self.head(torch.cat([a, b], -1))


@put("normalising flow with a sum of determinants")
class Flow(nn.Module):
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.net, self.flip = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)), flip

        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.flip(-1).chunk(2, -1) if self.flip else x.chunk(2, -1)
            scale, shift = self.net(a).chunk(2, -1)
            scale = torch.tanh(scale)
            return torch.cat([a, b * scale.exp() + shift], -1), total + scale.sum(-1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Coupling(bool(place % 2)) for place in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            x, total = layer(x, total)
        return x, total


@put("plain values as inputs", several(vectors(8), lambda samples, generator: 0.5))
class PlainInput(Host):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


@put("copies of one block, with deepcopy")
def copies() -> nn.Module:
    block = Block()
    return Host(*(copy.deepcopy(block) for _ in range(4)))


@put("modules with the same weights by assignment")
def same_weights() -> nn.Module:
    made = Host()
    made.blocks[3].linear.weight = made.blocks[0].linear.weight
    return made


@put("first layer of the second half works in place")
def in_place_first() -> nn.Module:
    layers: list[nn.Module] = []
    for place in range(4):
        layers += [nn.ReLU(inplace=True), nn.Linear(8, 8)] if place else [nn.Linear(8, 8)]
    return nn.Sequential(*layers)


@put("in-place block at a border")
def in_place_blocks() -> nn.Module:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.linear = nn.LeakyReLU(0.1, inplace=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            return self.linear(self.relu(h))

    return Host(*(InPlace() for _ in range(4)))


SPECIMENS = put.specimens
