"""The pieces of work that benchmarks.patterns measures unless others are asked for.

A new kernel adds its sizes to WORK and one small size, for machines without a GPU, to SMALL.
"""

from __future__ import annotations

from benchmarks.workloads.work import BF16, F16, F32, Work

ROWS = [(16384, 4096), (8192, 8192), (2048, 32768), (64, 131072)]
FEW = [(192, 5120), (16, 8192), (4096, 768)]
# first layers of MLPs: rows, inputs, outputs
LAYERS = [(16384, 768, 3072), (16384, 1024, 4096), (16384, 2048, 8192), (8192, 4096, 14336)]
# of models, and the longest that is shared
WIDTHS = [(16384, 3072), (8192, 5120), (4096, 12288), (1024, 65536)]
# short rows: heads, and channels of transformers with windows
SHORT = [(524288, 128), (262144, 256), (131072, 512)]
# tokens of diffusion transformers: samples, tokens, width
TOKENS = [(4, 4096, 3072), (8, 1024, 1152), (8, 4096, 1536), (2, 8192, 5120), (32, 4096, 512)]
# convolutions of a ResNet-50: channels, side, channels of the result, side of the window
IN_RESNET = [(64, 56, 64, 3), (64, 56, 256, 1), (128, 28, 128, 3), (128, 28, 512, 1)]
IN_RESNET += [(256, 14, 256, 3), (256, 14, 1024, 1)]
# images, classes (of Cityscapes, ADE20K, COCO-Stuff at an eighth, and a few) and side
IN_SEGMENTATION = [(16, 19, 512), (16, 150, 128), (32, 171, 64), (8, 4, 512)]
# logits of DeepLab and SegFormer to the size of the labels, a level of a feature pyramid, and a
# decoder of a U-Net in channels-last
RESIZED = [
    dict(b=8, c=21, n=64, size=512),
    dict(b=4, c=150, n=128, size=512),
    dict(b=8, c=256, n=32, size=64),
    dict(b=16, c=64, n=128, size=256, last=1, corners=1),
]
# what ResNet-50, MobileNetV2, YOLOv8 and diffusion models of latents begin with
STEMS = (
    dict(b=128, c=3, n=224, p=7, o=64),
    dict(b=128, c=3, n=224, p=3, o=32),
    dict(b=32, c=3, n=640, p=3, o=32),
    dict(b=32, c=4, n=64, p=3, o=320),
)
# the stem of ResNets, and behind the first convolutions of VGG
POOLED = [
    dict(b=128, c=64, n=112),
    dict(b=128, c=64, n=112, last=1),
    dict(b=32, c=64, n=224, k=2),
]
OTHER_DTYPES = {
    **dict.fromkeys(("layer_norm", "softmax", "add_rms_norm"), dict(rows=16384, n=4096)),
    "cross_entropy": dict(rows=4096, v=128256),
    "quantize_per_token": dict(rows=8192, n=4096),
    "group_norm": dict(b=64, c=320, n=32, groups=32),
}
POINTWISE = ("add_mul", "add_mul_exp", "quantize_int8")
WORK = [
    *(Work(name, dict(size=size), F32) for name in POINTWISE for size in (100_000, 1_000_000)),
    Work("add_mul", dict(size=20_000_000), F32),
    Work("add_mul_exp", dict(size=20_000_000), F32),
    Work("add_mul_exp", dict(size=100_000_000), F32),
    Work("quantize_int8", dict(size=10_000_000), F32),
    Work("quantize_int8", dict(size=50_000_000), F32),
    Work("quantize_int8", dict(size=64_000_000), BF16),
    *(Work("layer_norm", dict(rows=rows, n=n), BF16) for rows, n in ROWS),
    *(Work("layer_norm", dict(rows=rows, n=n), BF16, train=True) for rows, n in ROWS),
    *(
        Work("softmax", dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in ROWS[:3]
    ),
    *(
        Work("softmax", dict(b=b, h=h, n=n), BF16, train, mask=mask)
        for train in (False, True)
        for mask in ("additive", "boolean")
        for b, h, n in ((4, 32, 2048), (32, 16, 512))
    ),
    *(
        Work("add_rms_norm", dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in ROWS[:3]
    ),
    *(
        Work(name, dict(rows=16384, n=4096), BF16, train)
        for train in (False, True)
        for name in ("rms_norm", "add_layer_norm")
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16, train)
        for name in ("layer_norm", "add_rms_norm")
        for rows, n in SHORT
        for train in (False, True)
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in FEW
        for name in ("layer_norm", "softmax", "add_rms_norm")
    ),
    *(
        Work("norm_rotary", dict(b=8, h=h, n=1024, d=128, transposed=1), BF16, train)
        for train in (False, True)
        for h in (16, 8)
    ),
    *(
        Work("l2_norm", dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in ROWS[:3]
    ),
    *(Work("batch_norm", dict(b=b, c=c, n=n), BF16) for b, c, n in ((64, 256, 56), (256, 2048, 7))),
    *(  # of ResNet-50: behind the last convolution of a block, and behind the others
        Work("batch_norm_training", dict(b=128, c=c, n=n) | alone, BF16, train=True)
        for c, n, alone in (
            (256, 56, {}),
            (512, 28, {}),
            (1024, 14, {}),
            (2048, 7, {}),
            (64, 112, dict(alone=1)),
            (64, 56, dict(alone=1)),
            (128, 28, dict(alone=1)),
        )
    ),
    *(
        Work("batch_norm_sum", dict(b=128, c=c, n=n), BF16, train=True)
        for c, n in ((256, 56), (512, 28), (1024, 14), (2048, 7))
    ),
    *(
        Work("group_norm", dict(b=b, c=c, n=n, groups=32), BF16, train)
        for train in (False, True)
        for b, c, n in ((16, 480, 64), (64, 320, 32), (2, 512, 128))
    ),
    Work("bias_act", dict(rows=16384, n=4096), BF16),
    *(
        Work("gelu", dict(rows=16384, n=4096) | form, BF16, train)
        for train in (False, True)
        for form in ({}, dict(tanh=1))
    ),
    *(
        Work("dropout_add_layer_norm", dict(rows=rows, n=n), BF16, train=True)
        for rows, n in (*ROWS[:3], *FEW[::2])
    ),
    *(Work("dropout_add", dict(rows=rows, n=n), BF16, train=True) for rows, n in (ROWS[0], FEW[2])),
    *(
        Work(name, dict(rows=rows, n=n), BF16)
        for name in ("quantize_per_token", "rms_norm_quantize")
        for rows, n in ((8192, 4096), (16384, 8192), (8192, 2048), (256, 4096))
    ),
    Work("cross_entropy", dict(rows=8192, v=128256), BF16, train=True),
    Work("cross_entropy", dict(rows=16384, v=50257), BF16, train=True),
    *(Work("cross_entropy", dict(rows=8192, v=128256, weighted=1), BF16, t) for t in (False, True)),
    Work("linear_cross_entropy", dict(rows=8192, k=4096, v=128256), BF16, train=True, linear=True),
    Work("linear_cross_entropy", dict(rows=8192, k=1024, v=151936), BF16, train=True, linear=True),
    Work("linear_cross_entropy", dict(rows=16384, k=1024, v=30522), BF16, train=True, linear=True),
    Work("linear_cross_entropy", dict(rows=16384, k=1024, v=50257), BF16, train=True, linear=True),
    Work("linear_cross_entropy", dict(rows=8192, k=4096, v=128256), BF16, linear=True),
    *(
        Work("norm_act", dict(rows=rows, n=n) | how, BF16, train)
        for rows, n in ((16384, 4096), (524288, 128), (65536, 512), (8192, 8192))
        for how in ({}, dict(silu=1))
        for train in (False, True)
    ),
    *(  # heads of Qwen3-Next, Mamba-2, and the longest rows
        Work("gated_norm", dict(rows=rows, n=n) | how, BF16, train)
        for rows, n in ((524288, 128), (16384, 4096), (8192, 8192))
        for how in ({}, dict(first=1))
        for train in (False, True)
    ),
    *(
        Work("channel_norm", dict(b=b, c=c, n=n), BF16, train)
        for b, c, n in ((8, 96, 56), (32, 96, 56), (32, 192, 28), (32, 768, 7), (8, 256, 64))
        for train in (False, True)
    ),
    Work("channel_norm", dict(b=4, c=96, n=416, length=1), BF16),
    *(
        Work(name, dict(b=b, c=c, n=n), BF16, train)
        for name in ("channel_softmax", "channel_cross_entropy")
        for b, c, n in IN_SEGMENTATION
        for train in (False, True)
    ),
    *(Work("max_pool", case, BF16, train=True) for case in POOLED),
    *(
        Work("image_convolution", dict(case, last=1), BF16, train)
        for case in STEMS
        for train in (False, True)
    ),
    *(
        Work("interpolate_bilinear", case, BF16, train)
        for case in RESIZED
        for train in (False, True)
    ),
    *(
        Work(name, dict(b=32, c=c, n=n, o=o, k=k, last=1), dtype)
        for name, dtype in (("conv_relu", BF16), ("conv_batch_norm_relu", F32))
        for c, n, o, k in IN_RESNET
    ),
    *(Work("token_log_probs", dict(b=4, s=2048, v=128256), BF16, train) for train in (False, True)),
    *(
        Work(name, dict(rows=rows, v=v), BF16, train)
        for name in ("soft_cross_entropy", "distillation_loss")
        for rows, v in ((8192, 128256), (8192, 32000), (4096, 1000))
        for train in (False, True)
    ),
    Work("attention", dict(b=4, h=16, n=4096, d=128, causal=1), BF16),
    Work("attention", dict(b=4, h=32, n=2048, d=64, causal=1), BF16),
    *(
        Work("attention", dict(b=32, h=16, n=512, d=64, bias=1), BF16, train)
        for train in (False, True)
    ),
    *(
        Work("attention", dict(b=32, h=16, n=512, d=64, padded=1), BF16, train)
        for train in (False, True)
    ),
    *(
        Work("attention", dict(b=b, h=h, n=n, d=d) | mask, BF16, train)
        for train in (False, True)
        for b, h, n, d, mask in (
            (4, 16, 4096, 128, dict(window=4096, hand=1)),
            (4, 32, 2048, 64, dict(window=2048)),
            (8, 16, 2048, 128, dict(bias=1)),
            (8, 16, 2048, 128, dict(padded=1)),
            (1, 16, 8192, 128, dict(documents=8)),
            (4, 16, 4096, 64, dict(documents=8)),
            (4, 16, 4096, 128, dict(window=1024)),
            (4, 32, 2048, 64, dict(window=256)),
            (4, 32, 2048, 64, dict(window=2048, padded=1)),
            (4, 16, 2048, 128, dict(window=2048, cap=50)),
            # full and sliding layers of gpt-oss
            (1, 64, 4096, 64, dict(window=4096, hand=1, sinks=1)),
            (1, 64, 4096, 64, dict(window=128, hand=1, sinks=1)),
            # DeepSeek-V2-Lite, and sliding layers of MiMo-V2
            (4, 16, 4096, 192, dict(e=128, window=4096)),
            (1, 64, 4096, 192, dict(e=128, window=128, hand=1, sinks=1)),
            # windows of Swin-T's first and third stage, and sentences of 64 and 128 tokens
            (4096, 3, 49, 32, dict(bias=1)),
            (256, 12, 49, 32, dict(bias=1)),
            (512, 12, 64, 64, dict(padded=1)),
            (256, 12, 128, 64, dict(bias=1)),
            (32, 16, 512, 64, dict(padded=1, drop=1)),
            (32, 16, 512, 64, dict(bias=1, drop=1)),
            (8, 16, 2048, 128, dict(padded=1, drop=1)),
            (8, 16, 2048, 128, dict(bias=1, drop=1)),
        )
    ),
    *(
        Work("relative_bias", dict(n=n, m=n, h=16), BF16, train)
        for train in (False, True)
        for n in (512, 2048)
    ),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16, linear=True),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16, train=True, linear=True),
    Work("gated_linear", dict(m=16384, k=512, n=2048), BF16, linear=True),
    Work("gated_linear", dict(m=8192, k=4096, n=14336), BF16, linear=True),
    Work("gated_linear", dict(m=16, k=4096, n=14336), BF16, linear=True),
    *(
        Work("linear_act", dict(m=m, k=k, n=n) | form, BF16, linear=True)
        for form in ({}, dict(tanh=1), dict(relu=1))
        for m, k, n in LAYERS
    ),
    *(
        Work("gated_linear", dict(m=m, k=k, n=n, silu=1), BF16, linear=True)
        for m, k, n in ((16384, 512, 2048), *LAYERS, (16, 4096, 14336), (1, 4096, 14336))
    ),
    *(
        Work("gated_linear", dict(m=m, k=k, n=n), BF16, linear=True)
        for m, k, n in (LAYERS[0], LAYERS[2], (1, 4096, 14336))
    ),
    Work("gated_linear", dict(m=64, k=4096, n=14336, silu=1), BF16, linear=True),
    *(
        Work("linear_act", dict(m=m, k=k, n=n, tanh=1), BF16, linear=True)
        for k, n in ((768, 3072), (4096, 14336))
        for m in (1, 16)
    ),
    Work("gated_linear", dict(m=16384, k=1024, n=4096, silu=1), BF16, train=True, linear=True),
    *(
        Work(name, dict(m=m, k=k, n=n, o=k), BF16, train=True, linear=True)
        for name in ("mlp", "dropout_mlp", "gated_mlp", "dropout_gated_mlp")
        for m, k, n in LAYERS[:3]
    ),
    Work("dequantize_linear", dict(m=8192, k=4096, n=14336), BF16),
    *(
        Work("patch_embedding", dict(b=b, c=c, n=n, p=p, o=o), BF16, train)
        for train in (False, True)
        for b, c, n, p, o in (
            (128, 3, 224, 16, 1024),
            (32, 3, 224, 14, 1024),
            (1, 3, 224, 16, 768),
            (16, 16, 128, 2, 3072),
        )
    ),
    Work("batch_norm", dict(b=256, c=512, n=14), BF16),
    *(
        Work("group_norm", dict(b=1, c=512, n=128, groups=32), BF16, train)
        for train in (False, True)
    ),
    *(
        Work(name, case, dtype, train)
        for train in (False, True)
        for dtype in (F32, F16)
        for name, case in OTHER_DTYPES.items()
        if not (train and name == "quantize_per_token")
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in WIDTHS
        for name in ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "dropout_add_layer_norm")
        if train or name != "dropout_add_layer_norm"
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16)
        for rows, n in ((4096, 16384), (3072, 20480))
        for name in ("layer_norm", "rms_norm", "add_rms_norm")
    ),
    *(
        Work("modulated_norm", dict(b=b, t=t, n=n), BF16, train)
        for train in (False, True)
        for b, t, n in TOKENS
    ),
    *(
        Work(name, dict(rows=rows, n=n, autocast=1), BF16, train)
        for train in (False, True)
        for name in ("layer_norm", "add_layer_norm", "add_rms_norm")
        for rows, n in ((16384, 768), (16384, 4096))
    ),
    Work("rms_norm", dict(rows=16384, n=4096, autocast=1), BF16, train=True),
    Work("dropout_add_layer_norm", dict(rows=16384, n=768, autocast=1), BF16, train=True),
    Work("modulated_norm", dict(b=8, t=1024, n=1152, autocast=1), BF16, train=True),
    *(
        Work("group_norm", dict(b=64, c=320, n=64, groups=32, silu=1) | form, BF16, train)
        for train in (False, True)
        for form in ({}, dict(channels_last=1))
    ),
]
SMALL = [
    Work("add_mul", dict(size=10_000), F32),
    Work("add_mul_exp", dict(size=10_000), F32),
    Work("quantize_int8", dict(size=10_000), F32),
    Work("layer_norm", dict(rows=64, n=256), BF16),
    Work("layer_norm", dict(rows=64, n=256), BF16, train=True),
    *(
        Work(name, dict(rows=64, n=256), BF16, train=True)
        for name in ("softmax", "rms_norm", "add_rms_norm")
    ),
    *(
        Work("softmax", dict(b=2, h=3, n=64), BF16, train=True, mask=mask)
        for mask in ("additive", "boolean")
    ),
    Work("add_layer_norm", dict(rows=64, n=256), BF16, train=True),
    Work("add_layer_norm", dict(rows=64, n=256, autocast=1), BF16, train=True),
    Work("norm_rotary", dict(b=2, h=3, n=16, d=16, transposed=1), BF16, train=True),
    Work("modulated_norm", dict(b=2, t=32, n=256), BF16, train=True),
    Work("l2_norm", dict(rows=64, n=256), BF16, train=True),
    Work("batch_norm", dict(b=2, c=6, n=8), BF16),
    Work("batch_norm_training", dict(b=2, c=6, n=8), BF16, train=True),
    Work("batch_norm_sum", dict(b=2, c=6, n=8), BF16, train=True),
    Work("group_norm", dict(b=2, c=6, n=8, groups=2), BF16, train=True),
    Work("bias_act", dict(rows=64, n=256), BF16),
    Work("gelu", dict(rows=64, n=256), BF16, train=True),
    *(
        Work(name, dict(rows=64, n=256), BF16, train=True)
        for name in ("dropout_add", "dropout_add_layer_norm")
    ),
    Work("quantize_per_token", dict(rows=64, n=256), F32),
    Work("rms_norm_quantize", dict(rows=64, n=256), F32),
    Work("cross_entropy", dict(rows=64, v=1000), BF16, train=True),
    Work("linear_cross_entropy", dict(rows=600, k=32, v=256), F32, train=True, linear=True),
    Work("norm_act", dict(rows=64, n=256), BF16, train=True),
    Work("gated_norm", dict(rows=64, n=256), BF16, train=True),
    Work("channel_norm", dict(b=2, c=6, n=8), BF16, train=True),
    Work("channel_softmax", dict(b=2, c=6, n=8), BF16, train=True),
    Work("channel_cross_entropy", dict(b=2, c=6, n=8), BF16, train=True),
    Work("interpolate_bilinear", dict(b=2, c=6, n=8, size=20), BF16, train=True),
    Work("max_pool", dict(b=2, c=6, n=9), BF16, train=True),
    Work("image_convolution", dict(b=2, c=3, n=11, p=3, o=10), BF16, train=True),
    Work("conv_relu", dict(b=2, c=6, n=9, o=5), BF16),
    Work("conv_batch_norm_relu", dict(b=2, c=6, n=9, o=5), F32),
    Work("token_log_probs", dict(b=2, s=32, v=1000), BF16, train=True),
    Work("soft_cross_entropy", dict(rows=64, v=1000), BF16, train=True),
    Work("distillation_loss", dict(rows=64, v=1000), BF16, train=True),
    *(
        Work("attention", dict(b=2, h=2, n=40, d=16) | {mask: 1}, F32, train=True)
        for mask in ("bias", "padded")
    ),
    Work("attention", dict(b=2, h=2, n=40, d=16, window=9), F32, train=True),
    Work("attention", dict(b=2, h=2, n=40, d=16, documents=3), F32, train=True),
    Work("attention", dict(b=2, h=2, n=40, d=16, window=9, hand=1, sinks=1), F32, train=True),
    Work("attention", dict(b=2, h=2, n=40, d=24, e=16, window=40), F32, train=True),
    Work("relative_bias", dict(n=16, m=24, h=4), F32, train=True),
    Work("patch_embedding", dict(b=2, c=3, n=11, p=4, o=10), F32, train=True),
    Work("gated_linear", dict(m=64, k=64, n=64), F32),
    Work("gated_linear", dict(m=64, k=64, n=64), F32, train=True, linear=True),
    Work("linear_act", dict(m=64, k=64, n=64), BF16, linear=True),
    Work("mlp", dict(m=64, k=64, n=64, o=32), BF16, train=True, linear=True),
    Work("dropout_mlp", dict(m=64, k=64, n=64, o=32), BF16, train=True, linear=True),
    Work("gated_mlp", dict(m=64, k=64, n=64, o=32), BF16, train=True, linear=True),
    Work("dropout_gated_mlp", dict(m=64, k=64, n=64, o=32), BF16, train=True, linear=True),
    Work("dequantize_linear", dict(m=64, k=64, n=64), BF16),
]
