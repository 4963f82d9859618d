"""Departing from a run's history: branches beside it, and new segments of it.

A branch begins with the state before some step and changes one thing. It has four clocks: the
data position (which carries the batch size), the schedule step (rate, decay), the update count
(beta2) and the moments, which come with the state. All but the last can be set.

A branch is a run folder of its own in RUN/branches/ID, so that it trains, replays and shows its
data like any run; the run it departs from is only read. Promoting a branch, or intervening,
opens a new segment of the run; what the earlier segments did stays where it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from palm_jax import config, data, stream
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, lock, logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.record.segments import Departure, Intervention, Segment

_MOST_EPOCHS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a departure changes; nothing by default."""

    overrides: tuple[str, ...] = ()  # section.key=value
    exclude: tuple[tuple[int, int], ...] = ()  # steps [start, stop), whose data is left out
    data_from: int | None = None  # the step whose data the first step is fed
    schedule_step: int | None = None
    update_count: int | None = None


def departed(
    base: config.Config,
    parent: Segment,
    step: int,
    at: int,
    changes: Changes,
    allowed: tuple[str, ...],
    reason: str,
) -> tuple[Segment, dict[str, tuple[Any, Any]]]:
    """The segment that leaves `parent` before `step` and has `changes` in force from `at` on.

    Returns:
      the segment, numbered as the one after its parent in the same run, and the changed settings
      with their values before and after.
    Raises:
      WrongInput: a change that cannot be made here.
    """
    for what, number in (
        ("the step of departure", step),
        ("--at", at),
        ("--schedule-step", changes.schedule_step),
        ("--update-count", changes.update_count),
        ("--data-from", changes.data_from),
    ):
        if number is not None and number > config.MOST_STEPS:
            raise WrongInput(f"{what} {number}: no run has more than {config.MOST_STEPS:,} steps")
    before = parent.settings_at(base, at)
    values = segments.changes_of(before, list(changes.overrides), allowed)
    changed = {key: new for key, (_, new) in values.items()}
    # A later change of the parent to the same setting would undo this one.
    kept = [
        intervention.model_copy(
            update={
                "changes": {
                    key: value
                    for key, value in intervention.changes.items()
                    if intervention.at <= at or key not in changed
                }
            }
        )
        for intervention in parent.interventions
    ]
    added = [Intervention(at=at, changes=changed, reason=reason)] if changed else []
    offset = parent.data_offset if changes.data_from is None else changes.data_from - at
    if changes.data_from is not None and at != step:
        raise WrongInput("--data-from belongs to the step of departure itself")
    segment = Segment(
        segment=parent.segment + 1,
        parent=Departure(segment=parent.segment, step=step),
        start_step=step,
        reason=reason,
        exclusions=parent.exclusions,
        interventions=tuple(sorted([*kept, *added], key=lambda i: i.at)),
        data_offset=offset,
        schedule_step=changes.schedule_step,
        update_count=changes.update_count,
    )
    if segment.data_step(step) < 0:
        raise WrongInput(f"--data-from {changes.data_from}: there is no data before step 0")
    exclusions: list[stream.Exclusion] = list(parent.exclusions)
    for start, stop in changes.exclude:
        if start < at:
            raise WrongInput(
                f"--exclude {start}:{stop} begins before step {at}, whose data was read already; "
                "depart earlier"
            )
        exclusions += positions_of(base, segment, start, stop)
    return segment.model_copy(update={"exclusions": stream.normalized(exclusions)}), values


def positions_of(
    base: config.Config, segment: Segment, start: int, stop: int
) -> tuple[stream.Exclusion, ...]:
    """The absolute positions that steps [start, stop) of a segment read, in each corpus."""
    return segment.stream_of(base).intervals(segment.data_step(start), segment.data_step(stop))


