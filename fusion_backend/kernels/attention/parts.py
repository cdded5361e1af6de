"""How the programs of short attention share batches and heads."""

from __future__ import annotations

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.masking import shape_of
from fusion_backend.kernels.common.inputs import number, same_sizes

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
WAVES = 4  # at most
MANY = 1 << 20  # in place of a number that only a run knows
FEW = 16  # parts, if only a run knows how many biases there are


def groups_of(q: Tensor, bias: Tensor | None) -> tuple:
    """(batches, heads, parts): how many batches and heads have a bias of their own, and among how
    many programs those that share one are divided. Without a bias, all are divided.
    """
    (b, h), (batches, heads) = q.shape[:2], (1, 1) if bias is None else shape_of(bias)[:2]
    batches, heads = (1 if statically_known_true(size == 1) else size for size in (batches, heads))
    times = 1 if same_sizes((b,), (batches,)) else b // batches
    return batches, heads, parts_of(number(batches * heads), number(times * (h // heads)))


def parts_of(biases, shared) -> int:
    """Among how many programs the `shared` batches and heads of each bias are divided: as few as
    are done in the least time.
    """
    known = isinstance(shared, int)
    if not isinstance(biases, int):
        return max(1, min(shared, FEW)) if known else 1
    most, biases = max(1, PROGRAMS * WAVES // max(biases, 1)), max(biases, 1)
    most, shared = (max(1, min(shared, most)), shared) if known else (most, MANY)
    return min(range(1, most + 1), key=lambda parts: (rounds(biases, shared, parts), parts))


def rounds(biases: int, shared: int, parts: int) -> int:
    """How many batches and heads one multiprocessor's place for a program has, one by one."""
    return -(-biases * parts // PROGRAMS) * -(-shared // parts)
