"""The inputs that are made up for a region to be measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend.decide.gate
from benchmarks.compiler.regions import disagreements
from benchmarks.subjects.model_zoo import ENTRIES, build
from fusion_backend.measure.inputs import limits, made_up, masking
from fusion_backend.options import Options
from tests.measured_cases import cuts_of
from tests.selection import product


def inputs_of(fn, *inputs, **more):
    (cut,) = cuts_of(fn, *inputs, **more)
    return cut, made_up(cut, torch.device("cpu"))


def test_made_up_inputs_have_the_sizes_strides_and_dtypes_of_the_graph():
    def fn(x, w):
        return F.layer_norm(x.sin(), (6,), w)

    x = torch.randn(6, 4, 5).permute(1, 2, 0)[:, 1:].requires_grad_()
    w = torch.randn(1).expand(6)
    _, found = inputs_of(fn, x, w, only="layer_norm")
    for have, want in zip(found, (x, w), strict=True):
        assert (have.shape, have.stride(), have.dtype) == (want.shape, want.stride(), want.dtype)
        assert have.requires_grad == want.requires_grad and have.is_leaf


def test_variances_are_positive():
    norm = nn.BatchNorm1d(16).eval()

    def by_hand(x, mean, var):
        return torch.relu((x - mean) / torch.sqrt(var[None].to(x.dtype) + 1e-5))

    def by_power(x, mean, var):
        return torch.relu((x - mean) * (var + 1e-5) ** -0.5)

    x, mean, var = torch.randn(64, 16), torch.randn(16), torch.rand(16)
    cases = (lambda x: norm(x), [x]), (by_hand, [x, mean, var]), (by_power, [x, mean, var])
    for fn, inputs in cases:
        cut, found = inputs_of(fn, *inputs, only="batch_norm")
        signs = {n.name: bool((t > 0).all()) for n, t in zip(cut.inputs, found, strict=True)}
        assert sorted(signs.values()) == [False] * (len(signs) - 1) + [True], signs


def test_indices_are_within_what_they_index():
    table = nn.Embedding(7, 16)

    def fn(i, y):
        return F.cross_entropy(F.layer_norm(table(i[:, 1:]), (16,)).sum(1), y)

    i, y = torch.randint(0, 7, (64, 5)), torch.randint(0, 16, (64,))
    for only, bound in (("layer_norm", 7), ("cross_entropy", 16)):
        cuts = cuts_of(fn, i, y, only=only)
        found = [
            (n, t)
            for c in cuts
            for n, t in zip(c.inputs, made_up(c, torch.device("cpu")), strict=True)
            if t.dtype == torch.int64 and limits(n, {*c.region.nodes}) == [bound]
        ]
        assert found and all(0 <= t.min() and t.max() < bound for _, t in found)


def test_each_index_has_the_range_of_its_dimension():
    """As transformers reads padding, at the number of a row and the position of a key."""
    linear = nn.Linear(16, 16)

    def fn(x, keep):
        row, key = torch.arange(2), torch.arange(40)
        q = linear(x).view(2, 40, 2, 8).transpose(1, 2)
        kept = keep[row[:, None, None, None], key[None, None, None, :]]
        return F.scaled_dot_product_attention(q, q, q, kept.expand(2, 1, 40, 40))

    keep = torch.ones(2, 40, dtype=torch.bool)
    _, found = inputs_of(fn, torch.randn(2, 40, 16), keep, only="attention")
    given = {tuple(t.shape): t for t in found}
    assert given[2, 1, 1, 1].flatten().tolist() == [0, 1]
    assert given[1, 1, 1, 40].flatten().tolist() == [*range(40)]


def test_the_dimension_of_an_index():
    def fn(x, i, j):
        rows = x.gather(0, i).sum(0) + x.index_select(1, j).sum(1)[:1]
        return F.layer_norm(rows, (16,))

    i, j = torch.zeros(3, 16, dtype=torch.int64), torch.zeros(70, dtype=torch.int64)
    cut, _ = inputs_of(fn, torch.randn(50, 16), i, j, only="layer_norm")
    bounds = {tuple(n.meta["val"].shape): limits(n, {*cut.region.nodes}) for n in cut.inputs}
    assert bounds == {(50, 16): [], (3, 16): [50], (70,): [16]}


def test_what_is_indexed_is_no_index():
    def fn(x, y):
        return F.cross_entropy(x.flatten(0, 1), y)

    x, y = torch.randn(2, 32, 16), torch.randint(0, 16, (64,))
    cut, (logits, labels) = inputs_of(fn, x, y, only="cross_entropy")
    assert not limits(cut.inputs[0], {*cut.region.nodes})
    assert not torch.equal(logits, logits.round()) and labels.max() < 16


def test_an_index_that_follows_from_another_or_equals_it_stays_in_its_own_range():
    large, small = nn.Embedding(100, 16), nn.Embedding(3, 16)

    def fn(i):
        both = large(i) + small(i * 1 % 3) + small(i.clone() * 7)  # as ids of words and of kinds
        return F.layer_norm(both + large(i.clone() * 7), (16,))

    (cut,) = cuts_of(fn, torch.zeros(64, dtype=torch.int64), only="layer_norm")
    found = made_up(cut, torch.device("cpu"))
    assert sum(t.dtype == torch.int64 for t in found) > 2
    cut.graph([])(*found)  # where a GPU would stop, a CPU raises IndexError

    def views(i):
        return F.layer_norm(large(i[0]) + small(i.diagonal()), (16,))

    (cut,) = cuts_of(views, torch.zeros(64, 64, dtype=torch.int64), only="layer_norm")
    cut.graph([])(*made_up(cut, torch.device("cpu")))


def test_integers_that_are_no_index_are_ones_and_zeros():
    def fn(x, i):
        return F.layer_norm(x * i, (16,))

    _, found = inputs_of(fn, torch.randn(4, 16), torch.randint(0, 9, (4, 16)), only="layer_norm")
    ones = [8, 11, 13, 15]  # of the four rows: from a half to all but one, and then zeros
    assert found[1].dtype == torch.int64
    assert torch.equal(found[1], (torch.arange(16) < torch.tensor(ones)[:, None]).long())


def test_an_index_that_is_computed_outside_is_within_its_range_all_the_same():
    table = nn.Embedding(1, 16)  # 1 is out of range

    def fn(i):
        return F.layer_norm(table(i.flatten().clone()), (16,))

    (cut,) = cuts_of(fn, torch.zeros(4, 3, dtype=torch.int64), only="layer_norm")
    found = made_up(cut, torch.device("cpu"))
    assert all(not t.any() for t in found if t.dtype == torch.int64)


def test_a_mask_is_what_the_graph_computes_and_not_noise():
    linear = nn.Linear(16, 16)

    def fn(x):
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        q = linear(x).view(2, 8, 2, 8).transpose(1, 2)
        bias = torch.zeros(8, 8).masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(q, q, q, bias)

    _, found = inputs_of(fn, torch.randn(2, 8, 16), only="attention")
    mask, zeros = [t for t in found if t.shape == (8, 8)]
    assert torch.equal(mask, torch.ones(8, 8, dtype=torch.bool).tril()) and not zeros.any()


@pytest.mark.parametrize("copies", [1, 100])
def test_a_mask_of_positions_that_are_repeated(copies):
    """As Whisper's positions, in chunks as Llama 4 has them, and in a graph with many operators
    between positions and mask.
    """
    linear = nn.Linear(16, 16)

    def fn(x):
        place = torch.arange(8).repeat(2, 1)
        for _ in range(copies):
            place = place + 1
        chunk = place.floor_divide(3)
        mask = place[:, None, :, None] >= place[:, None, None, :]
        mask = mask & (chunk[:, None, :, None] == chunk[:, None, None, :])
        q = linear(x).view(2, 8, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, mask)

    _, found = inputs_of(fn, torch.randn(2, 8, 16), only="attention")
    place = torch.arange(copies, copies + 8)
    want = (place[:, None] >= place) & (place[:, None] // 3 == place // 3)
    (mask,) = (t for t in found if t.dtype == torch.bool)
    assert torch.equal(mask.squeeze(), want.expand(2, 8, 8))


def test_a_mask_that_has_the_shape_of_scores_is_computed():
    """As in XLM, where each layer makes it anew, and a later one is equal to that of the first."""
    linear = nn.Linear(16, 16)

    def fn(x, keep):
        for _ in range(2):
            q = linear(x).view(2, 8, 2, 8).transpose(1, 2)
            scores = q @ q.mT
            hidden = (keep == 0).view(2, 1, 1, 8).expand_as(scores)
            y = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ q
            x = y.transpose(1, 2).reshape(2, 8, 16)
        return x

    options = Options(gate="always", only=("softmax",))
    cuts = cuts_of(fn, torch.randn(2, 8, 16), torch.ones(2, 8).long(), options=options)
    masks = [t for c in cuts for t in made_up(c, torch.device("cpu")) if t.dtype == torch.bool]
    want = torch.tensor([[False] * 4 + [True] * 4, [False] * 7 + [True]])[:, None, None]
    assert masks and all(torch.equal(t, want.expand_as(t)) for t in masks)


def test_a_mask_from_an_input_keeps_something_in_every_row():
    linear = nn.Linear(16, 16)

    def fn(x, keep):
        mask = keep[:, None, None, :].to(torch.bool)
        hidden = linear(x).view(2, 8, 2, 8).transpose(1, 2)
        for _ in range(2):
            hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, mask)
            hidden = (
                linear(hidden.transpose(1, 2).reshape(2, 8, 16)).view(2, 8, 2, 8).transpose(1, 2)
            )
        return hidden

    cuts = cuts_of(fn, torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.int64), only="attention")
    masks = [
        t
        for c in cuts
        for t in made_up(c, torch.device("cpu"))
        if t.dtype == torch.bool or t.dtype == torch.int64
    ]
    assert masks and all((m != 0).any(-1).all() and (m == 0).any(-1).all() for m in masks)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (1, 1), (3, 1, 1, 8), (0, 4), (4, 0)])
def test_a_mask_has_ones_and_then_zeros(shape):
    made = masking(torch.empty(shape, dtype=torch.bool), torch.device("cpu"))
    assert made.shape == shape and made.dtype == torch.bool
    if made.numel() > 1 and shape[-1] > 1:
        assert made[..., 0].all() and not made[..., -1].any()
        assert not (made[..., 1:] & ~made[..., :-1]).any()


def test_an_index_that_is_computed_with_ones_stays_within_what_it_indexes():
    table = nn.Embedding(7, 16)

    def fn(i):
        return F.layer_norm(table(i * 50 - 100), (16,))

    _, found = inputs_of(fn, torch.randint(2, 3, (4,)), only="layer_norm")
    (index,) = [t for t in found if t.dtype == torch.int64]
    assert index.min() >= 0 and index.max() < 7


@pytest.mark.parametrize(
    "begins",
    [
        lambda x: x.diff(prepend=x[:, :1] - 1) != 1,
        lambda x: x.int().diff(prepend=x[:, :1].int() - 1) != 1,
        lambda x: x == 0,
    ],
)
def test_eight_documents(begins, monkeypatch):
    """Of ones and then zeros each place would be a document of its own, and the gradients of q and
    k zeros.
    """

    def packed(q, k, v, x):
        number = begins(x).cumsum(-1)
        mask = number[:, None, :, None] == number[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, mask)

    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)
    q, x = torch.randn(2, 2, 40, 16), torch.arange(40).repeat(2, 1)
    cut, values = inputs_of(packed, q, q, q, x, only="attention")
    chosen = [n for n in cut.region.sites[0].match.nodes_read if n.meta["val"].dim() == 2]
    given = dict(zip(cut.inputs, values, strict=True))
    found = [t for a, t in given.items() if a.meta["val"].shape == (2, 40)]
    assert chosen or found
    for t in found:
        assert t[0].unique().numel() == 8 and t.diff(dim=-1).amin() >= 0


def test_other_counts_are_computed(monkeypatch):
    """A cumulative sum of what is no comparison, as of positions in padded rows."""

    def padded(q, k, v, real):
        return F.scaled_dot_product_attention(q, k, v, (real.cumsum(-1) < 11)[:, None, None])

    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)
    q, real = torch.randn(2, 2, 40, 16), torch.ones(2, 40, dtype=torch.int64)
    _, values = inputs_of(padded, q, q, q, real, only="attention")
    (counted,) = (t for t in values if t.dtype == torch.int64)
    assert counted[0].tolist() == [min(i + 1, 20) for i in range(40)]


@pytest.mark.parametrize(
    "places",
    [
        lambda ids, past: torch.arange(ids.shape[1]).expand(ids.shape[0], -1),
        lambda ids, past: torch.ones_like(ids).cumsum(-1) - 1,
        lambda ids, past: (torch.arange(ids.shape[1]) + past - past).expand(ids.shape[0], -1),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_documents_that_follow_from_no_elements_are_computed(places, dynamic):
    """As transformers looks for documents in positions that it has counted itself."""
    table = nn.Embedding(9, 16)

    def causal(ids, past):
        place = places(ids, past)
        number = (place.diff(prepend=place[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        mask = number[:, None, :, None] == number[:, None, None, :]
        mask = mask & (place[:, None, :, None] >= place[:, None, None, :])
        q = table(ids).view(*ids.shape, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, mask)

    ids, past = torch.zeros(2, 40, dtype=torch.int64), torch.tensor(7)
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    cut, values = inputs_of(causal, ids, past, only="attention")
    given = {n: t.squeeze() for n, t in zip(cut.inputs, values, strict=True)}
    found = [t for t in given.values() if t.dtype == torch.int64 and t.shape == (2, 40)]
    numbers = [t for t in found if not t.diff().any()]
    rest = [t for t in found if t.diff().any()]
    assert len(numbers) == len(rest) == 2
    assert all(torch.equal(t, torch.arange(40).expand(2, -1)) for t in rest)


def test_an_index_that_follows_from_a_dynamic_length_is_computed():
    table = nn.Embedding(64, 16)

    def fn(x):
        return F.layer_norm(table(torch.arange(x.shape[1])) + x, (16,))

    x = torch.randn(2, 40, 16)
    torch._dynamo.mark_dynamic(x, 1)
    _, found = inputs_of(fn, x, only="layer_norm")
    (index,) = (t for t in found if t.dtype == torch.int64)
    assert torch.equal(index, torch.arange(40))


@product(
    name=["bert", "gemma2", "gpt_oss", "mistral", "qwen3", "t5", "whisper"],
    mode=["infer", "train"],
    strength=1,
)
def test_sites_agree_with_their_region(name, mode):
    """What is proven of a mask holds for the values that are made up for it."""
    pytest.importorskip("transformers")
    cpu = torch.device("cpu")
    subject = build(name, mode, ENTRIES[name].tiny, "sdpa", cpu, torch.float32)
    subject.model.eval()  # no dropout
    run = subject.model.forward
    with torch.set_grad_enabled(mode == "train"):
        assert not disagreements(lambda *args: run(*args, **subject.kwargs), *subject.args)
