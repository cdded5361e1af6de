"""One region compiled twice, by plain Inductor and with sites replaced, and timed in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from itertools import starmap

import torch
from torch import fx

from fusion_backend.capture.sizes import nbytes
from fusion_backend.compat.apart import begun_apart, without_compiled_autograd
from fusion_backend.decide.gate import Decision
from fusion_backend.measure.agreement import Value, disagreement
from fusion_backend.measure.cut import Cut
from fusion_backend.measure.derived import passed_on
from fusion_backend.measure.gpu import alone
from fusion_backend.measure.inputs import made_up
from fusion_backend.measure.region import convolution, copies_nothing
from fusion_backend.measure.timing import WORTH, Clock, Race, race

TIMING_S = 2.0  # seconds for a race, or as long as compiling took if that was longer
# The least gain that counts beside a convolution where not all images are channels-last: the inputs
# of a region are laid out as in the original graph, and Inductor copies them to channels-last; in
# the whole graph they may be so already.
WORTH_OF_LAYOUT = 0.05
# The least gain that counts beside a product whose bias Inductor adds: it adds the bias in place,
# and the next product finds more in L2. In benchmarks.foreign a batch norm that gained with its
# product lost in its graph (gin_layer).
WORTH_OF_BIAS = 0.1
# cuDNN rounds the operands of a convolution in fp32 to TF32, if that is on.
EPS_OF_TF32 = 2.0**-10


class NotMeasurable(Exception):
    """A region or a variant of it cannot be measured; the text says why."""


class ResultsDiffer(NotMeasurable):
    """A variant of a region computes something else."""


@dataclasses.dataclass
class Run:
    """A compiled region on its inputs. `saved`: the bytes that it keeps from forward to backward,
    its results among them.
    """

    call: Callable[[], object]
    values: list[Value]
    saved: int


class Contest:
    """Plain Inductor's code of a region against others, on the same inputs. At first that code is
    only generated, and Inductor's workers compile its kernels; `start` waits for them.

    first: the sites that will be replaced first. If they can be compiled by `until`, the code with
    them is generated, too. beside: a cut whose contest takes place at the same time.
    """

    def __init__(
        self,
        cut: Cut,
        first: list[Decision] | None = None,
        until: float = math.inf,
        beside: Cut | None = None,
    ):
        self.cut, self.device = cut, cut.device
        check_memory(self.device, cut, *([beside] if beside else []))
        self.inputs = made_up(cut, self.device)
        self.tangents: list[torch.Tensor] | None = None
        self.ahead: tuple[list[Decision], Callable[[], Callable], float] | None = None
        started = time.perf_counter()
        self.plain_code = self.begun([])
        self.compile_s = time.perf_counter() - started
        if first is not None and until - time.perf_counter() > self.compile_s:
            self.begin(first)

    def start(self) -> None:
        """Wait for the kernels of the plain code, and run it."""
        cut = self.cut
        # tensors that the graph computes before the region: they are in L2, as far as they fit
        made, order = dict(zip(cut.inputs, self.inputs, strict=True)), cut.facts.order
        last = max(order[r] for d in cut.region.sites for r in d.match.roots)
        before = sorted((n for n in made if order[n] < last and computed(n)), key=order.get)
        recent = [made[n] for n in before if made[n].is_floating_point()]
        self.clock = Clock(self.device, recent)
        convolutions = [n for n in cut.region.nodes if convolution(n)]
        self.convolves = bool(convolutions)
        in_format = copies_nothing(convolutions, cut.inputs)
        layout = WORTH_OF_LAYOUT * (self.convolves and not in_format)
        bias = WORTH_OF_BIAS * bool(cut.region.biases)
        self.worth = max(WORTH, layout, bias)
        started = time.perf_counter()
        self.plain = self.finished(self.plain_code)
        self.compile_s += time.perf_counter() - started
        # our random numbers differ from Inductor's, which themselves differ from run to run
        again = self.named(self.plain.call())
        self.random = bool(self.different(again))

    def begun(self, chosen: list[Decision]) -> Callable[[], Callable]:
        """The region with these sites replaced, as code; its kernels are being compiled."""
        with torch.set_grad_enabled(bool(self.cut.grads)):
            return begun_apart(self.cut.graph(chosen), self.inputs)

    def finished(self, begun: Callable[[], Callable]) -> Run:
        """A compiled region, which has run once."""
        with torch.set_grad_enabled(bool(self.cut.grads)):
            return self.run(begun())

    def begin(self, chosen: list[Decision]) -> None:
        """Generate the code that `compiled` will be asked for. If that fails, `compiled` will."""
        started = time.perf_counter()
        with contextlib.suppress(Exception):
            begun = self.begun(chosen)
            self.ahead = chosen, begun, time.perf_counter() - started

    def generated(self, chosen: list[Decision]) -> bool:
        """Is there code of the region with these sites replaced already?"""
        return self.ahead is not None and self.ahead[0] is chosen

    def compiled(self, chosen: list[Decision]) -> tuple[Run, float]:
        """The region with these sites replaced, compiled and run once, and the seconds that its
        compilation took.
        """
        ahead = self.ahead if self.generated(chosen) else None
        self.ahead, started = None, time.perf_counter()
        _, begun, before = ahead or (chosen, self.begun(chosen), 0.0)
        run = self.finished(begun)
        return run, before + time.perf_counter() - started

    def run(self, fn: Callable) -> Run:
        grads = self.cut.grads
        wanted = [t for a, t in zip(self.cut.inputs, self.inputs, strict=True) if a in grads]

        def step() -> list:
            with torch.set_grad_enabled(bool(wanted)):
                results = [*fn(*self.inputs)]
            return results + self.gradients(results, wanted)

        before = memory(self.device)
        with torch.set_grad_enabled(bool(wanted)):
            results = [*fn(*self.inputs)]
        saved = memory(self.device) - before
        values = results + self.gradients(results, wanted)
        finished(self.device)
        return Run(step, self.named(values), saved)

    def named(self, values: list) -> list[Value]:
        count = len(self.cut.outputs) + len(self.cut.rows) + len(self.cut.operands)
        results, gradients = values[:count], values[count:]
        if gradients:
            gradients = passed_on(self.cut, self.inputs, gradients)
        named = [(f"result {i}", v) for i, v in enumerate(results)]
        named += [(f"gradient {i}", v) for i, v in enumerate(gradients)]
        return [Value(name, None if v is None else v.detach()) for name, v in named]

    def different(self, ours: list[Value]) -> str:
        """How values differ from plain Inductor's by more than rounding; "" if they do not. If one
        is not finite, the made-up inputs may be the cause.
        """
        pairs = zip(ours, self.plain.values, strict=True)
        compared = [(a, b) for a, b in pairs if a.value is None or a.value.is_floating_point()]
        mine, theirs = zip(*starmap(finite, compared), strict=True) if compared else ((), ())
        dtypes = {v.value.dtype for v in theirs if v.value is not None}
        dtypes |= {t.dtype for t in self.inputs if t.is_floating_point()}
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        if self.convolves and torch.backends.cudnn.conv.fp32_precision == "tf32":
            eps = max(eps, EPS_OF_TF32)
        return disagreement([*mine], [*theirs], self.eager, eps)

    def eager(self) -> list[Value]:
        """The values of the region, computed operator by operator."""
        values = self.run(self.cut.graph([])).values
        pairs = zip(values, self.plain.values, strict=True)
        return [finite(a, b)[0] for a, b in pairs if a.value is None or a.value.is_floating_point()]

    def gradients(self, results: list, wanted: list) -> list:
        outs = [r for r in results if r.requires_grad]
        if not wanted or not outs:
            return []
        if self.tangents is None:
            self.tangents = [torch.randn_like(r) for r in outs]
        return [*torch.autograd.grad(outs, wanted, self.tangents, allow_unused=True)]

    def against(self, chosen: list[Decision], seconds: float) -> tuple[Race, int]:
        """The race between plain Inductor and the region with these sites replaced, and how many
        bytes more the replacement keeps for backward. Raises ResultsDiffer if the results differ.
        """
        ours, compile_s = self.compiled(chosen)
        longest = max(TIMING_S, compile_s)
        if not self.random and (wrong := self.different(ours.values)):
            raise ResultsDiffer(f"its results are not those of Inductor here: {wrong}")
        until = time.perf_counter() + seconds
        with alone(self.device, seconds):
            left = min(until - time.perf_counter(), longest)
            found = race(self.plain.call, ours.call, self.clock, left, self.worth, decided)
        return found, ours.saved - self.plain.saved


@contextlib.contextmanager
def contest(
    cut: Cut,
    first: list[Decision] | None = None,
    until: float = math.inf,
    begun: Contest | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[Contest]:
    """A contest, after which memory and random numbers are as they were.

    begun: the same contest, if its code has been generated already. meanwhile: what can be done
    while Inductor's workers compile.
    """
    held = begun
    with set_apart(cut.device):
        try:
            held = held or Contest(cut, first, until)
            meanwhile()
            held.start()
            yield held
        finally:
            if held is not None:
                held.__dict__.clear()  # no reference to the contest keeps its tensors


@contextlib.contextmanager
def set_apart(device: torch.device) -> Iterator[None]:
    """Inside, code is run to be timed. Afterwards memory, random numbers and modes are as they were
    before. Raises NotMeasurable where that is not possible or memory does not suffice.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise NotMeasurable("a CUDA graph is being captured")
    # events are recorded on the current GPU, which need not be the region's
    here = torch.cuda.device(device) if on_gpu else contextlib.nullcontext()
    drawn = torch.random.fork_rng(devices=[device] if on_gpu else [])
    usual = torch.inference_mode(False), torch.enable_grad(), without_compiled_autograd()
    try:
        with contextlib.ExitStack() as inside:
            for mode in (here, drawn, *usual):
                inside.enter_context(mode)
            yield
    except torch.OutOfMemoryError as error:
        raise NotMeasurable("there is not enough memory to measure it") from error
    finally:
        if on_gpu:
            torch.cuda.empty_cache()


