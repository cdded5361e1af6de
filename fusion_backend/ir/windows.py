"""Masks of the windows of an image, `[w, n, m]`, added to scores `[b, h, n, m]` as Swin has it:
batch i has the mask of i modulo w. Either the scores have five dimensions meanwhile,
`[b / w, w, h, n, m]`, or the masks are repeated for each image.

Such masks are one operator over `[w, n, m]`, with the shape that they have in the graph.
"""

from __future__ import annotations

from fusion_backend.capture.sizes import hashable, same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, peel
from fusion_backend.ir.scores import scaled


def repeated_windows(c: Builder, x: Expr, shape: tuple) -> Expr | None:
    """The masks of windows where they are expanded to `[b / w, w, 1 or h, n, m]` and seen with four
    dimensions.
    """
    if x.op != "expand" or (len(x.shape), len(shape)) != (5, 4) or not same(x.shape[2:], shape[1:]):
        return None
    windows = masks_of_windows(x.args[0], x.shape)
    return windows and of_window(c, windows, shape)


def of_window(c: Builder, windows: Expr, shape: tuple) -> Expr:
    return c.make("of_window", (windows,), hashable(shape), shape)


def masks_of_windows(e: Expr, shape: tuple) -> Expr | None:
    """The masks `[w, n, m]` of which e is the view `[1, w, 1, n, m]` or `[w, 1, n, m]`, which
    broadcasts to the shape; None if e is no such view.
    """
    alone, seen_as = (shape[1], *shape[3:]), e.shape or ()
    seen_as = (1, *seen_as) if len(seen_as) == 4 else seen_as
    if not same(seen_as, (1, alone[0], 1, *alone[1:])):
        return None
    while e.op in ("unsqueeze", "view") and not same(e.shape, alone):
        e = e.args[0]
    return e if same(e.shape or (), alone) else None


def added_windows(c: Builder, x: Expr, shape: tuple) -> Expr | None:
    """Scores that are seen as `[b / w, w, h, n, m]`, get the masks of windows, perhaps go through
    softmax, and are seen with four dimensions again: the same without the five. The masks may be
    added more than once: transformers' Swin V2 adds them twice.
    """
    e = peel(x)
    weights, e = (e, peel(e.args[0])) if e.op == "softmax" and e.attr == -1 else (None, e)
    if e.op != "add" or None in (e.shape, shape) or (len(e.shape), len(shape)) != (5, 4):
        return None
    if not same(e.shape[2:], shape[1:]):  # it is not the batch that is seen as two dimensions
        return None
    found = []
    while e.op == "add":
        seen, windows = without_masks(e)
        found.append(windows)
        e = peel(seen)
        if windows is None or windows is not found[0]:
            return None
    if e.op != "view" or not same(e.args[0].shape or (), shape):
        return None
    windows = found[0]
    if len(found) > 1:
        windows = c.make("times", (windows,), len(found), windows.shape)
    added = c.add(e.args[0], of_window(c, windows, shape), shape)
    return c.make("softmax", (scaled(c, added),), -1, shape) if weights else added


def without_masks(e: Expr) -> tuple[Expr, Expr | None]:
    """Of a sum of five dimensions: the other term, and the masks of windows, None if there are
    none.
    """
    for seen, mask in (e.args, e.args[::-1]):
        windows = masks_of_windows(mask, e.shape)
        if windows is not None:
            return seen, windows
    return e, None
