"""Convolutions with relu in one call: where they are found, that the result is the same, and what
is left alone.
"""

import contextlib
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend import remembered
from fusion_backend.compat.pretended_cuda import code_for_cuda
from fusion_backend.compat.torch import inductor_config
from fusion_backend.decide import gate
from fusion_backend.kernels.conv import library
from fusion_backend.kernels.conv.library import windows_of
from fusion_backend.measure.agreement import Value
from fusion_backend.measure.contest import Contest
from fusion_backend.measure.key import digest
from fusion_backend.options import Options
from fusion_backend.reporting import report as reporting
from fusion_backend.testing import assert_fuses, collect, fused_nodes
from tests.kernel_checks import Kernels, runs_kernels
from tests.measured_cases import scopes

ALWAYS = {"fusion.gate": "always"}


class Block(nn.Module):
    """The basic block of a residual network, as torchvision writes it: all in place."""

    def __init__(self, c: int = 8, o: int = 8, stride: int = 1, bias: bool = False):
        super().__init__()
        self.conv1 = nn.Conv2d(c, o, 3, stride, 1, bias=bias)
        self.bn1 = settled(nn.BatchNorm2d(o))
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=bias)
        self.bn2 = settled(nn.BatchNorm2d(o))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or c != o:
            conv = nn.Conv2d(c, o, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, settled(nn.BatchNorm2d(o)))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def settled(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """With statistics and weights that are not those of a new layer."""
    for t in (norm.running_mean, norm.bias):
        nn.init.normal_(t)
    for t in (norm.running_var, norm.weight):
        nn.init.uniform_(t, 0.5, 1.5)
    return norm


def as_on_a_gpu():
    """The gate decides as if the tensors were on a GPU."""
    return mock.patch.object(gate, "on_gpu", lambda tensor: True)


def reasons(fn, *inputs) -> dict[str, str]:
    """Pattern -> what the gate says of its site."""
    with as_on_a_gpu():
        found = collect(fn, *inputs, options={"fusion.gate": "table"}).report.sites
    return {s.pattern: s.reason for s in found}


BLOCKS = {
    "plain": {},
    "down": dict(o=12, stride=2),
    "with biases": dict(bias=True),
}


@runs_kernels
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
@torch.no_grad()
def test_the_same_as_the_block(options, last):
    torch.manual_seed(0)
    block, x = Block(**options).eval(), torch.randn(2, 8, 9, 11)
    x = x.to(memory_format=torch.channels_last) if last else x
    backend = Kernels(ALWAYS | {"fusion.only": "conv_batch_norm_relu"})
    with as_on_a_gpu():
        ours, eager = torch.compile(block, backend=backend)(x), block(x)
    (gm,) = backend.graphs
    assert ["folded_conv_relu" in str(n.target) for n in fused_nodes(gm)] == [True, True]
    exact = block.double()(x.double())
    assert (ours - exact).norm() <= 2 * (eager - exact).norm() + 1e-7 * exact.norm()
    assert ours.stride() == eager.stride()


@runs_kernels
@torch.no_grad()
def test_under_autocast_the_weight_is_rounded_once():
    """The op takes the weight in fp32."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(32, 16, 3), settled(nn.BatchNorm2d(16)).eval()

    def layer(x):
        return F.relu(norm(conv(x)))

    backend, x = Kernels(ALWAYS), torch.randn(2, 32, 9, 9)
    exact = F.relu(norm.double()(conv.double()(x.double())))
    norm.float(), conv.float()
    with torch.autocast("cpu", torch.bfloat16), as_on_a_gpu():
        ours, eager = torch.compile(layer, backend=backend)(x), layer(x)
    (call,) = fused_nodes(backend.graphs[0])
    assert "folded_conv_relu" in str(call.target)
    assert call.args[1].meta["example_value"].dtype == torch.float32
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.25 * (eager - exact).norm()


@torch.no_grad()
def test_a_residual_in_fp32_under_autocast():
    """Added in place to what the convolution gives in bf16, the sum is rounded to bf16, as in one
    call. Added to it, the sum stays in fp32.
    """
    torch.manual_seed(0)
    conv, x, z = nn.Conv2d(5, 6, 3), torch.randn(2, 5, 9, 9), torch.randn(2, 6, 7, 7)

    def in_place(x, z):
        y = conv(x)
        y += z
        return y.relu_()

    with torch.autocast("cpu", torch.bfloat16):
        assert_fuses(in_place, x, z, pattern="conv_relu", options=ALWAYS)
        only = ALWAYS | {"fusion.only": "conv_relu"}
        report = collect(lambda x, z: (conv(x) + z).relu_(), x, z, options=only).report
    (miss,) = [m for m in report.misses if m.pattern == "conv_relu"]
    assert "the result is torch.float32, the pattern gives torch.bfloat16" in miss.reason


@runs_kernels
@torch.no_grad()
def test_a_convolution_in_fp32_of_tensors_in_bf16_stays_in_fp32():
    """Its operands are the tensors after the cast: with those before it the folded weight would be
    rounded to bf16.
    """
    torch.manual_seed(0)
    norm = settled(nn.BatchNorm2d(16)).eval()

    def layer(x, weight):
        return F.relu(norm(F.conv2d(x.float(), weight.float()))).bfloat16()

    x, weight = torch.randn(2, 32, 9, 9).bfloat16(), torch.randn(16, 32, 3, 3).bfloat16()
    for context in (as_on_a_gpu(), contextlib.nullcontext()):
        backend = Kernels(ALWAYS | {"fusion.only": "conv_batch_norm_relu"})
        torch._dynamo.reset()
        with context:
            torch.compile(layer, backend=backend)(x, weight)
        (call,) = fused_nodes(backend.graphs[0])
        assert [a.meta["example_value"].dtype for a in call.args[:2]] == [torch.float32] * 2


@torch.no_grad()
def test_weights_in_sixteen_bits_are_not_folded():
    block = Block().eval().to(torch.bfloat16)
    found = reasons(block, torch.randn(2, 8, 9, 9, dtype=torch.bfloat16))
    assert "would be rounded once more" in found["conv_batch_norm_relu"]


@torch.no_grad()
def test_a_bias_alone():
    conv = nn.Conv2d(4, 6, (1, 3), (1, 2), (0, 1), bias=True)
    x, z = torch.randn(2, 4, 7, 9), torch.randn(2, 6, 7, 5)
    assert_fuses(lambda x: F.relu(conv(x)), x, pattern="conv_relu", options=ALWAYS)
    assert_fuses(lambda x, z: (z + conv(x)).relu(), x, z, pattern="conv_relu", options=ALWAYS)


def twice(conv, x):
    y = conv(x)
    return F.relu(y) * y


NEAR = {
    "its result is read elsewhere": (twice, {}, "used elsewhere"),
    "a broadcast sum": (lambda conv, x: F.relu(conv(x) + torch.ones(1, 6, 1, 1)), {}, "z is"),
    "groups": (lambda conv, x: F.relu(conv(x)), dict(groups=2), "in groups"),
    "relu6": (lambda conv, x: F.relu6(conv(x)), {}, None),
    "one image": (lambda conv, x: F.relu(conv(x[0])), {}, None),
    "a written padding": (lambda conv, x: F.relu(conv(x)), dict(padding="same"), None),
}


@pytest.mark.parametrize("fn, options, said", NEAR.values(), ids=NEAR)
@torch.no_grad()
def test_what_is_left_alone(fn, options, said):
    conv = nn.Conv2d(4, 6, 3, **options)
    found = reasons(lambda x: fn(conv, x), torch.randn(2, 4, 9, 9))
    assert said in found["conv_relu"] if said else "conv_relu" not in found


def test_training_is_left_to_inductor():
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 9)
    found = reasons(lambda x: F.relu(conv(x)), x)
    assert "compute the convolution again" in found["conv_relu"]


@torch.no_grad()
def test_the_statistics_of_the_batch_are_not_folded():
    conv, norm = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
    found = reasons(lambda x: F.relu(norm(conv(x))), torch.randn(2, 4, 9, 9))
    assert "conv_batch_norm_relu" not in found


@pytest.mark.parametrize("name", ["deterministic", "enabled"])
def test_settings_of_cudnn(name, monkeypatch):
    from fusion_backend.kernels.conv.limits import reject_settings

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert reject_settings(OnGpu(), "1,1 0,0 1,1 1") is None
    before = getattr(torch.backends.cudnn, name)
    try:
        setattr(torch.backends.cudnn, name, not before)
        assert reject_settings(OnGpu(), "1,1 0,0 1,1 1") is not None
    finally:
        setattr(torch.backends.cudnn, name, before)


def test_windows_are_read():
    assert windows_of("2,1 0,3 1,1 4") == ([2, 1], [0, 3], [1, 1], 4)


def test_between_two_convolutions_nothing_is_laid_out_again():
    """Inductor hands over the result of one as the argument of the next."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(64, 64), Block(64, 64)).eval()
    with torch.no_grad(), cpu_tensors_pass(), code_for_cuda() as codes:
        torch.compile(model, backend="fusion", options=ALWAYS)(torch.randn(2, 64, 16, 16))
    (code,) = codes
    calls = re.findall(r"(buf\d+) = .*convolution_relu\.default\((buf\d+)", code)
    names = dict(re.findall(r"^ *(buf\d+) = (buf\d+)\b", code, re.MULTILINE))  # of the same buffer
    assert len(calls) == 4
    assert [names.get(x, x) for _, x in calls[1:]] == [y for y, _ in calls[:-1]]


@pytest.mark.parametrize("residual", [False, True])
def test_a_failure_of_cudnn_is_told_and_computed_by_torch(residual, monkeypatch):
    def no_engine(*args):
        raise RuntimeError("GET was unable to find an engine")

    monkeypatch.setattr(library, "one_call", no_engine)
    reporting.reset()
    x, weight, bias = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3), torch.randn(6)
    z = torch.randn(2, 6, 7, 7) if residual else None
    how = windows_of("1,1 0,0 1,1 1")
    with pytest.warns(RuntimeWarning, match="unable to find an engine"):
        got = library.by_cudnn(x, weight, bias, z, how)
    want = F.conv2d(x, weight, bias)
    torch.testing.assert_close(got, F.relu(want if z is None else want + z))


