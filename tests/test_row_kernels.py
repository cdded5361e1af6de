"""Kernels that work on rows: softmax, norms with a residual, cross entropy, per-token quantisation.
Against fp64.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import backward as norms_backward
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.norm import forward_split as norms_split
from fusion_backend.kernels.norm import l2_norm
from fusion_backend.kernels.quantize import quantize
from fusion_backend.kernels.softmax import backward as softmax_backward
from fusion_backend.kernels.softmax import forward as softmax
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from tests.selection import product
from tests.test_kernels import (  # noqa: F401  (fixtures)
    CLOSE,
    DEVICE,
    FLOATS,
    distance,
    exact,
    few_or_many,
    randn,
    runs_kernels,
)

pytestmark = pytest.mark.usefixtures("poisoned_empties")
SHAPES = [(1, 1), (5, 1), (7, 100), (3, 2049), (2, 3, 5, 33), (100,)]
SEED = torch.tensor([4567890123456789012], device=DEVICE)
PART = (128, 1, 4)  # a configuration that walks through rows longer than 128


def check(name: str, *args, kernel=None, needs=None, factor: float = 5, config=None, module=None):
    """Results and gradients of a pattern's kernels against its reference in fp64."""
    pattern = FUSION_RULES[name]
    assert pattern.guard_fn(*args) is None
    many = lambda out: out if isinstance(out, tuple) else (out,)  # noqa: E731
    save = [True] if pattern.saves else []
    seed = dict.fromkeys(pattern.seed_arguments, SEED)
    reference = lambda *args: (pattern.seeded_fn or pattern.reference)(*args, *seed.values())  # noqa: E731
    got = many(pattern.kernel_fn(*args, *seed.values(), *save) if kernel is None else kernel(*args))
    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
    tensors = [p.name for p in pattern.params if p.tensor]
    floats = [k for k in tensors if inputs[k] is not None and inputs[k].is_floating_point()]
    needs = {k: k in floats and (needs is None or k in needs) for k in tensors}
    leaves = {k: exact(v).requires_grad_(needs[k]) if k in floats else v for k, v in inputs.items()}
    want = many(reference(*leaves.values()))
    eager = many(reference(*args))
    for g, w, e in zip(got, want, eager, strict=False):
        assert (g.dtype, g.shape, g.stride()) == (e.dtype, e.shape, e.stride())
        if w.numel() and w.is_floating_point():
            assert distance(g, w) <= CLOSE[g.dtype]
    if pattern.backward_fn is None or not any(needs.values()):
        return got
    grads = [randn(*w.shape, dtype=e.dtype) for w, e in zip(want, eager, strict=True)]
    wanted = [k for k in tensors if needs[k]]
    smooth = [(w, g.double()) for w, g in zip(want, grads, strict=True) if w.requires_grad]
    gradients = dict(zip(wanted, torch.autograd.grad([w for w, _ in smooth],
        [leaves[k] for k in wanted],
                                                     [g for _, g in smooth]),
                                                     strict=True))  # fmt: skip
    result = got[: pattern.outputs] if pattern.outputs > 1 else got[0]
    kept = dict(zip(pattern.saves, got[pattern.outputs :], strict=False))
    saved = SimpleNamespace(**inputs, **seed, **kept, result=result, needs=needs)
    found = dict(zip(tensors, many(pattern.backward_fn(saved, *grads)), strict=True))
    found |= {
        k: grads[other] if other in (0, 1) else found[other]
        for k, other in pattern.backward_same.items()
    }
    for k in wanted:
        assert found[k].shape == inputs[k].shape and found[k].dtype == inputs[k].dtype
        assert distance(found[k], gradients[k]) <= factor * CLOSE[inputs[k].dtype], k
    return got


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape, dtype):
    check("softmax", randn(*shape, dtype=dtype), None, None, None, None)
    check("softmax", randn(*shape, dtype=dtype), 0.125, randn(shape[-1], dtype=dtype), None, None)


