"""The model that a command gets by name."""

from __future__ import annotations

import argparse

import torch

from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.own_model import ModelError, OwnModel, built

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def asked_for(arguments: argparse.Namespace, device: torch.device) -> OwnModel:
    """The model named by the arguments `spec` and `dtype`. With `train` it must have a parameter to
    train. Raises Failure.
    """
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    try:
        made = built(arguments.spec, device, dtype)
        if arguments.train:
            made.check_trainable()
    except ModelError as error:
        raise Failure(str(error), 2) from error.__cause__
    return made
