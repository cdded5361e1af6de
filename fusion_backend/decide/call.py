"""A replacement as a call on the values of one site: its results, and whether they may take the
place of the graph's own.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.sizes import equals, same
from fusion_backend.capture.view import is_elementwise, is_lowered
from fusion_backend.compat.torch import (
    enable_python_dispatcher,
    schema_of,
    statically_known_true,
    storage_id,
)
from fusion_backend.decide.analyses import known_of
from fusion_backend.decide.facts import Facts
from fusion_backend.ir.argument_views import Viewed, original, value_of
from fusion_backend.match.matcher import Match
from fusion_backend.ops.op import Op
from fusion_backend.ops.operator import fake_seed, operator_of, without_autocast
from fusion_backend.ops.registry import registered
from fusion_backend.ops.rule import SEED, Replacement
from fusion_backend.reporting.reject import PatternError, Reject, Unmeasured

# These operators read the values of a result in any memory layout, and so do elementwise ones.
IN_ANY_LAYOUT = {"transpose", "permute", "mT", "swapaxes", "swapdims", "movedim", "moveaxis"}
IN_ANY_LAYOUT |= {"contiguous", "reshape", "to", "_to_copy", "dropout"}
IN_ANY_LAYOUT |= {"conv1d", "conv2d", "conv3d"}
FOLLOWED = 50  # readers, and readers of theirs, at most

# The tables have timed no op with a copy behind it, nor one whose result is rounded.
COPIED = Unmeasured("its result would be copied, for the strides that the graph has")
NARROWED = Unmeasured(
    "its result in fp32, which is read in 16 bits alone, would be rounded to them: its kernel has "
    "not been timed so; fusion.gate=always takes it"
)


@dataclasses.dataclass
class Call:
    """`target(*args, **kwargs)`, to be written in front of the first root of a site.

    args are nodes, views of nodes, numbers, words, None and SEED. `values` are the fake results;
    the first `outputs` of them stand for the roots. `copied`: the places of the results that are
    copied, because a reader would see that their strides differ from the graph's. `narrow`: the
    first result is rounded to 16 bits, because everything that reads it casts it to them, and
    written behind a cast to the dtype that the graph has.
    """

    target: object
    args: tuple
    kwargs: dict
    values: tuple[torch.Tensor, ...]
    copied: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()  # places of results that nobody reads
    narrow: bool = False


def replacement_of(match: Match, facts: Facts, training: bool) -> Replacement | Reject:
    """The answer of the rule. Without a replacement function it is the rule's own op on the same
    arguments.
    """
    rule = match.pattern
    if rule.replacement_fn is None:
        if isinstance(rule, Op):
            return Replacement(rule, tuple(match.arguments[p.name] for p in rule.params))
        return Reject("the rule has no replacement")
    values = [value_of(match.arguments[p.name]) for p in rule.params]
    answer = rule.answer("replacement", *values, known_of(match, facts), training)
    if isinstance(answer, Reject):
        return answer
    if isinstance(answer.op, Op) and not registered(answer.op):
        return Reject(f"it would call {answer.op.name}, but another definition has that name now")
    answer = dataclasses.replace(answer, args=tuple(on_graph(a, match) for a in answer.args))
    if already(match, answer, facts.canon):
        name = schema_of(match.roots[0].target).name.removeprefix("aten::")
        return Reject(f"the code calls {name} itself")
    found = [a for a in answer.args if isinstance(a, fx.Node)]
    found = [n for n in found if n not in match.tensors.values()]
    if any(s in facts.writers for n in found for s in storages(n)):
        return Reject("a tensor that its mask is computed from may be written to")
    return answer


def on_graph(value, match: Match):
    """The argument of the match that holds a value which a replacement function returned."""
    if not isinstance(value, torch.Tensor):
        return value
    for argument in match.tensors.values():
        if value_of(argument) is value:
            return argument
    told = f"its replacement has a tensor of shape {tuple(value.shape)} that it was not given"
    raise PatternError(f"{match.pattern.where}: {told}")


def already(match: Match, answer: Replacement, canon) -> bool:
    """Does the graph already call this operator, or what it stands for, on these tensors?"""
    root = match.roots[0]
    given = [a for a in root.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    wanted = [a for a in answer.args if isinstance(a, (fx.Node, Viewed))]
    if root.target not in (answer.op, answer.instead_of) or len(given) != len(wanted):
        return False
    if not all(isinstance(w, fx.Node) for w in wanted):
        return False
    return all(canon.of[g] is canon.of[w] for g, w in zip(given, wanted, strict=True))


def values_of(answer: Replacement) -> tuple[list, dict]:
    """The fake tensors, numbers and words on which the replacement is called."""
    like = next(original(a) for a in answer.args if isinstance(a, (fx.Node, Viewed)))
    return [fake_seed(like) if a is SEED else value_of(a) for a in answer.args], answer.kwargs


def by_name(op: Op, args, kwargs) -> dict:
    """The arguments of an op by their names, in the order of its reference."""
    names = [p.name for p in op.params]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: given[name] for name in names}


def call_of_op(op: Op, arguments: dict, values: dict, named, decision: dict) -> Call:
    """The call of an op of ours, run on fakes. `arguments` and `values` by name; `decision` is what
    the gate chose.
    """
    operator = operator_of(op)
    tensor = next(v for v in values.values() if isinstance(v, torch.Tensor))
    with tensor.fake_mode, torch.no_grad(), enable_python_dispatcher():
        seeds = {name: fake_seed(tensor) for name in op.seed_arguments}
        out = operator.overload(*operator.flatten(values | seeds), **decision)
    return written(op, arguments, named, decision, out if isinstance(out, tuple) else (out,))


def written(op: Op, arguments: dict, named, decision: dict, values: tuple) -> Call:
    """The call as it is written into a graph. `named`: the arguments that are written by name."""
    operator = operator_of(op)
    flat = operator.flatten(arguments | dict.fromkeys(op.seed_arguments, SEED))
    given = dict(zip((field.name for field in operator.fields), flat, strict=True))
    by_name = {name: value for name, value in given.items() if name in named}
    args = tuple(value for name, value in given.items() if name not in named)
    unread = tuple(map(int, decision.get("unread", "").split()))
    narrow = bool(decision.get("narrow"))
    return Call(operator.overload, args, by_name | decision, values, unread=unread, narrow=narrow)


def call_of_torch(answer: Replacement) -> Call:
    """The call of a torch operator, run on fakes."""
    args, kwargs = values_of(answer)
    mode = next(a for a in args if isinstance(a, torch.Tensor)).fake_mode
    with mode, torch.no_grad(), without_autocast(), enable_python_dispatcher():
        out = answer.op(*args, **kwargs)
    values = out if isinstance(out, tuple) else (out,)
    return Call(answer.op, answer.args, dict(kwargs), values)


def laid_out_as(out: torch.Tensor, want: torch.Tensor) -> bool:
    return all(
        equals(have, need) or statically_known_true(size <= 1)
        for have, need, size in zip(out.stride(), want.stride(), want.shape, strict=True)
    )


def order_in_memory(t: torch.Tensor) -> list[int] | None:
    """The dimensions of a tensor from the outermost in memory to the innermost; None where the
    tensor has gaps, overlaps itself, or has strides that are not known.
    """
    if t.is_contiguous():
        return list(range(t.dim()))
    if not all(isinstance(n, int) for n in (*t.shape, *t.stride())):
        return None
    order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), -t.shape[d]))
    return order if t.permute(order).is_contiguous() else None


def differs(call: Call, match: Match, own: bool) -> str:
    """Why the results cannot replace the site's: later views rely on the strides that the graph was
    traced with, and later in-place code relies on fresh memory.

    own: is it the pattern's own op? Its result may be copied to lie in memory as the graph's does;
    another result may be copied only if the graph's is contiguous.
    """
    given = {storage_id(original(v)) for v in match.tensors.values()}
    if own and any(storage_id(out) in given for out in call.values):
        return "the result would share memory with an argument"
    for i, (out, root) in enumerate(zip(call.values, match.roots, strict=False)):
        if i in call.unread:
            continue
        want = root.meta["val"]
        rounded = i == 0 and call.narrow
        if (out.dtype != want.dtype and not rounded) or out.device != want.device:
            return (
                f"the replacement gives {out.dtype} on {out.device}, "
                f"the graph has {want.dtype} on {want.device}"
            )
        if not same(out.shape, want.shape):
            return f"the replacement gives {tuple(out.shape)}, the graph has {tuple(want.shape)}"
        copyable = order_in_memory(want) is not None if own else want.is_contiguous()
        if not laid_out_as(out, want) and not copyable:
            have = tuple(out.stride())
            return f"the result has strides {have}, the graph has {tuple(want.stride())}"
    return ""


def to_copy(call: Call, match: Match, writers: dict) -> tuple[int, ...]:
    """The places of the results of which a reader would see that their strides differ."""
    pairs = enumerate(zip(match.roots, call.values, strict=False))
    read = [(i, *pair) for i, pair in pairs if i not in call.unread]
    return tuple(i for i, root, out in read if needs_copy(root, out, writers))


def needs_copy(root: fx.Node, out: torch.Tensor, writers: dict) -> bool:
    """Would a reader see that the result's strides differ from the graph's?"""
    pending, followed = [(root, out)], 0
    while pending:
        n, value = pending.pop()
        if laid_out_as(value, n.meta["val"]):
            continue
        for u in n.users:
            followed += 1
            name = schema_of(u.target).name if is_lowered(u) else ""
            short = name.removeprefix("aten::")
            known = short in IN_ANY_LAYOUT or (name and is_elementwise(u))
            # memory that was fresh may be a view now
            if not known or any(s in writers for s in storages(u)) or followed > FOLLOWED:
                return True
            if short == "contiguous" and u.meta["val"].is_contiguous():
                continue
            read = [value, *map(value_of, u.all_input_nodes)]
            sizes = [size for t in read if isinstance(t, torch.Tensor) for size in t.shape]
            if not all(isinstance(size, int) for size in sizes):  # no guard for a question
                return True
            pending.append((u, computed_from(u, n, value)))
    return False


def computed_from(user: fx.Node, n: fx.Node, value: torch.Tensor):
    """The fake result of a node, were `n` this value."""
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda a: value if a is n else value_of(a))
    with value.fake_mode, torch.no_grad():
        return user.target(*args, **kwargs)


def draws_random_numbers(match: Match) -> bool:
    """Are there random numbers in this form of the pattern?"""
    return match.template.kinds in match.pattern.memo.get("random", ())


def seedless(match: Match, op: Op) -> Reject | None:
    """Refuse a pattern that draws random numbers, unless its reference takes a seed."""
    if draws_random_numbers(match) and op.seeded_fn is None:
        return Reject("it draws random numbers and has no seeded reference")
    return None
