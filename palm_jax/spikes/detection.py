"""What is found in a run's steps: a fold over their records, one at a time, in order.

The detector knows nothing of when a record was written or read. Feeding it a run's history as it
unfolds, after a resume, or years later from the logbook gives the same incidents, and the same
limit of the gradient norm for every step. After a rollback it is fed the new history from the
beginning, so that its window is that of the restored step.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from palm_jax.config import Spikes
from palm_jax.spikes import ranges, robust
from palm_jax.spikes.incidents import Alarm, Incident, Kind, Unfolding
from palm_jax.spikes.robust import Point

BLOCK = 25  # steps: slow changes are looked for among medians of so many
_RECENT_BLOCKS = 4
_DRIFT_BLOCKS = 40  # whose scatter says how far a level may be off by chance
_JUMP_HISTORY = 8  # losses; from fewer, not even a jump can be told
_STALL_EVERY = 4 * BLOCK
_STALL_SHARE = 0.25  # of the steps so far: a loss that falls as a power law falls as much in each


class Vitals(NamedTuple):
    """What detection needs of a step's computed fields; None where they lack it."""

    loss: float
    gradient_norm: float | None = None
    batch_size: int = 1
    applied: bool = True
    clipped: bool | None = None
    loss_scale: float | None = None
    mean_log_z: float | None = None
    max_attention_logit: float | None = None  # of all layers
    last_residual_rms: float | None = None  # after the last layer

    @property
    def is_finite(self) -> bool:
        """Loss and gradient. Under a loss scale above 1 an overflow is in order: it is lowered."""
        if not math.isfinite(self.loss):
            return False
        overflow = self.gradient_norm is not None and not math.isfinite(self.gradient_norm)
        return not overflow or (self.loss_scale is not None and self.loss_scale > 1)


def read(computed: Mapping[str, Any]) -> Vitals:
    """From a record's `computed`, or from what a step gave: the same numbers.

    Raises:
      ValueError: no loss, or what should be a number is none.
    """
    try:
        return _read(computed)
    except (TypeError, LookupError, OverflowError) as error:
        raise ValueError(f"what should be a number is none ({error})") from error


def _read(computed: Mapping[str, Any]) -> Vitals:
    def number(name: str) -> float | None:
        value = computed.get(name)
        return None if value is None else float(value)  # takes "nan", "inf" and "-inf" too

    loss = number("loss")
    if loss is None:
        raise ValueError("a step's record has no loss")
    gradient_norm, clip_norm = number("gradient_norm"), number("clip_norm")
    factor = number("clip_factor")
    clipped = None if factor is None else factor < 1
    if clipped is None and gradient_norm is not None and clip_norm is not None:
        clipped = gradient_norm > clip_norm
    logit = number("max_attention_logit")
    if logit is None and (layers := computed.get("layers/max_attention_logit")) is not None:
        logit = _largest(layers)
    residual = computed.get("layers/residual_rms")
    batch_size = int(computed.get("batch_size", 1))
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}")
    return Vitals(
        loss,
        gradient_norm,
        batch_size,
        bool(computed.get("applied", True)),
        clipped,
        number("loss_scale"),
        number("mean_log_z"),
        logit,
        None if residual is None else float(residual[-1]),
    )


def _largest(values: Iterable[Any]) -> float:
    """NaN if any is."""
    numbers = [float(value) for value in values]
    return math.nan if any(math.isnan(x) for x in numbers) else max(numbers)


class Limit(NamedTuple):
    level: float
    value: float  # what lies above is off the course


class _Blocks:
    """Medians of BLOCK steps each, of the losses that were on the course."""

    def __init__(self) -> None:
        self.done: list[Point] = []
        self.best = math.inf  # the lowest level of _RECENT_BLOCKS blocks so far
        self.best_end = 0  # the step after it
        self._values: list[float] = []
        self._number: int | None = None

    def add(self, step: int, value: float | None) -> bool:
        """Take in a step, with None if it was off the course; whether a block was completed."""
        number, completed = step // BLOCK, False
        if self._number is not None and number != self._number and self._values:
            self.done.append(Point(self._number * BLOCK, robust.median(self._values)))
            self._values, completed = [], True
        self._number = number
        if value is not None:
            self._values.append(value)
        return completed

    def level(self) -> float:
        return robust.median([p.value for p in self.done[-_RECENT_BLOCKS:]])

    def note_best(self) -> None:
        if (level := self.level()) < self.best:
            self.best, self.best_end = level, self.done[-1].step + BLOCK


