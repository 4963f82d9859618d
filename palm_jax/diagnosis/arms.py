"""The arms of a diagnosis: short stretches of a run, executed again with one thing changed.

All of them lead over the same steps, from the fork, some steps before the onset, to a stop after
it. An arm is a description, so that it can be executed anywhere; which of the planned ones are
needed depends on what earlier ones show (procedure.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from palm_jax import config

Natural = Annotated[int, pydantic.Field(ge=0, le=config.MOST_STEPS)]
# Names the file of its result, which lies beside those of others.
Name = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ,]{0,63}$")]

Kind = Literal["H", "W", "A", "N", "C", "B", "E", "half rate", "D"]
TITLES: dict[Kind, str] = {
    "H": "the run up to the fork, again",
    "W": "clean steps before it, again",
    "A": "replay: the same state and data",
    "N": "placebo: the same sequences, permuted",
    "C": "the same state, other data",
    "B": "the same data, another state",
    "E": "another state, other data",
    "half rate": "as E, at half the rate",
    "D": "treatment",
}
Feed = Literal[
    "own",  # the run's own sequences
    # The same permuted within their batches, and in the window neighbouring batches, too.
    "permuted",
    "other",  # others in the window, drawn from the corpus; what follows is unmoved
    "all other",  # others at every step
    "excluded",  # the window left out, what follows moves up; replicates permuted within batches
    "other, then own",  # as `other` to the stop, then the same steps once more, permuted
]
NUM_REPLICATES = 8  # planned of each arm; as many are executed as it takes
NUM_TREATED = 2
CLEAN_ARMS = 3  # clean steps in which rises are looked at, as many times an arm's length


class Arm(pydantic.BaseModel):
    """From `state_step`'s state, steps [first, stop) as the clocks of rate and beta2 count."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Name
    kind: Kind
    replicate: Natural = 0  # seeds what is permuted and drawn
    state_step: Natural  # the state before this step of the run
    first: Natural
    stop: Natural
    scored_from: Natural  # the step before which the probe's loss is what others rise from
    feed: Feed
    pinned: bool = False  # the clocks of rate, decay and beta2 are those of the run at `first`
    rate_scale: float = 1.0
    skip_above: float | None = None  # gradient norm; None: what the run did
    overrides: tuple[str, ...] = ()
    update_count: Natural | None = None

    @pydantic.model_validator(mode="after")
    def _steps_rise(self) -> Arm:
        # H has no step where the fork is the first state there is.
        last = self.stop if self.kind == "H" else self.stop - 1
        if not self.first <= self.scored_from <= last:
            raise ValueError(
                f"arm {self.name}: steps {self.first}, {self.scored_from}, {self.stop} do not rise"
            )
        return self

    @property
    def num_steps(self) -> int:
        return self.stop - self.first


class Plan(pydantic.BaseModel):
    """What a diagnosis of one spike consists of; written once, before the first arm."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    asked: tuple[Natural, Natural, bool]  # steps before and after the onset; clocks pinned
    segment: Natural
    onset: Natural  # the first step whose loss was off its course
    fork: Natural  # where arms begin
    window_stop: Natural  # data of steps [fork, window_stop) are the suspects
    stop: Natural  # where arms end
    earlier: tuple[Natural, ...]  # steps of checkpoints before the fork, newest first
    healthy: Natural  # of these, the one that E begins with
    budget: Natural  # steps, of all arms together
    seconds_per_step: float | None  # as recorded
    arms: tuple[Arm, ...]

    @pydantic.model_validator(mode="after")
    def _steps_rise(self) -> Plan:
        within = self.fork < self.window_stop <= self.stop
        if not (within and self.fork <= self.onset < self.stop):
            raise ValueError(
                f"steps fork={self.fork}, onset={self.onset}, window_stop={self.window_stop} and "
                f"stop={self.stop} do not rise"
            )
        if self.healthy not in self.earlier or max(self.earlier) >= self.fork:
            raise ValueError("earlier: there must be steps before the fork, `healthy` among them")
        if len({arm.name for arm in self.arms}) < len(self.arms):
            raise ValueError("arms: two have one name")
        return self

    @property
    def horizon(self) -> int:
        """Steps of an arm."""
        return self.stop - self.fork

    def arm(self, name: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    def of_kind(self, kind: Kind) -> list[Arm]:
        return [arm for arm in self.arms if arm.kind == kind]


@dataclasses.dataclass(frozen=True)
class Treatment:
    """A change that may cure, as an arm from the fork with the run's own data."""

    name: str
    feed: Feed = "own"
    rate_scale: float = 1.0
    skip_above: float | None = None
    overrides: tuple[str, ...] = ()
    update_count: int | None = None


