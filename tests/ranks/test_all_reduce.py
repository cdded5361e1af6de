"""Sums over ranks in front of norms: found in models of transformers and of torch's own plans, and
left alone where they are something else; and the kernels, run by two processes.
"""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from fusion_backend.patterns import all_reduce_norm as pattern
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusion_backend import explain
from fusion_backend.kernels.collective import reach, size_gate, workspace

from .. import selection
from ..selection import only_full
from . import all_reduces, failing, tp_plans
from .all_reduces import DEAR, OTHERS, SITES
from .shared_memory import CALLS, FEW
from .starting import in_two_processes

PLANS = {
    "plan, inference": ("all_reduce_add_rms_norm", 1),
    "plan, training": ("all_reduce_add_rms_norm", 1),
    "plan with layer norms, training": ("all_reduce_add_layer_norm", 1),
    "llama, inference": ("all_reduce_add_rms_norm", 2),
    "llama, training": ("all_reduce_add_rms_norm", 2),
}
NORMS = {"without a residual": "rms_norm", "layer norm": "add_layer_norm"}
REFUSED = {
    "the sum is read elsewhere": "is used elsewhere too",
    "the sum in place is read elsewhere": "is used elsewhere too",
    "the sum in place of an input": "writes to memory that this graph has not made",
    "an older name is read": "the memory that it writes to is read elsewhere too",
    "a write in between": "an argument may be written to in between",
}


def jobs(names) -> list:
    """As parameters."""
    return [only_full(name) if name in DEAR else name for name in names]


def observe_all(*given) -> dict:
    return all_reduces.observe_all(*given) | {"failing": failing.observe()}


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> list[dict]:
    """What both processes have observed. To start them takes as long as much of what they do."""
    folder = tmp_path_factory.mktemp("sums")
    names = [name for name in all_reduces.JOBS if selection.FULL or name not in DEAR]
    if has_plans():
        tp_plans.save(folder)
    else:
        names = [name for name in names if "llama" not in name]
    calls = [call for call in CALLS if selection.FULL or call in FEW]
    return in_two_processes(observe_all, folder, folder, names, calls)


def has_plans() -> bool:
    """Has transformers a DistributedConfig(tp_plan=...)?"""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return "tp_plan" in {f.name for f in dataclasses.fields(DistributedConfig)}


@pytest.fixture
def seen(observed, request) -> list[dict]:
    """Of jobs."""
    if "llama" in request.node.name and not has_plans():
        pytest.skip("this transformers has no DistributedConfig(tp_plan=...)")
    return [one["jobs"] for one in observed]


@pytest.mark.parametrize("name", jobs(all_reduces.JOBS))
def test_results_and_gradients_are_those_of_eager(seen, name):
    for one in seen:
        want = one[name, "eager"]["results"]
        for backend in ("left", "taken"):
            assert not one[name, backend]["errors"]
            for a, b in zip(one[name, backend]["results"], want, strict=True):
                far = 1e-5 * max(1.0, b.abs().max().item())
                torch.testing.assert_close(a, b, rtol=0, atol=far)


@pytest.mark.parametrize("name", jobs(all_reduces.JOBS))
def test_collectives_are_those_of_plain_inductor_on_both_ranks(seen, name):
    plain, *others = (
        one[name, backend]["collectives"]
        for one in seen
        for backend in ("inductor", "left", "taken")
    )
    assert all(other == plain for other in others) and any(plain)


@pytest.mark.parametrize("name", jobs([*PLANS, *SITES]))
def test_what_is_left_to_gloo_has_a_reason_and_the_smaller_pattern(seen, name):
    rule, count = PLANS.get(name, ("", 1))
    smaller = NORMS.get(name, "add_layer_norm" if "layer_norm" in rule else "add_rms_norm")
    for one in seen:
        left = one[name, "left"]
        assert left["fused"][smaller] >= count
        assert left["reasons"] == {
            "the sum over ranks is left to the process group: symmetric memory needs NCCL, and the "
            "group has gloo"
        }


@pytest.mark.parametrize("name", jobs([*PLANS, *SITES]))
def test_sites_are_found(seen, name):
    layer = "all_reduce_add_layer_norm" if name == "layer norm" else "all_reduce_add_rms_norm"
    rule, count = PLANS.get(name, (layer, 1))
    for one in seen:
        taken = one[name, "taken"]["fused"]
        assert {p: n for p, n in taken.items() if "all_reduce" in p} == {rule: count}
        assert not {"add_rms_norm", "add_layer_norm"} & {*taken}


def test_each_group_is_summed_over_by_itself(seen):
    for one in seen:
        (first,), (other,) = (
            one[name, "taken"]["groups"] for name in ("functional", "another group")
        )
        assert first != other


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_is_left_alone(seen, name):
    for one in seen:
        for backend in ("left", "taken"):
            found = one[name, backend]
            assert not any("all_reduce" in p for p in found["fused"])
            assert (
                any(REFUSED[name] in r for r in found["reasons"])
                if name in REFUSED
                else (not found["reasons"])
            )


