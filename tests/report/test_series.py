"""Each step once, and fewer points that still show what was there; against plain loops."""

from __future__ import annotations

import math
from typing import Any

import books
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from palm_jax.record.chronicle import histories
from palm_jax.report import series
from palm_jax.report.series import Columns, LayerSeries, Series

NUMBERS = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


def bits(numbers: Any) -> bytes:
    return np.asarray(numbers, np.float64).tobytes()


def recorded(records: list[dict[str, Any]]) -> tuple[Columns, histories.Histories[int]]:
    """Columns and the present history, by the rule of the logbook."""
    columns, followed = Columns(), histories.Histories[int]({2: 0})
    for record in records:
        segment, step = record["segment"], record["step"]
        if segment != followed.segment:
            followed.enter(segment, step)
        followed.go_on(step)
        followed.add(step, columns.add(record) - step)
    return columns, followed


def test_each_step_is_once_in_a_history_with_its_last_attempt():
    first = books.steps(0, 10, loss=1.0)
    again = books.steps(6, 12, attempt=2, loss=2.0)
    other = books.steps(8, 11, segment=1, loss=3.0)
    columns, followed = recorded([*first, *again, *other])
    loss = columns.history(followed.rows).series("loss")
    assert loss.steps_S.tolist() == list(range(11))
    assert loss.values_S.tolist() == [1.0] * 6 + [2.0] * 2 + [3.0] * 3
    rows = followed.of(0)
    assert rows is not None
    assert columns.history(rows).series("loss").values_S.tolist() == [1.0] * 6 + [2.0] * 6


def test_what_was_abandoned_is_kept_apart_with_a_gap_where_steps_jump():
    records = [*books.steps(0, 4), *books.steps(2, 3, attempt=2), *books.steps(1, 3, segment=1)]
    columns, followed = recorded(records)
    left = columns.history(followed.rows).abandoned("tokens")
    # Steps 1 to 3 of the first attempt, then step 2 of the second.
    assert left.steps_S.tolist() == [1, 2, 3, 2, 2]
    assert bits(left.values_S) == bits([128, 192, 256, math.nan, 192])


@hypothesis.given(
    losses=st.lists(NUMBERS, max_size=30),
    skipped=st.integers(0, 5),
    evaluated=st.lists(st.integers(0, 40), unique=True).map(sorted),
    window=st.integers(1, 12),
)
def test_gap_is_beside_the_median_of_the_finite_losses_before(losses, skipped, evaluated, window):
    training = Series("t", np.arange(skipped, skipped + len(losses)), np.array(losses, np.float64))
    held_out = Series("h", np.array(evaluated, np.int64), np.full(len(evaluated), 2.5))
    expected = {}
    for step in evaluated:
        before = [
            losses[s - skipped]
            for s in range(step - window, step)
            if s >= skipped and s - skipped < len(losses) and math.isfinite(losses[s - skipped])
        ]
        if before:
            before.sort()
            middle = len(before) // 2
            lower = before[middle] if len(before) % 2 else before[middle - 1]
            expected[step] = 2.5 - (lower + before[middle]) / 2
    found = series.gap(training, held_out, window)
    assert found.steps_S.tolist() == list(expected)
    np.testing.assert_array_equal(found.values_S, list(expected.values()))


def test_a_branch_of_an_older_segment_takes_its_steps_up_again():
    records = [*books.steps(0, 8, loss=0.0), *books.steps(3, 6, segment=1, loss=1.0)]
    columns, followed = recorded([*records, *books.steps(5, 7, segment=2, loss=2.0)])
    loss = columns.history(followed.rows).series("loss")
    assert loss.values_S.tolist() == [0.0] * 5 + [2.0] * 2
    assert loss.steps_S.tolist() == list(range(7))


def test_numbers_of_every_kind_are_taken_and_text_is_not():
    columns, followed = recorded(
        [
            books.step(0, odd=10**400, name="x", applied=False, hole=None, rows=[1], digest="nan"),
            books.step(1, odd="-inf", **{"layers/a": [1, "nan"], "layers/b": ["x"]}),
            books.step(2, odd=True, hole=0.1, **{"layers/a": [2.5, 10**400]}),
        ]
    )
    history = columns.history(followed.rows)
    assert bits(history.series("odd").values_S) == bits([math.inf, -math.inf, 1.0])
    assert history.series("applied").values_S.tolist() == [0.0, 1.0, 1.0]
    assert (history.series("hole").steps_S.tolist(), history.series("hole").values_S.tolist()) == (
        [2],
        [0.1],
    )
    assert not {"name", "rows", "batch_digest"} & set(history.names)
    (layers,) = history.layers()
    assert (layers.name, layers.steps_S.tolist()) == ("layers/a", [1, 2])
    assert bits(layers.values_SN) == bits([[1, math.nan], [2.5, math.inf]])


