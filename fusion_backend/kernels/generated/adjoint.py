"""The gradient of a program, as a program: reverse-mode differentiation, statement by statement.

A value that is the same for all elements of a row gets the sum of its elements' gradients at once.
A value that is the same for all rows gets a gradient for each row: the kernel adds these up at the
end, for the tensors that the program is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusion_backend.kernels.generated.program import (
    KEEPS_COLUMNS,
    LENGTH,
    OPERATIONS,
    Operand,
    Program,
    Writer,
    is_name,
    without_unread,
    written,
)

GRADIENT = "t99"  # the result's gradient in the program of the others: no op has as many tensors
Gradient = Callable[..., tuple[Operand | None, ...]]
GRADIENTS: dict[str, Gradient] = {}


def gradient_of(op: str) -> Callable[[Gradient], Gradient]:
    """Register `f(write, d, result, *operands)`, which gives the operands' gradients from that of
    the result, d; None for an operand that has none.
    """
    return lambda f: GRADIENTS.setdefault(op, f)


@gradient_of("add")
def _(write, d, v, a, b):
    return d, d


@gradient_of("mul")
def _(write, d, v, a, b):
    return write("mul", d, b), write("mul", d, a)


@gradient_of("div")
def _(write, d, v, a, b):
    q = write("div", d, b)
    return q, write("mul", write("mul", q, v), -1.0)


@gradient_of("maximum")
def _(write, d, v, a, b):
    return chosen(write, d, a, b, lambda x, y: write("greater", x, y))


@gradient_of("minimum")
def _(write, d, v, a, b):
    return chosen(write, d, a, b, lambda x, y: write("greater", y, x))


def chosen(write, d, a, b, wins):
    """Each operand has the gradient where it wins. Of two equal values each gets half; a value that
    equals a number has none, as that of relu(0).
    """
    half = 0.0
    if is_name(a) and is_name(b):
        half = write("where", write("equal", a, b), write("mul", d, 0.5), 0.0)
    return write("where", wins(a, b), d, half), write("where", wins(b, a), d, half)


@gradient_of("where")
def _(write, d, v, condition, a, b):
    return None, write("where", condition, d, 0.0), write("where", condition, 0.0, d)


@gradient_of("exp")
def _(write, d, v, a):
    return (write("mul", d, v),)


@gradient_of("sqrt")
def _(write, d, v, a):
    """Nothing at 0, as in torch for the length of a row of zeros. Of any other root of 0 torch's is
    infinite, or NaN.
    """
    slope = write("div", write("mul", d, 0.5), v)
    return (write("where", write("equal", v, 0.0), 0.0, slope),)


@gradient_of("rsqrt")
def _(write, d, v, a):
    cube = write("mul", write("mul", v, v), v)
    return (write("mul", write("mul", d, cube), -0.5),)


@gradient_of("sigmoid")
def _(write, d, v, a):
    return (write("mul", d, write("mul", v, write("add", write("mul", v, -1.0), 1.0))),)


@gradient_of("tanh")
def _(write, d, v, a):
    return (write("mul", d, write("add", write("mul", write("mul", v, v), -1.0), 1.0)),)


@gradient_of("erf")
def _(write, d, v, a):
    return (write("mul", d, write("mul", bell(write, a, -1.0), 1.1283791670955126)),)


@gradient_of("abs")
def _(write, d, v, a):
    below = write("where", write("greater", 0.0, a), write("mul", d, -1.0), 0.0)
    return (write("where", write("greater", a, 0.0), d, below),)


@gradient_of("gelu")
def _(write, d, v, a):
    """Φ(a) + a · φ(a)"""
    bent = write("erf", write("mul", a, 0.7071067811865476))
    half = write("mul", write("add", bent, 1.0), 0.5)
    density = write("mul", bell(write, a, -0.5), 0.3989422804014327)
    return (write("mul", d, write("add", half, write("mul", a, density))),)


@gradient_of("gelu_tanh")
def _(write, d, v, a):
    """s + a · s · (1 - s) · u', with s = σ(u), u = 1.5958 (a + 0.044715 a³)."""
    square = write("mul", a, a)
    cubic = write("add", write("mul", square, 0.07135481282553557), 1.5957691216057308)
    s = write("sigmoid", write("mul", a, cubic))
    slope = write("add", write("mul", square, 0.2140644384766067), 1.5957691216057308)
    bent = write("mul", write("mul", s, write("add", write("mul", s, -1.0), 1.0)), slope)
    return (write("mul", d, write("add", s, write("mul", a, bent))),)


def bell(write, a, factor: float):
    """exp(factor · a²)"""
    return write("exp", write("mul", write("mul", a, a), factor))


@gradient_of("sum")
def _(write, d, v, a):
    return (d,)


@gradient_of("mean")
def _(write, d, v, a):
    return (write("div", d, LENGTH),)


@gradient_of("softmax")
def _(write, d, v, a):
    total = write("mul", write("sum", write("mul", d, v)), -1.0)
    return (write("mul", v, write("add", d, total)),)


def columns_of(program: Program, given: Mapping[str, bool]) -> dict[str, bool]:
    """Which values differ from element to element of a row? given: that of the tensors. Raises
    ValueError where elements are added up that are one number, or where the result is one.
    """
    found = dict(given)
    for name, op, operands in program.statements:
        wide = any(found[o] for o in operands if is_name(o))
        if OPERATIONS[op].across and not wide:
            raise ValueError(f"{op} of a value that is one number for a row")
        found[name] = op in KEEPS_COLUMNS or (wide and not OPERATIONS[op].across)
    if not all(found[name] for name in program.results):
        raise ValueError("the result is one number for a row")
    return found


def gradients(
    program: Program, columns: Mapping[str, bool], wanted: tuple[str, ...]
) -> tuple[Program, tuple[str, ...]]:
    """The program of the gradients of the wanted tensors, and those that have one. It reads the
    program's tensors and the gradient of its one result, GRADIENT. columns: which tensors differ
    from element to element of a row?
    """
    wide = columns_of(program, columns)
    depends = {*wanted}
    for name, _, operands in program.statements:
        if not depends.isdisjoint(operands):
            depends.add(name)
    write = Writer(len(program.statements))
    for name, op, operands in program.statements:
        write.known[op, *map(written, operands)] = name
    (result,) = program.results
    found: dict[str, Operand] = {result: GRADIENT}
    for name, op, operands in reversed(program.statements):
        if name not in found or name not in depends:
            continue
        parts = GRADIENTS[op](write, found[name], name, *operands)
        for operand, part in zip(operands, parts, strict=True):
            if part is None or operand not in depends:
                continue
            if wide[name] and not wide[operand]:
                part = write("sum", part)
            found[operand] = write("add", found[operand], part) if operand in found else part
    wanted = tuple(name for name in wanted if name in found)
    results = tuple(found[name] for name in wanted)
    return without_unread((*program.statements, *write.statements), results), wanted
