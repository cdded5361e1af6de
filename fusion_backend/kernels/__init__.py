"""Triton code that patterns share.

The names in `__all__` are for authors of patterns, and stay: `from fusion_backend.kernels import
launch`. The packages below hold the kernels of the built-in patterns, and may change.

Comes in: tensors.
Goes out: kernel launches.
May import: reporting, compat.
"""

from fusion_backend.kernels.common.blocks import block_of, blocks_of
from fusion_backend.kernels.common.dropout import dropout_factors, dropped
from fusion_backend.kernels.common.dropout import scale as dropout_scale
from fusion_backend.kernels.common.dropout import threshold as dropout_threshold
from fusion_backend.kernels.common.inputs import (
    as_rows,
    dynamic,
    in_layout,
    maybe_rows,
    number,
    reject_dtypes,
    reject_dynamic,
    reject_layouts,
)
from fusion_backend.kernels.common.launch import interpreted, interpreting, launch
from fusion_backend.kernels.common.rows import (
    reject_rows,
    reject_shapes,
    reject_vectors,
    row_config,
)

__all__ = [
    "as_rows",
    "block_of",
    "blocks_of",
    "dropout_factors",
    "dropout_scale",
    "dropout_threshold",
    "dropped",
    "dynamic",
    "in_layout",
    "interpreted",
    "interpreting",
    "launch",
    "maybe_rows",
    "number",
    "reject_dtypes",
    "reject_dynamic",
    "reject_layouts",
    "reject_rows",
    "reject_shapes",
    "reject_vectors",
    "row_config",
]
