"""The ways to compute a piece of work, and what fusion reports about its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fusion_backend
from benchmarks.measure.library import inductor_config
from benchmarks.records.rows import Contender

inductor_config.max_autotune_report_choices_stats = False  # its tables would bury ours
TWIN, ALWAYS, FLEX = "inductor-again", "fusion-always", "flex"
Maker = Callable[[Callable], Callable]  # reference -> the function that is timed
HOW = {  # what torch.compile is told
    "inductor": {},
    "max-autotune": dict(mode="max-autotune-no-cudagraphs"),
    "fusion": dict(backend="fusion"),
    ALWAYS: dict(backend="fusion", options={"fusion.gate": "always"}),
}


def compiled(how: dict) -> Maker:
    return lambda reference: torch.compile(lambda *args: reference(*args), dynamic=False, **how)


CONTENDERS: dict[str, Maker] = {
    "eager": lambda reference: reference,
    **{name: compiled(how) for name, how in HOW.items()},
    FLEX: lambda reference: reference.flex(),
}


def step(fn: Callable, args: list, dys: list[Tensor] | None) -> list[Tensor]:
    """The results, and with `dys` the gradients of the arguments."""
    outs = results_of(fn, args)
    if dys is None:
        return outs
    return [
        *outs,
        *torch.autograd.grad(
            outs, [a for a in args if isinstance(a, Tensor) and a.requires_grad], dys
        ),
    ]


def results_of(fn: Callable, args: list) -> list[Tensor]:
    out = fn(*args)
    return list(out) if isinstance(out, tuple) else [out]


def gradients_for(outs: list[Tensor]) -> list[Tensor]:
    """Random gradients in memory as AOTAutograd has them: contiguous, or channels-last as the
    result. It copies others first, outside of the code that contenders compile.
    """
    return [
        torch.randn_like(
            out,
            memory_format=torch.channels_last
            if out.dim() == 4 and out.is_contiguous(memory_format=torch.channels_last)
            else torch.contiguous_format,
        )
        for out in outs
    ]


def sites(pattern: str) -> tuple[list[dict], str]:
    """What fusion reports about this row, and why the pattern is left to Inductor, if it is."""
    found = fusion_backend.report().sites
    of_it = [s for s in found if s.pattern == pattern]
    why = of_it[0].reason if of_it else "not recognised"
    listed = [
        dict(
            pattern=s.pattern,
            fused=s.fused,
            reason=s.reason,
            forward=s.forward,
            backward=s.backward,
        )
        for s in found
    ]
    return listed, "" if any(s.fused for s in of_it) else why


def nothing_declined(mine: Contender | None, pattern: str) -> bool:
    """Has the default gate taken whatever fusion.gate=always can take?"""
    of_it = [site for site in mine.sites if site["pattern"] == pattern] if mine else []
    return bool(of_it) and all(
        site["fused"] and site["forward"] in ("kernel", "library") for site in of_it
    )
