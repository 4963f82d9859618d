"""The gradient noise scale of a run's state: how large a batch is worth its price.

The gradients of M small batches of b sequences, at one state, give two squared norms: the mean of
theirs, and that of their mean, a batch of M b. From both follow the true gradient's squared norm
and one sequence's variance, and their ratio is the noise scale (McCandlish et al., 2018): batches
well below it save steps as they grow, batches above it hardly.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
from typing import Any

import numpy as np

from palm_jax import config, sharding
from palm_jax.course import Course
from palm_jax.errors import WrongInput
from palm_jax.lab import snapshot
from palm_jax.plan import batch as batches
from palm_jax.record import segments
from palm_jax.record.folder import RunFolder
from palm_jax.replay import states

Gradient = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Measured:
    """At one state; batches in sequences."""

    step: int
    batch: int  # the run's own there
    small_batch: int
    small_batches: int
    small_norm_squared: float  # mean over the small batches
    large_norm_squared: float  # of their mean
    noise_scale: float | None  # None: the gradient is lost in its noise
    standard_error: float | None  # of the noise scale, by leaving out one small batch at a time


def measure(
    run: RunFolder,
    corpus: Any,
    settings: config.Config,
    step: int,
    num_batches: int,
    segment: int | None = None,
    tell: collections.abc.Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """The noise scale of the state before `step`, on the data of the steps from it on.

    Args:
      num_batches: the run's batches to read; each is cut into blocks of `numerics.lanes` x
        `numerics.microbatch` sequences.
      tell: is told how many blocks are done, and of how many.
    Raises:
      WrongInput: the step lies before the segment or after the run's steps, or the blocks are too
        few.
    """
    number = run.last_segment() if segment is None else segment
    course = Course(
        settings, segments.read(run.segment(number)), corpus, sharding.make_mesh(settings.mesh)
    )
    if not course.segment.start_step <= step <= settings.steps:
        raise WrongInput(
            f"--step {step}: segment {number} of {run.path} has steps "
            f"{course.segment.start_step} to {settings.steps}"
        )
    state = states.state_before(run, course, step).state
    program = course.program_at(step)
    size = settings.numerics.lanes * settings.numerics.microbatch
    gradient = snapshot.mean_gradient(program, state.params, corpus.manifest.end_of_document)
    found: list[Gradient] = []
    own_batch = 0
    with course.batches(step, step + num_batches) as read:
        for index, (_, one) in enumerate(read):
            tokens = np.asarray(one.tokens)
            own_batch = own_batch or len(tokens)
            blocks = np.split(tokens, len(tokens) // size)
            for rows in blocks:
                found.append(gradient(program.put(rows)))
                tell(len(found), len(found) + (num_batches - index - 1) * len(blocks))
    if len(found) < 2:
        raise WrongInput(
            f"--batches {num_batches}: that is one block of {size} sequences; give more batches"
        )
    return of_gradients(found, step, own_batch, size)


def of_gradients(found: list[Gradient], step: int, batch: int, size: int) -> Measured:
    """From the mean gradients of small batches of `size` sequences each."""
    squares = np.array([_squared(g) for g in found])
    total = {name: np.zeros(first.shape) for name, first in found[0].items()}
    for gradient in found:
        for name, term in gradient.items():
            total[name] += term
    count = len(found)
    large = _squared({name: t / count for name, t in total.items()})
    without = []
    for g, square in zip(found, squares, strict=True):
        if count > 2:
            rest = {name: (total[name] - g[name]) / (count - 1) for name in total}
            small = (squares.sum() - square) / (count - 1)
            without.append(_scale(size, count - 1, small, _squared(rest)))
    known = [value for value in without if value is not None]
    error = None
    if len(known) == count:  # the jackknife's: of values that differ by one observation each
        error = math.sqrt((count - 1) * float(np.var(known)))
    small = float(squares.mean())
    return Measured(
        step, batch, size, count, small, large, _scale(size, count, small, large), error
    )


def _scale(size: int, count: int, small: float, large: float) -> float | None:
    found = batches.noise_scale(size, size * count, small, large)
    return found.batch if found.squared_gradient > 0 else None


def _squared(gradient: Gradient) -> float:
    return float(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradient.values()))