def planned(
    *,
    asked: tuple[int, int, bool],
    segment: int,
    onset: int,
    fork: int,
    window_stop: int,
    stop: int,
    start: int,
    earlier: Sequence[int],
    healthy: int,
    budget: int,
    seconds_per_step: float | None,
    treatments: Sequence[Treatment],
) -> Plan:
    """All arms that a verdict may need.

    Args:
      asked: what a person chose: steps before and after the onset, and whether B's clocks of rate
        and beta2 are the fork's, so that only its state is another, and not its rate.
      start: of the segment, which alone is compared with its record.
      earlier: steps of checkpoints before the fork, newest first; at least one, 0 if the run has
        none.
      healthy: one of them.
    """

    def before_fork(kind: Kind, first: int, until: int) -> Arm:
        steps: dict[str, Any] = {"first": first, "stop": until, "scored_from": first}
        return Arm(name=kind, kind=kind, feed="own", state_step=first, **steps)

    def from_fork(name: str, kind: Kind, feed: Feed, replicate: int, **changes: Any) -> Arm:
        at_fork = {"state_step": fork, "first": fork, "stop": stop, "scored_from": fork}
        given = at_fork | {"replicate": replicate} | changes
        return Arm(name=name, kind=kind, feed=feed, **given)

    # From the last checkpoint but one, so that the last one is compared with its record, and far
    # enough back for clean windows as long as an arm.
    own = [step for step in earlier if step >= start]
    far = [step for step in own[1:] if fork - step >= CLEAN_ARMS * (stop - fork)]
    back = far[0] if far else own[-1] if own else fork
    clean = []
    if fork - back < stop - fork:
        # Too few to tell what rises are usual. A segment that begins near the fork has parents.
        before = [s for s in earlier if fork - s >= CLEAN_ARMS * (stop - fork)]
        since = before[0] if before else earlier[-1]
        until = min(fork, since + CLEAN_ARMS * (stop - fork))
        clean = [before_fork("W", since, until)]
    arms = [
        before_fork("H", back, fork),
        *clean,
        from_fork("A1", "A", "own", 0),
        from_fork("A2", "A", "own", 1),
    ]
    states, (_, _, pinned) = earlier[:2], asked
    for r in range(NUM_REPLICATES):
        arms.append(from_fork(f"N{r}", "N", "permuted", r))
        arms.append(from_fork(f"C{r}", "C", "other", r))
        # Every fourth one meets the window's data after a C arm.
        if r % 4 == 3:
            arms.append(
                from_fork(
                    f"B{r}", "B", "other, then own", r, stop=2 * stop - fork, scored_from=stop
                )
            )
        else:
            state = states[r % len(states)]
            first = fork if pinned else state
            arms.append(
                Arm(
                    name=f"B{r}",
                    kind="B",
                    replicate=r,
                    feed="permuted",
                    state_step=state,
                    first=first,
                    stop=first + stop - fork,
                    scored_from=first,
                    pinned=pinned,
                )
            )
        # By the run's own clocks to the spike's step and past it by half the distance: if it
        # comes by the recipe, it comes there with any data.
        until = max(onset + (onset - healthy) // 2, healthy + stop - fork)
        scales: dict[Kind, float] = {"E": 1.0, "half rate": 0.5}
        for kind, scale in scales.items():
            arms.append(
                Arm(
                    name=f"{kind} {r}".replace("E ", "E"),
                    kind=kind,
                    replicate=r,
                    feed="all other",
                    state_step=healthy,
                    first=healthy,
                    stop=until,
                    scored_from=healthy,
                    rate_scale=scale,
                )
            )
    for treatment in treatments:
        for r in range(NUM_TREATED):
            feed = treatment.feed
            if r > 0 and feed == "own":
                feed = "permuted"
            arms.append(
                from_fork(
                    f"D {treatment.name} {r}",
                    "D",
                    feed,
                    r,
                    rate_scale=treatment.rate_scale,
                    skip_above=treatment.skip_above,
                    overrides=treatment.overrides,
                    update_count=treatment.update_count,
                )
            )
    return Plan(
        asked=asked,
        segment=segment,
        onset=onset,
        fork=fork,
        window_stop=window_stop,
        stop=stop,
        earlier=tuple(earlier),
        healthy=healthy,
        budget=budget,
        seconds_per_step=seconds_per_step,
        arms=tuple(arms),
    )
