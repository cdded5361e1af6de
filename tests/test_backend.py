"""What a user sees: options, reports, logging, switching off, and what happens to broken patterns
and bad input.
"""

import json
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_backend
from fusion_backend import Pattern, explain
from fusion_backend.frontends.dynamo import FusionBackend
from fusion_backend.reporting.reject import PatternError
from fusion_backend.testing import assert_fuses, check_pattern, rewritten


def both(x, y):
    return F.layer_norm(torch.exp((x + y) * 2), (8,))


@pytest.fixture
def xy():
    return torch.randn(4, 8), torch.randn(4, 8)


def compiled(fn, **options):
    return torch.compile(
        fn, backend="fusion", options={f"fusion.{k}": v for k, v in options.items()}
    )


def fused():
    return sorted(s.pattern for s in fusion_backend.report().fused)


def test_backend_is_found_by_name():
    assert "fusion" in torch.compiler.list_backends()


@pytest.mark.parametrize(
    "options, want",
    [
        ({}, ["add_mul_exp", "layer_norm"]),
        ({"only": "layer_norm"}, ["layer_norm"]),
        ({"only": ["add_mul_exp"]}, ["add_mul_exp"]),
        ({"skip": "layer_norm,add_mul"}, ["add_mul_exp"]),
        ({"limit": 1}, ["layer_norm"]),
        ({"limit": 0}, []),
        ({"gate": "never"}, []),
    ],
)
def test_options(xy, options, want):
    report = explain(
        both, *xy, options={f"fusion.{k}": v for k, v in {"gate": "always", **options}.items()}
    )
    assert sorted(s.pattern for s in report.fused) == want
    assert report.sites and all(s.reason for s in report.sites if not s.fused)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"onyl": "layer_norm"}, ["fusion.onyl", "fusion.only"]),
        ({"only": "layer_nrom"}, ["layer_nrom", "layer_norm"]),
        ({"only": 3}, ["fusion.only"]),
        ({"gate": "maybe"}, ["maybe", "auto", "always", "never"]),
        ({"limit": -1}, ["fusion.limit", "-1"]),
        ({"limit": "two"}, ["fusion.limit", "two"]),
    ],
)
def test_wrong_options_name_the_right_ones(xy, options, words):
    with pytest.raises(Exception) as caught:
        compiled(both, **options)(*xy)
    assert all(word in str(caught.value) for word in words)


def test_inductor_options_pass_through_and_are_checked(xy):
    torch.compile(both, backend="fusion", options={"max_autotune": False, "fusion.gate": "always"})(
        *xy
    )
    assert fused() == ["add_mul_exp", "layer_norm"]
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(both, backend="fusion", options={"no_such_option": 1})(*xy)


def test_mode_and_options_together_are_torchs_own_error(xy):
    with pytest.raises(RuntimeError, match="mode.*options"):
        torch.compile(
            both, backend="fusion", mode="max-autotune", options={"fusion.gate": "always"}
        )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(xy, mode):
    torch.testing.assert_close(torch.compile(both, backend="fusion", mode=mode)(*xy), both(*xy))


def test_fullgraph_and_no_cpu_fusion_by_default(xy):
    torch.testing.assert_close(
        torch.compile(both, backend="fusion", fullgraph=True)(*xy), both(*xy)
    )
    report = fusion_backend.report()
    assert not report.fused and {s.pattern for s in report.sites} >= {"add_mul_exp", "layer_norm"}
    assert all("CUDA" in s.reason for s in report.sites)


def test_nothing_accepted_is_the_same_object(xy):
    seen = []

    class Watching(FusionBackend):
        pass

    import fusion_backend.frontends.dynamo as module

    def plain(mode, options):
        def compile(gm, inputs):
            seen.append((gm, options))
            return gm

        compile.config = {}
        return compile

    real, module.inductor = module.inductor, plain
    try:
        given = []
        torch.compile(both, backend=lambda gm, i: given.append(gm) or Watching()(gm, i))(*xy)
    finally:
        module.inductor = real
    assert seen[-1][0] is given[0] and "joint_custom_pre_pass" not in seen[-1][1]
    assert [g.error for g in fusion_backend.report().graphs] == [None]


def test_disable(xy):
    with fusion_backend.disable():
        compiled(both, gate="always")(*xy)
    assert fusion_backend.report().graphs == []
    torch.compiler.reset()
    compiled(both, gate="always")(*xy)
    assert fused() == ["add_mul_exp", "layer_norm"]


