"""The command benchmarks.distributed: processes train a tiny model through gloo; its summary."""

import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import distributed
from benchmarks.pages.rank_figures import table, wrong
from benchmarks.pages.sum_figures import cells
from benchmarks.rank_runs import training
from benchmarks.rank_runs.wrapping import WRAPPINGS, blocks
from tests import selection
from tests.eager_kernels import eager_kernels

WAYS = ["alone", "alone-blocks", "ddp", "ddp-large-buckets"]
WAYS += ["fsdp", "fsdp-blocks", "fsdp-loss", "fsdp-checkpoint"]


def row(plain=(10.0, 4.0), ours=(10.0, 4.0), ms=(20.0, 10.0), how="ddp", dropout=False, eager=None):
    def one(name, losses, step):
        return {"name": name, "losses": list(losses), "step": {"median": step}, "graphs": 3,
                "peak_bytes": 2_000_000_000, "saved_bytes": 1_000_000_000}  # fmt: skip

    contenders = [
        one("inductor", plain, ms[0]),
        one("fusion", ours, ms[1]) | {"fused": {"gelu": 2}},
    ]
    if eager:
        contenders.append({"name": "eager", "losses": list(eager)})
    about = {"name": "gpt2", "layers": 2, "width": 64, "world": 2, "wrapping": how, "steps": 2}
    about |= {"dropout": dropout, "batch": 16}
    return about | {"noise": 0.01, "contenders": contenders}


def test_the_table_has_both_contenders():
    line = table([row()]).splitlines()[-1]
    assert "| 20.00 | 10.00 | 2.000 | 1.0% |  | 2.00 → 2.00 |" in line and line.endswith("| 2 |")


def test_the_share_of_the_gain_that_one_gpu_has():
    alone, spread = row(ms=(12.0, 10.0), how="alone"), row(ms=(21.0, 20.0))
    first, second = table([alone, spread]).splitlines()[-2:]
    assert "| 1.200 | 1.0% |  |" in first and "| 1.050 | 1.0% | 25% |" in second
    none = row(ms=(19.999, 20.0), how="fsdp")
    assert "| 1.000 | 1.0% | 0% |" in table([alone, none]).splitlines()[-1]
    another = row(ms=(12.0, 10.0), how="alone") | {"name": "llama"}
    slower = row(ms=(9.0, 10.0), how="alone")
    more = row(ms=(12.0, 10.0), how="alone") | {"world": 4}
    larger = row(ms=(12.0, 10.0), how="alone") | {"batch": 48}
    longer = row(ms=(11.0, 10.0), how="alone") | {"steps": 200}
    assert "| 1.050 | 1.0% | 25% |" in table([longer, alone, spread]).splitlines()[-1]
    assert "| 1.050 | 1.0% | 50% |" in table([longer, spread]).splitlines()[-1]
    for other in (another, slower, more, larger):
        assert "| 1.050 | 1.0% |  |" in table([other, spread]).splitlines()[-1]


def test_blocks_with_their_loss_keep_a_share_of_what_blocks_gain():
    rows = [row(ms=(12.0, 10.0), how="alone"), row(ms=(11.0, 10.0), how="alone-blocks")]
    rows.append(row(ms=(21.0, 20.0), how="fsdp-loss"))
    _, blocks_alone, spread = table(rows).splitlines()[-3:]
    assert "| 1.100 | 1.0% |  |" in blocks_alone and "| 1.050 | 1.0% | 50% |" in spread


@pytest.mark.parametrize(
    "world, size, ratio, hosts",
    [
        (2, 1 << 20, "2.00", "300 → 200"),
        (4, 1 << 18, "2.00", "300 → 200"),
        (4, 1 << 20, "4.00", "300 → 100"),
    ],
)
def test_the_ratio_of_a_sum_is_that_of_the_kernel_that_is_taken(world, size, ratio, hosts):
    times = [(0.04, 0.3), (0.02, 0.2), (0.01, 0.1), (0.04, 0.3)]
    contenders = [{"graph": {"median": a}, "call": {"median": b}} for a, b in times]
    row = {"world": world, "bytes": size, "rows": 1, "n": 1, "contenders": contenders}
    assert cells(row)[3:] == ["40.0", "20.0", "10.0", ratio, "1.00", hosts]


@pytest.mark.parametrize("last", [4.9, float("nan")])
def test_a_loss_that_goes_elsewhere_is_told(last):
    assert not wrong([row(ours=(10.0, 4.1))])
    (told,) = wrong([row(ours=(10.0, last))])
    assert "gpt2 ddp: after 2 steps the loss is" in told
    assert not wrong([row(ours=(10.0, last), dropout=True)])


@pytest.mark.parametrize("last", [5.2, 2.8, float("nan")])
def test_rounding_takes_a_loss_as_far_as_that_of_eager_mode(last):
    assert not wrong([row(ours=(10.0, 4.9), eager=(10.0, 3.5))])
    assert wrong([row(ours=(10.0, last), eager=(10.0, 3.5))])
    assert wrong([row(ours=(10.0, 4.9), eager=(10.0, 3.9))])
    assert "| 7.000 → 7.450 (6.750) |" in table([row(ours=(10.0, 4.9), eager=(10.0, 3.5))])


def test_what_earlier_trainings_had_is_freed_before_memory_counts(monkeypatch):
    left = iter([9, 6, 5, 5, 0])
    monkeypatch.setattr(training, "SETTLED_S", 0.0)
    monkeypatch.setattr(training, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(left))
    assert training.allocated(torch.device("cuda")) == 5
    assert training.allocated(torch.device("cpu")) == 0


def test_every_way_has_a_test():
    assert [*WRAPPINGS] == WAYS


def test_blocks_are_the_longest_list():
    model = nn.Module()
    model.heads, model.layers = (
        nn.ModuleList([nn.Linear(1, 1)]),
        nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]),
    )
    assert blocks(model) is model.layers


def ways_to_run() -> list[str]:
    test = "tests/test_benchmark_distributed.py::test_contenders_train"
    return [how for how in WAYS if selection.FULL or not selection.left_out(f"{test}[{how}]")]


def in_this_process(work, given, nprocs):
    """The only rank, where no Inductor generates code."""
    assert nprocs == 1
    with eager_kernels(), mock.patch.dict(os.environ):
        work(0, *given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The rows of the ways that are run, with --full in two processes."""
    pytest.importorskip("transformers")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo")
    out = tmp_path_factory.mktemp("ranks") / "ranks.json"
    asked = ["--model", "llama", "--layers", "1", "--steps", "6", "--rounds", "1"]
    asked += ["--how", *ways_to_run(), "--out", str(out)]
    if selection.FULL:
        assert distributed.main(asked) == 0
    else:
        with mock.patch.object(distributed.mp, "spawn", in_this_process):
            assert distributed.main([*asked, "--ranks", "1"]) == 0
    return {row["wrapping"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize("how", WAYS)
def test_contenders_train(how, trained):
    """The same losses, no more graphs, and sites are fused."""
    plain, ours, eager = trained[how]["contenders"]
    assert ours["graphs"] == plain["graphs"] > 0
    assert sum(ours["fused"].values()) > 0
    assert len(ours["losses"]) == 6
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert eager["losses"] == pytest.approx(plain["losses"], rel=1e-3)


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        distributed.main(["--ranks", "2"])
    assert "the number of GPUs is 1" in capsys.readouterr().err
