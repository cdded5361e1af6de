"""Layers that are trained with the dropout of their publications, behind activations as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm
from benchmarks.foreign_code.encoders import FEW, TEXT, Attention
from benchmarks.foreign_code.problems import Called, features, problem

TRAINED = "train bf16"


def feed_forward(width: int, act: nn.Module, p: float, bias: bool = True) -> nn.Sequential:
    inner = 4 * width
    layers = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
    return nn.Sequential(layers[0], act, nn.Dropout(p), layers[1], nn.Dropout(p))


def norms_last(width: int, act: nn.Module) -> Called:
    def forward(m, x):
        x = m.norm1(x + F.dropout(m.attention(x), 0.1, m.training))
        return m.norm2(x + m.mlp(x))

    parts = dict(attention=Attention(width, 0.1), mlp=feed_forward(width, act, 0.1))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms)


@problem("torch.nn.TransformerEncoderLayer, all of its dropouts", TEXT, FEW, TRAINED, random=True)
def encoder_layer_all_dropouts(n, seq, width):
    return norms_last(width, nn.ReLU()), (features(n, seq, width),)


@problem("fairseq wav2vec 2.0 layer: norms last, three dropouts", TEXT, FEW, TRAINED, random=True)
def wave_encoder_layer(n, seq, width):
    return norms_last(width, nn.GELU()), (features(n, seq, width),)


@problem("transformers T5LayerFF: relu, dropout, no biases", TEXT, FEW, TRAINED, random=True)
def t5_feed_forward(n, seq, width):
    def forward(m, x):
        return x + m.mlp(m.norm(x))

    mlp = feed_forward(width, nn.ReLU(), 0.1, bias=False)
    return Called(forward, norm=RMSNorm(width), mlp=mlp), (features(n, seq, width),)


@problem("transformers T5LayerFF of version 1.1: a gate, dropout", TEXT, FEW, TRAINED, random=True)
def gated_t5_feed_forward(n, seq, width):
    def forward(m, x):
        y = m.norm(x)
        y = F.dropout(F.gelu(m.gate(y), approximate="tanh") * m.up(y), 0.1, m.training)
        return x + F.dropout(m.down(y), 0.1, m.training)

    gates = dict(gate=nn.Linear(width, 4 * width, False), up=nn.Linear(width, 4 * width, False))
    down = nn.Linear(4 * width, width, False)
    return Called(forward, norm=RMSNorm(width), **gates, down=down), (features(n, seq, width),)


@problem(
    "google-research ViT-B/16 block, dropout 0.1 as for ImageNet-21k",
    dict(n=64, seq=197, width=768),
    FEW,
    TRAINED,
    random=True,
)
def vit_block_dropout(n, seq, width):
    def forward(m, x):
        x = x + F.dropout(m.attention(m.norm1(x)), 0.1, m.training)
        return x + m.mlp(m.norm2(x))

    parts = dict(attention=Attention(width), mlp=feed_forward(width, nn.GELU(), 0.1))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms), (features(n, seq, width),)


@problem(
    "Conformer feed-forward module: swish, dropouts, half a residual",
    dict(n=16, seq=1024, width=512),
    FEW,
    TRAINED,
    random=True,
)
def conformer_feed_forward_dropout(n, seq, width):
    def forward(m, x):
        return x + 0.5 * m.mlp(m.norm(x))

    mlp = feed_forward(width, nn.SiLU(), 0.1)
    return Called(forward, norm=nn.LayerNorm(width), mlp=mlp), (features(n, seq, width),)


@problem(
    "OpenNMT positionwise feed-forward under autocast: relu, two dropouts",
    TEXT,
    FEW,
    "train f32",
    random=True,
)
def feed_forward_under_autocast(n, seq, width):
    def forward(m, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return m.mlp(m.norm(x)) + x

    mlp = feed_forward(width, nn.ReLU(), 0.1)
    return Called(forward, norm=nn.LayerNorm(width), mlp=mlp), (features(n, seq, width),)
