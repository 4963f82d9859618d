"""What stands in a logbook, taken with caution: it may be of another version, or damaged."""

from __future__ import annotations

import datetime
from typing import Any, TypeGuard

from palm_jax.record.logbook import number

__all__ = ["Record", "is_whole", "length_of_union", "moment", "number", "texts"]

Record = dict[str, Any]


def is_whole(value: Any) -> TypeGuard[int]:
    """A whole number that arrays, and a page's script, take as it is."""
    return type(value) is int and abs(value) <= 2**53


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
