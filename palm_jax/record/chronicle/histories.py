"""Which attempts make up the history that the run has now, and which it has left.

A history is a row of steps, rising. Going on after a crash cuts it at the step of the state that
was restored. A later segment departs from the history of its parent, which need not be the last
one: a branch may depart from a segment that was left long ago, and then its steps come back.
"""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import Generic, TypeVar

from palm_jax.record import segments
from palm_jax.record.folder import RunFolder

V = TypeVar("V")


def parents(run: RunFolder) -> dict[int, int]:
    """The segment of the run that each of its segments departs from; events do not name it.

    Raises:
      CannotDo: the description of a segment is damaged.
    """
    found = {}
    for path in sorted((run.path / "segments").glob("[0-9]*")):
        if path.name.isdecimal() and (path / segments.FILE_NAME).is_file():
            parent = segments.read(path).parent
            if parent is not None and parent.run is None:
                found[int(path.name)] = parent.segment
    return found


@dataclasses.dataclass(frozen=True)
class Row(Generic[V]):
    """Steps [first, stop) of a segment that have one value."""

    segment: int
    first: int
    stop: int
    value: V


Rows = list[Row[V]]


class Histories(Generic[V]):
    """Follows a logbook; each recorded attempt has a value, and equal neighbours share a row.

    Args:
      parents: as from `parents`. A segment that is missing departs from the one before it.
    """

    def __init__(self, parents: collections.abc.Mapping[int, int]) -> None:
        self.segment: int | None = None  # the present one
        self.rows: Rows[V] = []  # of the present history
        self._parents = parents
        self._left: dict[int, Rows[V]] = {}  # histories as they were when their segment was left

    def __len__(self) -> int:
        return sum(row.stop - row.first for row in self.rows)

    def of(self, segment: int) -> Rows[V] | None:
        """The history that ends in a segment; None if no event was of that segment."""
        return self.rows if segment == self.segment else self._left.get(segment)

    def add(self, step: int, value: V) -> None:
        """An attempt of a step. The history ended before it: see `go_on` and `enter`."""
        assert self.segment is not None, "an attempt belongs to a segment"
        first, last = step, self.rows[-1] if self.rows else None
        if last is not None and (last.segment, last.stop, last.value) == (
            self.segment,
            step,
            value,
        ):
            first = self.rows.pop().first
        self.rows.append(Row(self.segment, first, step + 1, value))

    def since(self, step: int) -> Rows[V]:
        """The present history from `step` on."""
        return _since(self.rows, step)

    def go_on(self, step: int) -> Rows[V]:
        """Go on in the same segment with the state before `step`; returns what is lost."""
        return _cut(self.rows, step)

    def enter(self, segment: int, step: int) -> tuple[Rows[V], Rows[V]]:
        """Begin a segment with the state before `step` of its parent.

        Returns:
          what was in the present history and no longer is, and what was left before and is now
          in it again.
        """
        before = self.rows
        if self.segment is not None:
            self._left[self.segment] = before
        parent = self._parents.get(segment)
        self.rows = list(before if parent is None else self._left.get(parent, before))
        _cut(self.rows, step)
        self.segment = segment
        fork = _fork(before, self.rows)
        return _since(before, fork), _since(self.rows, fork)


def _since(rows: Rows[V], step: int) -> Rows[V]:
    found = []
    for row in reversed(rows):
        if row.stop <= step:
            break
        found.append(dataclasses.replace(row, first=max(row.first, step)))
    return found[::-1]


def _cut(rows: Rows[V], step: int) -> Rows[V]:
    taken = _since(rows, step)
    while rows and rows[-1].stop > step:
        row = rows.pop()
        if row.first < step:
            rows.append(dataclasses.replace(row, stop=step))
    return taken


def _fork(one: Rows[V], other: Rows[V]) -> int:
    """The step from which two histories have nothing in common."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            same = dataclasses.replace(a, stop=b.stop) == b
            return min(a.stop, b.stop) if same else min(a.first, b.first)
    shorter, longer = sorted((one, other), key=len)
    return longer[len(shorter)].first if len(longer) > len(shorter) else _stop(one)


def _stop(rows: Rows[V]) -> int:
    return rows[-1].stop if rows else 0
