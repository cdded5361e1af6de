"""Graphs whose images Inductor would leave contiguous: they are laid out channels-last if their
convolutions were measured to be faster so. What is measured, who decides, and what follows.
"""

import dataclasses
import datetime

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_backend
from fusion_backend import pipeline, remembered
from fusion_backend.compat import inductor as compat_inductor
from fusion_backend.compat.torch import inductor_config
from fusion_backend.frontends.commands.gate_measured import who
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.measure import allowance, layouts, store
from fusion_backend.measure.agree import Ranks
from fusion_backend.measure.contest import NotMeasurable
from fusion_backend.measure.timing import ROUNDS, Race
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.rewrite import channels_last, image_work
from fusion_backend.rewrite.channels_last import layout_of

from .measured_cases import as_on_a_gpu

LAST, RACED = torch.channels_last, layouts.raced
X = torch.randn(4, 3, 12, 10)


class Down(nn.Module):
    """A level of a U-Net: the last convolution has half as many channels as it reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        y = self.up(self.second(F.max_pool2d(x, 2)).relu())
        return self.last(torch.cat((x, y), 1))


def raced(ratio: float) -> Race:
    race = Race(layouts.WORTH)
    for _ in range(ROUNDS[0]):
        race.add(ratio, 1.0)
    return race


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Inductor leaves images contiguous, and a CPU is taken for a GPU on which the convolutions are
    twice as fast channels-last, or what the test sets. Yields what was measured.
    """
    asked = []

    def race(work, clock, until):
        asked.append(work)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return raced(answer[0])

    answer = [2.0]
    race.answer, race.asked = answer, asked
    monkeypatch.setattr(channels_last, "lays_out", lambda calls, trains: False)
    monkeypatch.setattr(layouts, "on_gpu", lambda device: True)
    monkeypatch.setattr(layouts, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(layouts, "Clock", lambda device: None)
    monkeypatch.setattr(layouts, "raced", race)
    monkeypatch.setattr(layouts, "ALLOWANCE", allowance.Allowance())
    with as_on_a_gpu(monkeypatch, tmp_path):
        yield race


def fused(model, *inputs, compiles=True, **options) -> tuple[GraphRecord, bool]:
    """The record of a graph, and whether it is the graph itself that is compiled."""
    record, same = GraphRecord(0), []

    def backend(gm, example_inputs):
        new, _ = fuse_graph(gm, Options(**options), record, usable(patterns()), compiles)
        same.append(new is gm)
        return new.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*inputs)
    return record, same[0]


