"""How long silence may last before it is a hang."""

from __future__ import annotations

import pytest

from palm_jax import config
from palm_jax.supervise.pace import Pace

SETTINGS = config.Supervise(stall_factor=10, stall_s=20, start_s=1000)


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        ([], 1000),
        ([("start", 0)], 1000),
        ([("start", 0), ("step", 500)], 20),
        ([("start", 0), ("step", 500), ("step", 501)], 20),
        # The median of 5, 5 and 60 is 5: one slow save is not the usual.
        ([("start", 0), ("step", 5), ("step", 10), ("step", 15), ("step", 75)], 50),
        ([("start", 0), ("step", 5), ("checkpoint", 6), ("step", 10)], 50),
        # A rollback starts again, and compiles again.
        ([("start", 0), ("step", 5), ("step", 10), ("start", 11)], 1000),
        ([("start", 0), ("step", 5), ("step", 10), ("start", 11), ("step", 300)], 50),
        # A larger batch compiles, and an evaluation may take long.
        ([("start", 0), ("step", 5), ("step", 10), ("phase", 11)], 1000),
        ([("start", 0), ("step", 5), ("step", 10), ("phase", 11), ("evaluation", 90)], 1000),
    ],
)
def test_limit_follows_the_usual_time_between_news(news, expected):
    pace = Pace(SETTINGS)
    for event, at in news:
        pace.hear(event, at)
    assert pace.limit() == expected
