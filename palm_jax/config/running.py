"""Settings of when and where: saving, watching, several processes, what is recorded."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pydantic

from palm_jax.config.fields import (
    END,
    NaturalInt,
    Place,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    WholeSeconds,
)
from palm_jax.config.words import short


class Checkpoint(Section):
    every: PositiveInt = 100  # steps
    # The newest, and enough older ones to go back to from an incident seen late.
    keep_last: PositiveInt = 5
    keep_best: NaturalInt = 1  # by held-out loss
    keep_every: PositiveInt | None = None  # steps
    # A second folder for the run, on a disk that stays where the first may vanish.
    mirror: Place | None = None
    mirror_every: PositiveInt | None = None  # steps; null: each checkpoint


class Eval(Section):
    every: PositiveInt | None = None  # steps; a run that ends evaluates in any case


class Spikes(Section):
    """Which losses are incidents, and what is done about them (docs/spikes.md)."""

    policy: Literal["observe", "skip_update", "rollback", "rollback_healthy", "stop"] = "observe"

    # A loss is flagged above level + `sigmas` of the window's spread, or above level + `jump`.
    window: Annotated[int, pydantic.Field(ge=9, lt=END)] = 100  # steps that the level comes from
    min_history: Annotated[int, pydantic.Field(ge=9, lt=END)] = 30  # fewer give no spread
    sigmas: PositiveFloat = 6.0
    least_sigma: PositiveFloat = 0.003  # nats; a spread is taken to be at least this
    jump: PositiveFloat = 1.0  # nats
    drift: PositiveFloat = 0.1  # nats by which a slow rise lies above the best level
    stall_steps: Annotated[int, pydantic.Field(ge=600, lt=END)] = (
        1000  # and at least a quarter of the run
    )
    least_fall: PositiveFloat = 0.01  # nats; who falls by less in so many steps has stalled

    # An incident is over after `recover_steps` good steps in a row, or judged.
    patience_steps: Annotated[int, pydantic.Field(ge=8, lt=END)] = 100
    recover_steps: PositiveInt = 5
    nonfinite_steps: PositiveInt = 5  # in a row: diverged, without waiting

    # policy: skip_update. The limit of step s comes from steps up to s - lag.
    lag: PositiveInt = 10
    least_gradient_ratio: Annotated[float, pydantic.Field(gt=1)] = 3.0  # limit over level, at least
    most_skips: PositiveInt = 20  # in a row

    # policy: rollback, rollback_healthy.
    rewind_steps: PositiveInt = 100  # PaLM, section 5.1: "roughly 100 steps before the spike"
    exclude_batches: PositiveInt = 300  # likewise: "roughly 200-500 data batches"
    rate_scale: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.5
    same_place_steps: PositiveInt = 500  # onsets nearer than this are one place

    @pydantic.model_validator(mode="after")
    def _exclusion_reaches_the_spike(self) -> Spikes:
        if self.exclude_batches <= self.rewind_steps:
            raise ValueError(
                f"exclude_batches={self.exclude_batches} counts from rewind_steps="
                f"{self.rewind_steps} before the spike and does not reach it; make it larger"
            )
        if not self.min_history <= self.window:
            raise ValueError(
                f"min_history={self.min_history} is more than window={self.window} ever holds"
            )
        return self


class Verify(Section):
    """Silent corruption: gradients computed again on other devices (docs/faults.md)."""

    every: PositiveInt | None = None  # steps


class Distributed(Section):
    """Several processes of one run (docs/faults.md)."""

    timeout_s: WholeSeconds = 100  # without a sign of life from another process, the run ends
    start_timeout_s: WholeSeconds = 300  # for all to start, and to agree about what they train
    denied_hosts: tuple[str, ...] = ()  # no process of the run starts on these


class Supervise(Section):
    """What `palm-jax train --supervise` takes for a hang, and how often it starts anew."""

    restarts: PositiveInt = 5  # in a row, without a newer checkpoint
    backoff_s: Annotated[float, pydantic.Field(ge=0, le=1e7)] = 5.0  # then twice as long each time
    longest_backoff_s: Seconds = 300.0
    # No news for so long is a hang: at least `stall_s`, and `stall_factor` times the median.
    stall_factor: Annotated[float, pydantic.Field(gt=1, le=1e6)] = 10.0
    stall_s: Seconds = 600.0
    start_s: Seconds = 3600.0  # likewise, until the first steps are done


class Log(Section):
    every: PositiveInt = 10  # steps between flushes of the logbook
    # Of each microbatch's own gradient: names the lane, and so the host, where runs part.
    microbatch_digests: bool = False
    # "all": layer by layer, too (docs/vitals.md). "basic": losses, norms, rates.
    vitals: Literal["basic", "all"] = "all"
    tensorboard: bool = True
    # Run by the shell at each alarm and incident, with the event as a line of JSON on its input.
    alert_command: str | None = None
    peak_flops: PositiveFloat | None = None  # FLOP/s of one device, where it is not known
    profile: str | None = None  # "A:B": a profiler's trace of steps A to B - 1

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """`profile` as numbers."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        return int(start), int(stop)

    @pydantic.field_validator("profile")
    @classmethod
    def _profile_is_an_interval(cls, profile: str | None) -> str | None:
        if profile is not None:
            found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", profile)
            if found is None or int(found[1]) >= int(found[2]):
                raise ValueError(f"{short(profile)} must be A:B with whole numbers, 0 <= A < B")
        return profile
