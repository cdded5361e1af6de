"""What a bound from bytes, operations and launches promises of a site."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.decide import gate
from fusion_backend.measure.bound import LAUNCH, SCATTERED, bound, promises
from fusion_backend.options import Options
from tests.measured_cases import scopes


def bounds_of(fn, *inputs, only):
    (top,) = scopes(fn, *inputs, options=Options(gate="always", only=(only,)))
    return [bound(d) for d in top.decisions if d.fused]


def attention(q):
    s = q.shape[-2]
    mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, q, q, mask)


def by_hand(q):
    s = q.shape[-2]
    scores = (q @ q.transpose(-1, -2)).masked_fill(
        torch.ones(s, s, device=q.device).triu(1) != 0, -1e9
    )
    return torch.softmax(scores, -1) @ q


def test_a_bound_promises_nothing_for_what_inductor_can_fuse():
    x = torch.empty(16384, 4096, dtype=torch.bfloat16, device="meta")
    (one,) = bounds_of(lambda x: F.layer_norm(x, (4096,)), x, only="layer_norm")
    assert 0.7 < one.gain < 1 and not one.hopeless


def test_a_site_of_one_short_launch_has_nothing_to_gain():
    x = torch.empty(16, 4096, dtype=torch.bfloat16, device="meta")
    (one,) = bounds_of(lambda x: F.layer_norm(x, (4096,)), x, only="layer_norm")
    assert one.hopeless
    (small,) = bounds_of(attention, torch.empty(1, 2, 16, 8, device="meta"), only="attention")
    assert not small.hopeless  # a library call more or less is no trifle


def test_a_bound_promises_much_where_scores_are_written_to_memory_or_half_is_masked():
    q = torch.empty(4, 16, 2048, 64, dtype=torch.bfloat16, device="meta")
    (one,) = bounds_of(attention, q, only="attention")
    (hand,) = bounds_of(by_hand, q, only="attention")
    assert 1.15 < one.gain < 2 and hand.gain > 2.5


def test_the_mask_of_attention_is_read():
    """As in the windows of Swin, where it is larger than q."""

    def windows(q, table, mask):
        repeated = mask[None, :, None].expand(64, -1, -1, -1, -1).reshape(-1, 1, 49, 49)
        return F.scaled_dot_product_attention(q, q, q, table[None] + repeated)

    sizes = (4096, 3, 49, 32), (3, 49, 49), (64, 49, 49)
    inputs = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    (one,) = bounds_of(windows, *inputs, only="attention")
    given = torch.empty(4096, 3, 49, 49, dtype=torch.bfloat16, device="meta")
    for fn, mask in (
        (lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), given),
        # a view is not computed
        (lambda q, m: F.scaled_dot_product_attention(q, q, q, m.expand(-1, 3, -1, -1)),
         given[:, :1]),
    ):  # fmt: skip
        (other,) = bounds_of(fn, inputs[0], mask, only="attention")
        read = one.plain - 2 * 4096 * 49 * 49 * (3 - mask.shape[1])
        assert abs(other.plain / read - 1) < 1e-2


def test_the_operations_of_attention_are_of_both_sizes():
    def fn(q, v):
        mask = torch.ones(8192, 8192, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, q, v, mask)

    def plain(e):
        sizes = (4, 16, 8192, 192), (4, 16, 8192, e)
        inputs = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
        (one,) = bounds_of(fn, *inputs, only="attention")
        return one.plain

    assert abs(plain(128) / plain(192) - 5 / 6) < 0.02


@pytest.mark.parametrize("gather", [lambda i, w: F.embedding(i, w), lambda i, w: w[i]])
@pytest.mark.parametrize(
    "trained, n, heads, much",
    [
        (True, 512, 16, True),
        (False, 512, 16, False),
        (True, 512, 32, False),
        (True, 384, 16, False),
    ],
)
def test_a_gradient_that_is_added_up_in_few_places_takes_long(trained, n, heads, much, gather):
    """n · n · heads numbers go to 32 · heads places: more places, and fewer numbers for each, were
    not timed.
    """

    def fn(weight):
        place = torch.arange(n, device=weight.device)
        index = (place[None, :] - place[:, None]).clamp(-16, 15) + 16
        return gather(index, weight).permute(2, 0, 1)

    weight = torch.empty(32, heads, dtype=torch.bfloat16, device="meta", requires_grad=trained)
    (one,) = bounds_of(fn, weight, only="relative_bias")
    assert (one.plain > 2e-3 * 4.3e12) == much
    assert (one.gain > 100) == much


@pytest.mark.parametrize("k, n, low, high", [(768, 3072, 1.15, 1.3), (4096, 14336, 0.9, 1.05)])
def test_the_time_of_a_product_is_no_gain(k, n, low, high):
    """An activation in its epilogue saves two passes over the result, and no operation."""
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((16384, k), (n, k)))
    (one,) = bounds_of(lambda x, w: F.gelu(F.linear(x, w)), x, w, only="linear_act")
    assert low < one.gain < high and not one.hopeless


def test_a_product_is_never_taken_on_its_bound():
    """Its speed depends on the shape; that of attention is the library's."""
    x, w = (
        torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((16384, 768), (3072, 768))
    )
    q = torch.empty(4, 16, 2048, 64, dtype=torch.bfloat16, device="meta")
    found = {}
    for fn, inputs, only in (
        (lambda x, w: F.gelu(F.linear(x, w)), (x, w), "linear_act"),
        (attention, (q,), "attention"),
    ):
        (top,) = scopes(fn, *inputs, options=Options(gate="always", only=(only,)))
        (d,) = [d for d in top.decisions if d.fused]
        assert bound(d).gain > 1.15
        found[only] = promises(d)
    assert found == {"linear_act": False, "attention": True}


