"""The detectors on hand-made histories; whole, cut and resumed."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import series
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_jax.config import Spikes
from palm_jax.spikes import detection
from palm_jax.spikes.detection import Detector
from palm_jax.spikes.incidents import Alarm, Incident

DEFAULT = Spikes()


def incidents(found: list[Incident | Alarm]) -> list[Incident]:
    """Each with its outcome, or open, in the order of their detection."""
    latest = {x.place: x for x in found if isinstance(x, Incident)}
    return list(latest.values())


def alarms(found: list[Incident | Alarm]) -> list[Alarm]:
    return [x for x in found if isinstance(x, Alarm)]


def found_in(*values: Any, spikes: Spikes = DEFAULT) -> list[Incident]:
    return incidents(detection.detect(series.losses(*values), spikes))


# --- single values ---

ALTERNATING = [10.00, 10.02] * 15


def test_limit_is_the_level_and_six_sigma():
    fold = Detector(DEFAULT)
    for step, computed in series.losses(*ALTERNATING, 10.04):
        assert fold.feed(step, computed) == []
    (opened,) = fold.feed(31, {"loss": 10.5})
    assert (opened.kind, opened.onset, opened.outcome) == ("level", 31, None)
    fold = Detector(DEFAULT)
    for step, computed in series.losses(*ALTERNATING):
        fold.feed(step, computed)
    (opened,) = fold.feed(30, {"loss": 10.5})
    assert opened.level == pytest.approx(10.01)
    assert opened.limit == pytest.approx(10.07)


@pytest.mark.parametrize(("loss", "flagged"), [(10.0699, False), (10.0701, True)])
def test_limit_is_where_it_says(loss, flagged):
    assert bool(found_in(*ALTERNATING, loss)) == flagged


@pytest.mark.parametrize("nan", [math.nan, "nan", math.inf, "inf", "-inf", np.float32("nan")])
@pytest.mark.parametrize("before", [[], [10.0], ALTERNATING])
def test_what_is_not_finite_is_an_incident_with_or_without_history(before, nan):
    (opened,) = found_in(*before, nan)
    assert (opened.kind, opened.onset, opened.outcome) == ("nonfinite", len(before), None)


def test_constant_history_followed_by_the_same_value_is_quiet():
    assert found_in(*[7.0] * 200) == []
    (opened,) = found_in(*[7.0] * 200, 7.02)
    assert opened.limit == pytest.approx(7.0 + 6 * 0.003)


def test_flagged_values_do_not_enter_the_window():
    # 20 of the last 100: far more than the spread would bear.
    spikes = Spikes(patience_steps=400, recover_steps=1)
    values = series.quiet(400)
    for step in range(300, 400, 5):
        values[step] += 0.5
    found = found_in(*values, spikes=spikes)
    assert [x.onset for x in found] == list(range(300, 400, 5))
    assert max(x.limit for x in found) < min(values[s] for s in range(300, 400, 5))


def test_jump_is_told_from_few_losses_of_any_scatter():
    (opened,) = found_in(*[2.1, 2.0] * 5, 8.5)
    assert (opened.kind, opened.onset, opened.level) == ("jump", 10, pytest.approx(2.05))
    rng = random.Random(0)
    wild = [5 + rng.uniform(-0.4, 0.4) for _ in range(200)]
    assert found_in(*wild) == []
    (opened,) = found_in(*wild, 6.6)
    assert opened.limit == pytest.approx(opened.level + 1.0)


def test_spike_at_the_first_step_has_nothing_to_be_compared_with_and_does_no_harm():
    values = series.planted(series.quiet(300), 200, [1.0])
    values[0] = 50.0
    assert [x.onset for x in found_in(*values)] == [200]


def test_gradient_that_is_not_finite_is_an_incident_and_one_skipped_step_heals():
    """An overflow at step 3: the update is skipped, the loss was finite and goes on."""
    history = series.losses(*series.quiet(12))
    history[3][1].update(gradient_norm="inf", applied=False)
    (found,) = incidents(detection.detect(history, DEFAULT))
    assert (found.kind, found.onset, found.outcome) == ("nonfinite", 3, "recovered")
    assert (found.recovery, found.closed, found.num_nonfinite) == (4, 8, 1)


def test_overflow_under_a_loss_scale_is_in_order_until_the_scale_is_at_its_end():
    history = series.losses(*series.quiet(12))
    for step, scale in ((3, 1024.0), (9, 1.0)):
        history[step][1].update(gradient_norm="inf", applied=False, loss_scale=scale)
    (found,) = incidents(detection.detect(history, DEFAULT))
    assert found.onset == 9


# --- courses ---


def test_a_run_without_trouble_is_quiet():
    for seed in range(3):
        assert detection.detect(series.losses(*series.quiet(3000, seed)), DEFAULT) == []


def test_a_spike_that_heals_in_thirty_steps_recovers():
    """BLOOM's: 2.2 to 5.1 nats, back after about 30 steps."""
    excess = [1.5, 2.9, *(2.9 * math.exp(-t / 6) for t in range(1, 40))]
    values = [2.2] * 200
    (found,) = found_in(*series.planted(values, 100, excess[:100]))
    assert (found.kind, found.onset, found.outcome) == ("jump", 100, "recovered")
    assert (found.peak, found.peak_step) == (pytest.approx(5.1), 101)
    assert found.area == pytest.approx(sum(excess[: found.closed - 100 + 1]), rel=1e-6)
    assert found.recovery == 100 + next(i for i, x in enumerate(excess) if i and x <= 0.018)
    assert found.closed == found.recovery + DEFAULT.recover_steps - 1


