"""The cause that replays and the arms' votes leave.

All arms go over the same steps. N, the placebo, has the run's own state and data, permuted within
batches: training is chaotic, and if so small a change cures a spike no other arm means anything.
So N, and not the one replay, is what other arms are put beside.

  C  the run's state, other data          E  an older state, all-new data
  B  the window's data, an earlier state  half rate  E at half the rate

PaLM's case (section 5.1) is `combination`: neither these data nor this state alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from palm_jax.diagnosis.votes import Votes

Cause = Literal[
    "nondeterministic",
    "corrupted",
    "hard batch",
    "chance",
    "recipe",
    "state",
    "data",
    "combination",
    "inconclusive",
]
ARMS = ("N", "C", "B", "E", "half rate")


@dataclasses.dataclass(frozen=True)
class Replays:
    """Two replays, A1 and A2, of the steps over the spike, from one state."""

    first_difference: str | None  # between the two: step and field
    from_record: str | None  # between both and the logbook
    hurt: bool  # whether the probe's loss spiked


@dataclasses.dataclass(frozen=True)
class Verdict:
    cause: Cause
    because: str
    next_arms: tuple[str, ...] = ()  # of which more replicates would decide


def verdict(replays: Replays, votes: Mapping[str, Votes]) -> Verdict:
    """The first cause in the order of the module's Cause that the evidence is clear about.

    Args:
      votes: by arm; an arm that lacks was not run.
    """
    if replays.first_difference is not None:
        said = f"two replays from one state differ: {replays.first_difference}"
        return Verdict("nondeterministic", said)
    if replays.from_record is not None:
        said = f"two replays agree and differ from the record: {replays.from_record}"
        return Verdict("corrupted", said)
    if not replays.hurt:
        return Verdict("hard batch", "the loss on held-out sequences did not rise")
    there = {arm: votes.get(arm, Votes(0, 0)) for arm in ARMS}
    placebo = there["N"]
    if placebo.is_calm():
        said = f"with the same sequences permuted, {placebo} spiked"
        return Verdict("chance", said)
    if not placebo.spikes():
        return Verdict("inconclusive", f"of the placebo {placebo} spiked", ("N",))

    def spikes(arm: str) -> bool:
        return there[arm].mostly and there[arm].spikes()

    def calm(arm: str) -> bool:
        return not there[arm].mostly and placebo.clearly_above(there[arm])

    def told(*arms: str) -> str:
        return "; ".join(f"{arm}: {there[arm]} spiked" for arm in ("N", *arms))

    def unclear(*arms: str) -> Verdict:
        open_arms = tuple(arm for arm in arms if not (spikes(arm) or calm(arm)))
        return Verdict("inconclusive", told(*arms), open_arms)

    if spikes("E"):
        if not spikes("C"):
            # All-new data do it to an older state, but other data did not do it to this one.
            return unclear("C", "E")
        if there["E"].clearly_above(there["half rate"]):
            return Verdict("recipe", told("C", "E", "half rate"))
        return unclear("C", "E", "half rate")
    if spikes("C"):
        return Verdict("state", told("C", "E")) if calm("E") else unclear("C", "E")
    if calm("C"):
        # With the spike's state other data are calm: an older state with other data says nothing
        # more, unless these data need this state.
        if spikes("B"):
            return Verdict("data", told("C", "B"))
        if calm("B") and calm("E"):
            return Verdict("combination", told("C", "B", "E"))
        return unclear("B", "E") if calm("B") else unclear("B")
    return unclear("C")
