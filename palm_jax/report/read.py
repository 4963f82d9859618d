"""A run's folder as a report needs it: one pass over the logbook, and the small files."""

from __future__ import annotations

import collections.abc
import dataclasses
import os
import pathlib
from typing import Any

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, logbook, segments
from palm_jax.record.chronicle import Teller, histories, spikes
from palm_jax.record.chronicle.values import Record, is_whole
from palm_jax.report import diagnoses
from palm_jax.report.marks import Event
from palm_jax.report.series import Columns, History, as_float


@dataclasses.dataclass(frozen=True)
class Branch:
    name: str
    segment: segments.Segment
    steps: int  # that it recorded
    last_step: int | None
    last_loss: float | None


@dataclasses.dataclass(frozen=True)
class Reading:
    name: str
    settings: config.Config
    segment: int  # in which the history shown ends
    segments: dict[int, segments.Segment]
    branches: list[Branch]
    diagnosed: list[diagnoses.Diagnosed]
    history: History
    teller: Teller
    events: list[Event]  # all but steps and evaluations, in the order of the logbook
    evaluations: list[Record]  # those of the history, one a step and split, rising
    digest: tuple[int, str] | None  # the newest state of the history that was saved: step, digest
    environment: Record  # of the last start
    status: str
    num_incidents: int
    num_open_incidents: int  # of those within the history


def read(run_dir: str | os.PathLike[str], segment: int | None = None) -> Reading:
    """Read a run for its report.

    Args:
      segment: the history that ends in it; the default is the one that the run has now.
    Raises:
      WrongInput: the folder is no run, or has no such segment.
      CannotDo: logbook or segments are damaged.
    """
    path = pathlib.Path(os.path.abspath(run_dir))
    if not folder.is_run(path):
        raise WrongInput(f"{os.fspath(run_dir)} is not a run's folder: it has no {folder.CONFIG}")
    run = folder.RunFolder(path)
    settings = run.config()
    numbers = range(run.last_segment() + 1)
    if segment is not None and segment not in numbers:
        raise WrongInput(
            f"--segment {segment}: {os.fspath(run_dir)} has segments 0 to {numbers[-1]}"
        )
    described = {number: _segment(run, number) for number in numbers}
    book = _Book(histories.parents(run))
    for _, records in logbook.scan_parts(path):
        for found in records:
            book.add(found)
        book.end_part()
    book.end()
    rows = book.histories.rows if segment is None else book.histories.of(segment)
    last = segment if segment is not None else book.histories.segment
    history = book.columns.history(rows or [])
    return Reading(
        name=path.name,
        settings=settings,
        segment=numbers[-1] if last is None else last,
        segments=described,
        branches=[_branch(place) for place in _branches(run)],
        diagnosed=diagnoses.read(path),
        history=history,
        teller=book.teller,
        events=book.events,
        evaluations=_of_history(history, book.evaluations),
        digest=_newest_digest(history, book.events),
        environment=book.environment,
        status=book.status,
        num_incidents=book.num_incidents,
        num_open_incidents=sum(
            history.segment_before(step + 1) == number
            for number, step in book.open_incidents.values()
        ),
    )


