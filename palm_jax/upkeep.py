"""Upkeep of a run's checkpoints: which are sound, which somebody still needs, which may go.

A checkpoint is needed if the run goes on from it, if a later segment or a branch departs from
it (neither has a copy of its first state), or if the diagnosis of an incident will want it.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

from etils import epath

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import inventory, lock, logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.replay import branches
from palm_jax.spikes import history, incidents

if TYPE_CHECKING:
    from palm_jax.record.checkpoints import Checkpoints

Usable = collections.abc.Mapping[int, collections.abc.Sequence[int]]  # steps, by segment
Reasons = dict[tuple[int, int], list[str]]  # by segment and step


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint lies."""

    run: RunFolder
    branch: str | None  # None: of the run itself; a branch's branch is "one/other"
    segment: int
    step: int

    @property
    def path(self) -> epath.Path:
        return folder_of(self.run, self.segment) / str(self.step)


@dataclasses.dataclass(frozen=True)
class Verified:
    place: Place
    bytes: int
    problems: list[str]  # empty: every array has the bits that were saved
    in_logbook: bool  # whether the logbook has its digest


@dataclasses.dataclass(frozen=True)
class GoesOn:
    """Where a run goes on."""

    run: RunFolder  # a branch may go on from a checkpoint of the run that it departed from
    segment: int
    step: int
    from_config: bool  # it has no usable checkpoint: step 0 is computed
    # Newer checkpoints of the last segment, newest first: `train` goes on only without them.
    damaged: list[int]


@dataclasses.dataclass(frozen=True)
class Shelf:
    """The checkpoints of one segment."""

    branch: str | None  # as `Place.branch`
    segment: int
    start_step: int
    entries: list[inventory.Entry]
    needed: dict[int, list[str]]  # by step, what for
    leftovers: dict[str, int]  # bytes by name


@dataclasses.dataclass(frozen=True)
class Wish:
    """Which checkpoints a person wants to be rid of."""

    keep_last: int | None = None  # all but so many of each segment, the newest; None: none
    keep_every: int | None = None  # steps; multiples of it stay, too
    damaged: bool = False  # those that are damaged
    also_pinned: bool = False  # even if the diagnosis of an incident will want them


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What was removed of a segment, or would be."""

    segment: int
    steps: list[int]
    damaged: dict[int, list[str]]  # of these steps, with what is damaged
    leftovers: list[str]
    bytes: int
    kept: dict[int, list[str]]  # that are needed, though not among those to be kept; what for
    unreadable: list[int]  # with a damaged record; left alone, for nobody asked about damage
    newest_left: int | None  # the newest checkpoint that stays


def folder_of(run: RunFolder, segment: int) -> epath.Path:
    return epath.Path(run.checkpoints(segment))


def runs(
    run: RunFolder, name: str | None = None
) -> collections.abc.Iterator[tuple[str | None, RunFolder]]:
    """The run, its branches and theirs, each with its name as in `Place.branch`."""
    yield name, run
    for inner in branches.names(run):
        longer = inner if name is None else f"{name}/{inner}"
        yield from runs(branches.branch_of(run, inner), longer)


# --- what is needed ---


def usable(run: RunFolder) -> dict[int, list[int]]:
    """The complete checkpoints whose records can be read."""
    return {
        number: [e.step for e in inventory.entries(folder_of(run, number)) if e.problem is None]
        for number in run.segments()
    }


def needed(run: RunFolder, usable: Usable) -> Reasons:
    """Who goes on from which of the usable checkpoints.

    Raises:
      CannotDo: a description of a segment is damaged.
    """
    reasons: Reasons = collections.defaultdict(list)
    last = run.last_segment()
    if usable.get(last):
        reasons[last, max(usable[last])].append("training goes on from it")
    for who, departure in _departures(run):
        before = [s for s in usable.get(departure.segment, ()) if s <= departure.step]
        # Without one, that segment's own departure leads further back, and is in this list.
        if before:
            reasons[departure.segment, max(before)].append(f"{who} departs from it")
    return dict(reasons)


def _departures(run: RunFolder) -> collections.abc.Iterator[tuple[str, segments.Departure]]:
    for number in run.segments():
        parent = segments.read(run.segment(number)).parent
        if parent is not None and parent.run is None:
            yield f"segment {number}", parent
    for name in branches.names(run):
        branch = branches.branch_of(run, name)
        for number in branch.segments():
            parent = segments.read(branch.segment(number)).parent
            if parent is not None and parent.run is not None:
                yield f"branch {name}", parent


def pinned(run: RunFolder, usable: Usable) -> Reasons:
    """Which of the usable checkpoints the diagnoses of the newest incidents will want.

    Those that training keeps; and where a segment had few before an incident, those of the
    segments that it departed from.

    Raises:
      CannotDo: the logbook, or a description of a segment, is damaged.
    """
    reasons: Reasons = collections.defaultdict(list)
    settings = run.config().spikes
    for number, onsets in history.onsets(run).items():
        if number not in usable:
            continue
        own = usable[number]
        at_hand = _at_hand(run, number, usable)
        for onset in onsets[-incidents.NEWEST_PINNED :]:
            wanted = {
                *incidents.pinned(onset, own, settings),
                *incidents.pinned(onset, at_hand, settings),
            }
            for step in wanted:
                reasons[at_hand[step], step].append(f"pinned by the incident at step {onset}")
    return {place: list(dict.fromkeys(why)) for place, why in reasons.items()}


def _at_hand(run: RunFolder, segment: int, usable: Usable) -> dict[int, int]:
    """The run's checkpoints in the history of a segment: {step: its segment}."""
    found: dict[int, int] = {}
    for of, described, stop in history.chain(run, segment):
        if of == run:
            steps = usable.get(described.segment, ())
            found |= {s: described.segment for s in steps if stop is None or s <= stop}
    return found