MASKS = [
    (2, 3, 2, 17),
    (2, 1, 2, 17),
    (3, 1, 17),
    (2, 17),
    (17,),
    (2, 1, 1, 17),
    (2, 1),
    (1, 1, 1, 1),
]


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_softmax_of_masks_that_broadcast(mask, walks, monkeypatch):
    if walks:
        for module in (softmax, softmax_backward):
            monkeypatch.setattr(module, "row_config", lambda n, itemsize: (8, 1, 4))
    x = randn(2, 3, 2, 17)
    # a number added to a whole row changes nothing: its gradient is rounding alone
    constant = mask[-1] == 1
    check("softmax", x, 0.5, randn(*mask), None, None, needs=["x"] if constant else None)
    check("softmax", x, 0.5, randn(*mask), None, None, needs=[] if constant else ["mask"])
    check("softmax", x, None, None, randn(*mask) > 0.3, -1e9)
    # what is dropped has no gradient, whatever its weight
    check("softmax", x, 2.0, None, randn(*mask) > 0.3, 0.7)


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
def test_softmax_of_nan_and_infinity(walks, monkeypatch):
    if walks:
        for module in (softmax, softmax_backward):
            monkeypatch.setattr(module, "row_config", lambda n, itemsize: (8, 1, 4))
    x = randn(6, 20)
    x[0], x[1, 3], x[2, 5], x[3, 7], x[4, 2:] = -math.inf, -math.inf, math.nan, math.inf, -math.inf
    kernel = FUSION_RULES["softmax"].kernel_fn
    torch.testing.assert_close(
        kernel(x, None, None, None, None), torch.softmax(x, -1), equal_nan=True
    )
    every = torch.ones(6, 1, dtype=torch.bool, device=x.device)
    assert kernel(x, None, None, every, -math.inf).isnan().all()


@runs_kernels
def test_softmax_of_padded_rows_and_none():
    check("softmax", randn(7, 128)[:, :100], 0.5, None, None, None)
    check("softmax", randn(4, 3, 100).transpose(0, 1), None, None, None, None)
    assert FUSION_RULES["softmax"].kernel_fn(randn(0, 5), None, None, None, None).shape == (0, 5)


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("eps", [None, 1e-12])
@pytest.mark.parametrize("shape", [(5, 2), *SHAPES[2:]])
def test_l2_norm(shape, eps, dtype):
    check("l2_norm", randn(*shape, dtype=dtype), eps)


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
def test_l2_norm_of_layouts_and_long_rows(walks, monkeypatch):
    if walks:
        monkeypatch.setattr(l2_norm, "row_config", lambda n, itemsize: (16, 1, 4))
    for x in (
        randn(7, 128)[:, :100],
        randn(4, 3, 100).transpose(0, 1),
        randn(1, 33).expand(5, 33),
        randn(1, 130),
    ):
        check("l2_norm", x, 1e-12)
    assert FUSION_RULES["l2_norm"].kernel_fn(randn(0, 5), None).shape == (0, 5)


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
def test_l2_norm_that_eps_holds_up(walks, monkeypatch):
    """Rows shorter than eps are divided by it, and their gradient too; zeros, NaN and infinity as
    in torch.
    """
    if walks:
        monkeypatch.setattr(l2_norm, "row_config", lambda n, itemsize: (16, 1, 4))
    x = randn(6, 40)
    x[0] *= 1e-3
    check("l2_norm", x, 0.5)
    check("l2_norm", torch.full((3, 20), 1e-14), 1e-12)
    x[1], x[2, 3], x[3, 4] = 0.0, math.nan, math.inf
    for eps in (None, 1e-12):
        got, want = (
            FUSION_RULES["l2_norm"].kernel_fn(x, eps),
            FUSION_RULES["l2_norm"].reference(x, eps),
        )
        torch.testing.assert_close(got, want, equal_nan=True)
    leaf, dy = x[:2].clone().requires_grad_(), randn(2, 40)
    (want,) = torch.autograd.grad(FUSION_RULES["l2_norm"].reference(leaf, 1e-12), leaf, dy)
    torch.testing.assert_close(l2_norm.backward(dy, x[:2], 1e-12), want)


