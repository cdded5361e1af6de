"""On a GPU: what the gate measures where a site stands, with real compilers, kernels and clocks.

Each test keeps its answers in a folder of its own. Times are those of the device, so these tests
want the GPU for themselves.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

import fusion_backend
from fusion_backend import Pattern
from fusion_backend.kernels import launch
from fusion_backend.measure import contest as contests
from fusion_backend.measure import measuring, store
from fusion_backend.measure.allowance import Allowance
from fusion_backend.measure.timing import Clock, race
from fusion_backend.ops.registry import unregister

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def answers(monkeypatch, tmp_path):
    """The store of the test."""
    monkeypatch.setattr(store, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(store, "seed", dict)
    monkeypatch.setattr(measuring, "ALLOWANCE", Allowance())
    store.store_in.cache_clear()
    torch._dynamo.reset()
    yield store.store()
    store.store_in.cache_clear()


def compiled(fn, *inputs, **options):
    """The compiled function, after a first call, and what was decided."""
    fusion_backend.reset()
    given = {f"fusion.{k}": v for k, v in ({"measure_s": 60} | options).items()}
    made = torch.compile(fn, backend="fusion", options=given)
    made(*inputs)
    return made, fusion_backend.report().graphs[-1]


def sites(record, name):
    return [s for s in record.sites if s.pattern == name and s.counted]


@triton.jit
def repeated_kernel(X, Y, n, REPEAT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, i < n).to(tl.float32)
    for _ in range(REPEAT):
        x = x + tl.load(X + i, i < n, volatile=True).to(tl.float32) * 0.0
    tl.store(Y + i, tl.sin(x) * SCALE, i < n)


@pytest.fixture
def user_pattern(request):
    """sin(x) * 3 with a kernel that reads x this often, and multiplies by this."""
    repeat, scale = request.param

    def scaled_sine(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 3

    made = Pattern(scaled_sine)

    @made.kernel
    def _(x):
        y, n = torch.empty_like(x), x.numel()
        grid = (triton.cdiv(n, 1024),)
        launch(repeated_kernel, grid, x, y, n, REPEAT=repeat, SCALE=scale, BLOCK=1024)
        return y

    yield made
    unregister("scaled_sine")


def sine(x):
    return torch.sin(x) * 3


@pytest.mark.parametrize("user_pattern", [(200, 3)], indirect=True)
def test_a_slow_kernel_of_a_users_is_declined(user_pattern):
    x = torch.randn(1 << 24, device=DEVICE)
    _, record = compiled(sine, x)
    (site,) = sites(record, "scaled_sine")
    assert not site.fused and "in its region, measured today" in site.reason


@pytest.mark.parametrize("user_pattern", [(0, 4)], indirect=True)
def test_a_kernel_that_is_wrong_is_declined(user_pattern):
    x = torch.randn(1 << 24, device=DEVICE)
    made, record = compiled(sine, x)
    (site,) = sites(record, "scaled_sine")
    assert not site.fused and "results are not those of Inductor" in site.reason
    torch.testing.assert_close(made(x), sine(x))


@pytest.mark.parametrize("user_pattern", [(20000, 3)], indirect=True)
def test_a_kernel_that_does_not_finish_in_time_is_declined(user_pattern, monkeypatch):
    finished = contests.finished
    monkeypatch.setattr(contests, "finished", lambda device: finished(device, 0.02))
    x = torch.randn(1 << 26, device=DEVICE)
    made, record = compiled(sine, x)
    (site,) = sites(record, "scaled_sine")
    assert not site.fused and "had not finished" in site.reason
    torch.testing.assert_close(made(x), sine(x))


def test_what_wins_is_fused_and_a_second_process_measures_nothing(answers, tmp_path):
    program = textwrap.dedent(
        """
        import json, torch, fusion_backend
        from fusion_backend.measure import store
        store.cache_folder = lambda: FOLDER
        norm = torch.nn.LayerNorm(4096, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options = {"fusion.measure_s": 60}
        torch.compile(norm, backend="fusion", options=options)(x).sum().backward()
        graph = fusion_backend.report().graphs[-1]
        (site,) = [s for s in graph.sites if s.counted]
        print(json.dumps([site.fused, site.forward, site.backward, graph.measured]))
        """
    ).replace("FOLDER", repr(str(tmp_path)))

    def run():
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first[0] and first[3] == 1
    assert second == [*first[:3], 0]


class Bottleneck(nn.Module):
    """Two convolutions with their norms and activations, and the sum: Inductor chooses a layout."""

    def __init__(self, n: int = 128):
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, n, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(n), nn.BatchNorm2d(n)

    def forward(self, x):
        y = F.relu(self.one(self.first(x)))
        return F.relu(self.two(self.second(y)) + x)


class PooledGelu(nn.Module):
    """gelu(linear) and a mean over the tokens, into which Inductor fuses it."""

    def __init__(self, n: int = 1024):
        super().__init__()
        self.linear, self.norm = nn.Linear(n, n), nn.LayerNorm(n)

    def forward(self, x):
        return F.gelu(self.linear(self.norm(x))).mean(1)


@pytest.mark.parametrize("gate", ["auto", "measure"])
@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize(
    "module, shape", [(Bottleneck, (32, 128, 56, 56)), (PooledGelu, (32, 512, 1024))]
)
def test_no_block_is_slower_than_with_inductor(module, shape, training, gate):
    model = module().to(DEVICE, torch.bfloat16).train(training)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=training)

    def step(fn):
        with torch.set_grad_enabled(training):
            out = fn(x)
            wanted = [*model.parameters(), x]
            return torch.autograd.grad(out, wanted, torch.ones_like(out)) if training else out

    plain = torch.compile(model, backend="inductor")
    step(plain)
    torch._dynamo.reset()
    options = {"fusion.measure_s": 60, "fusion.gate": gate}
    ours = torch.compile(model, backend="fusion", options=options)
    step(ours)
    found = race(lambda: step(plain), lambda: step(ours), Clock(DEVICE), seconds=5)
    assert found.interval[1] >= 0.98, (found.ratio, fusion_backend.report())


def test_measuring_leaves_memory_random_numbers_and_the_device_as_they_were():
    x = torch.randn(16384, 4096, device=DEVICE, dtype=torch.bfloat16)
    norm = nn.LayerNorm(4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    state, before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    with torch.no_grad():
        _, record = compiled(norm, x)
    assert record.measured == 1
    assert torch.equal(state, torch.cuda.get_rng_state())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_what_does_not_fit_beside_the_model_is_not_measured():
    x = torch.randn(131072, 4096, device=DEVICE, dtype=torch.bfloat16)
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (3 << 30), dtype=torch.uint8, device=DEVICE)
    try:
        with torch.no_grad():
            made, record = compiled(lambda x: F.layer_norm(x, (4096,)), x)
        (site,) = sites(record, "layer_norm")
        assert not site.fused and ("GB to measure" in site.reason or "memory" in site.reason)
    finally:
        del held


def test_a_region_with_indices_and_a_loss(answers):
    table = nn.Embedding(32000, 512, device=DEVICE, dtype=torch.bfloat16)
    head = nn.Linear(512, 32000, device=DEVICE, dtype=torch.bfloat16)

    def fn(i, y):
        return F.cross_entropy(head(F.layer_norm(table(i), (512,))).flatten(0, 1), y.flatten())

    i, y = (torch.randint(0, 32000, (8, 512), device=DEVICE) for _ in range(2))
    y[:, :7] = -100
    made, record = compiled(fn, i, y, gate="measure")
    assert record.error is None and record.measured
    torch.testing.assert_close(made(i, y), fn(i, y), rtol=2e-2, atol=2e-2)
