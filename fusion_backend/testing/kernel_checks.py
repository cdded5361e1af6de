"""The kernels of a pattern against its reference, in every form, dtype and decision with which a
graph may call the operator.
"""

from __future__ import annotations

import contextlib

import torch
from torch.library import opcheck

from fusion_backend.compat.torch import FakeTensor, FakeTensorMode
from fusion_backend.kernels.common.inputs import DTYPES as NAMES
from fusion_backend.kernels.common.launch import interpreting, trial
from fusion_backend.ops.op import Op
from fusion_backend.ops.operator import draw, operator_of
from fusion_backend.reporting.reject import PatternError, Reject
from fusion_backend.testing.compare import (
    arguments,
    check_close,
    in_fp64,
    unfused,
    value_and_gradients,
)
from fusion_backend.testing.other_strides import check_strides
from fusion_backend.testing.proof import Proof, in_forms, watched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITHOUT_GRADIENTS = "kernel, without gradients"
INLINED = "forward inlined"
# Tests of torch.library.opcheck.
ON_REAL = ("test_schema", "test_autograd_registration")
ON_FAKES = ("test_faketensor", "test_aot_dispatch_dynamic")


def own_backward(pattern: Op) -> str:
    """The backward provider that the pattern's definition asks for."""
    if pattern.backward_fn is None:
        return "vjp"
    return "formula" if pattern.backward_plain else "kernel"


def decisions_of(pattern: Op) -> dict[str, dict]:
    """The decisions with which a graph may call the operator: in words, and as its keyword
    arguments.
    """
    own, found = own_backward(pattern), {}
    if pattern.kernel_fn is not None:
        found[WITHOUT_GRADIENTS] = dict(forward="kernel", backward="vjp", save=False)
        if pattern.memo["differentiable"]:
            found["kernel, with gradients"] = dict(forward="kernel", backward=own, save=True)
    if pattern.can_inline_forward and not pattern.seed_arguments:
        found[f"backward ({own}), {INLINED}"] = dict(forward="reference", backward=own, save=True)
    return found


def check_kernels(pattern: Op, supported: list, dtypes: tuple, device: str, proof: Proof) -> None:
    """Compare kernel and backward with the reference where they can run on this machine, and check
    the operators by torch.library.opcheck.
    """
    decisions = runnable(pattern, device, proof)
    compared = {words: {} for words in decisions}  # words -> dtype -> forms
    with watched(pattern) as calls:
        for dtype in dtypes if decisions else ():
            due = {w: d for w, d in decisions.items() if is_due(pattern, w, dtype, dtypes)}
            forms, refused = compare_in_forms(pattern, supported, due, dtype, device, calls)
            for words in due:
                compared[words][dtype] = forms
            report_refused(refused, supported, dtype, proof)
        report_compared(compared, supported, proof)
        check_other_strides(pattern, compared, dtypes, device, calls, proof)
        ran = [(k, d) for forms in compared.values() for d in forms for k in forms[d]]
        kinds, dtype = ran[0] if ran else (opcheck_form(pattern, supported), dtypes[0])
        kernel = bool(ran) and any(d["forward"] == "kernel" for d in decisions.values())
        check_operators(pattern, kinds, kernel, dtype, device, proof)


def runnable(pattern: Op, device: str, proof: Proof) -> dict[str, dict]:
    """The decisions that this machine can run; the proof says why the others do not run."""
    decisions = decisions_of(pattern)
    if pattern.kernel_fn is None:
        proof.not_run.append("kernel: the pattern has none")
    if device == "cuda" or interpreting():
        return decisions
    for words in [w for w, decision in decisions.items() if "kernel" in decision.values()]:
        decisions.pop(words)
        proof.not_run.append(f"{words}: no CUDA device and TRITON_INTERPRET is not set")
    return decisions


def check_other_strides(pattern: Op, compared: dict, dtypes: tuple, device: str, calls, proof):
    """In the first form and dtype, with gradients if there are any."""
    decisions = decisions_of(pattern)
    ran = [words for words in compared if decisions[words]["forward"] == "kernel"]
    forms = compared[ran[-1]].get(dtypes[0]) if ran else None
    if not forms:
        return
    kinds, decision = forms[0], decisions[ran[-1]]

    def run(layout: str, *given) -> None:
        what = f"{ran[-1]}, on {layout}, for {kinds} in {dtypes[0]}"
        compare(pattern, what, decision, *given, calls)

    check_strides(pattern, kinds, dtypes[0], device, run, proof)


def is_due(pattern: Op, words: str, dtype: torch.dtype, dtypes: tuple) -> bool:
    """Is the decision compared in this dtype? The kernel is compared in every dtype. Decisions that
    share its code are compared in the first alone: an inlined forward with the backward's kernel,
    and a launcher without `save`.
    """
    shares_launcher = (
        words == WITHOUT_GRADIENTS and not pattern.saves and pattern.memo["differentiable"]
    )
    return dtype == dtypes[0] or not (shares_launcher or words.endswith(INLINED))