@runs_kernels
def test_softmax_of_programs_that_walk_through_rows():
    x, mask = randn(21, 100), randn(100)  # 11 pairs of rows for 4 programs
    got = softmax.forward(x, 0.5, mask, None, None, Config(128, 2, 4, 1, 2))
    torch.testing.assert_close(got, torch.softmax(x * 0.5 + mask, -1))


NORMS = {
    "rms_norm": lambda x, r, w, b: (x, w, None, 1e-5),
    "add_rms_norm": lambda x, r, w, b: (x, r, w, 1.0, 1e-5),
    "add_layer_norm": lambda x, r, w, b: (x, r, w, b, 1e-5),
}


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@product(name=NORMS, shape=[(7, 100), (3, 2049), (2, 3, 33), (100,)], dtype=FLOATS)
def test_norms(name, shape, dtype):
    x, r = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    check(name, *NORMS[name](x, r, randn(shape[-1], dtype=dtype), randn(shape[-1], dtype=dtype)))


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout(shape, dtype):
    x, r, w, b = (randn(*s, dtype=dtype) for s in (shape, shape, shape[-1:], shape[-1:]))
    for p in (0.1, 0.75, 1.0):
        check("dropout_add", x, r, p)
        if shape[-1] > 1:  # of one number the norm is 0, its gradient rounding alone
            check("dropout_add_layer_norm", x, r, w, b, p, 0.05)


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("needs", ["x", "residual", "weight", "bias"])
def test_dropout_computes_only_wanted_gradients(needs):
    x, r, w, b = randn(7, 100), randn(7, 100), randn(100), randn(100)
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5, needs=[needs])
    if needs in ("x", "residual"):
        check("dropout_add", x, r, 0.3, needs=[needs])


@runs_kernels
def test_dropout_of_long_and_padded_rows(monkeypatch):
    x, r, w, b = randn(5, 1011)[:, :1001], randn(5, 1001), randn(1001), randn(1001)
    check("dropout_add", x, r, 0.3)
    check("dropout_add", r, x, 0.3)
    check("dropout_add", r[:1].expand(5, 1001), r, 0.3)
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5)
    # walks through rows
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(1024, 1, 4, 1, 3, True))
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5)
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(*PART))
    monkeypatch.setattr(norms_backward, "MAX_HELD_BACKWARD", 128)
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5)


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("needs", [["x"], ["weight"], ["residual"]])
def test_add_rms_norm_computes_only_wanted_gradients(needs):
    x, r, w = randn(7, 100), randn(7, 100), randn(100)
    pattern = FUSION_RULES["add_rms_norm"]
    # the op asks for x in its place
    wanted = {"x": needs[0] in ("x", "residual"), "weight": "weight" in needs}
    y, h, rstd = pattern.kernel_fn(x, r, w, None, 1e-5, True)
    saved = SimpleNamespace(
        x=x, residual=r, weight=w, offset=None, eps=1e-5, rstd=rstd, result=(y, h), needs=wanted
    )
    d, none, dw = pattern.backward_fn(saved, randn(7, 100), randn(7, 100))
    assert none is None and (d is not None) == wanted["x"] and (dw is not None) == wanted["weight"]


