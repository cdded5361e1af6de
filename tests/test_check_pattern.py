"""check_pattern can fail: patterns with one fault each, in each of their functions."""

import re

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import launch, reject_layouts, reject_rows
from fusion_backend.ops.registry import unregister
from fusion_backend.reporting.reject import PatternError
from fusion_backend.testing import check_pattern

pytestmark = pytest.mark.usefixtures("scratch")
FP32 = (torch.float32,)


@triton.jit
def tanh_kernel(X, OUT, KEPT, n, SAVE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, i < n).to(tl.float32)
    e = tl.exp(-2 * tl.abs(x))
    tl.store(OUT + i, tl.where(x < 0, e - 1, 1 - e) / (1 + e), i < n)
    if SAVE:
        tl.store(KEPT + i, 4 * e / ((1 + e) * (1 + e)), i < n)


def forward(x, save):
    out, kept = (
        torch.empty_like(x),
        torch.empty_like(x, dtype=torch.float32) if save else x.new_empty(0),
    )
    launch(
        tanh_kernel, (triton.cdiv(x.numel(), 128),), x, out, kept, x.numel(), SAVE=save, BLOCK=128
    )
    return out, kept


def scaled_by(results, s):
    return (results[0] if s is None else results[0] * s, results[1])


def sound(**functions) -> Pattern:
    """tanh(x) · s with all of its functions, of which some may be given."""
    unregister("scaled")

    @Pattern
    def scaled(x: Tensor, s: float | None) -> Tensor:
        return functions.get(
            "reference", lambda x, s: torch.tanh(x) if s is None else torch.tanh(x) * s
        )(x, s)

    def add(decorator, name, default):
        decorator(functions.get(name, default))

    def spelling(x, s):
        y = 2 * torch.sigmoid(2 * x) - 1
        return y if s is None else y * s

    add(scaled.inputs(dict(n=300), dict(n=1 << 20)), "inputs", lambda tensor, n: (tensor(n), 0.7))
    add(scaled.spelling, "spelling", spelling)
    add(scaled.near_miss, "near_miss", lambda x, s: torch.sin(x) if s is None else torch.sin(x) * s)
    add(scaled.guard, "guard", lambda x, s: reject_layouts(x=x))
    add(scaled.worthwhile, "worthwhile", lambda x, s, training: Reject("not timed"))
    add(
        scaled.kernel(saves=("slope",)), "kernel", lambda x, s, save: scaled_by(forward(x, save), s)
    )
    add(scaled.saved, "saved", lambda x, s: 1 - torch.tanh(x.float()) ** 2)
    add(
        scaled.backward,
        "backward",
        lambda saved, dy: (dy * saved.slope * (saved.s or 1.0)).to(dy.dtype),
    )
    return scaled


def test_all_functions_of_a_sound_pattern_are_checked():
    proof = check_pattern(sound())
    assert proof.not_run == []
    assert {line.split(" at ")[0].split(":")[0] for line in proof.checked} == {
        "inputs", "reference", "rewritten graph", "spelling", "near miss", "guard", "worthwhile",
        "kernel, without gradients", "kernel, with gradients", "backward (kernel), forward inlined",
        "kernel on other strides",
        "opcheck of fusion.scaled.default and fusion.scaled_backward.default",
    }  # fmt: skip
    assert (
        "kernel, with gradients: agrees with the reference in all 2 forms in fp32, bf16, fp16"
        in proof.checked
    )
    assert str(proof).startswith("scaled: checked\n  inputs: 2 cases\n")


def test_the_kernel_runs_on_other_strides():
    """Refused by the guard, or compared: a kernel that walks through memory is wrong there."""
    (said,) = [line for line in check_pattern(sound(), FP32).checked if "strides" in line]
    assert said == "kernel on other strides: the guard refuses elements two apart"
    with pytest.raises(AssertionError, match="with gradients, on elements two apart, for .*error"):
        check_pattern(sound(guard=lambda x, s: None), FP32)


