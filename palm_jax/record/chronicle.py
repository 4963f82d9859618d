"""The run's chronicle: its logbook told in Markdown, as a person on call would keep it.

One entry for whatever is worth telling, in the order of the logbook: when, what was seen, what
was done, what it cost. The logbook is read as a stream. What stays in memory are the entries,
and the pace of the steps: one row for each flush.

Every recorded attempt of a step is either in the history that the run has now, or was lost when
a process died and the run went on from an earlier checkpoint, or was left behind when a later
segment began before it: attempts = steps made + steps redone + steps left behind.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
from typing import Any, TypeGuard

from palm_jax.errors import WrongInput
from palm_jax.record import folder, logbook

Record = dict[str, Any]

# Whole numbers without which an event of this name is told like an unknown one.
_PLACE = {
    "start": ("segment", "step"),
    "program": ("segment", "step"),
    "evaluation": ("segment", "step"),
    "checkpoint": ("segment", "step"),
    "stop": ("segment", "step"),
    "difference": ("segment", "step"),
    "intervention": ("segment", "from_step"),
    "promotion": ("segment", "from_step"),
    "note": (),
}
_MOST_SHOWN = 12  # places in one line


def render(run_dir: str | os.PathLike[str]) -> str:
    """The chronicle of a run, in Markdown.

    Raises:
      WrongInput: the folder is no run.
      CannotDo: the logbook is damaged.
    """
    chronicle = _read(run_dir)
    blocks = [f"# Logbook of {_inline(_name(run_dir))}"]
    blocks += [entry.text() for entry in chronicle.entries]
    blocks += [_table(chronicle.summary())]
    return "\n\n".join(blocks) + "\n"


def summary(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The numbers under the chronicle. Those that are not finite are the strings "inf", "nan".

    `steps_redone` counts the recorded attempts that were lost with a process, and
    `steps_left_behind` those before which a later segment began. Skipped updates and losses
    that are not finite count once, however often their step was executed.

    Errors as in `render`.
    """
    return {"run": _name(run_dir), **logbook.plain(_read(run_dir).summary())}


def note(run_dir: str | os.PathLike[str], text: str) -> None:
    """Enter a person's note into the run's logbook, also while the run is going on.

    Raises:
      WrongInput: the text is empty, or the folder is no run.
      CannotDo: the disk does not take it.
    """
    _check_run(run_dir)
    if not text.strip():
        raise WrongInput("the note is empty: give its text, in quotes if it has spaces")
    with logbook.Logbook.open(run_dir) as book:
        book.append("note", text=text)


def _check_run(run_dir: str | os.PathLike[str]) -> None:
    if not folder.is_run(run_dir):
        raise WrongInput(f"{os.fspath(run_dir)} is not a run's folder: it has no {folder.CONFIG}")


def _name(run_dir: str | os.PathLike[str]) -> str:
    return pathlib.Path(os.path.abspath(run_dir)).name


def _read(run_dir: str | os.PathLike[str]) -> _Chronicle:
    _check_run(run_dir)
    chronicle = _Chronicle()
    for _, records in logbook.scan_parts(run_dir):
        for found in records:
            if isinstance(found, logbook.Torn):
                chronicle.torn(found)
            else:
                chronicle.add(found)
        chronicle.end_part()
    chronicle.end()
    return chronicle


