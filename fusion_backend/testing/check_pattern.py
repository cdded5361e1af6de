"""check_pattern runs every function of a pattern, compares the results, and says what ran and what
did not.

A form is one choice of a kind (tensor, scalar, none) for each argument. Each function runs in every
form. It may refuse a form with an exception if it runs in another one; a name that does not exist
is an error in any form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fusion_backend.compat.torch import FakeTensorMode, many_recompiles
from fusion_backend.frontends.explain import Collector
from fusion_backend.match.templates import example_inputs, forms, template, templates, with_kinds
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.op import Op
from fusion_backend.ops.operator import draw, operator_of
from fusion_backend.ops.rule import Replacement, Rule
from fusion_backend.reporting.reject import PatternError, Reject
from fusion_backend.testing.compare import (
    DropoutOfKernels,
    arguments,
    check_close,
    in_fp64,
    supported_forms,
    unfused,
    value_and_gradients,
)
from fusion_backend.testing.kernel_checks import DTYPES, check_kernels, flat_arguments
from fusion_backend.testing.proof import Proof, in_forms, line_of, raised, typo, watched

EXACT = dict(rtol=1e-9, atol=1e-9)  # two ways of computing one number in fp64


def check_pattern(
    pattern: Definition, dtypes: Iterable[torch.dtype] = DTYPES, device: str | None = None
) -> Proof:
    """Check everything in a pattern, a rule or an op that can be checked on this machine. Returns
    sentences that say what was checked, and what was not run and why.

    dtypes: those in which the kernel is compared, each where the guard takes it.
    device: that of the kernel's arguments; by default CUDA where there is one. On "cpu" kernels run
    in Triton's interpreter, if TRITON_INTERPRET=1 is set.

    - The reference is traced and recognised, and its rewritten graph computes what it does.
    - Every spelling agrees with it in fp64, value and gradient, and is recognised.
    - Every near miss differs from it and is left alone.
    - Guard and worthwhile answer None or Reject.
    - The kernel agrees with the reference, with gradients and without, and on other strides.
    - The operators pass torch.library.opcheck.

    Raises PatternError where the definition is wrong and AssertionError where a result is; either
    names the pattern and the line.

        print(check_pattern(scaled_tanh))
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    proof = Proof(pattern.name)
    check_inputs(pattern, proof)
    reference = run_in_forms(pattern, pattern.reference, "reference", list(forms(pattern)), proof)
    templates(pattern)
    supported = supported_forms(pattern)
    untraceable = [kinds for kinds in reference if kinds not in supported]
    if untraceable:
        template(pattern, pattern.reference, untraceable[0])
        why = pattern.memo.get("trace_error")
        proof.not_run.append(
            f"recognition {in_forms(untraceable, reference)}: it cannot be traced: {why}"
        )
    check_reference(pattern, supported, proof)
    if isinstance(pattern, Rule):
        for fn in pattern.spellings[1:]:
            check_spelling(pattern, fn, supported, reference, proof)
        for fn in pattern.near_misses:
            check_near_miss(pattern, fn, supported, reference, proof)
    if isinstance(pattern, Op):
        if pattern.seeded_fn is not None:
            check_seeded(pattern, supported, proof)
        check_answers(pattern, supported, tuple(dtypes), proof)
        check_kernels(pattern, supported, tuple(dtypes), device, proof)
    return proof


def check_inputs(pattern: Definition, proof: Proof) -> None:
    """Make the arguments of every case as fake tensors, because those of a benchmark may be
    large.
    """
    for case in pattern.cases or (None,):
        try:
            with FakeTensorMode():
                example_inputs(pattern, torch.empty, case)
        except PatternError:
            raise
        except Exception as error:
            raise raised(pattern, "inputs", pattern.inputs_fn, error, f" for {case}") from error
    proof.checked.append(
        f"inputs: {len(pattern.cases)} cases" if pattern.cases else "inputs: the default ones"
    )


def run_in_forms(
    pattern: Definition, fn: Callable, what: str, kinds_of_all: list, proof: Proof
) -> dict[tuple, list]:
    """Form -> value and gradients in fp64, for every form that the function takes."""
    results, refused = {}, {}
    for kinds in kinds_of_all:
        try:
            results[kinds] = value_and_gradients(fn, arguments(pattern, kinds, torch.float64))
        except Exception as error:
            if typo(error):
                raise raised(pattern, what, fn, error, f" for {kinds}") from error
            refused[kinds] = error
    if not results:
        kinds = max(refused, key=lambda kinds: how_far(fn, refused[kinds]))
        where = f" in every form; it gets furthest for {kinds}"
        raise raised(pattern, what, fn, refused[kinds], where) from refused[kinds]
    for text in dict.fromkeys(first_line(e) for e in refused.values()):
        alike = [kinds for kinds, e in refused.items() if first_line(e) == text]
        proof.not_run.append(
            f"{title_of(what, fn)} {in_forms(alike, kinds_of_all)}: it raises {text}"
        )
    return results