def create_branch(
    run: RunFolder,
    from_step: int,
    changes: Changes,
    *,
    segment: int | None = None,
    name: str | None = None,
    reason: str = "",
    mesh: config.Mesh | None = None,
) -> tuple[RunFolder, dict[str, tuple[Any, Any]]]:
    """Make the folder of a branch of `run` that departs before step `from_step`.

    Returns:
      the branch's folder, which `train` fills, and the changed settings.
    Raises:
      WrongInput: a name that is taken, or a change that cannot be made.
    """
    folder.check_own(run.path)
    base = run.config()
    number = run.last_segment() if segment is None else segment
    parent = segments.read(run.segment(number))
    if from_step < parent.start_step:
        raise WrongInput(
            f"segment {number} begins at step {parent.start_step}; to depart before step "
            f"{from_step}, name an earlier one with --segment"
        )
    made, values = departed(
        base, parent, from_step, from_step, changes, segments.IN_A_BRANCH, reason
    )
    branches = run.path / "branches"
    if name is None:
        taken = [int(p.name) for p in branches.glob("*") if p.name.isdecimal()]
        name = f"{max(taken, default=-1) + 1:03d}"
    if not _NAME.fullmatch(name):
        raise WrongInput(f"--name {name!r}: letters, digits, '.', '_' and '-', 64 at most")
    branch = RunFolder(branches / name)
    if branch.path.exists():
        raise WrongInput(f"there is a branch {name} of {run.path} already; give another --name")
    # An experiment wakes nobody and is no second home's run; and what a config from elsewhere has
    # executed, or written outside, is up to whoever trains it.
    changed: dict[str, Any] = {
        "log": base.log.model_copy(update={"alert_command": None}),
        "checkpoint": base.checkpoint.model_copy(update={"mirror": None}),
    }
    settings = base.model_copy(update=changed if mesh is None else {**changed, "mesh": mesh})
    assert made.parent is not None
    departure = made.parent.model_copy(update={"run": "../.."})
    first = made.model_copy(update={"segment": 0, "parent": departure})
    try:
        branches.mkdir(exist_ok=True)
    except OSError as error:
        raise CannotDo(f"cannot write {branches}: {error}") from error
    folder.create(branch, settings, run.manifest(), first)
    return branch, values


def names(run: RunFolder) -> list[str]:
    return sorted(p.name for p in (run.path / "branches").glob("*") if folder.is_run(p))


def branch_of(run: RunFolder, name: str) -> RunFolder:
    """Raises WrongInput if there is no such branch."""
    if name not in names(run):
        there = ", ".join(names(run)) or "none"
        raise WrongInput(f"{run.path} has no branch {name!r}; there are: {there}")
    return RunFolder(run.path / "branches" / name)


def intervene(
    run: RunFolder, at: int, changes: Changes, reason: str
) -> tuple[Segment, dict[str, tuple[Any, Any]]]:
    """Open a segment of `run` in which `changes` are in force from step `at` on.

    It begins with the newest checkpoint at or before `at`, so that nothing is lost when `at`
    lies ahead, and the run is rolled back when it lies behind.

    Raises:
      WrongInput: no change, no reason, or one that cannot be made in mid-run.
    """
    if not reason.strip():
        raise WrongInput("--reason is empty: say why, for whoever reads the logbook")
    base = run.config()
    parent = segments.read(run.segment(run.last_segment()))
    if at < parent.start_step:
        raise WrongInput(
            f"--at {at}: segment {parent.segment} begins at step {parent.start_step}; intervene "
            "there or later"
        )
    with Checkpoints(run.checkpoints(parent.segment), config.Checkpoint()) as saved:
        step = max([s for s in saved.steps() if s <= at], default=parent.start_step)
    made, values = departed(base, parent, step, at, changes, segments.IN_MID_RUN, reason)
    if made.exclusions == parent.exclusions and not values:
        raise WrongInput("nothing would change: give settings, or --exclude A:B")
    segment = made.model_copy(update={"segment": parent.segment + 1})
    with lock.held(run.path):
        folder.open_segment(run, segment)
        _record(
            run,
            "intervention",
            segment=segment.segment,
            from_step=step,
            at=at,
            changes={key: list(both) for key, both in values.items()},
            exclusions=[list(e) for e in segment.exclusions if e not in parent.exclusions],
            reason=reason,
        )
    return segment, values


def promote(run: RunFolder, name: str, reason: str) -> Segment:
    """Make a branch the run's future: open a segment that departs as the branch did.

    The branch's checkpoints, with the records that lead to them, become the segment's; where
    it has none, the segment's steps are executed again.

    Raises:
      WrongInput: there is no such branch, no reason, or it changed how things are computed on
        another mesh.
    """
    if not reason.strip():
        raise WrongInput("--reason is empty: say why, for whoever reads the logbook")
    branch = branch_of(run, name)
    source = segments.read(branch.segment(branch.last_segment()))
    if branch.last_segment() != 0 or source.parent is None:
        raise WrongInput(f"branch {name} has segments of its own; promote one that has none")
    base, number = run.config(), run.last_segment() + 1
    segment = source.model_copy(
        update={"segment": number, "parent": source.parent.model_copy(update={"run": None})}
    )
    parent = segments.read(run.segment(source.parent.segment))
    before = parent.settings_at(base, source.start_step)
    after = segment.settings_at(base, source.start_step)
    with Checkpoints(branch.checkpoints(0), config.Checkpoint()) as saved:
        steps = saved.steps()
    with lock.held(run.path):
        folder.open_segment(
            run, segment, checkpoints=[branch.checkpoints(0) / str(step) for step in steps]
        )
        with logbook.Logbook.open(run.path) as book:
            book.append(
                "promotion",
                segment=number,
                branch=name,
                from_step=source.start_step,
                changes={k: list(v) for k, v in config.differences(before, after).items()},
                exclusions=[list(e) for e in segment.exclusions if e not in parent.exclusions],
                reason=reason,
            )
            if steps:
                _copy_records(branch, book, number, max(steps))
    return segment


