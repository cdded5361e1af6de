"""Attention goes to the library without its dense mask: graphs, values and gradients
against fp64.
"""

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import attention

import fusion_backend
from benchmarks.measure.distance import distance
from fusion_backend.compat.torch import FakeTensorMode
from fusion_backend.frontends.explain import Collector
from fusion_backend.ops.rule import Replacement
from fusion_backend.testing import collect, graph_text

B, H, S, D = 2, 4, 24, 16
FACTOR, FLOOR = 2.0, 1.2e-7  # as in test_models


def keep(n=S, m=S, device=None):
    return torch.arange(m, device=device)[None, :] <= torch.arange(n, device=device)[:, None]


def by_hand(q, k, v, mask=None, scale=D**-0.5, upcast=False):
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    return torch.softmax(scores, -1, torch.float32 if upcast else None).to(q.dtype) @ v


def repeat_kv(x, times):
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, times, n, d).reshape(b, h * times, n, d)


def additive(fill):
    return torch.where(keep(), 0.0, fill)


CAUSAL_FORMS = {
    "sdpa, boolean": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keep()),
    "sdpa, boolean of four dimensions": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, keep()[None, None].expand(B, 1, S, S)
    ),
    "sdpa, additive": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.full((S, S), float("-inf")).triu(1)
    ),
    "by hand, filled": lambda q, k, v: by_hand(q, k, v, keep()),
    "by hand, filled with -1e9": lambda q, k, v: torch.softmax(
        (q @ k.mT * 0.25).masked_fill(torch.ones(S, S).tril() == 0, -1e9), -1
    ) @ v,
    "by hand, chosen": lambda q, k, v: torch.softmax(
        torch.where(keep(), q @ k.mT * 0.25, float("-inf")), -1
    ) @ v,
    "by hand, added": lambda q, k, v: by_hand(q, k, v, additive(torch.finfo(torch.float32).min)),
    "by hand, chosen from tensors of one number": lambda q, k,
    v: by_hand(  # transformers before 5.18 makes it so
        q, k, v, torch.where(keep(), torch.tensor(0.0, dtype=q.dtype),
        q.new_tensor(torch.finfo(q.dtype).min))
    ),
    "by hand, in fp32": lambda q, k, v: by_hand(q, k, v, keep(), upcast=True),
    "by hand, divided": lambda q, k, v: torch.softmax(
        (q @ k.transpose(2, 3) / 4.0).masked_fill(~keep(), float("-inf")), -1
    ) @ v,
}  # fmt: skip


def tensors(dtype=torch.float32, kv_heads=H, m=S, grad=True):
    torch.manual_seed(0)
    shapes = ((B, H, S, D), (B, kv_heads, m, D), (B, kv_heads, m, D))
    return [torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes]


def run(fn, inputs):
    """The result, and the gradient of a weighted sum."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = fn(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    if out.requires_grad:
        (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def assert_right(fn, inputs, backend=None):
    """Value and gradients at most twice as far from fp64 as eager: of the rewritten graph, or
    through Inductor.
    """
    torch.compiler.reset()
    compiled = torch.compile(fn, backend=backend or Collector({}))
    exact = run(fn, [x.detach().double().requires_grad_(x.requires_grad) for x in inputs])
    for have, eager, want in zip(run(compiled, inputs), run(fn, inputs), exact, strict=True):
        ulp = torch.finfo(have.dtype).eps
        assert have.dtype == eager.dtype and have.stride() == eager.stride()
        assert distance(have, want) <= FACTOR * distance(eager, want) + max(FLOOR, ulp / 4)


def site_of(fn, *inputs, **kwargs):
    """The attention site, with the gate as users have it, and the graph."""
    collector = collect(fn, *inputs, options={"fusion.gate": "auto"}, **kwargs)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention" and not s.covered]
    assert [g.error for g in collector.report.graphs] == [None]
    return site, collector.graphs[0]


@pytest.mark.parametrize("made", ["once", "in each layer"])
def test_layers_share_the_complement_of_a_mask(made):
    """`~mask` of every layer is one value, which none of them needs in the end."""

    def layer(q, mask):
        scores = q @ q.transpose(-2, -1) / 4
        mask = torch.ones(8, 8, dtype=torch.bool).tril() if mask is None else mask
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ q

    def model(q):
        mask = torch.ones(8, 8, dtype=torch.bool).tril() if made == "once" else None
        return layer(layer(layer(q, mask), mask), mask)

    report = collect(model, torch.randn(2, 3, 8, 16), options={"fusion.gate": "auto"}).report
    found = [s for s in report.sites if s.pattern == "attention" and s.counted]
    assert [s.fused for s in found] == [True] * 3, str(report)
    assert all("causal" in s.reason for s in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CAUSAL_FORMS)
def test_a_causal_mask_is_dropped(name, dtype):
    fn, inputs = CAUSAL_FORMS[name], tensors(dtype)
    if dtype == torch.bfloat16 and name in ("by hand, added", "sdpa, additive"):
        return  # the fp32 mask would promote the scores, or be refused
    site, graph = site_of(fn, *inputs)
    assert site.fused and site.forward == "library" and site.backward == "autograd", site
    assert site.reason.startswith("causal, proven from test_attention.py:"), site
    text = graph_text(graph)
    assert "is_causal=True" in text and not any(
        w in text for w in ("arange", "tril", "where", "masked_fill", " le(")
    )
    assert_right(fn, inputs)


@pytest.mark.parametrize("name", ["sdpa, boolean", "by hand, in fp32"])
def test_through_inductor(name):
    assert_right(CAUSAL_FORMS[name], tensors(torch.bfloat16), "fusion")


def test_the_graph():
    """The mask's nodes are gone, the inputs are all there."""
    _, graph = site_of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keep()) + 1, *tensors(grad=False)
    )
    names = [str(n.target) for n in graph.graph.nodes]
    assert sum(n.op == "placeholder" for n in graph.graph.nodes) == 3
    assert [n for n in names if "L_" not in n] == [
        "aten.scaled_dot_product_attention.default",
        names[-2],
        "output",
    ]


