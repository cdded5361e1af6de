"""The fastest configurations for 16-bit elements, by kernel and row length.

Written by `python -m benchmarks.tune` from
benchmarks/results/sweeps.json,
benchmarks/results/sweep-products.json,
benchmarks/results/h100-sweep-specialised.json.
Measured on NVIDIA H100 80GB HBM3, NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0.
A row length stands for all up to it, from the next smaller power of two on. What is not here
follows the rule in the kernel's own file.
"""

TABLE: dict[str, dict[int, dict[str, int]]] = {
    "dropout_add_layer_norm": {
        1024: {"block": 1024, "rows": 2, "warps": 4},
        4096: {"block": 4096, "rows": 1, "warps": 4},
        8192: {"block": 8192, "rows": 1, "warps": 4},
        32768: {"block": 32768, "rows": 1, "warps": 16},
    },
    "dropout_add_layer_norm backward": {
        1024: {"rows": 2, "warps": 4, "programs": 4, "stages": 2},
        4096: {"rows": 2, "warps": 16, "programs": 1, "stages": 3},
        8192: {"rows": 1, "warps": 16, "programs": 1, "stages": 3},
    },
    "dropout_add_layer_norm backward by columns": {
        32768: {"block": 1024, "rows": 1, "warps": 4, "programs": 4, "stages": 3},
    },
    "l2_norm": {
        1024: {"block": 1024, "rows": 2, "warps": 4},
        4096: {"block": 4096, "rows": 4, "warps": 16},
        8192: {"block": 8192, "rows": 2, "warps": 32},
        32768: {"block": 32768, "rows": 1, "warps": 32},
    },
    "l2_norm backward": {
        1024: {"block": 1024, "rows": 1, "warps": 4},
        4096: {"block": 4096, "rows": 1, "warps": 4},
        8192: {"block": 8192, "rows": 1, "warps": 8},
        32768: {"block": 32768, "rows": 1, "warps": 16},
    },
    "layer_norm": {
        1024: {"block": 1024, "rows": 4, "warps": 4, "early": 1},
        4096: {"block": 4096, "rows": 2, "warps": 8, "early": 1},
        8192: {"block": 8192, "rows": 1, "warps": 4},
        32768: {"block": 8192, "rows": 1, "warps": 32},
    },
    "layer_norm backward": {
        1024: {"rows": 2, "warps": 4, "programs": 4, "stages": 3},
        4096: {"rows": 1, "warps": 8, "programs": 2, "stages": 3},
        8192: {"rows": 1, "warps": 16, "programs": 1, "stages": 3},
    },
    "layer_norm backward by columns": {
        32768: {"block": 1024, "rows": 1, "warps": 4, "programs": 4, "stages": 4},
    },
    "layer_norm backward by columns, few rows": {
        131072: {"block": 1024, "rows": 1, "warps": 4, "programs": 8, "stages": 4},
    },
    "layer_norm backward, few rows": {
        8192: {"rows": 1, "warps": 16, "programs": 1, "stages": 3},
    },
    "layer_norm, few rows": {
        8192: {"block": 8192, "rows": 1, "warps": 8, "early": 1},
        131072: {"block": 8192, "rows": 1, "warps": 16},
    },
    "softmax": {
        4096: {"block": 4096, "rows": 2, "warps": 4},
        8192: {"block": 8192, "rows": 1, "warps": 16},
        32768: {"block": 32768, "rows": 1, "warps": 32, "programs": 1, "stages": 3},
    },
    "softmax backward": {
        4096: {"block": 4096, "rows": 1, "warps": 16},
        8192: {"block": 8192, "rows": 1, "warps": 8},
        32768: {"block": 32768, "rows": 1, "warps": 16},
    },
    "softmax backward, few rows": {
        8192: {"block": 8192, "rows": 1, "warps": 8},
    },
    "softmax, few rows": {
        8192: {"block": 8192, "rows": 1, "warps": 8},
    },
}

# Of matrix products, by their epilogue and the size of the weight: the numbers of a tile
# (kernels/gemm/tiles.py), or nothing where the library is the fastest.
PRODUCTS: dict[str, tuple[int, ...]] = {
    "gated sigmoid 1024x4096": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "gated sigmoid 2048x8192": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "gated sigmoid 4096x14336": (128, 128, 64, 8, 3, 1, 1, 8, 4),
    "gated sigmoid 512x2048": (128, 128, 64, 8, 3, 1, 1, 8, 4),
    "gated sigmoid 768x3072": (128, 128, 64, 8, 3, 1, 1, 8, 4),
    "gated silu 1024x4096": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "gated silu 2048x8192": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "gated silu 4096x14336": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "gated silu 512x2048": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "gated silu 768x3072": (128, 128, 64, 8, 3, 1, 1, 16, 4),
    "linear gelu 1024x4096": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear gelu 2048x8192": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear gelu 4096x14336": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear gelu 768x3072": (128, 256, 64, 8, 3, 1, 1, 8, 4),
    "linear gelu_tanh 1024x4096": (128, 256, 64, 8, 3, 1, 1, 8, 4),
    "linear gelu_tanh 2048x8192": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear gelu_tanh 4096x14336": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear gelu_tanh 768x3072": (128, 256, 64, 8, 3, 1, 1, 8, 4),
    "linear relu 1024x4096": (128, 256, 64, 8, 3, 1, 1, 8, 4),
    "linear relu 2048x8192": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear relu 4096x14336": (128, 256, 64, 8, 3, 1, 1, 16, 4),
    "linear relu 768x3072": (128, 256, 64, 8, 3, 1, 1, 8, 4),
}

# The same for kernels without finishers.
WITHOUT_FINISHERS: dict[str, tuple[int, ...]] = {
    "gated sigmoid 1024x4096": (128, 128, 64, 8, 3, 1, 1, 8, 0),
    "gated sigmoid 2048x8192": (128, 128, 64, 8, 3, 1, 1, 8, 0),
    "gated sigmoid 4096x14336": (128, 128, 64, 8, 3, 1, 1, 8, 0),
    "gated sigmoid 512x2048": (128, 64, 64, 4, 3, 2, 1, 8, 0),
    "gated sigmoid 768x3072": (128, 64, 64, 4, 3, 2, 1, 8, 0),
    "gated silu 1024x4096": (128, 128, 64, 8, 3, 1, 1, 8, 0),
    "gated silu 2048x8192": (128, 128, 64, 8, 3, 1, 1, 8, 0),
    "gated silu 4096x14336": (128, 128, 64, 8, 3, 1, 1, 8, 0),
    "gated silu 512x2048": (128, 64, 64, 4, 3, 2, 1, 16, 0),
    "gated silu 768x3072": (128, 64, 64, 4, 3, 2, 1, 8, 0),
    "linear gelu 1024x4096": (128, 128, 64, 4, 3, 2, 2, 16, 0),
    "linear gelu 2048x8192": (128, 128, 64, 4, 3, 2, 2, 8, 0),
    "linear gelu 4096x14336": (128, 256, 64, 8, 3, 1, 1, 8, 0),
    "linear gelu 768x3072": (128, 128, 64, 4, 3, 2, 2, 8, 0),
    "linear gelu_tanh 1024x4096": (),
    "linear gelu_tanh 2048x8192": (),
    "linear gelu_tanh 4096x14336": (),
    "linear gelu_tanh 768x3072": (),
    "linear relu 1024x4096": (),
    "linear relu 2048x8192": (),
    "linear relu 4096x14336": (),
    "linear relu 768x3072": (),
}
