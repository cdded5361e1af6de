"""Comparing a function with a pattern's reference: arguments in every form, value and gradients,
and the error against fp64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_backend.compat.torch import TorchDispatchMode, aten, pytree
from fusion_backend.kernels.common.dropout import kept
from fusion_backend.match.templates import example_inputs, forms, templates, with_kinds
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.operator import draw

# The error of a fused result against fp64 may be FACTOR times that of the unfused one in the same
# dtype, or ULPS units in the last place of its largest value: two correct roundings may differ by
# one each.
FACTOR = 2.0
ULPS = 4


def close(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> str:
    """What is wrong with `got`, or "" if it is no worse than `plain`.

    got, plain: the fused and the unfused result, of one dtype. exact: the result in fp64. All have
    one shape. NaNs and infinities must be in the same places. The largest error of `got` against
    `exact` may be FACTOR times that of `plain`, or ULPS units in the last place of the largest
    value; of integers, FACTOR times as many may be wrong.

        assert not close(kernel(x), reference(x), reference(x.double()))
    """
    if got.shape != exact.shape or got.dtype != plain.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(exact.shape)} {plain.dtype}"
    if not got.dtype.is_floating_point:
        mine, theirs = int((got != exact).sum()), int((plain != exact).sum())
        return (
            f"{mine} of {got.numel()} integers are wrong, {theirs} unfused"
            if mine > FACTOR * theirs
            else ""
        )
    if not torch.equal(got.isnan(), exact.isnan()):
        return "NaN in other places"
    finite = exact.isfinite() & got.isfinite()
    if not torch.equal(
        torch.where(finite, 0, got.double()).nan_to_num(0),
        torch.where(finite, 0, exact).nan_to_num(0),
    ):
        return "infinities in other places"
    if not finite.any():
        return ""
    mine = (got.double() - exact)[finite].abs().max().item()
    theirs = (plain.double() - exact)[finite].abs().max().item()
    floor = ULPS * torch.finfo(got.dtype).eps * exact[finite].abs().max().item()
    fine = mine <= max(FACTOR * theirs, floor)
    return "" if fine else f"error {mine:.3g} against fp64, the unfused one has {theirs:.3g}"


def supported_forms(pattern: Definition) -> list[tuple[str, ...]]:
    """The forms in which the pattern can be traced: a kind for each parameter, such as
    ("tensor", "none").

    for kinds in supported_forms(pattern):
        args = arguments(pattern, kinds, torch.bfloat16)
    """
    have = {t.kinds for t in templates(pattern)}
    return [kinds for kinds in forms(pattern) if kinds in have]


def arguments(
    pattern: Definition, kinds, dtype: torch.dtype, device: str = "cpu", grad: bool = True
) -> list:
    """Arguments of the reference in one form, from the first case of the pattern's `inputs`.

    kinds: one of `supported_forms`. dtype: that of floating tensors, whose values are random and
    the same at every call. grad: whether they require grad.

        pattern.reference(*arguments(pattern, kinds, torch.float32))
    """
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float64).to(
            dtype
        )

    args = with_kinds(pattern, kinds, example_inputs(pattern, make))
    return [
        a.detach().requires_grad_(grad and a.is_floating_point())
        if isinstance(a, torch.Tensor)
        else a
        for a in args
    ]


def in_fp64(args: list) -> list:
    """The same arguments, detached, with floating tensors in fp64. They require grad where those of
    `args` do.

        exact = value_and_gradients(pattern.reference, in_fp64(args))
    """
    exact = [
        a.detach().double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in args
    ]
    pairs = zip(exact, args, strict=True)
    return [
        e.requires_grad_(a.requires_grad) if isinstance(e, torch.Tensor) else e for e, a in pairs
    ]


def value_and_gradients(fn: Callable, args: list, seed: int = 0) -> list[torch.Tensor]:
    """The outputs of `fn(*args)`, then the gradients of the arguments that require grad and are
    used.

    The output gradients are random, and the same for a `seed`; so are the random numbers that `fn`
    draws. The outputs have no gradient function.

        y, dx, dw = value_and_gradients(lambda x, w: torch.tanh(x * w), [x, w])
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = [o for o in pytree.tree_leaves(fn(*args)) if isinstance(o, torch.Tensor)]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    smooth = [o for o in out if o.requires_grad]
    if not smooth or not wanted:
        return [o.detach() for o in out]
    generator = torch.Generator().manual_seed(seed)
    seeds = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in smooth]
    grads = torch.autograd.grad(smooth, wanted, seeds, allow_unused=True)
    return [*(o.detach() for o in out), *(g for g in grads if g is not None)]


class DropoutOfKernels(TorchDispatchMode):
    """A mode in which eager dropout uses the masks of the kernels: it draws a seed as a rewritten
    graph does, and keeps the same elements as a kernel.

        with DropoutOfKernels():
            y = model(x)
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo runs compiled code inside, not the function as it was."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.bernoulli_.float and args[0].is_floating_point():  # on CPU
            noise, keep = args
            return noise.copy_(kept(draw(noise.device), noise.shape, 1 - keep))
        if func is aten.native_dropout.default:  # on CUDA
            x, p, _ = args
            mask = kept(draw(x.device), x.shape, p)
            return x * mask * (1 / (1 - p)), mask
        return func(*args, **(kwargs or {}))


def unfused(pattern: Definition, args: list) -> list[torch.Tensor]:
    """Value and gradients of the reference, as `value_and_gradients` gives them.

    args: those of `arguments` or `in_fp64`. Dropout, if any, has the masks of the kernels.

        plain = unfused(pattern, arguments(pattern, kinds, torch.bfloat16))
    """
    with DropoutOfKernels():
        return value_and_gradients(pattern.reference, args)


def check_close(pattern: Definition, what: str, got: list, plain: list, exact: list) -> None:
    """Raise AssertionError where one of the results and gradients in `got` is not `close`."""
    if not len(got) == len(plain) == len(exact):
        raise AssertionError(
            f"{pattern.where}: {what} gives {len(got)} results and gradients, not {len(plain)}"
        )
    for i, (g, p, e) in enumerate(zip(got, plain, exact, strict=True)):
        wrong = close(g, p, e)
        if wrong:
            number = f"result {i}" if i < pattern.outputs else f"gradient {i - pattern.outputs}"
            raise AssertionError(f"{pattern.where}: {number} of {what}: {wrong}")