def report_refused(refused: dict, supported: list, dtype: torch.dtype, proof: Proof) -> None:
    """Each reason why forms were not compared, once, with its forms."""
    for reason in dict.fromkeys(refused.values()):
        same_reason = [kinds for kinds, r in refused.items() if r == reason]
        where = f"{NAMES.get(dtype, dtype)} {in_forms(same_reason, supported)}"
        proof.not_run.append(f"kernel in {where}: {reason}")


def report_compared(compared: dict[str, dict], supported: list, proof: Proof) -> None:
    for words, by_dtype in compared.items():
        if any(by_dtype.values()):
            where = in_dtypes(by_dtype, supported)
            proof.checked.append(f"{words}: agrees with the reference {where}")
        else:
            why = "the guard takes the example inputs in no form and dtype"
            proof.not_run.append(f"{words}: {why}")


def opcheck_form(pattern: Op, supported: list) -> tuple:
    """A form that draws no random numbers, where the operator has no seed for them."""
    random_forms = pattern.memo.get("random", ())
    return next(
        (k for k in supported if pattern.seed_arguments or k not in random_forms), supported[0]
    )


def in_dtypes(by_dtype: dict[torch.dtype, list], supported: list) -> str:
    """The forms and dtypes in words; dtypes with the same forms together."""
    forms = dict.fromkeys(tuple(kinds) for kinds in by_dtype.values() if kinds)
    parts = []
    for some in forms:
        names = [NAMES.get(d, str(d)) for d, kinds in by_dtype.items() if tuple(kinds) == some]
        parts.append(f"{in_forms(some, supported)} in {', '.join(names)}")
    return "; ".join(parts)


def compare_in_forms(pattern, supported, decisions, dtype, device, calls) -> tuple[list, dict]:
    """The forms that were compared in a dtype, and the reasons why others were not."""
    compared, refused = [], {}
    for kinds in supported:
        args = arguments(pattern, kinds, dtype, device)
        answer = pattern.guard_fn(*args) if pattern.guard_fn is not None else None
        if isinstance(answer, Reject):
            refused[kinds] = answer.reason
            continue
        try:
            plain, exact = unfused(pattern, args), unfused(pattern, in_fp64(args))
        except Exception as error:  # fp16 on a CPU, say
            refused[kinds] = f"the reference raises {type(error).__name__}: {error}"
            continue
        for words, decision in decisions.items():
            what = f"{words}, for {kinds} in {dtype}"
            compare(pattern, what, decision, args, plain, exact, calls)
        if pattern.kernel_fn is not None and not compared and dtype == torch.float32:
            check_on_fakes(pattern, kinds, args)
            check_unread(pattern, kinds, args)
        compared.append(kinds)
    return compared, refused


def compare(
    pattern: Op, what: str, decision: dict, args: list, plain: list, exact: list, calls
) -> None:
    """One decision against the reference in the same dtype and in fp64."""
    before = {name: len(calls.answers[name]) for name in ("kernel_fn", "backward_fn")}

    def run(*inputs):
        return operator_on(pattern, decision, inputs)

    try:
        if decision["save"]:
            got = value_and_gradients(run, args)
        else:
            with torch.no_grad():
                got, plain, exact = (
                    value_and_gradients(run, args),
                    plain[: pattern.outputs],
                    exact[: pattern.outputs],
                )
    except PatternError:
        raise
    except Exception as error:
        raise PatternError(
            f"{pattern.where}: {what}: it raised {type(error).__name__}: {error}"
        ) from error
    check_close(pattern, what, got, plain, exact)
    backward = decision["backward"] != "vjp" and len(plain) > pattern.outputs
    for name, must_run in (
        ("kernel_fn", decision["forward"] == "kernel"),
        ("backward_fn", backward),
    ):
        if must_run and len(calls.answers[name]) == before[name]:
            raise AssertionError(
                f"{pattern.where}: {what}: the {name.removesuffix('_fn')} was not run"
            )


def operator_on(pattern: Op, decision: dict, inputs):
    """The results of the pattern's operator on its arguments, without what it saves for the
    backward.
    """
    out = operator_of(pattern).overload(*flat_arguments(pattern, inputs), **decision)
    return out[: pattern.outputs] if isinstance(out, tuple) else out


def flat_arguments(pattern: Op, inputs) -> list:
    """The arguments as the operator takes them, with seeds for what it draws."""
    device = next(a.device for a in inputs if isinstance(a, torch.Tensor))
    named = dict(zip([p.name for p in pattern.params], inputs, strict=True))
    return operator_of(pattern).flatten(
        named | {name: draw(device) for name in pattern.seed_arguments}
    )


