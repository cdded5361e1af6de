"""On a GPU: rows beyond 2**31 elements, and tensors that begin at no multiple of 16 bytes, through
Inductor.

tests/gpu/test_dropout.py has the patterns with dropout beyond 2**31 elements.
"""

import pytest
import torch

import fusion_backend
from fusion_backend.frontends.loading import patterns
from fusion_backend.testing import close

pytestmark = pytest.mark.gpu
PATTERNS = {p.name: p for p in patterns()}
# Pattern, row length, arguments: x makes a tensor of so many rows, v a vector.
CASES = [
    ("layer_norm", 4096, lambda x, v, rows: (x(), v(), v(), 1e-5)),
    ("layer_norm", 12288, lambda x, v, rows: (x(), v(), v(), 1e-5)),
    ("layer_norm", 32767, lambda x, v, rows: (x(), v(), v(), 1e-5)),
    ("layer_norm", 65536, lambda x, v, rows: (x(), v(), v(), 1e-5)),
    ("rms_norm", 8192, lambda x, v, rows: (x(), v(), None, 1e-5)),
    ("rms_norm", 131072, lambda x, v, rows: (x(), v(), None, 1e-5)),
    ("add_layer_norm", 4096, lambda x, v, rows: (x(), x(), v(), v(), 1e-5)),
    ("add_rms_norm", 65536, lambda x, v, rows: (x(), x(), v(), None, 1e-5)),
    (
        "modulated_norm",
        4096,
        lambda x, v, rows: (x()[None], None, None, *(v()[None, None] for _ in "ab"), 1e-6, "layer"),
    ),
    ("norm_act", 4096, lambda x, v, rows: (x(), v(), v(), 1e-5, "layer", "gelu")),
    ("gated_norm", 4096, lambda x, v, rows: (x(), x(), v(), v(), 1e-5, "layer", "silu", "norm")),
    (
        "channel_norm",
        4096,
        lambda x, v, rows: (
            x().view(-1, 32, 128),
            None,
            *(v(32)[:, None] for _ in "wb"),
            1e-5,
            "layer",
        ),
    ),
    ("l2_norm", 4096, lambda x, v, rows: (x(), 1e-6)),
    ("l2_norm", 100_000, lambda x, v, rows: (x(), 1e-6)),
    ("softmax", 4096, lambda x, v, rows: (x(), 0.5, None, None, None)),
    ("softmax", 65536, lambda x, v, rows: (x(), None, None, None, None)),
    ("softmax", 100_000, lambda x, v, rows: (x(), None, None, None, None)),
    ("quantize_per_token", 4096, lambda x, v, rows: (x(), 1e-6, "scale", "scale", "none")),
    ("quantize_per_token", 65536, lambda x, v, rows: (x(), 1e-6, "scale", "scale", "none")),
    # in bf16, Inductor's own gradient of amax may be NaN (on CPU it is): it compares what is
    # rounded with what is not
    (
        "rms_norm_quantize",
        4096,
        lambda x, v, rows: (x().float(), v().float(), None, 1e-5, 1e-6, "scale", "scale"),
    ),
    (
        "cross_entropy",
        128_256,
        lambda x, v, rows: (
            x(),
            torch.arange(rows, device="cuda"),
            None,
            -100,
            0.1,
            "none",
            "none",
        ),
    ),
    ("group_norm", 4096, lambda x, v, rows: (x().view(-1, 32, 128), 8, v(32), v(32), 1e-5, "silu")),
    (
        "batch_norm",
        4096,
        lambda x, v, rows: (x().view(-1, 32, 128), v(32), v(32).abs(), v(32), v(32), 1e-5, "relu"),
    ),
    ("bias_act", 4096, lambda x, v, rows: (x(), v(), "relu")),
    ("add_mul", 4096, lambda x, v, rows: (x(), x(), x())),
    ("add_mul_exp", 4096, lambda x, v, rows: (x(), x(), 0.5)),
    ("quantize_int8", 4096, lambda x, v, rows: (x(), 0.1, 3.0)),
]
of_every_case = pytest.mark.parametrize(
    "name, n, build", CASES, ids=[f"{name}-{n}" for name, n, _ in CASES]
)
LAST = 64


