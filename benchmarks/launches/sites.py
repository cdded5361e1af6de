"""The cases whose launches benchmarks.compile_kernels compiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

HALF, FULL = torch.bfloat16, torch.float32


class Site(NamedTuple):
    pattern: str
    case: dict[str, int]
    dtype: torch.dtype
    backward: bool  # does a backward follow?


MASKS = dict(padded=1), dict(bias=1)
CASES = [
    ("add_mul", dict(size=20_000_000), FULL, False),
    ("add_mul_exp", dict(size=20_000_000), FULL, False),
    ("add_mul_exp", dict(size=20_000_000), HALF, False),
    ("quantize_int8", dict(size=50_000_000), FULL, False),
    ("quantize_int8", dict(size=64_000_000), HALF, False),
    ("layer_norm", dict(rows=524288, n=128), HALF, True),
    ("layer_norm", dict(rows=7, n=100), FULL, True),
    ("layer_norm", dict(rows=131072, n=512), FULL, True),
    ("layer_norm", dict(rows=16384, n=1024), HALF, True),
    ("layer_norm", dict(rows=16384, n=4096), HALF, True),
    ("layer_norm", dict(rows=16384, n=4096), FULL, True),
    ("layer_norm", dict(rows=16384, n=2049), HALF, True),
    ("layer_norm", dict(rows=8192, n=8192), HALF, True),
    ("layer_norm", dict(rows=8192, n=8192), FULL, True),
    ("layer_norm", dict(rows=2048, n=16384), HALF, True),
    ("layer_norm", dict(rows=2048, n=32768), HALF, True),
    ("layer_norm", dict(rows=2048, n=32768), FULL, True),
    ("layer_norm", dict(rows=1024, n=65536), HALF, True),  # shared by programs
    ("layer_norm", dict(rows=64, n=131072), HALF, True),  # split over programs
    ("layer_norm", dict(rows=16, n=8192), HALF, True),
    ("layer_norm", dict(rows=16, n=8192), FULL, True),
    ("layer_norm", dict(rows=192, n=5120), HALF, True),
    ("layer_norm", dict(rows=64, n=131072), FULL, True),
    ("add_layer_norm", dict(rows=16384, n=4096), HALF, True),
    ("add_layer_norm", dict(rows=64, n=131072), HALF, True),
    ("dropout_add", dict(rows=16384, n=4096), HALF, True),
    ("dropout_add", dict(rows=16384, n=4096), FULL, True),
    ("dropout_add_layer_norm", dict(rows=16384, n=1024), HALF, True),
    ("dropout_add_layer_norm", dict(rows=16384, n=4096), HALF, True),
    ("dropout_add_layer_norm", dict(rows=16384, n=4096), FULL, True),
    ("dropout_add_layer_norm", dict(rows=16, n=8192), HALF, True),
    ("dropout_add_layer_norm", dict(rows=4096, n=768), HALF, True),
    ("dropout_add_layer_norm", dict(rows=8192, n=5120), HALF, True),
    ("dropout_add_layer_norm", dict(rows=8192, n=8192), HALF, True),
    ("dropout_add_layer_norm", dict(rows=2048, n=32768), HALF, True),
    ("dropout_add_layer_norm", dict(rows=1024, n=65536), HALF, True),
    ("dropout_add_layer_norm", dict(rows=64, n=131072), HALF, True),
    ("rms_norm", dict(rows=16384, n=4096), HALF, True),
    ("add_rms_norm", dict(rows=16384, n=4096), HALF, True),
    ("add_rms_norm", dict(rows=192, n=5120), HALF, True),
    ("add_rms_norm", dict(rows=8192, n=8192), HALF, True),
    ("add_rms_norm", dict(rows=2048, n=32768), HALF, True),
    ("add_rms_norm", dict(rows=1024, n=65536), HALF, True),
    *(
        ("all_reduce_norm", dict(rows=rows, n=n, layer=layer), dtype, False)
        for rows, n, dtype in (
            (1, 4096, HALF),
            (16, 4096, HALF),
            (4096, 4096, HALF),
            (7, 2049, HALF),
            (512, 16384, HALF),
            (512, 16384, FULL),
        )
        for layer in (0, 1)
    ),
    *(
        ("norm_rotary", dict(b=8, h=h, n=1024, d=128, transposed=1), dtype, True)
        for dtype in (HALF, FULL)
        for h in (16, 8)
    ),
    ("norm_rotary", dict(b=8, h=40, n=1024, d=128, transposed=1), HALF, True),
    ("norm_rotary", dict(b=8, h=1, n=1024, d=256, transposed=1), HALF, True),
    ("norm_rotary", dict(b=1, h=14, n=1, d=64, transposed=1), HALF, False),
    ("norm_rotary", dict(b=2, h=3, n=512, d=80, transposed=1), HALF, True),
    ("norm_rotary", dict(b=2, h=12, n=512, d=512, transposed=1), FULL, True),
    ("modulated_norm", dict(b=32, t=4096, n=256), HALF, True),
    ("modulated_norm", dict(b=4, t=4096, n=3072), HALF, True),
    ("modulated_norm", dict(b=4, t=4096, n=3072), FULL, True),
    ("modulated_norm", dict(b=8, t=1024, n=1152), HALF, True),
    ("modulated_norm", dict(b=8, t=4096, n=1536), HALF, True),
    ("modulated_norm", dict(b=2, t=4096, n=5120), HALF, True),
    ("modulated_norm", dict(b=2, t=4096, n=8192), FULL, True),
    ("modulated_norm", dict(b=3, t=700, n=2049), HALF, True),
    ("modulated_norm", dict(b=2, t=5, n=33), FULL, True),
    ("softmax", dict(rows=16384, n=4096), HALF, True),
    ("softmax", dict(rows=8192, n=8192), HALF, True),
    ("softmax", dict(rows=2048, n=32768), HALF, True),
    ("softmax", dict(rows=2048, n=32768), FULL, True),
    ("softmax", dict(rows=64, n=131072), HALF, True),
    ("l2_norm", dict(rows=16384, n=1024), HALF, True),
    ("l2_norm", dict(rows=16384, n=4096), HALF, True),
    ("l2_norm", dict(rows=8192, n=8192), FULL, True),
    ("l2_norm", dict(rows=2048, n=32768), HALF, True),
    ("l2_norm", dict(rows=64, n=131072), FULL, True),
    ("batch_norm", dict(b=64, c=256, n=56), HALF, False),
    ("batch_norm", dict(b=64, c=2048, n=7), FULL, False),
    ("batch_norm", dict(b=256, c=2048, n=7), HALF, False),
    ("batch_norm", dict(b=256, c=2048, n=8), HALF, False),
    ("group_norm", dict(b=16, c=320, n=8, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=480, n=32, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=480, n=64, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=480, n=64, groups=32), FULL, True),
    ("group_norm", dict(b=16, c=320, n=32, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=320, n=32, groups=32), FULL, True),
    ("group_norm", dict(b=2, c=512, n=128, groups=32), HALF, True),  # split over programs
    ("group_norm", dict(b=2, c=512, n=128, groups=32), FULL, True),
    *(
        ("group_norm", dict(b=b, c=c, n=n, groups=32, silu=1, channels_last=1), dtype, True)
        for b, c, n in ((64, 320, 64), (2, 512, 128), (8, 96, 32))
        for dtype in (HALF, FULL)
    ),
    ("bias_act", dict(rows=16384, n=4096), HALF, False),
    ("bias_act", dict(rows=16384, n=100), FULL, False),
    ("cross_entropy", dict(rows=8192, v=128256), HALF, True),
    ("cross_entropy", dict(rows=8192, v=128256), FULL, True),
    ("linear_cross_entropy", dict(rows=8192, k=4096, v=128256), HALF, True),
    ("padded_linear_cross_entropy", dict(rows=16384, k=1024, v=30522), HALF, True),
    ("sorted_embedding", dict(rows=16384, v=50257, n=1024), HALF, True),
    ("sorted_embedding", dict(rows=700, v=257, n=4100), torch.float16, True),
    *(
        ("generated_rows", dict(rows=rows, n=n, softmax=softmax), dtype, True)
        for rows, n in ((65536, 320), (65536, 64), (16384, 2048), (8192, 4096))
        for softmax in (0, 1)
        for dtype in (HALF, FULL)
    ),
    ("token_log_probs", dict(b=4, s=2048, v=128256), HALF, True),
    ("token_log_probs", dict(b=4, s=2048, v=128256), FULL, True),
    ("token_log_probs", dict(b=4, s=2048, v=262144), torch.float16, True),
    ("token_log_probs", dict(b=3, s=700, v=2049), HALF, True),
    ("token_log_probs", dict(b=3, s=7, v=1), FULL, True),
    *(
        (name, dict(rows=rows, v=v), dtype, True)
        for name in ("soft_cross_entropy", "distillation_loss")
        for rows, v, dtype in (
            (8192, 128256, HALF),
            (8192, 128256, FULL),
            (4096, 1000, torch.float16),
            (7, 2049, HALF),
            (7, 1, FULL),
        )
    ),
    *(
        ("interpolate_bilinear", case, dtype, True)
        for case, dtype in (
            (dict(b=8, c=21, n=64, size=512), HALF),
            (dict(b=4, c=150, n=128, size=512, corners=1), FULL),
            (dict(b=16, c=64, n=128, size=256, last=1), HALF),
            (dict(b=8, c=3, n=513, size=129), torch.float16),
        )
    ),
    *(
        ("max_pool", case, dtype, True)
        for case, dtype in (
            (dict(b=128, c=64, n=112), HALF),
            (dict(b=128, c=64, n=112, last=1), HALF),
            (dict(b=16, c=128, n=112, k=2), FULL),
            (dict(b=8, c=3, n=57, last=1), torch.float16),
        )
    ),
    *(
        ("image_convolution", case, dtype, True)
        for case, dtype in (
            (dict(b=128, c=3, n=224, p=7, o=64, last=1), HALF),
            (dict(b=128, c=3, n=224, p=7, o=64), torch.float16),
            (dict(b=32, c=3, n=640, p=3, o=32, last=1), HALF),
            (dict(b=32, c=4, n=64, p=3, o=320, last=1), HALF),
            (dict(b=8, c=1, n=28, p=5, o=6), torch.float16),
        )
    ),
    ("norm_act", dict(rows=524288, n=128), HALF, True),
    ("norm_act", dict(rows=16384, n=4096), HALF, True),
    ("norm_act", dict(rows=16384, n=8192), HALF, True),
    ("norm_act", dict(rows=16384, n=1024, silu=1), torch.float16, True),
    ("norm_act", dict(rows=7, n=2049), FULL, True),
    ("gated_norm", dict(rows=524288, n=128), HALF, True),
    ("gated_norm", dict(rows=16384, n=4096), HALF, True),
    ("gated_norm", dict(rows=16384, n=8192), HALF, True),
    ("gated_norm", dict(rows=7, n=2049), FULL, True),
    ("gated_norm", dict(rows=7, n=4097), FULL, True),
    ("gated_norm", dict(rows=4096, n=8192), FULL, True),
    ("batch_norm_training", dict(b=128, c=256, n=56), HALF, True),
    ("batch_norm_training", dict(b=128, c=64, n=112), HALF, True),
    ("batch_norm_training", dict(b=32, c=2048, n=7), FULL, True),
    ("batch_norm_training", dict(b=32, c=1000, n=7), torch.float16, True),
    ("batch_norm_training", dict(b=8, c=3, n=224), FULL, True),
    ("batch_norm_sum", dict(b=128, c=256, n=56), HALF, True),
    ("batch_norm_sum", dict(b=32, c=2048, n=7), FULL, True),
    ("batch_norm_sum", dict(b=32, c=1000, n=7), torch.float16, True),
    ("channel_norm", dict(b=32, c=96, n=56), HALF, True),
    ("channel_norm", dict(b=32, c=96, n=56), FULL, True),
    ("channel_norm", dict(b=32, c=192, n=28), HALF, True),
    ("channel_norm", dict(b=8, c=256, n=64), torch.float16, True),
    ("channel_norm", dict(b=8, c=384, n=14), HALF, True),
    ("channel_norm", dict(b=32, c=768, n=7), HALF, True),
    ("channel_norm", dict(b=32, c=768, n=7), FULL, True),
    ("channel_norm", dict(b=8, c=1024, n=32), FULL, True),
    ("channel_norm", dict(b=8, c=3, n=224), HALF, True),
    *(
        (name, dict(b=b, c=c, n=n), dtype, True)
        for name in ("channel_softmax", "channel_cross_entropy")
        for b, c, n, dtype in (
            (16, 19, 512, HALF),
            (16, 150, 256, FULL),
            (2, 1000, 33, HALF),
            (8, 3, 224, FULL),
        )
    ),
    ("quantize_per_token", dict(rows=8192, n=4096), HALF, False),
    ("quantize_per_token", dict(rows=64, n=131072), FULL, False),
    ("rms_norm_quantize", dict(rows=8192, n=4096), HALF, False),
    ("rms_norm_quantize", dict(rows=8192, n=8192), HALF, False),
    ("rms_norm_quantize", dict(rows=2048, n=16384), FULL, False),
    ("rms_norm_quantize", dict(rows=64, n=131072), FULL, False),
    ("linear_act", dict(m=16384, k=1024, n=4096), HALF, True),
    ("linear_act", dict(m=200, k=768, n=3072), HALF, True),
    ("linear_act", dict(m=16, k=4096, n=14336), HALF, False),
    ("linear_act", dict(m=16, k=4096, n=1024), HALF, False),  # shared by programs
    ("gated_linear", dict(m=1, k=4096, n=14336), HALF, False),
    ("mlp", dict(m=16384, k=1024, n=4096, o=1024), HALF, True),
    ("mlp", dict(m=200, k=1024, n=4096, o=1024), HALF, True),
    ("dropout_mlp", dict(m=16384, k=1024, n=4096, o=1024), HALF, True),
    ("dropout_mlp", dict(m=200, k=1024, n=4096, o=1024), HALF, True),
    ("gated_mlp", dict(m=16384, k=1024, n=4096, o=1024), HALF, True),
    ("dropout_gated_mlp", dict(m=16384, k=1024, n=4096, o=1024), HALF, True),
    ("dequantize_linear", dict(m=8192, k=4096, n=14336), HALF, False),
    ("masked_attention", dict(b=4, h=16, n=4096, d=128, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=32, n=2048, d=64, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=32, n=2048, d=64, window=256), torch.float16, True),
    ("masked_attention", dict(b=2, h=64, n=4096, d=64, window=128, sinks=1), HALF, True),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, bias=1, sinks=1), HALF, True),
    ("masked_attention", dict(b=2, h=32, n=4096, d=192, e=128, causal=1), HALF, True),
    ("masked_attention", dict(b=2, h=64, n=4096, d=192, e=128, window=128, sinks=1), HALF, True),
    ("masked_attention", dict(b=2, h=32, n=4096, d=96, e=64, causal=1, padded=1), HALF, True),
    *(
        ("masked_attention", dict(b=2, h=16, n=2048, d=192, e=128) | mask, HALF, True)
        for mask in (*MASKS, dict(bias=1, padded=1), dict(drop=1), dict(bias=1, drop=1))
    ),
    ("masked_attention", dict(b=2, h=16, n=2048, d=96, e=64, causal=1), FULL, True),
    ("masked_attention", dict(b=4096, h=3, n=49, d=32, bias=1), HALF, True),
    ("masked_attention", dict(b=4096, h=3, n=49, d=32, bias=1, windows=64), HALF, True),
    *(
        ("masked_attention", dict(b=512, h=12, n=64, d=64) | mask, HALF, True)
        for mask in (*MASKS, dict(bias=1, drop=1), dict(padded=1, drop=1))
    ),
    ("masked_attention", dict(b=256, h=12, n=128, d=64, bias=1, causal=1), HALF, True),
    *(
        ("masked_attention", dict(b=4, h=32, n=64, d=d, bias=1), HALF, False)
        for d in (64, 128, 256)
    ),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, bias=1), HALF, True),
    ("masked_attention", dict(b=1, h=16, n=512, d=64, bias=1), HALF, True),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, padded=1), HALF, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=128, bias=1), HALF, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=128, dense=1, padded=1, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=16, n=1000, d=80, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=8, n=2048, d=256, window=512), HALF, True),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, bias=1), FULL, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=128, causal=1), FULL, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=256, bias=1), HALF, True),
    *(
        ("masked_attention", dict(b=32, h=16, n=512, d=64, drop=1) | mask, HALF, True)
        for mask in MASKS
    ),
    *(
        ("masked_attention", dict(b=8, h=16, n=2048, d=128, drop=1) | mask, HALF, True)
        for mask in MASKS
    ),
    *(
        ("masked_attention", dict(b=4, h=8, n=2048, d=256, drop=1) | mask, HALF, True)
        for mask in MASKS
    ),
    *(
        ("masked_attention", dict(b=32, h=16, n=512, d=64, drop=1) | mask, FULL, True)
        for mask in MASKS
    ),
    ("masked_attention", dict(b=1, h=16, n=512, d=64, bias=1, drop=1), HALF, True),
    ("masked_attention", dict(b=4, h=8, n=2048, d=128, padded=1, drop=1), FULL, True),
    *(
        ("masked_attention", dict(bias=1, added=1) | sizes, HALF, True)
        for sizes in (
            dict(b=512, h=12, n=64, d=64),
            dict(b=256, h=4, n=128, d=64),
            dict(b=256, h=4, n=256, d=32),
            dict(b=32, h=16, n=512, d=64),
            dict(b=4, h=16, n=2048, d=128),
            dict(b=4, h=8, n=2048, d=256),
            dict(b=2, h=16, n=2048, d=192, e=128),
            dict(b=32, h=16, n=512, d=64, drop=1),
        )
    ),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, bias=1, added=1), FULL, True),
    ("masked_attention", dict(b=8, h=16, n=2048, d=128, window=512), HALF, True),
    ("masked_attention", dict(b=8, h=16, n=2048, d=128, padded=1), HALF, True),
    *(
        ("masked_attention", dict(b=1, h=16, n=8192, d=d, causal=1, documents=8), dtype, True)
        for d in (64, 128)
        for dtype in (HALF, FULL)
    ),
    ("masked_attention", dict(b=1, h=8, n=4096, d=256, causal=1, documents=8), HALF, True),
    ("gated_linear", dict(m=16384, k=1024, n=4096), HALF, True),
    ("gated_linear", dict(m=16384, k=1024, n=4096), torch.float16, False),
    ("gated_linear", dict(m=16384, k=1000, n=4000), HALF, False),
    ("gated_linear", dict(m=16, k=4096, n=14336), HALF, False),
    ("gated_linear", dict(m=4096, k=1024, n=1024), FULL, False),
]
SITES = [Site(*case) for case in CASES]
