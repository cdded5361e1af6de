"""Other words for a pattern: Python source that computes what the reference computes, and source
that nearly does.

The reference is traced into ATen, and each operator is written back in one of the ways that
wordings.py knows, drawn at random; between them stand values in disguises that change nothing,
around them the frames in which users put code (an inner function, a checkpoint, an autocast or
none, a module, a float32 island in bf16 code). recall.py proves each.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import random
import re
from collections.abc import Callable, Iterator

import torch
from torch import fx

from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.view import View
from fusion_backend.compat.torch import FakeTensorMode, pytree, trace
from fusion_backend.match.templates import example_inputs, forms, templates, with_kinds
from fusion_backend.ops.pattern import Pattern
from fusion_backend.testing.spelling.calls import Call, Fields, fitting
from fusion_backend.testing.spelling.changes import BETWEEN, CHANGES, RETURNED, TAMPERED
from fusion_backend.testing.spelling.composed import COMPOSED
from fusion_backend.testing.spelling.disguises import DISGUISES, FRAMES
from fusion_backend.testing.spelling.shapes import SHAPED
from fusion_backend.testing.spelling.wordings import WAYS

HEADER = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"
ALL_WAYS = WAYS | SHAPED | COMPOSED
DISGUISED = 0.1  # how often a value is
MODES = ("fp32", "fp32", "fp32", "bf16", "island")  # an island is float32 code on bf16 tensors
WITHOUT = {"smoothing": 0.0}  # numbers that leave a part of the pattern out
MODULE = re.compile(r"nn\.[A-Z]\w*\([^()]*(?:\([^()]*\))?[^()]*\)(?:\.eval\(\))?(?=\()")
# A text that ends so gives a view of what it made, or may.
VIEW = re.compile(
    r"(\.unsqueeze\(.*\)|\.values|\[\d\]|None\]|\.float\(\)\)?|\.to\(.*\)|\.type_as\(.*\))$"
)
HALF = re.compile(r"\[([01])\](?=\)?$)")  # one of two parts
DEFAULT = object()  # the operator itself, torch.ops.aten


@dataclasses.dataclass
class Spelling:
    """A way of writing a pattern, or nearly. `fn(*tensors)` takes its tensors; its numbers stand in
    the source.
    """

    pattern: Pattern
    kinds: tuple[str, ...]
    source: str
    words: tuple[str, ...]  # the texts, disguises and frames that it is made of
    given: list  # the arguments of the reference
    fn: Callable = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        file = f"<spelling {next(NUMBERS)} of {self.pattern.name}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        space: dict = {}
        exec(compile(self.source, file, "exec"), space)
        self.fn = space["fn"]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [a for a in self.given if isinstance(a, torch.Tensor)]

    def reference(self, *tensors):
        """The reference on these tensors and the numbers of this spelling."""
        rest = iter(tensors)
        return self.pattern.reference(
            *(next(rest) if isinstance(a, torch.Tensor) else a for a in self.given)
        )


NUMBERS = itertools.count()


def spellings(pattern: Pattern, kinds=None, count: int = 40, seed: int = 0) -> list[Spelling]:
    """Up to `count` different functions that compute the pattern, over all its forms or the one in
    `kinds`.

    The same seed gives the same sources. Raises PatternError where the reference cannot be traced.
    """
    return list(itertools.islice(written(pattern, kinds, count, seed, None), count))


def near_misses(pattern: Pattern, kinds=None, count: int = 40, seed: int = 0) -> list[Spelling]:
    """Up to `count` different functions that look like the pattern and compute something else, or
    more than it.

    One operator is replaced by its sibling, an axis, constant or operand changed, an interior value
    also returned or written over. `words[0]` says what was done. Whether the value changes depends
    on the pattern: compare.
    """
    return list(itertools.islice(written(pattern, kinds, count, seed, CHANGES), count))


def written(pattern: Pattern, kinds, count: int, seed: int, changes) -> Iterator[Spelling]:
    have = {t.kinds for t in templates(pattern)}
    wanted = [k for k in forms(pattern) if k in have and kinds in (None, k)]
    bases = {k: Bases(pattern, k) for k in wanted}
    draw, seen = random.Random(f"{pattern.name} {seed}"), set()
    for attempt in range(20 * count):
        base = bases[wanted[attempt % len(wanted)]]
        made = Author(base, draw, changes).write()
        if made is not None and made.source not in seen:
            seen.add(made.source)
            yield made


class Bases:
    """The traced graphs of one form of a pattern: of the reference and of its spellings, plain and
    with a batch.
    """

    def __init__(self, pattern: Pattern, kinds: tuple[str, ...]):
        self.pattern, self.kinds = pattern, kinds
        generator = torch.Generator().manual_seed(0)

        def make(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

        self.given = with_kinds(pattern, kinds, example_inputs(pattern, make))
        self.names = [
            p.name for p, kind in zip(pattern.params, kinds, strict=True) if kind == "tensor"
        ]
        self.batched = self.with_batch()
        self.left_out = {
            i: WITHOUT[p.name] for i, p in enumerate(pattern.params) if p.name in WITHOUT
        }
        lines = {t.line for t in templates(pattern) if t.kinds == kinds}
        self.fns = [fn for fn in pattern.spellings if fn.__code__.co_firstlineno in lines] or [
            pattern.reference
        ]
        self.memo: dict = {}

    def with_batch(self) -> list | None:
        """Arguments with one more dimension, where each result is then that of its slice."""
        first = next(a for a in self.given if isinstance(a, torch.Tensor))
        # losses and dropout: a batch of one
        for batch in (lambda a: torch.stack([a, a.flip(-1)]), lambda a: a[None]):
            given = [
                batch(a) if isinstance(a, torch.Tensor) and a.shape == first.shape else a
                for a in self.given
            ]
            try:
                outs, wanted = map(self.results, (given, self.given))
                slices = [
                    o[0] if o.dim() > w.dim() else o for o, w in zip(outs, wanted, strict=True)
                ]
                if all(
                    torch.allclose(a.double(), b.double())
                    for a, b in zip(slices, wanted, strict=True)
                ):
                    return given
            except Exception:  # the reference does not take such tensors
                continue
        return None

    def results(self, given: list) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return pytree.tree_leaves(self.pattern.reference(*given))

    def arguments(self, batch: bool, short: bool, fewer: bool = False) -> list:
        given = list(self.batched if batch else self.given)
        for i, number in self.left_out.items() if fewer else ():
            given[i] = number
        floats = [
            i for i, a in enumerate(given) if isinstance(a, torch.Tensor) and a.is_floating_point()
        ]
        for i in floats if short else ():
            given[i] = shortened(given[i], i == floats[0])
        return given

    def graph(self, fn: Callable, *how: bool) -> fx.Graph | None:
        """The trace of one spelling on these arguments; None where it does not take this form."""
        key = (fn, *how)
        if key not in self.memo:
            self.memo[key] = traced(fn, self.arguments(*how))
        return self.memo[key]


def shortened(a: torch.Tensor, odd: bool) -> torch.Tensor:
    """In bf16, the last bit given: no sum of an odd and an even value is 0, where gradients differ
    by the spelling.
    """
    a = a.to(torch.bfloat16)
    bits = a.view(torch.int16)
    return ((bits | 1) if odd else (bits & ~1)).view(torch.bfloat16)


def traced(fn: Callable, given: list) -> fx.Graph | None:
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(a.shape, dtype=a.dtype) for a in given if isinstance(a, torch.Tensor)]

    def call(*tensors):
        rest = iter(tensors)
        return fn(*(next(rest) if isinstance(a, torch.Tensor) else a for a in given))

    try:
        with torch.no_grad():
            gm = trace(call, fakes, mode)
    except Exception:  # a spelling for some forms only
        return None
    functionalize_locals(View(gm, gm.graph, {}, {}, {}, set(), {}, {}))
    gm.graph.eliminate_dead_code()
    return (
        gm.graph
        if all(n.op in ("placeholder", "call_function", "output") for n in gm.graph.nodes)
        else None
    )


class Author:
    """Writes one function. Values are written when they are first asked for, so what no text
    mentions is left out.
    """

    def __init__(self, base: Bases, draw: random.Random, changes: dict | None):
        self.base, self.draw, self.changes = base, draw, changes
        self.lines: list[str] = []
        self.text: dict[fx.Node, str] = {}
        self.modules: list[str] = []
        self.words: list[str] = []
        self.views: set[fx.Node] = set()
        self.names = (f"v{i}" for i in itertools.count())
        self.made: set[fx.Node] = set()
        self.target: fx.Node | None = None  # the node that a near miss changes
        self.extra = ""  # an interior value that is returned too
        self.how, self.change, self.changes_made = "", "", False
        # how many readers of a value that is changed between them come first, but for its maker
        self.unread = 0

    def write(self) -> Spelling | None:
        base, draw = self.base, self.draw
        batch = base.batched is not None and draw.random() < 0.15
        mode = draw.choice(MODES)
        fewer = bool(base.left_out) and draw.random() < 0.5
        graph = base.graph(draw.choice(base.fns), batch, mode == "bf16", fewer)
        if graph is None:
            return None
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        island = mode == "island"
        for name, n in zip(base.names, placeholders, strict=True):
            self.text[n] = name
            if island and n.meta["val"].is_floating_point():
                self.text[n] = self.assign(f"{name}.float()")
        if self.changes is not None and not self.choose_change(graph):
            return None
        if self.target in placeholders:  # to be written to: a copy
            self.text[self.target] = self.assign(f"{self.text[self.target]}.clone()")
            self.made, self.unread = {self.target}, 1
        (output,) = [n for n in graph.nodes if n.op == "output"]
        outs = [self.named(o) for o in pytree.tree_leaves(output.args[0])]
        floats = [o.meta["val"].dtype == torch.float32 for o in pytree.tree_leaves(output.args[0])]
        outs = [
            o + ".to(torch.bfloat16)" * (island and f) for o, f in zip(outs, floats, strict=True)
        ]
        if self.target is not None and not (self.changes_made or self.extra):
            return None
        outs += [self.extra] if self.extra else []
        frame = draw.choice(list(FRAMES)) if draw.random() < 0.3 else "plain"
        random_forms = base.pattern.memo.get("random", ())
        # run by itself, it draws anew in the backward
        if frame == "checkpoint" and base.kinds in random_forms:
            frame = "plain"
        arguments = ", ".join(base.names)
        body = FRAMES[frame](self.lines, ", ".join(outs), arguments)
        head = [f"m{i} = {m}" for i, m in enumerate(self.modules)]
        code = [*head, f"def fn({arguments}):", *("    " + line for line in body)]
        if draw.random() < 0.1:
            code = [*head, "class Model(nn.Module):", f"    def forward(self, {arguments}):",
                    *("        " + line for line in body), "fn = Model()"]  # fmt: skip
            self.words.append("module")
        given = base.arguments(batch, mode != "fp32", fewer)
        self.words += [frame] * (frame != "plain") + [mode] * (mode != "fp32") + ["batch"] * batch
        return Spelling(
            base.pattern, base.kinds, HEADER + "\n".join(code) + "\n", tuple(self.words), given
        )

    def choose_change(self, graph: fx.Graph) -> bool:
        """Pick what makes this a near miss: another text for one node, or something done to its
        value.
        """
        outs = {o for n in graph.nodes if n.op == "output" for o in n.all_input_nodes}
        options = []
        for n in graph.nodes:
            if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor):
                call = Call(self, n)
                options += [(n, "text", w) for w in fitting(self.changes.get(call.name, ()), call)]
                interior = n not in outs and n.meta["val"].is_floating_point()
                options += [(n, "after", w) for w in fitting(TAMPERED, call) if interior]
                options += [(n, "extra", w) for w in RETURNED if interior]
            value = n.meta.get("val")
            if (
                len(n.users) > 1
                and isinstance(value, torch.Tensor)
                and value.dim()
                and value.is_floating_point()
            ):
                options += [(n, "between", w) for w in BETWEEN]
        if not options:
            return False
        self.target, self.how, self.change = self.draw.choice(options)
        self.changes_made = False
        what = {"extra": "returned too: ", "between": "changed between: "}.get(self.how, "")
        self.words.append(f"{what}{Call(self, self.target).name}: {self.change}")
        return True

    # Texts.

    def assign(self, text: str) -> str:
        name = next(self.names)
        self.lines.append(f"{name} = {text}")
        return name

    def named(self, n: fx.Node) -> str:
        """The value in a variable."""
        self.written(n)
        return self.held(n)

    def held(self, n: fx.Node) -> str:
        if not self.text[n].isidentifier():
            self.text[n] = self.assign(self.text[n])
        return self.text[n]

    def written(self, n: fx.Node) -> str:
        if n not in self.text:
            call = Call(self, n)
            if n is self.target and self.how == "text":
                text, self.changes_made = self.change, True
            else:
                text = self.draw.choice(fitting(ALL_WAYS.get(call.name, ()), call) or [DEFAULT])
                if text is not DEFAULT and ":n}" in text and self.is_view(call.self or call.input):
                    text = next(t for t in fitting(ALL_WAYS[call.name], call) if ":n}" not in t)
                if text is not DEFAULT:
                    self.words.append(f"{call.name}: {text}")
            self.text[n] = self.said(text, call)
            if text is not DEFAULT and VIEW.search(text):
                self.views.add(n)
            # both halves of one product: the other is the other half
            if text is not DEFAULT and "{sibling" in text:
                other = call.sibling.node
                self.text[other] = HALF.sub(lambda found: f"[{1 - int(found[1])}]", self.text[n])
                self.views.add(other)
            if n is self.target and self.how == "after":
                self.changes_made = True
                self.text[n] = self.said(self.change, call)
            if n is self.target and self.how == "extra":
                self.extra = self.said(self.change, call)
            self.disguise(n, call)
            if n.users and not isinstance(n.meta.get("val"), torch.Tensor):
                self.held(n)
            elif len(n.users) > 1 or self.draw.random() < 0.6:
                self.held(n)
            self.made.add(n)
        elif (
            n is self.target and self.how == "between" and n in self.made and not self.changes_made
        ):
            self.unread -= 1
            if self.unread < 0:
                self.changes_made = True
                self.lines.append(self.change.format(x=self.held(n)))
        return self.text[n]

    def is_view(self, call: Call) -> bool:
        """Is it written as a view of something? Who writes in place does so on what an operator has
        just made.
        """
        if call.node not in self.text:
            self.written(call.node)
        return call.node in self.views

    def disguise(self, n: fx.Node, call: Call) -> None:
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() and self.draw.random() < DISGUISED:
            text = self.draw.choice(fitting(DISGUISES, call))
            self.words.append(f"same: {text}")
            self.views.add(n)
            self.text[n] = self.assign(self.said(text, call))

    def said(self, text: str, call: Call) -> str:
        """Fill a text in; its statements become lines, its expression is returned, bracketed."""
        if text is DEFAULT:
            return call.default()
        *statements, result = text.split("; ")
        fields = Fields(self, call, text)
        for statement in statements:
            self.lines.append(self.hoisted(statement.format_map(fields)))
        result = self.hoisted(result.format_map(fields))
        return result if result.isidentifier() else f"({result})"

    def hoisted(self, line: str) -> str:
        """Modules are made outside the function, as in a model."""

        def name(found) -> str:
            self.modules.append(found.group(0))
            return f"m{len(self.modules) - 1}"

        return MODULE.sub(name, line)
