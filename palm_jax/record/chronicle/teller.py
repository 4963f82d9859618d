"""Takes in a logbook record by record, and tells it: which event means what."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import math
from typing import Any

from palm_jax import stream
from palm_jax.record import logbook
from palm_jax.record.chronicle import events, spikes, values, words
from palm_jax.record.chronicle.histories import Histories, Rows
from palm_jax.record.chronicle.stretches import Entry, Stretch
from palm_jax.record.chronicle.values import Record

# Whole numbers without which an event of this name is told like an unknown one.
PLACE = {
    "start": ("segment", "step"),
    "program": ("segment", "step"),
    "evaluation": ("segment", "step"),
    "checkpoint": ("segment", "step"),
    "profile": ("segment", "step", "stop_step"),
    "stop": ("segment", "step"),
    "difference": ("segment", "step"),
    "intervention": ("segment", "from_step"),
    "promotion": ("segment", "from_step"),
    "pruned": ("segment",),
    "alarm": ("segment", "step"),
    "alert_failed": (),
    "parity": ("segment", "step"),
    "verification": ("segment", "step"),
    "restart": (),
    "incident": (),
    "incident_closed": (),
    "decision": (),
    "note": (),
}


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Recorded steps, and the time they took."""

    first: int
    last: int
    count: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{words.count(self.count, 'recorded step')} ({words.span(self.first, self.last)}), "
            f"{words.duration(self.seconds)} of training"
        )


def _steps(rows: Rows[float]) -> _Steps | None:
    """Steps with the pace of each stretch, in seconds; None if there are none."""
    if not rows:
        return None
    return _Steps(
        first=rows[0].first,
        last=rows[-1].stop - 1,
        count=sum(row.stop - row.first for row in rows),
        seconds=sum((row.stop - row.first) * row.value for row in rows),
    )


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
    incidents: int = 0
    alarms: int = 0
    decisions: int = 0
    notes: int = 0
    differences: int = 0
    verifications: int = 0
    restarts: int = 0
    skipped_updates: int = 0
    non_finite_losses: int = 0


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


