"""Every pattern's Triton kernels on small CPU tensors, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m benchmarks.interpreted

Prints, for each pattern, how often a kernel was launched, and the error of result and gradients
against fp64 beside that of the plain torch code in fp32. Integer results must be those of the plain
code exactly. Exit status 1 if not.
"""

from __future__ import annotations

import os
import sys

import fusion_backend.patterns  # noqa: F401  (fills the registry)
import torch
from torch import Tensor

from benchmarks.measure import distance
from fusion_backend.kernels.common.launch import trial
from fusion_backend.match.templates import with_kinds
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.pattern import Pattern
from fusion_backend.ops.registry import RULES
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


def accepted(pattern: Pattern, args: list, kinds: tuple[str, ...]) -> bool:
    return pattern.guard_fn(*with_kinds(pattern, kinds, args)) is None


def compare(pattern: Pattern) -> bool:
    """Print the pattern's line; are the kernels no worse than twice the plain code's error?"""
    generator = torch.Generator().manual_seed(0)
    args = list(
        pattern.inputs_fn(
            lambda *shape: torch.randn(*shape, generator=generator), **pattern.cases[0]
        )
    )
    args = with_kinds(pattern, supported_forms(pattern)[0], args)
    if pattern.guard_fn is not None and pattern.guard_fn(*args) is not None:
        args = with_kinds(
            pattern, next(k for k in supported_forms(pattern) if accepted(pattern, args, k)), args
        )
    launches = []

    def launch(kernel, grid, args, options):
        launches.append(kernel)
        kernel[grid](*args, **options)

    # the same dropout for all
    op, seeds = (
        operator_of(pattern),
        {name: torch.tensor([2026]) for name in pattern.seed_arguments},
    )

    def reference(*args):
        return op.reference(*args, *seeds.values())

    def fused(*args):
        out = op.overload(
            *op.flatten(dict(zip((p.name for p in pattern.params), args, strict=True)) | seeds)
        )
        # what the backward needs comes after them
        return out[: pattern.outputs] if isinstance(out, tuple) else out

    with trial(launch):
        results, gradients = run(fused, args)
    plain = run(reference, args)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    exact = run(reference, wide)
    shapes = ", ".join(
        "x".join(map(str, a.shape)) if isinstance(a, Tensor) else str(a) for a in args
    )
    line, ok = (
        f"  {pattern.name:<24} {shapes:<32} kernel launches: {len(launches)};",
        bool(launches),
    )
    if results[0].is_floating_point():
        pairs = [
            ("result", results, plain[0], exact[0]),
            ("gradients", gradients, plain[1], exact[1]),
        ]
        for what, got, code, true in pairs[: 2 if gradients else 1]:
            ours = max(map(distance, got, true))
            theirs = max(map(distance, code, true))
            line += f" {what} {ours:.1e} (plain code {theirs:.1e})"
            ok &= ours <= 2 * theirs + 2.5e-7  # the floor: two fp32 roundings
    else:
        whole = [
            pair for pair in zip(results, plain[0], strict=True) if not pair[0].is_floating_point()
        ]
        # a scale's last bit may be another
        different = sum((a != b).sum().item() for a, b in whole)
        line += f" {different} integers differ from the plain code's"
        ok &= different == 0
    print(line + ("" if ok else "  FAILED"))
    return ok


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") != "1":
        print(
            "benchmarks.interpreted: set TRITON_INTERPRET=1 before Python starts", file=sys.stderr
        )
        return 2
    ok = [compare(pattern) for pattern in RULES.values() if pattern.kernel_fn and pattern.inputs_fn]
    return not all(ok)


if __name__ == "__main__":
    sys.exit(main())
