"""Entries of the chronicle, and the one that grows: steps one after the other."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import math

from palm_jax.record.chronicle import values, words
from palm_jax.record.chronicle.values import Record

_MOST_SHOWN = 12  # places in one line, and lines of one kind


@dataclasses.dataclass
class Entry:
    title: str
    lines: list[str] = dataclasses.field(default_factory=list)
    below: str = ""  # a block of its own

    def text(self) -> str:
        blocks = [f"## {self.title}", "\n".join(f"- {line}" for line in self.lines), self.below]
        return "\n\n".join(block for block in blocks if block)


class Places:
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
        shown = ", ".join(words.span(first, last) for first, last in self._ranges)
        more = self.count - self._kept
        return f"{shown} and {more:,} more" if more else shown


@dataclasses.dataclass
class Stretch:
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
    non_finite: Places = dataclasses.field(default_factory=Places)
    skipped: Places = dataclasses.field(default_factory=Places)
    alarms: dict[str, Places] = dataclasses.field(default_factory=dict)  # by what they say
    other_alarms: Places = dataclasses.field(default_factory=Places)
    programs: int = 0
    compile_seconds: float = 0.0
    evaluations: list[str] = dataclasses.field(default_factory=list)  # the first and the last
    num_evaluations: int = 0
    lowest: tuple[float, str] | None = None  # held-out loss, and its evaluation
    traces: list[str] = dataclasses.field(default_factory=list)
    checkpoints: int = 0
    last_checkpoint: int = 0

    def step(self, step: int, seconds: float, first_attempt: bool, loss: float | None) -> None:
        """A recorded attempt; the first one says where the stretch begins."""
        if self.last is None:
            self.first = step
        self.last = step
        self.seconds += seconds
        self.executed_before += not first_attempt
        if loss is not None and math.isfinite(loss):
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss
            if self.highest is None or loss > self.highest[0]:
                self.highest = (loss, step)
        elif loss is not None:
            self.non_finite.add(step)

    def program(self, seconds: float) -> None:
        self.programs += 1
        self.compile_seconds += seconds

    def evaluation(self, record: Record) -> None:
        loss, bits = values.number(record.get("loss")), values.number(record.get("bits_per_byte"))
        told = "unknown" if loss is None else f"{loss:.5g}"
        told += "" if bits is None else f" ({bits:.5g} bits per byte)"
        told += f" at step {record['step']}"
        self.evaluations = [*self.evaluations[:1], told]
        self.num_evaluations += 1
        if loss is not None and (self.lowest is None or loss < self.lowest[0]):
            self.lowest = (loss, told)

    def profile(self, record: Record) -> None:
        steps = words.span(record["step"], max(record["step"], record["stop_step"] - 1))
        self.traces.append(
            f"The profiler traced {'steps' if ' ' in steps else 'step'} {steps}"
            + (f", in {words.value(record['folder'])}." if record.get("folder") else ".")
        )

    def alarm(self, step: int, says: str) -> None:
        if says not in self.alarms and len(self.alarms) >= _MOST_SHOWN:
            self.other_alarms.add(step)
        else:
            self.alarms.setdefault(says, Places()).add(step)

    def entry(self) -> Entry:
        where = f"at step {self.first}"
        if self.last is not None:
            where = (
                f"{'steps' if self.last > self.first else 'step'} "
                f"{words.span(self.first, self.last)}"
            )
        begun = "" if self.since is None else f"from {words.when(self.since)}: "
        return Entry(f"{begun}{where}, segment {self.segment}", [*self._seen()])

    def _seen(self) -> collections.abc.Iterator[str]:
        if self.last is None:
            yield "No step was recorded."
        else:
            made = words.count(self.last - self.first + 1, "step")
            line = f"Made {made} in {words.duration(self.seconds)}"
            if self.first_loss is not None:
                line += f"; loss {self.first_loss:.5g} to {self.last_loss:.5g}"
            yield f"{line}."
        if self.executed_before:
            yield f"Executed before: {words.count(self.executed_before, 'step')}."
        if self.highest is not None and self.highest[0] not in (self.first_loss, self.last_loss):
            yield f"The highest loss was {self.highest[0]:.5g}, at step {self.highest[1]}."
        for what, places in (
            ("The loss was not finite", self.non_finite),
            ("The update was skipped", self.skipped),
        ):
            if places.count:
                yield f"{what} at {words.count(places.count, 'step')}: {places}."
        for says, places in [*self.alarms.items(), ("for other reasons", self.other_alarms)]:
            if places.count:
                yield f"Alarm {says}, at {words.count(places.count, 'step')}: {places}."
        if self.programs:
            programs = words.count(self.programs, "program")
            yield f"Compiled {programs} in {words.duration(self.compile_seconds)}."
        if self.evaluations:
            line = f"Held-out loss {', '.join(self.evaluations)}"
            if self.num_evaluations > 2 and self.lowest is not None:
                line += f"; the lowest of {self.num_evaluations:,} was {self.lowest[1]}"
            yield f"{line}."
        yield from self.traces
        if self.checkpoints:
            saved = words.count(self.checkpoints, "checkpoint")
            yield f"Saved {saved}, the last at step {self.last_checkpoint}."
