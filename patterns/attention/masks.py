"""How much of an attention mask has to be in memory, by what its analysis says."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import same_sizes


class Visible(NamedTuple):
    """Which keys a query sees: those in a band low <= i - j <= high, and of a vector over the keys,
    or of the numbers of documents. What they are, and what becomes of the other scores, `keys_are`,
    `hidden` and `fill` say as `kernels.attention.masking.Masking` has it.
    """

    low: int | None = None
    high: int | None = None
    keys: fx.Node | None = None
    keys_are: str = "seen"
    hidden: str = "zero"
    fill: float | None = None


class Layout(NamedTuple):
    """What our kernel reads: `visible`, the name of a boolean mask that stays dense, and what is
    added to the scores, names of arguments or nodes. `taken`: finite numbers that count as -inf.
    """

    visible: Visible
    dense: str | None
    biases: list
    taken: list[float]

    def with_vector(self, masks: dict, tensors: dict, q, k) -> Layout | None:
        """The same with at most one bias. Where there are two, one of them is a vector over the
        keys, which `visible.keys` takes. None where neither is a vector without a gradient, or
        where `visible` has keys already.
        """
        if len(self.biases) < 2:
            return self
        for bias in self.biases:
            keys = tensors[bias] if isinstance(bias, str) else bias
            value = bias.meta["val"] if isinstance(bias, fx.Node) else keys
            trained = any(m.trained for n, m in masks.items() if bias is m.added or bias == n)
            fits = value.dim() > 0 and broadcasts(value, (*q.shape[:-3], 1, 1, k.shape[-2]))
            if fits and not trained and self.visible.keys is None:
                visible = self.visible._replace(keys=keys, keys_are="added")
                return self._replace(visible=visible, biases=[b for b in self.biases if b != bias])
        return None


def broadcasts(t, full: tuple) -> bool:
    """Can it be added to scores of this shape, which stay as they are?"""
    return t.dim() <= len(full) and all(
        same_sizes((have,), (want,)) or same_sizes((have,), (1,))
        for have, want in zip(reversed(t.shape), reversed(full), strict=False)
    )


def joint(masks: dict):
    """What all masks keep; None without a mask, or where their bounds cannot be compared."""
    first, *rest = masks.values() or [None]
    return first.together(rest[0]) if rest else first


def layout_of(
    masks: dict, q, k, tensors: dict, fill: float | None, training: bool, sinks: bool
) -> Layout:
    """As little of the masks in memory as what is known of them allows. Beside a sink every row
    sees something.
    """
    masks = {n: m for n, m in masks.items() if not m.everything or m.added is not None}
    choices, dense = {n: m for n, m in masks.items() if m.choice}, None
    visible = visible_by(choices, q, k, tensors, fill, training, sinks)
    if visible is None:  # then an additive mask is added as it is
        choices = {n: m for n, m in choices.items() if n == "keep"}
        visible = visible_by(choices, q, k, tensors, fill, training, sinks)
    if visible is None:
        keep, dense = choices["keep"], "keep"
        visible = Visible(keep.low, keep.high, None, "seen", *hiding(fill))
    biases = [n for n in masks if n not in choices]
    biases += [m.added for m in choices.values() if m.added is not None]
    taken = [number for m in choices.values() for number in m.taken]
    if "keep" in choices and fill is not None:
        taken.append(fill)
    return Layout(visible, dense, biases, taken)


def approximated(taken) -> str:
    """Which finite numbers count as -inf, those of additive masks and the fill of a choice."""
    numbers = sorted({number for number in taken if number > -math.inf})
    texts = " and ".join(f"{number:g}" for number in numbers)
    return f"; {texts} taken for -inf" if numbers else ""


def visible_by(
    masks: dict, q, k, tensors: dict, fill: float | None, training: bool, sinks: bool
) -> Visible | None:
    """What all masks keep; None where a band and a vector do not tell, nor what becomes of a row
    that sees nothing.
    """
    found = joint(masks)
    if not masks or found is None:
        return None if masks else Visible()
    hides = "keep" not in masks or fill is None or found.hides(fill, q.dtype)
    all_see = sinks or every_row_sees(found, q.shape[-2], k.shape[-2])
    if hides and not found.parts and all_see:
        return Visible(found.low, found.high)
    keys, each = None, False  # may the first dimension of a vector be the batch?
    if found.parts:
        name = next(name for name, mask in masks.items() if mask.parts)
        each = tensors[name].dim() == 4 and same_sizes(tensors[name].shape[:1], k.shape[:1])
    if hides and (numbers := documents_of(found, q, k, each)) is not None:
        return Visible(found.low, found.high, numbers, "documents")
    if found.parts:
        keys = found.parts[0].vector(k.shape[0]) if each and len(found.parts) == 1 else None
        if keys is None:
            return None
    if hides and sinks:
        how = hiding(None)
    elif "keep" in masks:
        how = hiding(fill) if len(masks) == 1 else None
    else:
        # A number beside which every score is lost: all keys of such a row weigh the same, and
        # keep their gradient. A key that two masks hide would weigh less than one that one hides.
        number, *others = [mask.fill for mask in masks.values()]
        lost = not others and number is not None and -math.inf < number <= -1e30 and not training
        how = ("fill", number) if lost else None
    return None if how is None else Visible(found.low, found.high, *(keys or (None, "seen")), *how)


def documents_of(found, q, k, each: bool) -> fx.Node | None:
    """The numbers of documents that alone, besides a band, say what a query sees: at least its own
    place. None where there is anything else. each: may batches have numbers of their own? The first
    dimension of a mask of three is that of the heads.
    """
    square = same_sizes(q.shape[-2:-1], k.shape[-2:-1])
    low, high = found.low, found.high
    sees_itself = (low is None or statically_known_true(low <= 0)) and (
        high is None or statically_known_true(high >= 0)
    )
    if len(found.parts) != 1 or not square or not sees_itself or q.dim() != 4:
        return None
    return found.parts[0].numbers(k.shape[0] if each else None, k.shape[-2])


def hiding(fill: float | None) -> tuple[str, float | None]:
    return (
        ("zero", None) if fill is None else ("nan", None) if fill == -math.inf else ("fill", fill)
    )


def every_row_sees(found, n, m) -> bool:
    """Has every query a key in the band?"""
    low, high = found.low, found.high
    first = low is None or statically_known_true(low <= 0)
    last = high is None or statically_known_true(n - 1 - high < m)
    return first and last and (low is None or high is None or statically_known_true(low <= high))
