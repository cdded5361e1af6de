"""Whether torch can confuse the plans of two attentions.

torch keeps the plans of cuDNN's attention. Before 2.14 it finds that of a backward by the sizes and
strides of q, k and v, although the plan was made for the strides of the result and its gradient,
too. Where only these differ between two calls of a process, the second gets wrong gradients.
(Found in torch 2.11, where `tests/gpu/test_attention_plans.py` shows it; the key of 2.14.1 has the
strides. 2.12 and 2.13 were not looked at.)
"""

from __future__ import annotations

import torch

PLANS_CAN_BE_CONFUSED = torch.__version__ < torch.torch_version.TorchVersion("2.14")
