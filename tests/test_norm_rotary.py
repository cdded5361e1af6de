"""norm_rotary: its kernels against fp64, what it refuses, and that queries and keys of whole models
are found.
"""

import contextlib
import copy
import itertools
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure.distance import distance as joint
from benchmarks.subjects.tiny_models import CAUSAL, Tiny, hugging_face, loss, result, tokens
from fusion_backend.frontends.explain import Collector
from fusion_backend.kernels.norm import norm_rotary as forwards
from fusion_backend.kernels.norm import norm_rotary_backward as backwards
from fusion_backend.kernels.norm.norm_rotary import Heads, heads_config
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject, Unmeasured
from fusion_backend.testing import collect, with_kernels
from tests.kernel_checks import (
    CLOSE,
    FLOATS,
    Kernels,
    check,
    check_value,
    distance,
    exact,
    randn,
    runs_kernels,
    symbolic,
)
from tests.selection import only_full, product

pytestmark = pytest.mark.usefixtures("poisoned_empties")
STYLES = ["half", "interleaved"]


def of(x, offset=1.0, style="half", table=None, dtype=None):
    """The arguments of the pattern: cos and sin of every position, shared by batches and heads."""
    shape, dtype = x.shape[-2:] if table is None else table, dtype or x.dtype
    d = x.shape[-1]
    cos, sin = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    return x, randn(d, dtype=dtype), offset, 1e-3, cos, sin, style


def as_in_models(b, n, h, d, dtype=torch.float32):
    return randn(b, n, h, d, dtype=dtype).transpose(1, 2)


# batches, positions, heads, size of a head
SIZES = [(2, 5, 3, 12), (1, 1, 14, 64), (2, 9, 1, 2), (3, 4, 17, 6), (1, 3, 2, 512), (2, 2, 5, 80)]


@runs_kernels
@product(dtype=FLOATS, style=STYLES, offset=[None, 1.0], size=SIZES)
def test_kernels(dtype, style, offset, size):
    check("norm_rotary", *of(as_in_models(*size, dtype=dtype), offset, style))


@runs_kernels
@pytest.mark.parametrize("style", STYLES)
def test_layouts(style):
    """Packed products, other orders, padded rows, fewer dimensions, and memory that is shared."""
    packed = randn(2, 5, 40)
    for x in (
        packed[..., :24].view(2, 5, 3, 8).transpose(1, 2),
        packed[..., 24:].view(2, 5, 2, 8).transpose(1, 2),
        randn(2, 3, 5, 8),
        randn(2, 3, 5, 11)[..., :8],
        randn(3, 2, 5, 8).transpose(0, 1),
        randn(4, 3, 10, 8)[::2, :, ::2],
        randn(3, 5, 8),
        randn(5, 8),
    ):
        check("norm_rotary", *of(x, style=style))
    expanded = randn(1, 3, 5, 8).expand(2, -1, -1, -1)
    check("norm_rotary", *of(expanded, style=style), needs=["weight"])


@runs_kernels
@pytest.mark.parametrize("table", [(2, 1, 5, 8), (1, 1, 5, 8), (1, 5, 8), (5, 8), (1, 8), (8,)])
def test_cos_and_sin_broadcast(table):
    check("norm_rotary", *of(as_in_models(2, 5, 3, 8), table=table))


@runs_kernels
def test_heads_behind_positions():
    x = randn(2, 5, 3, 8)
    for table in (2, 5, 1, 8), (1, 5, 1, 8), (5, 1, 8):
        check("norm_rotary", *of(x, table=table))


@runs_kernels
def test_cos_and_sin_of_any_rows():
    x, w, offset, eps, *_, style = of(as_in_models(2, 5, 3, 8))
    both = randn(5, 20)
    check("norm_rotary", x, w, offset, eps, both[:, :8], both[:, 10:18], style)
    rows = randn(2, 1, 10, 8)[:, :, ::2]
    check("norm_rotary", x, w, offset, eps, rows, randn(1, 1, 8).expand(2, 1, 5, 8), style)


@runs_kernels
@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8)])
def test_nothing(shape):
    args = of(torch.empty(shape, device=randn(1).device))
    check_value("norm_rotary", *args)
    y, rstd = FUSION_RULES["norm_rotary"].launched(args, save=True)
    dx, dw = backwards.backward(y, *args[:2], 1.0, *args[4:], rstd, (True, True))
    assert dx.shape == shape and torch.equal(dw, torch.zeros_like(dw))


