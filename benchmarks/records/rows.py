"""The rows of a run: what was measured of one piece of work, model or configuration.

Times are milliseconds, sizes bytes, rates bytes or operations per second.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

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
    """What one way to compute a piece of work did. Without `kernel` it has not been timed, and
    `note` says why.
    """

    name: str
    status: str = OK  # ok, wrong (its results are too far from fp64) or failed (it raised)
    note: str = ""
    verdict: str = ""  # against plain Inductor: faster, slower; "" within noise, or not comparable
    declined: str = ""  # why the gate left the site to Inductor; "" where it did not
    kernel: Spread | None = None  # device time of a call, L2 flushed before it
    call: Spread | None = None  # wall time of a call, host included
    # the work's counted bytes and operations over the median kernel time, ...
    rate_bytes: float | None = None
    rate_flops: float | None = None
    # ... and these as fractions of the copy bandwidth and the bf16 matrix rate of the same run
    of_copy: float | None = None
    of_matrix: float | None = None
    errors: Errors | None = None
    peak_bytes: int | None = None  # the most a step allocates beyond its arguments (CUDA)
    # kept from forward to backward in training, arguments included, each storage once
    saved_bytes: int | None = None
    compile_s: float | None = None  # of the first call
    # what fusion reports: pattern, fused, reason, forward, backward
    sites: list[dict] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Row:
    """One piece of work under all contenders: "eager", "inductor", "max-autotune", "fusion" with
    its default gate, "fusion-always", and "inductor-again", the twin that shows the noise.
    """

    name: str
    pattern: str
    case: dict[str, int]
    dtype: str  # f32, bf16, f16
    train: bool
    linear: bool
    bytes: int
    flops: int
    intensity: float  # flops / bytes
    # the larger of bytes over the copy bandwidth and flops over the matrix rate, both of this run
    floor_ms: float
    contenders: list[Contender]
    noise: float | None = None  # |a - b| / b of the medians of plain Inductor and its twin
    note: str = ""  # what is missing from the whole row, and why

    def of(self, name: str) -> Contender | None:
        return next((c for c in self.contenders if c.name == name), None)

    def instead(self) -> list[str]:
        """Patterns that the default gate took where it left the row's own: users get their kernels,
        not Inductor's.
        """
        mine = self.of("fusion")
        if not mine or not mine.declined:
            return []
        return sorted({site["pattern"] for site in mine.sites if site["fused"]})

    def ratio(self, name: str, to: str = "inductor") -> float | None:
        """How often faster `name` is than `to`, by median kernel time."""
        mine, other = self.of(name), self.of(to)
        if not (mine and other and mine.kernel and other.kernel):
            return None
        return other.kernel.median / mine.kernel.median


@dataclasses.dataclass
class ModelContender:
    """What one way to run a model did. Without `step` it has not been timed; `note` says why."""

    name: str
    status: str = OK  # ok, wrong (its error is far above eager's) or failed (it raised)
    note: str = ""
    verdict: str = ""  # against plain Inductor: faster, slower; "" within noise, or not comparable
    step: Spread | None = None  # wall time
    # of the kernels of a step (CPU: of torch's operators), by torch.profiler
    device_ms: float | None = None
    # the first step less a later one, with an empty cache and with a filled one
    cold_s: float | None = None
    warm_s: float | None = None
    colds_s: list[float] = dataclasses.field(default_factory=list)  # cold_s is the median of these
    # what the gate measured, "cold" and "warm": classes of regions, and the seconds it took
    measured: dict[str, list] = dataclasses.field(default_factory=dict)
    peak_bytes: int | None = None  # the most a step allocates beyond weights and inputs (CUDA)
    # |got - exact| / |exact| in Euclidean norms, all tensors together
    output_error: float | None = None
    gradient_error: float | None = None
    shares: dict[str, float] = dataclasses.field(default_factory=dict)  # of device_ms, by class
    # the longest: name, kind, calls and ms in a step
    kernels: list[dict] = dataclasses.field(default_factory=list)
    fused: dict[str, int] = dataclasses.field(default_factory=dict)  # sites by pattern
    # the sites left to Inductor: pattern, reason and count
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
