"""Scores of probe curves, against plain loops."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from palm_jax.diagnosis import scores

LOSSES = st.lists(st.floats(0, 20) | st.sampled_from([math.nan, math.inf]), min_size=1)


@hypothesis.given(
    begin=st.floats(0, 10), losses=LOSSES, limit=st.floats(0, 5), horizon=st.integers(1, 9)
)
def test_score_is_that_of_a_plain_loop(begin, losses, limit, horizon):
    found = scores.score(begin, losses, limit, horizon)
    whole, risen = [begin, *losses], []
    for place in range(1, len(whole)):
        lowest = math.inf
        for before in range(max(0, place - horizon), place):
            if math.isfinite(whole[before]) and whole[before] < lowest:
                lowest = whole[before]
        if not math.isfinite(whole[place]) or lowest == math.inf:
            risen.append(math.inf)
        else:
            risen.append(max(0.0, whole[place] - lowest))
    peak = max(risen)
    at = risen.index(peak)
    assert found.peak == peak
    assert found.area == math.fsum(risen)
    assert found.spiked == (peak > limit)
    recovery = None
    for step in range(len(risen) - 1, at - 1, -1):
        if risen[step] <= limit:
            recovery = step - at
    assert found.recovery == recovery


def test_a_spike_below_where_an_arm_began_counts():
    assert scores.score(5.0, [4.0, 3.0, 3.6, 3.0], 0.5, 10).peak == pytest.approx(0.6)
    # Not one that took longer than a horizon.
    assert scores.score(5.0, [3.0, 3.2, 3.4, 3.6], 0.5, 2).peak == pytest.approx(0.4)


def test_noise_is_twice_what_clean_windows_of_an_arms_length_rise_by():
    sawtooth = [2.0, 2.1, 2.0, 2.1] * 20
    assert scores.noise(2.0, sawtooth, 8) == pytest.approx(0.2)
    assert scores.noise(2.0, [2.0] * 80, 8) == scores.LEAST_RISE
    # Nothing to look at: no less than what is never called a spike.
    assert scores.noise(2.0, [], 8) == scores.LEAST_RISE


def test_the_threshold_lies_between_noise_and_the_spike():
    assert scores.threshold(0.04, [0.6, 0.8, 5.0]) == pytest.approx(0.4)
    assert scores.threshold(0.04, [math.inf, math.inf]) == scores.LARGE_RISE
    assert scores.threshold(0.5, [0.6, 0.8]) == 0.5