def trained(model, x) -> list:
    y = model(x)
    y.square().mean().backward()
    found = [y, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return found


# What follows from the answer


def test_faster_so(measured, monkeypatch):
    """The graph is compiled channels-last, with an option of Inductor's; it computes the same, and
    its results lie in memory as before.
    """
    forced = []
    inner = compat_inductor.compile_fx_inner

    def compile_fx_inner(*args, **options):
        forced.append(inductor_config.force_layout_optimization)
        return inner(*args, **options)

    monkeypatch.setattr(compat_inductor, "compile_fx_inner", compile_fx_inner)
    torch.manual_seed(0)
    model = Down()
    with functorch_config.patch(enable_autograd_cache=False):
        got = trained(torch.compile(model, backend="fusion"), X)
    want = trained(model, X)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        assert g.stride() == w.stride()
    (record,) = fusion_backend.report().graphs
    assert forced == [True, True]  # forward and backward
    assert not inductor_config.force_layout_optimization
    assert record.channels_last and record.lays_out and not record.error
    told = " ".join(str(fusion_backend.report()).split())
    assert "0: channels-last: their convolutions take 1.000 ms channels-last and 2.000 ms" in told
    assert "as Inductor lays them out" not in told


@pytest.mark.parametrize("ratio", [1.05, 0.5])
def test_no_faster_so(measured, ratio, monkeypatch):
    """The graph is decided and compiled as it is, and the report says why."""
    measured.answer[0] = ratio
    seen, capture = [], pipeline.capture
    monkeypatch.setattr(pipeline, "capture", lambda gm: seen.append(str(gm.graph)) or capture(gm))
    record, same = fused(Down(), X)
    assert "clone" not in seen[0]
    assert same and not record.channels_last and not record.lays_out
    assert record.layout == (
        "contiguous, as Inductor leaves them: their convolutions take 1.000 ms channels-last and "
        f"{ratio:.3f} ms contiguous, measured today"
    )


def test_without_a_site(measured):
    """There need be no site of a pattern: the copy is compiled for its layout."""
    record, same = fused(nn.Conv2d(3, 8, 3), X)
    assert not any(s.fused for s in record.sites)
    assert not same and record.lays_out


def test_regions_are_measured_under_the_same_option(measured, monkeypatch):
    seen = []
    judge = "fusion_backend.measure.judge.Judge.answered"
    monkeypatch.setattr(
        judge, lambda self, gates: seen.append(inductor_config.force_layout_optimization)
    )
    fused(Down(), X)
    measured.answer[0] = 1.0
    store.store().clear()
    fused(Down(), X)
    assert seen == [True, False]


def test_an_uncertain_race_is_no_answer(measured, monkeypatch):
    race = Race(layouts.WORTH)
    for ratio in (1.0, *[2.0] * 7):
        race.add(ratio, 1.0)
    monkeypatch.setattr(layouts, "raced", lambda *how: race)
    record, same = fused(Down(), X)
    assert same and record.layout.endswith("their times vary too much, 1.00 to 2.00 times as fast")
    monkeypatch.setattr(layouts, "raced", lambda *how: raced(2.0))
    assert fused(Down(), X)[0].lays_out  # nothing was kept


def test_a_failure_of_ours_costs_the_layout_alone(measured, monkeypatch):
    def broken(*how):
        raise OSError("no store")

    monkeypatch.setattr(layouts, "known_answer", broken)
    with pytest.warns(RuntimeWarning, match="images stay as Inductor lays them out: OSError"):
        record, same = fused(Down(), X)
    assert same and record.sites and record.faults and not record.error


def test_gradients_lie_in_memory_as_before(measured):
    """Those of images and weights are contiguous, as without the backend."""
    model, x = Down(), X.clone().requires_grad_()
    inputs = [x, *model.parameters()]
    want = torch.autograd.grad(model(x).sum(), inputs)
    y = torch.compile(model, backend="fusion")(x)
    assert fusion_backend.report().graphs[-1].lays_out
    for g, w in zip(torch.autograd.grad(y.sum(), inputs), want, strict=True):
        assert g.stride() == w.stride()
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-3)


def test_what_fell_back_is_told_no_more():
    record = GraphRecord(0, lays_out=True, channels_last=True, layout="channels-last: ...")
    record.forget_rewrites()
    assert not (record.lays_out or record.channels_last or record.layout)


def test_a_result_of_dynamic_size(measured):
    """What is copied cannot be timed, and the graph stays as it is."""
    index = torch.arange(3)
    torch._dynamo.mark_dynamic(index, 0)
    model = nn.Conv2d(3, 8, 3)
    record, same = fused(lambda x, index: model(x)[index], X, index)
    assert same and not measured.asked and not record.faults


@pytest.mark.parametrize("error", [NotMeasurable("no time"), RuntimeError("no plan")])
def test_what_cannot_be_measured(measured, error):
    measured.answer[0] = error
    record, same = fused(Down(), X)
    assert same and str(error) in record.layout and "could not be measured" in record.layout
    measured.answer[0] = 2.0
    assert not fused(Down(), X)[1]  # nothing was kept


def test_no_time_is_left(measured):
    layouts.ALLOWANCE.spend(1000.0)
    record, same = fused(Down(), X)
    assert same and not measured.asked
    assert "not measured, the" in record.layout


# Who asks


def test_who_is_not_asked(measured):
    model = Down()
    for options in (dict(gate="never"), dict(gate="always"), dict(gate="auto", measure_s=0)):
        record, same = fused(model, X, **options)
        assert not record.lays_out and not measured.asked, options
    assert not fused(model, X, compiles=False)[0].lays_out  # explain
    with inductor_config.patch(layout_optimization=False):
        assert not fused(model, X)[0].lays_out
    with torch.no_grad():
        assert not fused(model, X)[0].lays_out
    wide = nn.Conv2d(8, 8, 3)  # begins in the middle of a network
    assert not fused(wide, torch.randn(4, 8, 12, 10))[0].lays_out
    assert not measured.asked
    assert fused(model, X)[0].lays_out and len(measured.asked) == 1


