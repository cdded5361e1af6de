"""Numbers as a reader wants them: three digits, a unit that fits, no exponent."""

from __future__ import annotations

import math
import re

NONE = "–"


def digits(value: float, count: int = 3) -> str:
    """1,480; 14.8; 0.0148: at least `count` digits that count, whole numbers in full."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    exponent = int(f"{value:.{count - 1}e}".split("e")[1])  # of the rounded value
    decimals = max(0, count - 1 - exponent)
    return f"{value:,.{min(decimals, 12)}f}"


def scaled(value: float, units: tuple[str, ...], step: float = 1000.0) -> str:
    """The value with the largest of some units, each `step` times the one before, in which it is at
    least 1.
    """
    for unit in units[:-1]:
        if abs(value) < step * 0.9995:
            whole = value == int(value) and unit == units[0]
            return f"{int(value) if whole else digits(value)} {unit}"
        value /= step
    return f"{digits(value)} {units[-1]}"


def time(ms: float | None) -> str:
    return NONE if ms is None else scaled(ms * 1e6, ("ns", "µs", "ms", "s"))


def size(count: float | None) -> str:
    return NONE if count is None else scaled(count, ("B", "kB", "MB", "GB", "TB"))


def bandwidth(rate: float | None) -> str:
    """Bytes per second."""
    return NONE if rate is None else f"{size(rate)}/s"


def operations(count: float | None) -> str:
    return NONE if count is None else scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def speed(rate: float | None) -> str:
    """Operations per second."""
    return NONE if rate is None else f"{operations(rate)}/s"


def times(ratio: float | None) -> str:
    """2.14×"""
    if ratio is None:
        return NONE
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{digits(ratio)}×"


def round_number(text: str) -> str:
    """Without the zeros that say how precise a number is: 1 GB, not 1.00 GB, on an axis."""
    return re.sub(r"(\.\d*?)0+(?=\D|$)", lambda found: found[1].rstrip("."), text)


def tick(ratio: float) -> str:
    """A round ratio on an axis: 1×, 1.5×, 10×"""
    return round_number(f"{digits(ratio)}×")


def share(value: float | None) -> str:
    """96%; below a percent with one digit more."""
    if value is None:
        return NONE
    return f"{value:.0%}" if abs(value) >= 0.00995 or not value else f"{value:.1%}"


def error(value: float | None) -> str:
    """A relative error in percent, or in parts per million where it is small."""
    if value is None:
        return NONE
    if value >= 1e-4:
        return f"{digits(value * 100, 2)}%"
    return f"{digits(value * 1e6, 2)} ppm"
