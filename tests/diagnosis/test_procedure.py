"""Whole diagnoses in made-up worlds, where it is known which arms spike: verdicts and costs."""

from __future__ import annotations

import dataclasses
import random
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest

from palm_jax import config
from palm_jax.diagnosis import arms, procedure, treatments
from palm_jax.diagnosis.procedure import Record

SETTINGS = config.from_dict(
    {
        "steps": 1000,
        "model": {
            "num_layers": 1,
            "width": 8,
            "num_heads": 1,
            "head_size": 8,
            "vocabulary_size": 257,
            "sequence_length": 8,
        },
        "data": {"corpus": "corpus", "ramp": {"sizes": [8]}},
    }
)
RECORD = Record(bits={}, state_digests={}, same_environment=True)
# Kinds of arms that spike besides the replays, and treatments that cure.
WORLDS = {
    "chance": (set(), set()),
    "recipe": ({"N", "C", "B", "E"}, {"half the rate"}),
    "state": ({"N", "C"}, {"new second moments"}),
    "data": ({"N", "B"}, {"exclude"}),
    "combination": ({"N"}, {"exclude"}),
}


def plan_of(**changes):
    at_500 = {
        **{"segment": 0, "onset": 500, "fork": 480, "window_stop": 510, "stop": 540, "start": 0},
        **{"earlier": [400, 300, 200, 100, 0], "healthy": 400, "budget": 4000},
        **{"seconds_per_step": 1.0, "asked": (20, 40, True)},
        "treatments": treatments.available(SETTINGS, [0.5] * 9, 2.0),
    }
    return arms.planned(**at_500 | changes)


def outcome(arm, rise, **changes):
    """As if the probe's loss was 2 with ripples of 0.01 but for a rise in the middle."""
    rng = random.Random(zlib.crc32(arm.name.encode()))
    probe = [2 + rng.uniform(-0.01, 0.01) for _ in range(arm.stop - arm.scored_from)]
    if probe:
        probe[len(probe) // 2] += rise
    same = {
        "bits": {str(step): {"loss": "aa"} for step in range(arm.first, arm.stop)},
        "state_digest": "d",
    }
    return {"begin": 2.0, "probe": probe, "state_digests": {}, **same, **changes}


def conduct(plan, rise_of, record=RECORD, **special):
    """Execute arms as the procedure asks for them; what it found, and the names in order."""
    results = {}
    while True:
        findings = procedure.found(plan, results, record)
        arm = procedure.next_arm(plan, results, findings)
        if arm is None:
            return findings, list(results)
        assert arm.name not in results
        results[arm.name] = outcome(arm, rise_of(arm), **special.get(arm.name, {}))


def world(cause, height=0.8):
    spiking, cures = WORLDS[cause]

    def rise_of(arm):
        if arm.kind == "A" or arm.kind in spiking:
            return height * random.Random(zlib.crc32(arm.name.encode())).uniform(0.7, 1.3)
        if arm.kind == "D" and arm.name.removeprefix("D ").rsplit(" ", 1)[0] not in cures:
            return height
        return 0.0

    return rise_of


@pytest.mark.parametrize("cause", WORLDS)
@pytest.mark.parametrize("height", [0.2, 0.8, 5.0, float("inf")])
def test_each_world_is_told(cause, height):
    plan = plan_of()
    findings, names = conduct(plan, world(cause, height))
    assert findings.verdict.cause == cause
    assert findings.steps == sum(plan.arm(name).num_steps for name in names) <= plan.budget
    assert names[:3] == ["H", "A1", "A2"]
    # Four replicates make a contrast: nothing else is executed of what is clear by then.
    assert [n for n in names if n.startswith("N")] == ["N0", "N1", "N2", "N3"]


@pytest.mark.parametrize(
    ("cause", "treatment"),
    [(cause, next(iter(cures))) for cause, (_, cures) in WORLDS.items() if cures],
)
def test_the_first_treatment_that_cures_is_recommended(cause, treatment):
    plan = plan_of()
    findings, _ = conduct(plan, world(cause))
    found = treatments.recommended(
        "runs/a run", plan, cause, SETTINGS, findings.scores, recovered=False, is_last_segment=True
    )
    assert found["treatment"] == treatment
    assert found["commands"][0].startswith(
        ("palm-jax intervene 'runs/a run'", "palm-jax branch run 'runs/a run'")
    )


def test_no_treatment_is_recommended_that_did_not_cure():
    plan = plan_of()
    findings, names = conduct(plan, lambda arm: 0.8 if arm.kind in {"A", "N", "B", "D"} else 0.0)
    assert findings.verdict.cause == "data"
    found = treatments.recommended(
        "run", plan, "data", SETTINGS, findings.scores, recovered=False, is_last_segment=True
    )
    assert (found["treatment"], found["commands"]) == ("none", [])
    # One replicate of each is enough to see that.
    assert [n for n in names if n.startswith("D")] == [
        f"D {name} 0" for name in treatments.suited("data")
    ]


def test_the_placebo_decides_before_other_arms_cost_anything():
    _, names = conduct(plan_of(), world("chance"))
    assert {plan_of().arm(name).kind for name in names} == {"H", "A", "N"}


def test_a_batch_that_hurts_nothing_needs_two_replays():
    findings, names = conduct(plan_of(), lambda arm: 0.0)
    assert findings.verdict.cause == "hard batch"
    assert names == ["H", "A1", "A2"]


def test_replays_that_differ_are_told_with_step_and_field():
    bits = {str(step): {"loss": "aa"} for step in range(480, 540)}
    other = bits | {"497": {"loss": "ab"}}
    findings, names = conduct(plan_of(), world("data"), A2={"bits": other})
    assert findings.verdict.cause == "nondeterministic"
    assert "step 497, loss" in findings.verdict.because
    assert names == ["H", "A1", "A2"]
    findings, _ = conduct(plan_of(), world("data"), A2={"state_digest": "e"})
    assert findings.verdict.cause == "nondeterministic"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"bits": {430: {"loss": "ab"}, 500: {"loss": "ab"}}}, "step 430, loss"),
        ({"bits": {500: {"loss": "ab"}}}, "step 500, loss"),
        ({"state_digests": {400: "x"}}, "step 399, state digest of checkpoint 400"),
    ],
)
def test_what_differs_from_the_record_is_told_at_its_first_step(record, told):
    found = dataclasses.replace(RECORD, **record)
    digests = {"state_digests": {"400": "y"}}
    findings, _ = conduct(plan_of(), world("data"), found, H=digests)
    assert findings.verdict.cause == "corrupted"
    assert told in findings.verdict.because
    elsewhere = dataclasses.replace(found, same_environment=False)
    assert conduct(plan_of(), world("data"), elsewhere)[0].verdict.cause == "data"


def test_a_spent_budget_says_what_to_execute_next():
    findings, names = conduct(plan_of(budget=700), world("data"))
    assert findings.verdict.cause == "inconclusive"
    assert findings.verdict.next_arms
    assert findings.steps <= 700
    more, _ = conduct(plan_of(), world("data"))
    assert more.verdict.cause == "data"
    assert len(names) < len(more.scores)


@hypothesis.given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.9))
@hypothesis.settings(max_examples=50)
def test_arms_that_spike_now_and_then_end_too(seed, share):
    rng = random.Random(seed)
    plan = plan_of()
    findings, names = conduct(plan, lambda arm: 0.8 * (arm.kind == "A" or rng.random() < share))
    assert findings.steps <= plan.budget
    assert len(set(names)) == len(names)
