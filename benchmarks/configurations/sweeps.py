"""The sweeps by the names that benchmarks.sweep takes."""

from __future__ import annotations

from benchmarks.configurations.attention import (
    attention,
    attention_dropout,
    attention_latent,
    attention_short,
    attention_wide,
)
from benchmarks.configurations.channels import by_channels, group_norms, group_norms_of_rows
from benchmarks.configurations.elementwise import elementwise, integers
from benchmarks.configurations.losses import channel_losses, losses, soft_losses
from benchmarks.configurations.modulated import modulated_norms
from benchmarks.configurations.norms import dropouts, few_rows, normalisations
from benchmarks.configurations.products import few_rows as few_rows_of_products
from benchmarks.configurations.products import (
    few_rows_by_inputs,
    gated_gradients,
    gates,
    hidden_gradients,
    int8,
    linears,
    specialised,
)
from benchmarks.configurations.rotary import norm_rotaries
from benchmarks.configurations.rows import l2_norms, quantisations, softmaxes

SWEEPS = {
    "add_mul_exp": elementwise,
    "quantize_int8": integers,
    "layer_norm": normalisations,
    "dropout_add": dropouts,
    "dropout_add_layer_norm": dropouts,
    "gates": gates,
    "linear_act": linears,
    "specialised": specialised,
    "hidden_gradient": hidden_gradients,
    "gated_gradient": gated_gradients,
    "decode": few_rows_of_products,
    "decode_by_inputs": few_rows_by_inputs,
    "dequantize_linear": int8,
    "softmax": softmaxes,
    "quantize_per_token": quantisations,
    "rms_norm_quantize": quantisations,
    "cross_entropy": losses,
    "soft_cross_entropy": soft_losses,
    "channel_cross_entropy": channel_losses,
    "l2_norm": l2_norms,
    "batch_norm": by_channels,
    "bias_act": by_channels,
    "group_norm": group_norms,
    "group_norm_channels_last": group_norms_of_rows,
    "attention": attention,
    "add_rms_norm": few_rows,
    "modulated_norm": modulated_norms,
    "norm_rotary": norm_rotaries,
    "attention_wide": attention_wide,
    "attention_latent": attention_latent,
    "attention_short": attention_short,
    "attention_dropout": attention_dropout,
}
