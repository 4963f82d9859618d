"""What a plan says: figures with units in their names, tables of them, and what they rest on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    title: str
    figures: dict[str, Any]
    tables: tuple[Table, ...]
    assumptions: tuple[str, ...]
    hypotheses: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()  # SVG


def pairs(title: str, *rows: tuple[str, str] | None) -> Table:
    """A table of names and values; None is left out."""
    return Table(title, ("", ""), tuple(row for row in rows if row is not None))


def number(value: float | None) -> str:
    """Four digits that count, in words where it is large."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "never enough"
    for size, word in ((1e24, "e24"), (1e21, "e21"), (1e18, "e18")):
        if abs(value) >= size:
            return f"{value / size:.4g}{word}"
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if abs(value) >= size:
            return f"{value / size:.4g}{word}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def hours(value: float) -> str:
    """A time for a person to read."""
    if value >= 48:
        return f"{value / 24:.3g} days"
    if value >= 1:
        return f"{value:.3g} h"
    return f"{value * 60:.3g} min" if value * 60 >= 1 else f"{value * 3600:.3g} s"
