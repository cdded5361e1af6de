"""Kernels that work on channels: batch and group normalisation, bias and activation.
Against fp64.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import channels
from fusion_backend.kernels.norm import group_norm as groups
from fusion_backend.kernels.norm import group_norm_backward as groups_backward
from fusion_backend.kernels.norm import group_norm_rows_backward as rows_backward
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import fused_nodes, rewritten, with_kernels
from tests.kernel_checks import FLOATS, check, distance, randn, runs_kernels, symbolic
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties")
LAST = torch.channels_last
ACTS = ["relu", "gelu", "gelu_tanh", "silu", "tanh", "exp_relu"]


def statistics(c, dtype=torch.float32):
    return (
        randn(c, dtype=dtype),
        (randn(c) ** 2 + 0.5).to(dtype),
        randn(c, dtype=dtype),
        randn(c, dtype=dtype),
    )


# batch_norm


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("act", ["identity", "relu"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 33), (3, 5, 1), (3, 7, 2049), (2, 33, 5, 3), (2, 3, 2, 3, 4), (0, 4, 5)]
)
def test_batch_norm(shape, act, dtype):
    check("batch_norm", randn(*shape, dtype=dtype), *statistics(shape[1], dtype), 1e-5, act)


@runs_kernels
@pytest.mark.parametrize("affine", list(itertools.product([True, False], repeat=2)))
def test_batch_norm_without_weight_or_bias(affine):
    mean, var, *rest = statistics(6)
    check("batch_norm", randn(4, 6, 5), mean, var,
        *(t if have else None for t, have in zip(rest, affine, strict=True)),
          1e-3, "identity")  # fmt: skip


@runs_kernels
def test_batch_norm_layouts():
    for x in (
        randn(2, 6, 5, 3).contiguous(memory_format=LAST),
        randn(2, 5, 3, 6).permute(0, 3, 1, 2),
        randn(4, 128)[:, :100],
        randn(1, 6).expand(5, 6),
    ):
        check("batch_norm", x, *statistics(x.shape[1]), 1e-5, "relu")
    for planes in (False, True):
        x = randn(2, 40, 9, 9, dtype=torch.bfloat16)
        x = x if planes else x.contiguous(memory_format=LAST)
        affine = channels.Affine(*statistics(40), 1e-5)  # fp32 statistics of a bf16 tensor
        want = F.batch_norm(x.double(), *(t.double() for t in affine[:4]), eps=1e-5)
        vector = ((128, 0, 1), (4096, 0, 4)) if planes else ()
        # more than one tile across, and padding
        for how in ((16, 4, 1), (64, 1, 4), (128, 2, 4), *vector):
            got = channels.forward(x, 1, affine, "identity", how)
            assert got.stride() == x.stride() and distance(got, want) < 1.2e-2


@runs_kernels
@product(strength=1, plane=[1, 2, 3, 7, 8, 9, 16, 49, 150], act=["identity", "relu"])
def test_batch_norm_of_planes_that_blocks_cut(plane, act):
    """Elements that share a thread lie in two channels, and those at the end of a sample in the
    last and the first.
    """
    x, c = randn(3, 5, plane), 5
    affine = channels.Affine(*statistics(c), 1e-5)
    want = activate(F.batch_norm(x, *affine[:4], eps=1e-5), act)
    for block in (16, 64, 256):
        torch.testing.assert_close(channels.forward(x, 1, affine, act, (block, 0, 1)), want)
    got = channels.forward(
        x, 1, channels.Affine(None, None, None, affine.bias, 0.0), act, (64, 0, 1)
    )
    torch.testing.assert_close(got, activate(x + affine.bias[:, None], act))


@runs_kernels
def test_batch_norm_far_from_zero():
    """A folded shift would cost the digits that x and mean share."""
    x, mean = randn(4, 3, 50) * 1e-2 + 1000, torch.full((3,), 1000.0)
    args = x, mean, torch.full((3,), 1e-4), None, None, 1e-12, "identity"
    got, want = (
        FUSION_RULES["batch_norm"].kernel_fn(*args),
        FUSION_RULES["batch_norm"].reference(*args),
    )
    exact = (x.double() - 1000) * 100
    assert distance(got, exact) <= 2 * distance(want, exact) + 1e-6


@runs_kernels
def test_batch_norm_of_nan_and_infinity():
    x = randn(2, 3, 8)
    x[0, 0, 1], x[0, 1, 2], x[1, 2, 3] = math.nan, math.inf, -math.inf
    args = x, *statistics(3), 1e-5, "relu"
    got, want = (
        FUSION_RULES["batch_norm"].kernel_fn(*args),
        FUSION_RULES["batch_norm"].reference(*args),
    )
    torch.testing.assert_close(got, want, equal_nan=True)


# bias_act


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("act", ACTS)
def test_bias_act(act, dtype):
    plain = [((1, 1), (1,)), ((3, 2049), (2049,)), ((2, 3, 33), (33,)), ((5,), (5,))]
    for shape, bias in [*plain, ((2, 3, 5, 7), (3, 1, 1)), ((2, 3, 33), (1, 1, 33)),
        ((4, 1, 6), (1, 6)),
                        ((2, 3, 9), (2, 1, 1))]:  # fmt: skip
        x, b = randn(*shape, dtype=dtype), randn(*bias, dtype=dtype)
        got, want = (
            FUSION_RULES["bias_act"].kernel_fn(x, b, act),
            activate(x.double() + b.double(), act),
        )
        assert FUSION_RULES["bias_act"].guard_fn(x, b, act) is None
        assert got.dtype == dtype and got.stride() == (x + b).stride()
        assert (
            distance(got, want)
            <= {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}[dtype]
        )


@runs_kernels
def test_bias_act_layouts():
    for x, b in [
        (randn(7, 128)[:, :100], randn(100)),
        (randn(1, 33).expand(5, 33), randn(33)),
        (randn(4, 3, 20).transpose(0, 1), randn(20)),
        (randn(4, 3, 20)[:, :2], randn(20)),
        (randn(2, 6, 5, 3).contiguous(memory_format=LAST), randn(6, 1, 1)),
    ]:
        assert FUSION_RULES["bias_act"].guard_fn(x, b, "silu") is None
        got, want = FUSION_RULES["bias_act"].kernel_fn(x, b, "silu"), F.silu(x + b)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


@runs_kernels
@pytest.mark.parametrize("act", ACTS)
def test_activations_at_the_ends(act):
    inf = math.inf
    x = torch.tensor(
        [
            [
                0.0,
                1e-30,
                -1e-6,
                0.01,
                -0.3,
                0.54,
                0.56,
                -5,
                9,
                -9,
                20,
                -20,
                80,
                -80,
                inf,
                -inf,
                math.nan,
            ]
        ]
    )
    got, want = FUSION_RULES["bias_act"].kernel_fn(x, torch.zeros(17), act), activate(x, act)
    # infinite: torch gives NaN for gelu on some CPUs
    got, want = (torch.where(x.isinf(), 0.0, t) if act == "gelu" else t for t in (got, want))
    # exp of the hardware, or the interpreter's rounding inside an fma; the tails are differences
    # from 1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@runs_kernels
def test_tanh_keeps_its_digits_near_zero():
    x = torch.linspace(-3, 3, 20_001)[None]
    got = FUSION_RULES["bias_act"].kernel_fn(x, torch.zeros(20_001), "tanh")
    want = torch.tanh(x.double())
    assert ((got - want).abs() <= 4 * 2**-24 * want.abs()).all()


# group_norm

GROUPS = [
    ((2, 4, 3), 2),
    ((2, 3, 1), 1),
    ((3, 12), 3),
    ((2, 60, 4, 4), 2),
    ((2, 6, 2049), 2),
    ((2, 9, 3, 5), 3),
]


HOW = ["held", "held in turn", "walks", "walks ahead", "split"]


def configured(monkeypatch, how, lanes=16):
    """A group that a program holds, one after another; that it walks through; that several programs
    share.
    """
    block, programs = 16384 if "held" in how else lanes, int(how in ("held in turn", "walks ahead"))
    config = Config(block, 1, 4, programs, 2 * programs)
    for module in (groups, groups_backward):
        monkeypatch.setattr(module, "few", lambda x, groups: how == "split")
    monkeypatch.setattr(groups, "forward_config", lambda size, split: config)
    monkeypatch.setattr(groups_backward, "backward_config", lambda size, itemsize, split: config)


@runs_kernels
@product(groups=GROUPS, act=["identity", "silu"], how=HOW, dtype=FLOATS)
def test_group_norm(groups, act, how, dtype, monkeypatch):
    shape, number = groups
    configured(monkeypatch, how, 512 if shape[-1] > 512 else 16)
    c = shape[1]
    check(
        "group_norm",
        randn(*shape, dtype=dtype) + 1,
        number,
        randn(c, dtype=dtype),
        randn(c, dtype=dtype),
        1e-5,
        act,
    )


@runs_kernels
@pytest.mark.parametrize("how", HOW[1::2] + HOW[4:])
@pytest.mark.parametrize("act", ["identity", "silu"])
def test_group_norm_computes_only_wanted_gradients(act, how, monkeypatch):
    configured(monkeypatch, how)
    x, w, b, dy = randn(3, 6, 5, 3), randn(6), randn(6), randn(3, 6, 5, 3)
    for weight, bias in ((None, b), (w, None), (None, None)):
        check("group_norm", x, 3, weight, bias, 1e-5, act)
    args = x, 2, w, b, *groups.forward(x, 2, w, b, 1e-5, act, True)[1:], act
    every = groups_backward.backward(dy, *args, [True] * 3)
    for needs in itertools.product([False, True], repeat=3):
        for got, want, need in zip(
            groups_backward.backward(dy, *args, needs), every, needs, strict=True
        ):
            assert torch.equal(got, want) if need else got is None


@runs_kernels
@pytest.mark.parametrize("how", HOW)
def test_group_norm_far_from_zero(how, monkeypatch):
    configured(monkeypatch, how, 64)
    x = randn(2, 6, 100) + 1000
    got = FUSION_RULES["group_norm"].kernel_fn(x, 2, None, None, 1e-5, "identity", False, None)[0]
    assert distance(got, F.group_norm(x.double(), 2)) < 1e-4


@runs_kernels
@pytest.mark.parametrize("how", HOW)
def test_group_norm_of_nan_and_infinity(how, monkeypatch):
    configured(monkeypatch, how)
    x = randn(3, 4, 20)
    x[0, 1, 3], x[1, 2, 4], x[2, :2] = math.nan, math.inf, 0.0
    got = FUSION_RULES["group_norm"].kernel_fn(x, 2, None, None, 1e-5, "identity", False, None)[0]
    torch.testing.assert_close(got, F.group_norm(x, 2), equal_nan=True)


@runs_kernels
def test_few_large_groups_are_split_and_others_not():
    """On a GPU of 132 multiprocessors: by the number of groups and their size."""
    for shape, number, split in (
        ((2, 512, 128, 128), 32, True),
        ((16, 480, 64, 64), 32, False),  # 512 groups
        ((2, 512, 16, 16), 32, False),  # of 4096 elements
    ):
        launched = []
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        w = torch.empty(shape[1], dtype=torch.bfloat16, device="meta")
        with trial(lambda kernel, grid, args, options, launched=launched: launched.append(kernel)):
            _, mean, rstd = groups.forward(x, number, w, w, 1e-5, "silu", True)
            groups_backward.backward(x, x, number, w, w, mean, rstd, "silu", [True] * 3)
        assert (groups.group_norm_apply_kernel in launched) == split
        assert (groups_backward.group_norm_backward_apply_kernel in launched) == split


@runs_kernels
def test_group_norm_gradients_repeat_and_its_plain_statistics_serve():
    x, w, b, dy = randn(40, 6, 10), randn(6), randn(6), randn(6, 40, 10).transpose(0, 1)
    mean, rstd = groups.forward(x, 2, w, b, 1e-5, "silu", True)[1:]
    first, second = (
        groups_backward.backward(dy, x, 2, w, b, mean, rstd, "silu", [True] * 3) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    plain = FUSION_RULES["group_norm"].saved_fn(x, 2, w, b, 1e-5, "silu")
    torch.testing.assert_close((mean, rstd), plain)


# All three


@runs_kernels
@pytest.mark.parametrize("last", [False, True])
def test_in_a_graph(last):
    """Rewritten and run with the kernels; group norm of channels-last is copied by nobody: it stays
    torch's.
    """
    x = randn(2, 6, 5, 3).contiguous(memory_format=LAST if last else torch.contiguous_format)
    mean, var, w, b = statistics(6)
    for fn, inputs in (
        (
            lambda x, mean, var, w, b: F.relu(F.batch_norm(x, mean, var, w, b)),
            dict(x=x, mean=mean, var=var, w=w, b=b),
        ),
        (lambda x, b: F.gelu(x + b[:, None, None]), dict(x=x, b=b)),
        (lambda x, w, b: F.silu(F.group_norm(x, 3, w, b)), dict(x=x, w=w, b=b)),
    ):
        gm = with_kernels(rewritten(fn, **inputs))
        assert len(fused_nodes(gm)) == 1
        (got,), want = gm(**{f"L_{name}_": t for name, t in inputs.items()}), fn(**inputs)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_a_symbolic_batch_adds_no_guard():
    env, (x, flat, row) = symbolic(torch.empty(48, 5, 7), torch.empty(48, 64), torch.empty(64))
    with x.fake_mode:
        planes = x.new_empty((x.shape[0], 6, 5, 7))
        last = planes.new_empty((x.shape[0], 5, 7, 6)).permute(0, 3, 1, 2)
        six = row.new_empty(6)
        sites = [
            ("batch_norm", planes, six, six, six, six, 1e-5, "relu"),
            ("batch_norm", last, six, six, six, six, 1e-5, "relu"),
            ("bias_act", flat.new_empty((flat.shape[0], 64)), row, "gelu"),
            ("bias_act", last, six.view(6, 1, 1), "gelu"),
            ("group_norm", planes, 2, six, six, 1e-5, "silu"),
            ("group_norm", last, 2, six, six, 1e-5, "silu"),
            ("l2_norm", flat.new_empty((flat.shape[0], 64)), 1e-12),
        ]
        for name, *args in sites:
            pattern, grids = FUSION_RULES[name], []
            assert pattern.guard_fn(*args) is None
            pattern.worthwhile_fn(*args, True)
            with trial(lambda kernel, grid, values, options, grids=grids: grids.append(grid)):
                pattern.launched(args, bool(pattern.saves))
                if name == "group_norm":
                    x, stats = args[0], planes.new_empty(planes.shape[0] * 2)
                    back = (groups_backward if x is planes else rows_backward).backward
                    back(x, x, 2, six, six, stats, stats, "silu", [True] * 3)
            assert isinstance(grids[0][0], torch.SymInt), name
        wide = planes.new_empty((4, 6, x.shape[0], 7))
        for name, *args in (
            ("batch_norm", wide, *[six] * 4, 1e-5, "relu"),
            ("group_norm", wide, 2, six, six, 1e-5, "silu"),
        ):
            assert "dynamic" in FUSION_RULES[name].guard_fn(*args).reason
    assert not env.guards, [str(g.expr) for g in env.guards]


def test_refusals():
    x, row, c = randn(2, 6, 4, 5), randn(5), randn(6)
    for name, args, sentence in [
        ("batch_norm", (x.double(), c, c, c, c, 1e-5, "relu"), "float64"),
        (
            "batch_norm",
            (x, c, c, randn(12)[::2], c, 1e-5, "relu"),
            "weight with shape (6,) and strides (2,)",
        ),
        (
            "batch_norm",
            (x.mT, c, c, c, c, 1e-5, "relu"),
            "x is dense neither in its own order nor channels-last",
        ),
        (
            "batch_norm",
            (x[..., ::2], c, c, c, c, 1e-5, "relu"),
            "x is dense neither in its own order",
        ),
        ("bias_act", (x, randn(4, 5), "gelu"), "no vector along one dimension of x"),
        ("bias_act", (x, x, "gelu"), "no vector along one dimension of x"),
        ("bias_act", (x, torch.tensor(1.0), "gelu"), "no vector along one dimension of x"),
        ("bias_act", (row, x, "gelu"), "no vector along one dimension of x"),
        ("bias_act", (x, randn(1), "gelu"), "no vector along one dimension of x"),
        ("bias_act", (x, row.half(), "gelu"), "b is torch.float16"),
        ("bias_act", (x.transpose(0, 1), randn(2, 1, 1), "gelu"), "x is dense neither"),
        (
            "group_norm",
            (x.transpose(2, 3), 2, c, c, 1e-5, "silu"),
            "dense neither in its own order nor channels-last",
        ),
        (
            "group_norm",
            (randn(1, 2, 1).expand(1, 2, 1 << 20), 1, None, None, 1e-5, "silu"),
            "dense neither",
        ),
        (
            "group_norm",
            (torch.empty(1, 2, 1 << 20), 1, None, None, 1e-5, "silu"),
            "a group of 2097152 elements",
        ),
        ("l2_norm", (randn(6, 4).t(), None), "the elements of a row are 4 apart"),
        ("l2_norm", (randn(1, 200_000), None), "a row of 200000 is not between 1 and 131072"),
    ]:
        answer = FUSION_RULES[name].guard_fn(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason, (name, answer)