@runs_kernels
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_long_rows(name, monkeypatch):
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(*PART))
    monkeypatch.setattr(norms_backward, "MAX_HELD_BACKWARD", 128)
    x, r, w, b = randn(5, 1001), randn(5, 1001), randn(1001), randn(1001)
    check(name, *NORMS[name](x, r, w, b))


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*NORMS, "layer_norm", "dropout_add_layer_norm"])
@pytest.mark.parametrize("n", [300, 384])
def test_norms_of_rows_that_are_split(n, name, dtype, monkeypatch):
    """Few long rows: pieces of 128, the last of which may be shorter, padded rows, and far from
    zero.
    """
    monkeypatch.setattr(norms_split, "few_long_rows", lambda rows, n, device: True)
    monkeypatch.setattr(norms_split, "PIECE", 128)
    x, r, w, b = (
        randn(5, n + 8, dtype=dtype)[:, :n],
        randn(5, n, dtype=dtype),
        *randn(2, n, dtype=dtype),
    )
    others = {"layer_norm": (x, w, b, 1e-5), "dropout_add_layer_norm": (x, r, w, b, 0.3, 1e-5)}
    check(name, *(others[name] if name in others else NORMS[name](x, r, w, b)))
    if name == "layer_norm":
        check(name, x, None, None, 1e-5)
        far = randn(3, n) + 1000
        got = FUSION_RULES[name].kernel_fn(far, None, None, 1e-5, False)[0]
        assert distance(got, F.layer_norm(far.double(), (n,))) < 1e-4
        far[0, 1], far[1, 2] = math.nan, math.inf
        got = FUSION_RULES[name].kernel_fn(far, None, None, 1e-5, False)[0]
        torch.testing.assert_close(
            got, F.layer_norm(far, (n,)), equal_nan=True, rtol=1e-3, atol=1e-3
        )


def test_only_few_long_rows_are_split():
    few = norms_split.few_long_rows
    device = torch.device("cpu")  # of four multiprocessors
    assert few(3, 131072, device) and not few(4, 131072, device) and not few(3, 32768, device)


@runs_kernels
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_programs_that_walk_through_rows(name, early, monkeypatch):
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(128, 2, 4, 1, 2, early))
    x, r, w, b = randn(21, 100), randn(21, 100), randn(100), randn(100)  # 11 pairs for 4 programs
    check(name, *NORMS[name](x, r, w, b))


@runs_kernels
@pytest.mark.parametrize("name", [*NORMS, "dropout_add_layer_norm"])
def test_few_rows_have_the_gradients_of_many(name):
    """Rows and columns that do not fill their blocks: the gradients of one kernel are
    those of two.
    """
    x, r, w, b, dy = randn(70, 130), randn(70, 130), randn(130), randn(130), randn(70, 130)
    args = (x, r, w, b, 0.3, 1e-5) if name.startswith("dropout") else NORMS[name](x, r, w, b)
    check(name, *args)
    norm = norms.Norm(w, b, None, 1e-5, True)
    _, h, mean, rstd = norms.forward(x, r, norm, True)
    for needs in itertools.product([False, True], repeat=3):
        one, two = (norms_backward.backward(dy, r, h, mean, rstd, norm, needs, config=how)
                    for how in (None, Config(256, 2, 4, 1, 2)))  # fmt: skip
        for got, want, need in zip(one, two, needs, strict=True):
            assert (got is None) == (want is None) == (not need)
            if need:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@runs_kernels
def test_rms_norm_without_a_weight():
    check("rms_norm", randn(7, 100), None, None, 1e-5)


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "reduction, smoothing", list(itertools.product(("mean", "sum", "none"), (0.0, 0.1)))
)
@pytest.mark.parametrize("v", [1, 100, 9001])
def test_cross_entropy(v, reduction, smoothing, dtype):
    target = torch.arange(5) * 7 % v
    target[1] = -100
    for upcast in ("none", "fp32"):
        if v > 1:  # of one class the loss is nothing but rounding
            check(
                "cross_entropy",
                randn(5, v, dtype=dtype),
                target,
                -100,
                smoothing,
                reduction,
                upcast,
            )


