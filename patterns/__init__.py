"""One room per pattern, each loaded by itself: one that cannot be loaded is told, and the others are there.

Installed as fusion_backend.patterns; refuses to be imported under another name.
"""

import importlib

from fusion_backend.pattern import clashes_left_out
from fusion_backend.reporting import warn_once

if __name__ != "fusion_backend.patterns":
    raise ImportError("import fusion_backend.patterns: a bare `import patterns` would load a second copy")

ROOMS = (
    "add_layer_norm",
    "add_mul",
    "add_mul_exp",
    "add_rms_norm",
    "attention",
    "batch_norm",
    "bias_act",
    "cross_entropy",
    "dequantize_linear",
    "dropout_add",
    "dropout_add_layer_norm",
    "gated_act",
    "gated_linear",
    "gelu",
    "group_norm",
    "l2_norm",
    "layer_norm",
    "linear_act",
    "linear_cross_entropy",
    "norm_linear",
    "patch_embedding",
    "quantize_int8",
    "quantize_per_token",
    "relative_bias",
    "rms_norm",
    "rms_norm_quantize",
    "rotary",
    "softmax",
)

for room in ROOMS:
    try:
        with clashes_left_out():
            importlib.import_module(f"fusion_backend.patterns.{room}")
    except Exception as error:
        warn_once(f"room {room}", f"fusion: the built-in patterns of {room}.py cannot be loaded: {error}")
