"""What nobody reads is not computed: results of a forward, and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_backend
import fusion_backend.decide.gate
import fusion_backend.kernels.common.cooperative_rows as cooperative_rows
import fusion_backend.kernels.common.rows as rows_of
import fusion_backend.ops.operator
from fusion_backend import Pattern, PatternError
from fusion_backend.compat.torch import FakeTensorMode
from fusion_backend.decide.legality import Legality
from fusion_backend.frontends.explain import Collector
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels.common.launch import trial
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import FUSION_RULES, OPS, unregister
from fusion_backend.testing import check_pattern, fused_nodes
from tests.kernel_checks import runs_kernels

patterns()
OPTIONS = {"fusion.gate": "always"}
KERNELS = dict(forward="kernel", backward="kernel", save=True)


@pytest.fixture
def kernels_taken(monkeypatch):
    """The gate decides as on a GPU; what runs is interpreted."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


@pytest.fixture
def on_h200(monkeypatch):
    """Fake tensors are launched on as if they were on an H200."""
    monkeypatch.setattr(fusion_backend.ops.operator, "on_gpu", lambda t: True)
    for module in (cooperative_rows, rows_of):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def norm(h: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], w, w)


def alone(x, r, w):
    return norm(x + r, w)


def both(x, r, w):
    h = x + r
    return norm(h, w), h


def spelt_twice(x, r, w):
    return norm(x + r, w), r + x


def cast_of_the_sum(x, r, w):
    h = (x + r).float()
    return F.layer_norm(h, h.shape[-1:], w.float(), w.float()).to(x.dtype), h


def name_of_the_sum(x, r, w):
    h = x + r
    same = h.contiguous()
    return norm(same, w), same.view(-1)


def in_place(x, r, w):
    h = x.sin()
    h += r
    return norm(h, w), h


def in_place_unread(x, r, w):
    h = x.sin()
    h += r
    return norm(h, w)


def written_to_later(x, r, w):
    h = x + r
    y = norm(h, w)
    h.mul_(2)
    return y, h


def one_of_two(x, r, w):
    h = x + r
    y = norm(h, w)
    return norm(y + r, w) + h


def read_by_the_next(x, r, w):
    h = x + r
    y = norm(h, w)
    return norm(h + y, w)


READ = [
    (alone, ["1"]),
    (both, [None]),
    (spelt_twice, [None]),
    (cast_of_the_sum, [None]),
    (name_of_the_sum, [None]),
    (in_place, [None]),
    (in_place_unread, ["1"]),
    (written_to_later, [None]),
    (one_of_two, [None, "1"]),
    (read_by_the_next, [None, "1"]),
]


class Module(torch.nn.Module):
    def __init__(self, code):
        super().__init__()
        self.code = code

    def forward(self, x, r, w):
        return self.code(x, r, w)


def rewritten(code, *args) -> tuple[list, object]:
    """`unread` of the sites, and what the rewritten graph computes, in Triton's interpreter."""
    torch.compiler.reset()
    collector = Collector(OPTIONS)
    found = torch.compile(code, backend=collector, dynamic=False)(*args)
    nodes = [n for gm in collector.graphs for n in fused_nodes(gm)]
    return [n.kwargs.get("unread") for n in nodes], found


@runs_kernels
@pytest.mark.parametrize("code, unread", READ, ids=[code.__name__ for code, _ in READ])
def test_what_is_read_is_computed(code, unread, kernels_taken):
    x, r, w = (torch.randn(*shape).bfloat16() for shape in ((3, 40), (3, 40), (40,)))
    with torch.no_grad():
        found, got = rewritten(code, x, r, w)
        want = code(x.float(), r.float(), w.float())
    assert found == unread
    got, want = (out if isinstance(out, tuple) else (out,) for out in (got, want))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g.float(), e, rtol=3e-2, atol=3e-2)


@runs_kernels
@pytest.mark.parametrize("code", [both, spelt_twice, cast_of_the_sum, in_place, written_to_later])
def test_a_reader_that_is_overlooked_reads_the_graphs_own_sum(code, kernels_taken, monkeypatch):
    monkeypatch.setattr(Legality, "unread", lambda self, match: (1,))
    x, r, w = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    with torch.no_grad():
        found, got = rewritten(code, x, r, w)
        torch.testing.assert_close(got, code(x, r, w))
    assert found == ["1"]


