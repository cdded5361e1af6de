"""The range of PyTorch and Triton releases that the project supports. The tests pass under the
oldest and the newest.

`make test TORCH=2.14.1` runs them under any.
"""

from __future__ import annotations

import re
import warnings

OLDEST, NEWEST = {"torch": (2, 11), "triton": (3, 6)}, {"torch": (2, 15), "triton": (3, 9)}


def check(package: str, version: str) -> None:
    """Raise ImportError for a release that is too old; warn of one that is newer than the last that
    was tested.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    oldest, newest = (".".join(map(str, known[package])) for known in (OLDEST, NEWEST))
    if release < OLDEST[package]:
        raise ImportError(
            f"fusion_backend needs {package} {oldest} or newer; {version} is installed"
        )
    if release > NEWEST[package]:
        warnings.warn(
            f"fusion_backend was last tested with {package} {newest}; {version} is installed",
            RuntimeWarning,
            stacklevel=2,
        )
