"""On a GPU: the built-in patterns inside models, through Inductor, in inference and training."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fusion_backend
from benchmarks.measure.distance import joint_distance
from benchmarks.measure.memory import peak_bytes
from fusion_backend import Pattern, Reject
from fusion_backend.frontends.dynamo import fusion
from fusion_backend.kernels import launch
from fusion_backend.measure import measuring
from fusion_backend.ops.registry import unregister

pytestmark = pytest.mark.gpu
ALWAYS = {"fusion.gate": "always"}
KERNELS = {
    "add_mul": "add_mul_kernel",
    "add_mul_exp": "add_mul_exp_kernel",
    "quantize_int8": "quantize_int8_kernel",
    "layer_norm": "norm_kernel",
    "gated_linear": "linear_kernel",
}
BACKWARD_KERNELS = {"norm_backward_kernel", "add_up_kernel"}


class AllFive(nn.Module):
    """Every built-in pattern once, each between ops that Inductor generates."""

    def __init__(self, width: int = 512, inner: int = 1024):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, inner)
        self.up = nn.Linear(width, inner)
        self.skip = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        h = self.norm(x.cos())
        gated = torch.sigmoid(self.gate(h)) * self.up(h)
        mixed = (gated + self.skip(x)) * self.skip(x).tanh()
        growth = torch.exp((mixed.sin() + gated) * 0.25)
        integers = torch.clamp(torch.round(growth.detach() / 0.05 - 3.0), -128, 127).to(torch.int8)
        return growth, integers


def rows(count: int = 2048, width: int = 512, dtype=torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(count, width, device="cuda", dtype=dtype, requires_grad=grad)


def model(dtype=torch.bfloat16, **sizes) -> nn.Module:
    return AllFive(**sizes).to("cuda", dtype)


def results(module, call, x) -> dict[str, Tensor]:
    """Output and gradients of one training step."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = call(x)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out))
    return {"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def as_close_as_eager(module, call, x, plain=None) -> None:
    """Output and every gradient are at most twice as far from fp64 as eager's, or as those of
    `plain`.
    """
    plain, wide = module if plain is None else plain, copy.deepcopy(module).double()
    exact = results(wide, wide, x.double())
    eager, ours = results(module, plain, x), results(module, call, x)
    for name in exact:
        mine, theirs = (joint_distance({name: r[name]}, {name: exact[name]}) for r in (ours, eager))
        assert mine <= 2 * theirs + 1e-7, f"{name}: {mine:.2e} against fp64, not {theirs:.2e}"


def fused() -> dict[str, list]:
    found: dict[str, list] = {}
    for site in fusion_backend.report().sites:
        if site.fused:
            found.setdefault(site.pattern, []).append(site)
    return found


def profiled(call) -> tuple[set[str], set[str]]:
    """Names of the kernels a call runs, and of the operators on the host."""
    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    on_gpu = {e.name for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    return on_gpu, {e.name for e in prof.events()} - on_gpu


def ran(kernel: str, names: set[str]) -> bool:
    return any(name == kernel or name.startswith(kernel + "_0") for name in names)


def test_all_five_fuse_forward():
    m, x = model(), rows()
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, fullgraph=True)
    with torch.no_grad():
        growth, integers = compiled(x)
        sites = fused()
        assert set(KERNELS) <= set(sites), str(fusion_backend.report())
        assert all(site.forward == "kernel" for name in KERNELS for site in sites[name])
        kernels, host = profiled(lambda: compiled(x))
    missing = {k for k in KERNELS.values() if not ran(k, kernels)}
    assert not missing, f"{missing} not among {sorted(kernels)}"
    assert not [name for name in host if name.startswith("fusion::")], "an opaque op"
    exact = copy.deepcopy(m).double()(x.double())[0]
    distances = [joint_distance({"": t}, {"": exact}) for t in (growth, m(x)[0])]
    assert distances[0] <= 2 * distances[1]
    want = torch.clamp(torch.round(growth.float() / 0.05 - 3.0), -128, 127).to(torch.int8)
    assert torch.equal(integers, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_five_train(dtype):
    m, x = model(dtype), rows(dtype=dtype)
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, fullgraph=True)
    as_close_as_eager(m, compiled, x)
    sites = fused()
    # fp32 without TF32 has no tensor cores
    wanted = {k: v for k, v in KERNELS.items() if k != "gated_linear" or dtype != torch.float32}
    assert set(wanted) <= set(sites), str(fusion_backend.report())
    assert sites["layer_norm"][0].backward == "kernel"
    if "gated_linear" in wanted:
        assert sites["gated_linear"][0].backward == "formula"
    kernels, host = profiled(lambda: results(m, compiled, x))
    missing = {k for k in {*wanted.values(), *BACKWARD_KERNELS} if not ran(k, kernels)}
    assert not missing, f"{missing} not among {sorted(kernels)}"
    assert not [name for name in host if name.startswith("fusion::")], "an opaque op"


class Gated(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, inner),
            nn.Linear(width, inner),
            nn.Linear(inner, width),
        )

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