def test_stored_answers(measured):
    """Under "table" no answer of this user counts, and under "always" and "never" none at all;
    `explain` and a process without time use it.
    """
    model = Down()
    assert fused(model, X)[0].lays_out
    assert fused(model, X, compiles=False)[0].lays_out
    assert fused(model, X, measure_s=0)[0].lays_out
    for gate in ("table", "always", "never"):
        assert not fused(model, X, gate=gate)[0].lays_out
    assert len(measured.asked) == 1
    (answer,) = store.store().all()
    assert (answer.sites, answer.take) == ((layouts.NAME,), ("channels-last",))
    assert answer.verdict == "faster" and who(*answer.take) == "channels-last"


def test_remembered(measured, monkeypatch, tmp_path):
    """A later process takes the copy and the option without measuring, while the answer is that."""
    monkeypatch.setattr(remembered, "USED", True)
    monkeypatch.setattr(remembered, "cache_folder", lambda: str(tmp_path))
    records = []

    def backend(gm, example_inputs):
        records.append(GraphRecord(0))
        new, _ = remembered.fuse(gm, Options(only=("softmax",)), records[-1], patterns(), usable)
        return new.forward

    model = Down()
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(model, backend=backend)(X)
    first, second = records
    assert not first.remembered and second.remembered
    assert second.lays_out and second.channels_last and second.layout == first.layout
    (kept,) = (tmp_path / "fusion").glob("graph-*.json")
    kept.write_text(kept.read_text().replace(datetime.date.today().isoformat(), "2020-02-02"))
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(X)
    assert records[-1].remembered and records[-1].layout.endswith("measured on 2020-02-02")
    (answer,) = store.store().all()
    store.store().put(dataclasses.replace(answer, verdict="same", take=("",)))
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(X)
    assert not records[-1].remembered and not records[-1].lays_out


def test_ranks_agree(measured, monkeypatch):
    """The first rank measures, and the others take its answer, also where they would have found
    another one.
    """
    shared = torch.distributed.HashStore()
    for rank, ratio in enumerate((2.0, 0.5)):
        monkeypatch.setattr(
            "fusion_backend.measure.agree.default_store", lambda rank=rank: (shared, rank)
        )
        measured.answer[0] = ratio
        assert fused(Down(), X)[0].lays_out
        store.store().clear()
    assert len(measured.asked) == 1


def test_a_rank_that_fails_lets_the_others_go_on(monkeypatch):
    def broken() -> str:
        raise OSError("no store")

    shared = torch.distributed.HashStore()
    monkeypatch.setattr("fusion_backend.measure.agree.default_store", lambda: (shared, 0))
    ranks = Ranks()
    with pytest.raises(OSError, match="no store"):
        ranks.told("images", broken, "no answer", 1.0)
    assert ranks.wait("images", "nobody answered in time", 0.0) == "no answer"


# What is measured


def test_the_convolutions_of_a_graph(measured):
    """Equal ones are counted; dtypes are those in which autocast computes; only the gradients that
    are needed count, and the images that are copied at the edges.
    """

    def fn(x, first, second):
        with torch.autocast("cpu", torch.bfloat16):
            x = F.conv2d(x, first, padding=1)
            x = F.conv2d(x, second, padding=1)
            x = F.conv2d(F.conv2d(x, second, padding=1), second, padding=1)
        return F.max_pool2d(x, 2)

    first = torch.randn(8, 3, 3, 3)
    fused(fn, X, first, torch.randn(8, 8, 3, 3, requires_grad=True))
    (work,) = measured.asked
    image, inner, others = work.convolutions
    assert inner == others._replace(needs=(False, True, False))
    assert (
        others.needs == (True, True, False)
        and image.x == (4, 3, 12, 10)
        and image.needs == (False, False, False)
    )
    assert others.x == (4, 8, 12, 10) and others.weight == (8, 8, 3, 3)
    assert [*work.convolutions.values()] == [1, 1, 2]
    assert {c.dtype for c in work.convolutions} == {torch.bfloat16}
    copies = {(kind.sizes, kind.dtype): count for kind, count in work.copies.items()}
    # the result has a gradient, which is copied, too
    assert copies == {((4, 3, 12, 10), torch.float32): 1, ((4, 8, 6, 5), torch.bfloat16): 2}


def test_a_copy_inside_a_network_costs_nothing(measured):
    """Inductor writes the value channels-last at once."""
    inner = nn.Conv2d(8, 8, 1)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8), inner, nn.Flatten(2))
    assert fused(model, X)[0].lays_out
    (work,) = measured.asked
    found = [kind.sizes for kind in work.copies]
    assert found == [(4, 3, 12, 10), (4, 8, 120)]  # the image, and the result
    race = RACED(work, lambda call: (call(), 1.0)[1], float("inf"))
    assert race.plain == [2.0] * ROUNDS[0] and race.ours == [2.0 + 1 + 2] * ROUNDS[0]


