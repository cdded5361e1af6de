"""Rotary position embedding as models write it: by complex numbers, by pairs, in a part of a head.
It has no kernel yet, so that its reference takes the place of what is found.
"""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import CLOSE, distance, randn
from tests.spelled import check_spelling, leaves

B, N, H, D = 2, 6, 4, 16


def angles():
    return torch.outer(torch.arange(N), 0.1 ** torch.arange(D // 2))


def llama(x, angle):
    """Meta's llama/model.py: x is [b, n, h, d]."""
    turns = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def by_pairs(x, cos, sin):
    """The same in real numbers, as in torchtune and gpt-fast."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    x1, x2 = pairs[..., 0], pairs[..., 1]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(3).type_as(x)


def sites(fn, *inputs, **options):
    return [s.pattern for s in collect(fn, *inputs, options=options).report.sites if s.fused]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_complex_numbers(dtype, grad):
    x = randn(B, N, H, D, dtype=dtype).requires_grad_(grad)
    angle = angles()
    collector = collect(llama, x, angle)
    (gm,) = collector.graphs
    assert [str(n.target) for n in fused_nodes(gm)] == ["fusion.rotary.default"], collector.report
    dy = randn(B, N, H, D, dtype=dtype)

    def computed(fn, x, dy):
        y = fn(x, angle)
        return y.detach(), *(torch.autograd.grad(y, x, dy) if grad else ())

    turns = torch.polar(torch.ones_like(angle), angle)

    def exactly(x, angle):
        pairs = torch.view_as_complex(x.reshape(B, N, H, D // 2, 2))
        return torch.view_as_real(pairs * turns.to(torch.complex128)[None, :, None]).flatten(3)

    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    first = "x" in names[0]
    wanted = computed(exactly, x.detach().double().requires_grad_(grad), dy.double())
    got = computed(lambda x, angle: gm(*((x, angle) if first else (angle, x)))[0], x, dy)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == dtype and distance(one, other) < 2 * CLOSE[dtype]


def test_turns_that_are_an_input():
    """The two parts of a complex tensor are views, written in front of the op."""
    x, turns = randn(B, N, H, D), torch.polar(torch.ones(N, D // 2), angles())

    def fn(x, turns):
        pairs = torch.view_as_complex(x.reshape(B, N, H, -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    (gm,) = collect(fn, x, turns).graphs
    assert len(fused_nodes(gm)) == 1
    named = {"l_x_": x, "l_turns_": turns}
    got = gm(*(named[n.name] for n in gm.graph.nodes if n.op == "placeholder"))[0]
    torch.testing.assert_close(got, fn(x, turns))


def test_pairs():
    cos, sin = angles().cos()[None, :, None], angles().sin()[None, :, None]
    check_spelling("rotary", by_pairs, *leaves((B, N, H, D)), cos, sin)
    (x,) = leaves((B, N, H * D))
    check_spelling(
        "rotary", lambda x, cos, sin: by_pairs(x.view(B, N, H, D), cos, sin), x, cos, sin
    )


OTHER = {
    "in fp64": lambda x, turns: torch.view_as_real(
        torch.view_as_complex(x.double().view(B, N, H, -1, 2)) * turns
    ).float(),
    "a quotient": lambda x, turns: torch.view_as_real(
        torch.view_as_complex(x.view(B, N, H, -1, 2)) / turns
    ),
    "halves": lambda x, turns: torch.view_as_real(
        torch.view_as_complex(x.view(B, N, H, 2, -1).mT.contiguous()) * turns
    ),
}


@pytest.mark.parametrize("fn", OTHER.values(), ids=OTHER)
def test_what_is_no_rotation_of_neighbours(fn):
    x, turns = randn(B, N, H, D), torch.polar(torch.ones(N, 1, D // 2), angles()[:, None])
    assert "rotary" not in sites(lambda x, turns: fn(x, turns).flatten(3), x, turns)


def partial(x, cos, sin, r=8):
    """GPT-NeoX, Phi, StableLM: the first r numbers of a head are turned, the others stay."""
    turned, rest = x[..., :r], x[..., r:]
    x1, x2 = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-x2, x1), -1) * sin, rest), -1)


def test_a_part_of_a_head():
    x, cos, sin = randn(B, H, N, D), randn(N, 8), randn(N, 8)
    collector = collect(partial, x, cos, sin)
    assert [s.pattern for s in collector.report.fused] == ["rotary"]
    (gm,) = collector.graphs
    named = {"l_x_": x, "l_cos_": cos, "l_sin_": sin}
    got = gm(*(named[n.name] for n in gm.graph.nodes if n.op == "placeholder"))[0]
    torch.testing.assert_close(got, partial(x, cos, sin))


def test_a_part_of_a_normalised_head_is_two_sites():
    """norm_rotary turns whole heads: here the norm and the rotation are found one by one."""

    def fn(x, w, cos, sin):
        return partial(F.rms_norm(x, (D,), w, 1e-6), cos, sin)

    inputs = randn(B, H, N, D), randn(D), randn(N, 8), randn(N, 8)
    assert sorted(sites(fn, *inputs)) == ["rms_norm", "rotary"]
    assert sites(fn, *inputs, **{"fusion.only": "norm_rotary"}) == []


def shifted(z):
    return torch.view_as_real((1j - z * 2j) / (1 + 1j))


def scaled_by_a_size(z):
    return torch.view_as_real(z * z.shape[0])


@pytest.mark.parametrize("code", [shifted, scaled_by_a_size])
def test_complex_values_beside_other_numbers(code):
    """No rule fails at a complex number, or at a size."""
    z = torch.randn(5, 4, dtype=torch.complex64)
    torch._dynamo.mark_dynamic(z, 0)
    collector = Collector({"fusion.gate": "always"})
    torch.testing.assert_close(torch.compile(code, backend=collector)(z), code(z))
    assert not [fault for graph in collector.report.graphs for fault in graph.faults]