@runs_kernels
@pytest.mark.parametrize("config", [Heads(1, 1, 4), Heads(4, 1, 4), Heads(2, 4, 4)])
def test_tiles(config, monkeypatch):
    """Heads and positions that do not fill their tiles, and programs that have several."""
    monkeypatch.setattr(forwards, "heads_config", lambda heads, d: config)
    walks = config._replace(programs=1, stages=2)
    monkeypatch.setattr(backwards, "backward_config", lambda heads, d: walks)
    check("norm_rotary", *of(as_in_models(2, 7, 5, 8)))
    check("norm_rotary", *of(as_in_models(3, 1, 5, 8), style="interleaved"))


def test_the_tile_of_a_program():
    assert heads_config(16, 128) == heads_config(40, 128) == Heads(8, 1, 2)
    assert heads_config(4, 128) == Heads(4, 2, 2)
    assert heads_config(14, 64) == Heads(16, 1, 2)
    assert heads_config(3, 64)[:2] == (1, 16)  # of four, one would be left over
    assert heads_config(1, 256)[:2] == (1, 4)
    assert heads_config(64, 512)[:2] == (2, 1)
    assert backwards.backward_config(16, 128) == Heads(1, 8, 2, 8, 3)


@runs_kernels
@pytest.mark.parametrize("needs", [["x"], ["weight"], ["cos"], ["sin"], ["x", "weight"]])
def test_only_wanted_gradients(needs):
    x, w, offset, eps, cos, sin, style = args = of(as_in_models(2, 5, 3, 8))
    check("norm_rotary", *args, needs=needs)
    wanted = {name: name in needs for name in ("x", "weight", "cos", "sin")}
    y, rstd = FUSION_RULES["norm_rotary"].launched(args, save=True)
    saved = SimpleNamespace(
        x=x, weight=w, offset=offset, eps=eps, cos=cos, sin=sin, style=style, rstd=rstd,
        needs=wanted,
    )  # fmt: skip
    found = FUSION_RULES["norm_rotary"].backward_fn(saved, torch.ones_like(y))
    assert [g is not None for g in found] == list(wanted.values())


@runs_kernels
def test_gradients_of_any_strides():
    x, w, offset, eps, cos, sin, style = args = of(as_in_models(2, 5, 3, 8))
    _, rstd = FUSION_RULES["norm_rotary"].launched(args, save=True)
    leaves = [exact(t).requires_grad_() for t in (x, w)]
    y = FUSION_RULES["norm_rotary"].reference(*leaves, offset, eps, exact(cos), exact(sin), style)
    for dy in (
        randn(1, 1, 1, 1).expand(2, 3, 5, 8),
        randn(2, 3, 8, 5).mT,
        randn(2, 3, 5, 8),
        randn(2, 5, 3, 8).transpose(1, 2),
        randn(2, 3, 5, 1).expand(-1, -1, -1, 8),
    ):
        want = torch.autograd.grad(y, leaves, dy.double(), retain_graph=True)
        got = backwards.backward(dy, x, w, offset, cos, sin, style, rstd, (True, True))
        assert all(distance(g, e) < 1e-5 for g, e in zip(got, want, strict=True))
        assert got[0].stride() == x.stride()


@runs_kernels
def test_plain_rstd_is_that_of_the_kernel():
    """In one order: a backward after an inlined forward reads the plain one."""
    pattern = FUSION_RULES["norm_rotary"]
    for x, table in (
        (as_in_models(2, 5, 3, 8), None), (randn(2, 5, 3, 8), (1, 5, 1, 8)), (randn(5, 8), None),
    ):  # fmt: skip
        args = of(x, table=table)
        _, rstd = pattern.launched(args, save=True)
        plain = pattern.saved_fn(*args)
        assert rstd.shape == plain.shape and distance(rstd, plain) < 1e-6


