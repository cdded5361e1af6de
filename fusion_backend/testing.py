"""Helpers to test graph rewrites and patterns, on CPU as well.

rewritten, assert_fuses and check_pattern; spellings and near_misses write a pattern in other words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.collect import Collector, run
from fusion_backend.compat.torch import TorchDispatchMode, aten, pytree
from fusion_backend.kernels.dropout import kept
from fusion_backend.kernels.launch import interpreting
from fusion_backend.op import draw, op_of
from fusion_backend.pattern import Pattern, PatternError
from fusion_backend.reporting import Report
from fusion_backend.spelling.author import near_misses as near_misses
from fusion_backend.spelling.author import spellings as spellings
from fusion_backend.template import example_inputs, forms, templates, with_kinds

# A fused result may be this many times as far from fp64 as the unfused one in the same dtype, …
FACTOR = 2.0
# … or this many units in the last place of its largest value: two right roundings may differ by one each.
ULPS = 4


def collect(
    fn: Callable,
    *inputs,
    dynamic: bool | None = None,
    options: dict | None = None,
    kwargs: dict | None = None,
    **keywords,
) -> Collector:
    """Run the pass on a function, gate open, and keep graphs and report.

    kwargs: the function's own keywords of the names that are taken here. What it writes to is put back, as by explain.
    """
    collector = Collector({"fusion.gate": "always", **(options or {})})
    run(fn, inputs, {**keywords, **(kwargs or {})}, collector, dynamic)
    return collector


def rewritten(fn: Callable, *inputs, **kwargs) -> fx.GraphModule:
    """The graph of `fn(*inputs)` after the rewrite; the very graph Dynamo made when nothing fuses.

    On a machine without a GPU sites are written with the inlined reference; `with_kernels` switches them to the
    kernels, which then run in Triton's interpreter. Raises AssertionError when Dynamo breaks the function into pieces.
    """
    collector = collect(fn, *inputs, **kwargs)
    if len(collector.graphs) != 1:
        raise AssertionError(f"expected one graph, Dynamo made {len(collector.graphs)}")
    return collector.graphs[0]


def assert_fuses(fn: Callable, *inputs, pattern: str, count: int = 1, **kwargs) -> Report:
    """Assert that exactly `count` sites of `pattern` fuse in `fn(*inputs)`, none with 0. Returns the report."""
    report = collect(fn, *inputs, **kwargs).report
    found = sum(s.pattern == pattern for s in report.fused)
    if found != count:
        raise AssertionError(f"{pattern} fused {found} times, expected {count}\n{report}")
    return report


def fused_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The fusion ops of a graph."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target).startswith("fusion.")]


def with_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Switch the sites of a rewritten graph to kernels, forward and backward."""
    for n in fused_nodes(gm):
        n.kwargs = {**n.kwargs, "forward": "kernel", "backward": "kernel"}
    gm.recompile()
    return gm


def graph_text(gm: fx.GraphModule) -> str:
    """One line a node, for comparison in tests: name = target(arguments)."""
    lines = []
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            continue
        target = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
        if str(n.target).startswith(("fusion.", "aten.")):
            target = str(n.target).removesuffix(".default")
        arguments = [str(a) for a in n.args] + [f"{k}={v}" for k, v in n.kwargs.items()]
        lines.append(f"return {n.args[0]}" if n.op == "output" else f"{n.name} = {target}({', '.join(arguments)})")
    return "\n".join(lines)


def close(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> str:
    """Empty when `got` is no worse against the fp64 result `exact` than `plain` is; else what is wrong."""
    if got.shape != exact.shape or got.dtype != plain.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(exact.shape)} {plain.dtype}"
    if not got.dtype.is_floating_point:
        mine, theirs = int((got != exact).sum()), int((plain != exact).sum())
        return f"{mine} of {got.numel()} integers are wrong, {theirs} unfused" if mine > FACTOR * theirs else ""
    if not torch.equal(got.isnan(), exact.isnan()):
        return "NaN in other places"
    finite = exact.isfinite() & got.isfinite()
    if not torch.equal(torch.where(finite, 0, got.double()).nan_to_num(0), torch.where(finite, 0, exact).nan_to_num(0)):
        return "infinities in other places"
    if not finite.any():
        return ""
    mine = (got.double() - exact)[finite].abs().max().item()
    theirs = (plain.double() - exact)[finite].abs().max().item()
    floor = ULPS * torch.finfo(got.dtype).eps * exact[finite].abs().max().item()
    fine = mine <= max(FACTOR * theirs, floor)
    return "" if fine else f"error {mine:.3g} against fp64, the unfused one has {theirs:.3g}"


