"""A model with its inputs, as benchmarks.models measures it, and the inputs that models share."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.subjects.plain_models import Size
from fusion_backend.compat.torch import pytree
from fusion_backend.frontends.own_model import ModelError

INFER, TRAIN, DECODE = MODES = ("infer", "train", "decode")
Problem = ModelError  # something about a model that the user has to put right, in a sentence


@dataclasses.dataclass
class Subject:
    """A model and its inputs. `result` takes from the output what is compared, in training the
    loss; `before` runs before each step, outside of the compiled code.
    """

    name: str
    model: nn.Module
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    result: Callable = lambda output: output
    before: Callable[[], object] | None = None
    about: dict = dataclasses.field(default_factory=dict)

    def __call__(self) -> object:
        """A step's forward, as it is compiled."""
        return self.result(self.model(*self.args, **self.kwargs))

    def cast(self, dtype: torch.dtype) -> Subject:
        """The same values in another dtype, in memory of their own."""
        if self.before:
            self.before()
        args, kwargs = cast((self.args, self.kwargs), dtype)
        return dataclasses.replace(
            self,
            model=copy.deepcopy(self.model).to(dtype),
            args=args,
            kwargs=kwargs,
            before=cache_reset(kwargs),
        )


def cast(values, dtype: torch.dtype):
    """A tree of inputs with its floating tensors in dtype; a cache of keys and values is copied."""

    def one(x):
        if isinstance(x, Tensor):
            return x.to(dtype) if x.is_floating_point() else x
        if hasattr(x, "layers"):
            x = copy.deepcopy(x)
            for layer in x.layers:
                layer.keys, layer.values, layer.dtype = (
                    layer.keys.to(dtype),
                    layer.values.to(dtype),
                    dtype,
                )
        return x

    return pytree.tree_map(one, values)


def cache_reset(kwargs: dict) -> Callable[[], object] | None:
    """Sets the cache back by the token that a step adds, so that every step does the same work."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        return None
    lengths, start = (
        [layer.cumulative_length for layer in cache.layers],
        cache.layers[0].cumulative_length.item(),
    )
    return lambda: [length.fill_(start) for length in lengths]


def tokens(size: Size, device) -> Tensor:
    return torch.randint(1, size.vocabulary, (size.batch, size.seq), device=device)


def real_tokens(size: Size, device) -> Tensor:
    """1 for tokens, 0 for padding: rows from full to half length."""
    lengths = torch.linspace(size.seq, size.seq / 2, size.batch, device=device).long()
    return (torch.arange(size.seq, device=device) < lengths[:, None]).long()


def pixels(size: Size, device, dtype) -> Tensor:
    return torch.randn(size.batch, 3, size.image, size.image, device=device).to(dtype)
