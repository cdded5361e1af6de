"""A small language model whose layers can be spread over ranks in every way."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

WORDS, HEAD = 32, 8


class Block(nn.Module):
    """Attention and a feed-forward part. How many heads there are, the projections say: a rank of
    tensor parallelism has some of them.
    """

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        inner = max(HEAD, width // HEAD * HEAD)
        self.q, self.k, self.v = (nn.Linear(width, inner) for _ in range(3))
        self.out = nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) * HEAD**-0.5).masked_fill(later, -torch.inf)
        x = x + self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Returns the loss of predicting each word from those before it."""

    def __init__(self, width: int = 16, layers: int = 2):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


# How tensor parallelism divides a block: by columns what comes first, by rows what follows it.
PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
PLAN |= {name: RowwiseParallel() for name in ("out", "down")}
