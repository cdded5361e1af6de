"""A Dynamo graph as text. Graphs that have the same text are the same to every pass.

The text has the operators, their arguments, what is known of their values (dtype, shape, strides,
device, the storage that they share, whether a gradient is wanted), the bodies inside, and the
places in the user's code, which a report names. A graph has no text if something in it has no name
that holds in every process, or if a size is dynamic.
"""

from __future__ import annotations

import operator
import sys
import types

import torch
from torch import fx

from fusion_backend.cache.fingerprint import known_module
from fusion_backend.compat.torch import (
    OPERATORS,
    FakeTensor,
    namespace_of,
    pytree,
    schemas_of,
    storage_id,
)

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...))
CONSTANTS += (torch.dtype, torch.device, torch.layout, torch.memory_format)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
FUNCTIONS += (types.WrapperDescriptorType, types.GetSetDescriptorType, type)
TORCHS = ("aten", "prims", "higher_order")  # operators whose names say what they are
LARGEST = 1 << 12  # elements of a constant, whose values are part of the text


class Unnamed(Exception):
    """A graph has no text; the message says what in it has none."""


def graph_text(gm: fx.GraphModule) -> str:
    """The text of a graph and its bodies. Raises Unnamed."""
    text = Text()
    text.graph(gm)
    return "\n".join(text.lines)


def devices_of(gm: fx.GraphModule) -> list[torch.device]:
    """The GPUs on which a graph has values."""
    values = [n.meta.get("example_value") for n in gm.graph.nodes]
    lone = [v for v in values if isinstance(v, torch.Tensor)]  # most: a walk through a tree is slow
    rest = pytree.tree_leaves([v for v in values if not isinstance(v, torch.Tensor)])
    found = {v.device for v in (*lone, *rest) if isinstance(v, torch.Tensor)}
    return sorted((device for device in found if device.type == "cuda"), key=str)


class Text:
    """Storages have numbers, in the order in which they are met, in the bodies too. So have places
    in the user's code: they are long, and many nodes share them.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.storages: dict[int, int] = {}
        self.places: dict[object, int] = {}

    def graph(self, gm: fx.GraphModule) -> None:
        numbers: dict[fx.Node, int] = {}
        self.lines.append(f"graph {'_checkpoint_context_fn' in gm.meta}")
        for n in gm.graph.nodes:
            given = self.argument(n.args, numbers), self.argument(n.kwargs, numbers)
            numbers[n] = len(numbers)
            target = n.target if isinstance(n.target, str) else name_of(n.target)
            self.lines.append(f"{n.op} {n.name} {target} {' '.join(given)}")
            self.lines.append(self.value(n.meta.get("example_value")))
            self.lines.append(self.place(n.meta.get("stack_trace")))
            self.lines.append(self.place((*(n.meta.get("nn_module_stack") or {}).values(),)))
            if n.op in ("get_attr", "call_module"):
                self.attribute(operator.attrgetter(n.target)(gm))

    def place(self, value) -> str:
        """A place in the user's code, in full where it is met first, else by its number."""
        if value in self.places:
            return f"known {self.places[value]}"
        self.places[value] = len(self.places)
        return f"new {value}"

    def argument(self, value, numbers: dict[fx.Node, int]) -> str:
        if isinstance(value, fx.Node):
            return f"%{numbers[value]}"
        kind = type(value)
        if isinstance(value, (tuple, list)):
            return f"{kind.__name__}({', '.join(self.argument(v, numbers) for v in value)})"
        if isinstance(value, dict):
            pairs = (f"{k!r}: {self.argument(v, numbers)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if kind is slice:
            ends = (self.argument(v, numbers) for v in (value.start, value.stop, value.step))
            return f"slice({', '.join(ends)})"
        if kind in CONSTANTS:
            return f"{kind.__name__} {value!r}"
        return name_of(value)

    def value(self, value) -> str:
        if isinstance(value, torch.Tensor):
            return f"= {self.tensor(value)}"
        leaves, spec = pytree.tree_flatten(value)
        return f"= {spec if type(value) in (tuple, list, dict) else ''} " + ", ".join(
            self.leaf(v) for v in leaves
        )

    def leaf(self, v) -> str:
        if isinstance(v, torch.Tensor):
            return self.tensor(v)
        if type(v) in CONSTANTS:
            return repr(v)
        if isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unnamed("a size is dynamic")
        raise Unnamed(f"a value is a {type(v).__name__}")

    def tensor(self, t: torch.Tensor) -> str:
        if not isinstance(t, FakeTensor) or t.layout != torch.strided:
            raise Unnamed(f"a value is a {type(t).__name__}, {t.layout}")
        numbers = (*t.shape, *t.stride(), t.storage_offset())
        if not all(type(number) is int for number in numbers):
            raise Unnamed("a size is dynamic")
        place = self.storages.setdefault(storage_id(t), len(self.storages))
        flags = (t.requires_grad, is_leaf(t), t.is_conj(), t.is_neg(), t.is_inference())
        return f"{t.dtype} {t.device} {numbers} {flags} {place} {type(t).__name__}"

    def attribute(self, value) -> None:
        """A body, or a constant. Of a constant on the CPU the values count as well."""
        if isinstance(value, fx.GraphModule):
            self.graph(value)
        elif isinstance(value, FakeTensor):
            self.lines.append(self.tensor(value))
        elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            if value.numel() > LARGEST or value.layout != torch.strided:
                raise Unnamed("a constant is large")
            about = value.dtype, tuple(value.shape), value.stride(), value.requires_grad
            self.lines.append(f"{about} {value.tolist()}")
        else:
            raise Unnamed(f"an attribute is a {type(value).__name__}")


def is_leaf(t: torch.Tensor) -> bool:
    """Torch refuses to say so of a view that was made without gradients, if its base was written to
    with them.
    """
    try:
        return t.is_leaf
    except RuntimeError as error:
        raise Unnamed("whether a value has a gradient function is ambiguous") from error


def name_of(value) -> str:
    """The name of an operator, a function or a class of torch's or Python's. Raises Unnamed."""
    if isinstance(value, OPERATORS):
        declared = "" if namespace_of(value) in TORCHS else schemas_of(value)
        return f"{type(value).__name__} {value} {declared}"
    if isinstance(value, FUNCTIONS):
        owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
        module = value.__module__ if isinstance(value.__module__, str) else ""
        if isinstance(owner, type):
            module = f"{owner.__module__}.{owner.__qualname__}"
        file = sys.modules.get(value.__module__ or "torch")
        named = getattr(file, value.__name__, None) is value  # such as F.max_pool2d
        if known_module(file) and (named or "<" not in value.__qualname__):
            return f"{module}.{value.__name__ if named else value.__qualname__}"
    raise Unnamed(f"{getattr(value, '__qualname__', type(value).__name__)} is not torch's")