def each(fn, args, *more):
    """`fn` of every tensor of args, and what belongs to it."""
    return [
        fn(a, *its) if isinstance(a, torch.Tensor) else a
        for a, *its in zip(args, *more, strict=True)
    ]


def leaf(t, dtype=None):
    """The same numbers for autograd to begin at."""
    return t.detach().to(dtype or t.dtype).requires_grad_() if t.is_floating_point() else t


def values(fn, args, grads):
    """What fn gives, then the gradients of args: `grads` are those of its outputs, or a function
    that makes them.
    """
    out = fn(*args)
    out = out if isinstance(out, tuple) else (out,)
    grads = each(grads, out) if callable(grads) else grads
    smooth = [i for i, o in enumerate(out) if o.requires_grad]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if smooth:
        found = torch.autograd.grad(
            [out[i] for i in smooth], wanted, [grads[i] for i in smooth], allow_unused=True
        )
        out += tuple(g for g in found if g is not None)
    return [o.detach() for o in out], grads


def expected(name, args):
    """Results of eager, also in fp64, and the gradients of the outputs that they are for."""
    reference = PATTERNS[name].reference
    plain, grads = values(
        reference, each(leaf, args), lambda o: torch.randn(o.shape, device="cuda").to(o.dtype)
    )
    exact, _ = values(
        reference, each(lambda a: leaf(a, torch.float64), args), each(torch.Tensor.double, grads)
    )
    return plain, exact, grads


def compiled(name, fn=None):
    options = {"fusion.gate": "always", "fusion.only": [name]}
    return torch.compile(
        fn or PATTERNS[name].reference, backend="fusion", options=options, dynamic=False
    )


def agree(got, plain, exact):
    (site,) = fusion_backend.report().fused
    assert site.forward == "kernel", site
    for mine, p, e in zip(got, plain, exact, strict=True):
        assert close(mine, p, e) == ""


def arguments(build, rows, n):
    return build(
        lambda: torch.randn(rows, n, device="cuda", dtype=torch.bfloat16),
        lambda size=n: torch.randn(size, device="cuda", dtype=torch.bfloat16),
        rows,
    )


@of_every_case
def test_beyond_31_bits(name, n, build):
    """The last rows are what they are alone. All others are zero, and so are the gradients that
    arrive there: those of weights are the last rows' own, too.
    """
    rows = -(-(2**31) // n) + LAST
    args = arguments(build, LAST, n)
    plain, exact, grads = expected(name, args)

    def tall(t):
        if len(t) != LAST:
            return t
        wide = t.new_zeros(rows, *t.shape[1:])
        wide[-LAST:] = t
        return wide

    got, _ = values(compiled(name), each(leaf, each(tall, args)), each(tall, grads))
    agree([o[-LAST:] if len(o) == rows else o for o in got], plain, exact)


@pytest.mark.parametrize("where", ["inputs", "views"])
@of_every_case
def test_not_at_a_multiple_of_16_bytes(name, n, build, where):
    """Arguments, weights and the gradients of the outputs: as they come in, or as views that the
    model makes.
    """
    args = arguments(build, 1024, n)
    plain, exact, grads = expected(name, args)

    def flat(t):
        return torch.cat([t.new_zeros(1), t.flatten()])

    def view(t, like):
        return t[1:].view(like.shape)

    shifted = each(view, each(flat, grads), grads)
    if where == "inputs":
        got, _ = values(compiled(name), each(leaf, each(view, each(flat, args), args)), shifted)
        return agree(got, plain, exact)
    fn = compiled(name, lambda *given: PATTERNS[name].reference(*each(view, given, args)))
    got, _ = values(fn, each(leaf, each(flat, args)), shifted)
    agree(
        [o if o.shape == p.shape else view(o, p) for o, p in zip(got, plain, strict=True)],
        plain,
        exact,
    )
