"""Plain Inductor as the oracle: run one case under several backends, record what a user could
observe, compare.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import os
import re
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

from .. import selection
from ..eager_kernels import eager_kernels

# ORACLE_BACKEND=inductor runs the oracle against itself: it checks the cases, not the backend.
BACKEND = os.environ.get("ORACLE_BACKEND", "fusion")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SOME = -1  # "at least one", where the number of sites is not the point

# The oracle of every case is compiled, so compile quickly: no vector code, one process, no graph
# caches.
FAST = {"cpp.simdlen": 1, "compile_threads": 1, "fx_graph_cache": False}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its inputs, and what is known of it.

    build()         makes the model, a function or a module, under seed 0
    inputs(k)       makes the inputs of call k, under seed 1 + k
    fused           pattern -> how many sites of it must fuse; 0: none may
    train           call backward with fixed cotangents
    around(k)       the context manager in which call k runs
    before(inputs)  is called before each call
    exact           what values and gradients are compared with: eager in "fp64", "eager", or
                    "plain" Inductor
    with_norm       also compute a layer_norm of the first floating output, so that something fuses
    fails           plain Inductor raises, and so must we, with the same message
    skip            why this version of torch cannot run the case even under plain Inductor
    slack           bytes that may be saved beyond what plain Inductor saves
    same_saved      nothing was rewritten in the differentiated part: exactly the same tensors are
                    saved
    generated       Inductor's own code runs, in the default selection too (eager_kernels.py)
    """

    name: str
    build: Callable[[], Callable]
    inputs: Callable[[int], tuple]
    fused: dict[str, int] = dataclasses.field(default_factory=lambda: {"layer_norm": 1})
    calls: int = 1
    train: bool = True
    exact: str = "fp64"
    with_norm: bool = True
    fails: bool = False
    same_saved: bool = False
    slack: int = 0
    skip: str = ""
    generated: bool = False
    compile: dict = dataclasses.field(default_factory=dict)
    around: Callable = lambda k: contextlib.nullcontext()
    before: Callable = lambda inputs: None
    config: dict = dataclasses.field(default_factory=dict)
    dynamo: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """What a user can observe of one run. `layout` has what must be equal exactly, by call."""

    values: list = dataclasses.field(default_factory=list)
    grads: list = dataclasses.field(default_factory=list)
    mutated: list = dataclasses.field(default_factory=list)
    layout: list = dataclasses.field(default_factory=list)
    # Dynamo graphs compiled, after each call
    graphs: list = dataclasses.field(default_factory=list)
    saved: list = dataclasses.field(default_factory=list)  # (tensors, bytes) of each call
    # of each Inductor forward graph: static input indices
    static: list = dataclasses.field(default_factory=list)
    # and the attention operators that state has chosen
    attention: list = dataclasses.field(default_factory=list)
    breaks: dict = dataclasses.field(default_factory=dict)
    random: list = dataclasses.field(default_factory=list)  # the next random number
    error: Exception | None = None
    report: object = None
    warned: list = dataclasses.field(default_factory=list)


