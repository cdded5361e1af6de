"""Are the convolutions of a graph faster channels-last, where Inductor would leave its images
contiguous? In training it does so by rules about the sizes of the weights, whatever the GPU; cuDNN
then lays out the images for each convolution of 16 bits, and its results back. Here every
convolution is timed in both layouts, forward and backward, without being compiled.
"""

from __future__ import annotations

import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable

import torch

from fusion_backend.compat.torch import aten
from fusion_backend.measure.allowance import ALLOWANCE
from fusion_backend.measure.contest import NotMeasurable, finished, set_apart
from fusion_backend.measure.gpu import alone
from fusion_backend.measure.judge import LATE, Judge, known_answer
from fusion_backend.measure.key import digest, gpu_name, machine, region_digest
from fusion_backend.measure.measuring import keep, told
from fusion_backend.measure.store import Answer, answer_of
from fusion_backend.measure.timing import ROUNDS, Clock, Race
from fusion_backend.reporting.faults import described
from fusion_backend.reporting.report import warn_once
from fusion_backend.rewrite.image_work import Convolution, Copying, Work

NAME = "images channels-last"
WORTH = 0.1  # a gain of the convolutions of less is none: other kernels may be slower so
LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format


def asked(judge: Judge, device: torch.device) -> bool:
    """Is the layout of images a question? Only answers about a GPU are measured, or known."""
    return on_gpu(device) and judge.active


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def faster(work: Work, judge: Judge) -> bool:
    """Is a graph to be laid out channels-last? The record of the judge says why, or why not. If
    that fails, which is a fault of ours, it is not.
    """
    try:
        found = answer(work, judge)
    except Exception as error:
        judge.settled = False
        fault = f"images stay as Inductor lays them out: {described(error)}"
        judge.record.faults.append(fault)
        warn_once(f"fault {fault}", f"fusion: {fault}; please report this")
        return False
    if found is not None:
        judge.record.layout = sentence(found)
    return found is not None and found.verdict == "faster"


def sentence(found: Answer) -> str:
    """The answer as a line of the report."""
    if not found.verdict:
        return f"contiguous, as Inductor leaves them: {found.why}"
    chosen = "channels-last" if found.verdict == "faster" else "contiguous, as Inductor leaves them"
    times = f"{found.ours_ms:.3f} ms channels-last and {found.plain_ms:.3f} ms contiguous"
    return f"{chosen}: their convolutions take {times}, {found.when}"


def answer(work: Work, judge: Judge) -> Answer | None:
    """The stored answer, that of another rank, or else what this process measures."""
    lines = [f"conv2d {tuple(kind)} {count}" for kind, count in work.convolutions.items()]
    lines += [f"copy {tuple(kind)} {count}" for kind, count in work.copies.items()]
    text = "\n".join([f"a gain of {WORTH}", *sorted(lines)])
    key = digest(text, [], gpu_name(work.device))
    unknown = functools.partial(unanswered, key, text, work.device)

    def own() -> Answer | None:
        found = known_answer(key, judge.options)
        return measured(work, judge, unknown) if found is None and judge.measures else found

    if judge.ranks is None or judge.ranks.store is None or key is None:
        found = own()
    else:
        late = unknown(LATE).to_json()
        mine = lambda: (own() or unknown("")).to_json()  # noqa: E731
        found = answer_of(json.loads(judge.ranks.told(key, mine, late, judge.patience)))
        if found.why == LATE:
            judge.patience = 0.0
        if found.kept:
            keep(found)
    if key is not None:
        judge.asked[key] = known_answer(key, judge.options)
    return found


def unanswered(key: str | None, text: str, device: torch.device, why: str) -> Answer:
    about = {**machine(gpu_name(device)), "operators": {}, "training": True, "code": {}}
    about["region"] = region_digest(text)
    date = datetime.date.today().isoformat()
    return Answer(key or "", (NAME,), ("",), why=why, date=date, about=about)


