"""The flash attention kernels against the written-out formula in fp64, value and gradients, for
every kind of mask.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import masked_attention

import fusion_backend.decide.gate
from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import forward as flash
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.kernels.common.dropout import Dropout, tiles_kept
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import CLOSE, DEVICE, FLOATS, distance, exact, randn, runs_kernels
from tests.selection import only_full, product

pytestmark = pytest.mark.usefixtures("poisoned_empties")
SMALL = dict(BM=32, BN=16, num_warps=4, num_stages=2)  # so that there are blocks of all sorts
NAMES = ("q", "k", "v", "bias", "keep", "keys", "seed", "sinks", "windows")
NEEDS = ("q", "k", "v", "bias", "sinks")
SIZES = [(1, 1), (1, 64), (17, 40), (64, 17)]
MANY = (
    "wide window",
    "causal to the right",
    "padding and causal",
    "bias for all and a window",
    "dense",
)
MANY += ("dropout, padding behind", "dropout, bias for all batches")


def places(n: int, m: int):
    return torch.arange(n, device=DEVICE)[:, None] - torch.arange(m, device=DEVICE)


def seen(shape, masking: Masking):
    """Which scores are seen, as a dense mask `[b, h, n, m]`."""
    kept = torch.ones(shape, dtype=torch.bool, device=DEVICE)
    if masking.keep is not None:
        kept = kept & masking.keep
    if masking.keys is not None and masking.keys_are != "added":
        keys = masking.keys[:, 0, 0] if masking.keys.dim() == 4 else masking.keys
        keys = keys if keys.dim() == 2 else keys[None]
        if masking.keys_are == "documents":
            kept = kept & (keys[:, None, :, None] == keys[:, None, None, :])
        else:
            kept = kept & (keys != (masking.keys_are == "padding"))[:, None, None, :]
    apart = places(*shape[2:])
    if masking.low is not None:
        kept = kept & (apart >= masking.low)
    if masking.high is not None:
        kept = kept & (apart <= masking.high)
    return kept


def formula(q, k, v, masking: Masking):
    """Attention, written out."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    s = (q @ k.mT) * masking.scale
    if masking.cap is not None:
        s = torch.tanh(s / masking.cap) * masking.cap
    if masking.bias is not None:
        bias = masking.bias
        periodic = bias.dim() == 4 and bias.shape[0] not in (1, s.shape[0])
        s = s + (bias.repeat(s.shape[0] // bias.shape[0], 1, 1, 1) if periodic else bias)
    if masking.keys_are == "added":
        s = s + masking.keys.double()
    kept = seen(s.shape, masking)
    s = s.masked_fill(~kept, masking.fill if masking.hidden == "fill" else -math.inf)
    if masking.sinks is not None:
        column = masking.sinks.expand(*s.shape[:-1], 1)
        weights = torch.softmax(torch.cat((s, column), -1), -1)[..., :-1]
    elif masking.hidden == "zero":  # without NaN in the gradient
        weights = torch.softmax(s.masked_fill(~kept.any(-1, True), 0), -1) * kept.any(-1, True)
    else:
        weights = torch.softmax(s, -1)
    if masking.dropout is not None:
        weights = (
            weights
            * tiles_kept(masking.dropout.seed, s.shape, masking.dropout.p)
            / (1 - masking.dropout.p)
        )
    return weights @ v


def check(q, k, v, masking=None, config=SMALL, needs=NEEDS, factor=1):
    masking = masking or Masking()
    masking = masking._replace(scale=masking.scale if masking.scale != 1 else q.shape[-1] ** -0.5)
    out, lse = flash.forward(q, k, v, masking, True, config)
    leaves = [exact(t).requires_grad_() for t in (q, k, v)]
    more = {"bias": masking.bias, "sinks": masking.sinks}
    more = {n: None if t is None else exact(t).requires_grad_() for n, t in more.items()}
    want = formula(*leaves, masking._replace(**more))
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], v.shape[3])
    assert distance(out, want) <= factor * 2 * CLOSE[q.dtype]
    do = randn(*out.shape, dtype=q.dtype)
    wanted = dict(zip("qkv", leaves, strict=True)) | more
    wanted = {name: leaf for name, leaf in wanted.items() if name in needs and leaf is not None}
    exactly = dict(
        zip(wanted, torch.autograd.grad(want, list(wanted.values()), do.double()), strict=True)
    )
    asked = {name: name in wanted for name in NEEDS}
    configs = None if config is None else (config, config)
    found = flash_backward.backward(q, k, v, masking, out, lse, do, asked, configs)
    # rounding alone, where a gradient is 0
    scale = max(g.abs().max().item() for g in exactly.values())
    for name, got in zip(asked, found, strict=True):
        assert (got is not None) == asked[name]
        if got is not None:
            like = dict(q=q, k=k, v=v, bias=masking.bias, sinks=masking.sinks)[name]
            assert got.dtype == like.dtype and got.shape == like.shape
            apart = (got.double() - exactly[name]).norm()
            limit = exactly[name].norm() + 5e-2 * scale * exactly[name].numel() ** 0.5
            assert apart <= factor * 8 * CLOSE[q.dtype] * limit, name
    return out