@pytest.mark.parametrize("channels, slower", [(3, True), (16, True), (17, False)])
def test_a_convolution_of_few_channels_is_slower_than_a_product(channels, slower):
    """Patches of 16 by 16: as one product, 0.06 ms or more of operations on an H200."""
    with torch.device("meta"):
        x = torch.empty(128, channels, 224, 224, dtype=torch.bfloat16)
        weight = torch.empty(1024, channels, 16, 16, dtype=torch.bfloat16)
    (one,) = bounds_of(
        lambda x, weight: F.conv2d(x, weight, stride=16), x, weight, only="patch_embedding"
    )
    operations = 2 * 128 * 14 * 14 * 1024 * channels * 16 * 16
    assert (one.plain > 4.3e12 * 10 * operations / 700e12) == slower


@pytest.mark.usefixtures("scratch")
def test_only_a_backward_of_ours_for_the_table_saves_its_additions():
    """The vjp adds up as plain Inductor does, and beside another argument the table may be
    frozen.
    """

    @Pattern
    def gathered_sum(index: Tensor, table: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.embedding(index, table) + x)

    @gathered_sum.kernel
    def _(index, table, x):
        raise AssertionError("nothing runs")

    @gathered_sum.inputs(dict(n=4))
    def _(tensor, n):
        table = tensor(32, 16)
        return torch.zeros(n, n, dtype=torch.int64, device=table.device), table, tensor(n, n, 16)

    index = torch.zeros(512, 512, dtype=torch.int64, device="meta")
    table = torch.empty(32, 16, device="meta", requires_grad=True)
    x = torch.empty(512, 512, 16, device="meta")
    (one,) = bounds_of(
        lambda index, table, x: torch.tanh(F.embedding(index, table) + x),
        *(index, table, x),
        only="gathered_sum",
    )
    assert one.gain < 2


@pytest.mark.parametrize("trained", [False, True])
def test_the_gradient_of_an_enlarged_image_is_added_up(trained, monkeypatch):
    """Four atomic operations a number: in training that takes longer than moving the bytes."""
    monkeypatch.setattr(gate, "on_gpu", lambda t: True)  # so that the backward is ours
    x = torch.empty(4, 8, 32, 32, dtype=torch.bfloat16, device="meta", requires_grad=trained)
    enlarged = lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")  # noqa: E731
    (one,) = bounds_of(enlarged, x, only="interpolate_bilinear")
    moved = 2 * 5 * x.numel() + LAUNCH
    added = SCATTERED * 4 * x.numel() if trained else 0.0
    assert one.plain == pytest.approx(moved + added)