def test_a_mask_that_is_also_returned_stays_in_the_graph():
    def fn(q, k, v):
        mask = keep()
        return F.scaled_dot_product_attention(q, k, v, mask), mask

    site, graph = site_of(fn, *tensors(grad=False))
    assert site.fused and "arange" in graph_text(graph)
    q, k, v = tensors(grad=False)
    torch.compiler.reset()
    out, mask = torch.compile(fn, backend="fusion")(q, k, v)
    assert torch.equal(mask, keep()) and torch.allclose(out, fn(q, k, v)[0], atol=1e-6)


def test_grouped_heads_are_not_repeated():
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), keep())

    inputs = tensors(kv_heads=2)
    site, graph = site_of(fn, *inputs)
    assert (
        site.fused and "enable_gqa=True" in graph_text(graph) and "expand" not in graph_text(graph)
    )
    assert_right(fn, inputs)


def test_no_mask_by_hand():
    site, graph = site_of(by_hand, *tensors())
    assert site.fused and site.forward == "library" and "matmul" not in graph_text(graph)
    assert_right(by_hand, tensors())


def test_followed_by_the_projection_no_copy_is_made():
    def fn(q, k, v):
        return by_hand(q, k, v, keep()).transpose(1, 2).contiguous().view(B, S, H * D)

    _, graph = site_of(fn, *tensors())
    assert "clone" not in graph_text(graph)
    assert_right(fn, tensors())


def test_a_mask_of_queries_that_is_expanded_over_the_keys():
    """Its last stride is 0, which no fused kernel of CUDA takes: SDPA would compute the scores, in
    fp32.
    """

    def fn(q, k, v):
        mask = (torch.arange(S)[:, None] >= 0).expand(B, 1, S, S)
        assert mask.stride()[-1] == 0
        return F.scaled_dot_product_attention(q, k, v, mask)

    site, graph = site_of(fn, *tensors())
    assert site.forward == "library" and site.reason.startswith("nothing is masked"), site
    assert "arange" not in graph_text(graph)
    assert_right(fn, tensors())


@pytest.mark.parametrize("device, taken", [("cuda", False), ("cpu", True)])
def test_heads_whose_numbers_are_apart(device, taken):
    """On CUDA SDPA would fall to its formula in fp32."""
    with FakeTensorMode():
        q, k, v = (torch.empty(B, H, S, D, device=device, dtype=torch.bfloat16) for _ in "qkv")
        apart = torch.empty_strided(
            (B, H, S, D), (H * S * D * 3, S * D * 3, D * 3, 3), device=device, dtype=q.dtype
        )
        options = dict.fromkeys(
            ("mask", "bias", "keep", "fill", "cap", "sinks", "windows", "p")
        ) | dict(scale=0.25, heads="same", causal="full")

        def answer(q, k, v):
            return attention.replacement_fn(q, k, v, **options, known={}, training=False)

        assert isinstance(answer(q, k, v), Replacement)
        for given in ((apart, k, v), (q, apart, v), (q, k, apart)):
            found = answer(*given)
            assert isinstance(found, Replacement) == taken and (
                taken or "are 3 apart" in found.reason
            )