def test_a_loss_that_stays_up_is_a_bad_plateau_and_then_the_new_level():
    values = series.planted(series.quiet(1000, sigma=0.01), 500, [3.0] * 500)
    (found,) = found_in(*values)
    assert (found.onset, found.outcome, found.closed) == (500, "bad plateau", 599)
    (first, second) = found_in(*series.planted(values, 800, [2.0] * 5))
    assert first == found
    assert (second.onset, second.outcome) == (800, "recovered")
    assert second.level == pytest.approx(values[799], abs=0.1)


def test_a_loss_that_goes_on_rising_diverges():
    values = series.planted(series.quiet(1000), 500, [0.05 * t for t in range(1, 501)])
    first, *_ = found_in(*values)
    assert first.outcome == "diverged"
    assert first.detected - 500 < 30


def test_losses_that_stay_not_finite_diverge_at_once_and_are_told_once():
    (found,) = found_in(*series.quiet(100), *["nan"] * 400)
    assert (found.outcome, found.closed) == ("diverged", 100 + DEFAULT.nonfinite_steps - 1)
    assert (found.peak, found.num_nonfinite) == (None, 5)
    _, second = found_in(*series.quiet(100), *["nan"] * 50, 3.0, "nan")
    assert (second.onset, second.outcome) == (151, None)


def test_two_spikes_in_one_window_are_two_incidents_with_one_level():
    values = [5.00, 5.02] * 100
    values = series.planted(values, 120, [2.0, 1.0])
    values = series.planted(values, 140, [0.3, 0.2])
    one, two = found_in(*values)
    assert (one.onset, one.kind, one.outcome) == (120, "jump", "recovered")
    assert (two.onset, two.kind, two.outcome) == (140, "level", "recovered")
    assert one.limit == two.limit == pytest.approx(5.07)


def test_second_spike_before_recovery_belongs_to_the_first():
    values = series.planted([5.0] * 200, 120, [2.0, 0.0, 0.0, 0.0, 1.0])
    (found,) = found_in(*values)
    assert (found.onset, found.recovery, found.closed) == (120, 125, 129)


