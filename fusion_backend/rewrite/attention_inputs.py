"""What attention reads through a view, and others read as well, is written to memory once.

The library's attention reads tensors in memory. Where q, k or v is a view of a value that Inductor
has not written yet, it computes a copy for this argument, and the value once more wherever else it
is read. The value itself would serve all readers.

The graphs are those that AOTAutograd hands to Inductor: nothing is written to in between.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import forced_into_memory
from fusion_backend.decide.neighbours import elementwise, is_view, source_of
from fusion_backend.reporting.places import location
from fusion_backend.rewrite.in_memory import fixed, on_gpu


def keep_inputs_of_attention(gm: fx.GraphModule) -> list[str]:
    """Have Inductor write such values to memory. Returns a sentence for each, with its place in the
    user's code.
    """
    read = (a for n in gm.graph.nodes if is_attention(n) for a in n.args if viewed(a))
    sources = [s for s in dict.fromkeys(map(source_of, read)) if computed(s) and reads(s) > 1]
    told = [f"a value at {location(s)}, which attention and others read" for s in sources]
    for source in sources:
        forced_into_memory(source)
    if sources:
        gm.recompile()
    return told


def is_attention(n: fx.Node) -> bool:
    return is_lowered(n) and name_of(n).startswith("aten::_scaled_dot_product_")


def computed(n: fx.Node) -> bool:
    """Is it a value that Inductor would compute in each kernel that reads it?"""
    if not is_lowered(n) or not isinstance(n.meta.get("val"), torch.Tensor):
        return False
    return (elementwise(n) or name_of(n) == "aten::cat") and fixed(n) and on_gpu(n)


def viewed(a) -> bool:
    return isinstance(a, fx.Node) and is_view(a)


def reads(n: fx.Node) -> int:
    """How many arguments of other operators it is, as it is or through views."""
    views = [n]
    for v in views:
        views += filter(is_view, v.users)
    users = {u: None for v in views for u in v.users if u not in views}
    # a list of arguments counts as one
    return sum(max(1, sum(a in views for a in u.args)) for u in users)
