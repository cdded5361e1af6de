"""Kernels of the built-in patterns against their references in fp64, value and gradient: what the
tests of the kernels share.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusion_backend.frontends.explain import Collector
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels import interpreting
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import with_kernels

patterns()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreting(), reason="needs TRITON_INTERPRET=1 or a GPU"
)


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


class Kernels(Collector):
    """A backend that runs the rewritten graph operator by operator, with kernels at its sites."""

    def __call__(self, gm, example_inputs):
        super().__call__(gm, example_inputs)
        return with_kernels(self.graphs[-1]).forward


# |got - exact| / |exact|. fp32: some roundings of 2**-24. fp16: one rounding at the end. bf16: two,
# and the interpreter rounds to bf16 by cutting off, which doubles the error.
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}


def randn(*shape, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype)


def exact(value):
    return value.detach().double() if isinstance(value, Tensor) else value


def distance(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-6)).item()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    assert got.dtype == dtype
    if want.numel():
        assert distance(got, want) <= factor * CLOSE[dtype]


def steps(t: Tensor) -> list[int]:
    """The strides that can be seen: not those of a size of 1, nor any of no elements."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]


def check_value(name: str, *args, factor: float = 1):
    """The kernel's first result against the fp64 reference."""
    pattern = FUSION_RULES[name]
    assert not isinstance(pattern.guard_fn(*args), Reject)
    out = pattern.launched(args, save=False)
    out = out[0] if pattern.saves else out
    want = pattern.reference(*map(exact, args))
    assert_close(out, want, args[0].dtype, factor)
    assert steps(out) == steps(pattern.reference(*args))
    return out


def check_gradient(name: str, *args, needs=None, factor: float = 4, dy=None) -> None:
    """The backward fed by the kernel's saves, and by the plain torch ones, against autograd in
    fp64.
    """
    pattern = FUSION_RULES[name]
    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
    tensors = [p.name for p in pattern.params if p.tensor]
    needs = {k: isinstance(inputs[k], Tensor) and (needs is None or k in needs) for k in tensors}
    leaves = {
        k: exact(v).requires_grad_(needs[k]) if isinstance(v, Tensor) else v
        for k, v in inputs.items()
    }
    want = pattern.reference(*leaves.values())
    dy = randn(*want.shape, dtype=args[0].dtype) if dy is None else dy
    wanted = [k for k in tensors if needs[k]]
    gradients = dict(
        zip(
            wanted, torch.autograd.grad(want, [leaves[k] for k in wanted], dy.double()), strict=True
        )
    )
    out, *saves = pattern.launched(args, save=True)
    plain = pattern.saved_fn(*args)
    plain = plain if isinstance(plain, tuple) else (plain,)
    for kept, other in zip(saves, plain, strict=True):
        assert kept.shape == other.shape and kept.dtype == other.dtype
    for result, kept in ((out, saves), (pattern.reference(*args), plain)):
        saved = SimpleNamespace(
            **inputs, **dict(zip(pattern.saves, kept, strict=True)), result=result, needs=needs
        )
        results = dict(zip(tensors, pattern.backward_fn(saved, dy), strict=True))
        for k in tensors:
            assert (results[k] is not None) == needs[k], k
            if needs[k]:
                assert_close(results[k], gradients[k], args[0].dtype, factor)


def symbolic(*tensors: Tensor):
    """Fake tensors whose sizes are symbols, 1-D ones excepted."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    return env, [mode.from_tensor(t, static_shapes=t.dim() == 1) for t in tensors]


SHAPES = [(1, 1), (5, 1), (7, 100), (3, 2049), (2, 3, 5, 33), (100,)]


SEED = torch.tensor([4567890123456789012], device=DEVICE)


PART = (128, 1, 4)  # a configuration that walks through rows longer than 128


def check(name: str, *args, kernel=None, needs=None, factor: float = 5, narrow=None, like=None):
    """Results and gradients of a pattern's kernels against its reference in fp64. `narrow` is the
    dtype of the first result, if it is not that of the reference; `like` is laid out as it.
    """
    pattern = FUSION_RULES[name]
    assert pattern.guard_fn(*args) is None
    many = lambda out: out if isinstance(out, tuple) else (out,)  # noqa: E731
    save = [True] if pattern.saves else []
    seed = dict.fromkeys(pattern.seed_arguments, SEED)
    reference = lambda *args: (pattern.seeded_fn or pattern.reference)(*args, *seed.values())  # noqa: E731
    got = many(
        pattern.launched((*args, *seed.values()), bool(save), result_dtype=narrow)
        if kernel is None
        else kernel(*args)
    )
    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
    tensors = [p.name for p in pattern.params if p.tensor]
    floats = [k for k in tensors if inputs[k] is not None and inputs[k].is_floating_point()]
    needs = {k: k in floats and (needs is None or k in needs) for k in tensors}
    leaves = {k: exact(v).requires_grad_(needs[k]) if k in floats else v for k, v in inputs.items()}
    want = many(reference(*leaves.values()))
    first, *others = many(reference(*args))
    eager = first.to(narrow or first.dtype), *others
    for g, w, e in zip(got, want, eager, strict=False):
        laid_out = steps(like if like is not None and g is got[0] else e)
        assert (g.dtype, g.shape, steps(g)) == (e.dtype, e.shape, laid_out)
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
    for k, other in pattern.backward_same.items():
        if other in needs:
            needs[other] |= needs[k]
    saved = SimpleNamespace(**inputs, **seed, **kept, result=result, needs=needs)
    found = dict(zip(tensors, many(pattern.backward_fn(saved, *grads)), strict=True))
    found |= {
        k: grads[other] if other in (0, 1) else found[other]
        for k, other in pattern.backward_same.items()
        if found[k] is None
    }
    for k in wanted:
        assert found[k].shape == inputs[k].shape and found[k].dtype == inputs[k].dtype
        assert distance(found[k], gradients[k]) <= factor * CLOSE[inputs[k].dtype], k
    return got


def check_training(name: str, layers: torch.nn.Module, x: Tensor, autocast: bool) -> None:
    """Layers with one site of this pattern have gradients about as close to fp64 as those of eager.
    The layers are in fp64 afterwards.
    """
    collector = Kernels({"fusion.gate": "always", "fusion.only": name})

    def gradients(run, x):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            loss = run(x).float().square().mean()
        return torch.autograd.grad(loss, list(layers.parameters()))

    got = gradients(torch.compile(layers, backend=collector, dynamic=False), x)
    eager = gradients(layers, x)
    assert [s.pattern for s in collector.report.fused] == [name]
    layers.double()
    want = torch.autograd.grad(layers(x.double()).square().mean(), list(layers.parameters()))
    for mine, its, exact in zip(got, eager, want, strict=True):
        assert distance(mine, exact) <= 1.5 * distance(its, exact) + 1e-6