@runs_kernels
def test_gradients_repeat():
    args = of(as_in_models(4, 50, 3, 16))
    y, rstd = FUSION_RULES["norm_rotary"].launched(args, save=True)
    dy, (x, w, offset, _, cos, sin, style) = randn(*y.shape), args
    first, second = (
        backwards.backward(dy, x, w, offset, cos, sin, style, rstd, (True, True)) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@runs_kernels
@pytest.mark.parametrize("of_x", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_mixed_dtypes(of_x, other):
    """As under autocast, where x alone is in 16 bits."""
    args = of(as_in_models(2, 5, 3, 8, dtype=of_x), dtype=other)
    pattern = FUSION_RULES["norm_rotary"]
    assert pattern.guard_fn(*args) is None
    y, rstd = pattern.launched(args, save=True)
    eager = pattern.reference(*args)
    assert (y.dtype, y.stride()) == (eager.dtype, eager.stride())
    want = pattern.reference(*map(exact, args))
    assert distance(y, want) < 2 * max(CLOSE[of_x], CLOSE[other])
    dx, dw = backwards.backward(y, *args[:3], *args[4:], rstd, (True, True))
    assert (dx.dtype, dw.dtype) == (of_x, other)


@runs_kernels
def test_as_near_to_fp64_as_the_model():
    """Which rounds what it has normalised, the weighted, and each product."""
    x, w, _, eps, cos, sin, style = args = of(as_in_models(2, 64, 4, 64, torch.float16), None)
    h = x.float()
    n = w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).half()
    n1, n2 = n.chunk(2, -1)
    model = n * cos + torch.cat((-n2, n1), -1) * sin
    want = FUSION_RULES["norm_rotary"].reference(*map(exact, args))
    (y, _) = FUSION_RULES["norm_rotary"].launched(args, save=False)
    assert distance(y, want) < 0.7 * distance(model, want)


def test_refusals():
    guard = FUSION_RULES["norm_rotary"].guard_fn
    x, w, offset, eps, cos, sin, style = of(as_in_models(2, 5, 3, 8))
    per_head = randn(3, 5, 8)
    for changed, sentence in [
        (dict(x=x.double()), "x is torch.float64"),
        (dict(cos=cos.double()), "cos is torch.float64"),
        (dict(weight=w.double()), "weight is torch.float64"),
        (dict(weight=randn(16)[::2]), "strides (2,) is not a plain vector"),
        (dict(cos=per_head), "cos and sin differ from head to head"),
        (dict(sin=per_head), "cos and sin differ from head to head"),
        (dict(cos=randn(5, 4)), "cos with shape (5, 4) may or may not broadcast"),
        (dict(sin=randn(5, 1)), "sin has 1 columns and a head of x 8"),
        (dict(sin=randn(8, 5).t()), "the elements of a row of sin are 5 apart"),
        (dict(cos=randn(1, 1, 1, 5, 8)), "cos has 5 dimensions and x 4"),
        (dict(x=randn(2, 3, 8, 5).mT), "the elements of a row are 5 apart"),
        (dict(x=x[None]), "x has 5 dimensions; the kernel takes up to 4"),
        (dict(x=x[..., :7]), "a head of 7 is not even"),
        (dict(x=randn(2, 3, 5, 514)), "a head of 514 is not even or longer than 512"),
        (dict(x=x[:, :0]), "the number of heads is dynamic or 0"),
    ]:
        args = dict(x=x, weight=w, offset=offset, eps=eps, cos=cos, sin=sin, style=style) | changed
        answer = guard(*args.values())
        assert isinstance(answer, Reject) and sentence in answer.reason, (answer, sentence)


def test_symbolic_sizes():
    """Batches and positions may change from call to call, heads may not. No size is asked for."""
    pattern = FUSION_RULES["norm_rotary"]
    env, (sizes, w) = symbolic(randn(4, 7, 3), randn(8))
    with w.fake_mode:
        x = (sizes[..., None] * w).transpose(1, 2)
        table = x[:, :1]
    before = len(env.guards)
    refused = pattern.guard_fn(x, w, None, 1e-6, table, table, "half")
    assert refused.reason == "the number of heads is dynamic or 0" and len(env.guards) == before
    answers = []

    def backend(gm, inputs):
        collector = Collector({"fusion.gate": "always", "fusion.only": "norm_rotary"})
        out = collector(gm, inputs)
        answers.append(collector.report)
        return out

    def model(x, w, cos, sin):
        q = x.view(*x.shape[:-1], 3, 8).transpose(1, 2)
        return pattern.reference(q, w, None, 1e-6, cos, sin, "half")

    torch.compile(model, backend=backend, dynamic=True)(
        randn(4, 7, 24), randn(8), randn(7, 8), randn(7, 8)
    )
    assert [len(r.fused) for r in answers] == [1], answers


def test_unmeasured():
    args = of(as_in_models(2, 5, 3, 8))
    for training in (False, True):
        answer = FUSION_RULES["norm_rotary"].worthwhile_fn(*args, training)
        assert isinstance(answer, Unmeasured)


# Whole models


SHORT = dict(CAUSAL, head_dim=16)
QWEN3 = Tiny(hugging_face("Qwen3ForCausalLM", "Qwen3Config", **SHORT), tokens, 0)
GEMMA3 = Tiny(
    hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", **SHORT, sliding_window=8), tokens, 0
)
WHOLE = {"qwen3": QWEN3, "gemma3": GEMMA3}
# beside those of the heads: two a layer, or four, and one more
NORMS = {"qwen3": 5, "gemma3": 9}
ALONE = 4  # those of queries and keys, which rms_norm takes by itself


def build(name):
    pytest.importorskip(
        "transformers", reason="the models come from transformers: pip install -e '.[bench]'"
    )
    model = WHOLE[name].model()
    for key, p in model.named_parameters():  # as after training: not the same for every element
        if key.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(p, std=0.5)
    return model


def step(model, inputs, train):
    with contextlib.nullcontext() if train else torch.no_grad():
        model.zero_grad(set_to_none=True)
        output = model(**inputs)
    if not train:
        return [result(output)]
    loss(output).backward()
    return [result(output).detach(), *(p.grad for p in model.parameters())]


@runs_kernels
@pytest.mark.parametrize(
    "name, train, dynamic",
    [
        ("qwen3", False, True),
        ("gemma3", True, False),
        only_full("qwen3", True, False),
        only_full("gemma3", False, True),
    ],
)
def test_queries_and_keys(name, train, dynamic):
    """Each is one site, and its kernels give the model's results and gradients."""
    model, inputs = build(name), WHOLE[name].example(2, 16)
    collector = Kernels({"fusion.gate": "always", "fusion.only": "norm_rotary"})
    compiled = torch.compile(model, backend=collector)
    for shorter in [WHOLE[name].example(3, 12)] * dynamic:
        step(compiled, shorter, train)
    got = step(compiled, inputs, train)  # after another size with symbols
    sites = [s for s in collector.report.sites if s.pattern == "norm_rotary"]
    assert len(sites) == 4 * (1 + dynamic) and all(s.fused for s in sites), collector.report
    assert all(bool(s.backward) == train for s in sites)
    eager, want = step(model, inputs, train), step(copy.deepcopy(model).double(), inputs, train)
    for g, e, w in zip(got, eager, want, strict=True):
        assert joint(g, w) <= 2 * joint(e, w) + 2e-6


@pytest.mark.parametrize(
    "name, train",
    [("qwen3", False), ("gemma3", True), only_full("qwen3", True), only_full("gemma3", False)],
)
def test_larger_than_its_parts(name, train):
    """Where norm_rotary is not wanted, its norms and rotations are sites again."""
    model, inputs = build(name), WHOLE[name].example(2, 16)

    def found(*names):
        with contextlib.nullcontext() if train else torch.no_grad():
            report = collect(model, options={"fusion.only": names}, kwargs=inputs).report
        sites = [s for s in report.sites if s.pattern in names and not s.covered]
        return {n: sum(s.pattern == n and s.fused for s in sites) for n in names}

    assert found("norm_rotary", "rms_norm", "rotary") == dict(
        norm_rotary=4, rms_norm=NORMS[name], rotary=0
    )
    assert found("rms_norm", "rotary") == dict(rms_norm=NORMS[name] + ALONE, rotary=4)


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def norm(x, w, dim=-1):
    return w * (x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6))