def test_out_of_memory_is_raised(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(library, "one_call", full)
    x, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3)
    with contextlib.suppress(torch.OutOfMemoryError):
        library.by_cudnn(x, weight, None, None, windows_of("1,1 0,0 1,1 1"))
        pytest.fail("it went on")


@pytest.mark.parametrize("precision, wrong", [("tf32", False), ("ieee", True)])
def test_a_measurement_allows_for_tf32(precision, wrong):
    """cuDNN rounds a folded weight as it rounds the weight, but not to the same number."""
    contest = Contest.__new__(Contest)
    contest.convolves, contest.inputs = True, [torch.ones(4)]
    plain = Value("result 0", torch.randn(1000))
    contest.plain = SimpleNamespace(values=[plain])
    contest.eager = lambda: [plain]
    ours = Value("result 0", plain.value * (1 + 5e-4 * torch.randn(1000).sign()))
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = precision
        assert bool(contest.different([ours])) is wrong
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("gate_option", ["auto", "measure", "table"])
@torch.no_grad()
def test_only_under_cuda_graphs_is_it_measured(gate_option):
    """Otherwise its call takes the host too long, which no measurement of the GPU's time sees."""
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 9)
    options = {"fusion.gate": gate_option, "fusion.measure_s": 5}
    for graphs, said in ((False, "takes the host longer"), (True, "has not been timed")):
        with as_on_a_gpu(), inductor_config.patch({"triton.cudagraphs": graphs}):
            found = collect(lambda x: F.relu(conv(x)), x, options=options).report.sites
        (reason,) = (s.reason for s in found if s.pattern == "conv_relu")
        assert said in reason


