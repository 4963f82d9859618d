"""What stands in a logbook, taken with caution: it may be of another version, or damaged."""

from __future__ import annotations

import datetime
import math
from typing import Any, TypeGuard

Record = dict[str, Any]


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: Any) -> float | None:
    """A number, also one that is not finite; None if it is none."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, float) or is_whole(value):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def texts(value: Any) -> list[str]:
    return [str(inner) for inner in value] if isinstance(value, list) else []


def moment(time: Any) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(time)
        return None if found.tzinfo is None else found.astimezone(datetime.UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def length_of_union(intervals: list[tuple[int, int]]) -> int:
    length, reached = 0, None
    for start, stop in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        length += max(stop - begin, 0)
        reached = stop if reached is None else max(stop, reached)
    return length