# --- what is counted ---


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Recorded steps, and the time they took."""

    first: int
    last: int
    count: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{_count(self.count, 'recorded step')} ({_span(self.first, self.last)}), "
            f"{_duration(self.seconds)} of training"
        )


class _History:
    """The steps of the history that the run has now, with the pace of each stretch."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, float]] = []  # first, stop, seconds a step

    def __len__(self) -> int:
        return sum(stop - first for first, stop, _ in self._rows)

    def add(self, step: int, seconds: float) -> None:
        first = step
        if self._rows and self._rows[-1][1:] == (step, seconds):
            first = self._rows.pop()[0]
        self._rows.append((first, step + 1, seconds))

    def since(self, step: int) -> _Steps | None:
        """The steps from `step` on; None if there are none."""
        rows = []
        for first, stop, pace in reversed(self._rows):
            if stop <= step:
                break
            rows.append((max(first, step), stop, pace))
        if not rows:
            return None
        return _Steps(
            first=rows[-1][0],
            last=rows[0][1] - 1,
            count=sum(stop - first for first, stop, _ in rows),
            seconds=sum((stop - first) * pace for first, stop, pace in rows),
        )

    def cut(self, step: int) -> _Steps | None:
        """As `since`, and takes these steps out of the history."""
        taken = self.since(step)
        while self._rows and self._rows[-1][1] > step:
            first, _, pace = self._rows.pop()
            if first < step:
                self._rows.append((first, step, pace))
        return taken


class _Places:
    """Steps at which something was seen: all counted, the first ranges kept."""

    def __init__(self) -> None:
        self.count = 0
        self._ranges: list[tuple[int, int]] = []
        self._kept = 0

    def add(self, step: int) -> None:
        self.count += 1
        all_kept = self._kept == self.count - 1
        if all_kept and self._ranges and self._ranges[-1][1] + 1 == step:
            self._ranges[-1] = (self._ranges[-1][0], step)
        elif all_kept and len(self._ranges) < _MOST_SHOWN:
            self._ranges.append((step, step))
        else:
            return
        self._kept += 1

    def __str__(self) -> str:
        shown = ", ".join(_span(first, last) for first, last in self._ranges)
        more = self.count - self._kept
        return f"{shown} and {more:,} more" if more else shown


@dataclasses.dataclass
class _Totals:
    attempts: int = 0
    attempts_without_time: int = 0
    steps_redone: int = 0
    redone_seconds: float = 0.0
    steps_left_behind: int = 0
    left_behind_seconds: float = 0.0
    training_seconds: float = 0.0
    compile_seconds: float = 0.0
    evaluations: int = 0
    checkpoints: int = 0
    starts: int = 0
    stops: int = 0
    ends_without_stop: int = 0
    interventions: int = 0
    promotions: int = 0
    notes: int = 0
    differences: int = 0
    skipped_updates: int = 0
    non_finite_losses: int = 0


# --- what is told ---


@dataclasses.dataclass
class _Entry:
    title: str
    lines: list[str] = dataclasses.field(default_factory=list)
    below: str = ""  # a block of its own

    def text(self) -> str:
        blocks = [f"## {self.title}", "\n".join(f"- {line}" for line in self.lines), self.below]
        return "\n\n".join(block for block in blocks if block)


