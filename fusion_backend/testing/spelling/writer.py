"""Writes the source of one function from a traced graph, each value in a random wording."""

from __future__ import annotations

import itertools
import random
import re
from typing import NamedTuple

import torch
from torch import fx

from fusion_backend.compat.torch import pytree
from fusion_backend.testing.spelling.calls import Call, Fields, applicable
from fusion_backend.testing.spelling.changes import BETWEEN, RETURNED, TAMPERED
from fusion_backend.testing.spelling.composites import COMPOSITE_WORDINGS
from fusion_backend.testing.spelling.disguises import DISGUISES, FRAMES
from fusion_backend.testing.spelling.losses import LOSS_WORDINGS
from fusion_backend.testing.spelling.shapes import SHAPE_WORDINGS
from fusion_backend.testing.spelling.traced_form import TracedForm, Variant
from fusion_backend.testing.spelling.wordings import WORDINGS

HEADER = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"
ALL_WORDINGS = WORDINGS | SHAPE_WORDINGS | COMPOSITE_WORDINGS | LOSS_WORDINGS
DISGUISED = 0.1  # how often a value is
MODES = ("fp32", "fp32", "fp32", "bf16", "island")  # an island is float32 code on bf16 tensors
MODULE = re.compile(r"nn\.[A-Z]\w*\([^()]*(?:\([^()]*\))?[^()]*\)(?:\.eval\(\))?(?=\()")
# A text with such an end gives, or may give, a view.
VIEW = re.compile(
    r"(\.unsqueeze\(.*\)|\.values|\[\d\]|None\]|\.float\(\)\)?|\.to\(.*\)|\.type_as\(.*\))$"
)
PACKED_PART = re.compile(r"\[([01])\](?=\)?$)")  # one of the two results of a packed product
DEFAULT = object()  # the operator itself, torch.ops.aten


class Function(NamedTuple):
    """What a Spelling is made of."""

    source: str
    words: tuple[str, ...]
    arguments: list


class Change(NamedTuple):
    """What makes a near miss of a function.

    how: "text", another text for the node; "after", done to its value before its readers see it;
    "between", done to its value between its readers; "extra", its value is returned too.
    """

    node: fx.Node
    how: str
    text: str