def check_pattern(pattern: Pattern, dtypes=(torch.float32,), device: str | None = None) -> list[str]:
    """Prove what can be proven of a pattern on this machine. Returns what was checked, a line each.

    It can be traced; every spelling agrees with the reference in fp64, value and gradient, and is recognised; the
    kernel and the backward agree with the reference (on CUDA, or with TRITON_INTERPRET=1); the op passes
    torch.library.opcheck. Raises PatternError or AssertionError naming pattern and line.
    """
    templates(pattern)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    done = [f"{pattern.name}: {len(templates(pattern))} templates"]
    for kinds in supported_forms(pattern):
        if pattern.seeded_fn is not None:
            seeded_agrees(pattern, kinds)
            done.append(f"{kinds}: the seeded reference agrees with the reference in fp64")
        for fn in pattern.spellings[1:]:
            agree(pattern, fn, kinds)
        done.append(f"{kinds}: {len(pattern.spellings) - 1} spellings agree with the reference in fp64")
        for fn in pattern.spellings:
            recognised(pattern, fn, kinds)
        done.append(f"{kinds}: every spelling that takes this form is recognised")
        for fn in pattern.near_misses:
            left_alone(pattern, fn, kinds)
        done.append(f"{kinds}: {len(pattern.near_misses)} near misses are left alone")
        if device == "cuda" or interpreting():
            for dtype in dtypes:
                kernels_agree(pattern, kinds, dtype, device)
            done.append(f"{kinds}: kernels agree with the reference")
    return done


def supported_forms(pattern: Pattern) -> list[tuple[str, ...]]:
    have = {t.kinds for t in templates(pattern)}
    return [kinds for kinds in forms(pattern) if kinds in have]


