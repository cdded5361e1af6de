"""Ranks decide as one: the rank that claims a class first measures it, and all take its answer.

No collective is called, so that nothing hangs where a rank compiles another graph or none: ranks
write to the key-value store that torch.distributed was started with. The first answer that is
written for a class holds for all. A rank that has waited too long writes that there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fusion_backend.compat.distributed import default_store

POLL_S = 0.02


class Ranks:
    """The ranks of this job, and their answers; a single process agrees with itself."""

    def __init__(self) -> None:
        self.store, rank = default_store()
        self.me = f"rank {rank}"

    def claim(self, key: str) -> bool:
        """Does this rank answer for the class? True for the first rank that asks, until there is an
        answer.
        """
        if self.store is None:
            return True
        if self.store.check([f"fusion/answer/{key}"]):
            return False
        return self.first(f"fusion/claim/{key}", self.me) == self.me

    def publish(self, key: str, answer: str) -> str:
        """Give an answer to all ranks. Returns the answer that holds: the first one."""
        return answer if self.store is None else self.first(f"fusion/answer/{key}", answer)

    def wait(self, key: str, otherwise: str, seconds: float) -> str:
        """The answer of another rank; if it gives none in so many seconds, `otherwise` holds for
        all.
        """
        name, until = f"fusion/answer/{key}", time.monotonic() + seconds
        while not self.store.check([name]):
            if time.monotonic() > until:
                return self.publish(key, otherwise)
            time.sleep(POLL_S)
        return self.store.get(name).decode()

    def told(self, key: str, own: Callable[[], str], otherwise: str, seconds: float) -> str:
        """The answer of this rank, if it is the first to ask, or that of another one. If `own`
        fails, `otherwise` holds for the other ranks.
        """
        if not self.claim(key):
            return self.wait(key, otherwise, seconds)
        try:
            return self.publish(key, own())
        except Exception:
            self.publish(key, otherwise)
            raise

    def first(self, name: str, text: str) -> str:
        """The text that was written first under this name: this one, or that of another rank."""
        return self.store.compare_set(name, "", text).decode()
