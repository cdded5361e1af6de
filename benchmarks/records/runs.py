"""A run and its JSON file: the machine, the command, and one line for each row.

    run = Run("patterns", machine(device, "benchmarks.patterns"))
    run.rows.append(Row(...)); run.save(path)  # after each row: a lost machine loses one row
    for row in Run.load(path).rows: row.of("fusion").kernel.median

The kinds of run and the classes of their rows: "patterns" Row, "models" ModelRow, "block_size"
BlockRow, "compare" CompareRow; the rows of any other kind are plain dicts. The `about` of a
patterns run also has `copy_bytes_s` and `matrix_flops_s` (measured in the same run), `noise`
{"median", "max", "rows"} over the noise of its rows, and `stopped`: why the run did not reach its
end.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
from pathlib import Path

import torch
import triton

from benchmarks.records.provenance import revision
from benchmarks.records.rows import (
    BlockRow,
    CompareRow,
    Contender,
    Errors,
    ModelContender,
    ModelRow,
    Row,
    Spread,
)
from fusion_backend.frontends.loading import patterns

KINDS = {"patterns": Row, "models": ModelRow, "block_size": BlockRow, "compare": CompareRow}


@dataclasses.dataclass
class Run:
    kind: str
    about: dict
    rows: list = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write everything so far; the file is whole at any moment."""
        rows = [
            dataclasses.asdict(row) if dataclasses.is_dataclass(row) else row for row in self.rows
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(table_json({"kind": self.kind} | self.about, "rows", rows))
        partial.replace(path)

    def go_on_from(self, path: Path) -> None:
        """Begin with the rows of a file, where there is one. ValueError where kind or machine
        differ.
        """
        if not path.exists():
            return
        before = Run.load(path)
        if before.kind != self.kind:
            raise ValueError(f"{path} holds a run of benchmarks.{before.kind}")
        if other := [
            key for key in ("gpu", "torch", "triton") if before.about.get(key) != self.about[key]
        ]:
            raise ValueError(
                f"{path} was measured with another {' and '.join(other)}: its rows cannot be kept"
            )
        self.rows = before.rows
        for key in ("command", "revision", "transformers"):
            said = dict.fromkeys(filter(None, (before.about.get(key), self.about.get(key))))
            if said or key in self.about:
                self.about[key] = "; ".join(said) or None

    @classmethod
    def load(cls, path: Path) -> Run:
        about = json.loads(Path(path).read_text())
        if "kind" not in about or "rows" not in about:
            raise ValueError(
                f"{path} holds no run of benchmarks.patterns, models, block_size or compare"
            )
        kind, rows = about.pop("kind"), about.pop("rows")
        try:
            return cls(
                kind, about, [read(KINDS[kind], row) if kind in KINDS else row for row in rows]
            )
        except TypeError as error:
            raise ValueError(
                f"{path} was written by another version of benchmarks.{kind}: {error}"
            ) from None


def read(kind: type, row: dict):
    """A row from its JSON."""
    row = dict(row)
    for name in ("kernel", "call", "step", "base", "new"):
        if isinstance(row.get(name), dict):
            row[name] = Spread(**row[name])
    if isinstance(row.get("errors"), dict):
        row["errors"] = Errors(**row["errors"])
    if "contenders" in row:
        row["contenders"] = [
            read(Contender if kind is Row else ModelContender, c) for c in row["contenders"]
        ]
    return kind(**row)


def table_json(about: dict, name: str, rows: list[dict]) -> str:
    """A JSON object whose rows under `name` have a line each."""
    lines = ",\n  ".join(json.dumps(rounded(row)) for row in rows)
    return f'{json.dumps(about, indent=1)[:-2]},\n "{name}": [\n  {lines}\n ]\n}}\n'


def rounded(value):
    """Floats to six significant digits; what is not finite, which JSON has no word for, is null."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def machine(device: torch.device, command: str) -> dict:
    """What a number depends on besides the code: `command` is the module, sys.argv is added."""
    # As in a checkout next to an installed copy: nothing would be fused, and nobody would know why.
    if not patterns():
        raise SystemExit(
            "fusion_backend has no patterns here; install it from this checkout: pip install -e ."
        )
    try:
        at = revision()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return dict(
        gpu=gpu.name if gpu else None,
        gpu_memory=gpu.total_memory if gpu else None,
        multiprocessors=gpu.multi_processor_count if gpu else None,
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        date=datetime.date.today().isoformat(),
        command=f"python -m {command} {shlex.join(sys.argv[1:])}".rstrip(),
        revision=at,
    )


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
