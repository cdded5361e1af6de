"""Spellings and near misses of a pattern, generated: Python source that computes what the reference
computes, and source that computes nearly that.

The reference is traced into ATen, and each operator is written back by a wording drawn at random
(wordings.py, shapes.py, composites.py). Between them stand no-ops (disguises.py), around them the
frames in which users put code: an inner function, a checkpoint, autocast on or off, a module, a
float32 island in bf16 code. recall.py checks what is generated.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import random
from collections.abc import Callable, Iterator

import torch

from fusion_backend.match.templates import forms, templates
from fusion_backend.ops.pattern import Pattern
from fusion_backend.testing.spelling.changes import CHANGES
from fusion_backend.testing.spelling.composite_changes import COMPOSITE_CHANGES
from fusion_backend.testing.spelling.traced_form import TracedForm
from fusion_backend.testing.spelling.writer import SourceWriter

NUMBERS = itertools.count()


@dataclasses.dataclass
class Spelling:
    """A way of writing a pattern, or a near miss of it. `fn(*tensors)` takes its tensors; its
    numbers stand in the source.
    """

    pattern: Pattern
    kinds: tuple[str, ...]
    source: str
    words: tuple[str, ...]  # the wordings, disguises and frames that it is made of
    arguments: list  # of the reference
    fn: Callable = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        file = f"<spelling {next(NUMBERS)} of {self.pattern.name}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        space: dict = {}
        exec(compile(self.source, file, "exec"), space)
        self.fn = space["fn"]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [a for a in self.arguments if isinstance(a, torch.Tensor)]

    def reference(self, *tensors):
        """The reference on these tensors and the numbers of this spelling."""
        rest = iter(tensors)
        return self.pattern.reference(
            *(next(rest) if isinstance(a, torch.Tensor) else a for a in self.arguments)
        )


def spellings(pattern: Pattern, kinds=None, count: int = 40, seed: int = 0) -> list[Spelling]:
    """Up to `count` different functions that compute the pattern.

    kinds: one form of the arguments, such as ("tensor", "none"); by default all forms in turn.
    seed: the same seed gives the same sources.

    Each result has the function `fn`, its `source`, its `tensors`, and `words`: the wordings that
    it is made of. Raises PatternError where the reference cannot be traced.

        print(spellings(rms_norm, count=3)[0].source)
    """
    return list(itertools.islice(generate(pattern, kinds, count, seed, None), count))


def near_misses(pattern: Pattern, kinds=None, count: int = 40, seed: int = 0) -> list[Spelling]:
    """Up to `count` different functions that look like the pattern and compute something else, or
    return more than it does. Arguments, result and errors are those of `spellings`.

    One operator is replaced by another, an axis, constant or operand changed, or an interior value
    also returned or overwritten; `words[0]` says which. Not every change alters what the pattern
    computes: compare with `reference(*tensors)`, as `recall` does.

        print(near_misses(rms_norm)[0].words[0])
    """
    changes = CHANGES | COMPOSITE_CHANGES
    return list(itertools.islice(generate(pattern, kinds, count, seed, changes), count))


def generate(pattern: Pattern, kinds, count: int, seed: int, changes) -> Iterator[Spelling]:
    """Different functions, in all forms that have a template in turn; 20 attempts for each."""
    traceable = {t.kinds for t in templates(pattern)}
    wanted = [k for k in forms(pattern) if k in traceable and kinds in (None, k)]
    traced = {k: TracedForm(pattern, k) for k in wanted}
    draw, seen = random.Random(f"{pattern.name} {seed}"), set()
    for attempt in range(20 * count):
        form = traced[wanted[attempt % len(wanted)]]
        function = SourceWriter(form, draw, changes).write()
        if function is not None and function.source not in seen:
            seen.add(function.source)
            yield Spelling(pattern, form.kinds, *function)
