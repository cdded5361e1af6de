"""The user's own model, or timm's, as a subject of `benchmarks.models`.

What --module names, and what build() returns, is said in `fusion_backend.frontends.own_model`,
which loads it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.subjects.subject import TRAIN, Problem, Subject, cast
from fusion_backend.frontends.own_model import built, loss_of, where


def own(spec: str, mode: str, device: torch.device, dtype: torch.dtype | None) -> Subject:
    """The model that build() returns, on the device, and in dtype where one is asked for."""
    made = built(spec, device, dtype)
    inputs = made.args, made.kwargs
    subject = Subject(made.name, made.model, *(inputs if dtype is None else cast(inputs, dtype)))
    if mode == TRAIN:
        subject.result = made.loss or loss_of
    check(subject, mode)
    if mode == TRAIN:
        made.check_trainable()
    return subject


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
