"""What to do about an incident: a pure function, decided once.

  observe           nothing
  skip_update       nothing here: updates above `skip_above` are skipped as they come
  rollback          PaLM: from a checkpoint about 100 steps before the onset, without some 300
                    batches around it
  rollback_healthy  OPT-175B: from the newest checkpoint whose vitals are healthy, at a lower rate
  stop              end the run

An incident that recovers is left alone. At the same place the second rollback leaves out twice
as many batches, the third lowers the rate, too, and a fourth is not made: the run stops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from palm_jax.config import Schedule, Spikes
from palm_jax.spikes.incidents import Incident

_MOST_ROLLBACKS = 3  # at one place


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A state to go back to: the checkpoint STEP of the history that the run has now."""

    step: int
    complaints: tuple[str, ...] = ()  # what is not healthy about it


@dataclasses.dataclass(frozen=True)
class Rollback:
    """An earlier rollback in this history."""

    onset: int  # of the incident it was made for


@dataclasses.dataclass(frozen=True)
class Decision:
    action: Literal["none", "rollback", "stop"]
    reason: str
    checkpoint: int | None = None  # a rollback's: the new segment begins with this state
    at: int | None = None  # the step from which its changes are in force; not before `checkpoint`
    # Steps [start, stop) of the history so far, whose batches are left out; start is not before
    # `at`. replay.branches.positions_of makes positions of them.
    exclude: tuple[int, int] | None = None
    rate_scale: float = 1.0  # of the rate in force until now


def decide(
    incident: Incident,
    settings: Spikes,
    candidates: Sequence[Candidate],
    earlier: Sequence[Rollback],
    *,
    start_step: int = 0,
) -> Decision:
    """What `settings.policy` does about an incident, once its outcome is known.

    Args:
      candidates: the complete checkpoints of the history that the incident is in.
      earlier: the rollbacks that led to that history.
      start_step: where the history's last segment begins. The state there can be computed
        again, so it counts as a checkpoint if the rewinding reaches it.
    """
    if incident.outcome is None:
        return Decision("none", "its outcome is not known yet")
    what = f"{incident.kind} incident at step {incident.onset}: {incident.outcome}"
    if incident.outcome == "recovered":
        return Decision("none", f"{what} after {(incident.recovery or 0) - incident.onset} steps")
    if settings.policy == "observe":
        return Decision("none", f"{what}; spikes.policy=observe")
    if settings.policy == "stop":
        return Decision("stop", f"{what}; spikes.policy=stop")
    if settings.policy == "skip_update":
        if incident.kind != "skips":
            return Decision("none", f"{what}; spikes.policy=skip_update skips updates alone")
        return Decision(
            "stop",
            f"{settings.most_skips} updates in a row were skipped from step {incident.onset} on, "
            "so that the same parameters met ever the same limit",
        )
    same_place = [e for e in earlier if abs(e.onset - incident.onset) <= settings.same_place_steps]
    if len(same_place) >= _MOST_ROLLBACKS:
        return Decision(
            "stop",
            f"{what}, and {len(same_place)} rollbacks within {settings.same_place_steps} steps of "
            "there, with more batches left out and a lower rate, did not help",
        )
    return _rollback(incident, settings, candidates, len(same_place), start_step, what)


def _rollback(
    incident: Incident,
    settings: Spikes,
    candidates: Sequence[Candidate],
    num_before: int,
    start_step: int,
    what: str,
) -> Decision:
    """The `num_before`-th rollback at a place, counted from 0."""
    onset, healthy_only = incident.onset, settings.policy == "rollback_healthy"
    wanted = max(onset - settings.rewind_steps, start_step)
    usable = {
        c.step
        for c in candidates
        if start_step <= c.step <= onset and not (healthy_only and c.complaints)
    }
    if wanted == start_step <= onset:
        usable.add(start_step)
    if not usable:
        kind = "healthy checkpoint" if healthy_only else "checkpoint"
        return Decision(
            "stop", f"{what}; no {kind} from step {start_step} to {onset} is left to go back to"
        )
    if healthy_only:  # each time one older than the last, if there is one
        checkpoint = sorted(usable, reverse=True)[min(num_before, len(usable) - 1)]
        num_excluded = settings.exclude_batches * num_before
    else:
        checkpoint = max([step for step in usable if step <= wanted], default=max(usable))
        num_excluded = settings.exclude_batches * min(num_before + 1, 2)
    # From the same step before the onset whatever checkpoint there is, so that what is left out
    # reaches the onset; until there the steps run again as they did.
    first = max(checkpoint, wanted)
    exclude = (first, first + num_excluded) if num_excluded else None
    rate_scale = settings.rate_scale if healthy_only or num_before >= 2 else 1.0
    at = checkpoint if healthy_only else first
    said = [f"back to step {checkpoint}"]
    if exclude is not None:
        said.append(f"without the batches of steps {exclude[0]} to {exclude[1] - 1}")
    if rate_scale != 1:
        said.append(f"at {rate_scale:g} of the rate")
    again = f", rollback {num_before + 1} at this place" if num_before else ""
    return Decision(
        "rollback", f"{what}{again}; {', '.join(said)}", checkpoint, at, exclude, rate_scale
    )


def rate_overrides(schedule: Schedule, scale: float) -> tuple[str, ...]:
    """The `section.key=value` that multiply a schedule's rate by `scale` at every step."""
    if scale == 1:
        return ()
    overrides = [f"schedule.peak={schedule.peak * scale!r}"]
    if final := getattr(schedule, "final", 0):
        overrides.append(f"schedule.final={final * scale!r}")
    return tuple(overrides)