class WithLayerNorm(nn.Module):
    """The result of a model, and a layer_norm of its first floating output."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        out = self.inner(*args)
        first = out if isinstance(out, Tensor) else next(o for o in out if o.is_floating_point())
        return out, F.layer_norm(first, first.shape[-1:])


def tensors(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def double(tree):
    """float32 tensors as float64; the same tensor at two places stays the same."""
    memo = {}

    def convert(t):
        if not isinstance(t, Tensor) or t.dtype != torch.float32:
            return t
        if id(t) not in memo:
            memo[id(t)] = t.detach().double().requires_grad_(t.requires_grad)
        return memo[id(t)]

    return tree_map(convert, tree)


def cotangent(t: Tensor) -> Tensor:
    return (
        torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape)
        if t.numel()
        else torch.zeros_like(t)
    )


def backward(out) -> None:
    roots = [t for t in tensors(out) if t.requires_grad and t.is_floating_point()]
    if roots:
        torch.autograd.backward(roots, [cotangent(t) for t in roots])


def memory(t: Tensor) -> int:
    return local(t).untyped_storage().data_ptr()


def saved_tensors(out, held) -> tuple[int, int]:
    """Number of tensors that compiled graphs keep for backward; bytes of the storages that nobody
    else holds.
    """
    kept, seen = [], set()
    stack = [t.grad_fn for t in tensors(out) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        if "CompiledFunction" in type(node).__name__:
            kept += [t for t in node.saved_tensors if t is not None]
            kept += getattr(node, "_tensors_no_vc_check", None) or []
    storages = {memory(t): local(t).untyped_storage().nbytes() for t in kept}
    return len(kept), sum(
        nbytes for where, nbytes in storages.items() if where not in {memory(t) for t in held}
    )


def layout(out, inputs) -> list:
    """dtype, shape, strides and grad status of outputs and inputs, and who shares
    memory with whom.
    """
    every = [*tensors(out), *tensors(inputs)]
    where = [memory(t) if t.numel() else object() for t in every]
    return [
        (
            t.dtype,
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.requires_grad,
            t.is_inference(),
            where.index(w),
        )
        for t, w in zip(every, where, strict=True)
    ]


def detached(tree) -> list[Tensor]:
    return [local(t).detach().clone() for t in tensors(tree)]


@contextlib.contextmanager
def inductor_graphs(result: Result, generated: bool):
    """Record what Inductor is given with each forward graph; run code that it generates, or eager
    kernels.
    """

    def record(gm, options):
        if not options.get("is_backward"):
            result.static.append(tuple(options.get("static_input_idxs", ())))
            result.attention.append(
                {str(n.target) for n in gm.graph.nodes if "attention" in str(n.target)}
            )

    if not generated:
        with eager_kernels(record):
            yield
        return

    inner = compile_fx.fx_codegen_and_compile

    def spy(gm, *args, **kwargs):
        record(gm, kwargs)
        return inner(gm, *args, **kwargs)

    with mock.patch.object(compile_fx, "fx_codegen_and_compile", spy):
        yield


def compiled(model, backend: str, **how):
    """On a CPU the gate is forced: sites are rewritten, with the inlined reference as their
    forward.

    But for those with dropout: their masks are not plain Inductor's.
    """
    if backend == "fusion":
        from fusion_backend.frontends.loading import patterns

        how = {
            "options": {
                "fusion.gate": "always",
                "fusion.skip": [p.name for p in patterns() if getattr(p, "seeded_fn", None)],
            },
            **how,
        }
    return torch.compile(model, backend=backend, **how)


def run(case: Case, backend: str) -> Result:
    """Run a case eagerly ("eager", "fp64"), or compiled with a backend."""
    result = Result()
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = case.build()
    if case.with_norm:
        model = WithLayerNorm(model)
    if backend == "fp64" and isinstance(model, nn.Module):
        model = copy.deepcopy(model).double()
    call = model if backend in ("eager", "fp64") else compiled(model, backend, **case.compile)
    if backend == "fusion":
        import fusion_backend

        fusion_backend.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch({**FAST, **case.config}))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(torch._dynamo.config.patch(case.dynamo))
        stack.enter_context(inductor_graphs(result, selection.FULL or case.generated))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for k in range(case.calls):
            torch.manual_seed(1 + k)
            inputs = case.inputs(k)
            if backend == "fp64":
                inputs = double(inputs)
            case.before(inputs)
            try:
                one_call(case, k, call, model, inputs, result)
            except Exception as error:
                if backend == "fp64":
                    raise
                result.error = error
                break
    result.breaks = dict(collections.Counter(counters["graph_break"]))
    result.warned = [
        str(w.message) for w in caught if "fusion" in str(w.message) or "fusion" in w.filename
    ]
    if backend == "fusion":
        result.report = copy.deepcopy(fusion_backend.report())
    return result


def one_call(case: Case, k: int, call, model, inputs, result: Result) -> None:
    torch.manual_seed(100)
    leaves = [t for t in tensors(inputs) if t.requires_grad and t.is_leaf]
    if isinstance(model, nn.Module):
        model.zero_grad()
        leaves += list(model.parameters())
    with case.around(k):
        out = call(*inputs)
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    result.saved.append(saved_tensors(out, [*leaves, *tensors(inputs), *buffers]))
    result.layout.append(layout(out, inputs))
    result.values.append(detached(out))
    if case.train:
        backward(out)
    result.grads.append(
        [None if t.grad is None else local(t.grad).detach().clone() for t in leaves]
    )
    result.mutated.append(detached([inputs, buffers]))
    result.graphs.append(counters["stats"]["unique_graphs"])
    result.random.append(torch.rand(1).item())


def error_of(ours: Tensor, exact: Tensor) -> float:
    return (ours.double() - exact.double()).abs().max().item() if ours.numel() else 0.0


def close(what: str, ours: list, plain: list, exact: list) -> None:
    """Our error against `exact` is at most twice plain Inductor's, plus a few roundings of the
    largest element.
    """
    assert len(ours) == len(plain) == len(exact), (
        f"{what}: {len(ours)} tensors, plain {len(plain)}, {len(exact)}"
    )
    for k, (a, b, e) in enumerate(zip(ours, plain, exact, strict=True)):
        here = f"{what}[{k}]"
        assert (a is None) == (b is None), f"{here}: {a} against plain {b}"
        if a is None:
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (
            f"{here}: {a.dtype} {a.shape}, plain {b.dtype} {b.shape}"
        )
        if not a.is_floating_point():
            assert torch.equal(a, b), f"{here}: differs from plain"
            continue
        assert torch.equal(a.isfinite(), b.isfinite()), (
            f"{here}: not finite where plain is, or the reverse"
        )
        a, b, e = (t.nan_to_num() for t in (a, b, e if e is not None else b))
        scale = e.abs().max().item() if e.numel() else 0.0
        bound = 2 * error_of(b, e) + 8 * torch.finfo(a.dtype).eps * max(scale, 1e-3)
        ours_is, plain_is = error_of(a, e), error_of(b, e)
        assert ours_is <= bound, (
            f"{here}: error {ours_is:.3g}, plain {plain_is:.3g}, allowed {bound:.3g}"
        )


def message(error: Exception) -> tuple[type, str]:
    """Type and first paragraph, without the backend's name."""
    text = re.sub(r"backend='[^']*'", "backend", str(error))
    return type(error), text.split("\n\n")[0]


