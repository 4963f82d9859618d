"""What happened at which step, for the figures: a vertical line with words, or a stretch."""

from __future__ import annotations

import bisect
import collections.abc
import dataclasses
from typing import Any

import numpy as np

from palm_jax import config, stream
from palm_jax.record.chronicle import spikes, words
from palm_jax.record.chronicle.values import Record, is_whole
from palm_jax.record.segments import Segment
from palm_jax.report.series import History, spans

# In the order of the legend.
KINDS = {
    "rollback": "rollback",
    "intervention": "intervention",
    "promotion": "promoted branch",
    "resumed": "went on after a stop",
    "exclusion": "data left out",
    "ramp": "batch size changes",
    "incident": "incident",
    "alarm": "alarm",
    "skipped": "update skipped",
}
_MOST = 400  # marks of one kind


@dataclasses.dataclass(frozen=True)
class Mark:
    kind: str
    first: int
    last: int
    label: str  # plain text


@dataclasses.dataclass(frozen=True)
class Event:
    """An event of the logbook that is no step."""

    record: Record
    reached: int | None  # the step after the last one of the history, when it came


def of_events(events: collections.abc.Iterable[Event]) -> list[Mark]:
    """Rollbacks, interventions, promotions, starts, incidents and alarms."""
    found: list[Mark] = []
    open_incidents: dict[tuple[Any, ...], int] = {}
    for event in events:
        record = event.record
        match record["event"]:
            case "intervention" | "promotion" if is_whole(record.get("from_step")):
                found += _departure(record, event.reached)
            case "start" if is_whole(record.get("step")) and record["step"] > 0:
                step = record["step"]
                lost = "" if event.reached is None or event.reached <= step else _lost(event, step)
                found.append(Mark("resumed", step, step, f"went on at step {step}{lost}"))
            case "incident" if (onset := spikes.step_of(record)) is not None:
                open_incidents[spikes.place(record)] = len(found)
                found.append(Mark("incident", onset, onset, _plain(spikes.title(record))))
            case "incident_closed" if (closed := spikes.step_of(record)) is not None:
                place = open_incidents.pop(spikes.place(record), None)
                if place is None:
                    found.append(Mark("incident", closed, closed, _plain(spikes.title(record))))
                else:
                    outcome = str(record.get("outcome") or "closed")
                    opened = found[place]
                    label = f"{opened.label}; {outcome} at step {closed}"
                    last = max(opened.last, closed)
                    found[place] = dataclasses.replace(opened, last=last, label=label)
            case "alarm" if is_whole(record.get("step")):
                step = record["step"]
                found.append(Mark("alarm", step, step, f"alarm: {_plain(spikes.alarm(record))}"))
    return [mark for kind in KINDS for mark in _fewer([m for m in found if m.kind == kind])]


def _departure(record: Record, reached: int | None) -> collections.abc.Iterator[Mark]:
    kind, step, segment = record["event"], record["from_step"], record.get("segment")
    reason = f": {record['reason']}" if record.get("reason") else ""
    what = f"branch {record.get('branch')} promoted" if kind == "promotion" else kind
    at: int = record["at"] if is_whole(record.get("at")) else step
    yield Mark(kind, at, at, f"{what}, segment {segment} from step {step}{reason}")
    if reached is not None and reached > step:
        yield Mark(
            "rollback", step, step, f"rolled back from step {reached} to {step}, segment {segment}"
        )


def _lost(event: Event, step: int) -> str:
    return f" after step {event.reached} was reached: steps from {step} on were executed again"


def of_history(history: History) -> list[Mark]:
    """Changes of the batch size, and updates that were skipped."""
    sizes = history.series("batch_size")
    at = np.flatnonzero(np.diff(sizes.values_S)) + 1
    found = [
        Mark(
            "ramp",
            int(sizes.steps_S[i]),
            int(sizes.steps_S[i]),
            f"batch of {sizes.values_S[i]:,.0f} sequences from step {sizes.steps_S[i]}",
        )
        for i in at.tolist()
    ]
    applied = history.series("applied")
    skipped = np.where(applied.values_S == 0, "skipped", "")
    found = _fewer(found)
    for span in spans(applied.steps_S, skipped, _MOST):
        steps = f"steps {span.first} to {span.last}" if span.last > span.first else span.first
        within = span.last - span.first + 1
        many = f": {span.count:,} of these" if span.count < within else ""
        found.append(Mark("skipped", span.first, span.last, f"update skipped, {steps}{many}"))
    return found


def of_exclusions(history: History, segment: Segment, settings: config.Config) -> list[Mark]:
    """The step at which the data jumps over each exclusion, as far as it was reached."""
    found: list[Mark] = []
    for exclusion in segment.exclusions:
        start, stop, *name = exclusion
        step = (
            _step_over_in(history, segment, settings, start, stop, name[0])
            if name
            else _step_over(history, start, stop)
        )
        if step is not None:
            count = words.count(stop - start, "sequence")
            label = f"{count} left out, {stream.told(exclusion)}, at step {step}"
            found.append(Mark("exclusion", step, step, label))
    return found


def _step_over(history: History, start: int, stop: int) -> int | None:
    """As recorded by a run of one corpus."""
    first, size = history.series("first_position"), history.series("batch_size")
    if len(first.steps_S) != len(size.steps_S):
        return None
    # The first batch that would have read the first position left out, or begins after it.
    after = np.flatnonzero(first.values_S + size.values_S > start)
    if len(after) and first.values_S[after[0]] <= stop:
        return int(first.steps_S[after[0]])
    return None


def _step_over_in(
    history: History, segment: Segment, settings: config.Config, start: int, stop: int, corpus: str
) -> int | None:
    """As the arithmetic of a mixture has it: records do not say where each corpus is."""
    fed, steps = segment.stream_of(settings), history.steps_S.tolist()

    def first(step: int) -> int:
        return fed.next_positions(max(0, segment.data_step(step)))[corpus]

    at = bisect.bisect_right(steps, start, key=first)
    if at:
        before = fed.places(max(0, segment.data_step(steps[at - 1])))
        at -= any(name == corpus and position > start for name, position in before)
    return steps[at] if at < len(steps) and first(steps[at]) <= stop else None


def _plain(markdown: str) -> str:
    return markdown.replace("\\", "")


def _fewer(marks: list[Mark]) -> list[Mark]:
    """At most 400: neighbours are put together."""
    marks = sorted(marks, key=lambda mark: mark.first)
    size = -(-len(marks) // _MOST)
    if size <= 1:
        return marks
    parts = [marks[at : at + size] for at in range(0, len(marks), size)]
    return [
        Mark(
            part[0].kind,
            part[0].first,
            max(mark.last for mark in part),
            part[0].label + (f", and {len(part) - 1} more" if len(part) > 1 else ""),
        )
        for part in parts
    ]
