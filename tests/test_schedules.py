from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from palm_jax import config, schedules

PALM = config.PalmSchedule()
COSINE = config.CosineSchedule(
    kind="cosine", peak=3e-4, final=3e-5, warmup_steps=2000, decay_steps=100_000
)


LINEAR = config.LinearSchedule(
    kind="linear", peak=3e-4, final=3e-5, warmup_steps=2000, decay_steps=100_000
)
WSD = config.WsdSchedule(
    kind="wsd", peak=3e-4, final=3e-5, warmup_steps=2000, hold_steps=80_000, decay_steps=100_000
)
INVERSE = config.InverseSquareRootSchedule(kind="inverse_square_root", peak=1e-3, warmup_steps=4000)
CONSTANT = config.ConstantSchedule(kind="constant", peak=0.3, warmup_steps=3)


def palm_in_float64(schedule: config.PalmSchedule, k: int) -> float:
    if k <= schedule.hold_steps:
        return schedule.peak
    return schedule.peak * math.sqrt(schedule.hold_steps / k)


def cosine_in_float64(schedule: config.CosineSchedule, k: int) -> float:
    if k < schedule.warmup_steps:
        return schedule.peak * k / schedule.warmup_steps
    progress = (k - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps)
    fall = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return schedule.final + (schedule.peak - schedule.final) * fall


def at_update(schedule: schedules.Schedule, k: int) -> np.ndarray:
    """The value in the k-th update, as the jitted step gets it."""
    value = np.asarray(jax.jit(schedule)(np.int32(k - 1)))
    assert value.dtype == np.float32
    assert value.shape == ()
    return value


@pytest.mark.parametrize(
    ("k", "expected", "expected_decay"),
    [
        (1, 0.01, 1e-4),
        (9_999, 0.01, 1e-4),
        (10_000, 0.01, 1e-4),
        (40_000, 0.005, 2.5e-5),
        (255_000, 0.00198030, 3.92157e-6),
    ],
)
def test_palm_rate_is_constant_then_falls_with_the_root_of_the_update(k, expected, expected_decay):
    value = at_update(schedules.rate(PALM), k)
    assert value == pytest.approx(expected, abs=5e-9)
    assert value**2 == pytest.approx(expected_decay, abs=2e-11)


def test_palm_rate_is_exactly_the_peak_up_to_the_boundary_and_below_it_after():
    rate = schedules.rate(config.PalmSchedule(peak=0.3, hold_steps=7))
    assert [bool(at_update(rate, k) == np.float32(0.3)) for k in range(1, 10)] == [
        *[True] * 7,
        *[False] * 2,
    ]
    assert at_update(rate, 9) < at_update(rate, 8) < np.float32(0.3)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, 1.5e-7),
        (1_000, 1.5e-4),
        (1_999, 3e-4 * 1999 / 2000),
        (2_000, 3e-4),
        (51_000, 1.65e-4),
        (100_000, 3e-5),
        (100_001, 3e-5),
        (120_000, 3e-5),
    ],
)
def test_cosine_warms_up_turns_and_stays_at_its_end(k, expected):
    assert at_update(schedules.rate(COSINE), k) == pytest.approx(expected, rel=1e-6)