@runs_kernels
@pytest.mark.parametrize("code", [alone, both, cast_of_the_sum])
def test_of_an_exported_program(code, kernels_taken):
    x, r, w = (torch.randn(*shape).bfloat16() for shape in ((3, 40), (3, 40), (40,)))
    with torch.no_grad():
        program = torch.export.export(Module(code), (x, r, w))
        fused = fusion_backend.fuse(program, gate="always")
        (node,) = fused_nodes(fused.graph_module)
        assert node.kwargs.get("unread") == dict(READ)[code][0]
        assert code is not alone or not [n for n in fused.graph.nodes if "add." in str(n.target)]
        torch.testing.assert_close(fused.module()(x, r, w), code(x, r, w), rtol=3e-2, atol=3e-2)


def test_backward_reads_the_sum(kernels_taken):
    x, r, w = (torch.randn(*s, requires_grad=True) for s in ((3, 40), (3, 40), (40,)))
    collector = Collector(OPTIONS)
    torch.compile(alone, backend=collector, dynamic=False)(x, r, w)
    (node,) = fused_nodes(collector.graphs[0])
    assert node.kwargs["backward"] == "kernel" and "unread" not in node.kwargs


@runs_kernels
def test_a_backward_of_its_own_has_what_it_reads():
    """Whoever calls the op with both is right, not fast."""
    x, r, w = (torch.randn(*s, requires_grad=True) for s in ((3, 40), (3, 40), (40,)))
    call = operator_of(OPS["add_layer_norm"]).overload
    y, h, *_ = call(x, r, w, w, 1e-5, **KERNELS, unread="1")
    found = torch.autograd.grad(y.sin().sum(), (x, r, w))
    want = torch.autograd.grad(norm(x + r, w).sin().sum(), (x, r, w))
    assert h.shape == x.shape
    torch.testing.assert_close(found, want)


@runs_kernels
def test_the_vjp_needs_no_gradient_of_what_was_left_out():
    x, w = torch.randn(3, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    call = operator_of(OPS["add_rms_norm"]).overload
    y, h, _ = call(x, x, w, None, 1e-5, forward="kernel", backward="vjp", save=True, unread="1")
    assert h.numel() == 0
    found = torch.autograd.grad(y.sin().sum(), (x, w))
    want = torch.autograd.grad(F.rms_norm(x + x, (40,), w, 1e-5).sin().sum(), (x, w))
    torch.testing.assert_close(found, want)


def launched(run) -> list[tuple[str, dict]]:
    """Kernels and their arguments by name; nothing runs."""
    found = []

    def record(kernel, grid, args, options):
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        found.append((kernel.fn.__name__, named))

    with trial(record):
        run()
    return found


# held by a program, walked through, shared by programs, and split over several
SHAPES = (4096, 1024), (4096, 40000), (2048, 65536), (8, 131072)
SUMMED = dict(add_layer_norm=2, add_rms_norm=1, dropout_add_layer_norm=2)


@pytest.mark.parametrize("rows, n", SHAPES)
@pytest.mark.parametrize("name", SUMMED)
def test_the_sum_is_not_written(name, rows, n, on_h200):
    with FakeTensorMode():
        x, w = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((rows, n), (n,)))
        seed = torch.zeros(1, dtype=torch.int64)
        rest = (w, w, 0.1, 1e-5, seed) if name.startswith("dropout") else (w, None, 1e-5)
        for unread in ((), (1,)):
            out = []
            run = lambda u=unread, o=out: o.extend(  # noqa: E731
                OPS[name].launched((x, x, *rest), save=False, unread=u)
            )
            sums = [named["H"] for _, named in launched(run) if "H" in named]
            assert sums and all((h is None) == bool(unread) for h in sums), (sums, unread)
            assert out[1].numel() == (0 if unread else rows * n) and out[0].shape == x.shape


@pytest.mark.parametrize("n", [1024, 131072])
@pytest.mark.parametrize("name", ["quantize_per_token", "rms_norm_quantize"])
def test_the_scale_is_not_written(name, n, on_h200):
    with FakeTensorMode():
        x = torch.empty(64, n, dtype=torch.bfloat16)
        normed = name == "rms_norm_quantize"
        how = (None, None, 1e-6, 1e-5, "scale", "scale")
        how = how if normed else (1e-5, "scale", "scale", "none")
        args = (x, *how)
        for unread in ((), (1,)):
            run = lambda u=unread: OPS[name].launched(args, save=False, unread=u)  # noqa: E731
            ((_, named),) = launched(run)
            assert (named["SCALE"] is None) == bool(unread)


