"""The model that a command is about."""

from __future__ import annotations

import argparse

import torch

from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.own_model import ModelError, OwnModel, built

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def asked_for(arguments: argparse.Namespace, device: torch.device) -> OwnModel:
    """The model of the arguments `spec` and `dtype`, which with `train` has something to train.
    Raises Failure.
    """
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    try:
        made = built(arguments.spec, device, dtype)
        if arguments.train:
            made.check_trainable()
    except ModelError as error:
        raise Failure(str(error), 2) from error.__cause__
    return made