@torch.no_grad()
def test_a_site_that_costs_the_host_is_not_proposed():
    """Not even as one that the tables refuse: the judge would time the GPU alone."""
    conv = nn.Conv2d(4, 6, 3)
    for graphs in (False, True):
        with as_on_a_gpu(), inductor_config.patch({"triton.cudagraphs": graphs}):
            (top,) = scopes(lambda x: F.relu(conv(x)), torch.randn(2, 4, 9, 9), options=Options())
            top.gate.evidence.wanted = True
            (match,) = (d.match for d in top.decisions if d.match.pattern.name == "conv_relu")
            assert top.gate.provide(match, False).fused is graphs


def channels_last(*shape) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda: (torch.randn(2, 8, 5, 6), torch.randn(4, 8, 1, 1)),
    "channels-last": lambda: (channels_last(2, 8, 5, 6), torch.randn(4, 8, 1, 1)),
    "a half of the channels": lambda: (
        channels_last(2, 16, 5, 6).chunk(2, 1)[1],
        torch.randn(4, 8, 1, 1),
    ),
    "one channel": lambda: (
        torch.randn(60).as_strided((2, 1, 5, 6), (30, 1, 6, 1)),
        torch.randn(8, 1, 1, 1),
    ),
    "the weight alone": lambda: (torch.randn(2, 8, 5, 6), channels_last(4, 8, 3, 3)),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_those_of_the_rule_for_fakes(make, monkeypatch):
    """Generated code relies on them."""
    x, weight = make()
    how = windows_of("1,1 0,0 1,1 1")
    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), device="cuda:0") for t in (x, weight)]
        want = how.convolve(*fakes, None).stride()
    made = how.convolve(x, weight, None).contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(library, "one_call", lambda *args: made)
    assert library.by_cudnn(x, weight, None, None, how).stride() == want


