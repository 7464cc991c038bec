"""Numbers as a reader sees them. What is not defined says so."""

from __future__ import annotations

import math

UNDEFINED = "not defined"
MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Fixed digits with a real minus sign; UNDEFINED for a missing value."""
    if missing(value):
        return UNDEFINED
    assert value is not None
    rounded = round(float(value), digits) + 0.0  # adding zero turns -0.0 into 0.0
    text = f"{rounded:+.{digits}f}" if sign else f"{rounded:.{digits}f}"
    return text.replace("-", MINUS)


def interval(low: float | None, high: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """`low to high`, or nothing where there is none."""
    if missing(low) or missing(high):
        return ""
    return f"{number(low, digits, sign=sign)} to {number(high, digits, sign=sign)}"


def chance(value: float | None) -> str:
    """A p-value: two digits that count."""
    return UNDEFINED if missing(value) else f"{value:.2g}"


def quantity(value: float | None) -> str:
    """Three digits with k, M, G, T, P, E: for parameters, tokens, FLOPs."""
    if missing(value):
        return UNDEFINED
    assert value is not None
    for power, unit in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if missing(seconds):
        return UNDEFINED
    assert seconds is not None
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def missing(value: float | None) -> bool:
    """None or NaN."""
    return value is None or not math.isfinite(value)
