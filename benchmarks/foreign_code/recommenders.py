"""Recommender models: embeddings, interactions, towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.encoders import Attention
from benchmarks.foreign_code.problems import ALL, Called, features, problem

CLICKS, FEW = dict(n=16384, fields=26, width=64), dict(n=4, fields=5, width=8)
WORDS = 100_000


def tower(*sizes: int, act=nn.ReLU) -> nn.Sequential:
    layers = [
        part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), act())
    ]
    return nn.Sequential(*layers)


def ids(n: int, fields: int) -> torch.Tensor:
    return torch.randint(WORDS, (n, fields))


@problem("DLRM: dot interaction of embeddings and dense features", CLICKS, FEW, ALL)
def dlrm_interaction(n, fields, width):
    def forward(m, dense, sparse):
        x = m.bottom(dense)
        both = torch.cat((x[:, None], sparse), dim=1)
        dots = both @ both.transpose(1, 2)
        rows, columns = torch.tril_indices(fields + 1, fields + 1, -1, device=x.device)
        return m.top(torch.cat((x, dots[:, rows, columns]), dim=1))

    pairs = fields * (fields + 1) // 2
    parts = dict(bottom=tower(13, 512, 256, width), top=tower(width + pairs, 512, 256, 1))
    return Called(forward, **parts), (torch.randn(n, 13), features(n, fields, width))


@problem("embedding bags and an MLP", dict(n=32768, fields=8, width=64), FEW)
def embedding_bag_mlp(n, fields, width):
    def forward(m, x):
        pooled = [bag(one) for bag, one in zip(m.bags, x.unbind(1), strict=True)]
        return m.mlp(torch.cat(pooled, dim=1))

    bags = nn.ModuleList(nn.EmbeddingBag(WORDS, width, mode="sum") for _ in range(fields))
    parts = dict(bags=bags, mlp=tower(fields * width, 512, 128, 1))
    return Called(forward, **parts), (torch.randint(WORDS, (n, fields, 10)),)


@problem("DCN V2 cross layers", dict(n=32768, width=1024), dict(n=4, width=16), ALL)
def cross_layers(n, width):
    def forward(m, first):
        x = first
        for layer in m.layers:
            x = first * layer(x) + x
        return x

    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    return Called(forward, layers=layers), (features(n, width),)


@problem(
    "two towers with normalised embeddings", dict(n=32768, width=512), dict(n=4, width=16), ALL
)
def two_towers(n, width):
    def forward(m, user, item):
        u = F.normalize(m.user(user), p=2, dim=1)
        v = F.normalize(m.item(item), p=2, dim=1)
        return (u * v).sum(dim=1) / 0.05

    parts = dict(user=tower(width, 512, 128), item=tower(width, 512, 128))
    return Called(forward, **parts), (features(n, width), features(n, width))


@problem("DeepFM", CLICKS, FEW)
def deep_fm(n, fields, width):
    def forward(m, x):
        e = m.table(x)
        square_of_sum, sum_of_squares = e.sum(1).square(), e.square().sum(1)
        second = 0.5 * (square_of_sum - sum_of_squares).sum(1, keepdim=True)
        return torch.sigmoid(m.linear(x).sum(1) + second + m.deep(e.flatten(1)))

    parts = dict(table=nn.Embedding(WORDS, width), linear=nn.Embedding(WORDS, 1))
    deep = nn.Sequential(*tower(fields * width, 400, 400), nn.Linear(400, 1))
    return Called(forward, **parts, deep=deep), (ids(n, fields),)


@problem("wide & deep with batch norms and dropout", CLICKS, FEW, random=True)
def wide_and_deep(n, fields, width):
    def forward(m, x, dense):
        deep = m.deep(torch.cat((m.table(x).flatten(1), dense), dim=1))
        return torch.sigmoid(m.wide(dense) + m.last(deep))

    sizes = fields * width + 13, 512, 256
    deep = [
        part
        for a, b in zip(sizes, sizes[1:], strict=False)
        for part in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.1))
    ]
    parts = dict(table=nn.Embedding(WORDS, width), deep=nn.Sequential(*deep))
    parts |= dict(wide=nn.Linear(13, 1), last=nn.Linear(256, 1))
    return Called(forward, **parts), (ids(n, fields), torch.randn(n, 13))


@problem("AutoInt: attention over fields", CLICKS, FEW)
def autoint_layer(n, fields, width):
    def forward(m, x):
        return F.relu(m.attention(x) + m.residual(x))

    parts = dict(attention=Attention(width), residual=nn.Linear(width, width, bias=False))
    return Called(forward, **parts), (features(n, fields, width),)


@problem(
    "SASRec block over histories of clicks",
    dict(n=256, seq=200, width=128),
    dict(n=2, seq=6, width=16),
)
def sasrec_block(n, seq, width):
    def forward(m, x):
        x = (m.items(x) * width**0.5 + m.places.weight) * (x != 0)[..., None]
        x = m.norm1(x)
        x = m.norm2(x + m.attention(x, causal=True))
        return m.norm3(m.conv2(F.relu(m.conv1(x.transpose(1, 2)))).transpose(1, 2) + x)

    parts = dict(items=nn.Embedding(WORDS, width), places=nn.Embedding(seq, width))
    norms = {name: nn.LayerNorm(width, eps=1e-8) for name in ("norm1", "norm2", "norm3")}
    convs = dict(conv1=nn.Conv1d(width, width, 1), conv2=nn.Conv1d(width, width, 1))
    return Called(forward, **parts, **norms, **convs, attention=Attention(width)), (ids(n, seq),)


@problem(
    "DIN: attention of a target item to the history",
    dict(n=4096, seq=100, width=64),
    dict(n=3, seq=6, width=8),
)
def interest_attention(n, seq, width):
    def forward(m, history, target, mask):
        query = target[:, None].expand_as(history)
        pairs = torch.cat((query, history, query - history, query * history), dim=-1)
        scores = m.score(pairs).squeeze(-1).masked_fill(~mask, -1e4)
        return torch.softmax(scores, dim=-1)[:, None] @ history

    score = nn.Sequential(*tower(4 * width, 80, 40, act=nn.PReLU), nn.Linear(40, 1))
    mask = torch.rand(n, seq) < 0.8
    return Called(forward, score=score), (features(n, seq, width), features(n, width), mask)


@problem("MMoE: experts, softmax gates, two tasks", dict(n=32768, width=512), dict(n=4, width=16))
def mixture_of_experts_tasks(n, width):
    def forward(m, x):
        experts = torch.stack([expert(x) for expert in m.experts], dim=1)
        tasks = [
            head((F.softmax(gate(x), dim=-1)[..., None] * experts).sum(1))
            for gate, head in zip(m.gates, m.heads, strict=True)
        ]
        return torch.sigmoid(torch.cat(tasks, dim=1))

    parts = dict(experts=nn.ModuleList(tower(width, 256) for _ in range(4)))
    parts["gates"] = nn.ModuleList(nn.Linear(width, 4) for _ in range(2))
    parts["heads"] = nn.ModuleList(nn.Linear(256, 1) for _ in range(2))
    return Called(forward, **parts), (features(n, width),)


@problem("BPR loss of a matrix factorisation", dict(n=262144, width=128), dict(n=5, width=8))
def bpr_loss(n, width):
    def forward(m, user, liked, other):
        u, i, j = m.users(user), m.items(liked), m.items(other)
        rank = -F.logsigmoid((u * i).sum(1) - (u * j).sum(1)).mean()
        return rank + 1e-4 * (u.square().sum() + i.square().sum() + j.square().sum()) / len(u)

    parts = dict(users=nn.Embedding(WORDS, width), items=nn.Embedding(WORDS, width))
    return Called(forward, **parts), tuple(torch.randint(WORDS, (n,)) for _ in range(3))


@problem(
    "xDeepFM: compressed interactions by outer products and a convolution, summed fields",
    dict(n=4096, fields=26, width=16),
    dict(n=4, fields=5, width=8),
)
def compressed_interactions(n, fields, width):
    def forward(m, x):
        h, found = x, []
        for i, conv in enumerate(m.convs):
            h = torch.einsum("bhd,bmd->bhmd", h, x).flatten(1, 2)
            h = F.relu(conv(h))
            if i + 1 < len(m.convs):
                h, direct = torch.split(h, 64, dim=1)
                found.append(direct)
        return m.head(torch.cat([*found, h], dim=1).sum(-1)).squeeze(1).sigmoid()

    convs = [nn.Conv1d(fields * fields, 128, 1), nn.Conv1d(64 * fields, 128, 1)]
    return Called(forward, convs=nn.ModuleList(convs), head=nn.Linear(192, 1)), (
        features(n, fields, width),
    )


@problem(
    "HSTU: pointwise silu attention with a bias of positions, a gate by a normed product",
    dict(n=16, seq=512, heads=4, d=64),
    dict(n=2, seq=7, heads=2, d=8),
)
def pointwise_attention(n, seq, heads, d):
    def forward(m, x, valid, keep):
        h = F.layer_norm(x, (heads * d,), eps=1e-6)
        u, v, q, k = torch.split(F.silu(m.uvqk(h)), heads * d, dim=-1)
        q, k = (y.view(n, seq, heads, d) for y in (q, k))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) + m.bias[m.at]
        scores = F.silu(scores) / seq * keep
        y = torch.einsum("bhnm,bmhd->bnhd", scores, v.reshape(n, seq, heads, d))
        y = u * F.layer_norm(y.reshape(n, seq, -1), (heads * d,), eps=1e-6)
        return (m.out(F.dropout(y, 0.0, m.training)) + x) * valid.unsqueeze(-1)

    width = heads * d
    parts = dict(uvqk=nn.Linear(width, 4 * width, bias=False), out=nn.Linear(width, width))
    module = Called(forward, **parts, bias=nn.Parameter(torch.randn(2 * seq - 1) * 0.1))
    places = torch.arange(seq)
    module.register_buffer("at", places[:, None] - places[None] + seq - 1)
    lengths = torch.linspace(seq, seq // 2, n).long()
    valid = (places[None] < lengths[:, None]).float()
    return module, (features(n, seq, width), valid, torch.ones(seq, seq).tril())


@problem(
    "GDCN: gated cross layers beside a deep tower, joined",
    dict(n=16384, width=1027),
    dict(n=4, width=13),
    ALL,
)
def gated_cross(n, width):
    def forward(m, x):
        y = x
        for cross, gate in zip(m.crosses, m.gates, strict=True):
            y = x * cross(y) * torch.sigmoid(gate(y)) + y
        return m.head(torch.cat([y, m.deep(x)], dim=-1))

    layers = {
        name: nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(2))
        for name, bias in (("crosses", True), ("gates", False))
    }
    norms = nn.Linear(width, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Dropout(0.0)
    return Called(forward, **layers, deep=nn.Sequential(*norms), head=nn.Linear(width + 400, 1)), (
        features(n, width),
    )


@problem(
    "MaskNet: masks of an instance over normed fields, layer norm, relu, serial and parallel",
    dict(n=16384, fields=26, width=16),
    FEW,
)
def instance_masks(n, fields, width):
    wide = fields * width

    def forward(m, x):
        flat = x.flatten(1)
        normed = m.norm(x).view(n, -1)
        found = []
        for block in m.blocks:
            mask = block["mask"](flat)
            found.append(F.relu(block["norm"](block["out"](mask * normed))))
        first = F.relu(m.norm2(m.out2(found[0] * m.mask2(flat))))
        return m.head(torch.cat([first, *found], dim=1))

    def mask(b: int):
        return nn.Sequential(nn.Linear(wide, 2 * wide), nn.ReLU(), nn.Linear(2 * wide, b))

    def block():
        parts = dict(mask=mask(wide), out=nn.Linear(wide, 128), norm=nn.LayerNorm(128))
        return nn.ModuleDict(parts)

    parts = dict(mask2=mask(128), out2=nn.Linear(128, 64), norm2=nn.LayerNorm(64))
    parts |= dict(norm=nn.LayerNorm(width), head=nn.Linear(64 + 2 * 128, 1))
    return Called(forward, **parts, blocks=nn.ModuleList(block() for _ in range(2))), (
        features(n, fields, width),
    )
