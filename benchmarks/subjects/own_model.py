"""The user's own model, or timm's, as a subject of `benchmarks.models`.

--module package.module:build, or path/to/file.py:build. build() takes no arguments, makes its
tensors on the GPU unless it says otherwise (it is the default device meanwhile), and returns
(model, inputs) or (model, inputs, loss):

    model   an nn.Module, in the mode it is to be measured in: eval() switches dropout off
    inputs  a tensor, a tuple of positional arguments, or a dict of keyword arguments
    loss    takes the model's output and returns a scalar to differentiate; it is compiled with the
            model. Without it, training differentiates the output where that is a scalar, or the
            output's `loss`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.subjects.subject import TRAIN, Problem, Subject, cast
from fusion_backend.compat.torch import pytree

RETURNS = "it must return (model, inputs) or (model, inputs, loss)"


def load(spec: str) -> Callable[[], object]:
    """The function that a --module argument names."""
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        raise Problem(f"{spec!r} is not package.module:function or file.py:function")
    path = Path(module)
    try:
        if path.suffix == ".py":
            if not path.exists():
                raise Problem(f"there is no file {path}")
            sys.path.insert(0, str(path.parent.resolve()))  # its own imports
            found = importlib.util.spec_from_file_location(path.stem, path)
            loaded = sys.modules[path.stem] = importlib.util.module_from_spec(found)
            found.loader.exec_module(loaded)
        else:
            sys.path.insert(0, os.getcwd())
            loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise Problem(f"importing {module} raised {where(error)}") from error
        raise Problem(
            f"there is no module {module} (from {os.getcwd()} or PYTHONPATH); "
            f"a file works too: path/to/file.py:{name}"
        ) from None
    except Problem:
        raise
    except Exception as error:
        raise Problem(f"importing {module} raised {where(error)}") from error
    if not callable(getattr(loaded, name, None)):
        raise Problem(f"{module} has no function {name}")
    return getattr(loaded, name)


def where(error: BaseException) -> str:
    """An exception with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first} ({last.filename}:{last.lineno})"


def own(spec: str, mode: str, device: torch.device, dtype: torch.dtype | None) -> Subject:
    """The model that build() returns, on the device, and in dtype where one is asked for."""
    build = load(spec)
    torch.manual_seed(0)
    try:
        with device:  # tensors that nobody else moves, such as a loss's target, are made there
            returned = build()
    except Exception as error:
        raise Problem(f"{spec} raised {where(error)}") from error
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise Problem(f"{spec} returned {type(returned).__name__}; {RETURNS}")
    model, inputs, loss = (*returned, None)[:3]
    if not isinstance(model, nn.Module):
        raise Problem(
            f"{spec} returned a model of type {type(model).__name__}, not an nn.Module; {RETURNS}"
        )
    if loss is not None and not callable(loss):
        raise Problem(
            f"{spec} returned a loss of type {type(loss).__name__}, which cannot be called; "
            f"{RETURNS}"
        )
    model = model.to(device) if dtype is None else model.to(device, dtype)
    spec = (
        f"{Path(spec.rpartition(':')[0]).stem}:{spec.rpartition(':')[2]}"
        if ".py:" in spec
        else spec
    )
    inputs = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)
    inputs = inputs if dtype is None else cast(inputs, dtype)
    if isinstance(inputs, dict):
        subject = Subject(spec, model, (), inputs)
    elif isinstance(inputs, (tuple, list, Tensor)):
        subject = Subject(spec, model, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs))
    else:
        raise Problem(
            f"{spec} returned inputs of type {type(inputs).__name__}, "
            "not a tensor, a tuple or a dict"
        )
    if mode == TRAIN:
        subject.result = loss or loss_of
    check(subject, mode)
    return subject


def loss_of(output: object) -> object:
    return output if isinstance(output, Tensor) else getattr(output, "loss", None)


def check(subject: Subject, mode: str) -> None:
    """Run the model once, eagerly: what is wrong with it is said before anything is compiled."""
    try:
        with torch.no_grad():
            output = subject()
    except torch.OutOfMemoryError:
        return  # a contender may need less
    except Exception as error:
        raise Problem(
            f"{subject.name}: the model, run eagerly on its inputs, raised {where(error)}"
        ) from error
    if mode != TRAIN:
        return
    if not isinstance(output, Tensor) or output.numel() != 1:
        got = (
            f"a tensor of shape {tuple(output.shape)}"
            if isinstance(output, Tensor)
            else type(output).__name__
        )
        raise Problem(
            f"{subject.name}: training needs a scalar loss, got {got}; return (model, inputs, loss)"
        )
    if not any(p.requires_grad for p in subject.model.parameters()):
        raise Problem(
            f"{subject.name}: no parameter requires a gradient: there is nothing to train"
        )


def timm(name: str, mode: str, device: torch.device, dtype: torch.dtype, batch: int) -> Subject:
    """A model of timm with random weights on random images, in training with cross-entropy over
    random classes.
    """
    try:
        import timm
    except ImportError as error:
        raise Problem(
            f"--timm needs timm ({error}): pip install timm, torchvision comes with it"
        ) from None
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, pretrained=False)
    except RuntimeError as error:
        raise Problem(f"timm cannot make {name}: {error}") from None
    model = model.to(device, dtype).eval()
    images = torch.randn(batch, *model.default_cfg["input_size"], device=device).to(dtype)
    subject = Subject(name, model, (images,), about=dict(batch=batch))
    if mode == TRAIN:
        labels = torch.randint(model.default_cfg["num_classes"], (batch,), device=device)
        subject.result = lambda logits: nn.functional.cross_entropy(logits, labels)
    return subject
