"""The steps and decisions of a run, from its logbook.

The history of a run is that of its last segment: the segment's own steps, those of its parent
before the departure, and so on, each step once. A branch's begins in the run it departed from.
"""

from __future__ import annotations

import collections.abc
import os
import pathlib
from typing import Any

from palm_jax.config import Spikes
from palm_jax.errors import CannotDo
from palm_jax.record import logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.record.segments import Segment
from palm_jax.spikes import detection
from palm_jax.spikes.detection import Detector, Vitals
from palm_jax.spikes.incidents import Alarm, Incident, plain
from palm_jax.spikes.policy import Candidate, Decision, Rollback

Chain = list[tuple[RunFolder, Segment, int | None]]


def chain(run: RunFolder, segment: int | None = None) -> Chain:
    """The segments that make up a history, oldest first, each with the step before which the
    next one departed; None for the last.

    Args:
      segment: whose history; by default the last one's.
    Raises:
      WrongInput: there is no such segment.
    """
    number = run.last_segment() if segment is None else segment
    found: Chain = []
    stop: int | None = None
    while True:
        current = segments.read(run.segment(number))
        found.insert(0, (run, current, stop))
        if (parent := current.parent) is None:
            return found
        number, stop = parent.segment, parent.step
        if parent.run is not None:
            run = RunFolder(pathlib.Path(os.path.normpath(run.path / parent.run)))


def steps(
    run: RunFolder, segment: int | None = None, before: int | None = None
) -> collections.abc.Iterator[tuple[int, Vitals]]:
    """(step, vitals) of a history's recorded steps, ascending, each step's last attempt.

    Args:
      before: only steps before this one. What a process that died recorded after its last
        checkpoint will be executed again, and is no history yet.
    Raises:
      CannotDo: a record without a loss, or as `logbook.scan`.
    """
    for folder, current, stop in chain(run, segment):
        bounds = [bound for bound in (stop, before) if bound is not None]
        yield from _of_segment(folder, current, min(bounds, default=None))


def _of_segment(run: RunFolder, segment: Segment, stop: int | None) -> list[tuple[int, Vitals]]:
    found: dict[int, Vitals] = {}
    for record in logbook.scan(run.path):
        if not isinstance(record, dict) or record["event"] != "step":
            continue
        step = record["step"]
        if record["segment"] != segment.segment or (stop is not None and step >= stop):
            continue
        try:
            found[step] = detection.read(record["computed"])
        except ValueError as error:
            raise CannotDo(
                f"the logbook of {run.path} is damaged in its record of step {step}: {error}; "
                "restore it"
            ) from error
    return sorted(found.items())


def detector(
    run: RunFolder, settings: Spikes, segment: int | None = None, before: int | None = None
) -> tuple[Detector, list[Incident | Alarm]]:
    """A detector that has seen a history, and what it found there. Errors as in `steps`."""
    fold, found = Detector(settings), []
    for step, vitals in steps(run, segment, before):
        found += fold.add(step, vitals)
    return fold, found


def candidates(
    run: RunFolder,
    settings: Spikes,
    checkpoint_steps: collections.abc.Iterable[int],
    segment: int | None = None,
) -> list[Candidate]:
    """Checkpoints, each with what was not healthy about the steps before it.

    Errors as in `steps`.
    """
    wanted, found = set(checkpoint_steps), []
    fold = Detector(settings)
    for step, vitals in steps(run, segment):
        if step in wanted:
            found.append(Candidate(step, fold.complaints()))
        fold.add(step, vitals)
    if fold.last is not None and fold.last + 1 in wanted:
        found.append(Candidate(fold.last + 1, fold.complaints()))
    return found


# --- events of the logbook ---


def event(found: Incident | Alarm, segment: int) -> tuple[str, dict[str, Any]]:
    """Name and fields of the logbook's event: `alarm`, `incident` or `incident_closed`."""
    if isinstance(found, Alarm):
        return "alarm", {"segment": segment, **plain(found)}
    name = "incident" if found.outcome is None else "incident_closed"
    # `step`, like all events: the step whose record showed it.
    step = found.detected if found.closed is None else found.closed
    return name, {"segment": segment, "step": step, **plain(found)}


def decision_fields(
    decision: Decision, incident: Incident, segment: int, opens_segment: int | None
) -> dict[str, Any]:
    """Fields of the event `decision`.

    Args:
      opens_segment: the number of the segment that a rollback begins.
    """
    return {
        "segment": segment,
        "step": incident.closed,
        "incident": list(incident.place),
        "action": decision.action,
        "checkpoint": decision.checkpoint,
        "at": decision.at,
        "exclude": None if decision.exclude is None else list(decision.exclude),
        "rate_scale": decision.rate_scale,
        "opens_segment": opens_segment,
        "reason": decision.reason,
    }


def key(name: str, fields: collections.abc.Mapping[str, Any]) -> tuple[Any, ...]:
    """What two events share if they tell of the same; steps that are executed again tell again."""
    place = tuple(fields.get(part) for part in ("segment", "step", "kind", "vital", "onset"))
    return name, *place


def told(run: RunFolder) -> set[tuple[Any, ...]]:
    """The keys of all alarms and incidents in the logbook. Errors as in `logbook.scan`."""
    return {
        key(record["event"], record)
        for record in logbook.scan(run.path)
        if isinstance(record, dict) and record["event"] in ("alarm", "incident", "incident_closed")
    }


def onsets(run: RunFolder) -> dict[int, list[int]]:
    """By segment, the onsets of its recorded incidents in the order of their detection.

    Errors as in `logbook.scan`.
    """
    found: dict[int, list[int]] = {}
    for record in logbook.scan(run.path):
        if isinstance(record, dict) and record["event"] == "incident":
            logbook.required(record, run.path, segment=int, onset=int)
            found.setdefault(record["segment"], []).append(record["onset"])
    return found


def rollbacks(run: RunFolder, segment: int | None = None) -> list[Rollback]:
    """The rollbacks that led to a history. Errors as in `chain` and `logbook.scan`.

    One whose segment was never opened, because the process died, led nowhere.
    """
    found: dict[tuple[RunFolder, int], Rollback] = {}  # by the segment that it opened
    parts = chain(run, segment)
    for folder in dict.fromkeys(folder for folder, _, _ in parts):
        opened = {current.segment for f, current, _ in parts if f == folder}
        for record in logbook.scan(folder.path):
            if (
                isinstance(record, dict)
                and record["event"] == "decision"
                and record.get("action") == "rollback"
            ):
                logbook.required(record, folder.path, opens_segment=int, incident=list)
                if len(record["incident"]) != 3 or not logbook.is_count(record["incident"][1]):
                    raise logbook.damaged(record, folder.path, "incident")
                # Decided twice, if the process died before the segment was there.
                if record["opens_segment"] in opened:
                    found[folder, record["opens_segment"]] = Rollback(onset=record["incident"][1])
    return list(found.values())
