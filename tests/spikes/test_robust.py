"""Level and spread against NumPy and against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.spikes import robust
from palm_jax.spikes.robust import Point

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.floats(0, 1))
def test_quantile_is_numpys(values, share):
    ordered = sorted(values)
    assert robust.quantile(ordered, share) == pytest.approx(
        np.quantile(ordered, share), rel=1e-9, abs=1e-6
    )


@given(NUMBERS)
def test_median_is_numpys(values):
    assert robust.median(values) == pytest.approx(np.median(values), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf, math.inf], math.inf),
        ([1.0, 2.0, math.inf], 2.0),
        ([math.inf] * 2, math.inf),
    ],
)
def test_median_takes_infinities(values, expected):
    assert robust.median(values) == expected


def points(values: list[float], sizes: list[int] | None = None) -> list[Point]:
    return [Point(i, v, 8 if sizes is None else sizes[i]) for i, v in enumerate(values)]


def test_two_alternating_values_have_their_mean_as_level_and_half_their_distance_as_sigma():
    level, sigma = robust.level(points([10.00, 10.02] * 15))
    assert level == pytest.approx(10.01)
    assert sigma == pytest.approx(0.01)


def test_sigma_of_normal_values_is_theirs_and_a_tenth_of_outliers_hardly_moves_it():
    rng = random.Random(1)
    values = [rng.gauss(3, 0.5) for _ in range(4000)]
    level, sigma = robust.level(points(values))
    assert level == pytest.approx(3, abs=0.05)
    assert sigma == pytest.approx(0.5, rel=0.05)
    for step in range(5, 4000, 10):
        values[step] = 1000.0
    level, sigma = robust.level(points(values))
    assert level == pytest.approx(3, abs=0.15)
    assert sigma < 0.7


def test_a_falling_line_has_no_spread_and_the_level_of_its_newest_thirds_middle():
    level, sigma = robust.level(points([9 - 0.1 * step for step in range(30)]))
    assert sigma == pytest.approx(0, abs=1e-9)
    assert level == pytest.approx(9 - 0.1 * 24.5)


def test_a_rising_line_keeps_its_spread():
    _, sigma = robust.level(points([1 + 0.1 * step for step in range(30)]))
    assert sigma == pytest.approx(0.1 * 29 * (0.841345 - 0.5), rel=1e-3)


@pytest.mark.parametrize("power", [-0.1, -0.5, -2.0])
def test_a_falling_power_law_never_lies_above_its_level(power):
    curve = [5 * (1 + step) ** power for step in range(400)]
    for stop in range(9, 400):
        level, _ = robust.level(points(curve[max(0, stop - 100) : stop]))
        assert curve[stop] <= level


def test_deviations_of_larger_batches_are_scaled_up_to_a_smaller_one():
    values = [10.00, 10.02] * 15
    assert robust.level(points(values, [32] * 30), 8).sigma == pytest.approx(0.02)
    # Not down: the scatter of larger batches has not been seen yet.
    assert robust.level(points(values, [8] * 30), 32).sigma == pytest.approx(0.01)


def test_scatter_of_normal_values_on_a_steep_line_is_theirs():
    rng = random.Random(2)
    values = [0.3 * step + rng.gauss(0, 0.5) for step in range(4000)]
    assert robust.scatter(values) == pytest.approx(0.5, rel=0.05)


def test_error_of_a_median_is_that_of_medians():
    rng = np.random.default_rng(0)
    medians = np.median(rng.normal(0, 2.0, (4000, 101)), axis=1)
    assert robust.error_of_median(2.0, 101) == pytest.approx(medians.std(), rel=0.05)


@pytest.mark.parametrize(
    ("values", "ratio", "expected"),
    [
        ([1.0] * 30, 1.5, False),
        ([1.0] * 10 + [1.2] * 10 + [1.6] * 10, 1.5, True),
        ([1.0] * 10 + [1.2] * 10 + [1.4] * 10, 1.5, False),
        ([1.0, 9.0] * 5 + [1.0] * 10 + [8.0] * 10, 1.5, False),  # within what it did before
        ([2.0] * 10 + [1.0] * 20, 1.1, False),
    ],
)
def test_rising_is_told_from_scatter(values, ratio, expected):
    assert robust.rises(values, ratio) == expected
