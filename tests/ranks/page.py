"""What stands around the code of docs/distributed.md while it is tested. `with_hooks` writes a
program, and its ranks call the hooks.
"""

from __future__ import annotations

import contextlib
import json
import os

import torch

import fusion_backend

from .. import quick_pytorch
from ..doc_blocks import Block
from ..eager_kernels import eager_kernels

SAID = "fused at line "
ENTERED = contextlib.ExitStack()  # until the program ends; what nobody holds would be left at once


def with_hooks(blocks: list[Block]) -> str:
    """A program of these blocks, which says after each what was fused in it."""
    lines = ["from tests.ranks.page import begin, fused", "begin()"]
    for block in blocks:
        lines += [block.text, f"fused({block.line})"]
    return "\n".join(lines)


def begin() -> None:
    """On a CPU all sites are fused, and what Inductor would compile runs operator by operator."""
    torch.set_num_threads(1)
    quick_pytorch.hasten()
    ENTERED.enter_context(eager_kernels())
    compile = torch.compile

    def fusing(model, *, backend="inductor", **how):
        if backend == "fusion":
            how["options"] = {"fusion.gate": "always"} | how.get("options", {})
        return compile(model, backend=backend, **how)

    torch.compile = fusing


def fused(line: int) -> None:
    report = fusion_backend.report()
    assert not [g.error for g in report.graphs if g.error], report
    sites = sorted({s.pattern for s in report.sites if s.fused})
    told = f"{SAID}{line} on {os.environ['RANK']}: {json.dumps(sites)}"
    os.write(1, f"{told}\n".encode())  # at once, and not mixed with the other rank's
    fusion_backend.reset()