@pytest.mark.parametrize(
    "call", [call if call in FEW else only_full(call) for call in CALLS], ids=str
)
def test_the_kernels_agree_with_fp64_and_ranks_have_the_same_bits(observed, call):
    first, second = (one["kernels"][str(call)] for one in observed)
    rounding = torch.finfo(call.dtype).eps
    assert max(first["far"]) <= 2 * rounding * max(1.0, first["scale"])
    assert all(map(torch.equal, first["results"], second["results"]))


def test_a_rank_that_cannot_compile_makes_no_other_wait(observed):
    """All of them run the graph as plain Inductor would, and later graphs, too."""
    for rank, one in enumerate(found["failing"] for found in observed):
        for name in ("at first", "later"):
            torch.testing.assert_close(one[name]["result"], one[name]["eager"])
            assert not one[name]["fused"]
        errors = [one[name]["error"] for name in ("at first", "later")]
        failed = "rank 1 has failed to compile a graph: RuntimeError: no compiler here"
        assert errors[1] == f"NotCompiledByAllRanks: {failed}"
        assert errors[0] == (
            "RuntimeError: no compiler here" if rank else f"NotCompiledByAllRanks: {failed}"
        )


def test_where_all_have_compiled_it_the_kernels_run(observed):
    for one in (found["failing"] for found in observed):
        for name in ("both", "other rows"):
            torch.testing.assert_close(one[name]["result"], one[name]["eager"])
            assert one[name]["fused"] == ["all_reduce_add_rms_norm"] and not one[name]["error"]


def test_what_the_others_run_must_compile_again(observed):
    """Or they would wait for ever."""
    told = observed[1]["failing"]["again"]
    assert "CannotFallBack: the other ranks may run kernels that wait for this rank" in told


# One process of a job that is not there.


@pytest.fixture
def job():
    if dist.is_initialized():
        pytest.skip("a job is running")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


H100 = "NVIDIA H100 80GB HBM3"


def block(x, residual, weight):
    h = funcol.all_reduce(x, "sum", dist.group.WORLD) + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def without_a_residual(x, residual, weight):
    h = funcol.all_reduce(x, "sum", dist.group.WORLD)
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def layer_norm(x, residual, weight):
    h = funcol.all_reduce(x, "sum", dist.group.WORLD) + residual
    return F.layer_norm(h, h.shape[-1:], weight, weight, 1e-6), h


