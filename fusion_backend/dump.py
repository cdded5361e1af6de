"""The result of each pass, as text: `options={"fusion.dump": DIR}`, and torch's structured trace.

Every graph gets a folder of its own, `DIR/graph_0`, with a file a pass. With TORCH_TRACE set,
`tlparse` shows the same texts as artifacts of the compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from fusion_backend.compat.torch import trace_artifact
from fusion_backend.ir.argument_views import Viewed
from fusion_backend.ir.expr import Expr
from fusion_backend.reporting.places import location
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.reporting.report import warn_once

if TYPE_CHECKING:
    from fusion_backend.pipeline import Scope


class Dump:
    """The texts of one graph. A text that nobody asked for is not made."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def put(self, name: str, text: Callable[[], str]) -> None:
        """Write one text. A failure costs a warning, not the fusion."""
        try:
            trace_artifact(f"fusion_{name}", text)
            if self.folder is not None:
                (self.folder / f"{name}.txt").write_text(text())
        except Exception as error:
            told = f"fusion: {name} is not dumped: {type(error).__name__}: {error}"
            warn_once(f"dump {name}", told)

    def view(self, top: Scope) -> None:
        self.put("1_view", lambda: of_scopes(top, lambda s: view_text(s.view)))

    def canonical(self, top: Scope) -> None:
        self.put("2_canonical", lambda: of_scopes(top, lambda s: canonical_text(s.canon.of)))

    def candidates(self, top: Scope) -> None:
        self.put("3_candidates", lambda: of_scopes(top, candidates_text))

    def decisions(self, top: Scope, record: GraphRecord) -> None:
        def text() -> str:
            return of_scopes(top, decisions_text) + "\n" + record.rules_table()

        self.put("4_decisions", text)

    def result(self, top: Scope) -> None:
        self.put("5_rewritten", lambda: of_scopes(top, lambda s: graph_text(s.result.graph)))


@contextlib.contextmanager
def into(directory: str | None) -> Iterator[Dump]:
    """A dump into a new folder of a directory, or into the trace alone. A directory that cannot be
    written to costs a warning, not the fusion.
    """
    folder = None
    if directory is not None:
        try:
            folder = new_folder(Path(directory))
        except OSError as error:
            warn_once(f"dump {directory}", f"fusion: nothing is written to fusion.dump: {error}")
    yield Dump(folder)


def new_folder(directory: Path) -> Path:
    """The first of graph_0, graph_1, ... that does not exist; several processes may write."""
    directory.mkdir(parents=True, exist_ok=True)
    number = len(list(directory.glob("graph_*")))
    while True:
        folder = directory / f"graph_{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def of_scopes(top: Scope, text: Callable[[Scope], str]) -> str:
    parts = []
    for scope in top.scopes():
        title = f"body {scope.path.rstrip('.')}" if scope.path else "graph"
        parts.append(f"{title}\n{'-' * len(title)}\n{text(scope).rstrip()}\n")
    return "\n".join(parts)


def kind_of(value) -> str:
    """`float32[2, 8]` of a fake tensor; the name of the type of any other value."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(kind_of, value))})"
    return type(value).__name__


def node_text(n: fx.Node) -> str:
    given = [str(a) for a in n.args] + [f"{k}={v}" for k, v in n.kwargs.items()]
    if n.op == "output":
        return f"return {', '.join(given)}"
    value = n.meta.get("val", n.meta.get("example_value"))
    kind = "" if value is None else f": {kind_of(value)}"
    if n.op in ("placeholder", "get_attr"):
        return f"{n.name}{kind} = {n.op} {n.target}"
    return f"{n.name}{kind} = {n.target}({', '.join(given)})"


def graph_text(graph: fx.Graph) -> str:
    return "\n".join(map(node_text, graph.nodes))


def view_text(view) -> str:
    """The nodes, and the Dynamo nodes that were copied as they were, with the reason."""
    copied = [f"copied as it was: {n.name}: {why}" for n, why in view.copied.items()]
    return "\n".join([graph_text(view.graph), *copied])


def canonical_text(of: dict[fx.Node, Expr]) -> str:
    """One line an expression, operands by number, and the nodes that have this value."""
    numbers: dict[Expr, int] = {}
    lines: list[str] = []
    for n, root in of.items():
        stack = [root]
        while stack:
            e = stack[-1]
            missing = [a for a in e.args if a not in numbers]
            if e in numbers or not missing:
                stack.pop()
                if e not in numbers:
                    numbers[e] = len(numbers)
                    lines.append(expression_line(e, numbers))
            else:
                stack += missing
        lines.append(f"    {n.name} is #{numbers[root]}")
    return "\n".join(lines)


def expression_line(e: Expr, numbers: dict[Expr, int]) -> str:
    attr = "" if e.attr is None else f"[{e.attr}]"
    operands = ", ".join(f"#{numbers[a]}" for a in e.args)
    return f"#{numbers[e]} = {e.op}{attr}({operands})"


def argument_text(a) -> str:
    if isinstance(a, Viewed):
        return f"{a.node.name}{''.join(f'.{op}{list(attr)}' for op, attr in a.steps)}"
    return a.name if isinstance(a, fx.Node) else repr(a)


def candidates_text(scope: Scope) -> str:
    lines = []
    for m in scope.matches:
        given = ", ".join(f"{k}={argument_text(a)}" for k, a in m.arguments.items())
        roots, inside = (" ".join(n.name for n in nodes) for nodes in (m.roots, m.interior))
        spelled = f"{m.template.size} operators, spelling at line {m.template.line}"
        lines.append(f"{m.pattern.name}({given}) -> {roots}\n    {spelled}; inside: {inside}")
    misses = [
        f"near miss {m.pattern.name} at {m.root.name}: {m.matched} of {m.size} operators, "
        f"{m.reason}"
        for m in scope.matcher.misses.values()
    ]
    return "\n".join([*lines, *misses]) or "no candidates"


def decisions_text(scope: Scope) -> str:
    lines = []
    for d in scope.decisions:
        what = f"{d.match.pattern.name} -> {' '.join(n.name for n in d.match.roots)}"
        where = location(d.match.roots[0])
        if not d.fused:
            lines.append(f"{what} at {where}: left to Inductor: {d.reason}")
            continue
        by = f"forward {d.forward}, backward {d.backward}"
        because = f": {d.reason}" if d.reason else ""
        lines.append(f"{what} at {where}: {d.call.target}, {by}{because}")
    return "\n".join(lines) or "no decisions"
