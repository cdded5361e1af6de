"""Runs the backend on a function and asserts what it does, also on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fusion_backend.frontends.explain import Collector, run
from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.registry import OPS
from fusion_backend.reporting.report import Report


def collect(
    fn: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    **keywords: Any,
) -> Collector:
    """Run the pass on `fn(*inputs, **keywords)` with `fusion.gate=always`. Returns its report and
    graphs.

    dynamic: as torch.compile takes it; options: `fusion.*` options of torch.compile; kwargs:
    keywords of `fn` that are named like a parameter here. Memory that `fn` writes to is restored
    afterwards, as by explain. Raises what `fn` raises.

    The result has `report`, the rewritten `graphs`, and `sources`, the graphs before.

        print(collect(model, x).report)
    """
    collector = Collector({"fusion.gate": "always", **(options or {})})
    run(fn, inputs, {**keywords, **(kwargs or {})}, collector, dynamic)
    return collector


def rewritten(fn: Callable[..., Any], *inputs: Any, **kwargs: Any) -> fx.GraphModule:
    """The graph of `fn(*inputs)` after the rewrite, or Dynamo's own graph where nothing fuses.

    kwargs: those of `collect`. On a machine without a GPU the sites inline the reference;
    `with_kernels` switches them to the kernels, which then run in Triton's interpreter. Raises
    AssertionError where Dynamo makes several graphs of the function.

        assert fused_nodes(rewritten(model, x))
    """
    collector = collect(fn, *inputs, **kwargs)
    if len(collector.graphs) != 1:
        raise AssertionError(f"expected one graph, Dynamo made {len(collector.graphs)}")
    return collector.graphs[0]


def assert_fuses(
    fn: Callable[..., Any], *inputs: Any, pattern: str, count: int = 1, **kwargs: Any
) -> Report:
    """Assert that exactly `count` sites of `pattern` fuse in `fn(*inputs)`. Returns the report.

    pattern: its name; kwargs: those of `collect`. Raises AssertionError, with the report, for any
    other count, and where the pass did not run on the function; ValueError where there is no such
    pattern.

        assert_fuses(lambda x, w: F.rms_norm(x, w.shape, w), x, w, pattern="rms_norm")
    """
    known = [p.name for p in patterns()]
    if pattern not in {*known, *OPS}:
        raise ValueError(f"there is no pattern {pattern!r}; known patterns are {', '.join(known)}")
    report = collect(fn, *inputs, **kwargs).report
    errors = [g.error for g in report.graphs if g.error]
    if errors or not report.graphs:  # a count of 0 says nothing if the passes did not run
        reason = errors[0] if errors else "Dynamo made no graph of it"
        raise AssertionError(f"the pass did not run on the function: {reason}")
    found = sum(s.pattern == pattern for s in report.fused)
    if found != count:
        raise AssertionError(f"{pattern} fused {found} times, expected {count}\n{report}")
    return report


def fused_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a graph that call one of our operators, torch.ops.fusion.*.

    gm: a rewritten graph. The nodes come in the order of the graph.

        (node,) = fused_nodes(rewritten(model, x))
    """
    return [
        n for n in gm.graph.nodes if n.op == "call_function" and str(n.target).startswith("fusion.")
    ]


def with_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Switch all sites of a rewritten graph to their kernels, forward and backward. Changes the
    graph module and returns it.

        torch.testing.assert_close(with_kernels(rewritten(model, x))(x)[0], model(x))
    """
    for n in fused_nodes(gm):
        n.kwargs = {**n.kwargs, "forward": "kernel", "backward": "kernel"}
    gm.recompile()
    return gm


def graph_text(gm: fx.GraphModule) -> str:
    """The graph as text for comparison in tests: one line for each node but the placeholders,
    `name = target(arguments)`.

        assert "fusion.layer_norm(" in graph_text(rewritten(model, x))
    """
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