def fused_sites(report) -> collections.Counter:
    return collections.Counter(site.pattern for site in report.sites if site.fused)


def sites_of(pattern: str, count: collections.Counter) -> int:
    """Sites of a pattern or of a larger one that ends in it: add_layer_norm is a layer_norm too."""
    return sum(n for name, n in count.items() if name == pattern or name.endswith(f"_{pattern}"))


def compare(case: Case, backend: str | None = None) -> Result:
    """Run `case` plainly and fused; assert that nothing but speed differs. Returns the fused
    result.
    """
    if case.skip:
        pytest.skip(case.skip)
    backend = backend or BACKEND
    plain = run(case, "inductor")
    ours = run(case, backend)
    compare_results(
        case, plain, ours, plain if case.exact == "plain" or case.fails else run(case, case.exact)
    )
    return ours


def compare_results(case: Case, plain: Result, ours: Result, exact: Result) -> None:
    if plain.error or ours.error:
        same = (
            case.fails
            and plain.error
            and ours.error
            and message(plain.error) == message(ours.error)
        )
        if not same:
            which = f"plain: {plain.error!r:.300}; ours: {ours.error!r:.300}"
            raise AssertionError(which) from ours.error or plain.error
        return
    if ours.report is not None:
        assert_report(case, ours)
    assert ours.layout == plain.layout, f"layout {ours.layout}, plain {plain.layout}"
    for k in range(case.calls):
        close(f"call {k} value", ours.values[k], plain.values[k], exact.values[k])
        close(f"call {k} grad", ours.grads[k], plain.grads[k], exact.grads[k])
        close(f"call {k} mutated", ours.mutated[k], plain.mutated[k], exact.mutated[k])
        (_, ours_saves), (_, plain_saves) = ours.saved[k], plain.saved[k]
        assert ours_saves <= plain_saves + case.slack, (
            f"call {k}: saves {ours_saves} bytes, plain {plain_saves}"
        )
    if case.same_saved:
        assert ours.saved == plain.saved, f"saves {ours.saved}, plain {plain.saved}"
    assert ours.graphs == plain.graphs, (
        f"graphs after each call {ours.graphs}, plain {plain.graphs}"
    )
    assert ours.breaks == plain.breaks
    assert ours.static == plain.static, f"static inputs {ours.static}, plain {plain.static}"
    assert ours.attention == plain.attention
    assert ours.random == plain.random, "another amount of random numbers was drawn"


def assert_report(case: Case, result: Result) -> None:
    report, count = result.report, fused_sites(result.report)
    assert not result.warned, result.warned
    assert all(graph.error is None for graph in report.graphs), [
        graph.error for graph in report.graphs
    ]
    assert sum(count.values()) >= 1, f"nothing fused:\n{report}"
    for pattern, want in case.fused.items():
        have = sites_of(pattern, count)
        assert have >= 1 if want == SOME else have == want, (
            f"{have} sites of {pattern} fused, want {want}:\n{report}"
        )
