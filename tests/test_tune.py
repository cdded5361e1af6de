"""The table of configurations: what the committed sweeps give, and what kernels make of it."""

import pytest
import torch

from benchmarks import tune
from benchmarks.configurations import fastest
from benchmarks.records.runs import Run
from fusion_backend.kernels.common import rows
from fusion_backend.kernels.common.tuned import TABLE


def test_the_table_is_what_the_sweeps_give():
    assert tune.main(["--check"]) == 0


def sweep(*found) -> Run:
    return Run("sweep", {}, [dict(work=work, config=config, ms=ms) for work, config, ms in found])


def test_the_fastest_of_the_largest_work_counts():
    run = sweep(
        ("norm 4096x1000", "block=1024 rows=1 warps=4", 1.0),
        ("norm 4096x1000", "block=1024 rows=2 warps=8 early=1", 0.9),
        ("norm 2048x1024", "block=1024 rows=4 warps=4", 0.1),
        ("norm backward 16x1024", "rows=1 warps=2", 0.2),
        ("norm backward by columns 4096x8192", "block=1024 rows=1 warps=4", 0.2),  # never launched
        ("conv 3x4x5", "rows=1 warps=2", 0.2),
        ("dropout 4096x1000", "BLOCK=1024 warps=2", 0.2),
    )
    assert fastest.fastest([run]) == {
        "norm": {1024: dict(block=1024, rows=2, warps=8, early=1)},
        "norm backward, few rows": {1024: dict(rows=1, warps=2)},
    }


def test_what_is_no_sweep_is_refused(tmp_path, capsys):
    Run("patterns", {}, []).save(tmp_path / "run.json")
    with pytest.raises(SystemExit):
        tune.main([str(tmp_path / "run.json")])
    assert "not results of benchmarks.sweep" in capsys.readouterr().err


def test_lookup(monkeypatch):
    monkeypatch.setattr(
        rows,
        "TABLE",
        {"k": {1024: dict(rows=2, warps=8)}, "k, few rows": {1024: dict(rows=1, warps=1)}},
    )
    rule = (512, 1, 4)
    assert rows.tuned("k", 5000, 1000, 2, rule) == rows.Config(1024, 2, 8)
    assert rows.tuned("k", 50, 1000, 2, rule) == rows.Config(1024, 1, 1)
    assert rows.tuned("k", 5000, 1000, 4, rule) == rows.Config(*rule)  # measured in 16 bits alone
    assert (
        rows.tuned("k", 5000, 1025, 2, rule)
        == rows.tuned("other", 5000, 1000, 2, rule)
        == rows.Config(*rule)
    )


@pytest.mark.parametrize("kernel", TABLE)
def test_entries_are_configurations(kernel):
    for n, entry in TABLE[kernel].items():
        found = rows.tuned(
            kernel.removesuffix(", few rows"), 1 if "few" in kernel else 1 << 20, n, 2, (0, 0, 0)
        )
        assert (
            found.block & (found.block - 1) == 0 and found.rows >= 1 and 1 <= found.warps <= 32
        ), (n, entry)
        assert torch.bfloat16.itemsize == 2 and (found.stages > 0 or found.programs == 0)
