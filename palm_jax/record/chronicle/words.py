"""Numbers, times and other people's text as words of a Markdown page, of which they break none."""

from __future__ import annotations

import datetime
import json
import math
import re
from typing import Any

# Control characters, line ends, text that runs backwards, halves of surrogate pairs.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"[\\`*\[\]<~|$]|&(?=#?\w+;)|#(?=#*$)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_MOST_SHOWN = 12  # parts of one value


def when(moment: datetime.datetime | None) -> str:
    if moment is None:
        return "unknown time"
    return f"{moment.replace(tzinfo=None).isoformat(' ', 'seconds')} UTC"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def value(value: Any) -> str:
    """A value as it stands in the logbook, as code."""
    return code(value if isinstance(value, str) else as_json(value))


def shown(value: Any) -> str:
    return inline(value if isinstance(value, str) else as_json(value))


def told(value: Any) -> str:
    """A value for a person: numbers short, parts one after the other, at most 12 of them."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list | dict) and value:
        parts = (
            [f"{name(key)} {told(inner)}" for key, inner in value.items()]
            if isinstance(value, dict)
            else [told(inner) for inner in value]
        )
        more = len(parts) - _MOST_SHOWN
        return ", ".join(parts[:_MOST_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
    return {None: "none", True: "yes", False: "no"}[value] if _is_plain(value) else shown(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def name(key: str) -> str:
    """A field's name as words."""
    return inline(key.replace("_", " "))


def one_line(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", " ".join(text.split()))


def inline(text: str) -> str:
    """A person's text within a line, where none of it is Markdown."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text)) or "(empty)"


def code(text: str) -> str:
    """A code span, which backticks in the text do not end."""
    text = one_line(text) or '""'
    fence = "`" * (_longest_backticks(text) + 1)
    space = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{space}{text}{space}{fence}"


def fenced(text: str) -> str:
    """A block with the text as it is, which backticks in the text do not end."""
    lines = [_UNPRINTABLE.sub("\ufffd", line.expandtabs(4)) for line in text.splitlines()]
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def _longest_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