class Teller:
    """Takes in the logbook, part by part; then has its entries and numbers.

    Args:
      parents: as from histories.parents.
    """

    def __init__(self, parents: collections.abc.Mapping[int, int]) -> None:
        self.entries: list[Entry] = []
        self.totals = _Totals()
        self._histories: Histories[float] = Histories(parents)  # the value is seconds a step
        self._segments: set[int] = set()
        self._excluded: dict[str, list[tuple[int, int]]] = {}  # by corpus; "": the only one
        self._torn: list[str] = []
        self._stretch: Stretch | None = None
        self._process: _Process | None = None
        self._dead: tuple[_Process, Entry] | None = None  # its cost shows when the run goes on
        self._stopped: datetime.datetime | None = None
        self._copied = False  # this part holds records of a promoted branch
        self._now: datetime.datetime | None = None

    def text(self, name: str) -> str:
        """The chronicle of the run of this name, in Markdown."""
        blocks = [f"# Logbook of {words.inline(name)}"]
        blocks += [entry.text() for entry in self.entries]
        return "\n\n".join([*blocks, events.table(self.summary())]) + "\n"

    def summary(self) -> dict[str, Any]:
        return {
            "steps_made": len(self._histories),
            **dataclasses.asdict(self.totals),
            "sequences_excluded": sum(map(values.length_of_union, self._excluded.values())),
            "segments": len(self._segments),
            "torn_lines": list(self._torn),
        }

    def add(self, record: Record) -> None:
        name = record["event"]
        if name == "step":
            self._step(record)
            return
        self._now = values.moment(record.get("time"))
        tell: dict[str, collections.abc.Callable[[Record], None]] = {
            "start": self._start,
            "program": self._program,
            "evaluation": self._evaluation,
            "checkpoint": self._checkpoint,
            "stop": self._stop,
            "difference": self._difference,
            "intervention": self._intervention,
            "promotion": self._promotion,
            "pruned": self._pruned,
            "profile": self._profile,
            "alarm": self._alarm,
            "alert_failed": self._alert_failed,
            "parity": self._parity,
            "verification": self._verification,
            "restart": self._restart,
            "incident": self._spike,
            "incident_closed": self._spike,
            "decision": self._spike,
            "note": self._note,
        }
        known = name in tell and all(values.is_whole(record.get(key)) for key in PLACE[name])
        (tell[name] if known else self._unknown)(record)
        if self._process is not None and self._now is not None:
            self._process.heard, self._process.seconds = self._now, 0.0

    def torn(self, found: logbook.Torn) -> None:
        where = f"logbook/{found.path.name}:{found.line}"
        self._torn.append(where)
        if self._process is not None:
            self._process.torn = where
        else:
            self._enter(Entry("a line is torn", [events.torn_line(where)]))

    def end_part(self) -> None:
        self._end_process()
        self._close_stretch()
        self._copied = False

    def end(self) -> None:
        """The logbook ends: nobody has gone on after the last process, if it died."""
        if self._dead is None:
            return
        process, entry = self._dead
        lost = _steps(self._histories.since(process.saved))
        if not process.different:
            entry.lines.insert(0, "The process died, or is still running.")
        cost = "no recorded step" if lost is None else str(lost)
        entry.lines.append(f"To go on from step {process.saved} would cost: {cost}.")

    def _tell(self, title: str, lines: list[str], below: str = "") -> None:
        self._enter(Entry(f"{words.when(self._now)}: {title}", lines, below))

    def _enter(self, entry: Entry) -> None:
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
        if values.is_whole(record.get("steps")):
            lines.append(f"Steps planned: {record['steps']:,}.")
        if self._histories.segment is None:
            lines += events.first_environment(record)
        lines += events.changes("", record.get("settings_changed"))
        lines += events.changes("Environment: ", record.get("environment_changed"))
        lines += self._go_on(record)
        for where in values.texts(record.get("torn_lines")):
            if f"logbook/{where}" not in self._torn:  # those were told where they lie
                lines.append(events.torn_line(f"logbook/{where}"))
        for name in values.texts(record.get("leftovers")):
            lines.append(f"Checkpoint {words.code(name)} was never finished.")
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
                lines.append(f"The run had stood still for {words.duration(still)}.")
        if segment != self._histories.segment:
            return lines + self._depart(segment, step)
        recorded = record.get("recorded_steps")
        if values.is_whole(recorded) and recorded > step:
            again = words.count(recorded - step, "recorded step")
            which = words.span(step, recorded - 1)
            lines.append(f"Executes {again} again ({which}): the bits must be the same.")
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
                entry.lines.append(f"It stood still for at most {words.duration(still)}.")
        return lines

    def _redo(self, step: int) -> _Steps | None:
        """Go on in the same segment with the state before `step`."""
        lost = _steps(self._histories.go_on(step))
        if lost is not None:
            self.totals.steps_redone += lost.count
            self.totals.redone_seconds += lost.seconds
        return lost

    def _depart(self, segment: int, step: int) -> list[str]:
        """Enter another segment, which begins with the state before `step`; says what it left."""
        if self._dead is not None:
            process, entry = self._dead
            self._dead = None
            if not process.different:
                entry.lines.insert(0, "The process died.")
            entry.lines.append(
                f"The run did not go on from there: segment {segment} begins at step {step}."
            )
        left, again = map(_steps, self._histories.enter(segment, step))
        for steps, sign in ((left, 1), (again, -1)):
            if steps is not None:
                self.totals.steps_left_behind += sign * steps.count
                self.totals.left_behind_seconds += sign * steps.seconds
        self._segments.add(segment)
        return [
            *([f"Left behind: {left}."] if left is not None else []),
            *([f"Taken up again: {again}."] if again is not None else []),
        ]

    def _stop(self, record: Record) -> None:
        step, signal = record["step"], record.get("signal")
        process, self._process = self._process, None
        finished = signal is None or (process is not None and process.planned == step)
        how = "finished" if finished else f"stopped by {words.value(signal)}"
        lines = []
        if record.get("state_digest"):
            lines.append(
                f"The state is saved; its digest is {words.value(record['state_digest'])}."
            )
        self._tell(f"{how}, {words.count(step, 'step')} made", lines)
        self.totals.stops += 1
        self._stopped = self._now

    def _end_process(self) -> None:
        """Called where a part ends, or a process starts: the one before had no `stop`."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self.totals.ends_without_stop += 1
        lost = _steps(self._histories.since(process.saved))
        if lost is None:
            line = f"Nothing was recorded after the state of step {process.saved}."
        else:
            line = f"Recorded up to step {lost.last}; saved was the state of step {process.saved}."
        why = "because of the difference" if process.different else "without a stop"
        heard = "" if process.heard is None else f"after {words.when(process.heard)}: "
        entry = Entry(
            f"{heard}ended {why}, segment {process.segment}",
            [line, *([events.torn_line(process.torn)] if process.torn else [])],
        )
        self._enter(entry)
        self._dead = (process, entry)

    def _intervention(self, record: Record) -> None:
        at = record.get("at")
        lines = [] if at is None else [f"In force from step {words.shown(at)} on."]
        self._new_segment(record, "intervention", lines)
        self.totals.interventions += 1

    def _promotion(self, record: Record) -> None:
        self._new_segment(record, f"branch {words.value(record.get('branch'))} promoted", [])
        self.totals.promotions += 1
        self._copied = True

    def _new_segment(self, record: Record, what: str, lines: list[str]) -> None:
        segment, step = record["segment"], record["from_step"]
        lines += events.changes("", record.get("changes"))
        exclusions = record.get("exclusions")
        for exclusion in exclusions if isinstance(exclusions, list) else []:
            lines.append(self._exclude(exclusion))
        if record.get("reason") is not None:
            lines.append(f"Reason: {words.shown(record['reason'])}")
        lines += self._depart(segment, step) or ["Left behind: nothing."]
        self._tell(f"{what}; segment {segment} begins at step {step}", lines)

    def _exclude(self, exclusion: Any) -> str:
        if not (
            isinstance(exclusion, list)
            and len(exclusion) in (2, 3)
            and all(values.is_whole(end) for end in exclusion[:2])
            and all(isinstance(name, str) for name in exclusion[2:])
            and exclusion[0] < exclusion[1]
        ):
            return f"Excluded: {words.value(exclusion)}."
        start, stop, *name = exclusion
        self._excluded.setdefault("".join(name), []).append((start, stop))
        count = words.count(stop - start, "sequence")
        return f"Excluded: {count}, {words.inline(stream.told((start, stop, *name)))}."

    # --- what happens on the way ---

    def _on_the_way(self, segment: int, step: int) -> Stretch:
        if self._stretch is None or self._stretch.segment != segment:
            self._close_stretch()
            since = self._now
            if since is None and self._process is not None:
                since = self._process.heard
            self._stretch = Stretch(since, segment, step)
        return self._stretch

    def _step(self, record: Record) -> None:
        segment, step = int(record["segment"]), int(record["step"])
        if segment != self._histories.segment:
            self._depart(segment, step)
        else:
            self._redo(step)
        if self._stretch is not None and self._stretch.last not in (None, step - 1):
            self._close_stretch()
        stretch = self._on_the_way(segment, step)
        measured = record.get("measured")
        seconds = (
            values.number(measured.get("step_seconds")) if isinstance(measured, dict) else None
        )
        self.totals.attempts += 1
        if seconds is None or not 0 <= seconds < math.inf:
            self.totals.attempts_without_time += 1
            seconds = 0.0
        self._histories.add(step, seconds)
        self.totals.training_seconds += seconds
        if self._process is not None:
            self._process.seconds += seconds
        first_attempt = record["attempt"] <= 1
        loss = values.number(record["computed"].get("loss"))
        stretch.step(step, seconds, first_attempt, loss)
        if loss is not None and not math.isfinite(loss):
            self.totals.non_finite_losses += first_attempt
        if record["computed"].get("applied") is False:
            stretch.skipped.add(step)
            self.totals.skipped_updates += first_attempt

    def _program(self, record: Record) -> None:
        seconds = values.number(record.get("compile_seconds"))
        known = seconds if seconds is not None and 0 <= seconds < math.inf else 0.0
        self._on_the_way(record["segment"], record["step"]).program(known)
        self.totals.compile_seconds += known

    def _evaluation(self, record: Record) -> None:
        self._on_the_way(record["segment"], record["step"]).evaluation(record)
        self.totals.evaluations += 1

    def _profile(self, record: Record) -> None:
        self._on_the_way(record["segment"], record["step"]).profile(record)

    def _alarm(self, record: Record) -> None:
        stretch = self._on_the_way(record["segment"], record["step"])
        stretch.alarm(record["step"], spikes.alarm(record))
        self.totals.alarms += 1

    def _alert_failed(self, record: Record) -> None:
        self._tell("nobody was alerted", events.alert_failed(record))

    def _pruned(self, record: Record) -> None:
        self._tell(f"checkpoints of segment {record['segment']} removed", events.pruned(record))
        newest = record.get("newest_left")
        if self._dead is not None and values.is_whole(newest):
            process, _ = self._dead
            if process.segment == record["segment"]:
                process.saved = min(process.saved, newest)

    def _parity(self, record: Record) -> None:
        where = f"step {record['step']} of segment {record['segment']}"
        self._tell(f"the losses of {where} beside a CPU's", events.parity(record))

    def _verification(self, record: Record) -> None:
        self.totals.verifications += 1
        if record.get("differing"):
            where = f"step {record['step']} of segment {record['segment']}"
            self._tell(f"silent corruption found before {where}", events.corruption(record))

    def _restart(self, record: Record) -> None:
        self.totals.restarts += 1
        self._tell("started again by its supervisor", events.restart(record))

    def _checkpoint(self, record: Record) -> None:
        stretch = self._on_the_way(record["segment"], record["step"])
        stretch.checkpoints += 1
        stretch.last_checkpoint = record["step"]
        if self._process is not None:
            self._process.saved = record["step"]
        self.totals.checkpoints += 1

    def _spike(self, record: Record) -> None:
        if spikes.step_of(record) is None:
            self._unknown(record)
            return
        self._tell(spikes.title(record), spikes.lines(record))
        self.totals.incidents += record["event"] == "incident"
        self.totals.decisions += record["event"] == "decision"

    def _difference(self, record: Record) -> None:
        step, field = record["step"], words.value(record.get("field"))
        first, again = words.value(record.get("first")), words.value(record.get("again"))
        which = f"attempt {words.shown(record.get('attempt'))}"
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
        self._tell("note", [], words.fenced(text))
        self.totals.notes += 1

    def _unknown(self, record: Record) -> None:
        fields = {key: value for key, value in record.items() if key != "event"}
        if self._now is not None:  # the title has it
            del fields["time"]
        lines = [
            f"{words.code(key)}: {words.code(words.as_json(value))}"
            for key, value in fields.items()
        ]
        self._tell(f"event {words.code(record['event'])}", lines)
