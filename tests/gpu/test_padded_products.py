"""On a GPU: arguments that come from matrix products whose rows Inductor pads, so that in memory
they lie apart.
"""

import pytest
import torch
from torch._inductor import config

import fusion_backend
from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.op import Op
from fusion_backend.testing import arguments, close, in_fp64, supported_forms, value_and_gradients
from tests.gpu.test_every_kernel import ONLY_IN_INFERENCE

pytestmark = pytest.mark.gpu
OPS = [p for p in patterns() if isinstance(p, Op)]
WITH_KERNELS = {p.name: p for p in OPS if p.kernel_fn is not None and not p.seed_arguments}


def from_product(t):
    """The same numbers, as the result of a matrix product."""
    if not isinstance(t, torch.Tensor) or t.dim() < 2 or not t.is_floating_point():
        return t
    n = t.shape[-1]
    return (t.reshape(-1, n) @ torch.eye(n, device=t.device, dtype=t.dtype)).reshape(t.shape)


@pytest.mark.parametrize("pattern", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_rows_that_inductor_pads(pattern):
    """The form with the most arguments and the one with the fewest, in training where the pattern
    has a kernel for that.
    """
    forms = []
    for kinds in supported_forms(pattern):
        trains = pattern.name not in ONLY_IN_INFERENCE
        args = arguments(pattern, kinds, torch.bfloat16, device="cuda", grad=trains)
        if pattern.guard_fn is None or pattern.guard_fn(*args) is None:
            forms.append((kinds, args))
    for kinds, args in (forms[0], forms[-1]):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]

        def run(*given, args=args):
            rest = iter(given)
            return pattern.reference(
                *(from_product(next(rest)) if isinstance(a, torch.Tensor) else a for a in args)
            )

        fusion_backend.reset()
        torch.compiler.reset()
        with config.patch(force_shape_pad=True):
            options = {"fusion.gate": "always", "fusion.only": [pattern.name]}
            compiled = torch.compile(run, backend="fusion", options=options, dynamic=False)
            got = value_and_gradients(compiled, tensors)
        exact = value_and_gradients(pattern.reference, in_fp64(args))
        plain = value_and_gradients(pattern.reference, args)
        for g, p, e in zip(got, plain, exact, strict=True):
            assert close(g, p, e) == "", kinds
        (site,) = fusion_backend.report().fused
        assert site.forward == "kernel", site
