"""Run a model, and restore everything that it writes to.

A tensor is saved when it is first written to, and only the part that is written, so the parameters
are not copied. Python objects are saved before the run: the attributes of modules and other
objects, and the lists, dicts and sets among them, that can be reached from the model and its
inputs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Iterator

import torch
from torch import fx, nn

from fusion_backend.compat.memory import memory_of, put_back, version_of, written_arguments
from fusion_backend.compat.torch import TorchDispatchMode, is_traceable_wrapper_subclass, pytree


@contextlib.contextmanager
def untouched(*reached) -> Iterator[Writes]:
    """Inside, code may run that starts from `reached`: a model and its inputs. All is put back,
    also after an error.
    """
    python, leaves = reachable(reached)
    grads = [(t, t.grad) for t in leaves]
    drawn = random.getstate()
    on_cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    writes = Writes()
    try:
        with torch.random.fork_rng(devices=list(on_cuda)), writes:
            yield writes
    finally:
        random.setstate(drawn)
        writes.undo()
        for held, content in python:
            restore(held, content)
        for t, grad in grads:
            if t.grad is not grad:
                t.grad = grad


class Writes(TorchDispatchMode):
    """Saves the content of tensors before it is overwritten, of those that existed before the run
    and no others.
    """

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        # storages; an address that is used again belongs to one that was made later
        self.made: set[int] = set()
        self.kept: dict[tuple, tuple] = {}  # the place in memory -> tensor, content, version
        self.generators: dict[torch.Generator, torch.Tensor] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles inside, and does not see this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        # a region, whose operators are looked at one by one
        if any(isinstance(a, fx.GraphModule) for a in leaves):
            args, kwargs = pytree.tree_map_only(
                fx.GraphModule, lambda body: Watched(body, self), (args, kwargs)
            )
        else:
            for t in plain(pytree.tree_leaves(written_arguments(func, args, kwargs))):
                self.keep(t)
        for g in leaves:
            if isinstance(g, torch.Generator):
                self.generators.setdefault(g, g.get_state())
        out = func(*args, **kwargs)
        given = {memory_of(t)[0] for t in plain(leaves)}
        self.made.update({memory_of(t)[0] for t in plain(pytree.tree_leaves(out))} - given)
        return out

    def keep(self, t: torch.Tensor) -> None:
        place = memory_of(t)
        if place[0] not in self.made and place not in self.kept:
            self.kept[place] = (t, t.detach().clone(), version_of(t))

    def undo(self) -> None:
        """Restore the latest write first: where two places overlap, the older content is the
        original.
        """
        for t, content, version in reversed(self.kept.values()):
            put_back(t, content, version)
        for generator, state in self.generators.items():
            generator.set_state(state)


class Watched(nn.Module):
    """The body of a higher-order operator, run under the mode that intercepted the operator."""

    def __init__(self, body: fx.GraphModule, mode: TorchDispatchMode):
        super().__init__()
        self.body, self.mode = body, mode

    def forward(self, *args, **kwargs):
        with self.mode:
            return self.body(*args, **kwargs)


def plain(leaves) -> list[torch.Tensor]:
    """The tensors that hold the memory, inside subclasses too."""
    found, pending = [], [t for t in leaves if isinstance(t, torch.Tensor)]
    while pending:
        t = pending.pop()
        if is_traceable_wrapper_subclass(t):
            inside = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
            # a DTensor may name its mesh as well
            pending += [held for held in inside if isinstance(held, torch.Tensor)]
        else:
            found.append(t)
    return found


# Python objects.

CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict)
# whose objects are not part of a model, but for modules
FOREIGN = {"torch", *sys.stdlib_module_names}


def reachable(start) -> tuple[list[tuple], list[torch.Tensor]]:
    """The containers that can be reached, those of attributes among them, with what is in each; and
    the leaves of autograd, whose gradients a model may set.
    """
    pending, seen, found, leaves = list(start), set(), [], []
    while pending:
        held = pending.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, torch.Tensor):
            leaves += [held] if held.is_leaf and held.requires_grad else []
        elif type(held) in CONTAINERS:
            found.append((held, held.copy()))
            pending += held.values() if isinstance(held, dict) else held
        elif isinstance(held, tuple):
            pending += held
        elif isinstance(held, types.MethodType):
            pending += [held.__self__, held.__func__]
        elif isinstance(held, functools.partial):
            pending += [held.func, held.args, held.keywords]
        elif isinstance(held, types.FunctionType):
            pending += used_by(held)
        elif isinstance(held, nn.Module) or type(held).__module__.partition(".")[0] not in FOREIGN:
            pending.append(getattr(held, "__dict__", None))
    return found, leaves


def used_by(fn: types.FunctionType) -> list:
    """The objects that a function uses without being given them, except functions that it calls by
    a global name.
    """
    cells = [c.cell_contents for c in fn.__closure__ or () if c != types.CellType()]
    named = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    return [
        *cells,
        fn.__defaults__,
        *(v for v in named if not isinstance(v, (types.FunctionType, type))),
    ]


def restore(held, content) -> None:
    if isinstance(held, list):
        changed = len(held) != len(content) or any(
            a is not b for a, b in zip(held, content, strict=True)
        )
        held[:] = content if changed else held
        return
    if isinstance(held, dict):
        changed = len(held) != len(content) or any(
            held.get(k, held) is not v for k, v in content.items()
        )
    else:
        changed = held != content
    if changed:
        held.clear()
        held.update(content)
