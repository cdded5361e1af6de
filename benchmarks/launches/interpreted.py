"""A pattern's Triton kernels on small CPU tensors, in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measure.distance import distance
from fusion_backend.kernels.common.launch import trial
from fusion_backend.match.templates import with_kinds
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.pattern import Pattern
from fusion_backend.testing import supported_forms


def run(fn, args: list) -> tuple[list[Tensor], list[Tensor]]:
    """The results of fn, and the gradients of their weighted sum for every floating tensor among
    the arguments.
    """
    args = [
        a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]
    results = fn(*args)
    results = [results] if isinstance(results, Tensor) else list(results)
    smooth = [r for r in results if r.requires_grad]
    if not smooth:
        return [r.detach() for r in results], []
    weights = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).reshape(r.shape) for r in smooth]
    sources = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    # running statistics have none
    gradients = torch.autograd.grad(smooth, sources, weights, allow_unused=True)
    return [r.detach() for r in results], [g for g in gradients if g is not None]


def example_arguments(pattern: Pattern) -> list:
    """The first case of the pattern, in the first of its argument forms that its guard accepts: in
    fp32, or in fp16 for kernels that take nothing wider.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16):

        def tensor(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(dtype)

        args = list(pattern.inputs_fn(tensor, **pattern.cases[0]))
        for form in supported_forms(pattern):
            given = with_kinds(pattern, form, args)
            if pattern.guard_fn is None or pattern.guard_fn(*given) is None:
                return given
    raise ValueError(f"no example of {pattern.name} is one that its kernels take")


class Outcome(NamedTuple):
    """Results and gradients of the kernels, of the plain torch code, and of that code in fp64."""

    launches: int
    fused: tuple[list[Tensor], list[Tensor]]
    plain: tuple[list[Tensor], list[Tensor]]
    exact: tuple[list[Tensor], list[Tensor]]


def outcome(pattern: Pattern, args: list) -> Outcome:
    # the same dropout for all three
    op, seeds = (
        operator_of(pattern),
        {name: torch.tensor([2026]) for name in pattern.seed_arguments},
    )
    launches = []

    def launch(kernel, grid, args, options):
        launches.append(kernel)
        kernel[grid](*args, **options)

    def reference(*args):
        return op.reference(*args, *seeds.values())

    def fused(*args):
        named = dict(zip((p.name for p in pattern.params), args, strict=True))
        out = op.overload(*op.flatten(named | seeds))
        # what the backward needs comes after the outputs
        return out[: pattern.outputs] if isinstance(out, tuple) else out

    with trial(launch):
        found = run(fused, args)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    return Outcome(len(launches), found, run(reference, args), run(reference, wide))


def float_errors(found: Outcome) -> tuple[str, bool]:
    """The errors against fp64 in words; are those of the kernels small enough?"""
    words, fine = "", True
    for i, what in enumerate(("result", "gradients")):
        if not found.fused[i]:
            continue
        ours = max(map(distance, found.fused[i], found.exact[i]))
        theirs = max(map(distance, found.plain[i], found.exact[i]))
        words += f" {what} {ours:.1e} (plain code {theirs:.1e})"
        fine &= ours <= 2 * theirs + 2.5e-7  # the floor: two fp32 roundings
    return words, fine


def integer_differences(found: Outcome) -> tuple[str, bool]:
    """How many integers differ, in words; do none?"""
    pairs = zip(found.fused[0], found.plain[0], strict=True)
    # a scale is a float, and its last bit may differ
    integers = [(a, b) for a, b in pairs if not a.is_floating_point()]
    different = sum((a != b).sum().item() for a, b in integers)
    return f" {different} integers differ from the plain code's", different == 0


def compare(pattern: Pattern) -> bool:
    """Print the line of the pattern; are its kernels no worse than twice the plain code's error?"""
    args = example_arguments(pattern)
    found = outcome(pattern, args)
    shapes = ", ".join(
        "x".join(map(str, a.shape)) if isinstance(a, Tensor) else str(a) for a in args
    )
    floats = found.fused[0][0].is_floating_point()
    words, fine = float_errors(found) if floats else integer_differences(found)
    fine &= bool(found.launches)
    line = f"  {pattern.name:<24} {shapes:<32} kernel launches: {found.launches};{words}"
    print(line + ("" if fine else "  FAILED"))
    return fine
