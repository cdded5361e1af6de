"""A user's own model, by the name of a function that builds it: for `fusion explain` and
`benchmarks.models --module`.

The name is `package.module:build`, or `path/to/file.py:build`. build() takes no arguments, makes
its tensors on the GPU unless it says otherwise (that is the default device meanwhile), and returns
(model, inputs) or (model, inputs, loss):

    model   an nn.Module, in the mode in which it is to run: eval() switches dropout off
    inputs  a tensor, a tuple or list of positional arguments, or a dict of keyword arguments
    loss    takes the model's output and returns a scalar to differentiate; it is compiled with the
            model. Without it, training differentiates the output's `loss`, where it has one, or
            else the output.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_backend.compat.torch import pytree

RETURNS = "it must return (model, inputs) or (model, inputs, loss)"
# whose lines are not the user's
OTHERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


class ModelError(ValueError):
    """What the user must correct about a model, in a sentence."""


@dataclasses.dataclass
class OwnModel:
    """What build() returned, on the device: the model, its inputs, and the loss or None."""

    name: str
    build: Callable
    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    loss: Callable | None

    def step(self, train: bool) -> Callable:
        """The function to compile, with the model's own arguments: the model, and in training its
        loss.
        """
        if not train:
            return self.model
        model, loss = self.model, self.loss or loss_of
        return lambda *args, **kwargs: loss(model(*args, **kwargs))

    def check_trainable(self) -> None:
        """Raises ModelError where there is no parameter to differentiate."""
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ModelError(
                f"{self.name}: no parameter requires a gradient: there is nothing to train"
            )


def loss_of(output: Any) -> Any:
    """The value to differentiate if there is no loss: the output's own `loss`, or the output."""
    own = None if isinstance(output, Tensor) else getattr(output, "loss", None)
    return output if own is None else own


def load(spec: str) -> Callable[[], object]:
    """The function that `package.module:build` or `path/to/file.py:build` names. Raises ModelError
    where there is none, or importing its module fails.
    """
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        raise ModelError(
            f"{spec!r} is not package.module:function or file.py:function, such as mine.py:build"
        )
    try:
        loaded = from_file(Path(module)) if module.endswith(".py") else from_module(module)
    except ModelError:
        raise
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise ModelError(f"importing {module} raised {where(error)}") from error
        raise ModelError(
            f"there is no module {module} (from {os.getcwd()} or PYTHONPATH); "
            f"a file works too: path/to/file.py:{name}"
        ) from None
    except Exception as error:
        raise ModelError(f"importing {module} raised {where(error)}") from error
    if not callable(getattr(loaded, name, None)):
        raise ModelError(f"{module} has no function {name}{functions_of(loaded)}")
    return getattr(loaded, name)


def from_file(path: Path) -> types.ModuleType:
    """The file as a module of its name, with its folder first on sys.path for its own imports."""
    if not path.exists():
        raise ModelError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    found = importlib.util.spec_from_file_location(path.stem, path)
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


def from_module(name: str) -> types.ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def functions_of(module: types.ModuleType) -> str:
    """Those that a module defines itself, for a message."""
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    ]
    return f"; it has {', '.join(own)}" if own else ""


def where(error: BaseException, build: Callable | None = None) -> str:
    """An exception with the line that raised it: the innermost line of the user's code, or else the
    line of `build`, or else the innermost line.
    """
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if not f.filename.startswith(OTHERS)]
    own = place_of(build) if build and not mine else ""
    place = own or "".join(f" ({f.filename}:{f.lineno})" for f in (mine or frames)[-1:])
    return f"{type(error).__name__}: {first}{place}"


def built(spec: str, device: torch.device, dtype: torch.dtype | None = None) -> OwnModel:
    """The model that build() returns, with its inputs, on the device; floating tensors in `dtype`
    where one is given. Raises ModelError for a spec that names no function, for a build() that
    raises, and for one that returns something else.
    """
    build = load(spec)
    try:
        inspect.signature(build).bind()
    except TypeError:
        raise ModelError(f"{spec} takes arguments{place_of(build)}; it must take none") from None
    except ValueError:  # a callable without a signature, which is called as it is
        pass
    name = short(spec)
    torch.manual_seed(0)
    try:
        with device:  # tensors that nobody else moves, such as a loss's target, are made there
            returned = build()
    except Exception as error:
        raise ModelError(f"{spec} raised {where(error)}") from error
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ModelError(f"{spec} returned {in_words(returned)}{place_of(build)}; {RETURNS}")
    model, inputs, loss = (*returned, None)[:3]
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{spec} returned a model of type {type(model).__name__}, not an nn.Module"
            f"{place_of(build)}; {RETURNS}"
        )
    if loss is not None and not callable(loss):
        raise ModelError(
            f"{spec} returned a loss of type {type(loss).__name__}, which cannot be called"
            f"{place_of(build)}; {RETURNS}"
        )
    model = model.to(device) if dtype is None else model.to(device, dtype)
    args, kwargs = arguments_of(moved(inputs, device, dtype), spec, build)
    return OwnModel(name, build, model, args, kwargs, loss)


def short(spec: str) -> str:
    """`mine:build` of `path/to/mine.py:build`."""
    module, _, name = spec.rpartition(":")
    return f"{Path(module).stem}:{name}" if module.endswith(".py") else spec


def in_words(returned: object) -> str:
    kind = type(returned).__name__
    return f"a tuple of {len(returned)}" if isinstance(returned, tuple) else kind


def place_of(build: Callable) -> str:
    """ " (file:line)" of a function."""
    code = getattr(build, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def moved(inputs: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The tensors of a tree on the device; those of floating numbers in dtype."""

    def one(x):
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if dtype and x.is_floating_point() else None)

    return pytree.tree_map(one, inputs)


def arguments_of(inputs: Any, spec: str, build: Callable) -> tuple[tuple, dict[str, Any]]:
    """Inputs as positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise ModelError(
        f"{spec} returned inputs of type {type(inputs).__name__}, not a tensor, a tuple, a list or "
        f"a dict{place_of(build)}"
    )
