"""The contract that every registered pattern keeps: nothing here knows any of them by name."""

import importlib

import pytest
import torch

import fusion_backend
import fusion_backend.match.templates as template_module
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels.gemm import operands
from fusion_backend.match.templates import subexpressions, template, templates
from fusion_backend.ops.op import Op
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import (
    DropoutOfKernels,
    arguments,
    check_pattern,
    close,
    collect,
    fused_nodes,
    in_fp64,
    kernel_checks,
    rewritten,
    supported_forms,
    unfused,
    value_and_gradients,
    with_kernels,
)

from . import selection

proof_module = importlib.import_module("fusion_backend.testing.check_pattern")  # a function's name
pytestmark = pytest.mark.usefixtures("scalar_code")
ALL = {p.name: p for p in patterns()}
REFUSED = {torch.float64, torch.complex64, torch.int32}
# of an index that is an input nothing is known, one process sums over no ranks, and one call of
# cuDNN has no gradient
DECLINED = {"relative_bias", "all_reduce_add_rms_norm", "all_reduce_add_layer_norm"}
DECLINED |= {"conv_relu", "conv_batch_norm_relu"}
every = pytest.mark.parametrize("pattern", ALL.values(), ids=ALL)


def written(pattern):
    """The forms that are written into graphs: random numbers only where they come from a seed. A
    rule by itself writes another op, and has tests of its own.
    """
    if not isinstance(pattern, Op):
        return []
    supported = supported_forms(pattern)
    random = () if pattern.seed_arguments else pattern.memo.get("random", ())
    return [kinds for kinds in supported if kinds not in random]


@pytest.fixture
def forms_by_default(monkeypatch):
    """check_pattern looks at a covering selection of a pattern's forms, with --full at all."""
    every_form = proof_module.forms

    def chosen(pattern):
        return selection.forms_by_default(supported_forms(pattern))

    def chosen_and_refused(pattern):
        left_out = {*supported_forms(pattern)}.difference(chosen(pattern))
        return [kinds for kinds in every_form(pattern) if kinds not in left_out]

    monkeypatch.setattr(proof_module, "supported_forms", chosen)
    monkeypatch.setattr(proof_module, "forms", chosen_and_refused)


# A pattern of each kind. Some tests do more for these, and for all patterns with --full.
OF_EACH_KIND = {"layer_norm", "softmax", "attention", "gated_linear", "quantize_int8"}


@pytest.fixture
def traced_by_kind(monkeypatch):
    """check_pattern has AOTAutograd trace an operator with symbolic sizes where it is of a kind of
    its own. On a CPU it traces what all operators share around the reference and its gradient.
    test_compiled_agrees has it trace every reference, and test_dynamic_shapes_are_recognised has
    all of them run with symbolic sizes.
    """
    of_all = kernel_checks.checked_by_torch

    def checked(pattern, overload, args, kwargs, checks):
        if not selection.FULL and pattern.name not in OF_EACH_KIND:
            checks = [check for check in checks if check != "test_aot_dispatch_dynamic"]
        of_all(pattern, overload, args, kwargs, tuple(checks))

    monkeypatch.setattr(kernel_checks, "checked_by_torch", checked)


WRITTEN = {p.name: p for p in ALL.values() if written(p)}
every_written = pytest.mark.parametrize("pattern", WRITTEN.values(), ids=WRITTEN)


def forms(patterns):
    """All forms that a kernel has to get right, a covering selection of them by default; one where
    the reference stands in for it.
    """
    found = []
    for p in patterns:
        of_kernel = written(p)[: None if isinstance(p, Op) and p.kernel_fn else 1]
        chosen = selection.covering_some(of_kernel)
        for kinds in of_kernel:
            marks = () if kinds in chosen else pytest.mark.full
            found.append(pytest.param(p, kinds, id=f"{p.name}-{'-'.join(kinds)}", marks=marks))
    return found


every_form = pytest.mark.parametrize("pattern, kinds", forms(WRITTEN.values()))
# Inductor draws its own seeds: tests/test_dropout.py has those
every_undrawn = pytest.mark.parametrize(
    "pattern", [pytest.param(p, id=p.name) for p in WRITTEN.values() if not p.seed_arguments]
)


def results(out):
    return out if isinstance(out, tuple) else (out,)


