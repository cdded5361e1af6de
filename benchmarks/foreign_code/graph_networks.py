"""Graph networks: gather along edges, reduce by node."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import BOTH_F32, Called, features, problem

NODES, FEW = dict(nodes=65536, edges=524288, width=128), dict(nodes=9, edges=24, width=8)


def edges_of(nodes: int, edges: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))


def scatter_mean(values, at, nodes: int):
    total = torch.zeros(nodes, values.shape[1], dtype=values.dtype, device=values.device)
    total = total.index_add(0, at, values)
    ones = torch.ones(len(at), dtype=values.dtype, device=values.device)
    count = torch.zeros(nodes, dtype=values.dtype, device=values.device).index_add(0, at, ones)
    return total / count.clamp(min=1)[:, None]


@problem("PyG SAGEConv: mean of the neighbours, l2 norm", NODES, FEW, BOTH_F32)
def sage_layer(nodes, edges, width):
    def forward(m, x, source, target):
        mean = scatter_mean(x[source], target, nodes)
        return F.normalize(m.left(mean) + m.right(x), p=2.0, dim=-1)

    parts = dict(left=nn.Linear(width, width), right=nn.Linear(width, width, bias=False))
    return Called(forward, **parts), (features(nodes, width), *edges_of(nodes, edges))


@problem("PyG GCN layer with layer norm and relu", NODES, FEW, BOTH_F32)
def gcn_layer_norm(nodes, edges, width):
    def forward(m, x, source, target, weight):
        y = torch.zeros_like(x).index_add(0, target, m.linear(x)[source] * weight[:, None])
        return F.relu(m.norm(y)) + x

    parts = dict(linear=nn.Linear(width, width), norm=nn.LayerNorm(width))
    return Called(forward, **parts), (
        features(nodes, width),
        *edges_of(nodes, edges),
        torch.rand(edges),
    )


@problem("PyG GIN layer: sum, MLP with batch norm", NODES, FEW, BOTH_F32)
def gin_layer(nodes, edges, width):
    def forward(m, x, source, target):
        return F.relu(m.mlp((1 + m.eps) * x + torch.zeros_like(x).index_add(0, target, x[source])))

    parts = nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
    eps = nn.Parameter(torch.zeros(1))
    return Called(forward, mlp=nn.Sequential(*parts), eps=eps), (
        features(nodes, width),
        *edges_of(nodes, edges),
    )


@problem("GraphNorm after a message sum", NODES, FEW, BOTH_F32)
def graph_norm(nodes, edges, width):
    def forward(m, x):
        centred = x - m.alpha * x.mean(0, keepdim=True)
        std = (centred.square().mean(0, keepdim=True) + 1e-5).sqrt()
        return F.gelu(m.linear(m.weight * centred / std + m.bias))

    vectors = {name: nn.Parameter(torch.rand(width)) for name in ("alpha", "weight", "bias")}
    return Called(forward, **vectors, linear=nn.Linear(width, width)), (features(nodes, width),)


@problem(
    "PointNet: shared MLP with batch norms, max over points",
    dict(n=64, points=2048),
    dict(n=2, points=12),
    BOTH_F32,
)
def pointnet(n, points):
    def forward(m, x):
        return m.head(m.body(x).amax(dim=2))

    body = []
    for a, b in ((3, 64), (64, 128), (128, 1024)):
        body += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
    head = nn.Sequential(nn.Linear(1024, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 40))
    return Called(forward, body=nn.Sequential(*body), head=head), (torch.randn(n, 3, points),)
