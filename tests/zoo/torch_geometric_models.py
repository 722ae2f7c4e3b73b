"""Models of torch_geometric: graphs, which have no dimension of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from tests.zoo.calm import calm
from tests.zoo.specimen import Data, Specimen, several

SPECIMENS: list[Specimen] = []
NODES, EDGES, WIDTH = 12, 40, 16


def nodes(samples: int, generator: torch.Generator) -> Tensor:
    """Features of nodes."""
    return torch.randn(NODES, 8, generator=generator)


def edges(samples: int, generator: torch.Generator) -> Tensor:
    """Pairs of nodes."""
    return torch.randint(NODES, (2, EDGES), generator=generator)


def edge_features(samples: int, generator: torch.Generator) -> Tensor:
    """Features of edges."""
    return torch.randn(EDGES, 4, generator=generator)


def kinds(samples: int, generator: torch.Generator) -> Tensor:
    """The kind of each edge."""
    return torch.randint(3, (EDGES,), generator=generator)


def graphs(samples: int, generator: torch.Generator) -> Tensor:
    """The graph of each node, of two."""
    return torch.arange(NODES) // (NODES // 2)


def elements(samples: int, generator: torch.Generator) -> Tensor:
    """An element for each atom."""
    return torch.randint(1, 10, (NODES,), generator=generator)


def places(samples: int, generator: torch.Generator) -> Tensor:
    """The place of each atom."""
    return torch.randn(NODES, 3, generator=generator)


GRAPH = several(nodes, edges)


def put(name: str, build: Callable[[], nn.Module], data: Data = GRAPH, **options: Any) -> None:
    """Adds a model."""
    made = Specimen(f"torch_geometric/{name}", lambda: calm(build()), data, splits=False, **options)
    SPECIMENS.append(made)


def stack(conv: Callable[[int, int], nn.Module], layers: int = 4) -> nn.Module:
    """A model of convolutions of one kind, as the tutorials write it."""
    return Stack(conv, layers)


class Stack(nn.Module):
    def __init__(self, conv: Callable[[int, int], nn.Module], layers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(WIDTH if place else 8, WIDTH) for place in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(x, *graph))
        return self.head(x)


put("GCN", lambda: pyg.GCN(8, WIDTH, 4, 3))
put("GCN with batch norm and jumps", lambda: pyg.GCN(8, WIDTH, 4, 3, norm="batch_norm", jk="cat"))
put("GCN, cached", lambda: stack(lambda a, b: pyg.GCNConv(a, b, cached=True)),
    by_hand=False, why="each layer keeps the graph of its first call, so other graphs are not looked at")  # fmt: skip
put("GraphSAGE", lambda: pyg.GraphSAGE(8, WIDTH, 4, 3))
put("GraphSAGE with LSTM jumps", lambda: pyg.GraphSAGE(8, WIDTH, 3, 3, jk="lstm"))
put("GAT", lambda: pyg.GAT(8, WIDTH, 4, 3, heads=2))
put("GAT v2", lambda: pyg.GAT(8, WIDTH, 4, 3, v2=True, heads=2, residual=True))
put("GIN", lambda: pyg.GIN(8, WIDTH, 4, 3))
put("PNA", lambda: pyg.PNA(8, WIDTH, 3, 3, aggregators=["mean", "max"], scalers=["identity", "amplification"],
                           deg=torch.tensor([1, 3, 4, 3, 1])))  # fmt: skip
put("EdgeCNN", lambda: pyg.EdgeCNN(8, WIDTH, 3, 3))
put("LINKX", lambda: pyg.LINKX(NODES, 8, WIDTH, 3, 2), several(nodes, edges))
put("GraphUNet", lambda: pyg.GraphUNet(8, WIDTH, 3, 2))
put("SchNet", lambda: pyg.SchNet(WIDTH, WIDTH, 3, 8, interaction_graph=_all_pairs), several(elements, places, graphs))
put("AttentiveFP", lambda: pyg.AttentiveFP(8, WIDTH, 3, 4, 2, 2), several(nodes, edges, edge_features, graphs))
put("NeuralFingerprint", lambda: pyg.NeuralFingerprint(8, WIDTH, 3, 3), several(nodes, edges, graphs))
put("MLP", lambda: pyg.MLP([8, WIDTH, WIDTH, WIDTH, 3]), nodes)
put("MLP with its batch", lambda: pyg.MLP([8, WIDTH, WIDTH, 3], norm="graph_norm"), several(nodes, graphs))
put("PMLP", lambda: pyg.PMLP(8, WIDTH, 3, 4), GRAPH)
put("RECT_L", lambda: pyg.RECT_L(8, WIDTH), GRAPH)
put("LightGCN", lambda: pyg.LightGCN(NODES, WIDTH, 3), edges)
put(
    "Polynormer",
    lambda: pyg.Polynormer(8, WIDTH, 3, in_dropout=0.0, dropout=0.0, global_dropout=0.0),
    several(nodes, edges, graphs),
)
put("GAE encoder", lambda: pyg.GAE(pyg.GCN(8, WIDTH, 3, 4)), GRAPH)
put("DeepGCN", lambda: DeepGCN())
put("GPS", lambda: GPS())
put("transformer convolutions", lambda: stack(lambda a, b: pyg.TransformerConv(a, b)))
put("Chebyshev convolutions", lambda: stack(lambda a, b: pyg.ChebConv(a, b, K=3)))
put("ARMA convolutions", lambda: stack(lambda a, b: pyg.ARMAConv(a, b)))
put("relational convolutions", lambda: stack(lambda a, b: pyg.RGCNConv(a, b, 3)), several(nodes, edges, kinds))
put("gated graph", lambda: Gated())
put("edge-conditioned convolutions", lambda: stack(
    lambda a, b: pyg.NNConv(a, b, nn.Linear(4, a * b))), several(nodes, edges, edge_features))  # fmt: skip
put("isomorphism with edges", lambda: stack(lambda a, b: pyg.GINEConv(
    nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()), edge_dim=4)),
    several(nodes, edges, edge_features))  # fmt: skip
put("cluster convolutions", lambda: stack(lambda a, b: pyg.ClusterGCNConv(a, b)))
put("diffusion by APPNP", lambda: Propagates(pyg.APPNP(4, 0.1)))
put("jumping knowledge", lambda: Jumps())
put("pooled by attention", lambda: Pools(), several(nodes, edges, graphs))
put("top-k pooling", lambda: TopK(), several(nodes, edges, graphs))
put("set to set", lambda: Pools(pyg.aggr.Set2Set(WIDTH, 2), 2 * WIDTH), several(nodes, edges, graphs))


def _all_pairs(places: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of atoms of a molecule, with their distances: without an extension of torch_geometric."""
    same = (graph[:, None] == graph[None]) & ~torch.eye(len(graph), dtype=torch.bool)
    row, col = same.nonzero().T
    return torch.stack([row, col]), (places[row] - places[col]).norm(dim=-1)


class DeepGCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(pyg.GENConv(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), "res+", 0.0) for _ in range(4)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.head(x)


class GPS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(pyg.GPSConv(WIDTH, pyg.GCNConv(WIDTH, WIDTH), heads=2) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.head(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.first, self.second = pyg.GatedGraphConv(WIDTH, 2), pyg.GatedGraphConv(WIDTH, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.encode(x), edge_index), edge_index))


class Propagates(nn.Module):
    def __init__(self, propagation: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.propagation = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3), propagation

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagation(self.second(self.first(x).relu()), edge_index)


class Jumps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.SAGEConv(WIDTH if place else 8, WIDTH) for place in range(4))
        self.jump, self.head = pyg.JumpingKnowledge("cat"), nn.Linear(4 * WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            found.append(x)
        return self.head(self.jump(found))


class Pools(nn.Module):
    def __init__(self, pool: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GraphConv(WIDTH if place else 8, WIDTH) for place in range(3))
        self.pool = pool or pyg.aggr.AttentionalAggregation(nn.Linear(WIDTH, 1))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(x, edge_index))
        return self.head(self.pool(x, batch, dim_size=2))


class TopK(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GraphConv(WIDTH if place else 8, WIDTH) for place in range(3))
        self.pools = nn.ModuleList(pyg.TopKPooling(WIDTH, 0.7) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        total = 0.0
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = torch.tanh(conv(x, edge_index))
            x, edge_index, _, batch, _, _ = pool(x, edge_index, None, batch)
            total = total + pyg.global_mean_pool(x, batch, 2)
        return self.head(total)
