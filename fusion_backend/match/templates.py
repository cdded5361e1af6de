"""Pattern -> templates: the expressions to look for, one for each spelling and each form of the
arguments.

A reference is traced twice, with different values for its scalars. A number that equals a scalar's
value in both traces is that scalar. The two templates must be equal, which proves that no constant
is baked in.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch

from fusion_backend.cache.disk import file_of, load, store
from fusion_backend.cache.fingerprint import built_in, fingerprint
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.view import View, is_lowered
from fusion_backend.compat.torch import FakeTensorMode, pytree, schema_of, trace
from fusion_backend.ir.canonicalize import Canon, unrepeatable
from fusion_backend.ir.edges import bounded, is_strict
from fusion_backend.ir.expr import LEAVES, Expr, peel
from fusion_backend.ir.rules import version
from fusion_backend.match.prefilter import Skeleton, make_room, skeleton_of
from fusion_backend.match.root_index import needs
from fusion_backend.ops import checks
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.op import Op
from fusion_backend.ops.rule import Rule
from fusion_backend.reporting.reject import PatternError

# other results of tracing, besides the templates
TRACED = ("random", "differentiable", "dtypes", "default_dtype", "strict")
PROBES = (1.2360679774997898, 0.8660254037844386)  # factors of a scalar's example value
# How a captured scalar may reach the graph, and how to get it back from there.
FORMS: dict[str, tuple[Callable, Callable]] = {
    "s": (lambda s: s, lambda v: v),
    "-s": (lambda s: -s, lambda v: -v),
    "1/s": (lambda s: 1 / s, lambda v: 1 / v),
    "√s": (lambda s: math.sqrt(s) if s > 0 else math.nan, lambda v: v * v),
}


@dataclasses.dataclass(frozen=True)
class Template:
    """One form of a pattern as expressions: `kinds` says for each argument tensor,
    scalar, text or none.
    """

    pattern: Definition
    kinds: tuple[str, ...]
    roots: tuple[Expr, ...]
    size: int  # operators in it
    line: int  # of the spelling

    @functools.cached_property
    def start(self) -> int:
        """The root to start at: the one with the most operators below it, including other
        results.
        """
        below = [len(subexpressions([r])) for r in self.roots]
        return below.index(max(below))

    @functools.cached_property
    def needs(self) -> frozenset:
        return needs(self.roots[self.start])

    @functools.cached_property
    def skeletons(self) -> dict[Expr, Skeleton]:
        """The skeleton of every expression in it."""
        known: dict[Expr, Skeleton] = {}
        make_room()
        for root in self.roots:
            skeleton_of(root, known)
        return known


def templates(pattern: Definition) -> list[Template]:
    """All templates of a pattern, the largest first; traced once, then kept on disk. Raises
    PatternError.

    Integers times a float have torch's default dtype. A reference is therefore traced anew under
    another default dtype, and also after another package has added a canonical rule.
    """
    default = torch.get_default_dtype()
    if (pattern.memo.get("default_dtype"), pattern.memo.get("rules")) != (default, version()):
        pattern.memo.pop("templates", None)
        pattern.memo |= {"default_dtype": default, "rules": version()}
    if "templates" not in pattern.memo:
        file = file_of(pattern)
        stored = load(file)
        if stored is not None and stored.get("default_dtype") == default:
            pattern.memo |= {k: stored[k] for k in TRACED if k in stored}
            pattern.memo["templates"] = [
                Template(pattern, *fields) for fields in stored["templates"]
            ]
            return pattern.memo["templates"]
        found: dict[str, Template] = {}
        for fn, kinds in itertools.product(spellings_of(pattern), forms(pattern)):
            for t in template(pattern, fn, kinds):
                found.setdefault(f"{kinds}{t.roots!r}", t)
        if not found:
            error = pattern.memo.get("trace_error")
            raise PatternError(f"{pattern.where}: the reference cannot be traced: {error}")
        pattern.memo["templates"] = sorted(found.values(), key=lambda t: -t.size)
        fields = [(t.kinds, t.roots, t.size, t.line) for t in pattern.memo["templates"]]
        store(
            file, {"templates": fields} | {k: pattern.memo[k] for k in TRACED if k in pattern.memo}
        )
    return pattern.memo["templates"]


def spellings_of(definition: Definition) -> list[Callable]:
    """The functions to trace. An op without a rule is traced as well, to learn its dtypes."""
    return definition.spellings if isinstance(definition, Rule) else [definition.reference]


def renew(pattern: Definition) -> None:
    """Forget what was traced if the pattern, or anything that it reaches, has changed since."""
    if not built_in(pattern):
        digest = fingerprint(pattern).digest
        if pattern.memo.setdefault("digest", digest) != digest:
            pattern.forget()
            pattern.memo["digest"] = digest


def backward_of(pattern: Definition) -> str:
    """What computes the gradient, in words."""
    templates(pattern)
    if not pattern.memo.get("differentiable"):
        return "none (integers)"
    if not isinstance(pattern, Op):
        return "its replacement's"
    if pattern.backward_fn is None:
        return "vjp of the reference"
    return "own formula" if pattern.backward_plain else "own kernel"


def forms(pattern: Definition):
    return itertools.product(*(p.kinds() for p in pattern.params))


def example_inputs(pattern: Definition, make: Callable, case: dict | None = None) -> list:
    """The arguments of a case (the first by default), tensors made by `make(*shape)`."""
    if pattern.inputs_fn is None:
        made = [
            make(6, 6)
            if p.tensor
            else (0.5 if p.scalar is float else 3)
            if p.scalar
            else p.name
            if p.text
            else p.words[0]
            for p in pattern.params
        ]
    else:
        made = checks.is_tuple(
            pattern.inputs_fn(make, **(pattern.cases[0] if case is None else case)),
            f"{pattern.where}: the inputs at {checks.line_of(pattern.inputs_fn)}",
        )
    if len(made) != len(pattern.params):
        raise PatternError(
            f"{pattern.where}: inputs gives {len(made)} values for {len(pattern.params)} arguments"
        )
    return made


def with_kinds(pattern: Definition, kinds: tuple[str, ...], args: list, probe: float = 1.0) -> list:
    """The arguments in the asked-for forms; scalars moved off their example value by `probe`."""
    out = []
    for i, (p, kind, arg) in enumerate(zip(pattern.params, kinds, args, strict=True)):
        if kind == "none":
            out.append(None)
        elif p.words:
            out.append(kind.removeprefix("="))
        elif p.text:
            out.append(arg)
        elif kind == "tensor":
            if not isinstance(arg, torch.Tensor):
                raise PatternError(f"{pattern.where}: inputs gives {arg!r} for the tensor {p.name}")
            out.append(arg)
        else:
            number = arg if isinstance(arg, (int, float)) else 0.37 * (i + 1)
            out.append(
                integer(int(number), i, probe)
                if p.scalar is int
                else (number or 0.11) * probe + 0.001 * i
            )
    return out


def integer(number: int, i: int, probe: float) -> int:
    """Another integer for a trace: a multiple of the example, so that a number of groups still
    divides the channels. For small examples it is no multiple, because small numbers occur
    everywhere.
    """
    if probe == 1.0:
        return number
    return number * (3 if probe > 1 else 5) if abs(number) > 1 else number + int(1000 * probe) + i


def template(pattern: Definition, fn: Callable, kinds: tuple[str, ...]) -> list[Template]:
    """The template of one form; None if the spelling does not support it (a bias without a weight,
    say).
    """
    first = traced(pattern, fn, kinds, PROBES[0])
    second = traced(pattern, fn, kinds, PROBES[1]) if first and "scalar" in kinds else first
    if first is None or second is None:
        return []
    roots, size = first
    if repr(roots) != repr(second[0]):
        raise PatternError(
            f"{pattern.where}: a scalar is computed with before it reaches the graph and cannot be "
            f"captured: {roots!r} against {second[0]!r}"
        )
    used = {
        e.attr[0] if e.op == "scalar" else e.attr
        for e in subexpressions(roots)
        if e.op in ("var", "scalar", "text")
    }
    given = [
        p.name
        for p, kind in zip(pattern.params, kinds, strict=True)
        if kind != "none" and not p.words
    ]
    unused = [name for name in given if name not in used]
    if unused and fn is pattern.reference:
        raise PatternError(f"{pattern.where}: argument {unused[0]} is not used")
    if unused:
        return []  # the spelling is for some forms only, for example without the zero point
    return [Template(pattern, kinds, roots, size, fn.__code__.co_firstlineno)]


def subexpressions(roots) -> set[Expr]:
    found, stack = set(), list(roots)
    while stack:
        e = stack.pop()
        if e not in found:
            found.add(e)
            stack.extend(e.args)
    return found


def variables(e: Expr) -> set[str]:
    """The arguments that an expression of a template reads."""
    return {part.attr for part in subexpressions([e]) if part.op == "var"}


def traced(pattern: Definition, fn: Callable, kinds: tuple[str, ...], probe: float):
    """The roots of a function's expressions, in one form and with one probe, and how many operators
    they have; None where the function cannot be traced. Raises PatternError where what it computes
    cannot be a template.
    """
    fake_mode = FakeTensorMode()
    with fake_mode:
        args = with_kinds(pattern, kinds, example_inputs(pattern, empty), probe)
    note_dtypes(pattern, args)
    gm = graph_of(pattern, fn, args, fake_mode)
    if gm is None:
        return None
    functionalize_locals(View(gm, gm.graph, {}, {}, {}, set(), {}, {}))
    by_name = list(zip((p.name for p in pattern.params), kinds, args, strict=True))
    scalars = {name: a for name, kind, a in by_name if kind == "scalar"}
    texts = {a: name for name, kind, a in by_name if kind == "text"}
    canon = Canon(lambda number: scalar_named(scalars, number), texts.get)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = [name for name, kind, _ in by_name if kind == "tensor"]
    for name, n in zip(names, placeholders, strict=True):
        canon.variable(n, name)
    canon.run(gm.graph)
    if canon.faults:
        raise PatternError(f"{pattern.where}: {next(iter(canon.faults.values()))}")
    outs = results_of(pattern, gm.graph)
    check_operators(pattern, gm.graph, kinds)
    pattern.memo["differentiable"] = any(o.meta["val"].is_floating_point() for o in outs)
    found = map(is_strict, bounded(gm.graph.nodes, canon.of))
    pattern.memo.setdefault("strict", set()).update(found)
    roots = tuple(canon.of[o] for o in outs)
    size = sum(e.op not in LEAVES for e in subexpressions(roots))
    # the final rounding of a result is compared with the graph's dtypes, not matched
    return tuple(map(peel, roots)), size


def empty(*shape) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def graph_of(pattern: Definition, fn: Callable, args: list, fake_mode):
    """The ATen graph of a function; None, the reason in the pattern's memo, where it raises. The
    autocast in which the user calls the model is not the reference's.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def call(*given):
        rest = iter(given)
        return fn(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if "trace_error" in pattern.memo:  # it refuses forms, which a call tells sooner
                with fake_mode:
                    call(*tensors)
            return trace(call, tensors, fake_mode)
    except Exception as error:  # a user's function may raise anything; the error names the pattern
        name = type(error).__name__
        branches = "DataDependent" in name
        why = "it reads the value of a tensor, to branch on it say: " if branches else ""
        pattern.memo["trace_error"] = f"{why}{name}: {error}"
        return None


def results_of(pattern: Definition, graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that a traced function returns, as many as its annotation says."""
    (output,) = [n for n in graph.nodes if n.op == "output"]
    outs = pytree.tree_leaves(output.args[0])
    if not outs or not all(isinstance(o, torch.fx.Node) and o.op == "call_function" for o in outs):
        raise PatternError(
            f"{pattern.where}: it must return a tensor or a tuple of tensors that it computes"
        )
    if len(outs) != pattern.outputs:
        raise PatternError(
            f"{pattern.where}: it returns {len(outs)} tensors, its annotation says "
            f"{pattern.outputs}"
        )
    return outs


def check_operators(pattern: Definition, graph: torch.fx.Graph, kinds: tuple[str, ...]) -> None:
    """No operator of ours, and no random numbers but those of dropout, which are noted."""
    ours = next((n for n in graph.nodes if getattr(n.target, "namespace", "") == "fusion"), None)
    if ours is not None:
        raise PatternError(
            f"{pattern.where}: it calls {ours.target}, which is what patterns are replaced with "
            "and never found in a graph: write out what that computes"
        )
    random = [n for n in graph.nodes if is_lowered(n) and unrepeatable(n)]
    if random:
        pattern.memo.setdefault("random", set()).add(kinds)
    for n in random:
        if schema_of(n.target).name not in ("aten::dropout", "aten::scaled_dot_product_attention"):
            raise PatternError(
                f"{pattern.where}: {n.target} cannot be in a pattern: only dropout may draw random "
                "numbers"
            )


def note_dtypes(pattern: Definition, args: list) -> None:
    """Note the dtypes of masks, indices and quantised weights in the example inputs; the gate
    accepts no other dtype there.
    """
    exact = pattern.memo.setdefault("dtypes", {})
    for p, a in zip(pattern.params, args, strict=True):
        if isinstance(a, torch.Tensor) and not a.is_floating_point():
            exact[p.name] = a.dtype


def scalar_named(scalars: dict[str, float], number) -> tuple[str, str] | None:
    """The scalar that this number is, and in which form."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    for form, (of, _) in FORMS.items():
        for name, value in scalars.items():
            if value and float(of(value)) == float(number):
                return name, form
    return None