@pytest.mark.parametrize("like", ["the copy", "x"])
def test_a_result_with_the_strides_of_what_was_copied(like):
    """The kernel reads a contiguous copy: a result with the strides of x has its rows mixed up."""

    @Pattern
    def scaled(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @scaled.guard
    def _(x):
        return reject_rows(x)

    @scaled.kernel
    def _(x):
        copy = x.contiguous()
        out, n = torch.empty_like(x if like == "x" else copy), x.numel()
        launch(tanh_kernel, (triton.cdiv(n, 128),), copy, out, out, n, SAVE=False, BLOCK=128)
        return out

    scaled.inputs(dict())(lambda tensor: (tensor(2, 3, 20),))
    if like == "x":
        with pytest.raises(AssertionError, match="on leading dimensions swapped, for .*error"):
            check_pattern(scaled, FP32)
    else:
        assert "leading dimensions swapped" in str(check_pattern(scaled, FP32))


ARGUMENTS = {
    "inputs": "tensor, n", "worthwhile": "x, s, training", "kernel": "x, s, save",
    "backward": "saved, dy",
}  # fmt: skip
FUNCTIONS = [
    "reference",
    "spelling",
    "near_miss",
    "guard",
    "worthwhile",
    "kernel",
    "saved",
    "backward",
    "inputs",
]
TYPOS = [(name, "torch.tnah", "AttributeError") for name in FUNCTIONS]
TYPOS += [("near_miss", "torsh.tanh", "NameError"), ("kernel", "torsh.tanh", "NameError")]


@pytest.mark.parametrize("name, typo, error", TYPOS)
def test_a_typo_in_any_function_is_an_error(name, typo, error):
    namespace = {"torch": torch}
    exec(f"def f({ARGUMENTS.get(name, 'x, s')}):\n    return {typo}", namespace)
    broken = sound(**{name: namespace["f"]})
    what = {"near_miss": "near miss"}.get(name, name)
    with pytest.raises(
        PatternError, match=rf"pattern scaled \(.*: the {what} at line \d+ raised {error}"
    ):
        check_pattern(broken, dtypes=FP32)


@pytest.mark.parametrize(
    "typo, error", [("torch.tnah(x)", "AttributeError"), ("torsh.tanh(x)", "NameError")]
)
@pytest.mark.parametrize("name", ["reference", "spelling", "near_miss"])
def test_a_typo_in_one_form_alone_is_an_error(name, typo, error):
    """The other form runs and is right."""
    namespace = {"torch": torch}
    exec(f"def f(x, s):\n    return torch.tanh(x) if s is None else {typo} * s", namespace)
    with pytest.raises(PatternError, match=rf"raised {error} for .*'tensor', 'scalar'"):
        check_pattern(sound(**{name: namespace["f"]}), dtypes=FP32)


def test_a_form_may_be_refused_where_another_one_runs():
    """`x * None`, or an attribute of None, is a form that a function does not take; the result says
    so.
    """
    proof = check_pattern(
        sound(
            spelling=lambda x, s: (2 * torch.sigmoid(2 * x) - 1) * s,
            near_miss=lambda x, s: x * s.real,
        ),
        dtypes=FP32,
    )
    refused = [line.split(": ", 1)[1] for line in proof.not_run]
    assert refused == [
        "it raises TypeError: unsupported operand type(s) for *: 'Tensor' and 'NoneType'",
        "it raises AttributeError: 'NoneType' object has no attribute 'real'",
    ]
    assert all("(tensor, none)" in line for line in proof.not_run)
    assert sum("in (tensor, scalar)" in line for line in proof.checked) == 2


def test_a_function_that_runs_in_no_form_is_an_error_with_the_one_that_got_furthest():
    def stumbles(x, s):
        if s is None:
            raise ValueError("first")
        y = torch.tanh(x)
        return y @ torch.ones(7)

    for name, what in (("spelling", "spelling"), ("near_miss", "near miss")):
        line = stumbles.__code__.co_firstlineno
        with pytest.raises(
            PatternError,
            match=rf"the {what} at line {line} raised RuntimeError in every form.*scalar",
        ):
            check_pattern(sound(**{name: stumbles}), dtypes=FP32)


WRONG = {
    "a spelling of something else": (dict(spelling=lambda x, s: torch.sin(x) * (s or 1.0)),
    "disagrees"),
    "a spelling that is not recognised": (
        dict(spelling=lambda x, s: torch.complex(torch.tanh(x), x).real * (s or 1.0)),
        "is not recognised"
    ),
    "a near miss that is a spelling": (dict(near_miss=lambda x, s: (s or 1.0) * torch.tanh(x)),
    "it is a spelling"),
    "a near miss that the example inputs do not show": (
        dict(near_miss=lambda x, s: torch.tanh(x).clamp(-9, 9) * (s or 1.0)),
        "do not show the difference"
    ),
    "a near miss that has the pattern in it": (dict(near_miss=lambda x,
    s: (torch.tanh(x) * (s or 1)).sin()),
                                               "is recognised"),
    "a guard that says False": (dict(guard=lambda x, s: False),
    "its guard at line .* returned False"),
    "a wrong kernel": (dict(kernel=lambda x, s, save: tuple(1.01 * t for t in forward(x, save))),
    "result 0 of kernel"),
    "a kernel wrong without save": (
        dict(kernel=lambda x, s, save: (forward(x, save)[0] * (s or 1.0) if save else x + 1,
        forward(x, save)[1])),
        "result 0 of kernel, without gradients",
    ),
    "a wrong backward": (dict(backward=lambda saved, dy: dy * saved.slope),
    "gradient 0 of kernel, with gradients"),
    "a wrong `saved`": (dict(saved=lambda x, s: torch.tanh(x)),
    "gradient 0 of backward .kernel., forward inlined"),
    "a launcher that is another thing on fakes": (
        dict(kernel=lambda x, s, save: scaled_by(forward(x, save),
        s) if type(x) is Tensor else (x[:9], x[:0])),
        "on fake tensors",
    ),
    "a backward that writes to its argument": (
        dict(backward=lambda saved, dy: (dy.mul_(saved.slope * (saved.s or 1.0)) + 0)),
        "opcheck of fusion.scaled_back"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_in_any_function_is_found(fault):
    functions, words = WRONG[fault]
    with pytest.raises(
        (PatternError, AssertionError),
        match=rf"(?s)pattern scaled \(.*_check_pattern.py:\d+\): .*{words}",
    ):
        check_pattern(sound(**functions), dtypes=FP32)


def test_in_half_precision_too():
    """A kernel that is wrong in bf16 alone."""

    def kernel(x, s, save):
        out, kept = forward(x, save)
        return out * (s or 1.0) + (0.1 if x.dtype == torch.bfloat16 else 0), kept

    with pytest.raises(AssertionError, match="result 0 of kernel, .* in torch.bfloat16"):
        check_pattern(sound(kernel=kernel))


def test_the_proof_says_what_was_not_run():
    @Pattern
    def without_kernel(x: Tensor) -> Tensor:
        return torch.tanh(x).sin()

    proof = check_pattern(without_kernel)
    assert proof.not_run == ["kernel: the pattern has none"]
    assert not any("agree" in line and "kernel" in line for line in proof.checked)


def test_a_kernel_that_the_guard_refuses_is_not_run():
    proof = check_pattern(
        sound(guard=lambda x, s: Reject("x is small") if x.numel() < 1000 else None)
    )
    said = [line for line in proof.not_run if "kernel" in line]
    assert "kernel in bf16 in all 2 forms: x is small" in said
    assert any("in no form and dtype" in line for line in said)
    assert not any("kernel, with" in line for line in proof.checked)


def test_without_gpu_and_interpreter_kernels_are_not_run(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("it has a GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    proof = check_pattern(sound())
    said = [
        line
        for line in proof.not_run
        if line.endswith("no CUDA device and TRITON_INTERPRET is not set")
    ]
    assert len(said) == 3 and not any(
        line.startswith(("kernel", "backward")) for line in proof.checked
    )


def test_dropout_and_a_typo_in_the_seeded_reference():
    @Pattern
    def dropped(x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p, True).sin()

    @dropped.seeded
    def _(x, p, seed):
        return torch.sinn(x)

    with pytest.raises(PatternError, match="the seeded reference at line .* raised AttributeError"):
        check_pattern(dropped)


def test_a_typo_in_a_library_provider():
    @Pattern
    def sine_of_tan(x: Tensor) -> Tensor:
        return torch.tan(x).sin()

    @sine_of_tan.replacement
    def _(x):
        return torch.tnah(x)

    with pytest.raises(PatternError, match="the replacement at line .* raised AttributeError"):
        check_pattern(sine_of_tan)


def test_a_proof_names_the_forms_where_they_are_few():
    proof = check_pattern(sound(near_miss=lambda x, s: torch.sin(x) + s), dtypes=FP32)
    (line,) = [line for line in proof.checked if line.startswith("near miss")]
    assert re.search(r"is left alone in \(tensor, scalar\)$", line)