@pytest.mark.parametrize("sizes", [(8, 64), (64, 8)])
def test_ramp_boundary_is_quiet_and_a_spike_across_it_is_found(sizes):
    rng = random.Random(3)
    all_sizes = [sizes[step >= 300] for step in range(600)]
    values = [4 + rng.gauss(0, 0.1) * (8 / size) ** 0.5 for size in all_sizes]

    def history(values: list[float]) -> list[tuple[int, dict[str, Any]]]:
        return [
            (step, {"loss": loss, "batch_size": size})
            for step, (loss, size) in enumerate(zip(values, all_sizes, strict=True))
        ]

    assert detection.detect(history(values), DEFAULT) == []
    (found,) = incidents(
        detection.detect(history(series.planted(values, 297, [0.9] * 10)), DEFAULT)
    )
    assert (found.onset, found.outcome, found.recovery) == (297, "recovered", 307)


def test_first_small_batch_is_judged_by_the_scatter_of_small_batches():
    history = [(s, {"loss": 10.00 + 0.02 * (s % 2), "batch_size": 64}) for s in range(100)]
    assert detection.detect([*history, (100, {"loss": 10.1, "batch_size": 8})], DEFAULT) == []
    assert detection.detect([*history, (100, {"loss": 10.1, "batch_size": 64})], DEFAULT) != []


def test_a_few_low_losses_do_not_end_a_drift():
    values = series.planted(series.quiet(3000), 2000, [0.001 * t for t in range(1000)])
    first, *_ = found_in(*values)
    again, *_ = found_in(*series.planted(values, first.detected + 20, [-0.5] * 8))
    assert (again.onset, again.closed, again.outcome) == (first.onset, first.closed, "diverged")


def test_a_slow_rise_is_a_drift_that_begins_where_the_loss_was_lowest():
    values = series.planted(series.quiet(3000), 2000, [0.001 * t for t in range(1000)])
    first, *_ = found_in(*values)
    assert first.kind == "drift"
    assert abs(first.onset - 2000) <= 100
    assert first.detected - 2000 < 400
    assert first.outcome == "diverged"


def test_a_bump_of_the_level_recovers():
    bump = [0.3 * math.sin(math.pi * t / 150) for t in range(150)]
    found = found_in(*series.planted(series.quiet(4000), 2000, bump))
    assert {x.kind for x in found} <= {"drift", "level"}
    assert [x.outcome for x in found][-1] == "recovered"


def test_a_loss_that_stops_falling_stalls_and_recovers_when_it_falls():
    """As OPT's run 11.10, flat from step 4750 to about 6700."""
    trend = [2 + 4 * (1 + step / 20) ** -0.5 for step in range(9000)]
    rng = random.Random(0)
    flat = [trend[min(s, 4750)] if s < 6700 else trend[s - 1950] - 0.2 for s in range(9000)]
    found = found_in(*(x + rng.gauss(0, 0.02) for x in flat))
    assert [x.kind for x in found] == ["stall"]
    assert abs(found[0].onset - 4750) < 300
    assert found[0].detected < 6700
    assert found[0].outcome == "recovered"
    assert 6700 <= found[0].closed < 7700
    assert found_in(*(x + rng.gauss(0, 0.02) for x in trend)) == []


# --- other vitals ---


def with_norms(norms: list[Any], **more: list[Any]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (step, {"loss": 3.0, "gradient_norm": norm, **{k: v[step] for k, v in more.items()}})
        for step, norm in enumerate(norms)
    ]


def test_gradient_norm_above_its_level_is_one_alarm_until_it_is_back():
    """BLOOM's healthy norms were 0.13 to 0.27; at its spike 960."""
    rng = random.Random(0)
    norms = [rng.uniform(0.13, 0.27) for _ in range(300)]
    assert detection.detect(with_norms(norms), DEFAULT) == []
    for step in (150, 151, 153, 200):
        norms[step] = 960.0
    found = alarms(detection.detect(with_norms(norms), DEFAULT))
    assert [(x.vital, x.step, x.value) for x in found] == [
        ("gradient_norm", 150, 960.0),
        ("gradient_norm", 200, 960.0),
    ]
    assert 0.5 < found[0].limit < 1.5


def test_a_new_regime_of_the_gradient_norm_becomes_the_level():
    norms = [0.2] * 200 + [2.0] * 400 + [20.0]
    found = alarms(detection.detect(with_norms(norms), DEFAULT))
    assert [x.step for x in found] == [200, 600]


