"""Ranks decide as one: each class is measured by the rank that claims it first, and all take that
answer.

No collective is called, so that nothing hangs where a rank compiles another graph or none: ranks
write to the key-value store that torch.distributed was started with. The first answer that is
written for a class holds for all. Who waits too long writes that there is none.
"""

from __future__ import annotations

import time

from fusion_backend.compat.distributed import default_store

POLL_S = 0.02


class Ranks:
    """The ranks of this job, as far as their answers go; a process by itself agrees with itself."""

    def __init__(self) -> None:
        self.store, rank = default_store()
        self.me = f"rank {rank}"

    def claim(self, key: str) -> bool:
        """Is this the rank that answers for the class? True for the first that asks."""
        if self.store is None:
            return True
        return self.first(f"fusion/claim/{key}", self.me) == self.me

    def publish(self, key: str, answer: str) -> str:
        """Give an answer to all ranks. Returns the one that holds, which is the first."""
        return answer if self.store is None else self.first(f"fusion/answer/{key}", answer)

    def wait(self, key: str, otherwise: str, seconds: float) -> str:
        """The answer of another rank; where it gives none for so long, `otherwise` holds for
        all.
        """
        name, until = f"fusion/answer/{key}", time.monotonic() + seconds
        while not self.store.check([name]):
            if time.monotonic() > until:
                return self.publish(key, otherwise)
            time.sleep(POLL_S)
        return self.store.get(name).decode()

    def first(self, name: str, text: str) -> str:
        """What was written first under this name: this text, or that of another rank."""
        return self.store.compare_set(name, "", text).decode()