# --- verification ---


class Verifier:
    """Reads checkpoints completely, each of them once.

    Args:
      tell: is told (place, bytes read, bytes in all) as the reading goes on.
    """

    def __init__(
        self,
        tell: collections.abc.Callable[[Place, int, int], None] = lambda place, done, total: None,
    ) -> None:
        self._tell = tell
        self._digests: dict[RunFolder, dict[tuple[int, int], str]] = {}
        self._found: dict[tuple[RunFolder, int, int], Verified] = {}

    def __call__(self, place: Place) -> Verified:
        """Compare a checkpoint with its record, and with the logbook.

        Raises:
          CannotDo: it cannot be read here; or the logbook is damaged.
        """
        key = place.run, place.segment, place.step
        if key not in self._found:
            self._found[key] = self._verified(place)
        return self._found[key]

    def _verified(self, place: Place) -> Verified:
        size = inventory.bytes_of(place.path)
        if lacks := inventory.missing(place.path):
            return Verified(place, size, [f"it lacks {', '.join(lacks)}"], False)
        told = self._told(place.run).get((place.segment, place.step))
        with _open(place.run, place.segment) as saved:
            problems = saved.verify(place.step, functools.partial(self._tell, place))
        if not problems and told is not None:
            own = inventory.stored(place.path.parent, place.step)["digest"]["whole"]
            if own != told:
                problems = [f"its digest is {own}, but the logbook has {told} for it"]
        return Verified(place, size, problems, told is not None)

    def _told(self, run: RunFolder) -> dict[tuple[int, int], str]:
        """The digests of checkpoints in the logbook, each one's last."""
        if run not in self._digests:
            self._digests[run] = {
                (record["segment"], record["step"]): record["state_digest"]
                for record in logbook.scan(run.path)
                if isinstance(record, dict) and record["event"] == "checkpoint"
            }
        return self._digests[run]


def places(run: RunFolder, segment: int | None = None, step: int | None = None) -> list[Place]:
    """The checkpoints of a run and its branches, also those that lack files.

    Args:
      segment: only of this one, of the run itself.
      step: only with this step.
    Raises:
      WrongInput: there is no such segment, or none has that step.
    """
    of = [(None, run)] if segment is not None else list(runs(run))
    found = [
        Place(each, name, number, there)
        for name, each in of
        for number in chosen(each, segment)
        for there in inventory.named_steps(folder_of(each, number))
    ]
    if step is None:
        return found
    if not any(place.step == step for place in found):
        steps = ", ".join(map(str, sorted({place.step for place in found}))) or "none"
        where = run.path if segment is None else f"segment {segment} of {run.path}"
        raise WrongInput(f"--step {step}: {where} has no such checkpoint; there are: {steps}")
    return [place for place in found if place.step == step]


def chosen(run: RunFolder, segment: int | None) -> list[int]:
    """All segments, or the one that was named. Raises WrongInput if there is none."""
    numbers = run.segments()
    if segment is None:
        return numbers
    if segment not in numbers:
        there = ", ".join(map(str, numbers))
        raise WrongInput(f"--segment {segment}: {run.path} has no such segment; there are: {there}")
    return [segment]


def goes_on(run: RunFolder, is_sound: collections.abc.Callable[[Place], bool]) -> GoesOn:
    """Where a run goes on, if only sound checkpoints count.

    Raises:
      CannotDo: a description of a segment is damaged.
    """
    damaged: list[int] = []
    parts = history.chain(run)
    for of, described, stop in reversed(parts):
        for step in reversed(inventory.steps(folder_of(of, described.segment))):
            if stop is not None and step > stop:
                continue
            if is_sound(Place(of, None, described.segment, step)):
                return GoesOn(of, described.segment, step, False, damaged)
            if described is parts[-1][1]:
                damaged.append(step)
    first, described, _ = parts[0]
    return GoesOn(first, described.segment, 0, True, damaged)


def _open(run: RunFolder, segment: int) -> Checkpoints:
    # Imports Orbax, which who only lists may do without.
    from palm_jax.record.checkpoints import Checkpoints

    return Checkpoints(run.checkpoints(segment), config.Checkpoint())


# --- what there is ---


