"""What the code that Inductor generated for a graph does at each call: its launches, allocations,
fills and library calls, counted from its text.
"""

from __future__ import annotations

import dataclasses
import re

LAUNCH = re.compile(r"^\s+(\w+)\.run\(", re.MULTILINE)
ALLOCATION = re.compile(r"= empty_strided\w*\(|= torch\.empty\w*\(")
LIBRARY = re.compile(r"\bextern_kernels\.(\w+)\(|= torch\.ops\.([\w.]+)\(")
# operators of ours that Inductor cannot see into, each with one kernel
DIRECT = re.compile(r"= torch\.ops\.fusion\.\w+\.default\.python_function\(")
# kernels that write one number or copy
FILL = re.compile(
    r"^triton_poi_fused_(?:new_)?(?:full|zeros|fill|ones|clone|copy|empty)(_like)?_\d+$"
)


@dataclasses.dataclass
class Counts:
    """What a call does; `fills` are those of Inductor's launches that only fill or copy."""

    ours: int = 0
    inductors: int = 0
    fills: int = 0
    allocations: int = 0
    library: int = 0

    @property
    def launches(self) -> int:
        return self.ours + self.inductors

    def __add__(self, other: Counts) -> Counts:
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a + b for a, b in both))


def is_ours(kernel: str, ours: set[str]) -> bool:
    """Is a kernel of the generated code one of `ours`? Inductor appends a number to their names."""
    return re.sub(r"_\d+$", "", kernel) in ours


def counted(code: str, ours: set[str]) -> Counts:
    """The counts of one generated module; `ours` are the names of our Triton functions."""
    kernels = LAUNCH.findall(code)
    mine = sum(is_ours(kernel, ours) for kernel in kernels)
    direct = len(DIRECT.findall(code))
    return Counts(
        ours=mine + direct,
        inductors=len(kernels) - mine,
        fills=sum(FILL.match(kernel) is not None for kernel in kernels),
        allocations=len(ALLOCATION.findall(code)),
        library=len(LIBRARY.findall(code)) - direct,
    )