def how_far(fn: Callable, error: Exception) -> int:
    """The line of the function at which it raised."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code is fn.__code__ else line
        trace = trace.tb_next
    return line


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def title_of(what: str, fn: Callable) -> str:
    doc = (fn.__doc__ or "").strip().partition("\n")[0]
    return f"{what} at line {line_of(fn)}" + (f" ({doc})" if doc and what == "near miss" else "")


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Are these the same values and gradients in fp64?"""
    return len(mine) == len(theirs) and all(
        m.shape == t.shape and torch.allclose(m.double(), t.double(), **EXACT, equal_nan=True)
        for m, t in zip(mine, theirs, strict=True)
    )


def report_on(
    pattern: Definition, what: str, fn: Callable, args: list, run: Callable | None = None
):
    """Run the pass on a function with this pattern alone. Returns the collector, and the result of
    `run(compiled, args)`.
    """
    collector = Collector({"fusion.gate": "always", "fusion.only": [pattern.name]})
    compiled = torch.compile(fn, backend=collector, dynamic=False, fullgraph=True)
    try:
        with many_recompiles():
            out = run(compiled, args) if run else compiled(*args)
    except PatternError:
        raise
    except Exception as error:
        raise raised(pattern, what, fn, error, ", compiled,") from error
    errors = [g.error for g in collector.report.graphs if g.error]
    if errors or not collector.report.graphs:
        reason = errors[0] if errors else "Dynamo made no graph of it"
        raise AssertionError(
            f"{pattern.where}: the pass did not run on the {what} at line {line_of(fn)}: {reason}"
        )
    return collector, out


def sites_in(pattern: Definition, collector: Collector) -> list:
    return [s for s in collector.report.sites if s.pattern == pattern.name and s.counted]


def whole(pattern: Definition, collector: Collector, args: list) -> bool:
    """Has the operator as many arguments as the function? If not, the site is a smaller form inside
    the function's computation.
    """
    if not isinstance(pattern, Op):
        return True
    wanted = how_many(flat_arguments(pattern, args))
    calls = [
        n
        for gm in collector.graphs
        for n in gm.graph.nodes
        if n.target is operator_of(pattern).overload
    ]
    return all(how_many(n.args) == wanted for n in calls)


def how_many(arguments) -> int:
    """The number of arguments other than strings. Several strings may mean the same, as `same` and
    `float32` do for fp32.
    """
    return sum(a is not None and not isinstance(a, str) for a in arguments)


def like_kernels(fn: Callable, args: list) -> list[torch.Tensor]:
    """Value and gradients; dropout has the masks of the kernels."""
    with DropoutOfKernels():
        return value_and_gradients(fn, args)


def check_recognised(
    pattern: Definition, what: str, fn: Callable, kinds: tuple, run: Callable | None = None
):
    """Assert that the pass finds one site of the pattern that has all arguments, in fp32. Returns
    the site and the result of `run(compiled, args)`.
    """
    args = arguments(pattern, kinds, torch.float32)
    collector, out = report_on(pattern, what, fn, args, run)
    found = sites_in(pattern, collector)
    if len(found) != 1 or not whole(pattern, collector, args):
        raise AssertionError(
            f"{pattern.where}: the {what} at line {line_of(fn)}, {kinds}, is not "
            f"recognised\n{collector.report}"
        )
    return found[0], out


def check_reference(pattern: Definition, supported: list, proof: Proof) -> None:
    """The reference is recognised, and its rewritten graph computes what it does, in fp32."""
    if not isinstance(pattern, Rule):
        proof.checked.append(f"reference: traced {in_forms(supported, supported)}")
        proof.not_run.append("recognition: an op is not looked for in graphs")
        return
    fused, unchanged = [], {}
    with watched(pattern) as calls:
        for kinds in supported:
            args = arguments(pattern, kinds, torch.float32)
            site, got = check_recognised(
                pattern, "reference", pattern.reference, kinds, like_kernels
            )
            plain, exact = unfused(pattern, args), unfused(pattern, in_fp64(args))
            check_close(pattern, f"the rewritten graph for {kinds}", got, plain, exact)
            fused += [kinds] * site.fused
            unchanged |= {} if site.fused else {kinds: site.reason}
    if calls.errors:
        raise calls.errors[0]
    proof.checked.append(f"reference: traced and recognised {in_forms(supported, supported)}")
    if fused:
        proof.checked.append(
            f"rewritten graph: agrees with the reference in fp32 {in_forms(fused, supported)}"
        )
    for reason in dict.fromkeys(unchanged.values()):
        alike = [kinds for kinds, r in unchanged.items() if r == reason]
        proof.not_run.append(f"rewritten graph {in_forms(alike, supported)}: not fused: {reason}")
    if getattr(pattern, "replacement_fn", None) is not None:
        report_replacement(calls.answers["replacement_fn"], proof)