@dataclasses.dataclass
class _Stretch:
    """Steps one after the other, and what belongs to them."""

    since: datetime.datetime | None
    segment: int
    first: int
    last: int | None = None  # None: no step was recorded yet
    seconds: float = 0.0
    executed_before: int = 0
    first_loss: float | None = None  # finite ones
    last_loss: float | None = None
    highest: tuple[float, int] | None = None  # loss, step
    non_finite: _Places = dataclasses.field(default_factory=_Places)
    skipped: _Places = dataclasses.field(default_factory=_Places)
    programs: int = 0
    compile_seconds: float = 0.0
    evaluations: list[str] = dataclasses.field(default_factory=list)  # the first and the last
    num_evaluations: int = 0
    lowest: tuple[float, str] | None = None  # held-out loss, and its evaluation
    checkpoints: int = 0
    last_checkpoint: int = 0

    def entry(self) -> _Entry:
        where = f"at step {self.first}"
        if self.last is not None:
            where = (
                f"{'steps' if self.last > self.first else 'step'} {_span(self.first, self.last)}"
            )
        begun = "" if self.since is None else f"from {_when(self.since)}: "
        return _Entry(f"{begun}{where}, segment {self.segment}", [*self._seen()])

    def _seen(self) -> collections.abc.Iterator[str]:
        if self.last is None:
            yield "No step was recorded."
        else:
            made = _count(self.last - self.first + 1, "step")
            line = f"Made {made} in {_duration(self.seconds)}"
            if self.first_loss is not None:
                line += f"; loss {self.first_loss:.5g} to {self.last_loss:.5g}"
            yield f"{line}."
        if self.executed_before:
            yield f"Executed before: {_count(self.executed_before, 'step')}."
        if self.highest is not None and self.highest[0] not in (self.first_loss, self.last_loss):
            yield f"The highest loss was {self.highest[0]:.5g}, at step {self.highest[1]}."
        for what, places in (
            ("The loss was not finite", self.non_finite),
            ("The update was skipped", self.skipped),
        ):
            if places.count:
                yield f"{what} at {_count(places.count, 'step')}: {places}."
        if self.programs:
            programs = _count(self.programs, "program")
            yield f"Compiled {programs} in {_duration(self.compile_seconds)}."
        if self.evaluations:
            line = f"Held-out loss {', '.join(self.evaluations)}"
            if self.num_evaluations > 2 and self.lowest is not None:
                line += f"; the lowest of {self.num_evaluations:,} was {self.lowest[1]}"
            yield f"{line}."
        if self.checkpoints:
            saved = _count(self.checkpoints, "checkpoint")
            yield f"Saved {saved}, the last at step {self.last_checkpoint}."


@dataclasses.dataclass
class _Process:
    """What trains from a `start` to its `stop`, or to its death."""

    segment: int
    saved: int  # the newest state from which the run can go on
    planned: Any
    heard: datetime.datetime | None  # its last event with a time
    seconds: float = 0.0  # of the steps recorded since then
    torn: str = ""
    different: bool = False


