"""Generated kernels: programs on rows and their gradients, against fp64."""

import weakref

import pytest
import torch

from fusion_backend.compat import inductor
from fusion_backend.extend.generated_rows import MOST, NORM, generated_rows
from fusion_backend.kernels.generated import rows
from fusion_backend.kernels.generated.program import OPERATIONS, Writer, evaluated, parsed
from fusion_backend.kernels.generated.text import ALL, Place
from fusion_backend.reporting.reject import Reject
from tests.kernel_checks import CLOSE, DEVICE, FLOATS, distance, randn, runs_kernels, symbolic

SOFTMAX = "v0 = mul t0 t1; v1 = where c0 v0 -1e+30; v2 = softmax v1; v3 = mul t2 v2; return v3"
IN_GRADIENTS = {"greater", "equal"}
# at the edges of these, a derivative has two values
ONE_SIDED = {"maximum": "v0 = maximum t0 t1; v1 = maximum v0 0.25; return v1"}
ONE_SIDED["minimum"] = ONE_SIDED["maximum"].replace("maximum", "minimum")


def check(program, given, dtype=torch.float32, factor=4, wanted=None):
    """The kernels' results and gradients against autograd in fp64."""
    given = {k: t.to(DEVICE) for k, t in given.items()}
    exact = {k: t if t.dtype == torch.bool else t.double() for k, t in given.items()}
    floats = [k for k in given if k[0] == "t"] if wanted is None else wanted
    for name in floats:
        exact[name] = exact[name].detach().requires_grad_()
    values = dict(exact)
    for name, op, operands in parsed(program).statements:
        values[name] = OPERATIONS[op].torch(*(values.get(o, o) for o in operands))
    want = values[parsed(program).results[0]].expand(rows.shape_of(given))
    d = randn(*want.shape, dtype=dtype)
    got = rows.forward(program, given, dtype)
    assert got.dtype == dtype and got.is_contiguous()
    assert distance(got, want) <= factor * CLOSE[dtype]
    found = rows.backward(program, d, given, tuple(floats))
    wanted = torch.autograd.grad(want, [exact[k] for k in floats], d.double())
    for name, gradient in zip(floats, wanted, strict=True):
        assert found[name].dtype == given[name].dtype
        error = (found[name].double() - gradient).norm()
        # a sum may cancel: the error is one of its terms
        assert error <= factor * CLOSE[dtype] * max(gradient.norm(), d.norm().double()), name


def floats(dtype, **shapes):
    return {name: randn(*shape, dtype=dtype) for name, shape in shapes.items()}


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (7, 100), (3, 2049), (2, 3, 5, 33), (100,)])
def test_a_norm_with_what_surrounds_it(shape, dtype):
    n = shape[-1:]
    given = floats(dtype, t0=shape, t1=n, t2=n, t3=shape)
    program = NORM.replace("1e-05", "0.1") if n == (1,) else NORM
    check(program, given, dtype)


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 100), (3, 2049), (2, 3, 5, 33)])
def test_a_softmax_with_what_surrounds_it(shape, dtype):
    given = floats(dtype, t0=shape, t1=(), t2=shape) | {"c0": randn(*shape) > -1}
    check(SOFTMAX, given, dtype)


FORMS = {
    "whole": lambda a, t, n: randn(a, t, n),
    "a vector": lambda a, t, n: randn(n),
    "a number a row": lambda a, t, n: randn(a, t, 1),
    "a row a sample": lambda a, t, n: randn(a, 1, n),
    "a row a place": lambda a, t, n: randn(t, n),
    "a number a place": lambda a, t, n: randn(t, 1),
    "a number a sample": lambda a, t, n: randn(a, 1, 1),
    "a number": lambda a, t, n: randn(),
    "one number of three dimensions": lambda a, t, n: randn(1, 1, 1),
    "transposed": lambda a, t, n: randn(a, n, t).transpose(1, 2),
    "samples last": lambda a, t, n: randn(t, n, a).permute(2, 0, 1),
    "expanded": lambda a, t, n: randn(a, 1, n).expand(a, t, n),
    "an expanded vector": lambda a, t, n: randn(n).expand(a, t, n),
    "expanded columns": lambda a, t, n: randn(a, t, 1).expand(a, t, n),
    "an expanded number": lambda a, t, n: randn(1, 1, 1).expand(a, t, n),
    "a slice of columns": lambda a, t, n: randn(a, t, 2 * n)[..., n:],
    "every other row": lambda a, t, n: randn(a, 2 * t, n)[:, ::2],
    "every other column": lambda a, t, n: randn(2 * n)[::2],
}


