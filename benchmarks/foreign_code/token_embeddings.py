"""What language models begin with: the embeddings of their tokens, whose weights are large."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm
from benchmarks.foreign_code.problems import BOTH, Called, problem

FEW = dict(n=2, seq=8, width=32)


def words_of_text(words: int, *shape: int) -> torch.Tensor:
    """Words as often as in text: the k-th most frequent has a share of about 1 / k (Zipf)."""
    share = 1 / torch.arange(1, words + 1)
    return torch.multinomial(share, shape[0] * shape[1], replacement=True).reshape(shape)


@problem("transformers GPT-2 embeddings, first norm", dict(n=16, seq=1024, width=1024), FEW, BOTH)
def learnt_positions(n, seq, width):
    def forward(m, ids):
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        x = m.words(ids) + m.places(places)
        return x, m.norm(x)

    parts = dict(words=nn.Embedding(50257, width), places=nn.Embedding(1024, width))
    return Called(forward, **parts, norm=nn.LayerNorm(width)), (words_of_text(50257, n, seq),)


@problem("transformers Llama embeddings, first norm", dict(n=4, seq=2048, width=2048), FEW, BOTH)
def words_alone(n, seq, width):
    def forward(m, ids):
        x = m.words(ids)
        return x, m.norm(x)

    parts = dict(words=nn.Embedding(128256, width), norm=RMSNorm(width))
    return Called(forward, **parts), (words_of_text(128256, n, seq),)


@problem("transformers Gemma embeddings: scaled, tied", dict(n=2, seq=1024, width=2304), FEW, BOTH)
def tied_and_scaled(n, seq, width):
    def forward(m, ids, labels):
        x = m.norm(m.words(ids) * width**0.5)
        return F.cross_entropy(F.linear(x, m.words.weight).flatten(0, 1), labels.flatten())

    parts = dict(words=nn.Embedding(64000, width), norm=RMSNorm(width))
    return Called(forward, **parts), tuple(words_of_text(64000, n, seq) for _ in range(2))
