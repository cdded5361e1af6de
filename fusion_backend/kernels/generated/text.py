"""Programs -> Triton kernels: the source of one forward and one backward kernel, and the functions
made of them.

A program holds whole rows. The functions are made from text that `linecache` knows, because Triton
and Inductor read a kernel's source; nothing is written to disk.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import NamedTuple

import triton
import triton.language as tl

from fusion_backend.compat.inductor import MADE_LATER
from fusion_backend.kernels.common.activations import activated, exp, tanh
from fusion_backend.kernels.common.vectors import row_vector
from fusion_backend.kernels.generated.adjoint import GRADIENT, gradients
from fusion_backend.kernels.generated.pieces import row_softmax, row_sum
from fusion_backend.kernels.generated.program import (
    LENGTH,
    OPERATIONS,
    Operand,
    is_name,
    parsed,
)

USED = dict(
    triton=triton, tl=tl, activated=activated, exp=exp, tanh=tanh, row_sum=row_sum,
    row_softmax=row_softmax, row_vector=row_vector,
)  # fmt: skip
FORWARD, BACKWARD = "generated_rows_kernel", "generated_rows_backward_kernel"
MADE_LATER.update((FORWARD, BACKWARD))
SIZES = "N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr"


class Place(NamedTuple):
    """Where a tensor's element of a row and a column lies. `strides` are those of the four
    dimensions `[a, heads, length, n]`, 0 where it is the same for all; sizes are heads and length.
    dense: rows one after the other, whose number may be symbolic. tall and wide: has its shape more
    than one row, and more than one column? An expanded one has, though its strides are 0.
    """

    strides: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    dense: bool = False
    tall: bool = True
    wide: bool = True

    @property
    def has_rows(self) -> bool:
        return self.dense or any(self.strides[:3])

    @property
    def has_columns(self) -> bool:
        return self.strides[3] != 0

    def __str__(self) -> str:
        """The offset, as an expression of row and col."""
        if self.dense:
            return "row * N + col" if self.has_columns else "row"
        heads, length = self.sizes
        at = (f"row // {heads * length}", f"row // {length} % {heads}", f"row % {length}")
        at += ("col" if self.strides[3] == 1 else "col.to(tl.int64)",)
        terms = [f"({x}) * {s}" for x, s in zip(at, self.strides, strict=True) if s]
        return " + ".join(terms)

    @property
    def is_vector(self) -> bool:
        return not self.has_rows and self.strides[3] == 1

    @property
    def mask(self) -> str:
        """Which elements there are."""
        rows, columns = self.has_rows, self.has_columns
        return "mask" if rows and columns else "valid" if rows else "inside" if columns else ""


ALL = Place((0, 0, 0, 1), dense=True)  # a tensor of the shape of the result
Places = tuple[tuple[str, Place], ...]


class Sums(NamedTuple):
    """The wanted gradients of a backward: of elements or rows, written at once, and sums over rows,
    of which each program writes its own.
    """

    written: tuple[str, ...]
    added: tuple[str, ...]


@functools.lru_cache(256)
def forward_kernel(text: str, places: Places):
    """The kernel of a program: (tensors..., result, rows)."""
    names = [name for name, _ in places]
    body = [*COLUMNS, *rows_of("tl.program_id(0)"), *loads(places)]
    body += map(statement, parsed(text).statements)
    body.append(store("OUT", ALL, parsed(text).results[0]))
    return made(FORWARD, [*pointers(names), "OUT", "rows", SIZES], body)


@functools.lru_cache(256)
def backward_kernel(text: str, places: Places, wanted: tuple[str, ...]):
    """The kernel of the gradients of a program: (gradient of the result, tensors..., gradients
    written..., sums..., rows); and which are which. Programs walk through the rows where there are
    sums.
    """
    place = dict(places)
    columns = {name: p.wide for name, p in places}
    program, found = gradients(parsed(text), columns, wanted)
    kinds = Sums(
        tuple(n for n in found if place[n].tall),
        tuple(n for n in found if not place[n].tall),
    )
    of = dict(zip(found, program.results, strict=True))
    read = {o for s in program.statements for o in s.operands} | {*program.results}
    given = [(GRADIENT, ALL), *((n, p) for n, p in places if n in read)]
    once = [*COLUMNS, *loads(tuple((n, p) for n, p in given if not p.has_rows))]
    step = [*rows_of("block"), *loads(tuple((n, p) for n, p in given if p.has_rows))]
    step += map(statement, program.statements)
    step += [store(f"D_{n.upper()}", packed(place[n]), of[n]) for n in kinds.written]
    step += [accumulated(n, place[n], of[n]) for n in kinds.added]
    names = [GRADIENT, *(n for n, _ in places)]
    outs = [*(f"D_{n.upper()}" for n in kinds.written), *(f"S_{n.upper()}" for n in kinds.added)]
    counts = ["rows"]
    if kinds.added:
        counts.append("programs")
        once += [f"sum_{n} = tl.zeros([ROWS, {width(place[n])}], tl.float32)" for n in kinds.added]
        loop = "for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):"
        step = [loop, *(f"    {line}" for line in step)]
        step += [written_sum(n, place[n]) for n in kinds.added]
    else:
        once.append("block = tl.program_id(0)")
    given = [*pointers(names), *outs, *counts, SIZES]
    return made(BACKWARD, given, [*once, *step]), kinds


def written_sum(name: str, place: Place) -> str:
    """The sum of this program, of which there is a number for each column, or one."""
    at = "N + col, " if place.wide else "1 + tl.arange(0, 1)[None, :], "
    total = f"tl.sum(sum_{name}, 0, keep_dims=True)"
    keep = ", inside" if place.wide else ""
    return f"tl.store(S_{name.upper()} + tl.program_id(0) * {at}{total}{keep})"


def packed(place: Place) -> Place:
    """Where the gradient of a tensor is written: a row for each row, dense."""
    return Place((0, 0, 0, int(place.wide)), dense=True)


def width(place: Place) -> str:
    return "BLOCK" if place.wide else "1"


def pointers(names: list[str]) -> list[str]:
    return [name.upper() for name in names]


COLUMNS = ["col = tl.arange(0, BLOCK)[None, :]", "inside = col < N"]


def rows_of(block: str) -> list[str]:
    """The rows of a block of them."""
    first = (
        f"(tl.zeros([ROWS, 1], tl.int64) + {block}) * ROWS"  # a loop's number may be a Python int
    )
    row = f"row = {first} + tl.arange(0, ROWS)[:, None]"
    return [row, "valid = row < rows", "mask = valid & inside"]


def loads(places: Places) -> list[str]:
    lines = []
    for name, place in places:
        if place.is_vector:
            value = f"row_vector({name.upper()}, tl.arange(0, BLOCK), N)"
        elif place.mask:
            value = f"tl.load({name.upper()} + {place}, {place.mask}, 0)"
        else:  # a number, as a block
            value = f"tl.load({name.upper()} + tl.arange(0, 1)[None, :])"
        lines.append(
            f"{name} = {value} != 0" if name[0] == "c" else f"{name} = {value}.to(tl.float32)"
        )
    return lines


def statement(s) -> str:
    return f"{s.name} = {OPERATIONS[s.op].triton.format(*map(spelled, s.operands))}"


def spelled(operand: Operand) -> str:
    """An operand in a kernel's source."""
    if operand == LENGTH:
        return "N"
    if is_name(operand):
        return operand
    text = repr(float(operand))
    return f"({text})" if text[-1].isdigit() else f'float("{text}")'


def store(pointer: str, place: Place, value: Operand) -> str:
    """Write a value, which may be the same for all columns or rows."""
    shape = "[ROWS, BLOCK]" if place.has_columns else "[ROWS, 1]"
    value = f"{spelled(value)} + tl.zeros({shape}, tl.float32)"
    return f"tl.store({pointer} + {place}, {value}, {place.mask})"


def accumulated(name: str, place: Place, value: Operand) -> str:
    keep = "mask" if place.wide else "valid"
    return f"sum_{name} += tl.where({keep}, {spelled(value)}, 0.0)"


def made(name: str, parameters: list[str], body: list[str]):
    """The kernel of this source."""
    lines = ["@triton.jit", f"def {name}({', '.join(parameters)}):", *(f"    {b}" for b in body)]
    source = "\n".join(lines) + "\n"
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    bound = USED | {"__name__": f"{__name__}.made"}
    exec(compile(source, file, "exec"), bound)
    return bound[name]