def test_attention_logits_alarm_at_1e3_and_are_an_incident_beyond_1e4():
    logits = [[1.0, 900.0]] * 10 + [[2000.0, 1.0]] * 10 + [[1.0, 2e4]] * 5
    history = with_norms([0.2] * 25, **{"layers/max_attention_logit": logits})
    found = detection.detect(history, DEFAULT)
    (alarm,) = alarms(found)
    assert (alarm.vital, alarm.step, alarm.limit) == ("max_attention_logit", 12, 1000.0)
    assert "Wortsman" in alarm.why
    (fatal,) = incidents(found)
    assert (fatal.kind, fatal.onset, fatal.closed, fatal.outcome) == ("vital", 20, 22, "diverged")


def test_log_z_counts_only_once_it_has_been_in_its_range():
    """ln 256000 is 12.45: at the start the range is broken by every healthy run."""
    values = [12.45] * 150
    assert alarms(detection.detect(with_norms([0.2] * 150, mean_log_z=values), DEFAULT)) == []
    values = [12.45] * 50 + [5.0] * 100 + [-11.0] * 20
    (alarm,) = alarms(detection.detect(with_norms([0.2] * 170, mean_log_z=values), DEFAULT))
    assert (alarm.vital, alarm.step, alarm.limit) == ("mean_log_z", 169, -10.0)


def test_loss_scale_below_one_alarms():
    scales = [65536.0] * 10 + [0.5] * 3
    (alarm,) = alarms(detection.detect(with_norms([0.2] * 13, loss_scale=scales), DEFAULT))
    assert (alarm.vital, alarm.step) == ("loss_scale", 12)


def test_skips_in_a_row_are_an_incident():
    applied = [True] * 10 + [False] * 20 + [True]
    (found,) = incidents(detection.detect(with_norms([9.0] * 31, applied=applied), DEFAULT))
    assert (found.kind, found.onset, found.closed, found.outcome) == ("skips", 10, 29, "diverged")
    overflows = with_norms(["inf"] * 31, applied=applied)
    assert "skips" not in {x.kind for x in incidents(detection.detect(overflows, DEFAULT))}
    applied[15] = True
    assert incidents(detection.detect(with_norms([9.0] * 31, applied=applied), DEFAULT)) == []


def test_complaints_name_what_is_out_of_range_or_rising():
    fold = Detector(DEFAULT)
    for step, computed in with_norms([0.2] * 100):
        fold.feed(step, computed)
    assert fold.complaints() == ()
    for step in range(100, 160):
        fold.feed(step, {"loss": 3.0, "gradient_norm": 0.2 + (step - 100) * 0.01})
    assert fold.complaints() == ("gradient_norm is rising",)
    fold.feed(160, {"loss": "nan", "loss_scale": 0.5, "gradient_norm": "nan"})
    assert fold.complaints()[:2] == (
        "a nonfinite incident is open",
        "gradient_norm is out of its range",
    )


# --- skip_above ---

SKIPPING = Spikes(policy="skip_update", lag=7)


def norms_of(num_steps: int) -> list[float]:
    rng = random.Random(5)
    return [math.exp(rng.gauss(-1, 0.3)) for _ in range(num_steps)]


def test_skip_above_uses_steps_up_to_the_lag_and_no_others():
    norms = norms_of(120)
    whole = [detection.skip_above(with_norms(norms), s, SKIPPING) for s in range(120)]
    assert all(math.isinf(x) for x in whole[: SKIPPING.min_history + 6])
    assert all(math.isfinite(x) for x in whole[SKIPPING.min_history + 6 :])
    for step in range(40, 120, 9):
        changed = list(norms)
        changed[step - 6 :] = [1e6] * len(changed[step - 6 :])
        assert detection.skip_above(with_norms(changed), step, SKIPPING) == whole[step]
        both = []
        for norm in (0.0, 0.99 * whole[step]):
            changed[step - 7] = norm
            both.append(detection.skip_above(with_norms(changed), step, SKIPPING))
        assert both[0] != both[1]