def split(args):
    """Tensors, and a call that puts the numbers back (as literals of the traced code)."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def call(fn):
        def run(*given):
            rest = iter(given)
            return fn(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

        return run

    return tensors, call


@pytest.fixture
def with_tf32(monkeypatch):
    """Kernels of matrix products take fp32 only as TF32, which the interpreter does not know."""
    monkeypatch.setattr(operands, "precision", lambda: "tf32")


@every
@pytest.mark.usefixtures("forms_by_default", "traced_by_kind", "with_tf32")
def test_pattern_keeps_the_contract(pattern):
    # the files of the kernels run fp16, and --full does here
    dtypes = (torch.float32, torch.bfloat16, *((torch.float16,) if selection.FULL else ()))
    proof = check_pattern(pattern, dtypes)
    begins = [line.partition(":")[0].partition(" at line ")[0] for line in proof.checked]
    assert (
        begins.count("spelling") == len(pattern.spellings) - 1 and begins.count("near miss") >= 1
    ), str(proof)
    if isinstance(pattern, Op) and pattern.kernel_fn is not None:
        for what in ("kernel, without gradients", "kernel, with gradients")[
            : 1 + pattern.memo["differentiable"]
        ]:
            (line,) = [line for line in proof.checked if line.startswith(what)]
            every_dtype = (
                pattern.saves
                or what == "kernel, with gradients"
                or not pattern.memo["differentiable"]
            )
            names = ("fp32", "bf16", "fp16")[: len(dtypes) if every_dtype else 1]
            # some kernels take 16 bits only
            refused = [line for line in proof.not_run if line.startswith("kernel in fp32 in all")]
            names = names[1:] if refused and pattern.name in SIXTEEN_BITS else names
            named = ", ".join(names)
            assert line.endswith(f" in {named}"), str(proof)
    if pattern.replacement_fn is not None:
        called = any(line.startswith("replacement: ") for line in proof.checked)
        assert called != (pattern.name in DECLINED), str(proof)


@every_form
def test_rewritten_graph_with_kernels_agrees(pattern, kinds):
    """The whole way on CPU: rewrite, then run the rewritten graph with interpreted kernels, value
    and gradient.
    """
    args = arguments(pattern, kinds, torch.float32)
    tensors, call = split(args)
    gm = with_kernels(rewritten(call(pattern.reference), *tensors, dynamic=False))
    assert len(fused_nodes(gm)) == 1
    exact = in_fp64(args)
    plain = unfused(pattern, args)
    want = unfused(pattern, exact)
    for got, p, w in zip(value_and_gradients(lambda *a: gm(*a), tensors), plain, want, strict=True):
        assert close(got, p, w) == ""


SIXTEEN_BITS = {"mlp", "dropout_mlp", "gated_mlp", "dropout_gated_mlp"}


@every_undrawn
def test_compiled_agrees(pattern, request):
    """Compiled, with the inlined reference; through Inductor to its own code for a pattern of each
    kind, and for all of them with --full.
    """
    if pattern.name not in OF_EACH_KIND:
        request.getfixturevalue("eager_kernels")
    args = arguments(pattern, written(pattern)[0], torch.float32)
    tensors, call = split(args)
    compiled = torch.compile(
        call(pattern.reference), backend="fusion", options={"fusion.gate": "always"}, dynamic=False
    )
    exact = in_fp64(args)
    plain = unfused(pattern, args)
    want = unfused(pattern, exact)
    for got, p, w in zip(value_and_gradients(compiled, tensors), plain, want, strict=True):
        assert close(got, p, w) == ""
    assert pattern.name in [s.pattern for s in fusion_backend.report().sites], (
        fusion_backend.report()
    )


@every_written
def test_gradient_of_some_inputs_only(pattern):
    kinds = written(pattern)[0]
    args = arguments(pattern, kinds, torch.float32)
    tensors, call = split(args)
    if not any(out.requires_grad for out in results(pattern.reference(*args))):
        return
    gm = with_kernels(rewritten(call(pattern.reference), *tensors, dynamic=False))
    assert len(fused_nodes(gm)) == 1
    for wanted in range(len(tensors)):
        if not tensors[wanted].is_floating_point():
            continue
        some = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        outs = [o for o in results(call(pattern.reference)(*some)) if o.is_floating_point()]
        if len({o.requires_grad for o in outs}) > 1:
            continue  # such a site is refused: one of its results requires no gradient
        with DropoutOfKernels():
            plain = value_and_gradients(call(pattern.reference), some)
        for got, want in zip(value_and_gradients(lambda *a: gm(*a), some), plain, strict=True):
            torch.testing.assert_close(got, want)


@every_written
def test_dynamic_shapes_are_recognised(pattern):
    if pattern.name == "soft_cross_entropy" and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("torch cannot trace F.cross_entropy of probabilities of symbolic sizes yet")
    kinds = written(pattern)[0]
    tensors, call = split(arguments(pattern, kinds, torch.float32))
    (parts, *_) = [subexpressions(t.roots) for t in templates(pattern) if t.kinds == kinds]
    # what chunk gives of a size known to be even
    for t in tensors if any(e.op == "half" for e in parts) else ():
        torch._dynamo.mark_static(t, t.dim() - 1)
    if pattern.name == "interpolate_bilinear":  # the size of the result is a text
        torch._dynamo.mark_static(tensors[0], [2, 3])
    # numbers of the code, not of the call
    with torch._dynamo.config.patch(specialize_float=True, specialize_int=True):
        report = collect(call(pattern.reference), *tensors, dynamic=True).report
    assert [s.pattern for s in report.fused] == [pattern.name], str(report)


@every_written
def test_permuted_and_expanded_inputs(pattern):
    """Right whatever the strides, and fused with some of them."""
    kinds = written(pattern)[0]
    args = arguments(pattern, kinds, torch.float32, grad=False)

    def odd(t):
        return torch.stack([t, t], -1)[..., 0] if t.dim() else t

    def expanded(t):
        return t[:1].expand(t.shape) if t.dim() > 1 else t

    def permuted(t):
        return t.mT.contiguous().mT if t.dim() > 1 else t

    fused = 0
    for change in (odd, expanded, permuted):
        changed = [change(a) if isinstance(a, torch.Tensor) else a for a in args]
        tensors, call = split(changed)
        gm = with_kernels(rewritten(call(pattern.reference), *tensors, dynamic=False))
        fused += len(fused_nodes(gm))
        with DropoutOfKernels():  # for what is not fused
            found = value_and_gradients(lambda *a, gm=gm: gm(*a), tensors)
        for got, want in zip(found, unfused(pattern, changed), strict=True):
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
    assert fused


def unfused_if_possible(pattern, args):
    """Value and gradients of the reference; None where torch does not take such inputs."""
    try:
        return unfused(pattern, args)
    except (RuntimeError, NotImplementedError, IndexError, ValueError):
        return None


@every
def test_stacked_inputs(pattern):
    """Every matrix in a batch of three, weights too, as experts have them: where torch takes them,
    so must a site.
    """

    def stacked(a):
        if not isinstance(a, torch.Tensor) or a.dim() < 2:
            return a
        return torch.stack([a, a.flip(0), a.flip(-1)]).detach().requires_grad_(a.requires_grad)

    for kinds in selection.forms_by_default(supported_forms(pattern)):
        changed = [stacked(a) for a in arguments(pattern, kinds, torch.float32)]
        want = unfused_if_possible(pattern, changed)
        if want is None:
            continue
        tensors, call = split(changed)
        collector = collect(call(pattern.reference), *tensors, dynamic=False)
        assert [g.error for g in collector.report.graphs] == [None]
        compiled = torch.compile(call(pattern.reference), backend=collector, dynamic=False)
        with DropoutOfKernels():
            torch.testing.assert_close(
                value_and_gradients(compiled, tensors), want, rtol=1e-4, atol=1e-4
            )


@every_written
def test_a_vector_of_one_element_is_read_as_such(pattern):
    """Code may broadcast a weight or a bias, where a kernel would read beyond its end."""
    for kinds in written(pattern) if pattern.kernel_fn else ():
        args = arguments(pattern, kinds, torch.float32, grad=False)
        vectors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dim() == 1]
        for i in vectors:
            short = [*args[:i], args[i][:1], *args[i + 1 :]]  # the others lie behind it
            want = unfused_if_possible(pattern, short)
            if want is None or isinstance(pattern.guard_fn(*short), Reject):
                continue
            got = pattern.launched(short, save=False)
            for one, other in zip(results(got), results(pattern.reference(*short)), strict=False):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@every_written
def test_refused_tensors_fall_through(pattern):
    """fp64, complex, integer and empty tensors: not fused, with a reason, and right."""
    kinds = written(pattern)[0]
    args, tried = arguments(pattern, kinds, torch.float32, grad=False), 0
    for change in (
        lambda t: t.double(),
        lambda t: t.to(torch.complex64),
        lambda t: t.int(),
        lambda t: t[:0],
    ):
        changed = [
            change(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        ]
        want = unfused_if_possible(pattern, changed)
        if want is None:
            continue
        tensors, call = split(changed)
        collector = collect(call(pattern.reference), *tensors, dynamic=False)
        # behind a promotion to float there may be a form of its own: softmax(x * 2) of integers
        for site in (n for gm in collector.graphs for n in fused_nodes(gm)):
            read = [a.meta.get("example_value", a.meta.get("val")) for a in site.all_input_nodes]
            assert {v.dtype for v in read}.isdisjoint(REFUSED), str(collector.report)
            assert all(v.numel() for v in read), str(collector.report)
        assert all(s.reason for s in collector.report.sites)
        assert [g.error for g in collector.report.graphs] == [None]
        compiled = torch.compile(call(pattern.reference), backend=collector, dynamic=False)
        with DropoutOfKernels():
            torch.testing.assert_close(value_and_gradients(compiled, tensors), want, equal_nan=True)
        tried += 1
    assert tried


@every
def test_templates_hold_no_baked_constant(pattern, monkeypatch):
    """Traced with other scalars, the reference gives the same template."""
    monkeypatch.setattr(template_module, "PROBES", (1.4142135623730951, 0.5772156649015329))
    known = {t.kinds: repr(t.roots) for t in templates(pattern) if t.line == pattern.line}
    for kinds in list(known)[:2]:
        (again,) = template(pattern, pattern.reference, kinds)
        assert repr(again.roots) == known[kinds]