class _Chronicle:
    """Takes in the logbook, part by part; then has its entries and numbers."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.totals = _Totals()
        self._history = _History()
        self._segment: int | None = None
        self._segments: set[int] = set()
        self._exclusions: list[tuple[int, int]] = []
        self._torn: list[str] = []
        self._stretch: _Stretch | None = None
        self._process: _Process | None = None
        self._dead: tuple[_Process, _Entry] | None = None  # its cost shows when the run goes on
        self._stopped: datetime.datetime | None = None
        self._copied = False  # this part holds records of a promoted branch
        self._now: datetime.datetime | None = None

    def summary(self) -> dict[str, Any]:
        return {
            "steps_made": len(self._history),
            **dataclasses.asdict(self.totals),
            "sequences_excluded": _length_of_union(self._exclusions),
            "segments": len(self._segments),
            "torn_lines": list(self._torn),
        }

    def add(self, record: Record) -> None:
        name = record["event"]
        if name == "step":
            self._step(record)
            return
        self._now = _moment(record.get("time"))
        tell: dict[str, collections.abc.Callable[[Record], None]] = {
            "start": self._start,
            "program": self._program,
            "evaluation": self._evaluation,
            "checkpoint": self._checkpoint,
            "stop": self._stop,
            "difference": self._difference,
            "intervention": self._intervention,
            "promotion": self._promotion,
            "note": self._note,
        }
        known = name in tell and all(_is_whole(record.get(key)) for key in _PLACE[name])
        (tell[name] if known else self._unknown)(record)
        if self._process is not None and self._now is not None:
            self._process.heard, self._process.seconds = self._now, 0.0

    def torn(self, found: logbook.Torn) -> None:
        where = f"logbook/{found.path.name}:{found.line}"
        self._torn.append(where)
        if self._process is not None:
            self._process.torn = where
        else:
            self._enter(_Entry("a line is torn", [_torn_line(where)]))

    def end_part(self) -> None:
        self._end_process()
        self._close_stretch()
        self._copied = False

    def end(self) -> None:
        """The logbook ends: nobody has gone on after the last process, if it died."""
        if self._dead is None:
            return
        process, entry = self._dead
        lost = self._history.since(process.saved)
        if not process.different:
            entry.lines.insert(0, "The process died, or is still running.")
        cost = "no recorded step" if lost is None else str(lost)
        entry.lines.append(f"To go on from step {process.saved} would cost: {cost}.")

    def _tell(self, title: str, lines: list[str], below: str = "") -> None:
        self._enter(_Entry(f"{_when(self._now)}: {title}", lines, below))

    def _enter(self, entry: _Entry) -> None:
        self._close_stretch()
        self.entries.append(entry)

    def _close_stretch(self) -> None:
        if self._stretch is not None:
            self.entries.append(self._stretch.entry())
            self._stretch = None

    # --- where the history goes ---

    def _start(self, record: Record) -> None:
        self._end_process()
        segment, step = record["segment"], record["step"]
        lines = []
        if _is_whole(record.get("steps")):
            lines.append(f"Steps planned: {record['steps']:,}.")
        if self._segment is None:
            lines += _first_environment(record)
        lines += _changes("", record.get("settings_changed"))
        lines += _changes("Environment: ", record.get("environment_changed"))
        lines += self._go_on(record)
        for where in _texts(record.get("torn_lines")):
            if f"logbook/{where}" not in self._torn:  # those were told where they lie
                lines.append(_torn_line(f"logbook/{where}"))
        for name in _texts(record.get("leftovers")):
            lines.append(f"Checkpoint {_code(name)} was never finished.")
        if self._copied:
            self._tell(f"the branch's records from step {step} on, now segment {segment}", lines)
            return
        verb = "went on" if self.totals.starts or step else "started"
        self._tell(f"{verb} at step {step}, segment {segment}", lines)
        self.totals.starts += 1
        self._process = _Process(segment, step, record.get("steps"), self._now)
        self._stopped = None

    def _go_on(self, record: Record) -> list[str]:
        """What a start executes again, and what that costs."""
        segment, step = record["segment"], record["step"]
        lines = []
        if self._now is not None and self._stopped is not None and not self._copied:
            still = (self._now - self._stopped).total_seconds()
            if still >= 0:
                lines.append(f"The run had stood still for {_duration(still)}.")
        if segment != self._segment:
            lost = self._depart(segment, step)
            return lines if lost is None else [*lines, f"Left behind: {lost}."]
        recorded = record.get("recorded_steps")
        if _is_whole(recorded) and recorded > step:
            again = _count(recorded - step, "recorded step")
            lines.append(
                f"Executes {again} again ({_span(step, recorded - 1)}): the bits must be the same."
            )
        lost = self._redo(step)
        cost = "no recorded step" if lost is None else str(lost)
        if self._dead is None:
            return lines if lost is None else [*lines, f"What that cost: {cost}."]
        process, entry = self._dead
        self._dead = None
        if not process.different:
            entry.lines.insert(0, "The process died.")
        entry.lines.append(f"The run went on from step {step}. What that cost: {cost}.")
        if self._now is not None and process.heard is not None:
            still = (self._now - process.heard).total_seconds() - process.seconds
            if still > 0:
                entry.lines.append(f"It stood still for at most {_duration(still)}.")
        return lines

    def _redo(self, step: int) -> _Steps | None:
        """Go on in the same segment with the state before `step`."""
        lost = self._history.cut(step)
        if lost is not None:
            self.totals.steps_redone += lost.count
            self.totals.redone_seconds += lost.seconds
        return lost

    def _depart(self, segment: int, step: int) -> _Steps | None:
        """Enter another segment, which begins with the state before `step`."""
        if self._dead is not None:
            process, entry = self._dead
            self._dead = None
            if not process.different:
                entry.lines.insert(0, "The process died.")
            entry.lines.append(
                f"The run did not go on from there: segment {segment} begins at step {step}."
            )
        lost = self._history.cut(step)
        if lost is not None:
            self.totals.steps_left_behind += lost.count
            self.totals.left_behind_seconds += lost.seconds
        self._segment = segment
        self._segments.add(segment)
        return lost

    def _stop(self, record: Record) -> None:
        step, signal = record["step"], record.get("signal")
        process, self._process = self._process, None
        finished = signal is None or (process is not None and process.planned == step)
        how = "finished" if finished else f"stopped by {_value(signal)}"
        lines = []
        if record.get("state_digest"):
            lines.append(f"The state is saved; its digest is {_value(record['state_digest'])}.")
        self._tell(f"{how}, {_count(step, 'step')} made", lines)
        self.totals.stops += 1
        self._stopped = self._now

    def _end_process(self) -> None:
        """Called where a part ends, or a process starts: the one before had no `stop`."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self.totals.ends_without_stop += 1
        lost = self._history.since(process.saved)
        if lost is None:
            line = f"Nothing was recorded after the state of step {process.saved}."
        else:
            line = f"Recorded up to step {lost.last}; saved was the state of step {process.saved}."
        why = "because of the difference" if process.different else "without a stop"
        heard = "" if process.heard is None else f"after {_when(process.heard)}: "
        entry = _Entry(
            f"{heard}ended {why}, segment {process.segment}",
            [line, *([_torn_line(process.torn)] if process.torn else [])],
        )
        self._enter(entry)
        self._dead = (process, entry)

    def _intervention(self, record: Record) -> None:
        at = record.get("at")
        lines = [] if at is None else [f"In force from step {_shown(at)} on."]
        self._new_segment(record, "intervention", lines)
        self.totals.interventions += 1

    def _promotion(self, record: Record) -> None:
        self._new_segment(record, f"branch {_value(record.get('branch'))} promoted", [])
        self.totals.promotions += 1
        self._copied = True

    def _new_segment(self, record: Record, what: str, lines: list[str]) -> None:
        segment, step = record["segment"], record["from_step"]
        lines += _changes("", record.get("changes"))
        exclusions = record.get("exclusions")
        for exclusion in exclusions if isinstance(exclusions, list) else []:
            lines.append(self._exclude(exclusion))
        if record.get("reason") is not None:
            lines.append(f"Reason: {_shown(record['reason'])}")
        lost = self._depart(segment, step)
        lines.append(f"Left behind: {'nothing' if lost is None else lost}.")
        self._tell(f"{what}; segment {segment} begins at step {step}", lines)

    def _exclude(self, exclusion: Any) -> str:
        if not (
            isinstance(exclusion, list)
            and len(exclusion) == 2
            and all(_is_whole(end) for end in exclusion)
            and exclusion[0] < exclusion[1]
        ):
            return f"Excluded: {_value(exclusion)}."
        start, stop = exclusion
        self._exclusions.append((start, stop))
        return f"Excluded: {_count(stop - start, 'sequence')}, positions {start}:{stop}."

    # --- what happens on the way ---

    def _on_the_way(self, segment: int, step: int) -> _Stretch:
        if self._stretch is None or self._stretch.segment != segment:
            self._close_stretch()
            since = self._now
            if since is None and self._process is not None:
                since = self._process.heard
            self._stretch = _Stretch(since, segment, step)
        return self._stretch

    def _step(self, record: Record) -> None:
        segment, step = int(record["segment"]), int(record["step"])
        if segment != self._segment:
            self._depart(segment, step)
        else:
            self._redo(step)
        if self._stretch is not None and self._stretch.last not in (None, step - 1):
            self._close_stretch()
        stretch = self._on_the_way(segment, step)
        if stretch.last is None:
            stretch.first = step
        stretch.last = step
        measured = record.get("measured")
        seconds = _number(measured.get("step_seconds")) if isinstance(measured, dict) else None
        self.totals.attempts += 1
        if seconds is None or not 0 <= seconds < math.inf:
            self.totals.attempts_without_time += 1
            seconds = 0.0
        self._history.add(step, seconds)
        self.totals.training_seconds += seconds
        stretch.seconds += seconds
        if self._process is not None:
            self._process.seconds += seconds
        first_attempt = record["attempt"] <= 1
        stretch.executed_before += not first_attempt
        loss = _number(record["computed"].get("loss"))
        if loss is not None and math.isfinite(loss):
            stretch.first_loss = loss if stretch.first_loss is None else stretch.first_loss
            stretch.last_loss = loss
            if stretch.highest is None or loss > stretch.highest[0]:
                stretch.highest = (loss, step)
        elif loss is not None:
            stretch.non_finite.add(step)
            self.totals.non_finite_losses += first_attempt
        if record["computed"].get("applied") is False:
            stretch.skipped.add(step)
            self.totals.skipped_updates += first_attempt

    def _program(self, record: Record) -> None:
        stretch = self._on_the_way(record["segment"], record["step"])
        seconds = _number(record.get("compile_seconds"))
        stretch.programs += 1
        if seconds is not None and 0 <= seconds < math.inf:
            stretch.compile_seconds += seconds
            self.totals.compile_seconds += seconds

    def _evaluation(self, record: Record) -> None:
        stretch = self._on_the_way(record["segment"], record["step"])
        loss, bits = _number(record.get("loss")), _number(record.get("bits_per_byte"))
        told = "unknown" if loss is None else f"{loss:.5g}"
        told += "" if bits is None else f" ({bits:.5g} bits per byte)"
        told += f" at step {record['step']}"
        stretch.evaluations = [*stretch.evaluations[:1], told]
        stretch.num_evaluations += 1
        if loss is not None and (stretch.lowest is None or loss < stretch.lowest[0]):
            stretch.lowest = (loss, told)
        self.totals.evaluations += 1

    def _checkpoint(self, record: Record) -> None:
        stretch = self._on_the_way(record["segment"], record["step"])
        stretch.checkpoints += 1
        stretch.last_checkpoint = record["step"]
        if self._process is not None:
            self._process.saved = record["step"]
        self.totals.checkpoints += 1

    def _difference(self, record: Record) -> None:
        step, field = record["step"], _value(record.get("field"))
        first, again = _value(record.get("first")), _value(record.get("again"))
        which = f"attempt {_shown(record.get('attempt'))}"
        lines = [
            f"{field} had the bits {first} at first, and {again} in {which}.",
            "Machine, environment or checkpoint is not what it was. Nothing was saved since.",
        ]
        self._tell(f"step {step} of segment {record['segment']} computed other bits", lines)
        self.totals.differences += 1
        if self._process is not None:
            self._process.different = True

    def _note(self, record: Record) -> None:
        text = record.get("text")
        if not isinstance(text, str):
            self._unknown(record)
            return
        self._tell("note", [], _fenced(text))
        self.totals.notes += 1

    def _unknown(self, record: Record) -> None:
        fields = {key: value for key, value in record.items() if key != "event"}
        if self._now is not None:  # the title has it
            del fields["time"]
        lines = [f"{_code(key)}: {_code(_json(value))}" for key, value in fields.items()]
        self._tell(f"event {_code(record['event'])}", lines)