MODULES = {
    "layer_norm": lambda: nn.LayerNorm(1024),
    "gated_mlp": lambda: nn.Sequential(*(Gated(1024, 4096) for _ in range(4))),
    "all_five": lambda: AllFive(1024, 4096),
}


@pytest.mark.parametrize("name", MODULES)
def test_training_takes_no_more_memory(name):
    m, x = MODULES[name]().to("cuda", torch.bfloat16), rows(8192, 1024, grad=True)

    def train(call):
        m.zero_grad(set_to_none=True)
        out = call(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    peaks = {}
    measuring.ALLOWANCE.took.clear()  # of which the tests before have used some
    # where each kernel is forced, its arguments are kept
    options = None if name == "all_five" else ALWAYS
    ours = torch.compile(m, backend="fusion", options=options)
    for how, call in dict(inductor=torch.compile(m), fusion=ours).items():
        train(call)
        peaks[how] = peak_bytes(lambda call=call: train(call), x.device) / 2**20
    assert fused() or not options  # by default the gate may decline all
    # the partial sums of the norm's gradients
    assert peaks["fusion"] <= peaks["inductor"] * 1.005, peaks


class Activated(nn.Module):
    """norm(gelu(linear(x))): Inductor keeps what gelu reads, and computes what the norm reads
    again.
    """

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(F.gelu(self.linear(x)))


class Checkpointed(nn.Module):
    """Such blocks before, in and after activation checkpointing."""

    def __init__(self, width: int):
        super().__init__()
        self.blocks = nn.ModuleList(Activated(width) for _ in range(4))

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:3]:
            x = checkpoint(block, F.gelu(x), use_reentrant=False)
        return self.blocks[3](F.gelu(x))


@pytest.mark.parametrize("build", [Activated, Checkpointed])
def test_an_argument_computed_again(build):
    m, x = build(1024).to("cuda", torch.bfloat16), rows(8192, 1024)
    as_close_as_eager(m, torch.compile(m, backend="fusion", options=ALWAYS, fullgraph=True), x)
    assert all(site.backward == "kernel" for site in fused()["layer_norm"])
    x.requires_grad_()
    peaks = {}
    for backend in ("inductor", "fusion"):
        torch.compiler.reset()
        call = torch.compile(m, backend=backend)
        torch.autograd.grad(call(x).sum(), x)
        peaks[backend] = (
            peak_bytes(lambda call=call: torch.autograd.grad(call(x).sum(), x), x.device) / 2**20
        )
    # Nothing more is kept; backward holds one such argument, where Inductor computes it in
    # registers.
    assert peaks["fusion"] <= peaks["inductor"] + 1.1 * x.nbytes / 2**20, peaks


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
)
def test_modes(mode):
    m, x = model(), rows(4096)
    measuring.ALLOWANCE.took.clear()  # as in a process of its own
    # where Inductor tunes products, a region takes a minute
    backend = partial(fusion, mode=mode, options={"fusion.measure_s": 200.0})
    compiled = torch.compile(m, backend=backend, fullgraph=True)

    def call(x):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    for _ in range(3):  # cudagraphs: warm up, record, replay
        as_close_as_eager(m, call, x)
    report = fusion_backend.report()
    assert fused() or any("in its region" in site.reason for site in report.sites), str(report)


