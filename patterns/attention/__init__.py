"""Attention: the rule (`rule.py`), the op with masks (`op.py`), and which masks stay dense
(`masks.py`).
"""

from fusion_backend.patterns.attention.op import masked_attention, masking_of
from fusion_backend.patterns.attention.rule import attention

__all__ = ["attention", "masked_attention", "masking_of"]