def _first_environment(record: Record) -> list[str]:
    lines = []
    if _is_whole(record.get("parameters")):
        lines.append(f"Parameters: {record['parameters']:,}.")
    environment = record.get("environment")
    if isinstance(environment, dict):
        names = (
            "jax",
            "jaxlib",
            "libtpu",
            "device_kind",
            "device_count",
            "process_count",
            "commit",
        )
        there = [name for name in names if environment.get(name) is not None]
        told = ", ".join(f"{_code(name)} {_value(environment[name])}" for name in there)
        lines += [f"Environment: {told}."] if told else []
    return lines


def _changes(of: str, changes: Any) -> list[str]:
    if not changes:
        return []
    if not isinstance(changes, dict):
        return [f"{of}changed: {_value(changes)}."]
    lines = []
    for key, both in changes.items():
        if isinstance(both, list) and len(both) == 2:
            lines.append(f"{of}{_code(key)} was {_value(both[0])}, is {_value(both[1])}.")
        else:
            lines.append(f"{of}{_code(key)} changed: {_value(both)}.")
    return lines


def _torn_line(where: str) -> str:
    return f"{_code(where)} is torn: a process died while writing it. It was left out."


def _table(totals: dict[str, Any]) -> str:
    redone, left = _duration(totals["redone_seconds"]), _duration(totals["left_behind_seconds"])
    rows = {
        "steps made": f"{totals['steps_made']:,}",
        "attempts": f"{totals['attempts']:,}",
        "steps redone": f"{totals['steps_redone']:,} ({redone})",
        "steps left behind": f"{totals['steps_left_behind']:,} ({left})",
        "sequences excluded": f"{totals['sequences_excluded']:,}",
        "time training": _duration(totals["training_seconds"]),
        "time compiling": _duration(totals["compile_seconds"]),
        "segments": f"{totals['segments']:,}",
        "starts": f"{totals['starts']:,}",
        "ends without a stop": f"{totals['ends_without_stop']:,}",
        "skipped updates": f"{totals['skipped_updates']:,}",
        "losses not finite": f"{totals['non_finite_losses']:,}",
        "differences": f"{totals['differences']:,}",
        "torn lines": f"{len(totals['torn_lines']):,}",
    }
    if totals["attempts_without_time"]:
        rows["attempts without a measured time"] = f"{totals['attempts_without_time']:,}"
    lines = ["| in all | |", "| --- | ---: |"]
    return "\n".join(["## Summary", "", *lines, *(f"| {k} | {v} |" for k, v in rows.items())])


