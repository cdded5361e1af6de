"""The key of an answer: a digest of the region, the GPU, the versions, Inductor's settings, and the
code of the kernels.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from pathlib import Path

import torch

from fusion_backend.cache.fingerprint import built_in, fingerprint
from fusion_backend.compat.inductor_settings import changed_settings, custom_passes
from fusion_backend.compat.torch import torch_version
from fusion_backend.compat.triton import triton_version
from fusion_backend.ops.definition import Definition

# Settings of Inductor that change no code, or that a contest overrides.
IRRELEVANT = ("compile_threads", "fx_graph_", "cudagraph", "worker", "cache", "debug", "trace")


def digest(text: str, ops: list[Definition], gpu: str) -> str | None:
    """The key of a class of regions; None where an op, or a setting of Inductor's, has no name that
    holds in every process.
    """
    settings = inductor_settings()
    if settings is None:
        return None
    changed = cudnn_settings() if "conv" in text else ""
    return key_of(region_digest(text), ops, machine(gpu), settings, changed)


def region_digest(text: str) -> str:
    """What an answer holds of the text of its region, so that its key can be computed anew."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def key_of(
    region: str, ops: list[Definition], where: dict[str, str], settings: str = "", cudnn: str = ""
) -> str | None:
    """The key of `region_digest`, of the ops, and of `machine`, with Inductor's and cuDNN's default
    settings or others.
    """
    codes = sorted({op.name: code_of(op) for op in ops}.items())
    if any(code is None for _, code in codes):
        return None
    parts = {"region": region, "code": codes, "inductor": settings, **where}
    parts |= {"cudnn": cudnn} if cudnn else {}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def cudnn_settings() -> str:
    """The settings of cuDNN that decide how a convolution is computed, where one is not the
    default; otherwise "".
    """
    cudnn = torch.backends.cudnn
    usual = cudnn.enabled and cudnn.conv.fp32_precision == "tf32"
    if usual and not cudnn.benchmark and not cudnn.deterministic:
        return ""
    return f"{cudnn.enabled} {cudnn.conv.fp32_precision} {cudnn.benchmark} {cudnn.deterministic}"


def machine(gpu: str) -> dict[str, str]:
    """The GPU and the versions, by their first two numbers, because the third marks bug-fix
    releases.
    """
    return {"gpu": gpu, "torch": short(torch_version()), "triton": short(triton_version())}


def short(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def inductor_settings() -> str | None:
    """The settings of Inductor that are not the default, and the user's own passes; None where one
    of them has no name that holds in every process.
    """
    lines = changed_settings().splitlines()
    lines = [line for line in lines if not any(word in line for word in IRRELEVANT)]
    lines += [repr(one.uuid() if hasattr(one, "uuid") else None) for one in custom_passes()]
    return None if "None" in lines or " object at 0x" in str(lines) else "\n".join(lines)


def code_of(op: Definition) -> str | None:
    """A digest of what an op runs: of a built-in one its file and the kernels that this imports, of
    another one its fingerprint.
    """
    if not built_in(op):
        found = fingerprint(op)
        return None if found.opaque else found.digest
    return sources_of(op.reference.__globals__["__name__"])


def code_of_each(ops: list[Definition]) -> dict[str, str]:
    """The first 12 digits of `code_of` each op, by its name. An answer says with them which code
    was timed.
    """
    return {op.name: (code_of(op) or "")[:12] for op in sorted(ops, key=lambda op: op.name)}


@functools.cache
def sources_of(module: str) -> str:
    """A digest of a module of ours and of those that it imports from patterns and kernels."""
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        text = Path(spec.origin).read_text()
        found[name] = text
        pending += imported(text)
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def imported(text: str) -> list[str]:
    """The modules of patterns and kernels that a program imports at its top."""
    names = [
        node.module
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    ours = ("fusion_backend.patterns.", "fusion_backend.kernels")
    return [name for name in names if name.startswith(ours)]
