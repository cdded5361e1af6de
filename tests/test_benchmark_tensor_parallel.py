"""The command benchmarks.tensor_parallel: how a model is divided, what two gloo processes compute,
and what its summary says.
"""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import tensor_parallel
from benchmarks.pages.decoding_figures import cells
from benchmarks.rank_runs.decoding import divide, wrong
from benchmarks.records.runs import Run
from benchmarks.subjects.model_zoo import TINY, build
from benchmarks.subjects.subject import DECODE


@pytest.fixture
def mesh():
    if dist.is_initialized():
        pytest.skip("a job is running")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_heads_columns_and_the_cache_are_divided(mesh):
    subject = build("plain_llama", DECODE, TINY, "sdpa", torch.device("cpu"), torch.float32)
    whole = subject.kwargs["past"][0][0]
    divide(subject, mesh)
    layer = subject.model.layers[0]
    parts = {name: p.to_local().shape for name, p in layer.named_parameters() if "norm" not in name}
    width, inner, kv = TINY.width, TINY.inner, TINY.kv * TINY.head
    assert parts == {
        "attention.q.weight": (width // 2, width),
        "attention.k.weight": (kv // 2, width),
        "attention.v.weight": (kv // 2, width),
        "attention.o.weight": (width, width // 2),
        "mlp.gate.weight": (inner // 2, width),
        "mlp.up.weight": (inner // 2, width),
        "mlp.down.weight": (width, inner // 2),
    }
    mine = subject.kwargs["past"][0][0]
    assert torch.equal(mine, whole[:, TINY.kv // 2 :]) and mine.is_contiguous()
    with torch.no_grad():
        assert subject().shape == (TINY.batch, 1, TINY.vocabulary)


def row(far=(1e-3, 1e-3, 1e-3, 1e-3), graphs=5, device="cpu", sums=4, faults=()):
    names = ("inductor", "fusion", "without-sums", "with-sums", "inductor-again")
    contenders = [{"name": n} for n in names]
    for one, ms in zip(contenders, (1.0, 0.8, 0.5, 0.4, 1.01), strict=True):
        one |= {"call": {"median": 2 * ms}, "graph": {"median": ms}}
    for one in contenders[graphs:]:
        del one["graph"]
    for one, distance in zip(contenders, far, strict=False):
        one["far"] = distance
    for one in contenders[1:4]:
        one |= {"fused": {"attention": 2}, "faults": [], "sums": 0}
    contenders[3] |= {"sums": sums, "faults": [*faults]}
    about = dict(name="plain_llama", world=2, batch=4, layers=2, width=64, seq=16, device=device)
    return about | {"contenders": contenders}


def saved(row: dict, folder) -> dict:
    """As it is read from its file."""
    Run("tensor_parallel", {}, [row]).save(folder / "rows.json")
    return Run.load(folder / "rows.json").rows[0]


def test_the_table_has_the_times_that_there_are():
    by_host = ["1.250, 2.000, 2.500", "1.0%", "2, 2, 2", "4"]
    times = ["1.000", "0.800", "0.500", "0.400"]
    assert cells(row())[3:] == [*times, "1.250, 2.000, 2.500", "1.0%", *by_host]
    some = [*times[:3], "–", "1.250, 2.000, –", "–", *by_host]
    assert cells(row(graphs=3))[3:] == some
    assert cells(row(graphs=0))[3:] == ["–"] * 4 + ["–, –, –", "–", *by_host]


@pytest.mark.parametrize("far", [2.1e-3, math.nan])
def test_a_result_that_is_too_far_is_told(far, tmp_path):
    assert not wrong(saved(row(far=(1e-3, 2e-3, 1e-3, 1e-3)), tmp_path))
    (told,) = wrong(saved(row(far=(1e-3, 1e-3, far, 1e-3)), tmp_path))
    assert told.startswith("batch 4: without-sums is ")
    assert len(wrong(saved(row(far=(math.nan, 1e-3, 1e-3, 1e-3)), tmp_path))) == 3


def test_sums_that_no_kernel_computes_are_told_and_so_are_faults():
    assert not wrong(row(device="cuda"))
    assert not wrong(row(sums=0))  # gloo computes them
    (told,) = wrong(row(device="cuda", sums=0))
    assert told == "batch 4: with-sums computes no sum over ranks by a kernel"
    (told,) = wrong(row(faults=["it is broken"]))
    assert told == "batch 4: with-sums: it is broken"


@pytest.mark.full
def test_two_processes_decode(tmp_path):
    """Logits as far from fp64 as plain Inductor's, and sites are fused."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo")
    out = tmp_path / "decoding.json"
    asked = ["--layers", "1", "--rounds", "1", "--out", str(out)]
    assert tensor_parallel.main(asked) == 0
    (found,) = json.loads(out.read_text())["rows"]
    assert found["world"] == 2 and found["batch"] == 2
    everything = found["contenders"][3]
    assert everything["far"] < 1e-5 and everything["fused"]["attention"] == 1


@pytest.mark.parametrize(
    "asked, told",
    [
        (["--ranks", "3"], "--ranks 3: the model has 2 heads of keys"),
        (["--batch", "0"], "argument --batch"),
    ],
)
def test_what_cannot_be_divided_is_refused(asked, told, capsys):
    with pytest.raises(SystemExit):
        tensor_parallel.main(asked)
    assert told in capsys.readouterr().err
