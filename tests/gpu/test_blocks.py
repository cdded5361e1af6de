"""On a GPU: a norm between a residual and a linear layer, as models have it, is no slower than with
plain Inductor.

Whole blocks, GPU time, in turn, so these tests want the GPU for themselves; what the gate decides
by default. Where Inductor's fusion of the norm with its neighbours wins, the gate must have left it
the forward.
"""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend
from benchmarks.measure.afresh import as_a_program_of_its_own
from benchmarks.measure.timing import Clock, in_turn

pytestmark = pytest.mark.gpu
SLOWER = 1.03  # what a block may take of Inductor's time
LARGE, SMALL = (8192, 4096), (2048, 1024)


class PreNorm(nn.Module):
    """x + linear(norm(x))."""

    def __init__(self, norm: nn.Module, n: int):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(n, n, bias=False)

    def forward(self, x, branch):
        return x + self.linear(self.norm(x)) + branch


class AddNorm(PreNorm):
    """h = x + branch; h + linear(norm(h))."""

    def forward(self, x, branch):
        h = x + branch
        return h + self.linear(self.norm(h))


class DropoutAddNorm(PreNorm):
    """h = x + dropout(branch); h + linear(norm(h))."""

    def forward(self, x, branch):
        h = x + F.dropout(branch, 0.1, self.training)
        return h + self.linear(self.norm(h))


BLOCKS = {
    "layer_norm": (PreNorm, nn.LayerNorm),
    "rms_norm": (PreNorm, nn.RMSNorm),
    "add_layer_norm": (AddNorm, nn.LayerNorm),
    "add_rms_norm": (AddNorm, nn.RMSNorm),
    "dropout_add_layer_norm": (DropoutAddNorm, nn.LayerNorm),
}
CASES = [
    *((name, False, LARGE) for name in BLOCKS if "dropout" not in name),
    *((name, True, LARGE) for name in BLOCKS),
    ("add_rms_norm", False, SMALL),
    *((name, True, SMALL) for name in ("layer_norm", "dropout_add_layer_norm")),
]


@pytest.fixture(autouse=True)
def all_the_time_to_measure():
    """The tests before have used some of it; without any left the tables decide."""
    as_a_program_of_its_own()


def block(name: str, n: int) -> nn.Module:
    build, norm = BLOCKS[name]
    return build(norm(n), n)


def step(module, call, dy):
    """A training step, or a call where dy is None."""
    wanted = () if dy is None else tuple(module.parameters())

    def run(args):
        with torch.set_grad_enabled(dy is not None):
            out = call(*args)
            return out if dy is None else torch.autograd.grad(out, (*args, *wanted), dy)

    return run


def timed(module, args, dy) -> dict[str, float]:
    """Median milliseconds of each backend."""
    calls = {
        backend: torch.compile(module, backend=backend, dynamic=False)
        for backend in ("inductor", "fusion")
    }
    steps = {backend: step(module, call, dy) for backend, call in calls.items()}
    for run in steps.values():
        run(args), run(args)
    times = in_turn(steps, lambda: args, Clock(args[0].device), rounds=9)
    return {backend: statistics.median(ms) for backend, ms in times.items()}


@pytest.mark.parametrize("name, train, size", CASES)
def test_a_block_is_not_slower(name, train, size):
    rows, n = size
    module = block(name, n).to("cuda", torch.bfloat16).train(train)
    x, branch, dy = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    medians = timed(
        module, [x.requires_grad_(train), branch.requires_grad_(train)], dy if train else None
    )
    if train and size == LARGE:
        (site,) = fusion_backend.report().fused
        assert (site.pattern, site.backward) == (name, "kernel"), site
    assert medians["fusion"] <= SLOWER * medians["inductor"], (
        medians,
        str(fusion_backend.report()),
    )


def test_a_norm_alone_trains_faster():
    module = nn.LayerNorm(4096, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    medians = timed(module, [x.requires_grad_()], dy)
    (site,) = fusion_backend.report().fused
    assert site.backward == "kernel", site
    assert medians["fusion"] < medians["inductor"], medians
