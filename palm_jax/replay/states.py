"""The state before any step of a run's history, from the newest checkpoint that can give it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from palm_jax import config
from palm_jax.course import Course
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.step import TrainState


@dataclasses.dataclass(frozen=True)
class Found:
    """A state, and where it came from."""

    state: TrainState
    step: int  # the state's next step
    from_checkpoint: int | None  # None: computed from the config
    damaged: tuple[str, ...]  # checkpoints that were passed over, with the reason


def newest_state(run: RunFolder, course: Course, step: int) -> Found:
    """The newest state at or before `step` that the segment of `course` can give.

    That is a checkpoint whose digest was verified, the state at the segment's departure, or,
    in the first segment, step 0 from the config. Damaged checkpoints are passed over.

    Raises:
      WrongInput: the segment begins after `step`.
      CannotDo: a bundle has lost the state that it begins with.
    """
    segment = course.segment
    if step < segment.start_step:
        raise WrongInput(
            f"segment {segment.segment} of {run.path} begins at step {segment.start_step}, after "
            f"step {step}; name an earlier one with --segment"
        )
    damaged: list[str] = []
    shapes = course.program_at(segment.start_step).state_shapes
    # Opened to read; what is kept is another's concern.
    with Checkpoints(run.checkpoints(segment.segment), config.Checkpoint()) as saved:
        for candidate in reversed([s for s in saved.steps() if s <= step]):
            try:
                state, _ = saved.restore(candidate, shapes)
            except CannotDo as error:
                damaged.append(str(error))
                continue
            return Found(state, candidate, candidate, tuple(damaged))
    if segment.parent is None and segment.start_step:  # a bundle
        raise CannotDo(
            f"{run.path} begins with step {segment.start_step}, and no checkpoint of it can be "
            f"read: {'; '.join(damaged) or 'it has none'}; copy it again"
        )
    if segment.parent is None:
        return Found(course.program_at(0).init(), 0, None, tuple(damaged))
    found = departure_state(run, course)
    return dataclasses.replace(found, damaged=(*damaged, *found.damaged))


def departure_state(run: RunFolder, course: Course) -> Found:
    """The first state of a segment that departed from another: its parent's, clocks set."""
    assert course.segment.parent is not None
    found = state_before(*_parent(run, course), course.segment.parent.step)
    # A branch may store it in another number format.
    state = course.program_at(course.segment.start_step).adopted(found.state)
    return dataclasses.replace(found, state=with_clocks(state, course.segment))


def state_in_history(run: RunFolder, course: Course, step: int) -> Found:
    """As `state_before`, also of steps before the segment of `course`, which its parents made.

    In the number format of `course`; the clocks are as they were.
    """
    here = course
    while step < here.segment.start_step and here.segment.parent is not None:
        run, here = _parent(run, here)
    found = state_before(run, here, step)
    if here is course:
        return found
    state = course.program_at(course.segment.start_step).adopted(found.state)
    return dataclasses.replace(found, state=state)


def _parent(run: RunFolder, course: Course) -> tuple[RunFolder, Course]:
    """Where a segment departed from, and the course of the segment that it departed from."""
    parent = course.segment.parent
    assert parent is not None
    parent_run = run if parent.run is None else RunFolder((run.path / parent.run).resolve())
    base = course.base if parent.run is None else _on_mesh_of(parent_run.config(), course.base)
    return parent_run, Course(
        base,
        segments.read(parent_run.segment(parent.segment)),
        course.corpus,
        course.mesh,
        course.programs,
        logbook.skip_limits(parent_run.path, parent.segment),
    )


def state_before(run: RunFolder, course: Course, step: int) -> Found:
    """The state whose next step is `step`, executing what lies after the newest checkpoint."""
    found = newest_state(run, course, step)
    state = found.state
    for _, _, after, _ in course.run(state, found.step, step):
        state = after
    return dataclasses.replace(found, state=state, step=step)


def with_clocks(state: TrainState, segment: segments.Segment) -> TrainState:
    """`state` with the schedule step and update count that a segment departs with."""

    def put(old: jax.Array, value: int) -> jax.Array:
        return jax.device_put(jnp.asarray(value, old.dtype), old.sharding)

    if segment.schedule_step is not None:
        state = state.replace(  # type: ignore[attr-defined]
            schedule_step=put(state.schedule_step, segment.schedule_step)
        )
    if segment.update_count is not None:
        count = segment.update_count
        state = state.replace(  # type: ignore[attr-defined]
            optimizer=jax.tree_util.tree_map_with_path(
                lambda path, leaf: put(leaf, count) if _is_count(path) else leaf, state.optimizer
            )
        )
    return state


def update_count(state: TrainState) -> int:
    """What beta2 counts from."""
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    return next(int(leaf) for path, leaf in leaves if _is_count(path))


def _is_count(path: tuple[object, ...]) -> bool:
    return getattr(path[-1], "name", None) == "count"


def _on_mesh_of(settings: config.Config, other: config.Config) -> config.Config:
    """`settings` on the mesh, and with the folders of corpora, of `other`."""
    mixture = settings.data.mixture
    if mixture is not None and other.data.mixture is not None:
        mixture = mixture.model_copy(update={"corpora": other.data.mixture.corpora})
    moved = settings.data.model_copy(update={"corpus": other.data.corpus, "mixture": mixture})
    return settings.model_copy(update={"mesh": other.mesh, "data": moved})
