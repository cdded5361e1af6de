"""Under DistributedDataParallel a graph is cut where a bucket ends: what one part computes
from constants, the others recompute.
"""

import dataclasses
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusion_backend
from benchmarks.subjects.model_zoo import ENTRIES, build
from fusion_backend import remembered
from fusion_backend.capture import cut_graphs
from fusion_backend.capture.bucket_cuts import first_nodes
from fusion_backend.capture.cut_graphs import Parts
from fusion_backend.frontends import dynamo

from ..eager_kernels import eager_kernels

ROWS, WIDTH = 8, 600  # a layer is larger than the smallest bucket


pytestmark = pytest.mark.usefixtures("alone")


def steps():
    return torch.arange(WIDTH)[None, :] <= torch.arange(ROWS)[:, None]


class Layers(nn.Module):
    """Three layers, and a mask that each of them reads. `make` takes x and a parameter."""

    def __init__(self, make, change=lambda mask, x: None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.make, self.change = make, change

    def forward(self, x):
        mask = self.make(x, self.weight)
        for i, layer in enumerate(self.layers):
            x = F.gelu(layer(x)) + mask  # which no backward reads
            if i == 1:
                self.change(mask, x)
        return x


class Viewed(Layers):
    """One part makes a view of the mask, and the next writes through it."""

    def forward(self, x):
        mask = self.make(x, self.weight)
        first, second, third = self.layers
        x = F.gelu(second(F.gelu(first(x)) + mask))
        view = mask[None]
        x = F.gelu(third(x + view[0]))
        view.mul_(3)
        return x + mask


def trained(model, backend: str, faulty=False, ours=False, **options):
    """Results and gradients of two calls, and for each part whether it has calls of `steps`. The
    parts are as Dynamo cuts them, or ours.
    """
    torch._dynamo.reset()
    fusion_backend.reset()
    call = DistributedDataParallel(model, bucket_cap_mb=1)
    if backend == "fusion":
        given = {"fusion.gate": "always"}
        call = torch.compile(call, backend="fusion", options=given, **options)
    seen: list[bool] = []

    def fuse(gm, *others):
        seen.append(any(n.target is torch.arange for n in gm.graph.nodes))
        return fuse_graph(gm, *others)

    fuse_graph = remembered.fuse
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(2)
    with (
        eager_kernels(),
        mock.patch.object(remembered, "fuse", fuse),
        mock.patch.object(dynamo, "first_nodes", first_nodes if ours else lambda *_: None),
        torch._inductor.config.patch(fallback_random=True),  # the numbers that eager draws
    ):
        outs = [call(x) for _ in range(2)]
        sum(out.square().sum() for out in outs).backward()
    told = [(g.error, g.faults) for g in fusion_backend.report().graphs if g.error or g.faults]
    assert bool(told) == faulty, told
    return [
        *(out.detach() for out in outs),
        *(p.grad.clone() for p in model.layers.parameters()),
    ], seen


def agree(model, **options) -> list[bool]:
    want, _ = trained(model, "eager")
    have, seen = trained(model, "fusion", **options)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(seen) >= 3  # the graph was cut
    return seen


MADE = {
    "a mask": lambda x, w: steps(),
    "with sizes from the input": lambda x, w: steps()[: x.shape[0]],
    "in fp32": lambda x, w: torch.where(steps(), 0.5, 2.0),
    "negated": lambda x, w: ~steps().logical_not(),
    "exclusive or": lambda x, w: steps().logical_xor(steps()[:, :1]).bitwise_xor(~steps()),
}
NOT_FROM_CONSTANTS = {
    "of an input": lambda x, w: (x > 0) & steps(),
    "of a parameter": lambda x, w: (w > 0) & steps(),
    "random": lambda x, w: (torch.rand(ROWS, WIDTH) > 0.5) & steps(),
    "written to": lambda x, w: filled(torch.zeros(ROWS, WIDTH)) * steps(),
    "under autocast": lambda x, w: under_autocast(steps),
}
CHANGES = {
    "in place": lambda mask, x: mask.neg_(),
    "through a view": lambda mask, x: mask[2:].mul_(3),
    "by an argument": lambda mask, x: F.leaky_relu(mask, 0.25, inplace=True),
    "by position": lambda mask, x: F.leaky_relu(mask, 0.25, True),
    "by an overload": lambda mask, x: torch.ops.aten.add_.Tensor(mask, 1.0),
    "as running statistics": lambda mask, x: F.batch_norm(
        x.detach(), mask[0], torch.ones(WIDTH), training=True
    ),
    "by an operator": lambda mask, x: torch.ops.fusion_tests.adds_five(mask, x.detach()),
}


@torch.library.custom_op("fusion_tests::adds_five", mutates_args=("mask",))
def adds_five(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    mask.add_(5)
    return x * 2


@adds_five.register_fake
def _(mask, x):
    return torch.empty_like(x)


def filled(mask):
    mask[:2] = 1
    return mask


def under_autocast(make):
    with torch.autocast("cpu", torch.bfloat16):
        return make()


@pytest.mark.parametrize("case", MADE)
def test_each_part_computes_it(case):
    assert agree(Layers(MADE[case])).count(True) == 3


@pytest.mark.parametrize("case", NOT_FROM_CONSTANTS)
def test_what_else_decides_is_given_to_the_parts(case):
    assert agree(Layers(NOT_FROM_CONSTANTS[case])).count(True) == 1


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_part_changes_is_given_to_it_and_the_next(case):
    model = Layers(lambda x, w: steps().float() - 0.5, CHANGES[case])
    assert agree(model) == [True, False, False]


def test_a_view_that_a_later_part_writes_through():
    model = Viewed(lambda x, w: steps().float() - 0.5)
    assert agree(model)[-1] is False


def test_of_a_dynamic_size():
    model = Layers(lambda x, w: torch.arange(x.shape[0])[:, None] > 2)
    assert agree(model, dynamic=True).count(True) == 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 3 * 512) for _ in range(3)])

    def forward(self, x):
        n = x.shape[1]
        mask = torch.arange(n)[:, None] >= torch.arange(n)[None, :]
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def test_masks_are_proven_in_each_part():
    torch._dynamo.reset()
    fusion_backend.reset()
    call = DistributedDataParallel(Attention(), bucket_cap_mb=1)
    with eager_kernels():
        options = {"fusion.gate": "always"}
        torch.compile(call, backend="fusion", options=options)(torch.randn(2, 16, 512))
    sites = [s for s in fusion_backend.report().sites if s.pattern == "attention"]
    assert len(sites) == 3 and all("causal, proven" in s.reason for s in sites)
    assert len(fusion_backend.report().graphs) >= 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_masks_of_transformers_are_proven_in_each_part(name):
    pytest.importorskip("transformers")
    size = dataclasses.replace(ENTRIES[name].tiny, width=576, inner=1024)
    subject = build(name, "train", size, "sdpa", torch.device("cpu"), torch.float32)

    def masks(call):
        torch._dynamo.reset()
        fusion_backend.reset()
        with eager_kernels():
            options = {"fusion.gate": "always"}
            compiled = torch.compile(call, backend="fusion", options=options)
            compiled(*subject.args, **subject.kwargs)
        found = [s.reason for s in fusion_backend.report().sites if s.pattern == "attention"]
        return sorted(reason.split(", proven from")[0] for reason in found)

    whole = masks(subject.model)
    assert len(whole) == 2 and all("causal" in mask for mask in whole)
    assert masks(DistributedDataParallel(subject.model, bucket_cap_mb=1)) == whole