@given(
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0, 1),
    warmup=st.integers(1, 5000),
    fall=st.integers(1, 100_000),
)
def test_cosine_meets_peak_and_final_rate_exactly(peak, share, warmup, fall):
    schedule = config.CosineSchedule(
        kind="cosine",
        peak=peak,
        final=peak * share,
        warmup_steps=warmup,
        decay_steps=warmup + fall,
    )
    rate = schedules.rate(schedule)
    assert rate(warmup - 1) == np.float32(peak)
    assert rate(warmup + fall - 1) == np.float32(schedule.final)
    assert rate(warmup + 2 * fall) == np.float32(schedule.final)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, 1.5e-7),
        (1_999, 3e-4 * 1999 / 2000),
        (2_000, 3e-4),
        (51_000, 1.65e-4),
        (75_500, 3e-5 + 2.7e-4 / 4),
        (100_000, 3e-5),
        (10**6, 3e-5),
    ],
)
def test_linear_rises_and_falls_along_lines(k, expected):
    assert at_update(schedules.rate(LINEAR), k) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("decay", "quarters"),
    [
        ("linear", (0.75, 0.5, 0.25)),
        ("1-sqrt", (0.5, 0.292893, 0.133975)),
        ("cosine", (0.853553, 0.5, 0.146447)),
    ],
)
def test_stable_rate_decays_by_each_curve(decay, quarters):
    schedule = WSD.model_copy(update={"decay": decay, "final": 0.0, "peak": 1.0})
    rate = schedules.rate(schedule)
    assert at_update(rate, 1000) == 0.5
    assert [float(at_update(rate, k)) for k in (2000, 2001, 79_999, 80_000)] == [1.0] * 4
    found = [float(at_update(rate, 80_000 + x * 5000)) for x in (1, 2, 3)]
    assert found == pytest.approx(quarters, abs=1e-6)
    assert [float(at_update(rate, k)) for k in (100_000, 100_001, 10**6)] == [0.0] * 3


@pytest.mark.parametrize(
    ("decay", "mean"), [("linear", 1 / 2), ("1-sqrt", 1 / 3), ("cosine", 1 / 2)]
)
def test_mean_rate_of_a_decay(decay, mean):
    rate = schedules.rate(WSD.model_copy(update={"decay": decay, "final": 0.0, "peak": 1.0}))
    values = np.asarray(jax.vmap(rate)(np.arange(80_000, 100_000, dtype=np.int32)))
    # A sum of 20,000 steps instead of the integral.
    assert values.mean() == pytest.approx(mean, abs=1e-4)


def test_stable_rate_without_an_end_stays():
    schedule = config.WsdSchedule(kind="wsd", peak=0.3, warmup_steps=2)
    values = [at_update(schedules.rate(schedule), k) for k in (1, 2, 3, 10**9)]
    assert values == [np.float32(0.15), *[np.float32(0.3)] * 3]


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, 2.5e-7), (2000, 5e-4), (4000, 1e-3), (16_000, 5e-4), (400_000, 1e-4)],
)
def test_inverse_square_root_falls_from_the_end_of_its_warm_up(k, expected):
    assert at_update(schedules.rate(INVERSE), k) == pytest.approx(expected, rel=1e-6)


def test_constant_warms_up_and_stays():
    values = [at_update(schedules.rate(CONSTANT), k) for k in (1, 2, 3, 4, 10**9)]
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3], rel=1e-6)
    assert values[2] == np.float32(0.3)


@given(
    peak=st.floats(1e-6, 1.0),
    part=st.floats(0, 1),
    warmup=st.integers(1, 5000),
    hold=st.integers(0, 5000),
    fall=st.integers(1, 100_000),
    decay=st.sampled_from(["linear", "1-sqrt", "cosine"]),
)
def test_decays_meet_peak_and_final_rate_exactly(peak, part, warmup, hold, fall, decay):
    start, stop = warmup + hold, warmup + hold + fall
    final = peak * part
    ends = {"peak": peak, "final": final, "warmup_steps": warmup, "decay_steps": stop}
    wsd = config.WsdSchedule(kind="wsd", hold_steps=start, decay=decay, **ends)
    rate = schedules.rate(wsd)
    assert {float(rate(k - 1)) for k in (warmup, start)} == {float(np.float32(peak))}
    assert {float(rate(k - 1)) for k in (stop, stop + fall)} == {float(np.float32(final))}
    line = schedules.rate(config.LinearSchedule(kind="linear", **ends))
    assert line(warmup - 1) == np.float32(peak)
    assert line(stop - 1) == line(stop + 7) == np.float32(final)
    share = schedules.share_of_peak(wsd)
    assert share(warmup - 1) == 1
    # Between the ends a step lies between them, and the share is the rate over the peak.
    middle = (start + stop) // 2
    assert np.float32(final) <= rate(middle) <= np.float32(peak)
    assert float(share(middle)) * peak == pytest.approx(
        float(rate(middle)), rel=1e-5, abs=1e-7 * peak
    )