def test_what_is_channels_last_already_does_not_count(measured):
    class Half(Down):
        def forward(self, x):
            x = self.norm(self.first(x)).contiguous(memory_format=LAST)
            with torch.no_grad():
                y = self.second(x.contiguous())
            return self.last(torch.cat((x, self.second(x) + y), 1))

    fused(Half(), X)
    (work,) = measured.asked
    assert [kind.x[1] for kind in work.convolutions] == [3, 8]
    assert [kind.needs for kind in work.convolutions] == [(False, True, True), (False,) * 3]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "convolution" in str(func):
            self.calls.append((str(func), args, out))
        return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_a_call(layout, transposed):
    how = ((2, 2), (1, 1), (1, 1), transposed, (0, 0), 2)
    kind = image_work.Convolution(
        (2, 6, 9, 8), (6, 4, 3, 3) if transposed else (4, 3, 3, 3), True, how, torch.float32,
        (True, True, False),
    )  # fmt: skip
    call = layouts.of_convolution(kind, torch.device("cpu"), layout)
    with Seen() as seen:
        call()
    (forward, given, y), (backward, args, gradients) = seen.calls
    assert forward == "aten.convolution.default"
    assert backward == "aten.convolution_backward.default"
    x, weight, bias, *rest = given
    assert x.shape == kind.x and weight.shape == kind.weight
    assert bias.shape == (y.shape[1],) and tuple(rest[3:]) == (transposed, [0, 0], 2)
    for t in (x, weight, y, args[0]):
        assert t.is_contiguous(memory_format=layout)
    assert [g is not None for g in gradients] == [*kind.needs]
    call = layouts.of_convolution(kind._replace(needs=(False,) * 3), torch.device("cpu"), layout)
    with Seen() as seen:
        call()
    assert [name for name, *_ in seen.calls] == ["aten.convolution.default"]


def test_a_race(monkeypatch):
    """Times count as often as there are equal convolutions; copies count for channels-last."""

    def clock(call):
        with Seen() as seen:
            call()
        if not seen.calls:
            return 1.0  # of a copy
        x = seen.calls[0][1][0]
        return (4.0 if x.is_contiguous() else 1.0) * x.shape[0]

    kinds = [
        image_work.Convolution(
            (n, 4, 6, 5), (4, 4, 3, 3), False, ((1, 1), (0, 0), (1, 1), False, (0, 0), 1),
            torch.float32, (True, True, True),
        )
        for n in (1, 10)
    ]  # fmt: skip
    image = image_work.Copying((2, 3, 6), torch.float32, (18, 6, 1), (18, 1, 3))
    work = image_work.Work(torch.device("cpu"), {kinds[0]: 2, kinds[1]: 3}, {image: 5})
    race = layouts.raced(work, clock, float("inf"))
    assert race.plain == [4.0 * (2 + 30)] * ROUNDS[0]
    assert race.ours == [2 + 30 + 5.0] * ROUNDS[0]
    with pytest.raises(NotMeasurable, match="time"):
        layouts.raced(work, clock, 0.0)


def test_the_key(measured):
    """Another number of equal convolutions, and another setting of cuDNN, are another question."""
    keys = []
    for count in (1, 2):
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *[nn.Conv2d(8, 8, 1) for _ in range(count)])
        fused(model, X)
        keys.append({a.key for a in store.store().all()})
    assert len(keys[1]) == 2
    with torch.backends.cudnn.flags(benchmark=True):
        fused(model, X)
    assert len({a.key for a in store.store().all()}) == 3


def test_work_is_known_only_where_inductor_would_not(monkeypatch):
    found = []

    def backend(gm, example_inputs):
        found.append(layout_of(gm, lambda device: device.type == "cpu"))
        return gm.forward

    for by_itself in (True, False):
        monkeypatch.setattr(channels_last, "lays_out", lambda calls, trains, told=by_itself: told)
        torch._dynamo.reset()
        torch.compile(Down(), backend=backend)(X)
    assert [layout.graph is not None for layout in found] == [True, True]
    assert [layout.work is None for layout in found] == [True, False]
    assert not any(layout.hidden for layout in found)