def decided(race: Race) -> bool:
    """Is it certain whether ours is faster? By how much it is slower makes no difference."""
    return bool(race.verdict) or race.no_faster


def check_memory(device: torch.device, *cuts: Cut) -> None:
    """Raise NotMeasurable unless regions with their gradients and intermediates fit in memory."""
    if device.type != "cuda":
        return
    values = [n.meta["val"] for cut in cuts for n in (*cut.inputs, *cut.region.nodes)]
    need = 2 * sum(nbytes(v) for v in values if isinstance(v, torch.Tensor))
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if need > free:
        raise NotMeasurable(
            f"it takes up to {need / 1e9:.1f} GB to measure, and {free / 1e9:.1f} are free"
        )


def computed(n: fx.Node) -> bool:
    return n.op == "call_function"


def memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def finished(device: torch.device, seconds: float = 10.0) -> None:
    """Wait for the GPU, but not for ever. Raises NotMeasurable."""
    if device.type != "cuda":
        return
    event, until = torch.cuda.Event(), time.perf_counter() + seconds
    event.record()
    while not event.query():
        if time.perf_counter() > until:
            raise NotMeasurable(f"it had not finished after {seconds:.0f} seconds")
        time.sleep(1e-4)


def finite(a: Value, b: Value) -> tuple[Value, Value]:
    """Both tensors, with zeros where one of them is not finite."""
    if a.value is None or b.value is None or a.value.shape != b.value.shape:
        return a, b
    both = a.value.isfinite() & b.value.isfinite()
    return tuple(Value(v.name, torch.where(both, v.value, 0.0)) for v in (a, b))
