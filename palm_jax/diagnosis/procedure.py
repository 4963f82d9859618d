"""What the arms executed so far show, and which one to execute next.

The cheapest arms that may decide come first: replays, the placebo, then what the verdict asks
for, replicate by replicate until a contrast is clear; treatments last, from the mildest on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from palm_jax.diagnosis import scores
from palm_jax.diagnosis.arms import Arm, Kind, Plan
from palm_jax.diagnosis.scores import Score
from palm_jax.diagnosis.treatments import suited
from palm_jax.diagnosis.verdict import Replays, Verdict, verdict
from palm_jax.diagnosis.votes import Votes
from palm_jax.record import logbook

Results = Mapping[str, Mapping[str, Any]]  # by arm
VOTING: tuple[Kind, ...] = ("N", "C", "B", "E", "half rate")


@dataclasses.dataclass(frozen=True)
class Record:
    """What the logbook says of the steps that H and A execute again."""

    bits: Mapping[int, Mapping[str, Any]]  # by step
    state_digests: Mapping[int, str]  # by checkpoint
    same_environment: bool  # otherwise other bits say nothing


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that can be said so far."""

    noise: float | None  # nats: a rise that clean windows do not have; None: not known yet
    threshold: float | None  # nats: a rise that counts as the spike in other arms; likewise
    scores: dict[str, Score]  # by arm
    votes: dict[str, Votes]  # by kind
    replays: Replays | None  # None: H, A1 or A2 is missing
    verdict: Verdict
    steps: int  # executed


def found(plan: Plan, results: Results, record: Record) -> Findings:
    """Pure: the same results always give the same verdict."""
    steps = sum(arm.num_steps for arm in plan.arms if arm.name in results)
    missing = [arm.name for arm in plan.arms if arm.kind in "HW" and arm.name not in results]
    if missing:
        waiting = Verdict("inconclusive", "the run was not replayed up to the fork", (*missing,))
        return Findings(None, None, {}, {}, None, waiting, steps)
    before = results["W" if plan.arm("W") is not None else "H"]
    usual = scores.noise(before["begin"], before["probe"], plan.horizon)

    def scored_by(limit: float, *kinds: Kind) -> dict[str, Score]:
        return {
            arm.name: scores.score(fields["begin"], fields["probe"], limit, plan.horizon)
            for arm in plan.arms
            if arm.kind in kinds and (fields := results.get(arm.name)) is not None
        }

    scored = scored_by(usual, "A", "N")
    hurt = any(scored[name].spiked for name in ("A1", "A2") if name in scored)
    limit = scores.threshold(usual, [s.peak for s in scored.values()]) if hurt else usual
    scored |= scored_by(limit, "C", "B", "E", "half rate", "D")
    votes: dict[str, Votes] = {kind: votes_of(plan, kind, scored) for kind in VOTING}
    replays = _replays(results, scored, record)
    if replays is None:
        waiting_for = tuple(name for name in ("A1", "A2") if name not in results)
        said = Verdict("inconclusive", "the spike was not replayed twice", waiting_for)
    else:
        said = verdict(replays, votes)
    return Findings(usual, limit, scored, votes, replays, said, steps)


def votes_of(plan: Plan, kind: Kind, scored: Mapping[str, Score]) -> Votes:
    mine = [scored[arm.name].spiked for arm in plan.of_kind(kind) if arm.name in scored]
    return Votes(sum(mine), len(mine))


def _replays(results: Results, scored: Mapping[str, Score], record: Record) -> Replays | None:
    if "A1" not in results or "A2" not in results:
        return None
    one, two = results["A1"], results["A2"]
    between = _first_difference(one["bits"], two["bits"])
    if between is None and one["state_digest"] != two["state_digest"]:
        between = "state digest at the end"
    from_record = None
    if record.same_environment:
        before = results["H"]
        digests = {**before["state_digests"], **one["state_digests"]}
        unlike = [
            (step - 1, f"state digest of checkpoint {step}")
            for step, digest in record.state_digests.items()
            if digests.get(str(step), digest) != digest
        ]
        for bits in (before["bits"], one["bits"]):
            unlike += _differences({str(s): b for s, b in record.bits.items()}, bits)
        from_record = _told(min(unlike, default=None))
    return Replays(between, from_record, hurt=scored["A1"].spiked)


def _first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    return _told(min(_differences(one, two), default=None))


def _differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [
        (int(step), field)
        for step in two
        if step in one and (field := logbook.compare_bits(one[step], two[step])) is not None
    ]


def _told(difference: tuple[int, str] | None) -> str | None:
    return None if difference is None else f"step {difference[0]}, {difference[1]}"


def next_arm(plan: Plan, results: Results, findings: Findings) -> Arm | None:
    """The arm to execute next; None: nothing more would tell, or the budget is spent."""
    wanted = _wanted(plan, results, findings)
    if wanted is None or findings.steps + wanted.num_steps > plan.budget:
        return None
    return wanted


def _wanted(plan: Plan, results: Results, findings: Findings) -> Arm | None:
    said = findings.verdict
    for name in said.next_arms:
        if plan.arm(name) is not None:
            return plan.arm(name)
        waiting = [arm for arm in plan.arms if arm.kind == name and arm.name not in results]
        if waiting:
            return waiting[0]
    for name in suited(said.cause):
        arms = [arm for arm in plan.arms if arm.kind == "D" and arm.name.startswith(f"D {name} ")]
        done = [arm for arm in arms if arm.name in results]
        # One that spikes at once is no cure; one that does not is tried again, with the same
        # sequences permuted.
        if any(findings.scores[arm.name].spiked for arm in done):
            continue
        if len(done) < len(arms):
            return arms[len(done)]
        return None
    return None