def test_report_text_and_json(xy):
    report = explain(both, *xy, options={"fusion.gate": "always"})
    text = str(report)
    assert "2 of 2 recognised sites fused in 1 graph" in text
    assert f"{os.path.relpath(__file__)}:" in text
    data = json.loads(report.to_json())
    assert data["graphs"][0]["sites"][0]["where"].startswith(__file__)
    assert {s["pattern"]: s["bytes_saved"] for s in data["graphs"][0]["sites"]}[
        "add_mul_exp"
    ] == 2 * 2 * 4 * 8 * 4


def test_nearest_miss_names_the_node_and_line():
    def almost(x, w):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.abs().mean(-1, keepdim=True) + 1e-5) * w  # no pow(2)

    report = explain(almost, torch.randn(4, 8), torch.randn(8))
    (miss,) = [m for m in report.misses if m.pattern == "layer_norm"]
    line = almost.__code__.co_firstlineno + 2
    assert "expected mul, found abs" in miss.reason and f":{line}" in miss.reason, str(report)


def test_log_variable(xy, capfd, monkeypatch):
    monkeypatch.setenv("FUSION_LOG", "1")
    compiled(both, gate="always")(*xy)
    assert "[fusion] fused      layer_norm" in capfd.readouterr().err


def test_failure_of_ours_falls_back_and_says_so(xy, monkeypatch):
    from fusion_backend import pipeline

    def broken(*args):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(pipeline, "rewrite", broken)
    with pytest.warns(RuntimeWarning, match="a bug of ours"):
        out = compiled(both, gate="always")(*xy)
    torch.testing.assert_close(out, both(*xy))
    assert not fusion_backend.report().fused and "a bug of ours" in str(fusion_backend.report())


# Patterns that users write.


def test_user_pattern_trains_through_the_default_vjp(scratch):
    @Pattern
    def scaled_tanh(x: Tensor, w: Tensor, s: float) -> Tensor:
        return torch.tanh(x * w) * s

    @scaled_tanh.inputs(dict(n=5))
    def _(tensor, n):
        return tensor(3, n), tensor(n), 0.7

    assert check_pattern(scaled_tanh)
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    f = compiled(lambda x, w: 1.5 * torch.tanh(w * x), gate="always", only=["scaled_tanh"])
    torch.testing.assert_close(
        torch.autograd.grad(f(x, w).sum(), (x, w)),
        torch.autograd.grad((1.5 * torch.tanh(w * x)).sum(), (x, w)),
    )
    assert fused() == ["scaled_tanh"]


def test_two_results(scratch):
    @Pattern
    def sum_and_square(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        return torch.sin(s), torch.cos(s)

    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    def f(x, y):
        t = y + x
        return t.cos() * 2, t.sin()

    assert_fuses(f, x, y, pattern="sum_and_square")
    g = compiled(f, gate="always", only=["sum_and_square"])
    for got, want in zip(g(x, y), f(x, y), strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), (x, y), retain_graph=True),
            torch.autograd.grad(want.sum(), (x, y), retain_graph=True),
        )


@pytest.mark.parametrize(
    "kind", ["data", "unused", "no tensor", "disagree", "annotation", "arguments", "scalar"]
)
def test_broken_patterns_name_pattern_and_line(scratch, kind):
    def define():
        if kind == "data":

            @Pattern
            def broken(x: Tensor) -> Tensor:
                return x.sin() if x.sum() > 0 else x.cos()

        elif kind == "unused":

            @Pattern
            def broken(x: Tensor, y: Tensor) -> Tensor:
                return x.sin()

        elif kind == "no tensor":

            @Pattern
            def broken(x: Tensor) -> Tensor:
                return 3

        elif kind == "disagree":

            @Pattern
            def broken(x: Tensor) -> Tensor:
                return x.sin() * 2

            @broken.spelling
            def _(x):
                return x.sin() * 3

        elif kind == "annotation":

            @Pattern
            def broken(x: Tensor, y: str) -> Tensor:
                return x.sin()

        elif kind == "arguments":

            @Pattern
            def broken(x: Tensor) -> Tensor:
                return x.sin()

            @broken.kernel
            def _(x, y):
                return x

        else:

            @Pattern
            def broken(x: Tensor, s: float) -> Tensor:
                return x * (s**3 + 1)

        check_pattern(broken)

    with pytest.raises(PatternError, match=r"pattern broken \(.*test_backend.py:\d+\)"):
        define()


