"""On a GPU: where programs share a row, in norms, forward and backward, and in softmax.

The interpreter runs one program after another, which would wait for ever: these kernels run nowhere
else.
"""

import pytest
import torch

import fusion_backend
from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.dropout import Dropout, dropped
from fusion_backend.kernels.norm import (
    backward as norms_backward,
)
from fusion_backend.kernels.norm import (
    forward as norms,
)
from fusion_backend.kernels.norm import (
    forward_cooperative as norms_shared,
)
from fusion_backend.kernels.norm.backward_cooperative import backward_cooperative, config_for
from fusion_backend.kernels.norm.operands import Backward, Norm
from fusion_backend.kernels.softmax import forward as softmax
from fusion_backend.testing import close, value_and_gradients

pytestmark = pytest.mark.gpu
ALL = True, True, True


def given(rows, n, dtype=torch.bfloat16, stride=0):
    x, dy, dh = (torch.randn(rows, n + stride, device="cuda", dtype=dtype)[:, :n] for _ in range(3))
    w, b = (torch.randn(n, device="cuda", dtype=dtype) for _ in range(2))
    return x + 1 if not stride else x, dy, dh, w, b


def moments(x, centred, eps=1e-5):
    wide = x.double()
    mean = wide.mean(1) if centred else torch.zeros_like(wide[:, 0])
    return mean.float(), ((wide - mean[:, None]).square().mean(1) + eps).rsqrt().float()


def exactly(dy, dh, x, mean, rstd, norm):
    """The gradients in fp64, and of what was dropped out."""
    u = (x.double() - (mean[:, None].double() if norm.centred else 0)) * rstd[:, None].double()
    g = dy.double() * (norm.weight.double() + (norm.offset or 0.0))
    d = g - u * (g * u).mean(1, keepdim=True) - (g.mean(1, keepdim=True) if norm.centred else 0)
    d = d * rstd[:, None].double() + (0 if dh is None else dh.double())
    dx = dropped(d.cpu(), norm.dropout.seed.cpu(), norm.dropout.p).cuda() if norm.dropout else None
    return d, (dy.double() * u).sum(0), dy.double().sum(0), dx


def near(got, want, units=8):
    eps = torch.finfo(got.dtype).eps
    assert ((got.double() - want).abs() <= units * eps * (want.abs() + want.abs().mean())).all()


def norm_of(w, b, centred, p=0.0):
    dropout = Dropout(torch.tensor([17], device="cuda"), p) if p else None
    return Norm(w, b if centred else None, None if centred else 1.0, 1e-5, centred, dropout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "rows, n",
    [
        (1030, 2056),
        (2000, 5120),
        (1024, 8193),
        (1025, 12288),
        (2049, 16384),
        (1500, 20001),
        (1024, 32768),
        (1031, 65535),
    ],
)
def test_against_fp64(rows, n, dtype, monkeypatch):
    x, dy, dh, w, b = given(rows, n, dtype)
    seen = []
    monkeypatch.setattr(norms_backward, "shareable", lambda *_: True)  # odd rows, too
    monkeypatch.setattr(norms_backward, "sharing_is_faster", lambda *_: True)
    monkeypatch.setattr(
        norms_backward,
        "backward_cooperative",
        lambda *a: seen.append(a) or backward_cooperative(*a),
    )
    for centred, own, p in ((True, None, 0.0), (False, dh, 0.0), (True, dh, 0.1)):
        norm = norm_of(w, b, centred, p)
        mean, rstd = moments(x, centred)
        dx = torch.empty_like(x) if p else None
        got = norms_backward.backward(dy, own, x, mean, rstd, norm, ALL, dx)
        want = exactly(dy, own, x, mean, rstd, norm)
        near(got[0], want[0])
        near(got[1], want[1])
        if centred:
            near(got[2], want[2])
        if p:
            near(dx, want[3])
    assert len(seen) == 3


def test_strides_and_what_is_not_wanted():
    x, dy, _, w, b = given(1200, 12288, stride=8)
    norm, (mean, rstd) = norm_of(w, b, True), moments(x, True)
    want = exactly(dy, None, x, mean, rstd, norm)
    for needs in (
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (False, True, True),
    ):
        got = norms_backward.backward(dy, None, x, mean, rstd, norm, needs)
        for mine, its, need in zip(got, want, needs, strict=False):
            assert (mine is not None) == need
            if need:
                near(mine, its)


def test_a_row_of_nan_or_infinity_is_alone():
    x, dy, _, w, b = given(1100, 16384)
    norm, (mean, rstd) = norm_of(w, b, True), moments(x, True)
    clean = norms_backward.backward(dy, None, x, mean, rstd, norm, (True, False, False))[0]
    for value in (
        float("nan"),
        float("inf"),
        torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16).item(),
    ):
        bad = dy.clone()
        bad[5, 7] = bad[1099, 16383] = value
        got = norms_backward.backward(bad, None, x, mean, rstd, norm, (True, False, False))[0]
        assert not got[[5, 1099]].isfinite().all(1).any()
        others = torch.ones(1100, dtype=torch.bool, device="cuda")
        others[[5, 1099]] = False
        assert torch.equal(got[others], clean[others])


def test_the_same_bits_every_time_and_beside_one_another():
    """Also when many such kernels run at the same time, none has the GPU for itself, and rows are
    few for a group.
    """
    x, dy, _, w, b = given(1024, 32768)
    norm, (mean, rstd) = norm_of(w, b, True), moments(x, True)
    args = dy, None, x, mean, rstd, norm, ALL
    first = norms_backward.backward(*args)
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    results = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(norms_backward.backward(*args))
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, first, strict=True))


