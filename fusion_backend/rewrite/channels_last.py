"""A Dynamo graph in channels-last, where Inductor lays its images out so.

Inductor computes most networks with convolutions in channels-last, also where the model's images
are contiguous. It decides that after AOTAutograd, and the strides of a Dynamo graph do not show it:
a kernel that is chosen by them is given copies. Here the images with which a network begins become
channels-last in the Dynamo graph, as after `model.to(memory_format=torch.channels_last)`, and the
strides of everything behind them follow. The results of the graph have the strides that they had.
Where Inductor would leave the images contiguous, the copy is used only if the convolutions of the
graph were measured to be faster so (`measure/layouts.py`).

Only graphs with results that require gradients are changed, and only those that begin with images
of few channels. In blocks that are given larger images in contiguous memory, and in some graphs in
inference, the rest of Inductor's kernels became slower in trials on an H200.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fusion_backend.capture.aliases import storages_of
from fusion_backend.capture.interpreter import AUTOCAST, LEVELS, traceable
from fusion_backend.capture.predicted_writes import REPLACES_STORAGE
from fusion_backend.capture.sizes import is_dense
from fusion_backend.capture.tracer import preserved_state
from fusion_backend.compat.channels_last import Convolutions, lays_out, may_lay_out
from fusion_backend.compat.memory import DATA
from fusion_backend.compat.torch import (
    LOG_USAGE,
    STATE_FUNCTIONS,
    aten,
    fake_mode_of,
    inductor_config,
    keep_signature,
    keep_source,
    namespace_of,
    pytree,
    times_written,
    without_torch_function,
)
from fusion_backend.rewrite.image_work import Work, is_convolution, value_of, work_of
from fusion_backend.rewrite.writer import module_of

ENTER_AUTOCAST, EXIT_AUTOCAST = AUTOCAST
LAST, FIRST = torch.channels_last, torch.contiguous_format
PIXELS = 4  # channels of images with which networks begin
READS_LAYOUT = REPLACES_STORAGE | {
    "as_strided", "as_strided_", "as_strided_scatter", "empty_strided", "new_empty_strided",
}  # fmt: skip
ARITHMETIC = {"add", "sub", "rsub", "subtract", "mul", "multiply", "div", "divide", "true_divide"}
ARITHMETIC |= {"truediv", "pow", "float_power", "iadd", "isub", "imul", "itruediv", "ipow"}
# Of these torch's fake kernels tell other strides than the real ones have.
PADDED = {"replicate", "reflect", "replication_pad2d", "reflection_pad2d"}
# By torch's fake kernels their results are contiguous, and by Inductor's decompositions they lie in
# memory as their operands do. They are given contiguous operands where the graph's own are.
RESULTS_DIFFER = {"roll", "index_select", "pixel_shuffle"}
RESULTS_DIFFER_ON_CPU = RESULTS_DIFFER | {"group_norm", "native_group_norm"}
MODULES = ("torch", "_operator", "builtins")


class Differs(Exception):
    """The copy would compute something else, or more; the message says what."""


class Layout(NamedTuple):
    """graph: a copy of the graph in channels-last, with example values of its own. hidden: no copy
    was made although Inductor lays out the images so. work: Inductor would leave the images
    contiguous, and this decides whether that is slower.
    """

    graph: fx.GraphModule | None
    hidden: bool
    work: Work | None = None


def layout_of(
    gm: fx.GraphModule, asks: Callable[[torch.device], bool] = lambda device: False
) -> Layout:
    """How Inductor lays out the images of a Dynamo graph, if not as the graph says. asks: is it a
    question whether it should, on this device?
    """
    by_itself = True
    try:
        mode = fake_mode_of(gm)
        if mode is None or not any(map(is_contiguous, gm.graph.nodes)):
            return Layout(None, False)
        copy = Copy(gm)
        with preserved_state(), without_torch_function(), mode:
            calls = copy.convolutions()
            if not may_lay_out(calls, len(gm.graph.nodes)):
                return Layout(None, False)
            by_itself = lays_out(calls, copy.trains)
            if copy.trains and by_itself:
                copy.run()
                return Layout(copy.finished(), False)
            if copy.trains and asks(calls[0][0][0].device):
                copy.restores = True
                copy.run()
                return Layout(copy.finished(), False, work_of(gm, calls, copy.copies))
    except Exception:  # the graph is right as it is
        pass
    return Layout(None, by_itself)


def is_contiguous(n: fx.Node) -> bool:
    """Is the node a convolution of an image that is not channels-last?"""
    x = value_of(n.args[0]) if is_convolution(n) and n.args else None
    return is_dense(x) and x.dim() == 4 and not x.is_contiguous(memory_format=LAST)


def gets_image_gradient(t: object) -> bool:
    """Is it an input whose gradient would lie otherwise in memory if it were channels-last?"""
    images = is_dense(t) and t.dim() == 4 and t.requires_grad
    return images and t.is_contiguous() and not t.is_contiguous(memory_format=LAST)


class Copy:
    """A copy of a graph, whose values are computed while it is made. Where code could tell the
    difference, Differs is raised instead.
    """

    def __init__(self, gm: fx.GraphModule):
        self.gm, self.graph = gm, fx.Graph()
        self.node: dict[fx.Node, fx.Node] = {}  # of the source -> of the copy
        self.value: dict[fx.Node, object] = {}  # of the copy -> what it computes
        results = pytree.tree_leaves(gm.graph.output_node().args)
        self.results = [n for n in results if isinstance(n, fx.Node)]
        memory = Counter(s for n in {*self.results} for s in storages_of(value_of(n)))
        inputs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
        given = {s for n in inputs for s in storages_of(value_of(n))}
        # memory of a result that is also that of another result or of an input
        self.shared = {s for s, times in memory.items() if times > 1 or s in given}
        self.autocasts: list = []  # that have been entered
        self.watched: list[tuple[Tensor, int]] = []  # with how often they had been written to
        self.joined: set[int] = set()  # storages in the copy of values that had one of their own
        self.copies: list[tuple[Tensor, Tensor]] = []  # what is laid out, before and after
        self.restores = False  # does the gradient of an input lie in memory as it did?
        self.behind: set[fx.Node] = set()  # nodes of the copy that depend on a convolution
        self.trains = torch.is_grad_enabled() and any(
            getattr(value_of(n), "requires_grad", False) for n in self.results
        )

    def convolutions(self) -> list:
        """The convolutions of the graph as Inductor will see them, but all in fp32: autocast may
        cast some of what they read.
        """

        def value(n: fx.Node):
            found = value_of(n)
            return found.float() if isinstance(found, Tensor) else found

        with Convolutions() as seen:
            for n in filter(is_convolution, self.gm.graph.nodes):
                n.target(*fx.map_arg(n.args, value), **fx.map_arg(n.kwargs, value))
        return seen.calls

    def run(self) -> None:
        if inductor_config.fallback_random:
            raise Differs("eager code draws random numbers in the order of memory")
        if special := next((n for n in self.gm.graph.nodes if not ordinary(n)), None):
            raise Differs(f"{special} may depend on the layout, or change some state")
        before = torch.is_grad_enabled()
        try:
            self.compute_all()
        finally:
            while self.autocasts:
                self.autocasts.pop().__exit__(None, None, None)
        if any(times_written(t) != times for t, times in self.watched):
            raise Differs("what is a copy instead of a view, or the reverse, is written to")
        if torch.is_grad_enabled() is not before:
            raise Differs("the results would be copied without their gradient")
        self.restore_results()

    def compute_all(self) -> None:
        for n in self.gm.graph.nodes:
            if n.op == "output":
                continue
            self.node[n] = new = self.copied(n)
            if is_convolution(n) or not self.behind.isdisjoint(new.all_input_nodes):
                self.behind.add(new)
            if n.op in ("placeholder", "get_attr"):
                self.value[new] = value_of(n)
                if self.value[new] is None or not traceable(self.value[new]):
                    raise Differs(f"{n} has no example value of a tensor without a subclass")
                if self.restores and gets_image_gradient(value_of(n)):
                    self.node[n] = self.flattened_and_back(new)
            else:
                self.compute(new)
                self.check(n, new)
                if self.mixes_formats(n):
                    raise Differs(f"{n} has operands of two formats")

    def copied(self, n: fx.Node) -> fx.Node:
        """The node, with the input of a convolution in channels-last. Inside a network that is a
        value whose layout some operator has chosen, such as a group norm on a GPU, and that nothing
        else reads: Inductor writes it channels-last at once. `view` becomes `reshape`, because it
        may need a copy, as it does for Inductor.
        """
        new = self.graph.node_copy(n, self.node.__getitem__)
        keep_source(new, n)
        name = getattr(n.target, "__name__", n.target)
        if is_convolution(n):
            x = self.value[new.args[0]]
            shared = len(n.all_input_nodes[0].users) > 1
            inside = new.args[0] in self.behind and not shared
            if x.stride(1) != 1 and x.shape[1] > PIXELS and not inside:
                raise Differs(f"{n} would need a copy in the middle of a network")
            if not x.is_contiguous(memory_format=LAST):
                self.in_format(new, new.args[0], LAST, inside)
        elif new.op == "call_method" and name == "view" and sizes_of(n) is not None:
            new.op, new.target = "call_function", aten.reshape.default
            new.args, new.kwargs = (new.args[0], sizes_of(new)), {}
        elif n.op not in ("placeholder", "get_attr"):
            self.restore_operands(n, new, str(name).partition(".")[0])
        return new

    def restore_operands(self, n: fx.Node, new: fx.Node, name: str) -> None:
        """Give an operator whose results would lie in memory otherwise contiguous operands."""
        for a in n.all_input_nodes:
            was, now = value_of(a), self.value[self.node[a]]
            if not is_dense(was):
                continue
            if name not in (RESULTS_DIFFER_ON_CPU if was.device.type == "cpu" else RESULTS_DIFFER):
                continue
            if not was.is_contiguous():
                raise Differs(f"the strides of {n} are not those that Dynamo tells")
            if was.stride() != now.stride():
                self.in_format(new, self.node[a], FIRST)

    def flattened_and_back(self, n: fx.Node) -> fx.Node:
        """The same value of an input. Its gradient, which a convolution computes channels-last,
        becomes contiguous again on its way through.
        """
        for sizes in ((-1,), tuple(self.value[n].shape)):
            with self.graph.inserting_after(n):
                viewed = self.graph.call_function(aten.reshape.default, (n, sizes))
            viewed.meta = dict(n.meta)
            self.compute(viewed)
            n = viewed
        return n

    def in_format(
        self, reader: fx.Node, n: fx.Node, form: torch.memory_format, free: bool = False
    ) -> None:
        """Have `reader` read a value in this format. free: it costs no copy."""
        with self.graph.inserting_before(reader):
            laid = self.graph.call_function(aten.clone.default, (n,), {"memory_format": form})
        laid.meta = dict(n.meta)
        self.compute(laid)
        if not free:
            self.copies.append((self.value[n], self.value[laid]))
        reader.replace_input_with(n, laid)

    def compute(self, n: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self.value.__getitem__)
        if n.op == "call_method":
            out = getattr(args[0], n.target)(*args[1:], **kwargs)
        else:
            out = n.target(*args, **kwargs)
        name = getattr(n.target, "__name__", "")
        if name == ENTER_AUTOCAST:
            self.autocasts.append(out)
        elif name == EXIT_AUTOCAST:
            self.autocasts.remove(*args)
        self.value[n] = out
        if value_of(n) is not None:
            n.meta["example_value"] = out

    def check(self, n: fx.Node, new: fx.Node) -> None:
        """Has the copy the sizes that the node has, and memory of its own or not as before,
        wherever it matters?
        """
        if value_of(n) is None:
            return
        was, now = (pytree.tree_leaves(v) for v in (value_of(n), self.value[new]))
        if [*map(about, was)] != [*map(about, now)]:
            raise Differs(f"{n} is another")
        before, after = aliased(n, value_of), aliased(new, self.value.get)
        if is_convolution(n) or before == after:
            return
        if any(after) and not any(before):
            self.joined |= storages_of(self.value[new])
        near = pytree.tree_leaves([self.value[m] for m in (new, *new.all_input_nodes)])
        self.watched += [(t, times_written(t)) for t in near if isinstance(t, Tensor)]
        if self.shared & storages_of(value_of(n)):
            raise Differs(f"{n} is a copy, and what it was a view of is returned")

    def mixes_formats(self, n: fx.Node) -> bool:
        """Is a contiguous sum or product computed from an operand of the same shape that is so no
        more? Inductor drops those that do nothing, such as a product with ones, and what reads them
        gets the operand, which lies in memory otherwise.
        """
        own = self.value[self.node[n]]
        name = str(getattr(n.target, "__name__", n.target)).partition(".")[0].strip("_")
        if name not in ARITHMETIC or not is_dense(own) or not own.is_contiguous():
            return False
        read = [(value_of(a), self.value[self.node[a]]) for a in n.all_input_nodes]
        return any(
            is_dense(now)
            and now.shape == own.shape
            and was.is_contiguous()
            and not now.is_contiguous()
            for was, now in read
        )

    def restore_results(self) -> None:
        """Give each result the strides that it had."""
        output = self.graph.node_copy(self.gm.graph.output_node(), self.node.__getitem__)
        for n in dict.fromkeys(self.results):
            was, now = value_of(n), self.value[self.node[n]]
            if not isinstance(was, Tensor):
                continue
            if self.joined & storages_of(now):
                raise Differs(f"{n} is returned, and would be a view")
            if was.stride() == now.stride():
                continue
            contiguous = was.stride() == torch.empty_like(was, memory_format=FIRST).stride()
            if not contiguous or self.shared & storages_of(was):
                raise Differs(f"{n} is returned, and lies in memory otherwise")
            self.in_format(output, self.node[n], FIRST)

    def finished(self) -> fx.GraphModule:
        keep_signature(self.graph, self.gm.graph)
        self.graph.lint()
        return module_of(self.graph, self.gm)


def ordinary(n: fx.Node) -> bool:
    """Is the node a call of torch that is not known to depend on the strides of its arguments, and
    that changes no state but autocast and grad mode?
    """
    if n.op in ("placeholder", "output"):
        return True
    if n.op == "get_attr":
        return isinstance(value_of(n), Tensor)
    if n.op not in ("call_function", "call_method"):
        return False
    name = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
    special = name.partition(".")[0] in READS_LAYOUT or name in LEVELS or n.target is DATA
    if special or "out" in n.kwargs:
        return False
    if PADDED.intersection(v for v in (name, *n.args, *n.kwargs.values()) if isinstance(v, str)):
        return False
    if n.op == "call_method":
        return True
    if value_of(n) is None and n.target is not operator.setitem:
        return name in AUTOCAST or n.target in STATE_FUNCTIONS or n.target is LOG_USAGE
    space = namespace_of(n.target)
    module = getattr(n.target, "__module__", None) or "torch"
    return space in ("aten", "prims") if space else module.partition(".")[0] in MODULES


def sizes_of(n: fx.Node) -> tuple | None:
    """The sizes that x.view is called with; None of view(dtype)."""
    sizes = n.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    numbers = all(isinstance(s, (int, fx.Node)) for s in sizes)
    return tuple(sizes) if sizes and numbers and not n.kwargs else None


def about(t: object) -> tuple | None:
    return (t.shape, t.dtype, t.device) if isinstance(t, Tensor) else None


def aliased(n: fx.Node, value) -> list[bool]:
    """Whether the result of a call shares memory with each node that it reads."""
    own = storages_of(value(n))
    return [bool(own & storages_of(value(a))) for a in n.all_input_nodes]
