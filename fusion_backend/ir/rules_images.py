"""Rules of images that are resized or pooled: how, as one text."""

from __future__ import annotations

from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import rule
from fusion_backend.ir.schema_args import Call


@rule("aten::upsample_bilinear2d")
def bilinear(
    c: Builder, call: Call, input: Expr, align_corners: bool, scale_factors: list[float] | None
):
    """Where the sizes are known, the result's size and the corners are one text, which patterns
    capture. A scale factor alone says how far two pixels are apart, unless the corners are aligned:
    it must be the quotient of the sizes.
    """
    if input.shape is None or not all(
        isinstance(n, int) for n in (*input.shape[2:], *call.shape[2:])
    ):
        return None
    read, written = input.shape[2:], call.shape[2:]
    if scale_factors and not align_corners:
        apart = zip(scale_factors, read, written, strict=True)
        if any(1 / by != n / m for by, n, m in apart):
            return None
    text = ",".join(map(str, written)) + " align_corners" * align_corners
    return c.make("aten.interpolate.bilinear", (input, c.word(text)), None, call.shape)


@rule("aten::max_pool2d")
def max_pool(
    c: Builder,
    call: Call,
    self: Expr,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
):
    """A batch of images whose windows have no gaps; kernel, stride and padding are the text."""

    def pair(sizes: list[int]) -> tuple[int, ...]:
        return tuple(sizes) * (2 // len(sizes))

    if len(call.shape) != 4:
        return None
    kernel = pair(kernel_size)
    sizes = kernel, pair(stride) if stride else kernel, pair(padding)
    if not all(isinstance(n, int) for size in sizes for n in size) or {*dilation} != {1}:
        return None
    text = " ".join(",".join(map(str, size)) for size in sizes) + " ceil" * ceil_mode
    return c.make("aten.max_pool", (self, c.word(text)), None, call.shape)
