"""What Inductor makes of a region is what it makes of the same operators in the whole graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_backend.measure.contest import contest
from fusion_backend.measure.inputs import made_up
from fusion_backend.measure.judge import cut_of
from tests.measured_cases import cuts_of, regions_of


@pytest.mark.parametrize("trained", [False, True])
def test_a_gather_is_in_the_region_that_reads_it(trained):
    """Inductor gathers where it reads, and adds up the gradient where it computes the elements'."""
    linear, at = nn.Linear(16, 16, bias=False), torch.arange(64).view(4, 16) % 9
    table = nn.Parameter(torch.randn(9), requires_grad=trained)

    def fn(x):
        return F.softmax(linear(x) + table[at], -1)

    _, (region,) = regions_of(fn, torch.randn(4, 16), only="softmax")
    assert [n.target.name().split(".")[0] for n in region.nodes] == [
        "aten::index",
        "aten::add",
        "aten::softmax",
    ]


@pytest.mark.parametrize("how", ["training", "inference", "no gradient"])
def test_the_gradients_of_later_readers_are_added_up_in_the_region(how):
    """In the loss `nearest_neighbour_entropy`, unit rows and their nearest neighbours: a kernel for
    the backward alone makes Inductor write the sum of their gradients.
    """
    w = torch.randn(16, 16, requires_grad=True)

    def fn(x):
        x = F.normalize(x, dim=-1)
        with torch.no_grad():
            at = (x @ x.t()).max(1).indices
        if how == "no gradient":
            with torch.no_grad():
                return F.pairwise_distance(x, x[at]), x @ w
        return F.pairwise_distance(x, x[at]), x @ w

    x = torch.randn(8, 16, requires_grad=how != "inference")
    with torch.set_grad_enabled(how != "inference"):
        top, (region,) = regions_of(fn, x, only="l2_norm")
    names = [n.target.name().split(".")[0].removeprefix("aten::") for n in region.nodes]
    read = {"linalg_vector_norm", "clamp_min", "expand_as", "div", "index", "pairwise_distance"}
    assert ({*names} == read) == ("pairwise_distance" in names) == (how == "training")
    assert not {"mm", "max"} & {*names}
    if how == "training":
        cut = cut_of(top.gate, region)
        with contest(cut) as held:
            assert held.against(cut.region.sites, 0.05)[0].ratio > 0


class Called(TorchDispatchMode):
    """Notes the operators that torch calls inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def along_time(trained: bool):
    """The cut of a product that reads its rows across memory, in inference."""
    linear = nn.Linear(12, 12).requires_grad_(trained)
    with torch.no_grad():
        (cut,) = cuts_of(lambda x: F.gelu(linear(x.transpose(1, 2))), torch.randn(2, 12, 8))
    return cut


@pytest.mark.parametrize("trained", [False, True])
def test_products_in_inference_copy_their_rows_as_in_the_graph(trained):
    """torch multiplies one matrix after the other only if the weight requires no gradient."""
    cut = along_time(trained)
    inputs = made_up(cut, cut.device)
    assert [t.requires_grad for t in inputs] == [t.dim() < 3 and trained for t in inputs]
    with torch.no_grad(), Called() as called:
        cut.graph([])(*inputs)
    assert ("aten::bmm" in called.names) == (not trained)


def test_in_inference_no_gradient_is_computed():
    with contest(along_time(True)) as held:
        assert [v.name for v in held.plain.values] == ["result 0"]
        assert not held.plain.call()[0].requires_grad


def test_a_weight_that_requires_no_gradient_is_in_the_text_where_that_matters():
    assert "frozen" in along_time(False).text() and "frozen" not in along_time(True).text()
    linear = nn.Linear(12, 12).requires_grad_(False)
    with torch.no_grad():
        (cut,) = cuts_of(lambda x: F.gelu(linear(x)), torch.randn(2, 8, 12))
    assert "frozen" not in cut.text()


def test_what_makes_integers_of_a_value_reads_it_in_the_region():
    """Inductor computes argmax beside the loss, and writes no logits; a kernel of the loss needs
    them in memory.
    """
    queue, at = torch.randn(8, 20), torch.zeros(4, dtype=torch.long)

    def fn(x):
        logits = torch.cat([x.sum(-1, keepdim=True), x @ queue], 1) / 0.07
        nearest = (x * 4).to(torch.long)  # reads nothing of the region
        return F.cross_entropy(logits, at), logits.argmax(-1) == at, (logits * 9).long(), nearest

    x = torch.randn(4, 8, requires_grad=True)
    _, (region,) = regions_of(fn, x, only="cross_entropy")
    names = [n.target.name().split(".")[0] for n in region.nodes]
    assert region.problem == "" and "aten::argmax" in names and names.count("aten::to") == 1
    (cut,) = cuts_of(fn, x, only="cross_entropy")
    with contest(cut) as held:
        assert held.compile_s > 0
        assert [v.value.dtype for v in held.plain.values[:-1]].count(torch.int64) == 2


TARGETS = {
    "under no_grad": True,
    "in place": True,
    "elementwise": False,
    "by a product": False,
    "an input": False,
}


@pytest.mark.parametrize("how, beyond", TARGETS.items(), ids=TARGETS)
def test_targets_that_a_region_does_not_reach(how, beyond):
    """Inductor computes them in the kernel of the loss; a trial would read them from memory."""

    def fn(x, t):
        with torch.no_grad():
            if how == "under no_grad":
                t = t * 0.4 + 0.1
            elif how == "in place":
                t = torch.full_like(t, 0.1)
                t[:, 0] = 0.5
            elif how == "by a product":
                t = t @ t
        t = t * 0.5 if how == "elementwise" else t
        return -(F.log_softmax(x, -1) * t).sum(-1)

    x, t = torch.randn(16, 16, requires_grad=True), torch.rand(16, 16)
    _, (region,) = regions_of(fn, x, t, only="soft_cross_entropy")
    assert ("another grad mode" in region.problem) == beyond, region.problem