def measured(work: Work, judge: Judge, unknown: Callable[[str], Answer]) -> Answer:
    """The answer for these convolutions; kept in the store where it is certain."""
    started, left = time.perf_counter(), ALLOWANCE.left(judge.options)
    if left <= 0:
        judge.settled = False
        up = f"the {judge.options.measure_s:g} s of fusion.measure_s are used up"
        return unknown(f"not measured, {up}")
    try:
        with set_apart(work.device), alone(work.device, left):
            found = answer_from(raced(work, Clock(work.device), started + left), unknown)
    except Exception as error:
        why = str(error) if isinstance(error, NotMeasurable) else described(error)
        found = unknown(f"it could not be measured: {why}")
    finally:
        took = time.perf_counter() - started
        ALLOWANCE.spend(took)
        judge.record.measure_s += took
    judge.settled &= found.kept
    if found.kept and found.key:
        keep(found)
    return found


def answer_from(race: Race, unknown: Callable[[str], Answer]) -> Answer:
    low, high = race.interval
    verdict = told(race)
    why = "" if verdict else f"their times vary too much, {low:.2f} to {high:.2f} times as fast"
    about = unknown(why)
    return Answer(
        about.key,
        about.sites,
        ("channels-last" if verdict == "faster" else "",),
        statistics.median(race.plain),
        statistics.median(race.ours),
        race.ratio,
        low,
        high,
        verdict,
        why=why,
        date=about.date,
        about=about.about,
    )


def raced(work: Work, clock: Callable, until: float) -> Race:
    """The times of all convolutions, contiguous against channels-last with the copies that these
    need. One convolution after another is timed, so that the memory for one of them suffices.
    """
    rounds = [[0.0, 0.0] for _ in range(ROUNDS[0])]
    for kind, count in work.convolutions.items():
        calls = [of_convolution(kind, work.device, layout) for layout in (CONTIGUOUS, LAST)]
        for call in calls:
            call()  # cuDNN chooses its kernels
        finished(work.device)
        for i, total in enumerate(rounds):
            for side in (0, 1) if i % 2 else (1, 0):
                total[side] += count * clock(calls[side])
        del call, calls  # before the next ones are made
        if time.perf_counter() > until:
            raise NotMeasurable("the time to measure it was up")
    for kind, count in work.copies.items():
        call = of_copy(kind, work.device)
        for total in rounds:
            total[1] += count * clock(call)
    found = Race(WORTH)
    for plain, ours in rounds:
        found.add(plain, ours)
    return found


def of_copy(kind: Copying, device: torch.device) -> Callable[[], None]:
    how = dict(dtype=kind.dtype, device=device)
    source = torch.empty_strided(kind.sizes, kind.before, **how).zero_()
    target = torch.empty_strided(kind.sizes, kind.after, **how)
    return lambda: target.copy_(source)


def of_convolution(kind: Convolution, device: torch.device, layout: torch.memory_format):
    """A call of a convolution, and of its gradients as far as they are needed. The weights and
    their gradients are contiguous, as the model has them, and are laid out in each call.
    """

    def made(sizes: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randn(sizes, dtype=kind.dtype, device=device)
        return numbers.contiguous(memory_format=layout) if len(sizes) == 4 else numbers

    x, weight = made(kind.x), made(kind.weight).contiguous()
    transposed, groups = kind.how[3], kind.how[5]
    channels = kind.weight[1] * groups if transposed else kind.weight[0]
    bias = made((channels,)) if kind.bias else None
    how = [list(a) if isinstance(a, tuple) else a for a in kind.how]

    def forward(w: torch.Tensor) -> torch.Tensor:
        return aten.convolution(x, w, bias, *how)

    with torch.no_grad():
        dy = made(tuple(forward(weight).shape))

    def call() -> None:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            w = weight.contiguous(memory_format=layout)
            forward(w)
            if any(kind.needs):
                sizes = [channels] if kind.bias else None
                _, dw, _ = aten.convolution_backward(dy, x, w, sizes, *how, [*kind.needs])
                if dw is not None:
                    dw.contiguous()

    return call