def check_operators(
    pattern: Op, kinds: tuple, kernel: bool, dtype, device: str, proof: Proof
) -> None:
    """Run torch.library.opcheck on the operator and on that of its backward, in one form and dtype.

    Triton's interpreter cannot be traced. With it, the checks on fake tensors inline the reference.
    """
    op = operator_of(pattern)
    args = arguments(pattern, kinds, dtype, device)
    if not pattern.memo["differentiable"] or not all(
        o.is_floating_point() for o in tensors(pattern.reference(*args))
    ):
        args = detached(args)  # opcheck would ask for the gradient of integers
    flat = flat_arguments(pattern, args)
    inlined = dict(forward="reference", backward="vjp", save=False)
    launched = dict(forward="kernel", backward=own_backward(pattern), save=True)
    checked_by_torch(pattern, op.overload, flat, launched if kernel else inlined, ON_REAL)
    checked_by_torch(
        pattern, op.overload, flat, launched if kernel and device == "cuda" else inlined, ON_FAKES
    )
    names = [str(op.overload)]
    if op.backward_call is not None and kernel:
        backward = getattr(torch.ops.fusion, f"{pattern.name}_backward").default
        names.append(str(backward))
        inputs = backward_arguments(pattern, flat)
        with trial(unless_fake) if device != "cuda" else contextlib.nullcontext():
            checked_by_torch(pattern, backward, inputs, {}, (*ON_REAL, "test_faketensor"))
    elif op.backward_call is not None:
        proof.not_run.append("opcheck of the backward's operator: its kernel was not run")
    proof.checked.append(f"opcheck of {' and '.join(names)}: {', '.join((*ON_REAL, *ON_FAKES))}")


def unless_fake(kernel, grid: tuple, args: tuple, options: dict) -> None:
    """Launch in Triton's interpreter unless an argument is a fake tensor, which it cannot read."""
    if not any(isinstance(a, FakeTensor) for a in args):
        kernel[grid](*args, **options)


def detached(args) -> list:
    return [a.detach() if isinstance(a, torch.Tensor) else a for a in args]


def tensors(out) -> tuple:
    return out if isinstance(out, tuple) else (out,)


def check_on_fakes(pattern: Op, kinds: tuple, args: list) -> None:
    """On fake tensors the launcher gives results of the shapes, strides and dtypes of the real
    ones.
    """
    flat = flat_arguments(pattern, detached(args))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in flat]
    for save in (False, True) if pattern.saves else (False,):
        real = tensors(pattern.launched(operator_of(pattern).unflatten(flat), save))
        with mode, trial(unless_fake):
            fake = tensors(pattern.launched(operator_of(pattern).unflatten(fakes), save))
        for i, (r, f) in enumerate(zip(real, fake, strict=True)):
            have, want = ((t.shape, t.stride(), t.dtype) for t in (f, r))
            if have != want:
                raise AssertionError(
                    f"{pattern.where}: result {i} of the kernel for {kinds} is {have} on fake "
                    f"tensors, "
                    f"{want} on real ones"
                )


def check_unread(pattern: Op, kinds: tuple, args: list) -> None:
    """Where nobody reads a result, the others have the same bits."""
    if not pattern.skips:
        return
    given = operator_of(pattern).unflatten(flat_arguments(pattern, detached(args)))
    everything = tensors(pattern.launched(given, save=False))
    for i in range(pattern.outputs):
        found = tensors(pattern.launched(given, save=False, unread=(i,)))
        for k, (want, have) in enumerate(zip(everything, found, strict=True)):
            if k != i:
                told = f"{pattern.where}: result {k} of the kernel for {kinds} is another one where"
                told = f"{told} nobody reads result {i}"
                same = dict(rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(
                    have, want, **same, msg=lambda why, t=told: f"{t}\n{why}"
                )


def backward_arguments(pattern: Op, flat: list) -> list:
    """The arguments of the backward's operator, for output gradients of ones."""
    op, flat = operator_of(pattern), detached(flat)
    with torch.no_grad():
        out = tensors(op.overload(*flat, forward="kernel", backward="kernel", save=True))
    results, saves = out[: pattern.outputs], out[pattern.outputs :]
    inputs = [flat[i] for i in op.tensor_fields]
    needs = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in inputs]
    return [
        *map(torch.ones_like, results),
        *(results if pattern.backward_result else ()),
        *saves,
        needs,
        *flat,
    ]


def checked_by_torch(pattern: Op, overload, args: list, kwargs: dict, checks: tuple) -> None:
    try:
        opcheck(overload, tuple(args), kwargs, test_utils=checks)
    except PatternError:
        raise
    except Exception as error:
        raise AssertionError(f"{pattern.where}: opcheck of {overload}: {error}") from error
