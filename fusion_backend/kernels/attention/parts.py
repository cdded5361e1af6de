"""How programs share the batches and heads of a tile that they add up, or whose bias they read."""

from __future__ import annotations

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.masking import shape_of

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200, which run at once
WAVES = 4  # at most


def parts_of(tiles, shared) -> int:
    """How many programs share a tile that `shared` batches and heads have: as few as leave hardly
    more multiprocessors idle in the last wave than any number does. One where the number of tiles
    is not known at compile time.
    """
    if not isinstance(tiles, int):
        return 1
    tiles = max(tiles, 1)
    most = max(1, PROGRAMS * WAVES // tiles)
    most = max(1, min(shared, most)) if isinstance(shared, int) else most
    shares = [busy(tiles * parts) for parts in range(1, most + 1)]
    return 1 + next(i for i, share in enumerate(shares) if share > 0.99 * max(shares))


def busy(programs: int) -> float:
    """The share of the time that multiprocessors have a program, if all take as long."""
    return programs / (-(-programs // PROGRAMS) * PROGRAMS)


def groups_of(q: Tensor, bias: Tensor | None) -> tuple:
    """(batches, heads, parts): the batches and heads that have a bias of their own, and the
    programs that share such a tile. Without a bias all batches and heads do.
    """
    (b, h), (batches, heads) = q.shape[:2], (1, 1) if bias is None else shape_of(bias)[:2]
    batches, heads = (1 if statically_known_true(size == 1) else size for size in (batches, heads))
    return batches, heads, parts_of(batches * heads, (b // batches) * (h // heads))
