"""Incidents, alarms and what was decided about them, in words.

A title from the fields that say what and where, then every other field as words: what is told
does not depend on which detector wrote the event.
"""

from __future__ import annotations

import collections.abc
from typing import Any

from palm_jax.record.chronicle import values, words
from palm_jax.record.chronicle.values import Record

# Which of an event's fields says the step that it belongs to, the best first.
_STEPS = {
    "incident": ("onset", "step", "detected"),
    "incident_closed": ("closed", "step", "onset", "detected"),
    "decision": ("step", "detected", "onset"),
    "alarm": ("step",),
}
_IN_THE_TITLE = ("event", "time", "segment", "step")
_ACTION = ("action", "decision", "policy")


def step_of(record: Record) -> int | None:
    """The step that an incident began at, was closed at, or that something was decided at."""
    found = [record.get(key) for key in _STEPS[record["event"]]]
    return next((step for step in found if values.is_whole(step)), None)


def place(record: Record) -> tuple[Any, ...]:
    """What an `incident` and its `incident_closed` have in common."""
    keys = ("segment", "incident", "kind", "onset", "detected")
    return tuple(repr(record.get(key)) for key in keys)


def title(record: Record) -> str:
    """Of an `incident`, `incident_closed` or `decision`."""
    return _titled(record)[0]


def lines(record: Record) -> list[str]:
    """What the title does not have, a field a line."""
    told = {*_titled(record)[1], *_IN_THE_TITLE}
    found = []
    for key, value in record.items():
        if key not in told and value is not None and value not in ("", [], {}):
            name = words.name(key)
            found.append(f"{name[:1].upper()}{name[1:]}: {words.told(value)}.")
    return found


def alarm(record: Record) -> str:
    """What an alarm says, without what differs from step to step."""
    said = [record.get(key) for key in ("kind", "vital", "why")]
    told = [words.told(part) for part in said if isinstance(part, str) and part]
    return ", ".join(told) or "without a name"


def _titled(record: Record) -> tuple[str, list[str]]:
    """The title, and the fields that are in it."""
    used: list[str] = []

    def take(*names: str) -> str | None:
        key = next((name for name in names if record.get(name) is not None), None)
        if key is None:
            return None
        used.append(key)
        return words.told(record[key])

    of = record.get("incident")
    if isinstance(of, list) and len(of) == 3:  # kind, onset, detected
        used.append("incident")
        number: str | None = f"{words.told(of[0])} since step {words.told(of[1])}"
    else:
        number = take("incident", "number", "id")
    which = "incident" if number is None else f"incident {number}"
    if record["event"] == "decision":
        action = take(*_ACTION)
        what = "decision" if action is None else f"decided: {action}"
        what += "" if number is None else f" ({which})"
    elif record["event"] == "incident_closed":
        outcome, kind, onset = take("outcome"), take("kind"), take("onset")
        what = which if kind is None else f"{which}, {kind}"
        what += "" if onset is None else f" since step {onset},"
        what += " closed" if outcome is None else f" closed: {outcome}"
    else:
        kind, vital = take("kind"), take("vital")
        what = ": ".join([which, *([] if kind is None else [kind])])
        what += "" if vital is None else f" of {vital}"
    at = take(*_places_of(record))
    segment = record.get("segment")
    within = f", segment {segment}" if values.is_whole(segment) else ""
    return f"{what}, at step {at}{within}", used


def _places_of(record: Record) -> collections.abc.Iterator[str]:
    yield from (key for key in _STEPS[record["event"]] if values.is_whole(record.get(key)))
