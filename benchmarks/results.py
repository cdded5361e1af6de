"""The form in which benchmarks keep what they found: a JSON file with the machine, the run and a
line a row.

    run = Run("patterns", machine(device, "benchmarks.patterns"))
    run.rows.append(Row(...)); run.save(path)  # after each row: a lost machine loses one row
    for row in Run.load(path).rows: row.of("fusion").kernel.median

`about` of a patterns run also has copy_bytes_s and matrix_flops_s (measured in the same run),
`noise` {"median", "max", "rows"} over its rows' noise, and `stopped`, why it did not reach its end.
Kinds of run and their rows: "patterns" Row, "models" ModelRow, "block_size" BlockRow, "compare"
CompareRow; of any other kind, plain dicts. Times are milliseconds, sizes bytes, rates bytes or
operations a second.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

from benchmarks.provenance import revision
from fusion_backend.frontends.loading import patterns

OK, WRONG, FAILED = "ok", "wrong", "failed"  # status of a contender


@dataclasses.dataclass
class Spread:
    """Samples of a time in milliseconds, summed up; q25 and q75 are quartiles."""

    n: int
    median: float
    mean: float
    std: float
    min: float
    max: float
    q25: float
    q75: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        found = sorted(samples)
        low, _, high = (
            statistics.quantiles(found, method="inclusive") if len(found) > 1 else found * 3
        )
        return cls(
            n=len(found),
            median=statistics.median(found),
            mean=statistics.fmean(found),
            std=statistics.stdev(found) if len(found) > 1 else 0.0,
            min=found[0],
            max=found[-1],
            q25=low,
            q75=high,
        )

    @property
    def iqr(self) -> float:
        return self.q75 - self.q25


@dataclasses.dataclass
class Errors:
    """Distance of all results (and gradients, when training) from fp64, element by element: the
    50th, 99th and 99.9th percentile and the maximum of |got - exact|, and of the same over |exact|;
    `distance` is |got - exact| / |exact| in Euclidean norms, the largest of the results'. Of
    integers, `distance` is the share that differs. None where a number is not finite.
    """

    absolute: dict[str, float | None]  # "50", "99", "99.9", "max"
    relative: dict[str, float | None]
    distance: float | None


@dataclasses.dataclass
class Contender:
    """What one way to compute a piece of work did. Without `kernel` it has not been timed; `note`
    says why.

    status    ok, wrong (its results are too far from fp64) or failed (it raised) verdict   against
    plain Inductor: "faster", "slower", "" within noise (or not comparable) declined  why the gate
    left the site to Inductor, "" where it did not kernel    device time of a call, L2 flushed
    before it;   call   wall time of a call, host included rate_bytes, rate_flops   the work's
    counted bytes and operations over the median kernel time of_copy, of_matrix       these as
    fractions of the copy bandwidth and the bf16 matrix rate of the same run peak_bytes   the most a
    step allocates beyond its arguments (CUDA);   saved_bytes  kept from forward to backward,
                 arguments included, each storage once (training)
    compile_s    seconds of the first call
    sites        what fusion reports: pattern, fused, reason, forward, backward
    """

    name: str
    status: str = OK
    note: str = ""
    verdict: str = ""
    declined: str = ""
    kernel: Spread | None = None
    call: Spread | None = None
    rate_bytes: float | None = None
    rate_flops: float | None = None
    of_copy: float | None = None
    of_matrix: float | None = None
    errors: Errors | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    compile_s: float | None = None
    sites: list[dict] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Row:
    """One piece of work under all contenders: "eager", "inductor", "max-autotune", "fusion" with
    its default gate, "fusion-always", and "inductor-again", the twin that shows the noise.

    `intensity` is flops / bytes; `floor_ms` the larger of bytes over the copy bandwidth and flops
    over the matrix rate, both of this run; `noise` is |a - b| / b of the medians of plain Inductor
    and its twin, None without both.
    """

    name: str
    pattern: str
    case: dict[str, int]
    dtype: str  # f32, bf16, f16
    train: bool
    linear: bool
    bytes: int
    flops: int
    intensity: float
    floor_ms: float
    contenders: list[Contender]
    noise: float | None = None
    note: str = ""  # what is missing from the whole row, and why

    def of(self, name: str) -> Contender | None:
        return next((c for c in self.contenders if c.name == name), None)

    def instead(self) -> list[str]:
        """Patterns that the default gate took where it left the row's own: users get their kernels,
        not Inductor's.
        """
        mine = self.of("fusion")
        return (
            sorted({s["pattern"] for s in mine.sites if s["fused"]})
            if mine and mine.declined
            else []
        )

    def ratio(self, name: str, to: str = "inductor") -> float | None:
        """How often faster `name` is than `to`, by median kernel time."""
        mine, other = self.of(name), self.of(to)
        if not (mine and other and mine.kernel and other.kernel):
            return None
        return other.kernel.median / mine.kernel.median


@dataclasses.dataclass
class ModelContender:
    """One way to run the model. Without `step` it has not been timed; `note` says why.

    status    ok, wrong (its error is far above eager's) or failed (it raised) verdict   against
    plain Inductor: "faster", "slower", "" within noise (or not comparable) step      wall time of a
    step;   device_ms  time of its kernels (CPU: of torch's operators), by torch.profiler cold_s,
    warm_s  seconds to compile: the first step less a later one, with an empty cache and with a
    filled one peak_bytes      the most a step allocates beyond weights and inputs (CUDA)
    output_error, gradient_error   |got - exact| / |exact| in Euclidean norms, all tensors together
    shares    part of device_ms by class of kernel;   kernels  the longest: name, kind, calls and ms
    a step fused     sites by pattern;   declined  pattern, reason and count of the sites left to
    Inductor
    """

    name: str
    status: str = OK
    note: str = ""
    verdict: str = ""
    step: Spread | None = None
    device_ms: float | None = None
    cold_s: float | None = None
    warm_s: float | None = None
    peak_bytes: int | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: list[dict] = dataclasses.field(default_factory=list)
    fused: dict[str, int] = dataclasses.field(default_factory=dict)
    declined: list[dict] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ModelRow:
    """`about` has the sizes, attention, gate, optimizer and number of parameters; `exact` is the
    dtype that errors are against; `noise` how much the medians of a contender and of the same code
    timed again (`twin`) differ.
    """

    name: str
    mode: str
    dtype: str
    about: dict
    exact: str | None
    contenders: list[ModelContender]
    noise: float | None = None
    twin: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def of(self, name: str) -> ModelContender | None:
        return next((c for c in self.contenders if c.name == name), None)

    def ratio(self, name: str, to: str = "inductor") -> float | None:
        """How often faster a step of `name` is than of `to`, by medians."""
        mine, other = self.of(name), self.of(to)
        return (
            other.step.median / mine.step.median
            if mine and other and mine.step and other.step
            else None
        )

    @property
    def title(self) -> str:
        sizes = [
            f"{key} {self.about[key]}"
            for key in ("layers", "width", "batch", "seq")
            if key in self.about
        ]
        options = [
            f"{key} {self.about[key]}"
            for key in ("attention", "optimizer", "dropout")
            if self.about.get(key)
        ]
        return f"{self.name} {self.mode} {self.dtype} ({', '.join(sizes + options)})".replace(
            " ()", ""
        )


@dataclasses.dataclass
class BlockRow:
    """One configuration of a pattern's kernel, or (`who` = eager, inductor) what it is compared
    with.
    """

    work: str
    who: str  # "kernel", "eager", "inductor"
    block: int | None
    warps: int | None
    kernel: Spread | None
    rate_bytes: float | None
    status: str = OK
    note: str = ""
    chosen: bool = False  # what the pattern's launcher takes


@dataclasses.dataclass
class CompareRow:
    """One piece of work in two revisions. `ratio` is new / base of the median kernel times, [low,
    high] its bounds; `verdict`: "slower", "faster", "same", "new" (the base lacks it), "failed" or
    "base failed" (note).
    """

    work: str
    verdict: str
    base: Spread | None = None
    new: Spread | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


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
    # in a checkout beside an installed copy, say: nothing would be fused, and nobody would know why
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