@pytest.mark.parametrize("block", [1, 2, 5, 7])
def test_skip_above_is_the_same_however_often_the_host_reads(block):
    history = with_norms(norms_of(100))
    fold, limits = Detector(SKIPPING), []
    for begin in range(0, 100, block):
        limits += [fold.skip_above(step) for step in range(begin, min(100, begin + block))]
        for step, computed in history[begin : begin + block]:
            fold.feed(step, computed)
    assert limits == [detection.skip_above(history, s, SKIPPING) for s in range(100)]


def test_skip_above_is_never_less_than_its_ratio_and_leaves_outliers_out():
    norms = [1.0] * 60
    limit = detection.skip_above(with_norms(norms), 60, SKIPPING)
    assert limit == pytest.approx(SKIPPING.least_gradient_ratio)
    norms[40] = 1e5
    assert detection.skip_above(with_norms(norms), 60, SKIPPING) == limit


def test_other_policies_skip_nothing():
    assert detection.skip_above(with_norms([1.0] * 60), 60, DEFAULT) == math.inf


def test_skip_above_refuses_to_answer_too_early_or_too_late():
    fold = Detector(SKIPPING)
    assert fold.skip_above(6) == math.inf
    with pytest.raises(ValueError, match="steps up to 0; the last that was fed is None"):
        fold.skip_above(7)
    for step, computed in with_norms([1.0] * 10):
        fold.feed(step, computed)
    fold.skip_above(16)
    with pytest.raises(ValueError, match="steps up to 10; the last that was fed is 9"):
        fold.skip_above(17)
    with pytest.raises(ValueError, match="the last that was fed is 9"):
        fold.skip_above(9)


def test_steps_are_fed_in_order_and_with_a_loss():
    fold = Detector(DEFAULT)
    fold.feed(3, {"loss": 1.0})
    with pytest.raises(ValueError, match="step 3 was fed after step 3"):
        fold.feed(3, {"loss": 1.0})
    with pytest.raises(ValueError, match="no loss"):
        fold.feed(4, {"gradient_norm": 1.0})


def test_records_of_a_step_and_of_the_logbook_are_read_alike():
    live = {
        "loss": np.float32(2.5),
        "gradient_norm": np.float32("inf"),
        "clip_norm": np.float32(1.0),
        "batch_size": 8,
        "applied": np.bool_(False),
        "layers/max_attention_logit": np.array([3.0, 5.0], np.float32),
        "layers/residual_rms": np.array([1.0, 2.0], np.float32),
    }
    logged = {
        "loss": 2.5,
        "gradient_norm": "inf",
        "clip_norm": 1.0,
        "batch_size": 8,
        "applied": False,
        "layers/max_attention_logit": [3.0, 5.0],
        "layers/residual_rms": [1.0, 2.0],
    }
    vitals = detection.read(live)
    assert vitals == detection.read(logged)
    assert vitals == (2.5, math.inf, 8, False, True, None, None, 5.0, 2.0)
    logged["layers/max_attention_logit"] = [3.0, "nan"]
    assert math.isnan(detection.read(logged).max_attention_logit)


ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e30, -5.0]) | st.floats(0, 20)


@settings(max_examples=60)
@given(st.lists(st.tuples(ODD, ODD, st.sampled_from([8, 16])), max_size=150))
def test_any_history_closes_what_it_opens_in_order_and_within_patience(rows):
    spikes = Spikes(patience_steps=20, min_history=9, window=20, lag=3, policy="skip_update")
    fold = Detector(spikes)
    is_open: Incident | None = None
    for step, (loss, norm, size) in enumerate(rows):
        fold.skip_above(step)
        for found in fold.feed(step, {"loss": loss, "gradient_norm": norm, "batch_size": size}):
            if isinstance(found, Alarm) or found.kind in ("stall", "vital", "skips"):
                continue
            assert (found.outcome is None) == (is_open is None)
            assert is_open is None or is_open.place == found.place
            is_open = found if found.outcome is None else None
        if is_open is not None:
            assert step - is_open.detected < spikes.patience_steps
        assert fold.open == is_open
