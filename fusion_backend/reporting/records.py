"""What the backend did to one graph, as data: its sites, near misses, counts and times."""

from __future__ import annotations

import dataclasses

from fusion_backend.reporting.places import named, short

# Why a site is not fused.
COVERED = "covered"  # by a larger site that is fused
SWITCHED_OFF = "switched off"  # by an option, or by what Inductor is asked for
ILLEGAL = "illegal"  # the graph may not be changed there
UNSUPPORTED = "unsupported"  # the rule, or the guard of its op, refuses these inputs
UNPROFITABLE = "unprofitable"  # the gate: it was slower there, or has not been measured
NO_KERNEL = "no kernel"  # the pattern is recognised, and has no kernel yet
NO_GPU = "no GPU"
FAILED = "failed"  # an exception in our code or the pattern's
DROPPED = "dropped"  # by fusion.verify: its graph was slower than plain Inductor's, or wrong

# The providers of a fused site (what computes it), in words.
FORWARD = {
    "kernel": "forward kernel",
    "reference": "forward by Inductor",
    "library": "a call of PyTorch's own operator",
}
BACKWARD = {
    "kernel": "backward kernel",
    "formula": "backward formula, compiled by Inductor",
    "vjp": "backward by Inductor",
    "autograd": "backward by PyTorch",
}


def computed_by(forward: str, backward: str) -> str:
    """Providers in words; the backward only where there is one."""
    how = FORWARD.get(forward, f"forward: {forward}")
    if backward:
        how += f", {BACKWARD.get(backward, f'backward: {backward}')}"
    return how


@dataclasses.dataclass
class Site:
    """A part of a graph that a pattern matches, and the decision about it.

    pattern: its name. where: the user's file:line, or the module where the code is torch's own.
    fused, reason: the decision, and a sentence that gives its reason. forward, backward: the
    providers of a fused site, such as "kernel", "reference", "library", "formula" or "vjp".
    bytes_saved: the size of the values inside it, which eager writes to memory and reads again.
    nodes: names of the nodes in the view. covered: a larger site that is fused has these nodes, so
    that this one is not counted. module: the path of the module that computes it, "layers.0.norm1".
    cause: why it is not fused, one of the words at the top of fusion_backend/reporting/records.py.
    alternative: another site has some of these nodes and is counted instead. position: the place of
    its first result among the nodes of the view.

        print([site.reason for site in fusion_backend.report().sites if not site.fused])
    """

    pattern: str
    where: str
    fused: bool
    reason: str
    forward: str | None = None
    backward: str | None = None
    bytes_saved: int | None = None
    nodes: tuple[str, ...] = ()
    covered: bool = False
    module: str = ""
    cause: str | None = None
    alternative: bool = False
    position: int = 0

    @property
    def counted(self) -> bool:
        """Does the report count this site? No two counted sites share an operator."""
        return not self.covered and not self.alternative

    @property
    def by_module(self) -> bool:
        """Is `where` a module, because no line of the user's code is known?"""
        return self.where == named(self.module)

    @property
    def how(self) -> str:
        """What computes a fused site, and why."""
        how = computed_by(self.forward or "", self.backward or "")
        return how + (f" ({self.reason})" if self.reason else "")

    def __str__(self) -> str:
        told, rest = ("fused", self.how) if self.fused else ("not fused", self.reason)
        alone = not self.module or self.by_module
        where = self.where if alone else f"{self.module}, {self.where}"
        return short(f"{told:10} {self.pattern:14} {where}  {rest}")


@dataclasses.dataclass
class Miss:
    """A part of a graph that a pattern nearly matches: `matched` of its `size` operators. inside:
    another pattern is recognised there.
    """

    pattern: str
    where: str
    matched: int
    size: int
    reason: str
    module: str = ""
    inside: bool = False

    @property
    def how_far(self) -> str:
        return f"{self.matched} of {self.size} operators matched, then {self.reason}"

    def __str__(self) -> str:
        return short(f"near miss  {self.pattern:14} {self.where}  {self.how_far}")


@dataclasses.dataclass(frozen=True)
class RuleCount:
    """How often a rule was tried at a node of a graph, how often it matched, and the seconds that
    took.
    """

    tried: int = 0
    matched: int = 0
    seconds: float = 0.0

    def plus(self, other: RuleCount) -> RuleCount:
        seconds = self.seconds + other.seconds
        return RuleCount(self.tried + other.tried, self.matched + other.matched, seconds)


@dataclasses.dataclass(eq=False)  # two graphs may have equal records
class GraphRecord:
    """One Dynamo graph: the seconds that its passes took, its sites and near misses.

    measured: how many classes of regions were measured for it, which took measure_s seconds.
    training: it computes gradients. error: why the graph went to Inductor unchanged.
    backward_error: why its backward runs operator by operator. copied: each node that the view
    copies verbatim, and why. faults: exceptions in our rules and in patterns, each of which costs
    one site. operators: the names of its operators, with how many there are of each. broken: the
    user's file:line at which Dynamo ended the graph early, and the cause; None where it did not.
    verified: the result of `fusion.verify`, in words. in_memory: the values that Inductor writes to
    memory instead of computing them wherever they are read, each with its place; none where the
    code comes from AOTAutograd's cache. from_outside: the results whose gradient from outside is
    added only where there is one, each with its place. embeddings: those whose weight gets its
    gradient from a kernel of ours, each with its place. channels_last: its images are laid out so
    before AOTAutograd. lays_out: Inductor is told to lay them out so, because it would not. layout:
    which layout was chosen where Inductor would leave them contiguous, and why. remembered: an
    earlier process has decided the graph, and its passes did not run.
    """

    nodes: int
    capture_s: float = 0.0
    match_s: float = 0.0
    rewrite_s: float = 0.0
    measure_s: float = 0.0
    measured: int = 0
    error: str | None = None
    backward_error: str | None = None
    copied: dict[str, str] = dataclasses.field(default_factory=dict)
    sites: list[Site] = dataclasses.field(default_factory=list)
    misses: list[Miss] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    rules: dict[str, RuleCount] = dataclasses.field(default_factory=dict, repr=False)
    training: bool = False
    operators: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)
    broken: tuple[str, str] | None = None
    verified: str = ""
    in_memory: list[str] = dataclasses.field(default_factory=list)
    from_outside: list[str] = dataclasses.field(default_factory=list)
    embeddings: list[str] = dataclasses.field(default_factory=list)
    channels_last: bool = False
    lays_out: bool = False
    layout: str = ""
    remembered: bool = False

    def forget_rewrites(self) -> None:
        """Plain Inductor compiles the graph after all: what the rewrite did no longer holds."""
        self.in_memory, self.from_outside, self.embeddings = [], [], []
        self.channels_last, self.lays_out, self.layout = False, False, ""

    def __repr__(self) -> str:
        fused, counted = sum(s.fused for s in self.sites), sum(s.counted for s in self.sites)
        return f"<GraphRecord: {self.nodes} nodes, {fused} of {counted} sites fused>"

    def rules_table(self) -> str:
        """A line a rule: tried, matched, fused, milliseconds; the dearest first."""
        fused = [s.pattern for s in self.sites if s.fused]
        lines = ["rule                      tried  matched  fused       ms"]
        for name, c in sorted(self.rules.items(), key=lambda item: -item[1].seconds):
            row = f"{name:24} {c.tried:6} {c.matched:8} {fused.count(name):6}"
            lines.append(f"{row} {c.seconds * 1e3:8.2f}")
        return "\n".join(lines) + "\n"
