"""Run the pass on a function, and assert what it does. Works on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fusion_backend.frontends.explain import Collector, run
from fusion_backend.reporting.report import Report


def collect(
    fn: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    **keywords: Any,
) -> Collector:
    """Run the pass on a function, gate open, and keep graphs and report.

    kwargs: the function's own keywords of the names that are taken here. What it writes to is put
    back, as by explain.
    """
    collector = Collector({"fusion.gate": "always", **(options or {})})
    run(fn, inputs, {**keywords, **(kwargs or {})}, collector, dynamic)
    return collector


def rewritten(fn: Callable[..., Any], *inputs: Any, **kwargs: Any) -> fx.GraphModule:
    """The graph of `fn(*inputs)` after the rewrite; the very graph Dynamo made when nothing fuses.

    On a machine without a GPU sites are written with the inlined reference; `with_kernels` switches
    them to the kernels, which then run in Triton's interpreter. Raises AssertionError when Dynamo
    breaks the function into pieces.
    """
    collector = collect(fn, *inputs, **kwargs)
    if len(collector.graphs) != 1:
        raise AssertionError(f"expected one graph, Dynamo made {len(collector.graphs)}")
    return collector.graphs[0]


def assert_fuses(
    fn: Callable[..., Any], *inputs: Any, pattern: str, count: int = 1, **kwargs: Any
) -> Report:
    """Assert that exactly `count` sites of `pattern` fuse in `fn(*inputs)`, none with 0. Returns
    the report.
    """
    report = collect(fn, *inputs, **kwargs).report
    errors = [g.error for g in report.graphs if g.error]
    if errors or not report.graphs:  # or 0 would be found in what nobody looked at
        why = errors[0] if errors else "Dynamo made no graph of it"
        raise AssertionError(f"the function was not looked at: {why}")
    found = sum(s.pattern == pattern for s in report.fused)
    if found != count:
        raise AssertionError(f"{pattern} fused {found} times, expected {count}\n{report}")
    return report


def fused_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The fusion ops of a graph."""
    return [
        n for n in gm.graph.nodes if n.op == "call_function" and str(n.target).startswith("fusion.")
    ]


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
        target = (
            n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
        )
        if str(n.target).startswith(("fusion.", "aten.")):
            target = str(n.target).removesuffix(".default")
        given = [str(a) for a in n.args] + [f"{k}={v}" for k, v in n.kwargs.items()]
        lines.append(
            f"return {n.args[0]}"
            if n.op == "output"
            else f"{n.name} = {target}({', '.join(given)})"
        )
    return "\n".join(lines)