@runs_kernels
@pytest.mark.parametrize("sizes", [(3, 5, 33), (1, 4, 8), (4, 1, 8), (1, 1, 16), (2, 3, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_is_read_where_it_lies(form, sizes):
    other = FORMS[form](*sizes)
    given = dict(t0=randn(*sizes), t1=other)
    check("v0 = mean t0; v1 = mul t0 v0; v2 = mul t1 v1; v3 = add t1 v2; return v3", given)


@runs_kernels
@pytest.mark.parametrize("op", sorted(OPERATIONS.keys() - IN_GRADIENTS))
def test_every_operation_has_a_value_and_a_gradient(op):
    one = f"v0 = {op} t0; v1 = mul v0 t1; return v1"
    two = f"v0 = {op} t0 t1; v1 = {op} v0 1.5; return v1"
    binary = op in ("add", "mul", "div")
    programs = {"where": "v0 = where c0 t0 t1; v1 = where c0 2.0 v0; return v1"} | ONE_SIDED
    program = programs.get(op, two if binary else one)
    given = dict(t0=randn(6, 40), t1=randn(6, 40))
    if op in ("sqrt", "rsqrt", "div"):
        given = {k: t.abs() + 0.5 for k, t in given.items()}
    check(program, given | ({"c0": randn(6, 40) > 0} if op == "where" else {}), factor=8)


@runs_kernels
def test_of_two_equal_values_each_gets_half_and_a_value_that_equals_a_number_nothing():
    t = torch.ones(2, 8, device=DEVICE)
    given, d = dict(t0=t, t1=t.clone()), torch.full((2, 8), 3.0, device=DEVICE)
    for op in ("maximum", "minimum"):
        found = rows.backward(f"v0 = {op} t0 t1; return v0", d, given, ("t0", "t1"))
        assert all(torch.equal(g, d / 2) for g in found.values())
        (none,) = rows.backward(f"v0 = {op} t0 1.0; return v0", d, dict(t0=t), ("t0",)).values()
        assert not none.any()


@runs_kernels
@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_nan_goes_through_as_in_torch(op):
    nan = torch.tensor([[float("nan"), 1.0, 2.0, -3.0]], device=DEVICE)
    for given in (dict(t0=nan, t1=nan.flip(1)), dict(t0=nan.flip(1), t1=nan)):
        program = f"v0 = {op} t0 t1; v1 = {op} v0 0.5; return v1"
        got = rows.forward(program, given, torch.float32)
        want = evaluated(parsed(program), given)[0]
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@runs_kernels
def test_a_row_of_minus_infinity_alone_is_nan_in_a_softmax_and_others_are_not():
    x = torch.randn(3, 5, device=DEVICE)
    x[1] = float("-inf")
    x[2, 0] = float("-inf")
    got = rows.forward("v0 = softmax t0; return v0", dict(t0=x), torch.float32)
    torch.testing.assert_close(got, torch.softmax(x, -1), equal_nan=True)


@runs_kernels
def test_the_length_of_a_row_of_zeros_has_no_gradient():
    """As in torch; a root of 0 has none otherwise."""
    x, y, d = (torch.randn(3, 24, device=DEVICE, requires_grad=True) for _ in "xyd")
    with torch.no_grad():
        x[1] = 0
    program = "v0 = mul t0 t0; v1 = sum v0; v2 = sqrt v1; v3 = mul t1 v2; return v3"
    want = torch.autograd.grad(y * x.norm(dim=-1, keepdim=True), (x, y), d)
    with torch.no_grad():
        got = rows.backward(program, d, dict(t0=x, t1=y), ("t0", "t1"))
    for mine, its in zip(got.values(), want, strict=True):
        torch.testing.assert_close(mine, its)


@runs_kernels
def test_what_lies_beyond_adds_nothing_where_a_function_has_no_value_for_it():
    """Columns beyond a row and rows beyond the last are read as 0, where 1 / √x is
    infinite.
    """
    given = dict(t0=randn(4, 33).abs() + 1, t1=randn(33).abs() + 1, t2=randn(4, 33))
    program = (
        "v0 = rsqrt t0; v1 = rsqrt t1; v2 = div v0 v1; v3 = mean v2; v4 = mul t2 v3; return v4"
    )
    check(program, given)


@runs_kernels
def test_gradients_are_sums_over_more_rows_than_programs_take_at_once():
    n = 24
    given = floats(torch.float32, t0=(3000, n), t1=(n,), t2=(n,), t3=(3000, n))
    check(NORM, given, factor=16)


@runs_kernels
def test_a_gradient_that_nobody_wants_is_not_computed():
    given = floats(torch.float32, t0=(3, 16), t1=(16,), t2=(16,), t3=(3, 16))
    check(NORM, given, wanted=["t1"])
    assert rows.backward(NORM, randn(3, 16), given, ("t3",)).keys() == {"t3"}


def test_a_program_is_written_as_it_is_read():
    for text in (NORM, SOFTMAX):
        assert str(parsed(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v0 = log t0; return v0",
        "v0 = mean t0",
        "return v0",
        "v0 = import t0; return v0",
        "v0 = mean v1; return v0",
        "v0 = mean t0; v0 = mean t0; return v0",
        "os = mean t0; return os",
        "v0 = mean t0; return v1",
        "v0 = add t0 __import__; return v0",
    ],
)
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match="."):
        parsed(text)


def test_inductor_knows_the_names_of_kernels_that_this_process_has_not_made(monkeypatch):
    monkeypatch.setattr(inductor, "ANALYSED", weakref.WeakKeyDictionary())
    assert {"generated_rows_kernel", "generated_rows_backward_kernel"} <= inductor.names_of_ours()


def test_what_changes_nothing_is_no_statement_and_equal_ones_are_one():
    write = Writer()
    first = write("add", "t0", "t1")
    assert write("add", "t1", "t0") == first
    assert write("mul", 1.0, first) == write("add", first, 0.0) == write("div", first, 1.0) == first
    assert write("div", 1.0, first) != first
    assert len(write.statements) == 2


def test_where_tensors_lie():
    shape = (2, 3, 5, 8)
    assert rows.place_of(torch.empty(shape), shape) == ALL
    assert rows.place_of(torch.empty(8), shape) == Place((0, 0, 0, 1), (1, 1), tall=False)
    a_row = Place((0, 0, 0, 0), dense=True, wide=False)
    assert rows.place_of(torch.empty(2, 3, 5, 1), shape) == a_row
    assert rows.place_of(torch.empty(2, 1, 1, 8), shape) == Place((8, 0, 0, 1), (3, 5))
    one = Place((0, 0, 0, 0), (1, 1), tall=False, wide=False)
    assert rows.place_of(torch.empty(()), shape) == one
    assert rows.place_of(torch.empty(8).expand(shape), shape) == Place((0, 0, 0, 1), (1, 1))
    wide = torch.empty(2, 3, 5, 16)[..., 8:]
    assert rows.place_of(wide, shape) == Place((240, 80, 16, 1), (3, 5))


LONG = "; ".join(
    ["v0 = exp t0", *(f"v{i + 1} = tanh v{i}" for i in range(MOST)), f"return v{MOST}"]
)


@pytest.mark.parametrize(
    ("told", "program", "shapes"),
    [
        ("49 operations are more than 48", LONG, [(2, 8)]),
        ("is not between 1 and 4096", NORM, [(2, 4097), (4097,), (4097,), (2, 4097)]),
        ("sum of a value that is one number", "v0 = mean t0; v1 = sum v0; return v1", [(2, 8)]),
        ("the result is one number", "v0 = mean t0; return v0", [(2, 8)]),
        ("has 5 dimensions", NORM, [(1, 1, 1, 2, 8), (8,), (8,), (2, 8)]),
    ],
)
def test_what_a_kernel_does_not_take_is_said(told, program, shapes):
    given = [torch.empty(s, device="meta") for s in shapes]
    missing = [None] * (10 - len(given))
    answer = generated_rows.ask("guard", program, "float32", *given, *missing)
    assert isinstance(answer, Reject) and told in answer.reason


def test_any_number_of_rows_is_taken_without_a_guard():
    missing = [None] * 6
    env, given = symbolic(*(torch.empty(s) for s in ((5, 16), (16,), (16,), (5, 16))))
    with given[0].fake_mode:
        x, w, b, y = (given[0].new_empty(given[0].shape[0], 16), *given[1:3], None)
        y = torch.empty_like(x)
        assert generated_rows.ask("guard", NORM, "float32", x, w, b, y, *missing) is None
        a_sample = x.new_empty(x.shape[0], 1, 16).expand(x.shape[0], 3, 16)
        answer = generated_rows.ask("guard", NORM, "float32", a_sample, w, b, a_sample, *missing)
    assert answer is None and not env.guards


def test_other_kinds_of_numbers_are_refused():
    for dtype in (torch.float64, torch.int64, torch.bool):
        given = torch.empty(2, 8, device="meta", dtype=dtype), *[None] * 9
        answer = generated_rows.ask("guard", "v0 = softmax t0; return v0", "float32", *given)
        assert isinstance(answer, Reject) and "t0 is " in answer.reason