def test_more_programs_than_there_is_room_for():
    x, dy, _, w, b = given(3000, 12288)
    norm, (mean, rstd) = norm_of(w, b, True), moments(x, True)
    out = torch.empty_like(x)
    operands = Backward(dy, None, x, mean, rstd, norm, ALL, out, None)
    sums = backward_cooperative(operands, config_for(12288)._replace(programs=50))
    want = exactly(dy, None, x, mean, rstd, norm)
    near(out, want[0])
    near(sums[0].sum(0).to(x.dtype), want[1])


@pytest.mark.parametrize("rows, n", [(1024, 8200), (1030, 20008), (1500, 32768), (1024, 65528)])
def test_forward_against_fp64(rows, n, monkeypatch):
    """Layer norm, RMS norm of a sum, layer norm of a sum with dropout; what is saved, too. A mean
    far from zero.
    """
    x, r, _, w, b = given(rows, n)
    x, seen = x + 50, []
    monkeypatch.setattr(norms_shared, "worthwhile", lambda *_: seen.append(1) or True)
    for centred, residual, p in ((True, None, 0.0), (False, r, 0.0), (True, r, 0.1)):
        norm = norm_of(w, b, centred, p)
        y, h, mean, rstd = norms.forward(x, residual, norm, True)
        wide = dropped(x.double().cpu(), norm.dropout.seed.cpu(), p).cuda() if p else x.double()
        wide = wide if residual is None else wide + residual.double()
        m, v = (
            wide.mean(1, keepdim=True) if centred else 0.0,
            wide.var(1, correction=0, keepdim=True),
        )
        v = v if centred else wide.square().mean(1, keepdim=True)
        want = (wide - m) * (v + norm.eps).rsqrt() * (w.double() + (norm.offset or 0.0))
        near(y, want + (b.double() if centred else 0.0), 4)
        assert torch.allclose(rstd.double(), (v + norm.eps).rsqrt()[:, 0], rtol=1e-5)
        if centred:
            assert torch.allclose(mean.double(), m[:, 0], rtol=1e-5)
        if residual is not None:
            near(h, wide, 1)
    assert len(seen) == 3


def test_compiled_with_rows_that_vary():
    """From the same graph: more rows than in the first call, fewer than there are
    groups, and one.
    """

    def run(x, w, b):
        y = torch.nn.functional.layer_norm(x, (16384,), w, b)
        return torch.softmax(y[:, :12288], -1)

    fusion_backend.reset()
    torch.compiler.reset()
    compiled = torch.compile(run, backend="fusion", options={"fusion.gate": "always"}, dynamic=True)
    for rows in (1100, 2000, 40, 2):
        x, _, _, w, b = given(rows, 16384)
        args = [t.requires_grad_() for t in (x, w, b)]
        exact = value_and_gradients(run, [t.detach().double().requires_grad_() for t in args])
        plain = value_and_gradients(run, args)
        assert len(plain) == 4
        for got, p, e in zip(value_and_gradients(compiled, args), plain, exact, strict=True):
            assert close(got, p, e) == "", rows
    assert len(fusion_backend.report().fused) == 2


def test_two_sites_that_are_alike():
    """Equal buffers to exchange in are one tensor in the graph, and must be two when the kernels
    run.
    """

    def run(x, w, b):
        y = torch.nn.functional.layer_norm(x, (65536,), w, b)
        return torch.nn.functional.layer_norm(y, (65536,), b, w)

    fusion_backend.reset()
    torch.compiler.reset()
    compiled = torch.compile(
        run, backend="fusion", options={"fusion.gate": "always"}, dynamic=False
    )
    x, _, _, w, b = given(1024, 65536)
    args = [t.requires_grad_() for t in (x, w, b)]
    exact = value_and_gradients(run, [t.detach().double().requires_grad_() for t in args])
    plain = value_and_gradients(run, args)
    for got, p, e in zip(value_and_gradients(compiled, args), plain, exact, strict=True):
        assert close(got, p, e) == ""
    assert [site.forward for site in fusion_backend.report().fused] == ["kernel"] * 2


@pytest.mark.parametrize("rows, n", [(1024, 16385), (1500, 20001), (1030, 32768), (1024, 65536)])
def test_softmax(rows, n):
    x = given(rows, n, stride=n % 8)[0] * 3
    x[3], x[4, :5000], x[5, 7], x[6, 9], x[7, 5] = (
        float("-inf"),
        float("-inf"),
        float("nan"),
        float("inf"),
        90.0,
    )
    for scale in (None, -0.5):
        got = softmax.forward_cooperative(x, scale, softmax.COOPERATIVE)
        want = torch.softmax(x.double() * (1 if scale is None else scale), -1)
        assert torch.equal(got.isnan(), want.isnan())
        near(got.nan_to_num(), want.nan_to_num(), 2)
        assert torch.equal(
            got.nan_to_num(),
            softmax.forward_cooperative(x, scale, softmax.COOPERATIVE).nan_to_num(),
        )


def test_who_shares():
    x, config = torch.empty(1024, 16384, device="cuda", dtype=torch.bfloat16), config_for(16384)
    assert shareable(x, config)
    assert not shareable(x[:1000], config)  # few rows
    assert not shareable(x.float(), config)
    # nothing is read ahead
    assert not shareable(torch.empty(1024, 16390, device="cuda", dtype=torch.bfloat16), config)
    assert not shareable(x, config._replace(block=256))  # more pieces than threads of a warp