def told(fn, *args):
    """Of a function, what became of norm_rotary: fused, or a reason; None where it is not found."""
    report = collect(fn, *args, options={"fusion.only": "norm_rotary"}).report
    sites = [s for s in report.sites if s.pattern == "norm_rotary"]
    return None if not sites else [True if s.fused else s.reason for s in sites]


def test_what_is_fused():
    x, w, cos, sin = randn(2, 5, 24), randn(8), randn(2, 5, 8), randn(2, 5, 8)

    def heads(x):
        return x.view(2, 5, 3, 8)

    def rotated(n, cos, sin, other=None):
        other = n if other is None else other
        return n * cos[:, None] + rotate_half(other) * sin[:, None]

    def before(x, w, cos, sin):
        return rotated(norm(heads(x), w).transpose(1, 2), cos, sin)

    def after(x, w, cos, sin):
        return rotated(norm(heads(x).transpose(1, 2), w), cos, sin)

    def positions_first(x, w, cos, sin):
        n = norm(heads(x), w)
        return (n * cos[:, :, None] + rotate_half(n) * sin[:, :, None]).transpose(1, 2)

    def read_elsewhere(x, w, cos, sin):
        n = norm(heads(x).transpose(1, 2), w)
        return rotated(n, cos, sin), n

    def turned_back(x, w, cos, sin):
        n = norm(heads(x), w).transpose(1, 2)
        return n * cos[:, None] - rotate_half(n) * sin[:, None]

    def of_all_heads(x, w, cos, sin):
        return rotated(norm(x, w.repeat(3)).view(2, 5, 3, 8).transpose(1, 2), cos, sin)

    def over_positions(x, w, cos, sin):
        return rotated(norm(heads(x), w, 1).transpose(1, 2), cos, sin)

    def of_two(x, w, cos, sin):
        n, m = (norm(heads(t), w).transpose(1, 2) for t in (x, x.sin()))
        return rotated(n, cos, sin, m)

    for fn in (before, after, positions_first):
        assert told(fn, x, w, cos, sin) == [True], fn
        y = with_kernels(
            collect(fn, x, w, cos, sin, options={"fusion.only": "norm_rotary"}).graphs[0]
        )(x, w, cos, sin)[0]
        want = fn(x, w, cos, sin)
        assert y.stride() == want.stride()
        torch.testing.assert_close(y, want)
    (reason,) = told(read_elsewhere, x, w, cos, sin)
    assert "used elsewhere too" in reason
    for fn in (turned_back, of_all_heads, over_positions, of_two):
        assert told(fn, x, w, cos, sin) is None, fn


