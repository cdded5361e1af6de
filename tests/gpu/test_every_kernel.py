"""On a GPU: the kernels of every pattern that has them, through Inductor, against fp64."""

import pytest
import torch

import fusion_backend
from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.op import Op
from fusion_backend.testing import arguments, close, in_fp64, supported_forms, value_and_gradients

pytestmark = pytest.mark.gpu
# Dropout is compared in test_dropout.py: the masks of a compiled graph are its own. A rule by
# itself has no kernel: what it writes is compared in test_all_reduce.py.
OPS = [p for p in patterns() if isinstance(p, Op)]
ONLY_IN_INFERENCE = ("conv_relu",)
WITH_KERNELS = {p.name: p for p in OPS if p.kernel_fn is not None and not p.seed_arguments}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("pattern", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_compiled_with_its_kernels(pattern, dtype):
    """The form with the most arguments and the one with the fewest; no worse than twice eager's
    distance. In training, where it has a kernel for that.
    """
    trains = pattern.name not in ONLY_IN_INFERENCE
    forms = [
        (kinds, arguments(pattern, kinds, dtype, device="cuda", grad=trains))
        for kinds in supported_forms(pattern)
    ]
    forms = [
        (kinds, args)
        for kinds, args in forms
        if pattern.guard_fn is None or pattern.guard_fn(*args) is None
    ]
    if not forms and dtype == torch.float32:
        pytest.skip("its kernel takes 16-bit dtypes, or fp32 as TF32")
    for kinds, args in (forms[0], forms[-1]):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]

        def run(*given, args=args):
            rest = iter(given)
            return pattern.reference(
                *(next(rest) if isinstance(a, torch.Tensor) else a for a in args)
            )

        fusion_backend.reset()
        torch.compiler.reset()
        options = {"fusion.gate": "always", "fusion.only": [pattern.name]}
        compiled = torch.compile(run, backend="fusion", options=options, dynamic=False)
        exact = value_and_gradients(pattern.reference, in_fp64(args))
        plain = value_and_gradients(pattern.reference, args)
        for got, p, e in zip(value_and_gradients(compiled, tensors), plain, exact, strict=True):
            assert close(got, p, e) == "", kinds
        (site,) = fusion_backend.report().fused
        assert site.forward == "kernel", site