def _copy_records(branch: RunFolder, book: logbook.Logbook, segment: int, stop: int) -> None:
    """The branch's records of steps before `stop`, as those of a segment of the run."""
    for record in logbook.scan(branch.path):
        if not isinstance(record, dict):
            continue
        kept = {k: v for k, v in record.items() if k not in ("event", "time")} | {
            "segment": segment
        }
        if record["event"] == "checkpoint":
            logbook.required(record, branch.path, step=int)
        is_step = record["event"] == "step" and record["step"] < stop
        is_saved = record["event"] == "checkpoint" and record["step"] <= stop
        if is_step or is_saved or record["event"] == "program":
            book.append(record["event"], **kept)
        elif record["event"] == "start":
            # The environment in which these steps were executed.
            book.append("start", **kept)


def _record(run: RunFolder, event: str, **fields: Any) -> None:
    with logbook.Logbook.open(run.path) as book:
        book.append(event, **fields)


def recurrences(
    settings: config.Config, segment: Segment, id_ranges: Mapping[stream.Name, range]
) -> dict[str, Any]:
    """What an exclusion does not reach: its sequences, and the later epochs they come in.

    Args:
      id_ranges: the ids of each corpus.
    Returns:
      excluded_positions, sequence_ids, and epochs (0-based, of the planned run) in which those
      sequences are read again, the first 1000; of several corpora, each one's by its name.
    """
    fed = segment.stream_of(settings)
    end = fed.next_positions(segment.data_step(settings.steps))
    ids: set[int] = set()
    epochs: dict[stream.Name, list[int]] = {}
    for name, own in id_ranges.items():
        excluded = fed.excluded[name]
        if any(stop - start >= 2 * len(own) for start, stop in excluded):  # a whole epoch within
            ids.update(own)
        else:
            places = [(name, at) for start, stop in excluded for at in range(start, stop)]
            ids.update(data.ids_at(settings.seed, places, {name: own}).tolist())
        first = min((start // len(own) for start, _ in excluded), default=0)
        last = min((end[name] - 1) // len(own) + 1, first + 1 + _MOST_EPOCHS)
        epochs[name] = list(range(first + 1, last)) if excluded else []
    return {
        "excluded_positions": sum(stop - start for start, stop, *_ in segment.exclusions),
        "sequence_ids": sorted(ids),
        "epochs": epochs.get(None, epochs),
    }


def describe(branch: RunFolder) -> dict[str, Any]:
    """A branch in numbers: where it departed, what it changed, how far it came.

    Raises:
      CannotDo: its segment or its logbook is damaged.
    """
    segment = segments.read(branch.segment(0))
    if segment.parent is None:
        raise CannotDo(f"{branch.path} is damaged: it departs from nowhere; restore it")
    steps: dict[int, float | str] = {}
    for record in logbook.scan(branch.path):
        if isinstance(record, dict) and record["event"] == "step":
            steps[record["step"]] = _loss(branch, record)
    at_departure = [i for i in segment.interventions if i.at == segment.start_step]
    return {
        "branch": branch.path.name,
        "segment": segment.parent.segment,
        "from_step": segment.start_step,
        "data_from_step": segment.data_step(segment.start_step),
        "schedule_step": segment.schedule_step,
        "update_count": segment.update_count,
        "changes": {k: v for i in at_departure for k, v in i.changes.items()},
        "exclusions": [list(e) for e in segment.exclusions],
        "reason": segment.reason,
        "steps_made": len(steps),
        "last_loss": steps[max(steps)] if steps else None,
        "losses": steps,
    }


def _loss(run: RunFolder, record: dict[str, Any]) -> float | str:
    """As recorded: one that is not finite is text."""
    loss = record["computed"].get("loss")
    if logbook.number(loss) is None:
        raise logbook.damaged(record, run.path, "computed")
    return loss


def losses_beside(run: RunFolder, branch: RunFolder) -> list[tuple[int, Any, Any]]:
    """(step, loss in the segment it departed from, loss in the branch) for the branch's steps."""
    described = describe(branch)
    own = described["losses"]
    parents: dict[int, Any] = {}
    for record in logbook.scan(run.path):
        if (
            isinstance(record, dict)
            and record["event"] == "step"
            and record["segment"] == described["segment"]
            and record["step"] in own
        ):
            parents[record["step"]] = _loss(run, record)
    return [(step, parents.get(step), own[step]) for step in sorted(own)]
