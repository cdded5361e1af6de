"""A region as a graph of its own computes what the graph computes, with its sites replaced, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.subjects.tiny_models import MODELS
from fusion_backend.decide import gate as gating
from fusion_backend.measure.inputs import made_up
from fusion_backend.options import Options
from tests.measured_cases import NORMS, Block, cuts_of, names_of_sites, rms


def test_inputs_that_are_views_of_one_value_have_one_value():
    linear = nn.Linear(16, 16)

    def fn(x, w):
        y = linear(x)
        return rms(y.float().to(torch.float32) + x.view(-1, 16), w) * y.T.T.sum()

    x = torch.randn(4, 16)
    for cut in cuts_of(fn, x, torch.ones(16)):
        given = made_up(cut, torch.device("cpu"))
        plain, ours = cut.graph([])(*given), cut.graph(cut.region.sites)(*given)
        torch.testing.assert_close(plain, ours)

    def residual(x, w):
        x = x.float()
        return rms(x + linear(rms(x, w)), w)

    for cut in cuts_of(residual, x, torch.ones(16), options=NORMS):
        given = made_up(cut, torch.device("cpu"))
        torch.testing.assert_close(cut.graph([])(*given), cut.graph(cut.region.sites)(*given))


@pytest.mark.parametrize("early", [False, True])
def test_a_result_that_is_permuted_and_permuted_back(early):
    """As in Mamba's mixer; and one that is read before it comes back."""

    def fn(x, w):
        y = rms(x, w).type_as(w)
        before = y.sin() if early else 0.0
        return y.mT.mT * 2.0 + before

    (cut,) = cuts_of(fn, torch.randn(3, 4, 16), torch.ones(16), options=NORMS)
    given = made_up(cut, torch.device("cpu"))
    plain, ours = (cut.graph(sites) for sites in ([], cut.region.sites))
    assert "fusion" in ours.code
    torch.testing.assert_close(plain(*given), ours(*given))


def test_inputs_that_are_equal_or_follow_from_each_other_are_made_up_so(monkeypatch):
    linear = nn.Linear(16, 16)

    def equal(x):
        q, k, v = (linear(x).view(2, 2, 8, 8) for _ in range(3))
        return F.scaled_dot_product_attention(q, k, v, x.view(2, 2, 8, 8))

    pytest.importorskip("transformers")
    tiny = MODELS["t5"]  # whose bias the replacement reads, and the code a mask made of it
    model, given = tiny.model().eval(), tiny.example(2, 16)
    options = Options(gate="always", only=("attention",))
    monkeypatch.setattr(gating, "on_gpu", lambda t: True)
    with torch.no_grad():
        cuts = cuts_of(equal, torch.randn(2, 16, 8).view(2, 8, 16), options=options)
        cuts += cuts_of(lambda: model(**given), options=options, dynamic=False)
        assert len(cuts) >= 3
        for cut in cuts:
            given = made_up(cut, torch.device("cpu"))
            torch.testing.assert_close(
                cut.graph([])(*given), cut.graph(cut.region.sites)(*given), rtol=1e-3, atol=1e-3
            )


def test_a_cut_computes_what_the_graph_computes():
    block, x = Block(), torch.randn(2, 8, 16)
    for cut in cuts_of(block, x):
        inputs = [
            torch.randn(n.meta["val"].shape)
            for n in cut.inputs
            if n.meta["val"].dtype == torch.float32
        ]
        if len(inputs) != len(cut.inputs):
            continue
        plain, ours = cut.graph([])(*inputs), cut.graph(cut.region.sites)(*inputs)
        torch.testing.assert_close(plain, ours)
        assert any("fusion" in str(n.target) for n in cut.graph(cut.region.sites).graph.nodes) or (
            "attention" in names_of_sites(cut.region)
        )


def test_what_a_product_copies_into_rows_is_copied_in_the_region():
    linear, norm = nn.Linear(8, 4), nn.GroupNorm(2, 8)

    def tokens(x, also_read):
        y = norm(x).flatten(2).transpose(1, 2)
        return (linear(y), y) if also_read else linear(y)

    for also_read in (False, True):
        (cut,) = cuts_of(lambda x, r=also_read: tokens(x, r), torch.randn(2, 8, 5, 5))
        assert len(cut.rows) == 1 and len(cut.outputs) == also_read
        x, *rest = (torch.randn(n.meta["val"].shape) for n in cut.inputs)
        *_, rows = cut.graph(cut.region.sites)(x, *rest)
        assert rows.shape == (50, 8) and rows.is_contiguous()
    linear.weight.requires_grad_(False)  # then torch multiplies one matrix after the other
    (cut,) = cuts_of(lambda x: tokens(x, False), torch.randn(2, 8, 5, 5))
    assert not cut.rows and len(cut.outputs) == 1
    linear.weight.requires_grad_()
    (cut,) = cuts_of(lambda x: linear(F.layer_norm(x, (8,))), torch.randn(2, 5, 8))
    assert not cut.rows and len(cut.outputs) == 1


def test_what_a_product_of_batches_copies_is_copied_in_the_region():
    """Heads are turned before their product, and Inductor computes what makes them in that copy."""
    project = nn.Linear(16, 48, bias=False)

    def heads(x):
        q, k, v = F.layer_norm(project(x), (48,)).view(2, 8, 3, 4, 4).unbind(2)
        return q, k, v

    def by_matmul(x):
        q, k, v = (t.transpose(1, 2) for t in heads(x))
        return (q @ k.transpose(-2, -1)) @ v

    def by_einsum(x):
        q, k, v = heads(x)
        return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k), v)

    x = torch.randn(2, 8, 16)
    for fn in (by_matmul, by_einsum):
        cut, *others = cuts_of(fn, x, only="layer_norm")
        assert not others and not cut.outputs and len(cut.operands) == 3
        for chosen in ([], cut.region.sites):
            found = cut.graph(chosen)(project(x).detach())
            q, k, v = found if fn is by_einsum else (found[i] for i in (0, 2, 1))
            assert q.shape == (8, 8, 4) and k.shape == (8, 4, 8) and v.shape == (8, 8, 4)
            got = torch.bmm(torch.bmm(q, k), v).view(2, 4, 8, 4)
            got = got.transpose(1, 2) if fn is by_einsum else got
            torch.testing.assert_close(got, fn(x), rtol=1e-4, atol=1e-5)
        assert cut.text().count("\noperand ") == 3

    def expanded(x):  # one of them is read as it is
        q, k, v = (t.transpose(1, 2) for t in heads(x))
        return q @ k[:1].transpose(-2, -1)

    def elements(x):  # nothing is summed: no product of matrices
        q, k, v = heads(x)
        return torch.einsum("bqhd,bqhd->bhqd", q, k), v

    for fn, outputs in ((expanded, 2), (elements, 3)):
        cut, *_ = cuts_of(fn, x, only="layer_norm")
        assert not cut.operands and len(cut.outputs) == outputs

    def twice(x):  # one value in two forms, in the order in which they are read
        q, c, _ = heads(x)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, c)
        return torch.einsum("bhqk,bkhd->bqhd", scores, c)

    cut, *_ = cuts_of(twice, x, only="layer_norm")
    assert [o.order for o in cut.operands] == [(0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)]
