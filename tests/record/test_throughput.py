"""A run that becomes slower over hours is told of; one that varies within them is not."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from palm_jax.record.throughput import Throughput

TEN_MINUTES = 600.0


def hours(watched: Throughput, rates, batch_size=8, first=0):
    """Six news an hour, each of these rates; the steps at which it alarms."""
    found = []
    for hour, rate in enumerate(rates):
        for part in range(6):
            step = first + 6 * hour + part
            alarm = watched.add(step, batch_size, TEN_MINUTES, round(TEN_MINUTES * rate))
            found += [] if alarm is None else [alarm]
    return found


def test_slow_hour_is_told_with_the_best_one():
    (alarm,) = hours(Throughput(), [1000, 1100, 1050, 985])
    assert (alarm.step, alarm.vital, alarm.value) == (23, "tokens_per_second", 985.0)
    assert alarm.limit == 990.0
    assert alarm.why == "of the last hour; the best had 1,100"


def test_larger_batch_is_another_pace():
    watched = Throughput()
    assert hours(watched, [2000], batch_size=16) == []
    assert hours(watched, [1000, 1000], batch_size=8) == []
    assert len(hours(watched, [1000], batch_size=16)) == 1


@hypothesis.given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=5))
def test_nothing_is_told_before_there_are_two_hours(swings):
    watched = Throughput()
    seconds = 2 * 3600 / (len(swings) + 1)  # two hours would need one more
    told = [watched.add(n, 8, seconds, round(seconds * s)) for n, s in enumerate(swings)]
    assert told == [None] * len(swings)
