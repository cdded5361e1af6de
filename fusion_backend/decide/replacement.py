"""The library provider: a site as one call of a torch operator, where its pattern says that this is
better.

The call stands in the Dynamo graph as if the user had written it: autograd, autocast, Inductor and
torch's own choice of a kernel do the rest.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.sizes import equals, same
from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import enable_python_dispatcher, schema_of, statically_known_true
from fusion_backend.ir.argument_views import original, value_of
from fusion_backend.masks.analysis import Masks
from fusion_backend.masks.reader import INTEGERS
from fusion_backend.masks.relative_index import index_of
from fusion_backend.match.matcher import Match
from fusion_backend.ops.operator import fake_seed, without_autocast
from fusion_backend.ops.pattern import LibraryCall, Pattern, registered
from fusion_backend.reporting.reject import Reject

# Of a result these read the values, in whatever order they lie.
MOVES = {"aten::transpose", "aten::permute", "aten::mT", "aten::contiguous", "aten::reshape"}


def offer(match: Match, masks: Masks, training: bool) -> LibraryCall | Reject:
    """What the pattern answers, with what is known of its masks, and of an index."""
    pattern = match.pattern
    about = {name: match.tensors[name] for name in pattern.library_masks if name in match.tensors}
    known = {
        n: index_of(a, masks) if original(a).dtype in INTEGERS else masks.of(a)
        for n, a in about.items()
    }
    values = [value_of(match.arguments[p.name]) for p in pattern.params]
    answer = pattern.asked("library", *values, known, training)
    if not isinstance(answer, LibraryCall):
        return answer
    if isinstance(answer.op, Pattern) and not registered(answer.op):
        return Reject(f"another pattern has the name of {answer.op.name}, which it would call")
    if not isinstance(answer.op, Pattern) and written_so(match, answer, masks.canon):
        return Reject("it is written as this call already")
    nodes = [t for t in answer.tensors if isinstance(t, fx.Node)]
    if any(s in masks.writers for n in nodes for s in storages(n)):
        return Reject("what its mask is made of may be written to")
    return answer


def written_so(match: Match, call: LibraryCall, canon) -> bool:
    """Is it the very operator on the very tensors?"""
    root = match.roots[0]
    given = [a for a in root.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    wanted = [match.arguments[name] for name in call.tensors]
    if (
        root.target is not call.op
        or len(given) != len(wanted)
        or not all(isinstance(w, fx.Node) for w in wanted)
    ):
        return False
    return all(canon.of[g] is canon.of[w] for g, w in zip(given, wanted, strict=True))


def results_of(match: Match, call: LibraryCall) -> tuple[torch.Tensor, ...]:
    """The fake result of the call, and what it keeps for the backward."""
    values = values_of(match, call)
    with values[0].fake_mode, torch.no_grad(), without_autocast(), enable_python_dispatcher():
        out = call.op(*values, **call.options)
    return out if isinstance(out, tuple) else (out,)


def values_of(match: Match, call: LibraryCall) -> list[torch.Tensor | None]:
    """The fake tensors that it takes."""
    given = [
        t if t is call.SEED else value_of(match.arguments[t] if isinstance(t, str) else t)
        for t in call.tensors
    ]
    return [fake_seed(given[0]) if t is call.SEED else t for t in given]


def laid_out_as(out: torch.Tensor, want: torch.Tensor) -> bool:
    return all(
        equals(have, need) or statically_known_true(size <= 1)
        for have, need, size in zip(out.stride(), want.stride(), want.shape, strict=True)
    )


def differs(out: torch.Tensor, want: torch.Tensor) -> str:
    """Why the call's result, or a contiguous copy, cannot stand for the site's."""
    if out.dtype != want.dtype or out.device != want.device:
        return f"the library gives {out.dtype} on {out.device}, the graph has {want.dtype} on {want.device}"
    if not same(out.shape, want.shape):
        return f"the library gives {tuple(out.shape)}, the graph has {tuple(want.shape)}"
    return (
        ""
        if laid_out_as(out, want) or want.is_contiguous()
        else f"the graph has strides {tuple(want.stride())}"
    )


def needs_copy(root: fx.Node, out: torch.Tensor, writers: dict) -> bool:
    """Would somebody see that the result's strides are not those of the graph?"""
    pending = [(root, out)]
    while pending:
        n, value = pending.pop()
        if laid_out_as(value, n.meta["val"]):
            continue
        for u in n.users:
            name = schema_of(u.target).name if is_lowered(u) else ""
            # what was fresh memory may be a view now
            if name not in MOVES or any(s in writers for s in storages(u)):
                return True
            if name == "aten::contiguous" and u.meta["val"].is_contiguous():
                continue
            if not all(isinstance(size, int) for size in value.shape):  # no guard for a question
                return True
            with value.fake_mode:
                pending.append((u, u.target(value, *u.args[1:], **u.kwargs)))
    return False
