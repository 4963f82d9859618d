"""Values and names as messages show them: cut where they are long."""

from __future__ import annotations


def short(value: object) -> str:
    try:
        return cut(repr(value))
    except ValueError:  # an integer of thousands of digits
        return "a number far too large"


def cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
