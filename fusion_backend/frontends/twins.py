"""Copies of the inputs of a compiled graph, for runs that leave the user's unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from fusion_backend.capture.aliases import storages_of
from fusion_backend.capture.predicted_writes import may_write, replaces_storage
from fusion_backend.compat.memory import base_of, version_of
from fusion_backend.compat.torch import OpOverload, OpOverloadPacket, schema_of, storage_id

RENORMALIZE = ("embedding", "embedding_bag")  # the weight, where max_norm is given
MAX_NORM = 3  # the place of the weight among the arguments of both


class Twins:
    """Inputs for runs of one graph.

    args: what Dynamo passes: tensors, numbers and None. written: the places of inputs that the
    graph may write to, by the names of its calls. A parameter that is not among them shares its
    memory with its twin. Every other tensor's storage is copied as a whole, so that strides,
    offsets and the memory that inputs have in common are the same. trains: each input that requires
    grad gets a leaf of its own, which no graph and no hook of the user's knows.
    """

    def __init__(self, args: tuple, written: set[int], trains: bool):
        self.args = args
        tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor)]
        copied = {
            storage_id(a) for i, a in tensors if i in written or not isinstance(a, nn.Parameter)
        }
        self.given = {
            storage_id(a): a.untyped_storage() for _, a in tensors if storage_id(a) in copied
        }
        self.copies = {key: storage.clone() for key, storage in self.given.items()}
        self.shared = [a for _, a in tensors if storage_id(a) not in copied]
        self.versions = [version_of(a) for a in self.shared]
        self.leaves = {
            i: a.detach().requires_grad_() for i, a in tensors if trains and a.requires_grad
        }

    def arguments(self) -> list:
        """The inputs of one run, in the copies as the previous run left them."""
        bases: dict[int, Tensor] = {}
        return [self.twin(i, a, bases) for i, a in enumerate(self.args)]

    def twin(self, i: int, a, bases: dict[int, Tensor]):
        leaf = self.leaves.get(i)
        storage = self.copies.get(storage_id(a)) if isinstance(a, Tensor) else None
        if storage is None:
            return a if leaf is None else leaf
        if leaf is not None:
            # no leaf, because autograd lets nobody write to one
            return Placed.apply(leaf, functools.partial(over, storage, a))
        # AOTAutograd asks inputs that share memory for the tensor that they are views of
        base = base_of(a)
        if base is None or base.dtype != a.dtype:
            base = a
        if id(base) not in bases:
            bases[id(base)] = over(storage, base)
        twin = bases[id(base)]
        return twin if base is a else twin.as_strided(a.size(), a.stride(), a.storage_offset())

    def put_back(self) -> None:
        """The copies have the user's content again."""
        for key, copy in self.copies.items():
            bytes_of(copy).copy_(bytes_of(self.given[key]))

    def content(self) -> list[Tensor | None]:
        """The content of each copied input after a run; a copy of it if it has changed."""
        kept = {}
        for key, copy in self.copies.items():
            same = torch.equal(bytes_of(copy), bytes_of(self.given[key]))
            kept[key] = self.given[key] if same else copy.clone()
        return [
            over(kept[storage_id(a)], a)
            if isinstance(a, Tensor) and storage_id(a) in kept
            else None
            for a in self.args
        ]

    def moved(self, args: list) -> bool:
        """Has a run given one of its inputs another shape, layout or memory?"""
        return any(
            layout(twin) != layout(a)
            or self.copies[storage_id(a)].data_ptr() != twin.untyped_storage().data_ptr()
            for twin, a in zip(args, self.args, strict=True)
            if isinstance(a, Tensor) and storage_id(a) in self.copies
        )

    def written_unseen(self) -> bool:
        """Has a run written to memory that is the user's?"""
        return self.versions != [version_of(a) for a in self.shared]


class Placed(torch.autograd.Function):
    """A tensor whose data was made elsewhere, as a value computed from a leaf."""

    @staticmethod
    def forward(ctx, leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor in this storage with the sizes, strides and offset of `like`."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def layout(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def written_places(gm: fx.GraphModule) -> set[int]:
    """The places of the inputs of a Dynamo graph that a call may write to, by its name or schema.
    An unknown call counts as a write.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    writers = [n for n in gm.graph.nodes if writes(n, gm)]
    if any(map(replaces_storage, writers)):
        return set(range(len(inputs)))
    memory: set[int] = set()
    for n in writers:
        for near in n.all_input_nodes:
            memory |= storages_of(near.meta.get("example_value"))
    return {i for i, n in enumerate(inputs) if memory & storages_of(n.meta.get("example_value"))}


def writes(n: fx.Node, gm: fx.GraphModule) -> bool:
    bodies = bodies_of(n, gm)
    if bodies:
        return any(writes(inner, body) for body in bodies for inner in body.graph.nodes)
    if may_write(n):
        return True
    if isinstance(n.target, OpOverload):
        return schema_of(n.target).is_mutable
    if isinstance(n.target, OpOverloadPacket):
        overloads = (getattr(n.target, name) for name in n.target.overloads())
        return any(schema_of(op).is_mutable for op in overloads)
    if getattr(n.target, "__name__", "") not in RENORMALIZE:
        return False
    return (n.args[MAX_NORM] if len(n.args) > MAX_NORM else n.kwargs.get("max_norm")) is not None


def bodies_of(n: fx.Node, gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator is given."""
    held = [getattr(gm, str(a.target), None) for a in n.all_input_nodes if a.op == "get_attr"]
    return [body for body in held if isinstance(body, fx.GraphModule)]
