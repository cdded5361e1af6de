"""token_log_probs: how it is written, what it leaves alone, what its guard refuses, and training.
tests/test_token_log_probs_kernels.py has its kernels.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fusion_backend import explain
from fusion_backend.kernels.loss import token_log_probs as kernels
from fusion_backend.reporting.reject import Unmeasured
from fusion_backend.testing import assert_fuses, collect, fused_nodes, rewritten, with_kernels
from tests.kernel_checks import distance, randn, runs_kernels, symbolic
from tests.test_token_log_probs_kernels import NAME, PATTERN, B, S, V, of, tokens
from tests.without_interpreter import output_of

pytestmark = pytest.mark.usefixtures("poisoned_empties")


# Legality and profitability


def test_refusals():
    x, index, *rest = of(torch.randn(B, S, V))
    for args, sentence in [
        ((torch.randn(B, V, S).mT, index, *rest), "the logits of a row are 6 apart"),
        ((x[..., ::2], index, *rest), "the logits of a row are 2 apart"),
        ((x, index.expand(-1, -1, 2), *rest), "index has 2 columns, not one"),
        ((x, index[:2], *rest), "x has shape (3, 6, 40) and index (2, 6, 1)"),
        ((x.double(), index, *rest), "x is torch.float64"),
        ((x[..., :0], index, *rest), "there are no classes"),
    ]:
        assert sentence in PATTERN.guard_fn(*args).reason
    assert PATTERN.guard_fn(x.mT[..., :1], tokens(B, V, 1, v=1), *rest) is None


def test_the_tables_take_what_was_timed():
    def answer(rows=8192, v=128256, dtype=torch.bfloat16, take="gather", total="log_softmax"):
        x = torch.empty(1, rows, v, dtype=dtype, device="meta")
        index = torch.empty(1, rows, 1, dtype=torch.int64, device="meta")
        return PATTERN.worthwhile_fn(x, index, None, take, total, "none", "dropped", training=True)

    assert answer() is None
    for other in (
        dict(rows=2048), dict(rows=1 << 18, v=8192), dict(dtype=torch.float32),
        dict(take="take_along_dim"), dict(total="logsumexp"),
    ):  # fmt: skip
        assert isinstance(answer(**other), Unmeasured), other


def test_symbolic_sizes_add_no_guard():
    env, (x, ids) = symbolic(torch.randn(5, 7, 9), torch.zeros(5, 7, 1, dtype=torch.int64))
    rest = (None, "gather", "log_softmax", "none", "dropped")
    assert "the number of classes is dynamic" in PATTERN.guard_fn(x, ids, *rest).reason
    with x.fake_mode:
        b, s = x.shape[:2]
        logits = x.new_empty(b, s, 32)
        others = [logits, logits[:, :-1], logits.transpose(0, 1), logits.view(-1, 32)]
        indices = [ids.new_empty(*y.shape[:-1], 1) for y in others]
        before = len(env.guards)
        for y, index in zip(others, indices, strict=True):
            assert PATTERN.guard_fn(y, index, *rest) is None
            found = kernels.rows_of(y)
            assert found is not None and found[1][0].unit == 32
    assert len(env.guards) == before


def test_every_kernel_compiles_without_a_gpu():
    """For sm_90, without spilling."""
    out = output_of("-m", "benchmarks.compile_kernels", NAME)
    for kernel, dtype in itertools.product(
        ("_kernel", "_backward_kernel"), ("bf16", "fp16", "fp32")
    ):
        assert f"{NAME}{kernel}" in out and dtype in out


# How it is written


def column(ids):
    return ids.unsqueeze(-1)


FOUND = {
    "log_softmax, gather": lambda x, i: F.log_softmax(x, -1).gather(-1, column(i)).squeeze(-1),
    "torch.gather": lambda x, i: torch.gather(x.log_softmax(2), 2, i[..., None]).squeeze(2),
    "its column kept": lambda x, i: F.log_softmax(x, dim=-1).gather(-1, column(i)),
    "its column selected": lambda x, i: F.log_softmax(x, -1).gather(-1, column(i))[..., 0],
    "take_along_dim": lambda x, i: torch.take_along_dim(F.log_softmax(x, -1), column(i), -1),
    "less logsumexp": lambda x, i: x.gather(-1, column(i)).squeeze(-1) - x.logsumexp(-1),
    "less torch.logsumexp": lambda x, i: (
        torch.gather(x, -1, column(i)) - torch.logsumexp(x, -1, keepdim=True)
    ),
    "less logsumexp, squeezed": lambda x, i: (
        x.gather(-1, column(i)) - x.logsumexp(-1).unsqueeze(-1)
    ).squeeze(-1),
    "taken less logsumexp": lambda x, i: (
        x.take_along_dim(column(i), -1).squeeze(-1) - x.logsumexp(-1)
    ),
    "log_softmax by hand": lambda x, i: (
        (x - x.logsumexp(-1, keepdim=True)).gather(-1, column(i)).squeeze(-1)
    ),
    "in fp32": lambda x, i: F.log_softmax(x.float(), -1).gather(-1, column(i)).squeeze(-1),
    "in fp32 by dtype": lambda x, i: (
        F.log_softmax(x, -1, dtype=torch.float32).gather(-1, column(i)).squeeze(-1)
    ),
    "in fp32, logsumexp": lambda x, i: (
        x.float().gather(-1, column(i)).squeeze(-1) - x.float().logsumexp(-1)
    ),
    "with a temperature": lambda x, i: F.log_softmax(x / 0.7, -1).gather(-1, column(i)).squeeze(-1),
    "of the next token": lambda x, i: (
        F.log_softmax(x[:, :-1], -1).gather(-1, i[:, 1:, None]).squeeze(-1)
    ),
    "of the next token, logsumexp": lambda x, i: (
        x[:, :-1].gather(-1, i[:, 1:, None]).squeeze(-1) - x[:, :-1].logsumexp(-1)
    ),
    "of flattened rows": lambda x, i: (
        F.log_softmax(x.view(-1, V), -1).gather(1, i.view(-1, 1)).view(i.shape)
    ),
    "of flattened slices": lambda x, i: (
        F.log_softmax(x[:, :-1].reshape(-1, V), 1).gather(1, i[:, 1:].reshape(-1, 1)).squeeze(1)
    ),
    "by aranges": lambda x, i: F.log_softmax(x, -1)[
        torch.arange(B)[:, None], torch.arange(S)[None, :], i
    ],
    "by aranges, less logsumexp": lambda x, i: (
        x[torch.arange(B).unsqueeze(1), torch.arange(S), i] - x.logsumexp(-1)
    ),
    "by aranges of the sizes": lambda x, i: x.log_softmax(-1)[
        torch.arange(x.shape[0]).view(-1, 1).expand(x.shape[:2]), torch.arange(x.size(1)), i
    ],
    "of flattened rows by an arange": lambda x, i: F.log_softmax(x.view(-1, V), -1)[
        torch.arange(B * S), i.view(-1)
    ].view(i.shape),
    "of the next token, by aranges": lambda x, i: F.log_softmax(x[:, :-1].float(), -1)[
        torch.arange(B)[:, None], torch.arange(S - 1), i[:, 1:]
    ],
    "the loss, less x": lambda x, i: x.logsumexp(-1) - x.gather(-1, column(i)).squeeze(-1),
    "the loss, its column kept": lambda x, i: (
        torch.logsumexp(x, -1, keepdim=True) - x.gather(-1, column(i))
    ),
    "the loss in fp32": lambda x, i: (
        -x.float().gather(-1, column(i)).squeeze(-1) + x.float().logsumexp(2)
    ),
    "the loss by aranges": lambda x, i: (
        x.logsumexp(-1) - x[torch.arange(B)[:, None], torch.arange(S), i]
    ),
    "the mean of the loss": lambda x, i: (x.logsumexp(-1) - x.gather(-1, column(i))[..., 0]).mean(),
    "masked mean": lambda x, i: (
        (F.log_softmax(x, -1).gather(-1, column(i)).squeeze(-1) * (i > 3)).sum() / (i > 3).sum()
    ),
}


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("words", FOUND)
def test_found(words, needs, dtype):
    fn, ids = FOUND[words], tokens(B, S)
    x = randn(B, S, V, dtype=dtype).requires_grad_(needs)
    gm = rewritten(fn, x, ids)
    (node,) = fused_nodes(gm)
    assert str(node.target) == f"fusion.{NAME}.default" and node.kwargs["save"] == needs
    read = node.args[0].meta
    assert read.get("example_value", read.get("val")).dtype == dtype  # not what it is cast to
    exact = x.detach().double().requires_grad_()
    want, plain = fn(exact, ids), fn(x, ids)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    (got,) = with_kernels(gm)(*({"l_x_": x, "l_i_": ids}[name] for name in names))[:1]
    assert (got.dtype, got.shape) == (plain.dtype, plain.shape)
    close = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}[dtype]
    assert distance(got, want) < close
    if needs:
        dout = randn(*want.shape)
        (dx,) = torch.autograd.grad(want, exact, dout.double())
        (found,) = torch.autograd.grad(got, x, dout.to(got.dtype))
        assert found.dtype == dtype and distance(found, dx) < 3 * close


def entropy_too(x, i):
    y = F.log_softmax(x, -1)
    return y.gather(-1, column(i)).squeeze(-1), -(y.exp() * y).sum(-1)


def logsumexp_too(x, i):
    y = x.logsumexp(-1)
    return x.gather(-1, column(i)).squeeze(-1) - y, y.square().mean()


GATHER = "expected gather over dimension -1, one element a row, found dimension -1, "
SUM = "expected logsumexp of log_softmax over dimension -1, found dimension "
LEFT_ALONE = {
    "an entropy reads all of it": (entropy_too, "log_softmax inside it is used elsewhere too, at"),
    "logsumexp is used elsewhere": (logsumexp_too, "logsumexp inside it is used elsewhere too, at"),
    "several tokens a row": (
        lambda x, i: F.log_softmax(x, -1).gather(-1, torch.stack([i, i + 1, i], -1) % V),
        GATHER + "3 elements a row",
    ),
    "several tokens a row, logsumexp": (
        lambda x, i: x.gather(-1, torch.stack([i, i], -1)) - x.logsumexp(-1, keepdim=True),
        "one element a row, found dimension -1, 2 elements a row",
    ),
    "fewer rows of tokens": (
        lambda x, i: F.log_softmax(x, -1).gather(-1, i[:, :4, None]).squeeze(-1),
        GATHER + "an index that may have another shape",
    ),
    "tokens that broadcast": (
        lambda x, i: torch.take_along_dim(F.log_softmax(x, -1), i[:1, :, None], -1).squeeze(-1),
        "one element a row, found dimension -1, an index that may have another shape",
    ),
    "gathered along another dimension": (
        lambda x, i: F.log_softmax(x, -1).gather(1, (i % S)[:, :1, None].expand(-1, 1, V)),
        SUM + "-1, taken along dimension -2",
    ),
    "over another dimension": (
        lambda x, i: F.log_softmax(x, 1).gather(-1, column(i)).squeeze(-1),
        SUM + "-2, taken along dimension -1",
    ),
    "over another dimension, and along it": (
        lambda x, i: F.log_softmax(x, 1).gather(1, (i % S)[:, :1, None].expand(-1, 1, V)),
        SUM + "-2",
    ),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_left_alone_for_a_reason(what):
    fn, reason = LEFT_ALONE[what]
    x, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(0, V, (B, S))
    report = assert_fuses(fn, x, ids, pattern=NAME, count=0)
    told = [m.reason for m in report.misses] + [s.reason for s in report.sites]
    assert any(reason in one and "test_token_log_probs.py:" in one for one in told), told


OTHERS = {
    "aranges that change places": lambda x, i: (
        F.log_softmax(x, -1)[torch.arange(B), torch.arange(S)[:, None], i.T].T
    ),
    "an arange from one": lambda x, i: F.log_softmax(x, -1)[
        torch.arange(B)[:, None], torch.arange(1, S), i[:, 1:]
    ],
    "an arange in steps": lambda x, i: F.log_softmax(x, -1)[
        torch.arange(B)[:, None], torch.arange(0, S, 2), i[:, ::2]
    ],
    "an arange from minus one": lambda x, i: F.log_softmax(x, -1)[
        torch.arange(-1, B - 1)[:, None], torch.arange(S), i
    ],
    "an arange backwards": lambda x, i: F.log_softmax(x, -1)[
        torch.arange(B)[:, None], torch.arange(0, -S, -1), i
    ],
    "aranges that change places in a square": lambda x, i: F.log_softmax(x[:, :B], -1)[
        torch.arange(B)[None], torch.arange(B)[:, None], i[:, :B]
    ],
    "an arange of fewer rows": lambda x, i: F.log_softmax(x.view(-1, V), -1)[
        torch.arange(5), i.view(-1)[:5]
    ],
    "rows that are given": lambda x, i: F.log_softmax(x.view(-1, V), -1)[
        i.view(-1) % S, i.view(-1)
    ],
    "every token with every row": lambda x, i: F.log_softmax(x[0], -1)[:, i[0]],
    "the token first": lambda x, i: F.log_softmax(x[0, :, :S], -1)[i[0] % S, torch.arange(S)],
    "the loss of other logits": lambda x, i: (
        (2 * x).logsumexp(-1) - x.gather(-1, column(i))[..., 0]
    ),
    "the loss, half of it detached": lambda x, i: (
        x.logsumexp(-1).detach() - x.gather(-1, column(i))[..., 0]
    ),
    "the sum of other logits": lambda x, i: x.gather(-1, column(i))[..., 0] - (2 * x).logsumexp(-1),
    "a sum": lambda x, i: x.gather(-1, column(i))[..., 0] + x.logsumexp(-1),
    "two temperatures": lambda x, i: (
        (x * 0.7).gather(-1, column(i))[..., 0] - (x * 0.8).logsumexp(-1)
    ),
    "a temperature in the sum alone": lambda x, i: (
        x.gather(-1, column(i))[..., 0] - (x / 0.8).logsumexp(-1)
    ),
    "detached": lambda x, i: F.log_softmax(x, -1).detach().gather(-1, column(i)),
    "half of it detached": lambda x, i: x.gather(-1, column(i))[..., 0] - x.logsumexp(-1).detach(),
    "a sparse gradient": lambda x, i: torch.gather(
        F.log_softmax(x, -1), -1, column(i), sparse_grad=True
    ),
    "without a dimension": lambda x, i: torch.take_along_dim(F.log_softmax(x, -1), i),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_values_are_left_alone(what):
    x, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(0, V, (B, S))
    assert_fuses(OTHERS[what], x, ids, pattern=NAME, count=0)


TEMPERATURES = {
    "divided": lambda x, i: F.log_softmax(x / 0.7, -1).gather(-1, column(i)),
    "multiplied": lambda x, i: F.log_softmax(1.3 * x, -1).gather(-1, column(i)),
    "in place": lambda x, i: F.log_softmax((x + 1).div_(0.7), -1).gather(-1, column(i)),
    "after the cast": lambda x, i: F.log_softmax(x.bfloat16().float() / 0.7, -1).gather(
        -1, column(i)
    ),
    "twice": lambda x, i: (x / 0.7).gather(-1, column(i)) - (x / 0.7).logsumexp(-1, keepdim=True),
    "the loss": lambda x, i: (lambda y: y.logsumexp(-1) - y.gather(-1, column(i))[..., 0])(x * 3),
}


@pytest.mark.parametrize("how", TEMPERATURES)
def test_the_temperature_is_part_of_the_site(how):
    x, ids = torch.randn(B, S, V), torch.randint(0, V, (B, S))
    collector = collect(TEMPERATURES[how], x, ids, options={"fusion.only": NAME})
    (site,) = collector.report.fused
    (graph,) = collector.graphs
    (node,) = (n for n in graph.graph.nodes if "token_log_probs" in str(n.target))
    assert not any(n.name.startswith(("truediv", "mul", "div")) for n in node.all_input_nodes)


def test_scaled_logits_may_be_used_elsewhere():
    def fn(x, i):
        y = x / 0.7
        return F.log_softmax(y, -1).gather(-1, column(i)), y.argmax(-1), y * y

    x, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(0, V, (B, S))
    assert_fuses(fn, x, ids, pattern=NAME)


def test_a_change_of_grad_mode_inside_is_left_alone():
    def fn(x, i):
        with torch.no_grad():
            minus = -x.logsumexp(-1)
        return x.gather(-1, column(i)).squeeze(-1) + minus

    x, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(0, V, (B, S))
    assert_fuses(fn, x, ids, pattern=NAME, count=0)


def test_an_arange_may_be_used_elsewhere():
    """It costs nothing to compute again."""

    def fn(x, i):
        rows = torch.arange(B)
        picked = F.log_softmax(x, -1)[rows[:, None], torch.arange(S), i]
        return picked, x[rows, rows, rows], rows

    x, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(0, V, (B, S))
    assert_fuses(fn, x, ids, pattern=NAME)


@runs_kernels
def test_tokens_that_count_from_the_end():
    fn, x = FOUND["by aranges"], randn(B, S, V)
    ids = tokens(B, S) - V
    (got,) = with_kernels(rewritten(fn, x, ids))(x, ids)
    torch.testing.assert_close(got, fn(x, ids))


# In training


class Policy(torch.nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.head, self.checkpointed = torch.nn.Linear(8, V), checkpointed

    def of_tokens(self, h, ids):
        return F.log_softmax(self.head(h)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def forward(self, h, ids):
        if self.checkpointed:
            return checkpoint(self.of_tokens, h, ids, use_reentrant=False)
        return self.of_tokens(h, ids)


def trained(fn, model, h, ids):
    out = fn(h, ids)
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_training(checkpointed, autocast, eager_kernels):
    torch.compiler.reset()
    model, h, ids = Policy(checkpointed), torch.randn(B, S, 8), torch.randint(0, V, (B, S))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = collect(model, h, ids).report
        assert [s.pattern for s in report.fused if s.pattern == NAME] == [NAME], str(report)
        want = trained(model, model, h, ids)
        compiled = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
        got = trained(compiled, model, h, ids)
    close = 2e-2 if autocast else 1e-5
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and distance(a, b) < close


@pytest.mark.parametrize("words", ["of the next token", "by aranges of the sizes"])
def test_other_numbers_of_rows_need_no_other_graph(words, eager_kernels):
    plain = FOUND[words]
    fn = torch.compile(plain, backend="fusion", options={"fusion.gate": "always"}, dynamic=True)
    x, ids = torch.randn(B, S, V), torch.randint(0, V, (B, S))
    report = assert_fuses(plain, x, ids, pattern=NAME, dynamic=True)
    assert not report.misses
    torch.compiler.reset()
    for b, s in (B, S), (B + 2, S + 5), (2, S + 1):
        x, ids = torch.randn(b, s, V), torch.randint(0, V, (b, s))
        with torch._dynamo.config.patch(error_on_recompile=(b, s) != (B, S)):
            torch.testing.assert_close(fn(x, ids), plain(x, ids))


def test_what_the_report_says_of_a_gpu():
    x, ids = torch.randn(B, S, V), torch.randint(0, V, (B, S))
    sites = explain(FOUND["log_softmax, gather"], x, ids, target="H200").sites
    assert [s.alternative for s in sites] == [False, True]  # with the column dropped, and kept
    assert all(s.pattern == NAME and "has not been timed" in s.reason for s in sites)
    always = {"fusion.gate": "always"}
    report = explain(
        Policy(), torch.randn(B, S, 8), ids, target="H200", options=always, dynamic=True
    )
    (site,) = report.fused
    assert (site.forward, site.backward) == ("kernel", "kernel")