class Detector:
    """Feed it (step, computed) in the order of steps."""

    def __init__(self, settings: Spikes) -> None:
        self.settings = settings
        self.last: int | None = None  # the last step that was fed
        self.open: Incident | None = None
        self.stall: Incident | None = None  # beside it, for it may last
        self._unfolding: Unfolding | None = None
        self._losses: collections.deque[Point] = collections.deque(maxlen=settings.window)
        self._norms: collections.deque[Point] = collections.deque(maxlen=settings.window)
        self._blocks = _Blocks()
        self._norms_above = self._norms_below = 0  # in a row
        self._norm_alarm = False
        self._skips = 0  # in a row, of finite gradients
        self._dead = False  # an incident ended with losses that are not finite, and they go on
        self._norm_limit: float | None = None  # after the last step
        # (step, limit after it) of the last steps; the first may be long before.
        self._norm_limits: collections.deque[tuple[int, float]] = collections.deque()
        self._watched = [ranges.Watched(bounds) for bounds in ranges.RANGES]
        self._clipped: collections.deque[bool] = collections.deque(maxlen=settings.window)
        self._recent: dict[str, collections.deque[float]] = {
            vital: collections.deque(maxlen=settings.window) for vital in ranges.NOT_RISING
        }

    def feed(self, step: int, computed: Mapping[str, Any]) -> list[Incident | Alarm]:
        """Take in a step. Returns what begins or ends with it; see incidents.py.

        Raises:
          ValueError: a step not after the last, or as `read`.
        """
        return self.add(step, read(computed))

    def add(self, step: int, vitals: Vitals) -> list[Incident | Alarm]:
        """As `feed`, of what was read already."""
        if self.last is not None and step <= self.last:
            raise ValueError(f"step {step} was fed after step {self.last}")
        self.last = step
        told: list[Incident | Alarm] = []
        told += self._loss(step, vitals)
        told += self._gradient_norm(step, vitals)
        told += self._skipped(step, vitals)
        told += self._vitals(step, vitals)
        return told

    # --- the loss ---

    def _loss(self, step: int, vitals: Vitals) -> list[Incident | Alarm]:
        loss, finite = vitals.loss, vitals.is_finite
        limit = self._loss_limit(vitals.batch_size)
        off = not finite or (limit is not None and loss > limit.value)
        told: list[Incident | Alarm] = []
        self._dead = self._dead and not finite
        if self._unfolding is None and off and not self._dead:
            kind: Kind = "level"
            if not finite:
                kind = "nonfinite"
            elif limit is not None and loss > limit.level + self.settings.jump:
                kind = "jump"
            told += self._opened(kind, step, step, limit, loss)
        if self._unfolding is not None:
            # What is off the course by the limit at the onset is not to lift the window's.
            off = off or (self._unfolding.opened.kind != "drift" and self._unfolding.is_off(loss))
            closed = self._unfolding.add(step, loss, vitals.gradient_norm, finite)
            if closed is not None:
                told.append(closed)
                self.open, self._unfolding = None, None
                if closed.outcome != "recovered":
                    self._begin_again()
                    self._dead = not finite
        if not off:
            self._losses.append(Point(step, loss, vitals.batch_size))
        if self._blocks.add(step, None if off else loss):
            told += self._slow_changes(step)
        return told

    def _loss_limit(self, batch_size: int) -> Limit | None:
        """Of the next loss, from the window; None while that is too short."""
        settings, points = self.settings, self._losses
        if len(points) < _JUMP_HISTORY:
            return None
        if len(points) < settings.min_history:
            level = robust.median([p.value for p in points])
            return Limit(level, level + settings.jump)
        level, sigma = robust.level(list(points), batch_size)
        sigma = max(sigma, settings.least_sigma)
        return Limit(level, level + min(settings.sigmas * sigma, settings.jump))

    def _opened(
        self, kind: Kind, onset: int, step: int, limit: Limit | None, value: float
    ) -> list[Incident | Alarm]:
        level, bound = (None, None) if limit is None else (limit.level, limit.value)
        self.open = Incident(kind, onset, step, level, bound, value)
        # Of single losses about their trend, which may be rising already.
        values = [p.value for p in self._losses]
        sigma = robust.scatter(values) if len(values) >= _JUMP_HISTORY else 0.0
        sigma = max(sigma, self.settings.least_sigma)
        self._unfolding = Unfolding(self.settings, self.open, sigma)
        return [self.open]

    def _begin_again(self) -> None:
        """Where the loss did not come back, what is there now is the level to watch."""
        self._losses.clear()
        self._blocks = _Blocks()

    # --- slow changes of the loss ---

    def _slow_changes(self, step: int) -> list[Incident | Alarm]:
        blocks = self._blocks
        if len(blocks.done) < _RECENT_BLOCKS:
            return []
        told: list[Incident | Alarm] = []
        level = blocks.level()
        if self._unfolding is None and len(self._losses) >= self.settings.min_history:
            sigma = max(robust.level(list(self._losses)).sigma, self.settings.least_sigma)
            # Few blocks do not tell how levels scatter where losses follow one another.
            error = sigma
            if len(blocks.done) >= 9:
                values = [p.value for p in blocks.done[-_DRIFT_BLOCKS:]]
                error = robust.error_of_median(robust.scatter(values), _RECENT_BLOCKS)
                error *= self.settings.sigmas
            allowed = max(self.settings.drift, error)
            if level > blocks.best + allowed:
                limit = Limit(blocks.best, blocks.best + allowed / 2)
                told += self._opened("drift", blocks.best_end, step, limit, level)
        blocks.note_best()
        if blocks.done[-1].step % _STALL_EVERY == 0:
            told += self._stalled(step)
        return told

    def _stalled(self, step: int) -> list[Incident | Alarm]:
        settings = self.settings
        begin = step - max(settings.stall_steps, int(_STALL_SHARE * step))
        done = self._blocks.done
        blocks = done[bisect.bisect_left(done, begin, key=lambda p: p.step) :]
        if done[0].step > begin or len(blocks) < 9:
            return []
        third = len(blocks) // 3
        old = robust.median([p.value for p in blocks[:third]])
        new = robust.median([p.value for p in blocks[-third:]])
        if self.stall is not None:
            assert self.stall.level is not None
            if new > self.stall.level - settings.least_fall:
                return []
            closed = _ended_stall(self.stall, step)
            self.stall = None
            return [closed]
        # Of the difference of two medians.
        scatter = robust.scatter([p.value for p in blocks])
        error = math.sqrt(2) * robust.error_of_median(scatter, third)
        if self._unfolding is not None or old - new + 2 * error >= settings.least_fall:
            return []
        self.stall = Incident("stall", blocks[third].step, step, new, None, new)
        return [self.stall]

    # --- other vitals ---

    def _gradient_norm(self, step: int, vitals: Vitals) -> list[Incident | Alarm]:
        norm, settings = vitals.gradient_norm, self.settings
        if norm is None:
            return []
        limit = self._norm_limit
        told: list[Incident | Alarm] = []
        if not math.isfinite(norm) or (limit is not None and norm >= limit):
            self._norms_above, self._norms_below = self._norms_above + 1, 0
            if math.isfinite(norm) and not self._norm_alarm:
                assert limit is not None
                why = f"{settings.sigmas:g} times its scatter above its level"
                told.append(Alarm("gradient_norm", step, norm, limit, why))
                self._norm_alarm = True
            if self._norms_above >= settings.patience_steps:  # this is how it is now
                self._norms.clear()
        else:
            self._norms_above, self._norms_below = 0, self._norms_below + 1
            self._norm_alarm = self._norm_alarm and self._norms_below < settings.recover_steps
            self._norms.append(Point(step, norm, vitals.batch_size))
        self._set_norm_limit(step)
        return told

    def _set_norm_limit(self, step: int) -> None:
        settings = self.settings
        self._norm_limit = None
        if len(self._norms) >= settings.min_history:
            level, sigma = robust.level(list(self._norms))
            self._norm_limit = max(
                level + settings.sigmas * sigma, settings.least_gradient_ratio * level
            )
        limit = math.inf if self._norm_limit is None else self._norm_limit
        self._norm_limits.append((step, limit))
        while len(self._norm_limits) > 1 and self._norm_limits[1][0] <= step - settings.lag:
            self._norm_limits.popleft()

    def skip_above(self, step: int) -> float:
        """The limit of `step`'s gradient norm: an update whose norm is not below it is skipped.

        Infinite unless spikes.policy is skip_update. It comes from steps up to `step` - lag,
        whatever later ones were fed already.

        Raises:
          ValueError: one of those was not fed yet, or `step` lies before the last that was.
        """
        known, last = step - self.settings.lag, -1 if self.last is None else self.last
        if self.settings.policy != "skip_update":
            return math.inf
        if not known <= last < step:
            raise ValueError(
                f"skip_above at step {step} needs steps up to {known}; the last that was fed is "
                f"{self.last}"
            )
        return next((x for at, x in reversed(self._norm_limits) if at <= known), math.inf)

    def _skipped(self, step: int, vitals: Vitals) -> list[Incident | Alarm]:
        if vitals.applied or not vitals.is_finite:
            self._skips = 0
            return []
        self._skips += 1
        if self._skips < self.settings.most_skips:
            return []
        onset, self._skips = step - self._skips + 1, 0
        self._norms.clear()
        self._set_norm_limit(step)
        norm = vitals.gradient_norm
        return _at_once(Incident("skips", onset, step, None, None, norm, vital="gradient_norm"))

    def _vitals(self, step: int, vitals: Vitals) -> list[Incident | Alarm]:
        told: list[Incident | Alarm] = []
        if vitals.clipped is not None:
            self._clipped.append(vitals.clipped)
        values = {
            "max_attention_logit": vitals.max_attention_logit,
            "gradient_norm": vitals.gradient_norm,
            "mean_log_z": vitals.mean_log_z,
            "loss_scale": vitals.loss_scale,
            "last_residual_rms": vitals.last_residual_rms,
        }
        if len(self._clipped) == self.settings.window:
            values["clip_rate"] = sum(self._clipped) / len(self._clipped)
        for watched in self._watched:
            if (value := values.get(watched.range.vital)) is None:
                continue
            if (alarm := watched.add(step, value)) is not None:
                told.append(alarm)
            if watched.is_fatal:
                told += _at_once(
                    Incident(
                        "vital",
                        step - watched.range.in_a_row + 1,
                        step,
                        None,
                        watched.range.fatal,
                        value,
                        vital=watched.range.vital,
                    )
                )
        for vital, recent in self._recent.items():
            if (value := values[vital]) is not None and math.isfinite(value):
                recent.append(value)
        return told

    def complaints(self) -> tuple[str, ...]:
        """What speaks against going back to the state after the last step; nothing if healthy."""
        found = ranges.complaints(self._watched, {k: list(v) for k, v in self._recent.items()})
        if self.open is not None:
            found = (f"a {self.open.kind} incident is open", *found)
        return found


def _at_once(opened: Incident) -> list[Incident | Alarm]:
    """An incident with nothing to wait for."""
    return [opened, dataclasses.replace(opened, outcome="diverged", closed=opened.detected)]


def _ended_stall(stall: Incident, step: int) -> Incident:
    return dataclasses.replace(stall, outcome="recovered", closed=step, recovery=step)


def detect(
    history: Iterable[tuple[int, Mapping[str, Any]]], settings: Spikes
) -> list[Incident | Alarm]:
    """All that is found in a history, in order."""
    detector = Detector(settings)
    return [found for step, computed in history for found in detector.feed(step, computed)]


def skip_above(
    history: Iterable[tuple[int, Mapping[str, Any]]], step: int, settings: Spikes
) -> float:
    """`Detector.skip_above` of `step`, from as much of a history as it may depend on."""
    detector = Detector(settings)
    for earlier, computed in history:
        if earlier > step - settings.lag:
            break
        detector.feed(earlier, computed)
    return detector.skip_above(step)