def report_replacement(answers: list, proof: Proof) -> None:
    """The answers of `replacement` for the graphs of the reference."""
    offered = [a for a in answers if isinstance(a, Replacement)]
    if offered:
        proof.checked.append(f"replacement: {len(offered)} calls in {len(answers)} graphs")
    for reason in dict.fromkeys(a.reason for a in answers if isinstance(a, Reject)):
        proof.not_run.append(f"replacement: it declines: {reason}")
    if not answers:
        proof.not_run.append("replacement: it was never asked")


def check_seeded(pattern: Definition, supported: list, proof: Proof) -> None:
    """The seeded reference computes what the reference does with the same mask, in fp64."""
    for kinds in supported:
        args = arguments(pattern, kinds, torch.float64)
        try:
            mine = value_and_gradients(
                lambda *args: pattern.seeded_fn(*args, draw(torch.device("cpu"))), args
            )
        except Exception as error:
            raise raised(
                pattern, "seeded reference", pattern.seeded_fn, error, f" for {kinds}"
            ) from error
        if not equal(mine, unfused(pattern, args)):
            line = line_of(pattern.seeded_fn)
            raise PatternError(
                f"{pattern.where}: the seeded reference at line {line} disagrees with the "
                f"reference for {kinds}"
            )
    proof.checked.append(
        f"seeded reference: agrees with the reference in fp64 {in_forms(supported, supported)}"
    )


def check_spelling(
    pattern: Definition, fn: Callable, supported: list, reference: dict, proof: Proof
) -> None:
    """The spelling computes what the reference does in every form for which it has a template, and
    is recognised in every form in which it computes that.
    """
    line = line_of(fn)
    results = run_in_forms(pattern, fn, "spelling", supported, proof)
    agreeing = [kinds for kinds, mine in results.items() if equal(mine, reference[kinds])]
    others = [kinds for kinds in results if kinds not in agreeing]
    for kinds in others:
        if not agreeing or template(pattern, fn, kinds):
            raise PatternError(
                f"{pattern.where}: the spelling at line {line} disagrees with the reference for "
                f"{kinds}"
            )
    if isinstance(pattern, Rule):
        for kinds in agreeing:
            check_recognised(pattern, "spelling", fn, kinds)
    proof.checked.append(
        f"spelling at line {line}: agrees with the reference in fp64, value and gradient, and is "
        f"recognised "
        f"{in_forms(agreeing, supported)}"
    )
    if others:
        why = "it computes something else, without all of the arguments"
        proof.not_run.append(f"spelling at line {line} {in_forms(others, supported)}: {why}")


def check_near_miss(
    pattern: Definition, fn: Callable, supported: list, reference: dict, proof: Proof
) -> None:
    """In every form in which the near miss runs, it differs from the reference in value or gradient
    and is left alone.
    """
    line = line_of(fn)
    results = run_in_forms(pattern, fn, "near miss", supported, proof)
    for kinds, mine in results.items():
        if equal(mine, reference[kinds]):
            raise PatternError(
                f"{pattern.where}: the near miss at line {line} computes what the reference does "
                f"for {kinds}, value "
                "and gradient: it is a spelling, or the example inputs do not show the difference"
            )
        if not isinstance(pattern, Rule):
            continue
        found = sites_in(
            pattern,
            report_on(pattern, "near miss", fn, arguments(pattern, kinds, torch.float32))[0],
        )
        if found:
            raise AssertionError(
                f"{pattern.where}: the near miss at line {line}, {kinds}, is recognised: {found[0]}"
            )
    proof.checked.append(
        f"{title_of('near miss', fn)}: differs from the reference and is left alone "
        f"{in_forms(results, supported)}"
    )


def check_answers(pattern: Definition, supported: list, dtypes: tuple, proof: Proof) -> None:
    """Guard and worthwhile answer None or Reject to fakes in every form, dtype and case."""
    asked = [
        (what, fn, extra)
        for what, fn, extra in (
            ("guard", pattern.guard_fn, ()),
            ("worthwhile", pattern.worthwhile_fn, (False,)),
            ("worthwhile", pattern.worthwhile_fn, (True,)),
        )
        if fn is not None
    ]
    for case in pattern.cases or (None,):
        for dtype in dtypes:
            with FakeTensorMode():
                examples = example_inputs(
                    pattern, lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype), case
                )
                for kinds in supported:
                    for what, fn, extra in asked:
                        ask(pattern, what, fn, [*with_kinds(pattern, kinds, examples), *extra])
    for what in dict.fromkeys(what for what, _, _ in asked):
        proof.checked.append(f"{what}: answers in every form, dtype and case of inputs")


def ask(pattern: Definition, what: str, fn: Callable, args: list) -> None:
    try:
        answer = fn(*args)
    except Exception as error:
        raise raised(pattern, what, fn, error) from error
    if answer is not None and not isinstance(answer, Reject):
        raise PatternError(
            f"{pattern.where}: the {what} at line {line_of(fn)} answers {answer!r}, not Reject "
            f"or None"
        )
