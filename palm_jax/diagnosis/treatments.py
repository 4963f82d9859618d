"""What may be done about a spike, and the command that does it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from palm_jax import config
from palm_jax.diagnosis.arms import Plan, Treatment
from palm_jax.diagnosis.scores import Score
from palm_jax.spikes.policy import rate_overrides

HALF_RATE, CLIP, BETA2 = "half the rate", "clip tighter", "lower beta2"
NEW_V, SKIP = "new second moments", "skip updates"
EXCLUDE, EXCLUDE_HALF = "exclude", "exclude, half the rate"

# By cause, what is tried, in this order. An accident of data is avoided by other data; a rate
# that is too high comes back with any.
_SUITED: dict[str, tuple[str, ...]] = {
    "recipe": (HALF_RATE, CLIP, BETA2),
    "state": (NEW_V, CLIP, BETA2, HALF_RATE),
    "data": (EXCLUDE, EXCLUDE_HALF, SKIP),
    "combination": (EXCLUDE, EXCLUDE_HALF, SKIP, HALF_RATE),
}


def suited(cause: str) -> tuple[str, ...]:
    """Names of the treatments that are tried for a cause."""
    return _SUITED.get(cause, ())


def available(
    settings: config.Config, gradient_norms: Sequence[float], skip_above: float | None
) -> list[Treatment]:
    """
    Args:
      settings: in force at the fork.
      gradient_norms: recorded before the fork, of clean steps.
      skip_above: the limit that spikes.policy=skip_update would have at the onset.
    """
    found = [Treatment(HALF_RATE, rate_scale=0.5)]
    if gradient_norms:
        usual = sorted(gradient_norms)[len(gradient_norms) // 2]
        limit = settings.optimizer.clip_norm
        if usual > 0 and (limit is None or usual / 2 < limit):
            found.append(Treatment(CLIP, overrides=(f"optimizer.clip_norm={usual / 2:.3g}",)))
    optimizer = settings.optimizer
    if isinstance(optimizer, config.AdamW):
        # A memory a third as long.
        lower = 1 - min(0.5, 3 * (1 - optimizer.beta2))
        found.append(Treatment(BETA2, overrides=(f"optimizer.beta2={lower:.6g}",)))
    elif isinstance(optimizer, config.Adafactor):
        exponent = optimizer.beta2_exponent * 0.75
        found.append(Treatment(BETA2, overrides=(f"optimizer.beta2_exponent={exponent:.3g}",)))
        # The first update has beta2 = 0: the second moments are those of its gradient.
        found.append(Treatment(NEW_V, update_count=0))
    if skip_above is not None and skip_above < float("inf"):
        found.append(Treatment(SKIP, skip_above=skip_above))
    found.append(Treatment(EXCLUDE, feed="excluded"))
    found.append(Treatment(EXCLUDE_HALF, feed="excluded", rate_scale=0.5))
    return found


def recommended(
    run: str,
    plan: Plan,
    cause: str,
    settings: config.Config,
    scored: Mapping[str, Score],
    recovered: bool,
    is_last_segment: bool,
) -> dict[str, Any]:
    """{treatment, why, commands}: the first treatment that no replicate spiked under."""
    again = f"palm-jax train {shlex.quote(f'{run}/config.yaml')} --run {shlex.quote(run)}"
    if cause == "nondeterministic":
        return {
            "treatment": "another machine",
            "why": "arms say nothing where the same step gives different bits",
            "commands": ["palm-jax doctor", "palm-jax selftest bits"],
        }
    if cause == "corrupted":
        return {
            "treatment": "back to before the first difference",
            "why": "the recorded steps are not what the run computes; on this machine it goes "
            "on as it should have",
            "commands": [
                f"palm-jax branch run {shlex.quote(run)} --segment {plan.segment} --from "
                f"{plan.earlier[-1]} --name mended --checkpoints",
                f"palm-jax branch promote {shlex.quote(run)} mended --reason "
                + shlex.quote(f"corrupted before step {plan.onset}"),
                again,
            ],
        }
    if cause == "hard batch":
        return {
            "treatment": "none",
            "why": "the model is not hurt: its loss on held-out sequences did not rise",
            "commands": [],
        }
    if cause == "inconclusive":
        return {"treatment": "none", "why": "no cause is clear yet", "commands": []}
    if cause == "chance":
        reason = shlex.quote(f"spike at step {plan.onset}: a permuted batch cures it")
        return {
            "treatment": EXCLUDE,
            "why": "any small change cures it; leaving out the step before the onset is one",
            "commands": [
                f"palm-jax intervene {shlex.quote(run)} --at {plan.fork} --exclude "
                f"{plan.onset - 1}:{plan.onset} --reason {reason}",
                again,
            ],
        }
    for name in suited(cause):
        mine = [
            scored[arm.name]
            for arm in plan.arms
            if arm.name.startswith(f"D {name} ") and arm.name in scored
        ]
        if mine and not any(score.spiked for score in mine) and name != SKIP:
            return {
                "treatment": name,
                "why": f"{len(mine)} of {len(mine)} arms with it did not spike"
                + (
                    "; the run recovered by itself, and may also go on as it is"
                    if recovered
                    else ""
                ),
                "commands": [
                    *_commands(run, plan, name, cause, settings, is_last_segment),
                    again,
                ],
            }
    if cause == "state":
        where, branch = shlex.quote(run), f"cure-{plan.onset}"
        return {
            "treatment": "an earlier state",
            "why": f"with the state before step {plan.healthy} and other data it does not spike, "
            "and no treatment of this state cured it",
            "commands": [
                f"palm-jax branch run {where} --from {plan.healthy} --until {plan.stop} "
                f"--data-from {plan.stop} --name {branch} --checkpoints "
                f"--reason 'spike at step {plan.onset}: state'",
                f"palm-jax branch promote {where} {branch} "
                f"--reason 'spike at step {plan.onset}: state'",
                again,
            ],
        }
    why = "no treatment that was tried cured it" if scored else "none was tried"
    return {"treatment": "none", "why": why, "commands": []}


def _commands(
    run: str, plan: Plan, name: str, cause: str, settings: config.Config, is_last_segment: bool
) -> list[str]:
    where, reason = shlex.quote(run), shlex.quote(f"spike at step {plan.onset}: {cause}")
    treatment = next(a for a in plan.arms if a.name.startswith(f"D {name} "))
    changes = [*treatment.overrides]
    if treatment.rate_scale != 1:
        changes += rate_overrides(settings.schedule, treatment.rate_scale)
    if treatment.feed == "excluded":
        changes.append(f"--exclude {plan.fork}:{plan.window_stop}")
    if is_last_segment and treatment.update_count is None:
        return [
            f"palm-jax intervene {where} --at {plan.fork} {' '.join(changes)} --reason {reason}"
        ]
    count = treatment.update_count
    if count is not None:
        changes.append(f"--update-count {count}")
    branch = f"cure-{plan.onset}"
    return [
        f"palm-jax branch run {where} --segment {plan.segment} --from {plan.fork} --until "
        f"{plan.stop} {' '.join(changes)} --name {branch} --checkpoints --reason {reason}",
        f"palm-jax branch promote {where} {branch} --reason {reason}",
    ]
