"""Proteins and molecules: pairs of residues, atoms and their distances."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import BOTH_F32, Called, features, problem

PAIRS, FEW = dict(residues=256, c=128), dict(residues=6, c=16)
ATOMS, FEW_ATOMS = dict(atoms=16384, edges=262144, width=128), dict(atoms=9, edges=24, width=8)


def linears(**sizes: tuple[int, int]) -> dict[str, nn.Linear]:
    return {name: nn.Linear(a, b) for name, (a, b) in sizes.items()}


@problem("OpenFold: triangle multiplication of outgoing edges", PAIRS, FEW)
def triangle_multiplication(residues, c):
    def forward(m, z, mask):
        h = m.norm_in(z)
        keep = mask.unsqueeze(-1)
        a = keep * torch.sigmoid(m.a_gate(h)) * m.a(h)
        b = keep * (m.b_gate(h).sigmoid() * m.b(h))
        x = torch.matmul(a.permute(2, 0, 1), b.permute(2, 1, 0)).permute(1, 2, 0)
        return z + m.out(m.norm_out(x)) * torch.sigmoid(m.gate(h))

    parts = linears(**{name: (c, c) for name in ("a", "b", "a_gate", "b_gate", "gate", "out")})
    mask = (torch.rand(residues, residues) > 0.1).float()
    return Called(forward, **parts, norm_in=nn.LayerNorm(c), norm_out=nn.LayerNorm(c)), (
        features(residues, residues, c),
        mask,
    )


@problem(
    "OpenFold: gated attention along rows with a bias of pairs and one of the mask", PAIRS, FEW
)
def triangle_attention(residues, c):
    heads = 4

    def forward(m, z, mask):
        x = m.norm(z)
        hidden = (1e9 * (mask - 1))[:, None, None, :]
        bias = m.bias(x).permute(2, 0, 1).unsqueeze(0)
        q, k, v = (f(x).view(residues, residues, heads, -1).transpose(-2, -3) for f in m.qkv)
        q = q / (c // heads) ** 0.5
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores += hidden
        scores += bias
        y = torch.matmul(F.softmax(scores, -1), v).transpose(-2, -3)
        y = y * torch.sigmoid(m.gate(x)).view(residues, residues, heads, -1)
        return z + m.out(y.reshape(residues, residues, -1))

    qkv = nn.ModuleList(nn.Linear(c, c, bias=False) for _ in range(3))
    parts = linears(gate=(c, c), out=(c, c), bias=(c, heads))
    mask = (torch.rand(residues, residues) > 0.1).float()
    return Called(forward, **parts, qkv=qkv, norm=nn.LayerNorm(c)), (
        features(residues, residues, c),
        mask,
    )


@problem(
    "OpenFold: mean of outer products of sequences, and the transition behind it",
    dict(rows=128, residues=192, c=64),
    dict(rows=4, residues=6, c=8),
)
def outer_product_mean(rows, residues, c):
    def forward(m, x, z, mask):
        h = m.norm(x)
        a, b = m.a(h) * mask[..., None], m.b(h) * mask[..., None]
        outer = torch.einsum("sic,sjd->ijcd", a, b).flatten(-2)
        norm = torch.einsum("si,sj->ij", mask, mask)[..., None] + 1e-3
        z = z + m.out(outer) / norm
        return z + m.down(F.relu(m.up(m.norm_z(z))))

    parts = linears(a=(c, 16), b=(c, 16), out=(256, c), up=(c, 4 * c), down=(4 * c, c))
    mask = (torch.rand(rows, residues) > 0.1).float()
    return Called(forward, **parts, norm=nn.LayerNorm(c), norm_z=nn.LayerNorm(c)), (
        features(rows, residues, c),
        features(residues, residues, c),
        mask,
    )


@problem(
    "SchNet interaction: gaussians of distances, shifted softplus, cosine cutoff",
    ATOMS,
    FEW_ATOMS,
    BOTH_F32,
)
def continuous_filters(atoms, edges, width):
    def shifted(x):
        return F.softplus(x) - 0.6931471805599453

    def forward(m, x, source, target, distance):
        spread = torch.exp(-10.0 * (distance[:, None] - m.centres[None]).pow(2))
        cutoff = 0.5 * (torch.cos(distance * torch.pi / 5.0) + 1.0)
        w = m.filter2(shifted(m.filter1(spread))) * cutoff[:, None]
        y = torch.zeros_like(x).index_add(0, target, m.inside(x)[source] * w)
        return x + m.out2(shifted(m.out1(y)))

    parts = linears(filter1=(50, width), filter2=(width, width), out1=(width, width))
    parts |= linears(out2=(width, width), inside=(width, width))
    module = Called(forward, **parts)
    module.register_buffer("centres", torch.linspace(0, 5, 50))
    ends = (torch.randint(atoms, (edges,)) for _ in range(2))
    return module, (features(atoms, width), *ends, torch.rand(edges) * 5)


@problem(
    "EGNN layer: silu MLPs of pairs, soft edges, moved coordinates", ATOMS, FEW_ATOMS, BOTH_F32
)
def equivariant_layer(atoms, edges, width):
    def forward(m, x, places, source, target):
        apart = places[source] - places[target]
        square = torch.sum(apart**2, 1).unsqueeze(1)
        message = m.edge(torch.cat([x[source], x[target], square], dim=1))
        message = message * torch.sigmoid(m.soft(message))
        moved = apart / (torch.sqrt(square).detach() + 1e-8) * torch.tanh(m.move(message))
        places = places + torch.zeros_like(places).index_add(0, target, moved) / 16
        total = torch.zeros_like(x).index_add(0, target, message)
        return x + m.node(torch.cat([x, total], dim=1)), places

    def mlp(a: int):
        return nn.Sequential(nn.Linear(a, width), nn.SiLU(), nn.Linear(width, width))

    edge = nn.Sequential(*mlp(2 * width + 1), nn.SiLU())
    parts = linears(soft=(width, 1), move=(width, 1))
    ends = (torch.randint(atoms, (edges,)) for _ in range(2))
    return Called(forward, edge=edge, node=mlp(2 * width), **parts), (
        features(atoms, width),
        features(atoms, 3),
        *ends,
    )


@problem(
    "PyG GATv2 layer: leaky relu scores, softmax over the edges of a node, elu",
    ATOMS,
    FEW_ATOMS,
    BOTH_F32,
)
def edge_softmax(atoms, edges, width):
    heads = 4

    def forward(m, x, source, target):
        left, right = (f(x).view(atoms, heads, -1) for f in (m.left, m.right))
        there = left[source]
        alpha = (F.leaky_relu(there + right[target], 0.2) * m.att).sum(dim=-1)
        index = target[:, None].expand_as(alpha)
        largest = torch.full((atoms, heads), -torch.inf, dtype=x.dtype, device=x.device)
        largest = largest.scatter_reduce(0, index, alpha.detach(), "amax")
        alpha = (alpha - largest[target]).exp()
        total = torch.zeros(atoms, heads, dtype=x.dtype, device=x.device)
        alpha = alpha / (total.index_add(0, target, alpha)[target] + 1e-16)
        y = torch.zeros_like(left).index_add(0, target, there * alpha[..., None])
        return F.elu(y.flatten(1) + m.bias)

    parts = linears(left=(width, width), right=(width, width))
    learnt = dict(att=nn.Parameter(torch.randn(1, heads, width // heads)))
    ends = (torch.randint(atoms, (edges,)) for _ in range(2))
    return Called(forward, **parts, **learnt, bias=nn.Parameter(torch.zeros(width))), (
        features(atoms, width),
        *ends,
    )