def test_a_query_against_a_cache_needs_no_mask():
    def fn(q, k, v):
        positions = torch.arange(S - 1, S)
        return F.scaled_dot_product_attention(
            q[:, :, :1], k, v, torch.arange(S)[None, :] <= positions[:, None]
        )

    site, graph = site_of(fn, *tensors())
    assert (
        site.fused
        and site.reason.startswith("nothing is masked")
        and "is_causal=False" in graph_text(graph)
    )
    assert_right(fn, tensors())


@pytest.mark.parametrize("form", ["sdpa", "by hand"])
def test_dynamic_lengths(form):
    def fn(x):
        q, k, v = x.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = keep(x.shape[1], x.shape[1])
        return (
            F.scaled_dot_product_attention(q, k, v, mask)
            if form == "sdpa"
            else by_hand(q, k, v, mask)
        )

    torch.compiler.reset()
    fusion_backend.reset()
    compiled = torch.compile(fn, backend="fusion")
    for length in (S, S + 5, S + 12):
        x = torch.randn(B, length, 3 * H * D, requires_grad=True)
        for have, want in zip(run(compiled, [x]), run(fn, [x]), strict=True):
            assert torch.allclose(have, want, atol=2e-5)
    report = fusion_backend.report()
    assert len(report.graphs) == 2 and [s.forward for s in report.fused] == ["library"] * 2, report


class Scaled(torch.nn.Module):
    """With dynamic=True Dynamo makes the scale an input."""

    def __init__(self, divided):
        super().__init__()
        self.scale, self.divided = 0.3, divided

    def forward(self, q, k, v):
        scores = q @ k.mT
        scores = scores.float() / self.scale if self.divided else self.scale * scores
        keeps = keep(q.shape[2], k.shape[2])
        return torch.softmax(scores.masked_fill(~keeps, float("-inf")), -1).to(q.dtype) @ v


@pytest.mark.parametrize("divided", [False, True], ids=["times", "divided"])
def test_a_scale_that_only_a_run_knows(divided):
    """It multiplies q instead, under any scale: no guard, no other graph."""
    model = Scaled(divided)
    torch.compiler.reset()
    fusion_backend.reset()
    compiled = torch.compile(model, backend="fusion", dynamic=True)
    for length, scale in ((S, 0.3), (S, 0.7), (S + 7, 0.7), (S + 5, -0.4)):
        model.scale = scale
        inputs = [torch.randn(B, H, length, D, requires_grad=True) for _ in "qkv"]
        exact = run(model, [x.detach().double().requires_grad_() for x in inputs])
        for have, eager, want in zip(run(compiled, inputs), run(model, inputs), exact, strict=True):
            assert distance(have, want) <= 5 * distance(eager, want) + FLOOR
    report = fusion_backend.report()
    assert [s.forward for s in report.sites if s.pattern == "attention"] == ["library"], report


def test_lengths_that_are_not_known_to_be_equal():
    """is_causal of a rectangle is aligned at the top left too, but the kernels behind it are not
    asked for that.
    """
    q, k, v = tensors(grad=False)
    for x in (k, v):
        torch._dynamo.mark_dynamic(x, 2)
    site, _ = site_of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keep(m=k.shape[2])), q, k, v
    )
    assert not site.fused and "its mask stays: causal" in site.reason


IDS = torch.tensor([[0] * 10 + [1] * 14, [0] * 24])
LEFT_PADDED = torch.tensor([[0] * 5 + [1] * 19, [1] * 24])


def cut(q):
    mask = keep()
    mask[0] = False
    return mask


