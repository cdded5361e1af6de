"""Models of transformers that are divided by their `tp_plan` compute under the backend what the
whole model computes, with the collectives that plain Inductor has, and their sites are fused.
"""

import dataclasses

import pytest
import torch

from .. import selection
from ..oracle.harness import TORCH
from . import tp_plans
from .starting import in_two_processes
from .tp_plans import DEAR, JOBS


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What both processes have observed."""
    distributed = pytest.importorskip("transformers.distributed")
    if "tp_plan" not in {f.name for f in dataclasses.fields(distributed.DistributedConfig)}:
        pytest.skip("this transformers has no DistributedConfig(tp_plan=...)")
    folder = tmp_path_factory.mktemp("plans")
    tp_plans.save(folder)
    names = [name for name in JOBS if selection.FULL or name not in DEAR]
    return in_two_processes(tp_plans.observe_all, folder, folder, names, selection.FULL)


every = pytest.mark.parametrize(
    "name", [selection.only_full(name) if name in DEAR else name for name in JOBS]
)


@every
def test_the_results_are_those_of_the_whole_model(seen, name):
    share = 1e-4 if JOBS[name].dtype == torch.float32 else 0.05
    for one in seen:
        want = one[name, "whole", "eager"]["results"]
        for backend in ("eager", "fusion"):
            have = one[name, "divided", backend]["results"]
            for a, b in zip(have, want, strict=True):
                torch.testing.assert_close(a.float(), b, rtol=0, atol=share * b.abs().max().item())


@every
def test_the_collectives_are_those_of_plain_inductor_on_both_ranks(seen, name):
    plain, *others = (
        one[name, "divided", backend]["collectives"]
        for one in seen
        for backend in ("inductor", "fusion")
    )
    reduced = "_c10d_functional.all_reduce.default"
    assert all(any(name == reduced for name, _ in graph) for graph in plain)
    assert all(other == plain for other in others)


# Sites of the whole model that are none, or others, in the divided one.
CHANGES = {
    # what reads a DTensor is no site: linear layers in training
    "qwen3, training": {"gated_mlp": 0},
}


def expected(name: str, whole: dict[str, int]) -> dict[str, int]:
    """How many sites of each pattern are fused in the divided model."""
    fused = whole | CHANGES.get(name, {})
    # this rank's part of a weight is a constant there: no layer is a site
    if TORCH < (2, 12) or (TORCH < (2, 13) and "training" not in name):
        fused |= {"gated_linear": 0, "gated_mlp": 0}
        fused["rms_norm"] += fused.pop("norm_linear", 0)
    return {pattern: n for pattern, n in fused.items() if n}


@every
def test_sites_are_fused_on_both_ranks(seen, name):
    whole = seen[0][name, "whole", "fusion"]
    for one in seen:
        ours = one[name, "divided", "fusion"]
        assert not ours["errors"]
        assert ours["fused"] == expected(name, whole["fused"])
        rotary = "norm_rotary" if "qwen3" in name else "rotary"
        assert {*ours["fused"]} >= {"attention", "rms_norm", rotary}