def qkv(n, m, d, h=2, kv=None, b=2, dtype=torch.float32, e=None):
    sizes = (h, n, d), (kv or h, m, d), (kv or h, m, e or d)
    return tuple(randn(b, *size, dtype=dtype) for size in sizes)


def dropout(p):
    return Dropout(torch.tensor([2**40 + 7], device=DEVICE), p)


def masks(n, m, b=2, h=2, dtype=torch.float32):
    """Every kind of mask."""
    padding = torch.rand(b, m, device=DEVICE) > 0.4
    padding[:, 0] = True
    behind = torch.arange(m, device=DEVICE) < torch.tensor([[max(1, m // 3)], [m]], device=DEVICE)
    keep = torch.rand(b, 1, n, m, device=DEVICE) > 0.3
    keep[..., 0] = True
    third = torch.arange(m, device=DEVICE) * 3 // m
    deep = (
        torch.where(third < 2, torch.finfo(dtype).min / (1 + third), 0.0)
        .to(dtype)
        .expand(b, 1, n, m)
        .contiguous()
    )
    vector = torch.where(behind, 0.0, -1e9).to(dtype)[:, None, None]
    return {
        "all": Masking(),
        "causal": Masking(low=0),
        "causal to the right": Masking(low=n - m),
        "window": Masking(low=0, high=5),
        "wide window": Masking(low=-40, high=30),
        "padding": Masking(keys=padding),
        "padding behind": Masking(keys=behind),
        "padding of four dimensions": Masking(
            keys=~behind[:, None, None, :].expand(b, 1, n, m), keys_are="padding"
        ),
        "padding and causal": Masking(keys=behind, low=0),
        "padding, filled": Masking(keys=behind, hidden="fill", fill=-1e9),
        "dense": Masking(keep=keep),
        "dense, filled": Masking(keep=keep[:1], hidden="fill", fill=-2.0),
        "causal, filled": Masking(low=0, hidden="fill", fill=-3.0),
        "bias": Masking(bias=randn(b, h, n, m, dtype=dtype)),
        "bias for all batches": Masking(bias=randn(1, h, n, m, dtype=dtype)),
        "bias for all heads, causal": Masking(bias=randn(b, 1, n, m, dtype=dtype), low=0),
        "bias for all and a window": Masking(bias=randn(1, 1, n, m, dtype=dtype), low=-3, high=60),
        "bias, far down to two depths": Masking(bias=deep),
        "bias, far down to two depths, causal": Masking(bias=deep, low=0),
        "bias of keys": Masking(bias=randn(b, 1, 1, m, dtype=dtype)),
        "bias and a vector": Masking(
            bias=randn(1, h, n, m, dtype=dtype), keys=vector, keys_are="added"
        ),
        "bias of keys, one vector, filled": Masking(
            bias=randn(b, h, 1, m, dtype=dtype),
            keys=randn(2 * m)[None, None, None, ::2],
            keys_are="added",
            low=0,
            hidden="fill",
            fill=-2.0,
        ),
        "dropout, bias and a vector": Masking(
            bias=randn(b, h, n, m, dtype=dtype),
            keys=vector,
            keys_are="added",
            dropout=dropout(0.3),
        ),
        "bias of causal heads": Masking(bias=randn(b, h, n, m, dtype=dtype), low=0),
        "capped": Masking(cap=0.5, low=0),
        "capped with a bias and padding": Masking(
            cap=2.0, bias=randn(1, h, n, m, dtype=dtype), keys=padding
        ),
        "dropout": Masking(dropout=dropout(0.3)),
        "dropout, padding behind": Masking(dropout=dropout(0.1), keys=behind),
        "dropout, a window, filled": Masking(
            dropout=dropout(0.5), low=0, high=9, hidden="fill", fill=-2.0
        ),
        "dropout, bias": Masking(dropout=dropout(0.3), bias=randn(b, h, n, m, dtype=dtype)),
        "dropout, bias for all batches": Masking(
            dropout=dropout(0.3), bias=randn(1, h, n, m, dtype=dtype)
        ),
        "sinks": Masking(sinks=2 * randn(1, h, 1, 1, dtype=dtype)),
        "sinks and a window": Masking(sinks=randn(h, 1, 1), low=0, high=5),
        "sinks of rows, padding behind": Masking(sinks=randn(b, h, n, 1, dtype=dtype), keys=behind),
        "sinks, bias, dropout": Masking(
            sinks=randn(1, h, 1, 1, dtype=dtype),
            bias=randn(1, h, n, m, dtype=dtype),
            dropout=dropout(0.3),
        ),
    }


# Every kind in one of two sizes, and with one query for one key or for many; those that skip most,
# in several tiles
SIZED = []
for i, kind in enumerate(masks(4, 4)):
    SIZED += [(*SIZES[i % 2], kind), (*SIZES[2 + i % 2], kind), only_full(*SIZES[1 - i % 2], kind)]
for kind in MANY:
    SIZED += [(70, 90, kind), only_full(100, 130, kind)]


@runs_kernels
@pytest.mark.parametrize("n, m, kind", SIZED)
def test_masks(n, m, kind):
    check(*qkv(n, m, 16), masks(n, m)[kind])


@runs_kernels
def test_a_vector_beside_a_bias():
    """In full tiles and others, of one batch and of each, where its numbers are apart in memory."""
    bias = randn(1, 2, 40, 70)
    one = randn(2, 1, 1, 1)
    for keys in (randn(2, 1, 1, 140)[..., ::2], randn(70), one, one.expand(-1, -1, -1, 70)):
        check(*qkv(40, 70, 16), Masking(bias=bias, keys=keys, keys_are="added"))


@runs_kernels
@product(d=[16, 40, 64], dtype=FLOATS, kind=["all", "window", "bias for all batches", "dropout"])
def test_head_sizes(d, dtype, kind):
    m = 80 if kind == "all" else 40  # as chosen; short attention has other kernels
    check(
        *qkv(17, m, d, dtype=dtype),
        masks(17, m, dtype=dtype)[kind],
        config=None if kind == "all" else SMALL,
    )


@runs_kernels
@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize(
    "kind",
    ["causal to the right", "padding and causal", "bias for all batches", "dense", "dropout"],
)
def test_grouped_heads(kind, kv):
    check(*qkv(20, 33, 16, h=4, kv=kv), masks(20, 33, h=4)[kind])


def heads_last(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@runs_kernels
def test_layouts():
    """Heads last, a packed projection, padded rows, expanded keys: read as they lie."""
    q, k, v = qkv(20, 33, 16)
    out = check(*map(heads_last, (q, k, v)))
    assert out.transpose(1, 2).is_contiguous()
    assert check(q, k, v).transpose(1, 2).is_contiguous()
    packed = randn(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)
    check(*packed.unbind(0), Masking(low=0))
    check(q, randn(2, 2, 33, 20)[..., :16], v[:1].expand(2, -1, -1, -1))
    wide = randn(2, 2, 20, 40)[..., :33]
    check(
        q,
        k,
        v,
        Masking(
            bias=wide,
            keep=(randn(33, 20) > 0).mT[None, None] | (torch.arange(33, device=DEVICE) == 0),
        ),
    )
    check(q, k, v, Masking(bias=randn(33), low=-50))
    # as an embedding of distances leaves it
    check(q, k, v, Masking(bias=randn(20, 33, 2).permute(2, 0, 1)[None]))
    check(q, k, v, Masking(bias=randn(20, 1) + 0 * randn(20, 33), high=10))


@runs_kernels
@pytest.mark.parametrize("needs", [["q"], ["k"], ["v"], ["bias"], ["q", "bias"], ["sinks"]])
def test_only_wanted_gradients(needs):
    for shape in ((2, 2, 17, 33), (1, 2, 17, 33)):
        masking = Masking(bias=randn(*shape), sinks=randn(1, 2, 1, 1))
        check(*qkv(17, 33, 16), masking, needs=needs)


@runs_kernels
def test_large_scores():
    q, k, v = qkv(33, 33, 16)
    check(100 * q, k, v, Masking(low=0), factor=20)
    out, _ = flash.forward(
        q, k, v, Masking(bias=torch.full((33,), -1e30, device=DEVICE)), False, SMALL
    )
    assert distance(out, v.double().mean(2, True).expand_as(v)) < 1e-5


@runs_kernels
def test_rows_that_see_nothing():
    """0 and without a gradient, NaN, or the mean over all keys: as the masking says."""
    q, k, v = qkv(20, 40, 16)
    none = torch.arange(40, device=DEVICE) < torch.tensor([[0], [25]], device=DEVICE)
    left = torch.arange(40, device=DEVICE) > torch.tensor([[10], [-1]], device=DEVICE)
    keep = (randn(2, 1, 20, 40) > 0) & (torch.arange(20, device=DEVICE)[:, None] != 3)
    for masking in (
        Masking(keys=none),
        Masking(keys=left, low=0),
        Masking(keep=keep),
        Masking(low=5),
        Masking(high=-25),
    ):
        out = check(q, k, v, masking)
        dead = ~seen((2, 2, 20, 40), masking).any(-1)
        assert dead.any()
        assert not out[dead].any() and out[~dead].ne(0).all()
        filled = masking._replace(hidden="fill", fill=torch.finfo(torch.float32).min)
        out = check(q, k, v, filled)
        assert torch.allclose(out[dead], v.mean(2)[:, :, None].expand_as(out)[dead], atol=1e-6)
        fill = torch.where(seen((2, 2, 20, 40), masking), 0.0, torch.finfo(torch.float32).min)
        check(q, k, v, Masking(bias=fill), needs=["q", "k", "v"])  # all have the same
        out, _ = flash.forward(q, k, v, masking._replace(hidden="nan"), False, SMALL)
        assert torch.equal(out.isnan().all(-1), dead) and torch.equal(out.isnan().any(-1), dead)


@runs_kernels
def test_hidden_keys_are_not_read():
    """NaN where the padding or the band hides whole blocks changes nothing."""
    q, k, v = qkv(40, 100, 16)
    keys = torch.arange(100, device=DEVICE) < 30
    for masking in (Masking(keys=keys[None]), Masking(low=10)):
        want, _ = flash.forward(q, k, v, masking, False, SMALL)
        spoilt = [
            t.clone().index_fill_(2, torch.arange(48, 100, device=DEVICE), math.nan) for t in (k, v)
        ]
        out, lse = flash.forward(q, *spoilt, masking, True, SMALL)
        assert torch.equal(out, want)
        needs = dict.fromkeys(NEEDS, True)
        dq, dk, dv, *_ = flash_backward.backward(
            q, *spoilt, masking, out, lse, out, needs, (SMALL, SMALL)
        )
        assert not dq.isnan().any() and not dk[:, :, 48:].any() and not dv[:, :, 48:].any()


# The whole way: the mask read back to its sources, the graph rewritten, the kernels interpreted.


def keep(n, m, offset=0, window=None):
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    kept = j <= i + offset
    return kept if window is None else kept & (j > i + offset - window)


def by_hand(q, k, v, mask, fill=None):
    s = q @ k.mT * 0.25
    return torch.softmax(s + mask if fill is None else s.masked_fill(~mask, fill), -1) @ v


def sdpa(q, k, v, mask, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


PADDING = torch.tensor([[1] * 20 + [0] * 10, [1] * 30])
FOUND = {
    "window": (lambda q, k, v, x: sdpa(q, k, v, keep(30, 30, window=7)),
    dict(low=0, high=6, hidden="zero")),
    "offset": (lambda q, k, v, x: sdpa(q[:, :, :9], k, v, keep(9, 30, 21)),
    dict(low=-21, high=None)),
    "window by hand": (
        lambda q, k, v, x: by_hand(q, k, v, keep(30, 30, 0, 7), -1e9),
        dict(low=0, high=6, hidden="zero")),
    "padding": (lambda q, k, v, x: sdpa(q, k, v, PADDING.bool()[:, None, None, :]),
    dict(low=None, padded="seen")),
    "padding, expanded": (lambda q, k, v,
    x: sdpa(q, k, v, (PADDING != 0)[:, None, None].expand(2, 1, 30, 30)), {}),
    "padding and causal": (
        lambda q, k, v, x: sdpa(q, k, v, (PADDING != 0)[:, None, None] & keep(30, 30)),
        dict(low=0, hidden="zero")),
    "complement of padding": (
        lambda q, k, v, x: by_hand(q, k, v, ~(PADDING == 0)[:, None, None], -1e4),
        dict(hidden="fill", fill=-1e4)),
    "causal with a fill that scores may reach": (
        lambda q, k, v, x: by_hand(q, k, v, keep(30, 30), -3.0), dict(low=0, hidden="fill")),
    "a dense choice": (lambda q, k, v, x: sdpa(q, k, v, (x > -1) & keep(30, 30)),
    dict(low=0, hidden="zero")),
    "a bias with a gradient": (lambda q, k, v, x: sdpa(q, k, v, x), dict(low=None, high=None)),
    "a bias with a gradient, by hand": (lambda q, k, v, x: by_hand(q, k, v, x),
    dict(hidden="zero")),
    "a bias with a causal part": (
        lambda q, k, v, x: by_hand(q, k, v, x + torch.where(keep(30, 30), 0.0, -1e30)),
        dict(low=0, hidden="zero")),
}  # fmt: skip


@pytest.fixture
def taken(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


def gradients(fn, inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = fn(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)]


def compiled_agrees(fn, backend, inputs, grad=True) -> None:
    """The value, and with grad the gradients, of what the backend makes of fn, against fp64. A
    collector has compiled it before, and what came of that is what runs here.
    """
    compiled, wide = torch.compile(fn, backend=backend), [t.double() for t in inputs]
    if not grad:
        assert distance(compiled(*inputs), fn(*wide)) < 2e-5
        return
    for got, want in zip(gradients(compiled, inputs), gradients(fn, wide), strict=True):
        assert (got is None) == (want is None)
        assert want is None or distance(got, want) < 2e-5


def becomes_masked_attention(fn, inputs, options, operands):
    """fn becomes one call of masked_attention, with these options and no operands but q, k, v and
    these. Returns what was collected.
    """
    collector = collect(fn, *inputs)
    (node,) = fused_nodes(collector.graphs[0])
    assert str(node.target) == "fusion.masked_attention.default"
    assert node.kwargs.items() >= options.items()
    given = {n for n, t in zip(NAMES, node.args, strict=True) if t is not None}
    assert given == {"q", "k", "v", *operands}
    return collector


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has this on a GPU")
@pytest.mark.parametrize("name", FOUND)
def test_masks_of_graphs(name, taken):
    fn, options = FOUND[name]
    inputs = [
        *qkv(30, 30, 16, kv=1 if "offset" in name else 2),
        randn(2, 1 if "dense" in name else 2, 30, 30),
    ]
    inputs[1:3] = [t.expand(-1, 2, -1, -1).contiguous() for t in inputs[1:3]]
    collector = collect(fn, *[t.requires_grad_() for t in inputs])
    (node,) = fused_nodes(collector.graphs[0])
    assert str(node.target) == "fusion.masked_attention.default"
    assert node.kwargs.items() >= {**options, "backward": "kernel", "save": True}.items()
    tensors = dict(zip(NAMES, node.args, strict=True))
    wanted = (
        {"bias"}
        if "bias" in name
        else {"keep"}
        if "dense" in name
        else {"keys"}
        if "padding" in name
        else set()
    )
    assert {name for name in NAMES[3:] if tensors[name] is not None} == wanted
    exactly = gradients(fn, [t.double() for t in inputs])
    got = gradients(torch.compile(fn, backend=collector), inputs)
    for g, w in zip(got, exactly, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            assert distance(g, w) < 1e-5


def gradients_of_op(**given):
    """The result, and the gradients of q, k, v, the bias and the windows, by the op's kernels."""
    rest = dict.fromkeys(p.name for p in masked_attention.params)
    rest |= dict(scale=0.25, hidden="zero", padded="seen") | given
    out, lse = masked_attention.kernel_fn(*rest.values(), True)
    asked = {name: given.get(name) is not None for name in rest}
    saved = SimpleNamespace(**rest, result=out, lse=lse, needs=asked)
    found = masked_attention.backward_fn(saved, torch.ones_like(out))
    return out, *found[:4], found[-1]


@runs_kernels
def test_a_dimension_in_front():
    """Of q, k, v and a bias beside masks of windows."""
    four = dict(zip("qkv", qkv(17, 17, 16, b=4), strict=True)) | dict(bias=randn(1, 2, 17, 17))
    windows = randn(2, 17, 17)
    want = gradients_of_op(**four, windows=windows)
    got = gradients_of_op(**{n: t[None] for n, t in four.items()}, windows=windows)
    for mine, its in zip(got[:-1], want[:-1], strict=True):
        torch.testing.assert_close(mine, its[None])
    torch.testing.assert_close(got[-1], want[-1])


def test_refusals():
    q, k, v = qkv(4, 6, 16)
    rest = dict.fromkeys((*NAMES[3:], "low", "high", "fill"))
    rest |= dict(scale=0.25, cap=None, p=None, hidden="zero")

    def refusal(q, k, v, **changed):
        answer = masked_attention.guard_fn(
            *{**dict(q=q, k=k, v=v), **rest, "padded": "seen", **changed}.values()
        )
        return answer.reason if isinstance(answer, Reject) else None

    assert refusal(q, k, v) is None
    assert refusal(q, k[:, :, :3], v[:, :, :3], bias=randn(4, 3), keys=randn(1, 3) > 0) is None
    assert "heads of 8" in refusal(*(t[..., :8] for t in (q, k, v)))
    assert "16 to 256" in refusal(*qkv(4, 6, 512))
    assert "4 heads of q for 3" in refusal(*qkv(4, 6, 16, h=4, kv=3))
    assert refusal(*qkv(4, 6, 24, e=16)) is None
    assert "values of 8" in refusal(q, k, v[..., :8])
    assert "q and k differ in size" in refusal(q, k[..., :8], v)
    assert "exceed the registers" in refusal(*qkv(4, 6, 64, e=192))
    assert "apart" in refusal(q, k.mT.contiguous().mT, v)
    assert "does not broadcast" in refusal(q, k, v, bias=randn(3, 6))
    assert "not positive" in refusal(q, k, v, scale=-1.0)
    assert "exceed the registers" in refusal(*qkv(4, 6, 256))
    assert "torch.float16" in refusal(q, k, v.half())
    assert "the vector of keys is torch.bool with shape (2, 5)" in refusal(
        q, k, v, keys=randn(2, 5) > 0
    )
    added = dict(padded="added", bias=randn(4, 6))
    assert refusal(q, k, v, keys=randn(2, 1, 1, 6), **added) is None
    for shape in [(2, 1, 1, 5), (3, 1, 1, 6), (2, 2, 1, 6), (2, 1, 4, 6), (2, 6), ()]:
        assert "is no vector over them" in refusal(q, k, v, keys=randn(*shape), **added)
    assert "is no vector" in refusal(q, k, v, keys=randn(2, 1, 1, 6), padded="added")
    assert "added is torch.bool" in refusal(q, k, v, keys=randn(2, 1, 1, 6) > 0, **added)
    assert "keep is torch.float32" in refusal(q, k, v, keep=randn(4, 6))
    assert refusal(q, k, v, sinks=randn(2, 1, 1)) is None
    assert "sinks of shape (2, 6)" in refusal(q, k, v, sinks=randn(2, 6))
    assert "sinks is torch.float64" in refusal(q, k, v, sinks=randn(2, 1, 1).double())
