"""What a run of `benchmarks.models` keeps: a row a model and mode, in it what each contender did; and how it is shown.

for row in rows(Run.load(path)): row.of("fusion").step.median
"""

from __future__ import annotations

import dataclasses

from benchmarks.results import FAILED, OK, Run, Spread


@dataclasses.dataclass
class ModelContender:
    """One way to run the model. Without `step` it has not been timed; `note` says why.

    status    ok, wrong (its error is far above eager's) or failed (it raised)
    verdict   against plain Inductor: "faster", "slower", "" within noise (or not comparable)
    step      wall time of a step;   device_ms  time of its kernels (CPU: of torch's operators), by torch.profiler
    cold_s, warm_s  seconds to compile: the first step less a later one, with an empty cache and with a filled one
    peak_bytes      the most a step allocates beyond weights and inputs (CUDA)
    output_error, gradient_error   |got - exact| / |exact| in Euclidean norms, all tensors together
    shares    part of device_ms by class of kernel;   kernels  the longest: name, kind, calls and ms a step
    fused     sites by pattern;   declined  pattern, reason and count of the sites left to Inductor
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
    """`about` has the sizes, attention, gate, optimizer and number of parameters; `exact` is the dtype that errors are
    against; `noise` how much the medians of a contender and of the same code timed again (`twin`) differ."""

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
        return other.step.median / mine.step.median if mine and other and mine.step and other.step else None

    @property
    def title(self) -> str:
        sizes = [f"{key} {self.about[key]}" for key in ("layers", "width", "batch", "seq") if key in self.about]
        options = [f"{key} {self.about[key]}" for key in ("attention", "optimizer") if self.about.get(key)]
        return f"{self.name} {self.mode} {self.dtype} ({', '.join(sizes + options)})".replace(" ()", "")


def rows(run: Run) -> list[ModelRow]:
    """The rows of a run of kind "models"."""
    found = []
    for row in run.rows:
        row = dict(row if isinstance(row, dict) else dataclasses.asdict(row))
        contenders = []
        for one in row.pop("contenders"):
            step = one.get("step")
            contenders.append(ModelContender(**one | {"step": Spread(**step) if step else None}))
        found.append(ModelRow(**row, contenders=contenders))
    return found


HEADS = ("contender", "ms", "IQR", "ratio", "kernels", "peak GB", "cold s", "warm s", "err out", "err grad")


def cells(row: ModelRow, one: ModelContender) -> list[str]:
    """A line of the table: a contender; "-" is what does not apply or was not measured."""

    def show(value, form):
        return "-" if value is None else format(value, form)

    step, peak = one.step, one.peak_bytes
    mark = {"faster": "+", "slower": "-"}.get(one.verdict, " " if step else "")
    return [
        one.name,
        show(step and step.median, ".3f"),
        show(step and step.iqr, ".3f"),
        show(row.ratio(one.name), ".2f") + mark,
        show(one.device_ms, ".3f"),
        show(peak and peak / 1e9, ".2f"),
        show(one.cold_s, ".1f"),
        show(one.warm_s, ".1f"),
        show(one.output_error, ".1e"),
        show(one.gradient_error, ".1e"),
    ]


def text(row: ModelRow) -> str:
    """The row as a table with its sites and shares."""
    lines = [row.title]
    lines.append(f"  {HEADS[0]:18}" + "".join(f"{head:>10}" for head in HEADS[1:]))
    for one in row.contenders:
        first, *rest = cells(row, one)
        why = "" if one.status == OK else f"  {one.status.upper()}: {one.note}"
        lines.append(f"  {first:18}" + ("" if one.status == FAILED else "".join(f"{c:>10}" for c in rest)) + why)
    if row.noise is not None:
        legend = "ratio: plain Inductor's time / this one's, + and - beyond noise"
        lines.append(f"  noise {row.noise:.1%} ({row.twin} timed twice); {legend}")
    lines += [f"  {note}" for note in row.notes]
    lines += sites(row.of("fusion"))
    kinds = list(dict.fromkeys(kind for one in row.contenders for kind in one.shares))
    if kinds:
        lines.append(f"  {'share of kernels':18}" + "".join(f"{kind:>{max(10, len(kind) + 2)}}" for kind in kinds))
    for one in (c for c in row.contenders if c.shares):
        parts = "".join(f"{one.shares.get(kind, 0):>{max(10, len(kind) + 2)}.1%}" for kind in kinds)
        lines.append(f"  {one.name:18}{parts}")
    return "\n".join(lines)


def sites(one: ModelContender | None) -> list[str]:
    """What fusion did, in lines."""
    if one is None or one.status == FAILED:
        return []
    fused = ", ".join(f"{n} {pattern}" for pattern, n in sorted(one.fused.items())) or "nothing"
    return [f"  fused: {fused}"] + [f"  not fused: {d['count']} {d['pattern']}: {d['reason']}" for d in one.declined]