@hypothesis.given(st.lists(NUMBERS, max_size=200), st.integers(6, 60), st.data())
def test_thinning_keeps_what_stands_out(values, most, data):
    keep = data.draw(st.lists(st.integers(0, max(len(values) - 1, 0)), max_size=3))
    keep = keep if values else []
    chosen = series.thin(np.array(values, np.float64), most, np.array(keep, np.int64)).tolist()
    assert chosen == sorted(set(chosen))
    if len(values) <= most:
        assert chosen == list(range(len(values)))
        return
    num_buckets = most // 3
    strange = [i for i, value in enumerate(values) if not math.isfinite(value)]
    wanted = {0, len(values) - 1, *keep}
    wanted |= set(strange) if len(strange) <= num_buckets else set()
    for bucket in range(num_buckets):
        places = [i for i in range(len(values)) if i * num_buckets // len(values) == bucket]
        finite = [values[i] for i in places if math.isfinite(values[i])]
        kept = [values[i] for i in places if i in chosen]
        if finite:
            assert min(finite) in kept
            assert max(finite) in kept
        if len(finite) < len(places):
            assert any(not math.isfinite(value) for value in kept)
    assert wanted <= set(chosen)
    assert len(chosen) <= 3 * num_buckets + 2 + len(keep)


@hypothesis.given(st.lists(NUMBERS, min_size=1, max_size=80), st.integers(1, 20))
def test_the_middle_of_a_bucket_is_the_median_of_its_finite_values(values, most):
    steps = np.arange(len(values)) * 2 + 5
    found = series.middle(Series("x", steps, np.array(values, np.float64)), most)
    num_buckets = min(most, len(values))
    for bucket in range(num_buckets):
        places = [i for i in range(len(values)) if i * num_buckets // len(values) == bucket]
        finite = sorted(values[i] for i in places if math.isfinite(values[i]))
        half = len(finite) // 2
        if not finite:
            assert math.isnan(found.values_S[bucket])
        elif len(finite) % 2:
            assert found.values_S[bucket] == finite[half]
        else:
            assert found.values_S[bucket] == pytest.approx(sum(finite[half - 1 : half + 1]) / 2)
        assert found.steps_S[bucket] == steps[(places[0] + places[-1]) // 2]
    assert len(found.steps_S) == num_buckets


@hypothesis.given(st.lists(NUMBERS, max_size=60))
def test_values_that_are_not_finite_are_told_as_runs_that_lose_none(values):
    steps = np.arange(len(values)) + 7
    told = series.non_finite(Series("x", steps, np.array(values, np.float64)))
    listed = {step: span.what for span in told for step in range(span.first, span.last + 1)}
    assert listed == {
        7 + i: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        for i, value in enumerate(values)
        if not math.isfinite(value)
    }
    assert sum(span.count for span in told) == len(listed)


def test_too_many_runs_are_put_together_and_all_counted():
    values = np.array([math.nan, 1.0] * 50)
    told = series.non_finite(Series("x", np.arange(100), values), most=7)
    assert len(told) <= 7
    assert sum(span.count for span in told) == 50
    assert (told[0].first, told[-1].last) == (0, 98)


def columns_of(map_: series.HeatMap) -> list[tuple[int, int]]:
    return list(zip(map_.edges[:-1].tolist(), map_.edges[1:].tolist(), strict=True))


@hypothesis.given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 4)), elements=NUMBERS),
    st.integers(1, 12),
    st.booleans(),
)
def test_a_column_of_a_heat_map_shows_its_worst_value(values_SN, most, lowest):
    num_steps, num_layers = values_SN.shape
    found = series.heat_map(LayerSeries("x", np.arange(num_steps) + 3, values_SN), most, lowest)
    num_columns = min(most, num_steps)
    assert found.values_CN.shape == (num_columns, num_layers)
    for column, (first, stop) in enumerate(columns_of(found)):
        places = [i for i in range(num_steps) if i * num_columns // num_steps == column]
        assert (first, stop) == (3 + places[0], 3 + places[-1] + 1)
        for layer in range(num_layers):
            inside = [float(values_SN[i, layer]) for i in places]
            finite = [value for value in inside if math.isfinite(value)]
            shown = float(found.values_CN[column, layer])
            if finite:
                worst = min(map(abs, finite)) if lowest else max(map(abs, finite))
                assert shown in finite
                assert abs(shown) == worst
            else:
                assert math.isnan(shown)
            assert bool(found.strange_CN[column, layer]) == (len(finite) < len(inside))


def test_steps_without_vitals_are_an_empty_column():
    steps = np.array([0, 2, 4, 100, 102])
    values_SN = np.arange(5, dtype=np.float32)[:, None] + 1
    found = series.heat_map(LayerSeries("x", steps, values_SN), most=100)
    # A vital of every second step has columns of two steps; from 5 to 100 there is none.
    assert found.edges.tolist() == [0, 2, 4, 5, 100, 102, 103]
    assert bits(found.values_CN[:, 0]) == bits([1, 2, 3, math.nan, 4, 5])
