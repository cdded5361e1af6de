"""Rows replaced where a mask holds: what is found, that it is the same, and what is left alone."""

import pytest
import torch
from fusion_backend.patterns.masked_scatter import scattered_rows
from torch import nn

import fusion_backend
from fusion_backend.testing import assert_fuses

NAME = "masked_scatter"
B, S, N, IMAGE = 3, 8, 64, 5


def words(*images: int) -> torch.Tensor:
    """Ids of words, the image token at so many places of each text."""
    ids = torch.arange(B * S).view(B, S) % IMAGE
    for text, count in zip(ids, images, strict=True):
        text[1 : 1 + count] = IMAGE
    return ids


class Model(nn.Module):
    """As transformers has it: the features of patches in the place of image tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.projector = nn.Embedding(IMAGE + 1, N), nn.Linear(4, N)

    def forward(self, ids, patches):
        text, features = self.embed(ids), self.projector(patches)
        mask = (ids == IMAGE).unsqueeze(-1).expand_as(text).to(text.device)
        return text.masked_scatter(mask, features.to(text.dtype)).sin()


def gradients(fn, *args):
    torch.manual_seed(1)
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    y = fn(*leaves)
    wanted = [a for a in leaves if a.requires_grad]
    return y, *torch.autograd.grad(y, wanted, torch.randn_like(y))


def compiled(fn, **how):
    how = dict(dynamic=False) | how
    return torch.compile(fn, backend="fusion", options={"fusion.gate": "always"}, **how)


def scatter(x, mask, source):
    return x.masked_scatter(mask.unsqueeze(-1).expand_as(x), source)


CASES = {
    "as many rows": (words(2, 3, 0), 5),
    "rows to spare": (words(1, 3, 2), 11),
    "none selected": (words(0, 0, 0), 4),
    "whole texts": (words(7, 7, 7), 21),
    "more rows than x has": (words(7, 0, 7), 30),
}


@pytest.mark.parametrize("ids, rows", CASES.values(), ids=CASES)
def test_value_and_gradients_are_those_of_eager(ids, rows):
    x, source = torch.randn(B, S, N), torch.randn(rows, N)
    want = gradients(scatter, x, ids == IMAGE, source)
    fusion_backend.reset()
    got = gradients(compiled(scatter), x, ids == IMAGE, source)
    (site,) = fusion_backend.report().fused
    assert site.pattern == NAME
    for mine, its in zip(got, want, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_one_gradient_alone(wanted):
    x, source = (
        torch.randn(n, N, requires_grad=w) for n, w in zip((B * S, 9), wanted, strict=True)
    )
    mask = (words(2, 3, 4) == IMAGE).view(-1)
    leaf = x if wanted[0] else source
    dy = torch.randn(B * S, N)
    (want,) = torch.autograd.grad(scatter(x, mask, source), leaf, dy)
    (got,) = torch.autograd.grad(compiled(scatter)(x, mask, source), leaf, dy)
    assert torch.equal(got, want)


def test_a_model_trains():
    model, ids, patches = Model(), words(2, 3, 1), torch.randn(6, 4)
    want = torch.autograd.grad(model(ids, patches).square().sum(), list(model.parameters()))
    run = compiled(model)
    fusion_backend.reset()
    got = torch.autograd.grad(run(ids, patches).square().sum(), list(model.parameters()))
    assert [s.pattern for s in fusion_backend.report().fused if s.pattern == NAME]
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its)


def test_too_few_rows_are_an_error_as_in_eager():
    x, mask, source = torch.randn(B, S, N), words(2, 3, 4) == IMAGE, torch.randn(8, N)
    with pytest.raises(RuntimeError):
        scatter(x, mask, source)
    with pytest.raises(RuntimeError, match="too few rows"):
        compiled(scatter)(x, mask, source)


def test_batches_and_images_of_any_size():
    run = compiled(scatter, dynamic=True)
    fusion_backend.reset()
    for images, rows in ((2, 3, 0), 5), ((1, 0, 2), 7), ((7, 7, 1), 15):
        x, mask, source = torch.randn(B, S, N), words(*images) == IMAGE, torch.randn(rows, N)
        assert torch.equal(run(x, mask, source), scatter(x, mask, source))
    (site,) = fusion_backend.report().fused
    assert site.pattern == NAME


# What is found

X, MASK, SOURCE = torch.randn(B, S, N), words(2, 3, 1) == IMAGE, torch.randn(6, N)

FOUND = {
    "expanded": (scatter, X, MASK, SOURCE),
    "broadcast": (lambda x, m, s: x.masked_scatter(m[..., None], s), X, MASK, SOURCE),
    "a function": (
        lambda x, m, s: torch.masked_scatter(x, m.unsqueeze(-1).expand(-1, -1, N), s),
        X, MASK, SOURCE,
    ),
    "in place": (
        lambda x, m, s: (x + 1).masked_scatter_(m.unsqueeze(-1).expand_as(x), s), X, MASK, SOURCE,
    ),
    "images of several rows": (scatter, X, MASK, torch.randn(2, 3, N)),
    "one text": (scatter, X[0], MASK[0], SOURCE),
    "bf16": (scatter, X.bfloat16(), MASK, SOURCE.bfloat16()),
    "columns first": (scatter, X, MASK, torch.randn(N, 6).t()),
}  # fmt: skip


@pytest.mark.parametrize("fn, x, mask, source", FOUND.values(), ids=FOUND)
def test_spellings(fn, x, mask, source):
    assert_fuses(fn, x, mask, source, pattern=NAME)


LEFT_ALONE = {
    "elements": (lambda x, m, s: x.masked_scatter(m.unsqueeze(-1) & (x > 0), s), X, MASK, SOURCE),
    "columns": (lambda x, m, s: x.masked_scatter(m.unsqueeze(-2), s), X[0, :, :S], MASK[0], SOURCE),
    "x is expanded": (lambda x, m, s: x.masked_scatter(m.unsqueeze(-1), s), X[:1], MASK, SOURCE),
    "a number": (lambda x, m, s: x.masked_fill(m.unsqueeze(-1), 0.5), X, MASK, SOURCE),
}


@pytest.mark.parametrize("fn, x, mask, source", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_near_misses(fn, x, mask, source):
    assert_fuses(fn, x, mask, source, pattern=NAME, count=0)


REFUSED = {
    "one element for each row": (X, MASK[:1], SOURCE),
    "not bool": (X, MASK.float(), SOURCE),
    "as long as those of x": (X, MASK, torch.randn(12, N // 2)),
    "the rows of source": (X, MASK, torch.randn(6 * N)),
    "may be empty": (X, MASK & False, torch.randn(0, N)),
    "and source is torch.bfloat16": (X, MASK, SOURCE.bfloat16()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused(why):
    assert why in str(scattered_rows.guard_fn(*REFUSED[why]))
    assert scattered_rows.guard_fn(X, MASK, SOURCE) is None


def test_short_rows_are_left_alone():
    assert "64" in str(scattered_rows.worthwhile_fn(X[..., :8], MASK, SOURCE[..., :8], False))
    assert scattered_rows.worthwhile_fn(X, MASK, SOURCE, False) is None
