"""The store of measured answers for commands: whether it can be used, and its content."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from fusion_backend.cache.disk import unsafe
from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.measure.key import gpu_name, machine
from fusion_backend.measure.store import Answer, Store, seed, store

OFF = (
    "Inductor's caches are off (TORCHINDUCTOR_FORCE_DISABLE_CACHES, or force_disable_caches), and "
    "with them the store of measured answers"
)


def opened(to_write: bool = False) -> Store:
    """The store of this user. Raises Failure where it cannot be used."""
    held = store()
    if why := trouble(held, to_write):
        raise Failure(why, 1)
    return held


def trouble(held: Store, to_write: bool = False) -> str:
    """Why a store cannot be used; "" if it can. A store that does not exist yet counts as empty."""
    folder = held.folder
    if folder is None:
        return OFF
    try:
        if why := unsafe(folder):
            return f"measured answers are not used: {why}"
        if folder.exists() and not folder.is_dir():
            return f"measured answers are not used: {folder} is not a folder"
        there = next(p for p in (folder, *folder.parents) if p.exists())
    except OSError as error:
        return f"measured answers cannot be read: {folder}: {error.strerror}"
    if there == folder and not os.access(folder, os.R_OK | os.X_OK):
        return f"measured answers cannot be read: {folder} (chmod u+rx)"
    if to_write and not os.access(there, os.W_OK | os.X_OK):
        return f"measured answers cannot be kept: {there} is not writable"
    return ""


def stems(held: Store) -> set[str]:
    """The names of all files that an answer could be in, without their ending."""
    return {f.stem for f in held.folder.glob("*.json")} if held.folder else set()


def shipped() -> list[Answer]:
    """The answers that ship with the package."""
    return [*seed().values()]


def resolved(prefixes: Iterable[str], answers: Iterable[Answer]) -> list[Answer]:
    """The answers with these keys, each of which may be abbreviated. Raises Failure if a key has no
    answer, or more than one.
    """
    known, found = {a.key: a for a in answers}, {}
    for prefix in prefixes:
        keys = [key for key in known if key.startswith(prefix)]
        if not keys or not prefix:
            told = f"no measured answer has a key that begins with {prefix!r}"
            raise Failure(f"{told}; fusion gate list has them all", 2)
        if len(keys) > 1:
            some = ", ".join(key[: len(prefix) + 4] for key in sorted(keys)[:3])
            raise Failure(f"{prefix} begins {len(keys)} keys: {some}{', …' * (len(keys) > 3)}", 2)
        found[keys[0]] = known[keys[0]]
    return [*found.values()]


def machines() -> list[dict[str, str]]:
    """The GPUs that are here, with the versions of torch and Triton."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [machine(gpu_name(torch.device("cuda", i))) for i in range(count)]


def elsewhere(answers: Iterable[Answer]) -> list[Answer]:
    """The answers of other GPUs or versions than those of this machine."""
    here = machines()
    return [a for a in answers if not any(m.items() <= a.about.items() for m in here)]


def counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def for_whom(answers: list[Answer]) -> str:
    """How many answers there are, and of which GPU: "3 answers, 1 of another GPU or version"."""
    others = len(elsewhere(answers))
    text = counted(len(answers), "answer")
    if not others:
        return text
    if not machines():
        return f"{text}, and no GPU here that could use them"
    return f"{text}, {others if others < len(answers) else 'all'} of another GPU or version"