def sites(
    options: dict, rows: int = 64, n: int = 4096, dtype=torch.bfloat16, code=block, target="H100"
) -> list:
    torch._dynamo.reset()  # or sizes become dynamic
    x, residual = (torch.randn(rows, n, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        report = explain(code, x, residual, x[0].clone(), target=target, options=options)
    return [s for s in report.sites if s.pattern.startswith("all_reduce_add")]


@pytest.fixture
def reached(monkeypatch):
    monkeypatch.setattr(size_gate, "BY_DEFAULT", True)
    monkeypatch.setattr(pattern, "unsupported", lambda group: "")
    monkeypatch.setattr(pattern, "out_of_reach", lambda group: "")
    monkeypatch.setattr(pattern, "linked", lambda group: H100)


def test_the_kernel_is_taken_where_the_user_asks_for_it(job, reached):
    (site,) = sites({"fusion.gate": "always"})
    assert site.fused and site.forward == "kernel"


def test_nothing_is_taken_that_nobody_asked_for(job, reached, monkeypatch):
    monkeypatch.setattr(size_gate, "BY_DEFAULT", False)
    (site,) = sites({})
    assert not site.fused and "but not where the host takes longer" in site.reason
    assert sites({"fusion.gate": "always"})[0].fused


@pytest.mark.parametrize("options", [{}, {"fusion.gate": "table"}], ids=["auto", "table"])
def test_what_was_timed_may_be_taken(options, job, reached):
    """From 16 KB to 64 MB of x."""
    rows = (1, 2, 64, 8192)
    found = [sites(options, n)[0] for n in rows]
    assert [site.fused for site in found] == [False, True, True, True]
    assert "x has 8,192 bytes, and over 2 ranks the kernel was faster from" in found[0].reason


@pytest.mark.parametrize(
    "given, why",
    [
        ({"n": 2048}, "has not been timed of rows of 2048"),
        ({"dtype": torch.float16}, "has not been timed in torch.float16"),
        ({"code": layer_norm}, "has not been timed with a layer norm"),
        ({"code": without_a_residual}, "has not been timed without a residual"),
    ],
)
def test_nothing_is_taken_that_was_not_timed(given, why, job, reached):
    (site,) = sites({}, **given)
    assert not site.fused
    assert f"the sum over 2 ranks {why}; fusion.gate=always takes it" in site.reason


def test_training_was_not_timed(monkeypatch):
    monkeypatch.setattr(size_gate, "BY_DEFAULT", True)
    x = torch.empty(64, 4096, dtype=torch.bfloat16)
    assert size_gate.untimed(x, x, "rms", 2, training=False) is None
    refused = size_gate.untimed(x, x, "rms", 2, training=True)
    assert "the sum over 2 ranks has not been timed with gradients" in refused.reason
    assert size_gate.untimed(x, x, "rms", 4, training=False) is None
    refused = size_gate.untimed(x, x, "rms", 8, training=False)
    assert "the sum over 8 ranks has not been timed" in refused.reason


@pytest.mark.parametrize(
    "gpu, why",
    [
        ("NVIDIA A100", "H100 80GB HBM3 and NVIDIA H200, and not on NVIDIA A100"),
        ("", "and not on GPUs that differ or are not linked by NVLink"),
    ],
)
def test_other_gpus_were_not_timed(gpu, why, job, reached, monkeypatch):
    monkeypatch.setattr(pattern, "linked", lambda group: gpu)
    (site,) = sites({})
    assert not site.fused and why in site.reason
    assert sites({"fusion.gate": "always"})[0].fused


@pytest.mark.parametrize("why, n", [("a row is longer than 16384", 16400), ("64 MB", 16384)])
def test_what_the_kernel_cannot_do_is_refused(job, reached, why, n):
    (site,) = sites({"fusion.gate": "always"}, rows=4096, n=n)
    assert not site.fused and why in site.reason


def test_out_of_reach_is_asked_last_and_refuses(job, monkeypatch):
    asked = []
    monkeypatch.setattr(size_gate, "BY_DEFAULT", True)
    monkeypatch.setattr(pattern, "unsupported", lambda group: "")
    monkeypatch.setattr(pattern, "linked", lambda group: "")
    monkeypatch.setattr(
        pattern, "out_of_reach", lambda group: asked.append(group) or "the ranks are far apart"
    )
    sites({}, rows=1)
    assert not asked  # it waits for other ranks, and the tables refuse the site
    for options in ({}, {"fusion.gate": "always"}):
        (site,) = sites(options)
        assert asked and not site.fused and site.reason.endswith("the ranks are far apart")


# What the ranks answer together.

HERE = {"host": "a", "gpu": 0, "name": H100, "reaches": [1], "linked": [1], "memory": "CUDA"}
THERE = {**HERE, "gpu": 1, "reaches": [0], "linked": [0]}


@pytest.mark.parametrize(
    "other, why, gpu",
    [
        ({}, "", H100),
        ({"linked": []}, "", ""),
        ({"name": "NVIDIA H200"}, "", ""),
        ({"host": "b"}, "the ranks are on different hosts", ""),
        ({"gpu": 0}, "ranks share a GPU, or each sees its own alone", ""),
        ({"reaches": []}, "a GPU cannot reach the memory of another", ""),
        ({"memory": None}, "torch.distributed has no symmetric memory of CUDA on every rank", ""),
    ],
)
def test_the_verdict(other, why, gpu):
    assert reach.verdict([HERE, {**THERE, **other}]) == (why, gpu)


@pytest.mark.parametrize("late", [False, True])
def test_the_first_answer_holds_for_all_ranks(late, monkeypatch):
    """A rank that waited too long has said no, and one that knows better comes too late."""
    store = dist.HashStore()
    monkeypatch.setattr(reach, "WAIT_S", 0.05)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda owner: [0, 1])
    seen_by = [HERE, THERE]
    if not late:
        store.set("fusion/reach/facts/g/[0, 1]/1", json.dumps(seen_by[1]))
    monkeypatch.setattr(reach, "seen_here", lambda: seen_by[0])
    first = reach.agreed(store, 0, "g", None)
    monkeypatch.setattr(reach, "seen_here", lambda: seen_by[1])
    second = reach.agreed(store, 1, "g", None)
    assert first == second
    told = reach.Answer("a rank of the group did not say which memory it can reach")
    assert first == (told if late else ("", H100))


def test_an_answer_that_was_given_meanwhile_holds(monkeypatch):
    store, told = dist.HashStore(), reach.Answer("another rank waited too long")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda owner: [0])
    monkeypatch.setattr(reach, "seen_here", lambda: HERE)

    def verdict(found: list) -> reach.Answer:
        store.set("fusion/reach/answer/g/[0]", json.dumps(told))
        return reach.Answer("")

    monkeypatch.setattr(reach, "verdict", verdict)
    assert reach.agreed(store, 0, "g", None) == told


def test_memory_grows_and_what_was_made_stays(monkeypatch):
    made = []

    def share(size, device, group):
        memory = torch.zeros(size, dtype=torch.uint8)
        made.append(memory)
        return workspace.Shared(memory, [memory.data_ptr()] * 2, 1, None)

    monkeypatch.setattr(workspace, "MADE", {})
    monkeypatch.setattr(workspace, "share", share)
    monkeypatch.setattr(workspace, "process_group", lambda group: dist)
    device = torch.device("cpu")
    sizes = [workspace.workspace_of("g", size, device).capacity for size in (1, 1 << 20, 3 << 20)]
    assert sizes == [1 << 20, 1 << 20, 4 << 20]
    assert workspace.workspace_of("g", 5, device).capacity == 4 << 20
    assert len(made) == 2 and len(workspace.MADE["g", device]) == 2