class SourceWriter:
    """Writes one function. A value is written when it is first read, so that what no text mentions
    is left out.
    """

    def __init__(self, form: TracedForm, draw: random.Random, changes: dict | None):
        self.form, self.draw, self.changes = form, draw, changes
        self.lines: list[str] = []
        self.text: dict[fx.Node, str] = {}
        self.modules: list[str] = []
        self.words: list[str] = []
        self.views: set[fx.Node] = set()
        self.names = (f"v{i}" for i in itertools.count())
        self.complete: set[fx.Node] = set()
        self.change: Change | None = None
        self.changed = False  # whether it has been written
        self.extra = ""  # an interior value that is returned too
        # how many readers of a value that is changed between them come first, but for its maker
        self.unread = 0

    def write(self) -> Function | None:
        """The function; None where the graph or the change does not allow one."""
        form, draw = self.form, self.draw
        batch = form.batched is not None and draw.random() < 0.15
        mode = draw.choice(MODES)
        variant = Variant(batch, mode == "bf16", bool(form.others) and draw.random() < 0.5)
        graph = form.graph(draw.choice(form.fns), variant)
        if graph is None:
            return None
        self.read_inputs(graph, mode == "island")
        if self.changes is not None and not self.choose_change(graph):
            return None
        if self.change and self.change.node.op == "placeholder":  # to be written to: a copy
            node = self.change.node
            self.text[node] = self.assign(f"{self.text[node]}.clone()")
            self.complete, self.unread = {node}, 1
        outs = self.results(graph, mode == "island")
        if self.change and not (self.changed or self.extra):
            return None
        frame = self.draw_frame()
        source = self.framed(frame, [*outs, *([self.extra] if self.extra else [])])
        arguments = form.arguments(variant._replace(bf16=mode != "fp32"))
        self.words += [frame] * (frame != "plain") + [mode] * (mode != "fp32") + ["batch"] * batch
        return Function(source, tuple(self.words), arguments)

    def read_inputs(self, graph: fx.Graph, island: bool) -> None:
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for name, n in zip(self.form.names, placeholders, strict=True):
            self.text[n] = name
            if island and n.meta["val"].is_floating_point():
                self.text[n] = self.assign(f"{name}.float()")

    def results(self, graph: fx.Graph, island: bool) -> list[str]:
        (output,) = [n for n in graph.nodes if n.op == "output"]
        nodes = pytree.tree_leaves(output.args[0])
        texts = [self.variable(n) for n in nodes]
        floats = [n.meta["val"].dtype == torch.float32 for n in nodes]
        return [
            t + ".to(torch.bfloat16)" * (island and f) for t, f in zip(texts, floats, strict=True)
        ]

    def draw_frame(self) -> str:
        frame = self.draw.choice(list(FRAMES)) if self.draw.random() < 0.3 else "plain"
        # run by itself, a checkpoint draws its random numbers anew in the backward
        random_forms = self.form.pattern.memo.get("random", ())
        return "plain" if frame == "checkpoint" and self.form.kinds in random_forms else frame

    def framed(self, frame: str, outs: list[str]) -> str:
        """The source: the lines in their frame, sometimes as a module's forward."""
        arguments = ", ".join(self.form.names)
        body = FRAMES[frame](self.lines, ", ".join(outs), arguments)
        head = [f"m{i} = {m}" for i, m in enumerate(self.modules)]
        code = [*head, f"def fn({arguments}):", *("    " + line for line in body)]
        if self.draw.random() < 0.1:
            code = [*head, "class Model(nn.Module):", f"    def forward(self, {arguments}):",
                    *("        " + line for line in body), "fn = Model()"]  # fmt: skip
            self.words.append("module")
        return HEADER + "\n".join(code) + "\n"

    # What makes a near miss.

    def choose_change(self, graph: fx.Graph) -> bool:
        """Draw one of all changes that the graph allows; False where there is none."""
        outs = {o for n in graph.nodes if n.op == "output" for o in n.all_input_nodes}
        options = [change for n in graph.nodes for change in self.changes_of(n, n in outs)]
        if not options:
            return False
        self.change = self.draw.choice(options)
        what = {"extra": "returned too: ", "between": "changed between: "}.get(self.change.how, "")
        self.words.append(f"{what}{Call(self, self.change.node).name}: {self.change.text}")
        return True

    def changes_of(self, n: fx.Node, is_result: bool) -> list[Change]:
        value = n.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return []
        options = []
        if n.op == "call_function":
            call = Call(self, n)
            texts = applicable(self.changes.get(call.name, ()), call)
            options += [Change(n, "text", text) for text in texts]
            interior = not is_result and value.is_floating_point()
            texts = applicable(TAMPERED, call)
            options += [Change(n, "after", text) for text in texts if interior]
            options += [Change(n, "extra", text) for text in RETURNED if interior]
        if len(n.users) > 1 and value.dim() and value.is_floating_point():
            options += [Change(n, "between", text) for text in BETWEEN]
        return options

    def is_changed(self, n: fx.Node, how: str) -> bool:
        return self.change is not None and (self.change.node, self.change.how) == (n, how)

    # Values.

    def assign(self, text: str) -> str:
        name = next(self.names)
        self.lines.append(f"{name} = {text}")
        return name

    def variable(self, n: fx.Node) -> str:
        """The name of a variable that has the value."""
        self.expression(n)
        return self.as_variable(n)

    def as_variable(self, n: fx.Node) -> str:
        if not self.text[n].isidentifier():
            self.text[n] = self.assign(self.text[n])
        return self.text[n]

    def expression(self, n: fx.Node) -> str:
        """An expression for the value, which is written if it was not read before."""
        if n not in self.text:
            self.write_value(n)
        elif self.is_changed(n, "between") and n in self.complete and not self.changed:
            self.unread -= 1
            if self.unread < 0:
                self.changed = True
                self.lines.append(self.change.text.format(x=self.as_variable(n)))
        return self.text[n]

    def write_value(self, n: fx.Node) -> None:
        call = Call(self, n)
        text = self.choose_text(n, call)
        self.text[n] = self.fill(text, call)
        if text is not DEFAULT and VIEW.search(text):
            self.views.add(n)
        if text is not DEFAULT and "{sibling" in text:  # one product gave the sibling's value too
            other = call.sibling.node
            self.text[other] = PACKED_PART.sub(lambda found: f"[{1 - int(found[1])}]", self.text[n])
            self.views.add(other)
        if self.is_changed(n, "after"):
            self.changed = True
            self.text[n] = self.fill(self.change.text, call)
        if self.is_changed(n, "extra"):
            self.extra = self.fill(self.change.text, call)
        self.disguise(n, call)
        several = bool(n.users) and not isinstance(n.meta.get("val"), torch.Tensor)
        if several or len(n.users) > 1 or self.draw.random() < 0.6:
            self.as_variable(n)
        self.complete.add(n)

    def choose_text(self, n: fx.Node, call: Call):
        """The change of the node, or one of its wordings, or DEFAULT where it has none."""
        if self.is_changed(n, "text"):
            self.changed = True
            return self.change.text
        text = self.draw.choice(applicable(ALL_WORDINGS.get(call.name, ()), call) or [DEFAULT])
        if text is DEFAULT:
            return text
        if ":n}" in text and self.is_view(call.self or call.input):
            text = next(t for t in applicable(ALL_WORDINGS[call.name], call) if ":n}" not in t)
        self.words.append(f"{call.name}: {text}")
        return text

    def is_view(self, call: Call) -> bool:
        """Is the value written as a view of another? In-place code is written only on memory that
        an operator has just made.
        """
        if call.node not in self.text:
            self.expression(call.node)
        return call.node in self.views

    def disguise(self, n: fx.Node, call: Call) -> None:
        """Sometimes add an operator that changes nothing."""
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() and self.draw.random() < DISGUISED:
            text = self.draw.choice(applicable(DISGUISES, call))
            self.words.append(f"same: {text}")
            self.views.add(n)
            self.text[n] = self.assign(self.fill(text, call))

    # Texts.

    def fill(self, text, call: Call) -> str:
        """Replace the fields of a text. Its statements become lines; its expression is returned,
        in parentheses.
        """
        if text is DEFAULT:
            return call.default()
        *statements, result = text.split("; ")
        fields = Fields(self, call, text)
        for statement in statements:
            self.lines.append(self.hoist_modules(statement.format_map(fields)))
        result = self.hoist_modules(result.format_map(fields))
        return result if result.isidentifier() else f"({result})"

    def hoist_modules(self, line: str) -> str:
        """Modules are made outside the function, as in a model."""

        def name(found) -> str:
            self.modules.append(found.group(0))
            return f"m{len(self.modules) - 1}"

        return MODULE.sub(name, line)