# What stays, and why. The third input is what the mask depends on.
STAYS = {
    "one further": (lambda x: torch.arange(S)[None] <= torch.arange(S)[:, None] + 1, IDS,
    "causal with offset 1"),
    "without the diagonal": (lambda x: torch.arange(S)[None] < torch.arange(S)[:, None], IDS,
    "causal with offset -1"),
    "anti-causal": (lambda x: torch.arange(S)[None] >= torch.arange(S)[:, None], IDS,
    "window of 1 keys"),
    "a window": (lambda x: keep() & (torch.arange(S)[None] > torch.arange(S)[:, None] - 8), IDS,
                 "causal and window of 8 keys"),
    "padding": (lambda x: x[:, None, None, :].bool(), LEFT_PADDED, "padding from x"),
    "left padding, causal": (lambda x: keep() & x[:, None, None, :].bool(), LEFT_PADDED,
    "causal, proven from"),
    "documents": (lambda x: (x[:, None, :, None] == x[:, None, None, :]) & keep(), IDS,
                  "documents by x"),
    "written to": (cut, IDS, "a mask from test_attention.py:"),
    "times an input": (lambda x: keep() & (x[:, None, :, None] > 0), IDS,
                       "a mask from x"),
    "ones and zeros are added": (lambda x: keep().float(), IDS, "additive"),
    "a small fill": (lambda x: torch.where(keep(), 0.0, -1e4), IDS, "additive"),
    "a small fill in a tensor": (lambda x: torch.where(keep(), 0.0, torch.tensor(-1e4)), IDS,
    "additive"),
    "a fill that is written to": (lambda x: torch.where(keep(), 0.0, torch.tensor(-1e9).mul_(1e-5)),
    IDS, "additive"),
    "an additive bias of data": (lambda x: additive(float("-inf")) + x[:, None, None, :] * 0.1, IDS,
    "additive"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["sdpa", "by hand"])
@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name, form):
    make, x, why = STAYS[name]

    def fn(q, k, v, x):
        mask = make(x)
        return (
            F.scaled_dot_product_attention(q, k, v, mask)
            if form == "sdpa"
            else by_hand(q, k, v, mask)
        )

    inputs = tensors(grad=False)
    site, _ = site_of(fn, *inputs, x)
    assert not site.fused and site.reason.startswith("its mask stays: ") and why in site.reason, (
        site
    )


def test_rows_that_see_nothing_have_the_gradient_of_the_code():
    """All scores of such a row are the number that was added: its keys weigh the same. SDPA on CPU
    forgets that.
    """

    def fn(q, k, v):
        hidden = keep() & LEFT_PADDED[:, None, None, :].bool()
        return by_hand(q, k, v, torch.where(hidden, 0.0, torch.finfo(q.dtype).min))

    inputs = tensors()
    collector = Collector({"fusion.gate": "always"})
    found = run(torch.compile(fn, backend=collector), inputs)
    assert "attention" in {s.pattern for s in collector.report.fused}, collector.report
    for got, want in zip(found, run(fn, inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_a_finite_fill_that_scores_may_reach_stays():
    site, _ = site_of(
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(~keep(), -1e4), -1) @ v, *tensors()
    )
    assert not site.fused and "-10000" in site.reason


def test_weights_that_are_returned_are_not_fused():
    def fn(q, k, v):
        p = torch.softmax((q @ k.mT * 0.25).masked_fill(~keep(), float("-inf")), -1)
        return p @ v, p

    site, _ = site_of(fn, *tensors())
    assert not site.fused and "used elsewhere" in site.reason


def test_a_mask_with_a_gradient_stays():
    def fn(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, torch.where(keep(), bias, float("-inf")))

    site, _ = site_of(fn, *tensors(), torch.zeros(S, S, requires_grad=True))
    assert not site.fused and "bias" in site.reason


@pytest.mark.parametrize(
    "shapes, why",
    [
        (((B, 1, H, S, D),) * 3, "four dimensions"),
        (((1, H, S, D),) + ((B, H, S, D),) * 2, "q, k and v differ"),
    ],
    ids=["five dimensions", "one query for all"],
)
def test_shapes_that_fused_kernels_do_not_take(shapes, why):
    site, _ = site_of(lambda q, k, v: by_hand(q, k, v, keep()), *(torch.randn(s) for s in shapes))
    assert not site.fused and why in site.reason and "no kernel" not in site.reason


def test_dropout_keeps_its_distribution():
    """On CPU no fused kernel takes it: nothing changes."""
    site, _ = site_of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keep(), 0.5), *tensors()
    )
    assert not site.fused and "dropout" in site.reason


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, keep())

    inputs = tensors(grad=False)
    program = fusion_backend.fuse(torch.export.export(Attention(), tuple(inputs)))
    calls = [n for n in program.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert [n.kwargs["is_causal"] for n in calls] == [True]
    assert torch.allclose(program.module()(*inputs), Attention()(*inputs), atol=1e-6)