@runs_kernels
def test_cross_entropy_as_torch_has_it():
    kernel = FUSION_RULES["cross_entropy"].kernel_fn
    x, none = randn(3, 10), torch.full((3,), -100)
    assert kernel(x, none, -100, 0.0, "mean", "none", True)[0].isnan()
    assert kernel(x, none, -100, 0.0, "sum", "none", True)[0] == 0
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
        numbers = dict(ignore_index=-100, smoothing=smoothing, reduction=reduction, upcast="none")
        loss, lse, label = kernel(x, none, *numbers.values(), True)
        saved = SimpleNamespace(logits=x, target=none, lse=lse, label=label, **numbers)
        assert (
            FUSION_RULES["cross_entropy"].backward_fn(saved, torch.ones_like(loss))[0].eq(0).all()
        )
    some, numbers = (
        torch.tensor([1, -100, 2]),
        dict(ignore_index=-100, smoothing=0.0, reduction="none", upcast="none"),
    )
    loss, lse, label = kernel(x, some, *numbers.values(), True)
    saved = SimpleNamespace(logits=x, target=some, lse=lse, label=label, **numbers)
    d = FUSION_RULES["cross_entropy"].backward_fn(saved, torch.tensor([1.0, math.inf, math.nan]))[0]
    assert d[0].isfinite().all() and d[1].eq(0).all() and d[2].isnan().all()
    x[0], x[1, 2], x[2, 3] = -math.inf, math.nan, math.inf
    target = torch.tensor([1, 2, 4])
    got = kernel(x, target, -100, 0.0, "none", "none", True)[0]
    torch.testing.assert_close(got, F.cross_entropy(x, target, reduction="none"), equal_nan=True)
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernel(x, torch.tensor([1, 2, 10]), -100, 0.0, "none", "none", True)


@runs_kernels
@product(shape=[*SHAPES, (0, 8)], eps=[None, 1e-5, 0.05], dtype=FLOATS)
def test_quantize_per_token(shape, eps, dtype):
    """The integers and scales of eager fp32; of a rounded scale, those of that scale."""
    x = randn(*shape, dtype=dtype) * 3
    for config in (None, PART):
        kernel = FUSION_RULES["quantize_per_token"].kernel_fn
        if config is not None and shape[-1] > config[0]:
            kernel = lambda *args: quantize.forward(args[0], None, None, None, args[1], PART)  # noqa: E731
        q, scale = kernel(x, eps)
        want, exactly = FUSION_RULES["quantize_per_token"].reference(x.float(), eps)
        assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, exactly.shape)
        torch.testing.assert_close(
            scale.float(), exactly, rtol=0 if dtype == torch.float32 else 1e-2, atol=0
        )
        if dtype != torch.float32:
            want = torch.clamp(torch.round(x.float() / scale.float()), -128, 127).to(torch.int8)
        assert torch.equal(q, want)


@runs_kernels
@product(
    shape=[(1, 1), (7, 100), (3, 300), (2, 3, 5, 33), (100,), (2, 128, 5), (0, 8)],
    scaled=[(True, None, None), (True, 1.0, 0.05), (False, None, 1e-5)],
    dtype=FLOATS,
)
def test_rms_norm_quantize(shape, scaled, dtype):
    """Scale within its dtype; the integers of that scale, but where the quotient is half way
    between two.
    """
    weight, offset, eps = scaled
    x = (
        (randn(2 * shape[0], *shape[1:], dtype=dtype) * 3)[::2]
        if len(shape) == 2
        else randn(*shape, dtype=dtype)
    )
    w = randn(shape[-1], dtype=dtype) if weight else None
    args = x, w, offset, 1e-6
    assert FUSION_RULES["rms_norm_quantize"].guard_fn(*args, eps) is None
    y = FUSION_RULES["rms_norm"].reference(exact(x), exact(w), offset, 1e-6)
    for config in (None, PART) if shape[-1] > PART[0] else (None,):
        q, scale = quantize.forward(*args, eps, config)
        assert (q.dtype, q.shape, scale.dtype, scale.shape) == (
            torch.int8,
            x.shape,
            dtype,
            (*x.shape[:-1], 1),
        )
        want = (y.abs().amax(-1, keepdim=True) / 127).clamp(min=eps or 0)
        torch.testing.assert_close(
            scale.double(), want, rtol=3e-6 if dtype == torch.float32 else 1e-2, atol=0
        )
        quotients = (y / scale.double()).clamp(max=127)
        assert ((q - quotients).abs() <= 0.5 + 1e-4).all()