def test_a_broken_pattern_costs_a_warning_not_the_model(scratch, xy):
    @Pattern
    def broken(x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    with pytest.warns(RuntimeWarning, match="broken"):
        torch.testing.assert_close(compiled(both, gate="always")(*xy), both(*xy))
    assert fused() == ["add_mul_exp", "layer_norm"]


def test_two_patterns_of_one_name():
    source = "\n".join(
        (
            "from torch import Tensor",
            "from fusion_backend import Pattern",
            "@Pattern",
            "def layer_norm(x: Tensor) -> Tensor:",
            "    return x.sin()",
        )
    )
    from fusion_backend.frontends.loading import patterns

    patterns()
    with pytest.raises(PatternError, match="layer_norm.*taken by pattern layer_norm"):
        exec(compile(source, "elsewhere.py", "exec"), {"__name__": "elsewhere"})


# Values that must not be lost.


@pytest.mark.parametrize("pattern", ["add_mul"])
def test_mutation_in_between_is_seen(pattern):
    def before(x, y, z):
        s = x + y
        x.mul_(2)
        return s * z

    def after(x, y, z):
        s = x + y
        out = s * z
        x.mul_(2)
        return out

    def local(x, y, z):
        t = x.sin()
        s = t + y
        t.mul_(2)
        return s * z, t

    for fn, count in ((before, 0), (after, 1), (local, 1)):
        given = [torch.randn(3, 4) for _ in range(3)]
        assert_fuses(fn, *[g.clone() for g in given], pattern=pattern, count=count)
        torch.compiler.reset()
        mine, theirs = [g.clone() for g in given], [g.clone() for g in given]
        got, want = compiled(fn, gate="always")(*mine), fn(*theirs)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine, theirs)


def test_sparse_and_quantised_inputs_fall_through():
    x = torch.randn(4, 4).relu().to_sparse()
    f = compiled(lambda a, b: (a + b) * 2.0, gate="always")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(f(x, x).to_dense(), (x.to_dense() * 4))
    assert not fused()


def test_output_that_is_also_an_input_view():
    def f(x, y):
        h = F.layer_norm(x, (4,))
        return h, h.view(-1), (x + y) * 2.0, x.view(-1)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for got, want in zip(compiled(f, gate="always")(x, y), f(x, y), strict=True):
        torch.testing.assert_close(got, want)
    assert fused() == ["add_mul", "layer_norm"]


def test_in_place_gate_differentiates_as_its_functional_form():
    def gate(x, w1, b1, w2, b2):
        r = x @ w1 + b1
        r.sigmoid_()
        r *= x @ w2 + b2
        return r

    def functional(x, w1, b1, w2, b2):
        return torch.sigmoid(x @ w1 + b1) * (x @ w2 + b2)

    args = [torch.randn(*s, requires_grad=True) for s in ((3, 4), (4, 5), (5,), (4, 5), (5,))]
    plain = functional(*args)  # eager refuses to differentiate the in-place form
    want = torch.autograd.grad(plain.sum(), args)
    mine = compiled(gate, gate="always")(*args)
    assert fused() == ["gated_linear"]
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(torch.autograd.grad(mine.sum(), args), want)


def test_exported_program_has_the_same_sites(xy):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = (
                torch.nn.LayerNorm(8),
                torch.nn.Linear(8, 6),
                torch.nn.Linear(8, 6),
            )

        def forward(self, x, y):
            h = self.norm(torch.exp((x + y) * 2))
            with torch.no_grad():
                k = F.layer_norm(x, (8,)).sum()
            return self.a(h).sigmoid() * self.b(h) + k

    model = Model()
    program = torch.export.export(model, xy)
    before = str(program.graph)
    fusion_backend.reset()
    new = fusion_backend.fuse(program, gate="always")
    exported = sorted((s.pattern, s.where) for s in fusion_backend.report().fused)
    with_compile = sorted(
        (s.pattern, s.where) for s in explain(model, *xy, options={"fusion.gate": "always"}).fused
    )
    assert [p for p, _ in exported] == ["add_mul_exp", "gated_linear", "layer_norm", "layer_norm"]
    assert exported == with_compile
    torch.testing.assert_close(new.module()(*xy), model(*xy))
    assert str(program.graph) == before
    with pytest.raises(ValueError, match="fusion.gate"):
        fusion_backend.fuse(program, gate="sometimes")


def test_rewritten_returns_dynamos_graph_when_nothing_fuses():
    gm = rewritten(lambda x: x.sin(), torch.randn(3))
    assert not any("fusion" in n.meta for n in gm.graph.nodes)


def test_result_written_to_in_place_while_training():
    def f(x):
        h = F.layer_norm(x, (4,))
        h[:, 0] = 0
        return h * 2

    x = torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        out = compiled(f, gate="always", only=["layer_norm"])(x)
    assert fused() == ["layer_norm"]
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), x), torch.autograd.grad(f(x).sum(), x)
    )
