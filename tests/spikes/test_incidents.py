"""Which checkpoints an incident pins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.config import Spikes
from palm_jax.spikes.incidents import pinned

DEFAULT = Spikes()


@pytest.mark.parametrize(
    ("onset", "steps", "expected"),
    [
        (1234, range(0, 2000, 100), (800, 1000, 1100, 1200)),
        (1200, range(0, 2000, 100), (800, 1000, 1100, 1200)),  # state 1200 has not seen step 1200
        (1234, range(0, 2000, 1000), (0, 1000)),
        (1234, [1230, 1220, 1210, 1200, 300], (300, 1210, 1220, 1230)),
        (5000, range(0, 6000, 500), (3500, 4000, 4500, 5000)),
        (5, [10, 20], ()),
    ],
)
def test_newest_before_the_onset_and_three_older_ones_are_pinned(onset, steps, expected):
    assert pinned(onset, steps, DEFAULT) == expected


@given(st.integers(0, 3000), st.sets(st.integers(0, 3000), max_size=12))
def test_pinned_ones_exist_lie_before_and_are_as_many_as_can_be(onset, steps):
    chosen = pinned(onset, steps, DEFAULT)
    before = sorted(step for step in steps if step <= onset)
    assert list(chosen) == sorted(set(chosen) & set(before))
    assert len(chosen) == min(4, len(before))
    assert before[-1:] == list(chosen[-1:])
    far = [step for step in before if step <= onset - DEFAULT.rewind_steps]
    assert set(far[-1:]) <= set(chosen)  # where a rollback would begin