@pytest.mark.parametrize("case", ["a mask", "of an input", "random", "under autocast"])
def test_parts_that_are_cut_elsewhere(case):
    agree(Layers((MADE | NOT_FROM_CONSTANTS)[case]), ours=True)


@pytest.mark.parametrize("case", ["in place", "through a view", "by an operator"])
def test_what_is_changed_in_parts_that_are_cut_elsewhere(case):
    agree(Layers(lambda x, w: steps().float() - 0.5, CHANGES[case]), ours=True)


def test_a_fault_changes_no_result(monkeypatch):
    recompute = Parts.recompute

    def fails(self, gm, inputs):
        recompute(self, gm, inputs)
        raise RuntimeError("told")

    monkeypatch.setattr(Parts, "recompute", fails)
    with pytest.warns(RuntimeWarning, match="a cut graph is taken as it is: RuntimeError: told"):
        agree(Layers(MADE["a mask"]), faulty=True)


def test_nothing_is_kept_once_another_graph_is_compiled():
    agree(Layers(MADE["negated"]))
    call = torch.compile(
        DistributedDataParallel(Layers(MADE["a mask"]), bucket_cap_mb=1), backend="fusion"
    )
    with eager_kernels():
        call(torch.randn(ROWS, WIDTH))
        (known,) = cut_graphs.LAST.parts.known
        kept = weakref.ref(known)
        del known
        torch.compile(torch.sin, backend="fusion")(torch.ones(2))
    gc.collect()
    assert kept() is None and cut_graphs.LAST.parts is None and call is not None