@pytest.mark.parametrize(
    "case, training, timed",
    [
        ((8, 1024, 8, 128), True, True),
        ((8, 1024, 8, 128), False, False),
        ((4, 1024, 8, 128), True, False),
        ((8, 1024, 16, 64), True, False),
    ],
)
def test_only_what_was_timed_is_taken_unmeasured(case, training, timed):
    b, n, h, d = case
    x = torch.empty(b, n, h, d, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    args = x, x[0, 0, 0], None, 1e-6, x[0, 0], x[0, 0]
    worthwhile = FUSION_RULES["norm_rotary"].worthwhile_fn
    assert (worthwhile(*args, "half", training) is None) == timed
    assert worthwhile(*args, "interleaved", training) is not None
    assert worthwhile(x.float(), *args[1:], "half", training) is not None


@product(
    first=list(itertools.permutations(range(3))),
    second=list(itertools.permutations(range(3))),
    inside=["norm", "rotation"],
)
def test_one_value_in_two_orders_is_two_values(first, second, inside):
    """All dimensions are of one size, so that nothing but the order tells them apart."""
    x, w, cos, sin = randn(4, 4, 4, 8), randn(8), randn(4, 8), randn(4, 8)

    def fn(x, w, cos, sin):
        if inside == "norm":
            n, m = (norm(x, w).permute(*order, 3) for order in (first, second))
        else:
            n, m = (norm(x.permute(*order, 3), w) for order in (first, second))
        return n * cos + rotate_half(m) * sin

    found = told(fn, x, w, cos, sin)
    # as a permutation of what was normalised, only heads and positions that change places are known
    known = inside == "rotation" or first in ((0, 1, 2), (0, 2, 1))
    assert found == ([True] if first == second and known else None)


@pytest.mark.parametrize("turned", [False, True], ids=["as normalised", "heads and positions swap"])
@pytest.mark.parametrize("of", ["the same", "another value", "another order", "no order"])
def test_the_mean_is_of_what_is_normalised(of, turned):
    x, z, w = randn(4, 4, 4, 8), randn(4, 4, 4, 8), randn(8)
    cos, sin = randn(4, 8), randn(4, 8)

    def fn(x, z, w, cos, sin):
        h = x.permute(1, 0, 2, 3)
        others = {
            "the same": h,
            "another value": z.permute(1, 0, 2, 3),
            "another order": x.permute(1, 2, 0, 3),
            "no order": x,
        }
        n = w * (h * torch.rsqrt(others[of].pow(2).mean(-1, keepdim=True) + 1e-6))
        n = n.transpose(1, 2) if turned else n
        return n * cos + rotate_half(n) * sin

    assert told(fn, x, z, w, cos, sin) == ([True] if of == "the same" else None)
