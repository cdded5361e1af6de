"""Capture: recipes lower what running would lower; what is not understood is copied; states are told apart."""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.capture as capture_module
from fusion_backend.capture import captured
from fusion_backend.recipes import Recipes
from fusion_backend.testing import assert_fuses, collect


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        h = self.norm(x)
        h = h.view(-1, 8).to(x.dtype)
        h = F.silu(self.up(h)) * self.up(h)[..., :1]
        return x + self.down(h).view(x.shape)


def source(fn, *inputs, **kwargs):
    return collect(fn, *inputs, **kwargs).sources[0]


def lines(view):
    """(operator, arguments with values by number, shape) of the tensors of a view."""
    number: dict = {}
    found = []
    for n in view.graph.nodes:
        if n.op == "output" or not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        number[n] = len(number)
        arguments = torch.fx.node.map_arg(n.args, lambda a: number.get(a, "size"))
        found.append((str(n.target) if n.op == "call_function" else n.op, str(arguments), str(n.meta["val"].shape)))
    return found


@pytest.mark.parametrize("dynamic", [False, True])
def test_recipes_lower_like_running(dynamic):
    model = torch.nn.Sequential(*[Block() for _ in range(3)])
    gm = source(model, torch.randn(2, 3, 8), dynamic=dynamic)
    recipes = Recipes()
    replayed, run = captured(gm, recipes), captured(gm, None)
    assert lines(replayed) == lines(run)
    assert {n.name for n in replayed.requires_grad} and len(replayed.requires_grad) == len(run.requires_grad)
    assert any(isinstance(recipe, tuple) for recipe in recipes.known.values())


def test_recipes_tell_equal_arguments_from_different_ones():
    def f(x, y):
        return (x * x) + (x * y) + (y * y)

    gm = source(f, torch.randn(3), torch.randn(3))
    assert lines(captured(gm, Recipes())) == lines(captured(gm, None))


def test_graphs_with_in_place_code_are_run(monkeypatch):
    used = []
    real = capture_module.captured
    monkeypatch.setattr(capture_module, "captured", lambda gm, recipes: used.append(recipes) or real(gm, recipes))

    def f(x):
        y = x.sin()
        y.mul_(2)
        return y.view(-1) + 1

    collect(f, torch.randn(3))
    assert used[-1] is None
    used.clear()
    collect(lambda x: x.sin().view(-1) + 1, torch.randn(3))
    assert None not in used


def test_what_is_not_understood_is_copied_with_a_reason():
    def f(x):
        return F.layer_norm(torch.func.vmap(torch.sin)(x), (4,))

    report = assert_fuses(f, torch.randn(3, 4), pattern="layer_norm")
    assert any("vmap" in why for why in report.graphs[0].kept.values()), report.graphs[0].kept


def test_the_same_code_under_no_grad_is_another_value():
    """(x + y) without a gradient must not stand in for (x + y) with one."""

    def f(x, y, z):
        with torch.no_grad():
            s = x + y
        return s * z, (x + y) * z

    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    report = assert_fuses(f, x, y, z, pattern="add_mul")
    assert any("change of grad mode" in s.reason for s in report.sites if not s.fused), str(report)


def test_autocast_writes_the_casts_on_the_inputs():
    def f(x, w1, w2):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.sigmoid(F.linear(x, w1)) * F.linear(x, w2)

    x, w1, w2 = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4)
    collector = collect(f, x, w1, w2)
    assert [s.pattern for s in collector.report.fused] == ["gated_linear"], str(collector.report)
    (node,) = [n for n in collector.graphs[0].graph.nodes if str(n.target).startswith("fusion.")]
    assert {a.meta["example_value"].dtype for a in node.all_input_nodes} == {torch.bfloat16}
    torch.testing.assert_close(collector.graphs[0](x, w1, w2)[0], f(x, w1, w2))