class _Book:
    """Takes in the logbook, once."""

    def __init__(self, parents: collections.abc.Mapping[int, int]) -> None:
        self.columns, self.teller = Columns(), Teller(parents)
        # The value of a row is attempt number - step, so that attempts in a row share one.
        self.histories: histories.Histories[int] = histories.Histories(parents)
        self.events: list[Event] = []
        self.evaluations: list[Record] = []
        self.environment: Record = {}
        self.status = "never started"
        self.num_incidents = 0
        self.open_incidents: dict[tuple[Any, ...], tuple[int | None, int]] = {}  # segment, step
        self._planned: Any = None
        self._copied = False  # this part holds records of a promoted branch

    def add(self, record: Record | logbook.Torn) -> None:
        if isinstance(record, logbook.Torn):
            self.teller.torn(record)
            return
        self.teller.add(record)
        match record["event"]:
            case "step":
                self._go_to(record["segment"], record["step"])
                number = self.columns.add(record)
                self.histories.add(record["step"], number - record["step"])
            case "evaluation":
                self.evaluations.append(record)
            case "start" | "intervention" | "promotion":
                self._turn(record)
            case name:
                self.events.append(Event(record, None))
                if name == "stop":
                    self._stop(record)
                elif name == "incident" and (step := spikes.step_of(record)) is not None:
                    self.num_incidents += 1
                    self.open_incidents[spikes.place(record)] = record.get("segment"), step
                elif name == "incident_closed":
                    self.open_incidents.pop(spikes.place(record), None)

    def end_part(self) -> None:
        self.teller.end_part()
        self._copied = False

    def end(self) -> None:
        self.teller.end()

    def _turn(self, record: Record) -> None:
        """Where the history may go on from an earlier step."""
        rows, name = self.histories.rows, record["event"]
        reached = rows[-1].stop if rows else None
        step = record.get("step" if name == "start" else "from_step")
        if not (is_whole(record.get("segment")) and is_whole(step)):
            return
        self._go_to(record["segment"], step)
        if not (name == "start" and self._copied):
            self.events.append(Event(record, reached))
        if name != "start":
            self.status = f"segment {record['segment']} opened at step {step}, not gone on yet"
        elif not self._copied:
            self._planned = record.get("steps")
            self.status = "running, or died without a stop"
            if isinstance(record.get("environment"), dict):
                self.environment = record["environment"]
        self._copied |= name == "promotion"

    def _stop(self, record: Record) -> None:
        step, signal = record.get("step"), record.get("signal")
        if signal is None or step == self._planned:
            self.status = f"finished at step {step}"
        else:
            self.status = f"stopped by {signal} at step {step}"

    def _go_to(self, segment: int, step: int) -> None:
        if segment != self.histories.segment:
            self.histories.enter(segment, step)
        else:
            self.histories.go_on(step)


def _segment(run: folder.RunFolder, number: int) -> segments.Segment:
    if not (run.segment(number) / segments.FILE_NAME).is_file():
        raise CannotDo(
            f"{run.path} is damaged: segment {number} has no {segments.FILE_NAME}; restore it"
        )
    return segments.read(run.segment(number))


def _of_history(history: History, evaluations: list[Record]) -> list[Record]:
    """The last evaluation of each split at each step, of states that the history made."""
    found: dict[tuple[int, str], Record] = {}
    for record in evaluations:
        step, segment = record.get("step"), record.get("segment")
        if not (is_whole(step) and is_whole(segment)):
            continue
        # A segment that begins at `step` evaluates its parent's state, too.
        at_start = len(history.steps_S) == 0 or step <= int(history.steps_S[0])
        if at_start or history.segment_before(step) == segment:
            found[step, str(record.get("split"))] = record
    return [found[key] for key in sorted(found)]


def _newest_digest(history: History, events: list[Event]) -> tuple[int, str] | None:
    newest = None
    for event in events:
        record = event.record
        step, digest = record.get("step"), record.get("state_digest")
        if record["event"] not in ("checkpoint", "stop") or not is_whole(step) or not digest:
            continue
        own = history.segment_before(step) == record.get("segment")
        if own and (newest is None or step >= newest[0]):
            newest = step, str(digest)
    return newest


def _branches(run: folder.RunFolder) -> list[pathlib.Path]:
    found = (run.path / "branches").glob("*")
    return sorted(path for path in found if folder.is_run(path))


def _branch(path: pathlib.Path) -> Branch:
    last_step, last_loss, steps = None, None, set()
    for record in logbook.scan(path):
        if isinstance(record, dict) and record["event"] == "step":
            steps.add(record["step"])
            last_step, last_loss = record["step"], as_float(record["computed"].get("loss"))
    branch = folder.RunFolder(path)
    segment = _segment(branch, branch.last_segment())
    return Branch(path.name, segment, len(steps), last_step, last_loss)
