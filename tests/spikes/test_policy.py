"""Decisions, each against what the papers and the bound of escalation say."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config
from palm_jax.config import CosineSchedule, PalmSchedule, Spikes
from palm_jax.errors import WrongInput
from palm_jax.record import segments
from palm_jax.replay import branches
from palm_jax.spikes.incidents import Incident
from palm_jax.spikes.policy import Candidate, Rollback, decide, rate_overrides

TINY = pathlib.Path(__file__).parents[2] / "configs" / "tiny.yaml"
EVERY_100 = [Candidate(step) for step in range(100, 2001, 100)]


def incident(onset: int, outcome: str | None = "diverged", kind: str = "jump") -> Incident:
    closed = None if outcome is None else onset + 100
    return Incident(
        kind, onset, onset, 2.0, 3.0, 8.5, outcome=outcome, closed=closed, recovery=onset + 30
    )


def spikes(policy: str, **more) -> Spikes:
    return Spikes(policy=policy, **more)


POLICIES = ("observe", "skip_update", "rollback", "rollback_healthy", "stop")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("outcome", [None, "recovered"])
def test_nothing_is_done_about_an_incident_that_is_open_or_healed(policy, outcome):
    assert decide(incident(1234, outcome), spikes(policy), EVERY_100, []).action == "none"


def test_observing_does_nothing_and_says_what_was_seen():
    decision = decide(incident(1234), spikes("observe"), EVERY_100, [])
    assert decision.action == "none"
    assert "jump incident at step 1234: diverged" in decision.reason


def test_stopping_stops():
    assert decide(incident(1234), spikes("stop"), EVERY_100, []).action == "stop"


def test_palms_rollback_begins_100_steps_before_and_leaves_out_300_batches():
    decision = decide(incident(1234), spikes("rollback"), EVERY_100, [])
    assert (decision.action, decision.checkpoint) == ("rollback", 1100)
    assert (decision.at, decision.exclude, decision.rate_scale) == (1134, (1134, 1434), 1.0)


def test_a_checkpoint_long_before_the_onset_does_not_move_what_is_left_out():
    decision = decide(incident(5000), spikes("rollback"), [Candidate(1000)], [])
    assert (decision.checkpoint, decision.exclude) == (1000, (4900, 5200))


def test_the_same_place_widens_then_lowers_the_rate_then_stops():
    earlier: list[Rollback] = []
    made = []
    for onset in (1234, 1300, 1100, 1250):
        made.append(decide(incident(onset), spikes("rollback"), EVERY_100, earlier))
        earlier.append(Rollback(onset))
    assert [d.action for d in made] == ["rollback", "rollback", "rollback", "stop"]
    assert [d.exclude and d.exclude[1] - d.exclude[0] for d in made] == [300, 600, 600, None]
    assert [d.rate_scale for d in made] == [1.0, 1.0, 0.5, 1.0]
    assert "3 rollbacks within 500 steps" in made[-1].reason


def test_another_place_begins_anew():
    decision = decide(incident(1900), spikes("rollback"), EVERY_100, [Rollback(1234)] * 3)
    assert decision.exclude == (1800, 2100)


def test_opts_rollback_takes_the_newest_healthy_checkpoint_at_a_lower_rate():
    candidates = [
        Candidate(900),
        Candidate(1000),
        Candidate(1100, ("gradient_norm is rising",)),
        Candidate(1200, ("loss_scale is out of its range",)),
        Candidate(1300),
    ]
    settings = spikes("rollback_healthy", rate_scale=2 / 3)
    first = decide(incident(1234), settings, candidates, [])
    assert (first.checkpoint, first.at, first.exclude) == (1000, 1000, None)
    assert first.rate_scale == 2 / 3
    second = decide(incident(1234), settings, candidates, [Rollback(1234)])
    assert (second.checkpoint, second.at, second.exclude) == (900, 900, (1134, 1434))
    third = decide(incident(1234), settings, candidates, [Rollback(1234)] * 2)
    assert (third.checkpoint, third.exclude) == (900, (1134, 1734))
    assert decide(incident(1234), settings, candidates, [Rollback(1234)] * 3).action == "stop"


@pytest.mark.parametrize("policy", ["rollback", "rollback_healthy"])
def test_no_checkpoint_old_enough_stops_and_says_so(policy):
    candidates = [Candidate(1300), Candidate(1400)]
    decision = decide(incident(1234), spikes(policy), candidates, [])
    assert decision.action == "stop"
    assert "from step 0 to 1234 is left" in decision.reason


def test_unhealthy_checkpoints_alone_stop_the_healthy_policy():
    candidates = [Candidate(step, ("x",)) for step in (1000, 1100)]
    decision = decide(incident(1234), spikes("rollback_healthy"), candidates, [])
    assert (decision.action, "no healthy checkpoint" in decision.reason) == ("stop", True)


def test_a_checkpoint_less_far_back_than_wanted_is_better_than_none():
    decision = decide(incident(1234), spikes("rollback"), [Candidate(1200)], [])
    assert (decision.checkpoint, decision.at, decision.exclude) == (1200, 1200, (1200, 1500))


@pytest.mark.parametrize("onset", [0, 1, 50, 100])
def test_an_incident_near_the_beginning_goes_back_to_it(onset):
    decision = decide(incident(onset, kind="nonfinite"), spikes("rollback"), [], [])
    assert (decision.checkpoint, decision.exclude) == (0, (0, 300))
    decision = decide(incident(700 + onset), spikes("rollback"), EVERY_100, [], start_step=700)
    assert (decision.checkpoint, decision.exclude) == (700, (700, 1000))


def test_skipping_stops_only_where_it_skips_for_ever():
    settings = spikes("skip_update")
    assert decide(incident(1234), settings, EVERY_100, []).action == "none"
    decision = decide(incident(1234, kind="skips"), settings, EVERY_100, [])
    assert (decision.action, "20 updates in a row" in decision.reason) == ("stop", True)


@given(
    policy=st.sampled_from(POLICIES),
    onset=st.integers(0, 3000),
    checkpoints=st.sets(st.integers(0, 4000), max_size=8),
    unhealthy=st.sets(st.integers(0, 4000), max_size=8),
    earlier=st.lists(st.integers(0, 3000), max_size=6),
    start_step=st.integers(0, 3000),
    rewind=st.integers(1, 500),
    more=st.integers(1, 500),
)
def test_any_rollback_goes_back_to_a_state_that_is_there_and_leaves_out_the_onset(
    policy, onset, checkpoints, unhealthy, earlier, start_step, rewind, more
):
    settings = spikes(policy, rewind_steps=rewind, exclude_batches=rewind + more)
    candidates = [Candidate(s, ("ill",) * (s in unhealthy)) for s in sorted(checkpoints)]
    decision = decide(
        incident(onset), settings, candidates, [Rollback(e) for e in earlier], start_step=start_step
    )
    if decision.action != "rollback":
        assert (decision.checkpoint, decision.at, decision.exclude) == (None, None, None)
        return
    assert decision.checkpoint in checkpoints | {start_step}
    assert start_step <= decision.checkpoint <= decision.at <= onset
    if decision.exclude is None:
        assert (policy, decision.rate_scale) == ("rollback_healthy", 0.5)
    else:
        assert decision.at <= decision.exclude[0] <= onset < decision.exclude[1]
    assert sum(abs(e - onset) <= settings.same_place_steps for e in earlier) < 3


def test_rate_is_scaled_at_every_step():
    assert rate_overrides(PalmSchedule(peak=0.01), 1.0) == ()
    assert rate_overrides(PalmSchedule(peak=0.01), 0.5) == ("schedule.peak=0.005",)
    cosine = CosineSchedule(kind="cosine", peak=1e-4, final=1e-5, decay_steps=10)
    assert rate_overrides(cosine, 0.5) == ("schedule.peak=5e-05", "schedule.final=5e-06")


def test_a_rollback_becomes_a_segment_that_leaves_out_positions_across_the_ramp():
    base = config.load(TINY, ["data.ramp={starts: [0, 1300], sizes: [8, 16]}", "steps=2000"])
    decision = decide(incident(1234), spikes("rollback"), EVERY_100, [Rollback(1234)] * 2)
    made, _ = branches.departed(
        base,
        segments.Segment(),
        decision.checkpoint,
        decision.at,
        branches.Changes(
            overrides=rate_overrides(base.schedule, decision.rate_scale),
            exclude=(decision.exclude,),
        ),
        segments.IN_MID_RUN,
        decision.reason,
    )
    assert (made.start_step, decision.exclude) == (1100, (1134, 1734))
    # 166 steps of 8 sequences, and 434 of 16.
    assert made.exclusions == ((1134 * 8, 1300 * 8 + 434 * 16),)
    rates = [made.settings_at(base, step).schedule.peak for step in (1133, 1134)]
    assert rates == [0.03, 0.015]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("spikes.exclude_batches=100", ["exclude_batches=100", "rewind_steps=100"]),
        ("spikes.min_history=101", ["min_history=101", "window=100"]),
        ("spikes={policy: skip_update, lag: 9}", ["spikes.lag=9", "log.every=10"]),
        ("spikes.policy=pray", ["spikes.policy='pray'"]),
    ],
)
def test_settings_that_cannot_work_are_refused(override, words):
    with pytest.raises(WrongInput) as caught:
        config.load(TINY, [override])
    assert all(word in str(caught.value) for word in words)


def test_detection_and_policy_need_no_jax_and_no_numpy():
    code = (
        "import sys, palm_jax.spikes.detection, palm_jax.spikes.policy;"
        "sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    )
    root = pathlib.Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