def test_every_kernel_of_several_results_leaves_some_out():
    """Of the ops that are found themselves: what another rule writes is always read as a whole.
    Batch norms in training compute the first result from the others.
    """
    found = {name: op for name, op in OPS.items() if name in FUSION_RULES}
    several = {name for name, op in found.items() if op.outputs > 1 and op.kernel_fn is not None}
    built_in = {name for name in several if OPS[name].reference.__module__.startswith("fusion_")}
    assert {name for name in built_in if not OPS[name].skips} == {
        "batch_norm_training",
        "batch_norm_sum",
    }


NORMS = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight"),
    "dropout_add_layer_norm": ("x", "residual", "weight", "bias"),
    "group_norm": ("x", "weight", "bias"),
    "channel_norm": ("x", "weight", "bias"),
}
OF_ROWS, OF_COLUMNS = {"x", "residual"}, {"weight", "bias"}


def norm_arguments(name: str, rows: int, n: int, frozen: set) -> dict:
    """By name, fake, in the order of the op."""
    planes = name in ("group_norm", "channel_norm")
    shape = (rows // 16, 16, n) if planes else (rows, n)
    columns = (n,) if not planes else (16,) if name == "group_norm" else (16, 1)
    numbers = dict(groups=4, offset=None, scale=None, eps=1e-5, p=0.1, act="identity", norm="layer")
    tensors = {
        k: torch.empty(*(shape if k in OF_ROWS else columns), dtype=torch.bfloat16)
        for k in NORMS[name]
    }
    tensors = {k: t.requires_grad_(k not in frozen) for k, t in tensors.items()}
    return {p.name: tensors.get(p.name, numbers.get(p.name)) for p in OPS[name].params}


@pytest.mark.parametrize("rows, n", [(4096, 1024), (64, 1024), (4096, 16384), (64, 16384)])
@pytest.mark.parametrize("frozen", [OF_COLUMNS, OF_ROWS, {"bias"}, {"weight"}], ids=sorted)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_that_nobody_wants_are_not_computed(name, frozen, rows, n, on_h200):
    """From requires_grad to the kernels: no launch has memory for what nobody wants."""
    with FakeTensorMode():
        given = norm_arguments(name, rows, n, frozen)
        op = operator_of(OPS[name])
        seeds = {s: torch.zeros(1, dtype=torch.int64) for s in OPS[name].seed_arguments}
        y = []
        launched(lambda: y.extend(op.overload(*op.flatten(given | seeds), **KERNELS)))
        ran = launched(lambda: y[0].backward(torch.empty_like(y[0])))
    assert ran
    written = {k for _, named in ran for k, v in named.items() if isinstance(v, Tensor)}
    wanted = set(NORMS[name]) - frozen
    assert bool(written & {"OUT", "DX"}) == bool(wanted & OF_ROWS), (written, ran)
    assert bool(written & {"SUMS", "DW", "DB"}) == bool(wanted & OF_COLUMNS), (written, ran)
    for column, own in (("weight", "DW"), ("bias", "DB")):
        assert (own in written) == (column in wanted), (written, ran)
    for k in set(NORMS[name]):
        assert (given[k].grad is None) == (k in frozen), k


@pytest.fixture
def scratch():
    before = set(OPS)
    yield
    for name in set(OPS) - before:
        unregister(name)


def halves(leave_out):
    @Pattern
    def sum_and_difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x + y).exp(), (x - y).exp()

    @sum_and_difference.guard
    def _(x, y):
        return None

    @sum_and_difference.inputs()
    def _(tensor):
        return tensor(4, 5), tensor(4, 5)

    sum_and_difference.kernel(leave_out)
    return sum_and_difference


@runs_kernels
def test_check_pattern_compares_what_is_left(scratch):
    def wrong(x, y, read):
        return (x + y).exp() + (not read[1]), (x - y).exp() if read[1] else x.new_empty(0)

    with pytest.raises(AssertionError, match="result 0 .* where nobody reads result 1"):
        check_pattern(halves(wrong))


def test_a_kernel_of_one_result_has_nothing_to_leave_out(scratch):
    def doubled(x: Tensor) -> Tensor:
        return x + x.exp()

    with pytest.raises(PatternError, match=r"the kernel .* takes \(x, read\), not some of \(x\)"):
        Pattern(doubled).kernel(lambda x, read: x)