def shelves(run: RunFolder) -> collections.abc.Iterator[Shelf]:
    """The segments of a run and of its branches, with their checkpoints.

    Raises:
      CannotDo: a logbook, or a description of a segment, is damaged.
    """
    for name, of in runs(run):
        there = usable(of)
        reasons = _merged(needed(of, there), pinned(of, there))
        for number in of.segments():
            where = folder_of(of, number)
            yield Shelf(
                name,
                number,
                segments.read(of.segment(number)).start_step,
                inventory.entries(where),
                {step: why for (segment, step), why in reasons.items() if segment == number},
                {left: inventory.bytes_of(where / left) for left in inventory.leftovers(where)},
            )


def _merged(*parts: Reasons) -> Reasons:
    merged: Reasons = {}
    for part in parts:
        for place, why in part.items():
            merged.setdefault(place, []).extend(why)
    return merged


# --- removal ---


def prune(
    run: RunFolder,
    wish: Wish,
    *,
    segment: int | None = None,
    dry_run: bool = False,
    verifier: Verifier | None = None,
) -> list[Pruned]:
    """Remove checkpoints of a run that nobody needs, and leftovers. Branches stay as they are.

    Each checkpoint goes as a whole, whenever the process dies; the logbook tells which went.

    Args:
      segment: only of this one.
      dry_run: find out what would be removed, and leave everything as it is.
      verifier: reads the checkpoints, if the damaged ones are to go.
    Raises:
      WrongInput: there is no such segment.
      CannotDo: another process writes to the run; the disk does not let go of something; a
        checkpoint cannot be read here; or the run's record is damaged.
    """
    with lock.held(run.path):
        numbers = chosen(run, segment)
        there = usable(run)
        damaged: dict[int, dict[int, list[str]]] = {}
        if wish.damaged:
            damaged = _damaged(run, numbers, verifier or Verifier())
            there = {
                n: [s for s in steps if s not in damaged.get(n, {})] for n, steps in there.items()
            }
        reasons = needed(run, there)
        if not wish.also_pinned:
            reasons = _merged(reasons, pinned(run, there))
        plans = [
            _planned(
                run,
                number,
                _unwanted(there[number], wish),
                {step: why for (of, step), why in reasons.items() if of == number},
                damaged.get(number, {}),
            )
            for number in numbers
        ]
        if not dry_run:
            _carry_out(run, plans)
    return plans


def _damaged(
    run: RunFolder, numbers: list[int], verifier: Verifier
) -> dict[int, dict[int, list[str]]]:
    found: dict[int, dict[int, list[str]]] = {}
    for number in numbers:
        for step in inventory.steps(folder_of(run, number)):
            if problems := verifier(Place(run, None, number, step)).problems:
                found.setdefault(number, {})[step] = problems
    return found


def _unwanted(steps: collections.abc.Sequence[int], wish: Wish) -> list[int]:
    if wish.keep_last is None:
        return []
    older = sorted(steps)[: -wish.keep_last]
    return [s for s in older if wish.keep_every is None or s % wish.keep_every]


def _planned(
    run: RunFolder,
    number: int,
    unwanted: list[int],
    reasons: dict[int, list[str]],
    damaged: dict[int, list[str]],
) -> Pruned:
    where = folder_of(run, number)
    steps = sorted([*(s for s in unwanted if s not in reasons), *damaged])
    leftovers = inventory.leftovers(where)
    stay = [entry for entry in inventory.entries(where) if entry.step not in steps]
    return Pruned(
        segment=number,
        steps=steps,
        damaged=damaged,
        leftovers=leftovers,
        bytes=sum(inventory.bytes_of(where / name) for name in (*map(str, steps), *leftovers)),
        kept={s: reasons[s] for s in unwanted if s in reasons},
        unreadable=[entry.step for entry in stay if entry.problem is not None],
        newest_left=max((entry.step for entry in stay), default=None),
    )


def _carry_out(run: RunFolder, plans: list[Pruned]) -> None:
    with contextlib.ExitStack() as stack:
        book: logbook.Logbook | None = None
        for plan in plans:
            if plan.steps and book is None:
                book = stack.enter_context(logbook.Logbook.open(run.path))
            where = folder_of(run, plan.segment)
            try:
                inventory.remove(where, plan.leftovers)
                if book is not None:
                    _set_aside(run, plan, book)
                if plan.steps:
                    inventory.remove(where, [inventory.REMOVED])
            except OSError as error:
                raise CannotDo(f"cannot remove checkpoints in {where}: {error}") from error


def _set_aside(run: RunFolder, plan: Pruned, book: logbook.Logbook) -> None:
    """Take the checkpoints away, and say so in the logbook before they are deleted."""
    where, gone = folder_of(run, plan.segment), []
    try:
        for step in plan.steps:
            inventory.set_aside(where, step)
            gone.append(step)
    finally:
        if gone:
            begins = segments.read(run.segment(plan.segment)).start_step
            book.append(
                "pruned",
                segment=plan.segment,
                steps=gone,
                damaged=[step for step in gone if step in plan.damaged],
                newest_left=max(inventory.steps(where), default=begins),
                bytes=plan.bytes,
            )
            book.flush()