def arguments(pattern: Pattern, kinds, dtype: torch.dtype, device: str = "cpu", grad: bool = True) -> list:
    """Random arguments of the first case in one form, requiring grad."""

    def make(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float64).to(dtype)

    args = with_kinds(pattern, kinds, example_inputs(pattern, make))
    return [
        a.detach().requires_grad_(grad and a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args
    ]


def in_fp64(args: list) -> list:
    """The same arguments, floating tensors in fp64; they require grad where the given ones do."""
    exact = [a.detach().double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    pairs = zip(exact, args, strict=True)
    return [e.requires_grad_(a.requires_grad) if isinstance(e, torch.Tensor) else e for e, a in pairs]


def value_and_gradients(fn: Callable, args: list, seed: int = 0) -> list[torch.Tensor]:
    """Outputs, then the gradients of every tensor argument under fixed random output gradients.

    What `fn` draws itself is the same every time.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = [o for o in pytree.tree_leaves(fn(*args)) if isinstance(o, torch.Tensor)]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    smooth = [o for o in out if o.requires_grad]
    if not smooth or not wanted:
        return [o.detach() for o in out]
    generator = torch.Generator().manual_seed(seed)
    seeds = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in smooth]
    grads = torch.autograd.grad(smooth, wanted, seeds, allow_unused=True)
    return [*(o.detach() for o in out), *(g for g in grads if g is not None)]


class DropoutOfKernels(TorchDispatchMode):
    """Inside, dropout in eager draws a seed as a rewritten graph does, and keeps the elements that a kernel would."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo runs compiled code inside, not the function as it was."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.bernoulli_.float and args[0].is_floating_point():  # on CPU
            noise, keep = args
            return noise.copy_(kept(draw(noise.device), noise.shape, 1 - keep))
        if func is aten.native_dropout.default:  # on CUDA
            x, p, _ = args
            mask = kept(draw(x.device), x.shape, p)
            return x * mask * (1 / (1 - p)), mask
        return func(*args, **(kwargs or {}))


def unfused(pattern: Pattern, args: list) -> list[torch.Tensor]:
    """Value and gradients of the reference; dropout, if any, has the masks of the kernels."""
    with DropoutOfKernels():
        return value_and_gradients(pattern.reference, args)


def agree(pattern: Pattern, fn: Callable, kinds) -> None:
    """A spelling against the reference, in fp64."""
    args = arguments(pattern, kinds, torch.float64)
    line = fn.__code__.co_firstlineno
    try:
        mine = value_and_gradients(fn, args)
    except Exception:  # a spelling for some forms only; `recognised` and the templates know which
        return
    theirs = value_and_gradients(pattern.reference, args)
    same = len(mine) == len(theirs) and all(
        m.shape == t.shape and torch.allclose(m.double(), t.double(), rtol=1e-9, atol=1e-9)
        for m, t in zip(mine, theirs, strict=True)
    )
    if not same and any(t.kinds == kinds and t.line == line for t in templates(pattern)):
        raise PatternError(f"{pattern.where}: the spelling at line {line} disagrees with the reference for {kinds}")


def seeded_agrees(pattern: Pattern, kinds) -> None:
    """What is written in terms of a seed against the reference with the same mask, in fp64."""
    args = arguments(pattern, kinds, torch.float64)
    mine = value_and_gradients(lambda *args: pattern.seeded_fn(*args, draw(torch.device("cpu"))), args)
    for i, (m, t) in enumerate(zip(mine, unfused(pattern, args), strict=True)):
        if m.shape != t.shape or not torch.allclose(m, t, rtol=1e-9, atol=1e-9):
            raise PatternError(f"{pattern.where}: number {i} of the seeded reference's results and gradients is wrong")


def recognised(pattern: Pattern, fn: Callable, kinds) -> None:
    args = arguments(pattern, kinds, torch.float32)
    line = fn.__code__.co_firstlineno
    if not any(t.kinds == kinds and t.line == line for t in templates(pattern)) and fn is not pattern.reference:
        return
    report = collect(fn, *args, dynamic=False, options={"fusion.only": [pattern.name]}).report
    if sum(s.pattern == pattern.name for s in report.sites) != 1:
        raise AssertionError(f"{pattern.where}: the spelling at line {line}, {kinds}, is not recognised\n{report}")


def left_alone(pattern: Pattern, fn: Callable, kinds) -> None:
    """A near miss, where it takes this form, is not recognised as the pattern."""
    args = arguments(pattern, kinds, torch.float32)
    try:
        fn(*args)
    except Exception:  # for some forms only
        return
    report = collect(fn, *args, dynamic=False, options={"fusion.only": [pattern.name]}).report
    found = [s for s in report.sites if s.pattern == pattern.name]
    if found:
        line = fn.__code__.co_firstlineno
        raise AssertionError(f"{pattern.where}: the near miss at line {line}, {kinds}, is recognised: {found[0]}")


def kernels_agree(pattern: Pattern, kinds, dtype: torch.dtype, device: str) -> None:
    """The op with its kernels against the reference in the same dtype, both against fp64."""
    if pattern.kernel_fn is None:
        return
    op = op_of(pattern)
    args = arguments(pattern, kinds, dtype, device)

    def run(*given):
        seed = {name: draw(given[0].device) for name in pattern.drawn}
        flat = op.flatten(dict(zip([p.name for p in pattern.params], given, strict=True)) | seed)
        out = op.overload(*flat)
        return out[: pattern.outputs] if isinstance(out, tuple) else out

    exact = in_fp64(args)
    got = value_and_gradients(run, args)
    for i, (g, p, e) in enumerate(zip(got, unfused(pattern, args), unfused(pattern, exact), strict=True)):
        wrong = close(g, p, e)
        if wrong:
            what = "result" if i < pattern.outputs else f"gradient {i - pattern.outputs}"
            raise AssertionError(f"{pattern.where}: {what} of the kernel for {kinds} in {dtype}: {wrong}")
