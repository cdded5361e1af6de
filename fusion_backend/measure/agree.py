"""Ranks decide as one: the first to ask measures, the others take its answer.

No collective is called, so that nothing hangs where a rank compiles another graph or none: ranks
write to the key-value store that torch.distributed was started with. The first answer that is
written holds for all. Who waits too long writes that there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fusion_backend.compat.torch import default_store

POLL_S = 0.02


def agreed(key: str, propose: Callable[[], str], otherwise: str, seconds: float) -> str:
    """`propose()` where this process runs alone; else the text that all ranks get for this key:
    that of the rank which asked first, or `otherwise` where it has none after so many seconds.
    """
    store, rank = default_store()
    if store is None:
        return propose()
    claim, answer = f"fusion/claim/{key}", f"fusion/answer/{key}"
    mine = str(rank)
    if store.compare_set(claim, "", mine).decode() == mine and not store.check([answer]):
        return first(store, answer, propose())
    until = time.monotonic() + seconds
    while not store.check([answer]):
        if time.monotonic() > until:
            return first(store, answer, otherwise)
        time.sleep(POLL_S)
    return store.get(answer).decode()


def first(store, name: str, text: str) -> str:
    """The text that was written first under this name: this one, or that of another rank."""
    return store.compare_set(name, "", text).decode()