# --- values from the logbook ---


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, float) or _is_whole(value):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def _texts(value: Any) -> list[str]:
    return [str(inner) for inner in value] if isinstance(value, list) else []


def _moment(time: Any) -> datetime.datetime | None:
    try:
        moment = datetime.datetime.fromisoformat(time)
        return None if moment.tzinfo is None else moment.astimezone(datetime.UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def _length_of_union(intervals: list[tuple[int, int]]) -> int:
    length, reached = 0, None
    for start, stop in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        length += max(stop - begin, 0)
        reached = stop if reached is None else max(stop, reached)
    return length


# --- words ---

# Control characters, line ends, text that runs backwards, halves of surrogate pairs.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"[\\`*\[\]<~|$]|&(?=#?\w+;)|#(?=#*$)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def _when(moment: datetime.datetime | None) -> str:
    if moment is None:
        return "unknown time"
    return f"{moment.replace(tzinfo=None).isoformat(' ', 'seconds')} UTC"


def _duration(seconds: float) -> str:
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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(value: Any) -> str:
    return _code(value if isinstance(value, str) else _json(value))


def _shown(value: Any) -> str:
    return _inline(value if isinstance(value, str) else _json(value))


def _one_line(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", " ".join(text.split()))


def _inline(text: str) -> str:
    """A person's text within a line, where none of it is Markdown."""
    return _MARKDOWN.sub(r"\\\g<0>", _one_line(text)) or "(empty)"


def _code(text: str) -> str:
    """A code span, which backticks in the text do not end."""
    text = _one_line(text) or '""'
    fence = "`" * (_longest_backticks(text) + 1)
    space = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{space}{text}{space}{fence}"


def _fenced(text: str) -> str:
    """A block with the text as it is, which backticks in the text do not end."""
    lines = [_UNPRINTABLE.sub("\ufffd", line.expandtabs(4)) for line in text.splitlines()]
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def _longest_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