ALL = [PALM, COSINE, LINEAR, WSD, INVERSE, CONSTANT]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.kind)
def test_no_update_is_dead(schedule):
    assert at_update(schedules.rate(schedule), 1) > 0


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.kind)
def test_share_of_the_peak_is_the_rate_over_it(schedule):
    rate, share = schedules.rate(schedule), schedules.share_of_peak(schedule)
    for k in (1, 1999, 2000, 3000, 4000, 81_000, 100_000, 400_000):
        assert at_update(share, k) == pytest.approx(at_update(rate, k) / schedule.peak, rel=1e-5)


def test_rate_grows_with_the_root_of_the_batch_over_its_reference():
    schedule = config.ConstantSchedule(kind="constant", peak=1.0, batch_size_reference=64)
    assert schedules.batch_factor(schedule, 256) == 2
    assert schedules.batch_factor(schedule, 64) == 1
    assert schedules.batch_factor(schedule, 16) == 0.5
    assert schedules.batch_factor(CONSTANT, 16) is None


def test_cosine_without_warm_up_starts_to_fall_in_its_first_update():
    schedule = config.CosineSchedule(kind="cosine", peak=1.0, decay_steps=4)
    values = [float(at_update(schedules.rate(schedule), k)) for k in range(1, 6)]
    assert values == pytest.approx([0.85355339, 0.5, 0.14644661, 0, 0], abs=1e-7)


@given(k=st.integers(1, 2**30), hold=st.integers(1, 10**6), peak=st.floats(1e-6, 10))
def test_palm_rate_matches_float64(k, hold, peak):
    schedule = config.PalmSchedule(peak=peak, hold_steps=hold)
    # Three roundings and a square root, each within a unit of 2^-24.
    assert schedules.rate(schedule)(k - 1) == pytest.approx(
        palm_in_float64(schedule, k), rel=4 * 2**-24
    )


@given(k=st.integers(1, 10**6), warmup=st.integers(0, 10**5), fall=st.integers(1, 10**6))
def test_cosine_matches_float64(k, warmup, fall):
    schedule = config.CosineSchedule(
        kind="cosine", peak=1.0, final=0.1, warmup_steps=warmup, decay_steps=warmup + fall
    )
    # Absolute: an angle near pi is only known to 2^-22.
    assert float(schedules.rate(schedule)(k - 1)) == pytest.approx(
        cosine_in_float64(schedule, k), abs=2**-20
    )


def test_beta2_is_zero_on_the_first_step():
    assert at_update(schedules.beta2(0.8), 1) == 0


@pytest.mark.parametrize(
    ("k", "expected"),
    [(2, 0.425651), (10, 0.841511), (1000, 0.996019), (255_000, 0.999952710)],
)
def test_beta2_rises_towards_one(k, expected):
    assert at_update(schedules.beta2(0.8), k) == pytest.approx(expected, abs=6e-7)


@given(k=st.integers(1, 10**7), exponent=st.floats(0.1, 2))
def test_beta2_matches_float64(k, exponent):
    assert float(schedules.beta2(exponent)(k - 1)) == pytest.approx(1 - k**-exponent, abs=2**-20)


@pytest.mark.parametrize(
    "schedule",
    [*map(schedules.rate, ALL), schedules.share_of_peak(WSD), schedules.beta2(0.8)],
    ids=[*(schedule.kind for schedule in ALL), "share", "beta2"],
)
def test_any_number_of_devices_gives_the_same_bits(schedule):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    counts = np.unique(np.geomspace(1, 400_000, 400).astype(np.int32)) - 1
    values = []
    for num_devices in (1, len(devices)):
        mesh = jax.make_mesh(
            (num_devices,),
            ("data",),
            (jax.sharding.AxisType.Auto,),
            devices=devices[:num_devices],
        )
        step = jax.jit(schedule, out_shardings=NamedSharding(mesh, PartitionSpec()))
        values.append(b"".join(np.asarray(step(count)).tobytes() for count in counts))
    assert values[0] == values[1]