def test_dynamic_shapes():
    m = model()
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, dynamic=True, fullgraph=True)
    for count in (2048, 1000, 17):
        as_close_as_eager(m, compiled, rows(count))
    assert set(KERNELS) <= set(fused()), str(fusion_backend.report())


def seed(x, w1, b1, w2, b2):
    r = x @ w1 + b1
    r.sigmoid_()
    r *= x @ w2 + b2
    return r


@pytest.mark.parametrize("transposed", [False, True])
def test_in_place_gate(transposed):
    x, (w1, w2) = (
        rows(4096, 1024),
        (torch.randn(2, 1024, 2048, device="cuda", dtype=torch.bfloat16) / 32).unbind(),
    )
    if transposed:
        w1, w2 = w1.t().contiguous().t(), w2.t().contiguous().t()
    b1, b2 = rows(2, 2048).unbind()
    compiled = torch.compile(seed, backend="fusion", options=ALWAYS)
    with torch.no_grad():
        got = compiled(x, w1, b1, w2, b2)
        exact = seed(*(t.double() for t in (x, w1, b1, w2, b2)))
        eager, ours = (joint_distance({"": t}, {"": exact}) for t in (seed(x, w1, b1, w2, b2), got))
        assert ours <= 2 * eager
        assert fused()["gated_linear"][0].forward == "kernel", str(fusion_backend.report())
        kernels, _ = profiled(lambda: compiled(x, w1, b1, w2, b2))
    assert ran("linear_kernel", kernels)


@triton.jit
def soft_sign_kernel(X, OUT, size, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, i < size, 0.0).to(tl.float32)
    tl.store(OUT + i, x / (1 + tl.abs(x)) * tl.cast(scale, tl.float32), i < size)


@pytest.fixture
def soft_sign():
    @Pattern
    def soft_sign(x: Tensor, scale: float) -> Tensor:
        return x / (1 + x.abs()) * scale

    @soft_sign.guard
    def _(x, scale):
        if not x.is_contiguous():
            return Reject("x is not contiguous")

    @soft_sign.kernel
    def _(x, scale):
        out = torch.empty_like(x)
        launch(
            soft_sign_kernel, ((x.numel() + 1023) // 1024,), x, out, x.numel(), scale, BLOCK=1024
        )
        return out

    @soft_sign.inputs(dict(size=1003))
    def _(tensor, size):
        return tensor(size), 2.0

    yield soft_sign
    unregister("soft_sign")


def test_a_users_own_pattern(soft_sign):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(512, 512)

        def forward(self, x):
            h = self.inner(x)
            return h / (1 + h.abs()) * 3.0

    m, x = Model().to("cuda", torch.bfloat16), rows()
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, fullgraph=True)
    as_close_as_eager(m, compiled, x)
    assert fused()["soft_sign"][0].forward == "kernel", str(fusion_backend.report())
    kernels, _ = profiled(lambda: results(m, compiled, x))
    assert ran("soft_sign_kernel", kernels)


def test_quantized_integers_are_eagers():
    """As eager on CUDA: a scalar divisor is its fp32 reciprocal there."""
    pattern = torch.compile(
        lambda x: torch.clamp(torch.round(x / 0.037 + 5.0), -128, 127).to(torch.int8),
        backend="fusion",
        options=ALWAYS,
    )
    x = torch.randn(20_000_000, device="cuda") * 2
    got = pattern(x)
    assert fused()["quantize_int8"][0].forward == "kernel"
    assert torch.equal(got, torch.clamp(torch.round(x / 0.037 + 5.0), -128, 127).to(torch.int8))