@torch.no_grad()
def test_under_autocast_in_fp16_no_weight_is_folded():
    """0.01 / sqrt(1e4) has few digits left there, and 300 / sqrt(1e-8) does not exist."""
    conv, norm = nn.Conv2d(5, 6, 3), settled(nn.BatchNorm2d(6)).eval()

    def layer(x):
        with torch.autocast("cpu", torch.float16):
            return F.relu(norm(conv(x)))

    found = reasons(layer, torch.randn(2, 5, 9, 9))
    assert "for fp16" in found["conv_batch_norm_relu"]


@pytest.mark.parametrize("name, value", [("deterministic", True), ("enabled", False)])
def test_settings_of_cudnn_are_asked_at_each_call(name, value, monkeypatch):
    """They may change after the compilation."""

    class OnGpu:
        is_cuda = True

    called: list[str] = []
    for by in ("by_cudnn", "by_torch"):
        monkeypatch.setattr(library, by, lambda *args, by=by: called.append(by))
    compute, windows = library.compute, "1,1 0,0 1,1 1"
    compute(OnGpu(), None, None, None, windows)
    before = getattr(torch.backends.cudnn, name)
    try:
        setattr(torch.backends.cudnn, name, value)
        compute(OnGpu(), None, None, None, windows)
    finally:
        setattr(torch.backends.cudnn, name, before)
    assert called == ["by_cudnn", "by_torch"]


def test_answers_of_other_settings_of_cudnn_are_others():
    region, other = "x: aten.conv2d", "x: aten.mm"
    keys = [[digest(text, [], "a GPU") for text in (region, other)]]
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        keys.append([digest(text, [], "a GPU") for text in (region, other)])
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert keys[0][0] != keys[1][0] and keys[0][1] == keys[1][1]


def test_a_graph_is_remembered_apart_under_cuda_graphs(tmp_path, monkeypatch):
    """There another site may be accepted."""
    monkeypatch.setattr(remembered, "USED", True)
    monkeypatch.setattr(remembered, "cache_folder", lambda: str(tmp_path))
    names = []

    def backend(gm, inputs):
        for graphs in (False, True):
            with inductor_config.patch({"triton.cudagraphs": graphs}):
                names.append(remembered.file_of(gm, Options(), []))
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert None not in names and names[0] != names[1]
