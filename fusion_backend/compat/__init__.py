"""Compatibility: every private name of torch and triton that the project uses, and every difference
between their versions.

Comes in: the names of PyTorch and Triton that have no public form.
Goes out: functions and classes that the rest of the project imports.
May import: nothing of the project.
"""

import torch
import triton

from fusion_backend.compat.versions import check

check("torch", torch.__version__)
check("triton", triton.__version__)