@runs_kernels
def test_rms_norm_quantize_of_nan_infinity_and_zero():
    x = randn(5, 40)
    x[1, 3], x[2, 4], x[3] = math.nan, math.inf, 0.0
    args = x, None, None, 1e-6, None
    q, scale = FUSION_RULES["rms_norm_quantize"].kernel_fn(*args)
    want, exactly = FUSION_RULES["rms_norm_quantize"].reference(*args)
    torch.testing.assert_close(scale, exactly, equal_nan=True)
    assert not q[1:4].any() and not want[1:4].any()
    assert (q[[0, 4]] - want[[0, 4]]).abs().max() <= 1 and q[0].any()


@runs_kernels
def test_quantize_per_token_of_tiny_numbers():
    for power in (-20, -60, -100, -120):
        x = randn(4, 60) * 2.0**power
        got = FUSION_RULES["quantize_per_token"].kernel_fn(x, None)
        for g, w in zip(got, FUSION_RULES["quantize_per_token"].reference(x, None), strict=True):
            assert torch.equal(g, w)


@runs_kernels
def test_quantize_per_token_of_nan_and_zero():
    x = randn(3, 40)
    x[1, 3], x[2] = math.nan, 0.0
    q, scale = FUSION_RULES["quantize_per_token"].kernel_fn(x, None)
    torch.testing.assert_close(scale, x.abs().amax(-1, keepdim=True) / 127, equal_nan=True)
    assert not q[1:].any()


def test_refusals():
    x, w = randn(4, 6), randn(6)
    for name, args, sentence in [
        (
            "softmax",
            (randn(2, 1, 1, 4, 6), None, randn(6), None, None),
            "5; the kernel takes up to 4",
        ),
        ("softmax", (x.t(), None, None, None, None), "the elements of a row are"),
        ("add_rms_norm", (x, randn(6), w, None, 1e-5), "x has shape (4, 6) and residual (6,)"),
        ("rms_norm", (x, randn(4, 6), None, 1e-5), "is not a plain vector"),
        ("dropout_add", (x, randn(6), 0.1), "x has shape (4, 6) and residual (6,)"),
        ("dropout_add", (randn(), randn(), 0.1), "x is a single number"),
        ("dropout_add_layer_norm", (x, x, w.half(), w, 0.1, 1e-5), "weight is torch.float16"),
        (
            "cross_entropy",
            (x, torch.zeros(8, dtype=torch.long)[::2], -100, 0.0, "mean", "none"),
            "target has shape",
        ),
        ("quantize_per_token", (x.double(), None), "float64"),
    ]:
        answer = FUSION_RULES[name].guard_fn(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason, answer


@runs_kernels
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_a_result_that_nobody_uses_has_no_gradient(name, used, monkeypatch):
    """Zeros would be written and read, as much memory as the gradient that there is."""
    pattern, seen = FUSION_RULES[name], []
    own = pattern.backward_fn
    monkeypatch.setattr(
        pattern, "backward_fn", lambda saved, *grads: (seen.append(grads), own(saved, *grads))[1]
    )
    x, residual, w = (randn(*shape).requires_grad_() for shape in ((3, 40), (3, 40), (40,)))
    args = (x, residual, w, None, 1e-5) if name == "add_layer_norm" else (x, residual, w, 0.0, 1e-5)
    weights = [randn(3, 40) for _ in used]
    op = operator_of(pattern)
    mine = op.overload(*op.flatten(dict(zip((p.name for p in pattern.params), args, strict=True))))
    found, want = (
        torch.autograd.grad(
            [results[i] for i in used], (x, residual, w), weights, materialize_grads=True
        )
        for results in (mine, pattern.reference(*args))
    )
    torch.testing.assert_close(found, want)
    ((dy, dh),) = seen
    assert (dh is None) == (1 not in used) and dy is not None and (0 in used or not dy.any())
